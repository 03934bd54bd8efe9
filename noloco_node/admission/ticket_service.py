"""A signing peer gives tickets by the rule of the run, to newcomers and to members whose ticket expires.

In an open run a peer gets one that asks with an invite and a proof of work, within bounds. In other runs a peer gets
one that the owner's list names, for as long as the list says: an owner who prolongs a member there (`noloco-node
members invite PEER`) need not send it anything. A delegate on the list gets the right to sign anew in every run.

A ticket that only lets a peer look costs little work, and has bounds of its own: passing identities are many, and leave
those that train their share.

The bounds are by address prefix (/24 of IPv4, /48 of IPv6), over time: making identities is free, coming from many
networks is not. Where more prefixes ask than are remembered, those of one network (/16, /32) share a bound, so a person
who has many prefixes of one network neither forgets a bound nor shuts others out. Peers that come through relays show
no address of their own, and share one bound.

The work is a number that is hard to find and easy to check: a second or so of a core, for this run and this peer id
alone. That is nothing to one peer and a nuisance to thousands; the bounds hold back more than the work does.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from typing import NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import LOOK_S, MEMBER, Chain, Right, encode, extended, key_of
from noloco_node.network.bans import address_prefix
from noloco_node.network.calls import patient
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, Violation
from noloco_node.units import Count, format_utc

TOPIC = "ticket"
PATIENCE_S = 20.0
TICKETS_A_PREFIX = 32
REFILL_S = 600.0  # after so long a prefix may have one ticket more
LOOKS_A_PREFIX, LOOK_REFILL_S = 64, 60.0  # the same bounds for tickets that only let a peer look
WORK_BITS = 20
LOOK_BITS = 14  # for a ticket that only lets a peer look: some hundredths of a second
OPEN_DAYS = 14  # a ticket of an open run lasts so long. Its holder asks for another one after half of that (`RENEW_S`)
MOST_PREFIXES = 4096  # remembered at a time, and as many networks
LOOKED_AT = 64  # prefixes that are looked at to make room for another


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketRequest:
    """A ticket for me, please; `nonce`: the work done for it. `trains`: or only to look."""

    nonce: Count
    trains: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketReply:
    """The ticket, encoded; empty with a `refusal`."""

    ticket: bytes
    refusal: str


SCHEMA = Schema({TicketRequest: MessageSpec("TicketRequest"), TicketReply: MessageSpec("TicketReply")})

Sign: TypeAlias = Callable[[str, str, Right, int], bytes]
"""Returns a ticket of a run for a peer, with rights until a time (unix seconds); ValueError where it can sign none."""


class TicketSigner(NamedTuple):
    """A key that may sign tickets, and the chain that says so: none for the owner's own."""

    key: Ed25519PrivateKey
    chain: Chain = ()

    def ticket(self, run: str, peer: str, rights: Right, until: int) -> bytes:
        subject = key_of(peer)
        if subject is None:
            raise ValueError(f"{peer} is no Ed25519 peer id")
        return encode(extended(self.chain, self.key, run, rights, until, subject))


class Quota:
    """How much each address prefix, or each peer, may still have; one that has its whole share again is forgotten."""

    def __init__(self, most: int = TICKETS_A_PREFIX, refill_s: float = REFILL_S) -> None:
        self._most, self._refill_s = float(most), refill_s
        self._left: list[OrderedDict[str, tuple[float, float]]] = [OrderedDict(), OrderedDict(), OrderedDict()]
        """By name, by network, and of all others: what is left, and when that was worked out (seconds)."""

    def take(self, name: str, now_s: float, amount: float = 1.0) -> bool:
        """Take so much; say whether there was so much. A clock that was set back takes nothing away."""
        for known, counted in zip(self._left, (name, network_of(name), "others"), strict=True):
            if counted in known or self._has_room(known, now_s):
                left = self._left_now(known.pop(counted, (self._most, now_s)), now_s)
                known[counted] = left - amount * (left >= amount), now_s
                return left >= amount
        raise AssertionError("the others are one name, for which there is room")

    def _has_room(self, known: OrderedDict[str, tuple[float, float]], now_s: float) -> bool:
        """Forget what no longer bounds anybody, of the names that have not asked for longest."""
        for name in list(itertools.islice(known, LOOKED_AT)) if len(known) >= MOST_PREFIXES else ():
            if self._left_now(known[name], now_s) >= self._most:
                del known[name]
        return len(known) < MOST_PREFIXES

    def _left_now(self, known: tuple[float, float], now_s: float) -> float:
        left, at_s = known
        return min(self._most, left + max(0.0, now_s - at_s) / self._refill_s)


