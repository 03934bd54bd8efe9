"""How one peer gets into the run of an invite: by the invite alone or, where the run has an owner, by a ticket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.admitted_network import AdmittedNetwork, not_admitted
from noloco_node.admission.peer_keys import key_of, read_key
from noloco_node.admission.proof_of_work import work
from noloco_node.admission.ticket import TICKET_BYTES, Right, decode
from noloco_node.admission.ticket_service import TicketReply, TicketRequest
from noloco_node.errors import UserError, config_error
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.question import ask
from noloco_node.run.config import RunConfig
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.invite import Invite
from noloco_node.units import format_duration

RENEW_S = 86400.0
"""A ticket is asked for anew when it has no longer to live."""
MOST_PAUSE_S, LEAST_PAUSE_S = 3600.0, 30.0
"""Between two looks at how long ours still lives, or two requests for another: a quarter of what is left of it."""
WORK_S = 120.0
"""For the proof of work, and the answer."""


class RunAccess:
    """What one peer enters a run with, over all of its shifts. `home`: of its identity, where its ticket is kept."""

    def __init__(
        self, invite: Invite, rights: Right, home: Path | None, unix_time: Callable[[], float] = time.time
    ) -> None:
        self.invite, self._rights, self._home, self._unix_time = invite, rights, home, unix_time
        self._state = None if invite.credential is None else AdmissionState(invite.digest, unix_time)
        self._nonce: int | None = None
        """The work for a ticket, once it is done."""
        self._entered: tuple[PeerNetwork, AdmittedNetwork] | None = None
        """The network as we came to it, and as a member has it."""

    @property
    def accepts(self) -> Callable[[str, bytes], bool] | None:
        """Which records of others are to be kept, by peer and value; None: all."""
        return None if self._state is None else self._state.accepts

    async def enter(self, network: PeerNetwork) -> PeerNetwork:
        """Return the network as a member of the run has it; `UserError` (NOT_ADMITTED) where we are not let in."""
        if self._state is None:
            return network
        admitted = AdmittedNetwork(network, self._state, await self._ticket(network))
        await admitted.enter(self.invite.peers)
        self._entered = network, admitted
        return admitted

    async def renew(self, say: Callable[[str], None]) -> None:
        """Ask for another ticket, by the rule of the run, whenever ours expires soon; without it we would be out."""
        if self._entered is None:
            return
        network, admitted = self._entered
        until = _until(admitted.ticket)
        while True:
            left_s = until - self._unix_time()
            await asyncio.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, left_s - RENEW_S, left_s / 4)))
            if until - self._unix_time() > RENEW_S:
                continue
            try:
                ticket = await self._ask(network)
            except UserError as refusal:
                left = format_duration(max(0.0, until - self._unix_time()))
                say(f"our ticket expires in {left}, and nobody gives us another: {refusal.why.splitlines()[0]}")
                continue
            if _until(ticket) > until:
                until = _until(ticket)
                admitted.ticket = ticket
                self._keep(ticket)
                say(f"we have a new ticket, for {format_duration(until - self._unix_time())}")

    def pin(self, run: RunConfig) -> None:
        """Take from the run file who the owner is, as soon as it is there; `UserError` where the invite is of no run
        with an owner.
        """
        if self._state is None:
            return
        if run.admission.owner is None:
            raise config_error(
                "The invite holds a credential, and the run has no owner.",
                "nobody signs tickets for it",
                "another invite",
            )
        self._state.pin(bytes.fromhex(run.admission.owner), run.admission.rule)

    async def _ticket(self, network: PeerNetwork) -> bytes:
        assert self.invite.credential is not None
        me, home = network.peer_id, self._home
        identity = None if home is None else HomePaths(home).identity
        own_key = None if identity is None or not identity.exists() else read_key(identity)
        try:
            ticket = self.invite.credential.ticket(self.invite.digest, me, self._rights, self._unix_time(), own_key)
        except ValueError as error:
            raise not_admitted(str(error)) from None
        found = [each for each in (ticket, self._kept_ticket(me)) if each is not None]
        best = max(found, key=_until, default=b"")
        # The invite's own is good to its end; who asks for one does so in time.
        if best and _until(best) > self._unix_time() + (0.0 if best == ticket else RENEW_S):
            return best
        try:
            asked = await self._ask(network)
        except UserError:
            if best:
                return best
            raise
        self._keep(asked)
        return asked

    @property
    def _ticket_file(self) -> Path | None:
        if self._home is None or Right.TRAIN not in self._rights:
            return None
        return HomePaths(self._home).run(self.invite.digest).ticket

    def _keep(self, ticket: bytes) -> None:
        if self._ticket_file is not None:
            atomic_file.make_directory(self._ticket_file.parent)
            atomic_file.write_whole(self._ticket_file, self.invite.digest.encode() + b"\n" + ticket)

    def _kept_ticket(self, me: str) -> bytes | None:
        """Return the ticket that was given to us before, unless it is another peer's or run's."""
        try:
            run, _, ticket = (b"" if self._ticket_file is None else self._ticket_file.read_bytes()).partition(b"\n")
        except OSError:
            return None
        chain = decode(ticket)
        if run != self.invite.digest.encode() or chain is None or chain[-1].subject != key_of(me):
            return None
        return ticket

    async def _ask(self, network: PeerNetwork) -> bytes:
        """Ask the bootstrap peers for a ticket; `UserError` where none of them gives one."""
        trains, run = Right.TRAIN in self._rights, self.invite.digest
        answers: list[str] = []
        if trains and self._nonce is None:
            self._nonce = await asyncio.to_thread(work, run, network.peer_id)
        request = TicketRequest(nonce=self._nonce or 0, trains=trains)
        for peer in dict.fromkeys(self.invite.peers):
            try:
                reply = await ask(
                    network, peer, ticket_service.TOPIC, ticket_service.SCHEMA, request, TicketReply, WORK_S
                )
            except ConnectionError as error:
                answers.append(f"{peer}: {error}")
                continue
            if reply.ticket:
                return reply.ticket[:TICKET_BYTES]
            answers.append(f"{peer}: {''.join(letter for letter in reply.refusal[:200] if letter.isprintable())}")
        raise not_admitted("\n       ".join(answers) or "the invite names nobody to ask")


def _until(ticket: bytes) -> int:
    """Return when a ticket of our own expires (Unix seconds)."""
    return min((link.until for link in decode(ticket) or ()), default=0)
