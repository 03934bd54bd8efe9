"""Which peers a bootstrap peer lets in: everybody or, in a run with an owner, peers that have a ticket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_hook import AdmissionHook
from noloco_node.admission.admission_state import AdmissionState, HeldTicket
from noloco_node.admission.owner_files import key_file, load_key, load_members, members_file, public_half
from noloco_node.admission.ticket import MEMBER, InviteCredential, Right, decode, read_key
from noloco_node.admission.ticket_service import SignsTickets, TicketService, TicketSigner
from noloco_node.errors import UserError, config_error
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.invite import Invite
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background
from noloco_node.terminal import say

WATCH_S = 5.0
HOST_S = 10 * 365 * 86400
DELEGATE_EARLY_S = 7 * 86400.0
"""So long before its grant expires a delegate asks for another, and warns: its tickets end with the grant."""
RULES = {
    "open": "open: whoever holds this invite gets a ticket here, a bounded number for each network",
    "invited": "invited: each peer needs an invite of its own",
    "listed": "listed: each peer is named by its id",
}


def _nobody(_: bytes) -> int:
    return 0


class HostedAdmissions:
    """What a bootstrap peer does for the owner of a run; of a run without one it lets everybody in.

    `run_file`: beside which the owner's key and list lie, or the list alone. `invite`: that brings a delegate's ticket.
    """

    def __init__(self, recipe: RunFileText, run_file: Path, identity: Path, invite: Invite | None) -> None:
        self._recipe, self._run_file, self._identity, self._invite = recipe, run_file, identity, invite
        self._admission = recipe.run.admission
        self._state = AdmissionState(recipe.digest, time.time)
        self.accepts = None if self._admission.owner is None else self._state.accepts
        """Which records of others are to be kept, by peer and value; None: all."""
        self._read_at = 0
        self._named: dict[str, int] = {}
        """Until when each key is named that the owner has signed a ticket for."""
        self._signs: dict[str, int] = {}
        """The same of those that may sign tickets."""
        self._access: RunAccess | None = None
        """How a delegate has come in; None where the owner's key lies here."""
        if self._admission.owner is not None:
            self._state.pin(bytes.fromhex(self._admission.owner), self._admission.rule)
            self._read_list()

    @property
    def credential(self) -> InviteCredential | None:
        """What the invite holds that is printed."""
        return InviteCredential() if self._admission.owner is not None and self._admission.rule == "open" else None

    @property
    def rule(self) -> str:
        """Which rule holds, in words."""
        if self._admission.owner is None:
            return "open to everybody who holds this invite, for the run has no owner"
        return RULES[self._admission.rule]

    def advice(self, invite: str, usable: str) -> str:
        """Say how somebody joins; `usable`: from where."""
        if self._admission.owner is None or self._admission.rule == "open":
            return f"to join {usable}: noloco-node join {invite}"
        who = " PEER" if self._admission.rule == "listed" else ""
        return f"to let a peer in: noloco-node members invite{who} --run {self._run_file} --invite {invite}"

    async def admitted(self, network: PeerNetwork) -> PeerNetwork:
        """Return the network as it is to be used, and serve tickets if we may sign them."""
        if self._admission.owner is None:
            return network
        signer: SignsTickets | None
        signs_until: Callable[[bytes], int] = _nobody
        if key_file(self._run_file).is_file():
            owner = TicketSigner(await asyncio.to_thread(self._owner_key))
            ticket = owner.ticket(self._recipe.digest, network.peer_id, MEMBER, int(time.time()) + HOST_S)
            admitted: PeerNetwork = HookedNetwork(network, AdmissionHook(network, self._state, ticket))
            signer = owner
            signs_until = self._signs_until
        else:
            admitted, signer = await self._as_delegate(network)
        if signer is not None:
            named = None if self._admission.rule == "open" else self._named_until
            service = TicketService(self._state, signer, time.time, named, signs_until)
            await network.serve(ticket_service.TOPIC, ticket_service.SCHEMA, service.answer)
        return admitted

    def _named_until(self, key: bytes) -> int:
        """Return until when the owner's list names a peer; 0 where it does not."""
        return self._named.get(key.hex(), 0)

    def _signs_until(self, key: bytes) -> int:
        """Return until when the owner's list lets a peer sign tickets; 0 where it does not."""
        return self._signs.get(key.hex(), 0)

    async def watch(self) -> NoReturn:
        """Take the owner's list over whenever it has changed; renew a delegate's ticket before it expires."""
        async with background(self._renew()):
            while True:
                await asyncio.sleep(WATCH_S)
                if self._admission.owner is not None:
                    try:
                        await asyncio.to_thread(self._read_list)
                    except UserError as error:
                        say(f"{error.what} {error.why}")

    async def _renew(self) -> None:
        if self._access is not None:
            await self._access.renew(say)

    def _read_list(self) -> None:
        path = members_file(self._run_file)
        changed_at = path.stat().st_mtime_ns if path.exists() else 0
        if changed_at != self._read_at:
            self._read_at = changed_at
            members = load_members(self._run_file)
            issued = [entry for entry in members.issued if entry.kind == "ticket"]
            issued.sort(key=attrgetter("until"))
            self._named = {entry.key: entry.until for entry in issued}
            self._signs = {entry.key: entry.until for entry in issued if entry.may_sign}
            if members.signed and self._state.take_revocations(members.signed):
                say(f"the owner's list number {members.number} holds: {len(members.revoked)} shut out")

    def _owner_key(self) -> Ed25519PrivateKey:
        key = load_key(self._run_file)
        if public_half(key) != self._admission.owner:
            raise config_error(
                f"{key_file(self._run_file)} is not the key of this run's owner.",
                "its public half is not the run file's admission.owner",
                "put the right key there, or the public half of this one into the run file: that is another run",
            )
        return key

    async def _as_delegate(self, network: PeerNetwork) -> tuple[PeerNetwork, SignsTickets | None]:
        """Come in by the ticket of our invite, as a node does; `UserError` where it brings none."""
        own_key = await asyncio.to_thread(read_key, self._identity)
        if self._invite is None or self._invite.credential is None or not self._invite.credential.chain or not own_key:
            raise config_error(
                "This bootstrap peer could let nobody in.",
                f"the run has an owner, whose key is not at {key_file(self._run_file)}, and no invite names this peer",
                "start it where the owner's key lies, or ask the owner for an invite: noloco-node members invite PEER "
                "--may-sign",
            )
        self._access = RunAccess(
            self._invite, MEMBER, self._identity.parent, time.time, state=self._state, early_s=DELEGATE_EARLY_S
        )
        admitted, admission = await self._access.enter(network), self._access.admission
        assert admission is not None
        held = admission.held
        return admitted, DelegateSigner(own_key, held) if Right.SIGN & held.rights else None


class DelegateSigner(NamedTuple):
    """Signs tickets with a delegate's key for as long as the ticket that it holds lets it."""

    key: Ed25519PrivateKey
    held: HeldTicket

    def ticket(self, run: str, peer: str, rights: Right, until: int) -> bytes:
        """Return a ticket for a peer; ValueError where we may sign none any more."""
        chain = decode(self.held.raw)
        if chain is None or self.held.is_expired or not Right.SIGN & self.held.rights:
            raise ValueError("this bootstrap peer may sign tickets no longer")
        return TicketSigner(self.key, chain).ticket(run, peer, rights, until)
