"""How a peer gets into a run: `connected` opens the network, `RunAccess` enters it, `visited` only looks at it.

A run without an owner lets in every peer that has an invite. In a run with an owner a peer shows a ticket as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_hook import MOST_TRIES, AdmissionHook
from noloco_node.admission.admission_state import (
    EXPIRED,
    AdmissionState,
    HeldTicket,
    no_ticket,
    not_admitted,
    told,
    until_of,
)
from noloco_node.admission.owner_files import key_file, load_key
from noloco_node.admission.ticket import LOOK_S, TICKET_BYTES, InviteCredential, Right, decode, key_of, read_key
from noloco_node.admission.ticket_service import LOOK_BITS, TicketReply, TicketRequest, TicketSigner, work
from noloco_node.errors import Exit, UserError, config_error, reason_of
from noloco_node.libp2p.addresses import KnownPeers
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.network.calls import HookedNetwork, ask
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import read_run_text
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.swarm import invite as invites
from noloco_node.swarm.invite import Invite
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.run_distribution import RunFileText, fetch
from noloco_node.tasks import background
from noloco_node.terminal import say
from noloco_node.units import LATEST_UNIX_S

SHARDS_SEEN = 8
"""Shards of a large stage that a visitor reads: two standard errors of its size are 7 to 18 %."""
WORK_S = 120.0
"""Deadline of a bootstrap peer's answer to a request for a ticket."""


class RunAccess:
    """How one peer enters a run, over all of its sessions. `home`: holds its identity, and keeps its ticket.

    `owner_key`: of the run's owner, who needs no invite to look. `state`: admissions that we know already.
    """

    def __init__(
        self,
        invite: Invite,
        rights: Right,
        home: Path | None,
        unix_time: Callable[[], float] = CLOCK.unix_s,
        *,
        owner_key: Ed25519PrivateKey | None = None,
        state: AdmissionState | None = None,
    ) -> None:
        self.invite, self._rights, self._home, self._unix_time = invite, rights, home, unix_time
        self._owner_key = owner_key
        has_owner = invite.credential is not None or owner_key is not None
        self.state = state or (AdmissionState(invite.digest, unix_time) if has_owner else None)
        """The admissions that this peer knows; None in a run without an owner."""
        self._nonce: int | None = None
        """The proof of work for a ticket, once we have it."""
        self._gave: set[str] = set()
        """Peers that have given us tickets: if the swarm refuses one, we ask other peers first."""
        self.admission: AdmissionHook | None = None
        """The hook of the network that we entered last; None in a run without an owner."""

    async def enter(self, network: PeerNetwork) -> PeerNetwork:
        """Return the network as a member of the run uses it; `UserError` (NOT_ADMITTED) if the run refuses us."""
        if self.state is None:
            return network
        me = network.peer_id
        self._check_identity(me)
        held = HeldTicket(self._unix_time, lambda: self._own_tickets(me), lambda: self._ask(network), self._keep)
        await held.begin()
        admission = AdmissionHook(network, self.state, held)
        others = [each for each in self.invite.peers if each != me]
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                await admission.enter(others)
                break
            except UserError as refusal:
                if not tries_left:
                    raise
                try:
                    await held.another(refusal.why)
                except UserError as error:
                    if error.code is Exit.UNREACHABLE:  # the peers that do answer have said why
                        raise refusal from error
                    raise
        self.admission = admission
        return HookedNetwork(network, admission)

    async def renew(self, say: Callable[[str], None]) -> None:
        """Keep our ticket known to others; renew it before it expires, by the rule of the run, and say so."""
        if self.admission is not None:
            async with background(self.admission.stay_shown()):
                await self.admission.held.renew(say)

    def pin(self, run: RunConfig) -> None:
        """Take the owner's key from the run file; `UserError` if the run has no owner and the invite a credential."""
        if self.state is None:
            return
        if run.admission.owner_key is None:
            raise config_error(
                "The invite holds a credential, and the run has no owner.",
                "nobody signs tickets for it",
                "another invite",
            )
        self.state.pin(run.admission.owner_key, run.admission.rule)

    def take_revocations(self, signed: bytes) -> None:
        """Take the owner's signed list, which the owner has before any peer."""
        if self.state is not None:
            self.state.take_revocations(signed)

    def _check_identity(self, me: str) -> None:
        """Raise `UserError` if the invite is for another identity."""
        try:
            self._of_invite(me)
        except ValueError as error:
            raise not_admitted(str(error)) from None

    def _own_tickets(self, me: str) -> list[bytes]:
        """Return the tickets of the invite and of our home, and one that we sign if we are the owner."""
        found = [self._of_invite(me), self._kept_ticket(me)]
        if self._owner_key is not None:
            until = int(self._unix_time()) + LOOK_S
            found.append(TicketSigner(self._owner_key).ticket(self.invite.digest, me, Right.LOOK, until))
        return [each for each in found if each is not None]

    def _of_invite(self, me: str) -> bytes | None:
        own_key = None if self._home is None else read_key(HomePaths(self._home).identity)
        credential = self.invite.credential or InviteCredential()
        try:
            return credential.ticket(self.invite.digest, me, self._rights, self._unix_time(), own_key)
        except ValueError:
            if self._owner_key is not None:
                return None
            raise

    @property
    def _ticket_file(self) -> Path | None:
        if self._home is None or Right.TRAIN not in self._rights:
            return None
        return HomePaths(self._home).run(self.invite.digest).ticket

    def _keep(self, ticket: bytes) -> None:
        """Keep a ticket for the next start; if the disk refuses, this session uses it all the same."""
        path = self._ticket_file
        if path is None:
            return
        try:
            atomic_file.make_directory(path.parent)
            atomic_file.write(path, ticket)
        except OSError as error:
            say(f"cannot keep our ticket: {reason_of(error)}; we go on, and ask for another one at the next start")

    def _kept_ticket(self, me: str) -> bytes | None:
        """Return the ticket that our home keeps, unless it is another peer's."""
        try:
            ticket = b"" if self._ticket_file is None else self._ticket_file.read_bytes()
        except OSError:
            return None
        chain = decode(ticket)
        return None if chain is None or chain[-1].subject != key_of(me) else ticket

    async def _ask(self, network: PeerNetwork) -> bytes:
        """Ask the bootstrap peers for a ticket; `UserError` NOT_ADMITTED if all refuse, UNREACHABLE if none answers."""
        assert self.state is not None
        me, refusals, silences = network.peer_id, list[str](), list[str]()
        request = TicketRequest(nonce=await self._work(me), trains=Right.TRAIN in self._rights)
        peers = [peer for peer in self.invite.peers if peer != me]
        for peer in sorted(peers, key=self._gave.__contains__):
            try:
                reply = await ask(
                    network, peer, ticket_service.TOPIC, ticket_service.SCHEMA, request, TicketReply, WORK_S
                )
            except ConnectionError as error:
                silences.append(str(error).replace(peer, f"...{peer[-8:]}"))
                continue
            ticket = reply.ticket[:TICKET_BYTES]
            objection = self.state.objection(me, ticket) if ticket and self.state.is_pinned else ""
            if ticket and not objection:
                self._gave.add(peer)
                return ticket
            if objection == EXPIRED:  # by our clock, of which the peer knows nothing
                silences.append(f"the ticket that ...{peer[-8:]} gives us has expired: is this machine's clock right?")
                continue
            refusals.append(reply.refusal or objection)
        if refusals:
            ends = max(map(until_of, self._own_tickets(me)), default=LATEST_UNIX_S)
            why = told(refusals)
            if ends <= self._unix_time():
                day = time.strftime("%Y-%m-%d", time.gmtime(ends))
                why = f"the ticket that you have expired on {day}; {why}"
            raise not_admitted(why)
        raise no_ticket("; ".join(silences) or "the invite names nobody to ask")

    async def _work(self, me: str) -> int:
        """Return the proof of work that a ticket costs; we compute it once."""
        if self._nonce is None and Right.TRAIN in self._rights:
            self._nonce = await asyncio.to_thread(work, self.invite.digest, me)
        elif self._nonce is None:  # some hundredths of a second
            self._nonce = work(self.invite.digest, me, LOOK_BITS)
        return self._nonce


