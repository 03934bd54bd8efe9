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
from noloco_node.errors import config_error
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.config import RunConfig
from noloco_node.storage import atomic_file
from noloco_node.swarm.invite import Invite

RENEW_S = 86400.0
"""A ticket that was asked for is asked for anew when it has no longer to live."""
WORK_S = 120.0
"""For the proof of work, and the answer."""


class RunAccess:
    """What one peer enters a run with, over all of its shifts. `home`: of its identity, where its ticket is kept."""

    def __init__(
        self, invite: Invite, rights: Right, home: Path | None, unix_time: Callable[[], float] = time.time
    ) -> None:
        self.invite, self._rights, self._home, self._unix_time = invite, rights, home, unix_time
        self._state = None if invite.credential is None else AdmissionState(invite.digest, unix_time)

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
        return admitted

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
        identity = None if home is None else home / "identity.key"
        own_key = None if identity is None or not identity.exists() else read_key(identity)
        try:
            ticket = self.invite.credential.ticket(self.invite.digest, me, self._rights, self._unix_time(), own_key)
        except ValueError as error:
            raise not_admitted(str(error)) from None
        if ticket is not None:
            return ticket
        kept = home / "ticket" if home is not None and Right.TRAIN in self._rights else None
        ticket = None if kept is None else self._kept_ticket(kept, me)
        if ticket is None:
            ticket = await self._ask(network)
            if kept is not None:
                atomic_file.write_whole(kept, self.invite.digest.encode() + b"\n" + ticket)
        return ticket

    def _kept_ticket(self, path: Path, me: str) -> bytes | None:
        """Return the ticket that was given to us before, unless it is another peer's or run's, or expires soon."""
        try:
            run, _, ticket = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        chain = decode(ticket)
        if run != self.invite.digest.encode() or chain is None or chain[-1].subject != key_of(me):
            return None
        return ticket if min(link.until for link in chain) > self._unix_time() + RENEW_S else None

    async def _ask(self, network: PeerNetwork) -> bytes:
        """Ask the bootstrap peers for a ticket; `UserError` where none of them gives one."""
        trains, run = Right.TRAIN in self._rights, self.invite.digest
        answers: list[str] = []
        nonce = await asyncio.to_thread(work, run, network.peer_id) if trains else 0
        for peer in dict.fromkeys(self.invite.peers):
            try:
                async with (
                    asyncio.timeout(WORK_S),
                    network.talk(peer, ticket_service.TOPIC, ticket_service.SCHEMA) as conversation,
                ):
                    await conversation.send(TicketRequest(nonce=nonce, trains=trains))
                    reply = await conversation.receive()
            except (ConnectionError, TimeoutError) as error:
                answers.append(f"{peer}: {error or type(error).__name__}")
                continue
            if isinstance(reply, TicketReply) and reply.ticket:
                return reply.ticket[:TICKET_BYTES]
            refusal = reply.refusal[:200] if isinstance(reply, TicketReply) else "no ticket"
            answers.append(f"{peer}: {''.join(letter for letter in refusal if letter.isprintable())}")
        raise not_admitted("\n       ".join(answers) or "the invite names nobody to ask")
