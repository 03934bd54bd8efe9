"""Which peers a bootstrap peer lets in: all peers or, in a run with an owner, peers that have a ticket."""

from __future__ import annotations

import asyncio
import shlex
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_hook import AdmissionHook
from noloco_node.admission.admission_state import AdmissionState, HeldTicket
from noloco_node.admission.owner_files import TICKET, decode_members, key_file, load_key, public_half, read_members
from noloco_node.admission.ticket import MEMBER, InviteCredential, Right, decode, read_key
from noloco_node.admission.ticket_service import Sign, TicketService, TicketSigner
from noloco_node.errors import UserError, config_error
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.run.config import AdmissionConfig
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.invite import Invite
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background, supervised
from noloco_node.terminal import say, warn

WATCH_S = 5.0
HOST_S = 10 * 365 * 86400
RULES = {
    "open": "open: whoever holds this invite gets a ticket here, a bounded number for each network",
    "invited": "invited: each peer needs an invite of its own",
    "listed": "listed: each peer is named by its id",
}


class HostedAdmissions:
    """The admissions that a bootstrap peer does for the owner of a run; without an owner it lets all peers in.

    `run_file`: the owner's key and list, or the list alone, lie beside it. `invite`: brings a delegate's ticket.
    """

    def __init__(self, recipe: RunFileText, run_file: Path, identity: Path, invite: Invite | None) -> None:
        self._recipe, self._run_file, self._identity, self._invite = recipe, run_file, identity, invite
        self._admission = recipe.run.admission
        self._state = AdmissionState(recipe.digest, CLOCK.unix_s)
        self._list = b""
        """The owner's list as last read whole. A time of change would not tell two changes of one moment apart."""
        self._named: dict[str, int] = {}
        """The keys for which the owner has signed tickets, each with the end of its ticket."""
        self._signs: dict[str, int] = {}
        """The keys that may sign tickets, likewise."""
        self._access: RunAccess | None = None
        """A delegate's own access; None where the owner's key is here."""
        if self._admission.owner_key is not None:
            self._state.pin(self._admission.owner_key, self._admission.rule)
            self._take_revocations(self._read_list())

    @property
    def state(self) -> AdmissionState | None:
        """The admissions that this peer knows; None in a run without an owner."""
        return None if self._admission.owner is None else self._state

    @property
    def credential(self) -> InviteCredential | None:
        return InviteCredential() if self._admission.owner is not None and self._admission.rule == "open" else None

    @property
    def rule(self) -> str:
        if self._admission.owner is None:
            return "open to everybody who holds this invite, for the run has no owner"
        return RULES[self._admission.rule]

    def advice(self, invite: str, usable: str) -> str:
        """Say how a peer joins. `usable`: from where the invite works."""
        if self._admission.owner is None or self._admission.rule == "open":
            if self._recipe.run.model.is_foreign:
                return f"to join {usable}: the program that builds the module (docs/python.md), with {invite}"
            return f"to join {usable}: noloco-node join {invite}"
        who = " PEER" if self._admission.rule == "listed" else ""
        run = shlex.quote(str(self._run_file))
        return f"to let a peer in: noloco-node members invite{who} --run {run} --invite {invite}"

    async def admitted(self, network: PeerNetwork) -> PeerNetwork:
        """Return the network as a member uses it, and serve tickets if we may sign them."""
        if self._admission.owner is None:
            return network
        owns = key_file(self._run_file).is_file()
        if owns:
            owner = TicketSigner(await asyncio.to_thread(load_owner_key, self._run_file, self._admission))
            ticket = owner.ticket(self._recipe.digest, network.peer_id, MEMBER, int(CLOCK.earliest_s()) + HOST_S)
            admitted: PeerNetwork = HookedNetwork(network, AdmissionHook(network, self._state, ticket))
            sign: Sign | None = owner.ticket
        else:
            admitted, sign = await self._as_delegate(network)
        if sign is not None:
            named = None if self._admission.rule == "open" else lambda key: self._named.get(key.hex(), 0)
            signs = (lambda key: self._signs.get(key.hex(), 0)) if owns else lambda _: 0
            service = TicketService(self._state, sign, CLOCK.earliest_s, named, signs)
            await network.serve(ticket_service.TOPIC, ticket_service.SCHEMA, service.answer)
        return admitted

    async def watch(self) -> NoReturn:
        """Read the owner's list whenever it changes; renew a delegate's ticket before it expires.

        A list that cannot be read is said once, and tried again until it can.
        """
        told = ""
        own = [] if self._access is None else [partial(self._access.renew, say)]
        async with background(*(supervised("renewing our ticket", renew, warn) for renew in own)):
            while True:
                await asyncio.sleep(WATCH_S)
                if self._admission.owner is not None:
                    try:
                        self._take_revocations(await asyncio.to_thread(self._read_list))
                        told = ""
                    except UserError as error:
                        line = f"{error.what} {error.why}; what was read before still holds"
                        if line != told:
                            warn(line)
                        told = line

    def _read_list(self) -> bytes:
        """Note whom the owner's list names, where it has changed; return its revocations, empty where it has not."""
        raw = read_members(self._run_file)
        if raw == self._list:
            return b""
        members = decode_members(self._run_file, raw)
        self._list = raw
        issued = [entry for entry in members.issued if entry.kind == TICKET]
        issued.sort(key=attrgetter("until"))
        self._named = {entry.key: entry.until for entry in issued}
        self._signs = {entry.key: entry.until for entry in issued if entry.may_sign}
        return members.signed

    def _take_revocations(self, signed: bytes) -> None:
        """Take them in the thread of the loop, which takes others' lists: an older one must not follow a newer one."""
        if self._state.take_revocations(signed) and (found := self._state.revocations) is not None:
            say(f"the owner's list number {found.number} holds: {len(found.revoked)} shut out")

    async def _as_delegate(self, network: PeerNetwork) -> tuple[PeerNetwork, Sign | None]:
        """Enter by the ticket of our invite, as a node does; `UserError` where the invite brings none."""
        own_key = await asyncio.to_thread(read_key, self._identity)
        if self._invite is None or self._invite.credential is None or not self._invite.credential.chain or not own_key:
            raise config_error(
                "This bootstrap peer could let nobody in.",
                f"the run has an owner, whose key is not at {key_file(self._run_file)}, and no invite names this peer",
                "start it where the owner's key lies, or ask the owner for an invite: noloco-node members invite PEER "
                "--may-sign",
            )
        self._access = RunAccess(self._invite, MEMBER, self._identity.parent, CLOCK.unix_s, state=self._state)
        admitted, admission = await self._access.enter(network), self._access.admission
        assert admission is not None
        held = admission.held
        return admitted, DelegateSigner(own_key, held).ticket if Right.SIGN & held.rights else None


class DelegateSigner(NamedTuple):
    """Signs tickets with a delegate's key, as long as the delegate's own ticket allows that."""

    key: Ed25519PrivateKey
    held: HeldTicket

    def ticket(self, run: str, peer: str, rights: Right, until: int) -> bytes:
        """Return a ticket for a peer; ValueError if we may sign none any more."""
        chain = decode(self.held.raw)
        if chain is None or self.held.is_expired or not Right.SIGN & self.held.rights:
            raise ValueError("this bootstrap peer may sign tickets no longer")
        return TicketSigner(self.key, chain).ticket(run, peer, rights, until)


def load_owner_key(run_file: Path, admission: AdmissionConfig) -> Ed25519PrivateKey:
    """Return the owner's key, which lies beside the run file; `UserError` where it is another's, or not there."""
    key = load_key(run_file)
    if public_half(key) != admission.owner:
        raise config_error(
            f"{key_file(run_file)} is not the key of this run's owner.",
            "its public half is not the run file's admission.owner",
            "put the right key there, give the run file whose key it is, or put the public half of this key into the "
            "run file: that is another run",
        )
    return key