def prefix_of(origin: str) -> str:
    """Return the prefix of the address that a peer comes from (a multiaddr); `relayed` where it shows none."""
    return str(address_prefix(origin) or "relayed")


def network_of(prefix: str) -> str:
    """Return the network, /16 or /32, that a prefix is part of; the name itself where it is no address."""
    try:
        found = ip_network(prefix)
    except ValueError:
        return prefix
    return str(found.supernet(new_prefix=16 if found.version == 4 else 32))


class TicketService:
    """Answers the topic.

    `named_until`: until when the owner lets a key take part; None: the run is open. `signs_until`: until when it lets a
    key sign tickets too, 0 for most keys; asked for only where `sign` has the owner's key.
    """

    def __init__(
        self,
        state: AdmissionState,
        sign: Sign,
        unix_time: Callable[[], float],
        named_until: Callable[[bytes], int] | None = None,
        signs_until: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        self._state, self._sign, self._unix_time = state, sign, unix_time
        self._named_until, self._signs_until = named_until, signs_until
        self._quota, self._looks = Quota(), Quota(LOOKS_A_PREFIX, LOOK_REFILL_S)

    async def answer(self, conversation: Conversation) -> None:
        async with patient(conversation, PATIENCE_S):
            request = await conversation.receive()
            if not isinstance(request, TicketRequest):
                raise Violation("a caller about tickets asks for one")
            ticket, refusal = self._decide(conversation, request)
            await conversation.send(TicketReply(ticket=ticket, refusal=refusal))

    def _decide(self, conversation: Conversation, request: TicketRequest) -> tuple[bytes, str]:
        peer, unix_s = conversation.peer, self._unix_time()
        key = key_of(peer)
        if key is None:
            return b"", "its identity is not an Ed25519 key"
        if out := self._state.shut_out(peer):
            return b"", out
        signs_until = self._signs_until(key)
        if request.trains and signs_until > unix_s:
            return self._signed(peer, MEMBER | Right.SIGN, signs_until)
        if self._named_until is not None:
            until = self._named_until(key)
            if until <= unix_s:
                ended = f"the owner of the run named it until {format_utc(until)}, and for no longer"
                return b"", ended if until else "the owner of the run has not named it"
            return self._signed(peer, MEMBER if request.trains else Right.LOOK, until)
        refusal = self._open_refusal(conversation, request, unix_s)
        if refusal:
            return b"", refusal
        if request.trains:
            return self._signed(peer, MEMBER, int(unix_s) + OPEN_DAYS * 86400)
        return self._signed(peer, Right.LOOK, int(unix_s) + LOOK_S)

    def _open_refusal(self, conversation: Conversation, request: TicketRequest, unix_s: float) -> str:
        """Say why an open run gives a peer no ticket, empty where it gives one."""
        run, peer = self._state.run, conversation.peer
        if not is_work(run, peer, request.nonce, WORK_BITS if request.trains else LOOK_BITS):
            return "the work for a ticket was not done"
        right, quota = (Right.TRAIN, self._quota) if request.trains else (Right.LOOK, self._looks)
        if right in self._state.rights(peer) or quota.take(prefix_of(conversation.origin), unix_s):
            return ""
        most, refill_s = (TICKETS_A_PREFIX, REFILL_S) if request.trains else (LOOKS_A_PREFIX, LOOK_REFILL_S)
        return f"its network has had {most} tickets; one more every {refill_s / 60:.0f} minutes"

    def _signed(self, peer: str, rights: Right, until: int) -> tuple[bytes, str]:
        try:
            return self._sign(self._state.run, peer, rights, until), ""
        except ValueError as error:
            return b"", str(error)


def is_work(run: str, peer: str, nonce: int, bits: int) -> bool:
    return 0 <= nonce < 2**64 and _value(_begun(run, peer), nonce) < 2 ** (64 - bits)


def work(run: str, peer: str, bits: int = WORK_BITS) -> int:
    """Find a good number; takes 2 ** bits attempts on average."""
    begun, bound = _begun(run, peer), 2 ** (64 - bits)
    return next(nonce for nonce in itertools.count() if _value(begun, nonce) < bound)


def _begun(run: str, peer: str) -> bytes:
    return hashlib.sha256(f"noloco work\0{run}\0{peer}".encode()).digest()


def _value(begun: bytes, nonce: int) -> int:
    return int.from_bytes(hashlib.sha256(begun + nonce.to_bytes(8)).digest()[:8])
