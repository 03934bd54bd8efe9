"""Which calls in the DHT are answered, and what goes along with them: hivemind's authorizer, by `CallRules`.

Every request carries a code of its content, and in a run with an owner the caller's ticket. Answers leave out what was
not asked for. Nothing here imports hivemind: its messages are protobuf, of which tests/libp2p/test_hivemind_compat.py
names the fields.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import Right
from noloco_node.libp2p.record_holders import MOST_NAMED, PeerId
from noloco_node.libp2p.short_answers import MOST_VERSIONS, Version, names, record_count, restored, shortened
from noloco_node.network.swarm_clock import CLOCK

PLACE_BYTES = 20  # of a place in the DHT, and of the id of a node
_PEER_BYTES = 64  # of the id of a peer, at most


class CallRules(NamedTuple):
    """Which calls in the DHT are answered: those that carry a code of their content, which follows from the run's id.

    `code`: makes one of a purpose and parts. `admission`: in a run with an owner, the tickets that callers show and our
    own, which goes along with our calls. `may_send`: whether the caller may read so many bytes of records.
    `may_hand_over`: whether one more new neighbour may be given the records that it should keep.
    """

    code: Callable[..., bytes]
    admission: AdmissionState | None = None
    may_send: Callable[[int], bool] = lambda _: True
    may_hand_over: Callable[[], bool] = lambda: True


def node_of(rules: CallRules, peer: bytes) -> bytes:
    """Return the id of a peer's node; a place has as many bytes."""
    return rules.code("node", peer)[:PLACE_BYTES]


CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The peer whose request is being answered; empty where we act by ourselves."""

CALLER_READS: ContextVar[bool | None] = ContextVar("caller_reads", default=None)
"""Whether the peer whose request is being answered asks for records, or for nodes; None where it asks for neither."""

CALLEE: ContextVar[str] = ContextVar("callee", default="")
"""The peer whose node we ask; empty where hivemind asks by itself."""

TOLD_TIME: ContextVar[list[float] | None] = ContextVar("told_time", default=None)
"""Takes the time of day that the answer to our ping tells; None where it does not count."""

KNOWN: ContextVar[Mapping[str, Version] | None] = ContextVar("known", default=None)
"""The versions of records that we have while we ask for others; None while we ask for nodes."""
_READS = b"r"  # in a request for records, before the names of those that we have
_SHOW = b"?"  # in a request to a node that we do not know as a member's: it is to show its ticket


@contextlib.contextmanager
def calling(peer: PeerId) -> Iterator[None]:
    before = CALLEE.set(peer.to_base58())
    try:
        yield
    finally:
        CALLEE.reset(before)


class Authorizer:
    """hivemind's authorizer, by `CallRules`.

    So strangers neither read, nor store, nor are entered as neighbours and given others' records to keep. In a run with
    an owner a peer stores and becomes a neighbour by a ticket to train, and reads by a ticket to look. A ping is
    answered without one: by it a newcomer finds out that this is its run. A node that we do not know as a member's
    shows a ticket to train with its answer: one that shows none has not answered, whoever named it.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules, self._admission = rules, rules.admission

    async def sign_request(self, request: Any, service_public_key: object) -> None:
        request.auth.nonce = os.urandom(16)
        if _is_find(request):
            # hivemind has this field for encryption, which the daemon does.
            known = KNOWN.get()
            request.auth.service_public_key = b"" if known is None else _READS + names(known, request.auth.nonce)
        request.auth.signature = self._code_of(request)
        if self._admission is not None and self._admission.own is not None:
            request.auth.client_access_token.signature = self._admission.own.raw
        if not self._is_member():
            request.auth.client_access_token.public_key = _SHOW

    async def validate_request(self, request: Any) -> bool:
        if not (_has_node_id(request) and hmac.compare_digest(request.auth.signature, self._code_of(request))):
            return False
        if _is_find(request):
            CALLER_READS.set(bool(request.auth.service_public_key))  # each request is answered in a task of its own
            if len(request.keys) > 1:
                return False  # we ask for one key at a time, and an answer costs the holder as much work for each
        if type(request).__name__ == "StoreRequest" and not _has_few_records(request):
            return False
        if type(request).__name__ == "PingRequest":
            request.ClearField("validate")  # we never ask for it, and hivemind would call each asker back
        if self._admission is None:
            return True
        shown = request.auth.client_access_token
        rights = self._admission.rights_by(shown.username, shown.signature)
        if Right.TRAIN not in rights:
            request.ClearField("peer")  # without it hivemind enters no neighbour
        needed = {"PingRequest": Right(0), "FindRequest": Right.LOOK, "StoreRequest": Right.TRAIN}
        return needed[type(request).__name__] in rights

    async def sign_response(self, response: Any, request: Any) -> None:
        """Leave in an answer the records or the neighbours that were asked for; ids of nodes follow from their peers.

        A peer that searches nodes asks at a place without records, and one that somebody put there must hide no node.
        """
        own = None if self._admission is None else self._admission.own
        # Not to a ping, which is answered without a ticket.
        asks_for_it = request.auth.client_access_token.public_key == _SHOW and type(request).__name__ != "PingRequest"
        if own is not None and asks_for_it:
            response.auth.service_access_token.signature = own.raw
        if type(response).__name__ == "PingResponse":
            response.dht_time = CLOCK.own_s()
        if not _is_find(request):
            return
        reads = request.auth.service_public_key
        for result in response.results:
            result.ClearField("nearest_node_ids")
            if reads:
                result.ClearField("nearest_peer_ids")
            if result.value:
                result.value = shortened(result.value, request.auth.nonce, reads[len(_READS) :])

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Restore a short answer. hivemind takes an error, or what is not good, for a missing answer."""
        if not (_has_node_id(response) and self._is_member(response.auth.service_access_token.signature)):
            return False
        if (told := TOLD_TIME.get()) is not None and type(response).__name__ == "PingResponse":
            told.append(response.dht_time)
        if _is_find(request) and len(response.results) != len(request.keys):
            return False  # each result would be decompressed, to a thousand times its bytes
        for result in response.results if _is_find(request) else ():
            del result.nearest_peer_ids[MOST_NAMED:], result.nearest_node_ids[:]
            if any(len(peer) > _PEER_BYTES for peer in result.nearest_peer_ids):
                return False  # hivemind writes each in base 58, in quadratic time
            result.nearest_node_ids.extend(node_of(self._rules, peer) for peer in result.nearest_peer_ids)
            if result.value:
                result.value = restored(result.value, KNOWN.get() or {})
        return True

    def _is_member(self, ticket: bytes = b"") -> bool:
        """Say whether the peer that we ask may train, by the ticket that its answer shows, or by one that we know."""
        callee = CALLEE.get()
        if self._admission is None or not self._admission.is_pinned or not callee:
            return True
        rights = self._admission.rights_by(callee, ticket) if ticket else self._admission.rights(callee)
        return Right.TRAIN in rights

    def _code_of(self, request: Any) -> bytes:
        bare = type(request)()
        bare.CopyFrom(request)
        bare.ClearField("auth")
        name = type(request).__name__.encode()
        return self._rules.code("dht", name, request.auth.nonce, bare.SerializeToString(deterministic=True))


def _has_node_id(message: Any) -> bool:
    """Say whether a message names no node, or one by an id of the right length: hivemind raises AssertionError else."""
    return len(message.peer.node_id) in (0, PLACE_BYTES)


def _is_find(request: Any) -> bool:
    return type(request).__name__ == "FindRequest"


def _has_few_records(request: Any) -> bool:
    """Say whether a request for storage has no more records than one answer, before hivemind decodes any of them."""
    values = zip(request.subkeys, request.values, strict=False)  # a dictionary has no subkey
    try:
        return sum(1 if subkey else record_count(value) for subkey, value in values) <= MOST_VERSIONS
    except (ValueError, RecursionError):  # msgspec's own are such
        return False
