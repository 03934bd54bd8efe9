"""A signing peer gives tickets by the rule of the run, to newcomers and to members whose ticket expires.

In an open run to whoever asks with an invite and a proof of work, within bounds. In the others to whom the owner has
named, for as long as the owner's list says: who prolongs a member there (`noloco-node members invite PEER`) need not
send it anything.

The bounds are by address prefix (/24 of IPv4, /48 of IPv6), over time: making identities is free, coming from many
networks is not. Whoever comes through a relay shows no address of its own, and all who do share one bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.invite_credential import LOOK_S
from noloco_node.admission.peer_keys import key_of
from noloco_node.admission.proof_of_work import is_work
from noloco_node.admission.ticket import MEMBER, Chain, Right, encode, extended
from noloco_node.network.bans import address_prefix
from noloco_node.network.interface import Conversation
from noloco_node.network.question import patient
from noloco_node.network.schema import MessageSpec, Schema, Violation
from noloco_node.units import Count

TOPIC = "ticket"
PATIENCE_S = 20.0
TICKETS_A_PREFIX = 32
REFILL_S = 600.0
"""After so long a prefix may have one ticket more."""
OPEN_DAYS = 365
MOST_PREFIXES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketRequest:
    """A ticket for me, please; `nonce`: the work done for it (none to look). `trains`: or only to look."""

    nonce: Count
    trains: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketReply:
    """The ticket, encoded; empty with a `refusal`."""

    ticket: bytes
    refusal: str


SCHEMA = Schema({TicketRequest: MessageSpec("TicketRequest"), TicketReply: MessageSpec("TicketReply")})


class TicketSigner(NamedTuple):
    """A key that may sign tickets, and the chain that says so: none for the owner's own."""

    key: Ed25519PrivateKey
    chain: Chain = ()

    def ticket(self, run: str, peer: str, rights: Right, until: int) -> bytes:
        """Return a ticket for a peer; ValueError for an id that is no public key."""
        subject = key_of(peer)
        if subject is None:
            raise ValueError(f"{peer} is no Ed25519 peer id")
        return encode(extended(self.chain, self.key, run, rights, until, subject))


class PrefixQuota:
    """How many tickets each address prefix may still have; of the least recent prefixes it forgets."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tickets left, and when that was worked out (seconds)."""

    def take(self, prefix: str, now_s: float) -> bool:
        """Take one; say whether there was one."""
        left, at_s = self._left.pop(prefix, (float(TICKETS_A_PREFIX), now_s))
        left = min(float(TICKETS_A_PREFIX), left + (now_s - at_s) / REFILL_S)
        taken = left >= 1.0
        self._left[prefix] = (left - 1.0 if taken else left), now_s
        if len(self._left) > MOST_PREFIXES:
            self._left.popitem(last=False)
        return taken


def prefix_of(origin: str) -> str:
    """Return the prefix of the address that a peer comes from (a multiaddr); `relayed` where it shows none."""
    return str(address_prefix(origin) or "relayed")


class TicketService:
    """Answers the topic. `origin_of`: the multiaddr that a caller comes from.

    `named_until`: until when the owner lets a key take part; None: the run is open.
    """

    def __init__(
        self,
        state: AdmissionState,
        signer: TicketSigner,
        unix_time: Callable[[], float],
        origin_of: Callable[[Conversation], str],
        named_until: Callable[[bytes], int] | None = None,
    ) -> None:
        self._state, self._signer, self._unix_time, self._origin_of = state, signer, unix_time, origin_of
        self._named_until = named_until
        self._quota = PrefixQuota()

    async def answer(self, conversation: Conversation) -> None:
        """Answer one request."""
        async with patient(conversation, PATIENCE_S):
            request = await conversation.receive()
            if not isinstance(request, TicketRequest):
                raise Violation("whoever comes asks for a ticket")
            ticket, refusal = self._decide(conversation, request)
            await conversation.send(TicketReply(ticket=ticket, refusal=refusal))

    def _decide(self, conversation: Conversation, request: TicketRequest) -> tuple[bytes, str]:
        run, peer, unix_s = self._state.run, conversation.peer, self._unix_time()
        key = key_of(peer)
        if key is None:
            return b"", "its identity is not an Ed25519 key"
        if self._state.is_revoked(peer):
            return b"", "the owner of the run has shut it out"
        if self._named_until is not None:
            until = self._named_until(key)
            if until <= unix_s:
                return b"", "the owner of the run has not named it, or not for longer"
            return self._signer.ticket(run, peer, MEMBER if request.trains else Right.LOOK, until), ""
        if not request.trains:
            return self._signer.ticket(run, peer, Right.LOOK, int(unix_s) + LOOK_S), ""
        if not is_work(run, peer, request.nonce):
            return b"", "the work for a ticket was not done"
        is_member = Right.TRAIN in self._state.rights(peer)
        if not is_member and not self._quota.take(prefix_of(self._origin_of(conversation)), unix_s):
            return b"", f"its network has had {TICKETS_A_PREFIX} tickets; one more every {REFILL_S / 60:.0f} minutes"
        return self._signer.ticket(run, peer, MEMBER, int(unix_s) + OPEN_DAYS * 86400), ""