@asynccontextmanager
async def connected(settings: NetworkSettings, met: KnownPeers | None = None) -> AsyncIterator[Libp2pNetwork]:
    """Open the network by the bootstrap peers or, where none of them opens, by the peers that we met before.

    `met`: the peers that earlier networks of this peer met; this one adds those that it meets. The context ends with
    `UserError` should our libp2p daemon die again and again.
    """
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(Libp2pNetwork.open(settings, say, met))
        except UserError as trouble:
            doors = tuple(dict.fromkeys((*settings.bootstrap, *(() if met is None else met.doors()))))
            if trouble.code is not Exit.UNREACHABLE or doors == settings.bootstrap:
                raise
            wider = msgspec.structs.replace(settings, bootstrap=doors)
            network = await stack.enter_async_context(Libp2pNetwork.open(wider, say, met))
            say("no bootstrap peer opened; back by way of peers that we met before")
        async with background(network.wait_daemon()):
            yield network


class Visitor(msgspec.Struct, frozen=True):
    """A peer that looks at a swarm without joining it.

    `allowed`: the directories of this machine that the run file may name. `home`: holds the identity whose ticket the
    visitor shows to a listed run. `run`: a run file; if its owner's key lies beside it, the visitor is the owner.
    """

    allowed: tuple[str, ...] = ()
    home: Path | None = None
    run: Path | None = None

    def owner_key(self, digest: str) -> Ed25519PrivateKey | None:
        """Return the key of the owner of the run with this digest, if it is here."""
        if self.run is None or not (self.run.is_file() and key_file(self.run).is_file()):
            return None
        recipe = RunFileText(read_run_text(self.run), str(self.run))
        is_owned = recipe.digest == digest and recipe.run.admission.owner_key is not None
        return load_key(self.run) if is_owned else None


@asynccontextmanager
async def visited(invite: str, visitor: Visitor) -> AsyncIterator[tuple[PeerNetwork, RunFileText, Membership]]:
    """Visit the swarm of an invite without joining it: a new identity, no listening, one look at the roster."""
    parsed = invites.parse(invite)
    access = RunAccess(
        parsed, Right.LOOK, visitor.home, owner_key=await asyncio.to_thread(visitor.owner_key, parsed.digest)
    )
    settings = NetworkSettings(
        run=parsed.digest,
        listen=("/ip4/127.0.0.1/tcp/0",),
        bootstrap=tuple(map(str, parsed.addresses)),
        admission=access.state,
    )
    async with connected(settings) as whole:
        network = HookedNetwork(await access.enter(whole), DialTimeouts())
        recipe = await fetch(network, parsed.peers, parsed.digest, visitor.allowed)
        access.pin(recipe.run)
        membership = recipe.membership(network, SHARDS_SEEN)
        if (await membership.peek()).is_sample:
            # The first reading of a large stage shows how it is divided.
            await membership.peek()
        async with background(access.renew(say)):
            yield network, recipe, membership
