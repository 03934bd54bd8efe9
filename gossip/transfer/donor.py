"""A replica gives its state to newcomers and trains on.

A request for a manifest makes the replica freeze a copy of its state (`chunks.HeldCopy`), which newcomers of one round
share. The cost of strangers is bounded: copies, newcomers and streams are few, and a copy and an idle stream end after
a while. A copy outlives its newcomer for a while, so that one that was killed finds it again.

If all places are taken and another newcomer comes, the donor frees a place held for a whole turn (the time of a copy on
the slowest line that is good enough), or one whose newcomer takes much less than that line carries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from gossip.exchange.codec import norm
from gossip.exchange.messages import (
    Busy,
    Gone,
    Manifest,
    Parts,
    Piece,
    PieceRequest,
    ReplicaState,
    Section,
    StateRequest,
)
from gossip.interface import Compute, Conversation
from gossip.transfer.chunks import CopyInMemory, HeldCopy, Span, StateCut, digest, listed, name_of, present

NEWCOMERS = 2  # newcomers that are served at once
STREAMS = 4  # of one newcomer
SETTLING_S = 60.0  # a newcomer's pace does not count for so long
LEAST_PACE = 0.125  # copies in a turn: training shares our line, and a newcomer's disk takes its time
COPIES = 2  # held at once: of the round that newcomers fetch, and of an earlier one that a newcomer still fetches
TURNS = 8  # turns in the life of a copy
HOLD_S = 120.0  # a copy is held for so long for a newcomer that may come back
RECENT_ROUNDS = 8  # no request for a manifest gets an older copy
ABANDONED_S = 15.0  # before another copy is made, after a newcomer left while its own was being made
RETRY_S = 5.0
HASHED_AT_ONCE_BYTES = 2**26  # in one job of some ten milliseconds
T = TypeVar("T")
Provide = Callable[[Parts], Awaitable[ReplicaState | HeldCopy]]


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorLimits:
    """Seconds that a donor allows. `deadline_s`: a copy's life. `piece_s`: for a newcomer's next request."""

    deadline_s: float
    piece_s: float


@dataclass(slots=True, eq=False)
class DonorSlot:
    """A newcomer's place. `since_s`: when it got a manifest, None before. `total_bytes`: of its copy.

    `turns`: one for each stream, which ends at the time to which its turn is set.
    """

    since_s: float | None = None
    given_bytes: int = 0
    total_bytes: int = 0
    turns: list[asyncio.Timeout] = field(default_factory=list)

    def begin(self, total_bytes: int) -> None:
        """Let the turn begin now, if it has not, for a copy of so many bytes at least."""
        if self.since_s is None:
            self.since_s = now_s()
        self.total_bytes = max(self.total_bytes, total_bytes)

    def pace(self, at_s: float) -> float:
        """Return copies a second so far; infinite before the turn has begun."""
        if self.since_s is None or at_s <= self.since_s:
            return float("inf")
        return self.given_bytes / max(1, self.total_bytes) / (at_s - self.since_s)


def overdue(slots: Collection[DonorSlot], turn_s: float, at_s: float) -> DonorSlot | None:
    """Return the slot to free for another newcomer, None if all may stay. `turn_s`: for one whole copy."""

    def is_overdue(slot: DonorSlot) -> bool:
        if slot.since_s is None:
            return False
        slow = at_s - slot.since_s > SETTLING_S and slot.pace(at_s) * turn_s < LEAST_PACE
        return slow or at_s - slot.since_s > turn_s

    return min(filter(is_overdue, slots), key=lambda slot: slot.pace(at_s), default=None)


class DonorSlots:
    """The places of one donor. `turn_s`: a newcomer has its place for so long though others wait."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._by_peer: dict[str, DonorSlot] = {}
        self.displaced = 0

    def __len__(self) -> int:
        return len(self._by_peer)

    def enter(self, peer: str) -> DonorSlot | None:
        """Return a newcomer's place for one more stream, or None; the caller enters `turn` at once."""
        slot = self._by_peer.get(peer)
        if slot is not None:
            return slot if len(slot.turns) < STREAMS else None
        if len(self._by_peer) >= NEWCOMERS:
            late = overdue(self._by_peer.values(), self._turn_s, now_s())
            if late is None:
                return None
            self.displaced += 1
            self._by_peer = {name: each for name, each in self._by_peer.items() if each is not late}
            for turn in late.turns:
                turn.reschedule(now_s())
        slot = self._by_peer[peer] = DonorSlot()
        return slot

    @asynccontextmanager
    async def turn(self, peer: str, slot: DonorSlot) -> AsyncIterator[None]:
        """Hold a newcomer's place for one stream; raise ConnectionAbortedError once another newcomer gets the place."""
        turn = asyncio.timeout(None)
        slot.turns.append(turn)
        try:
            async with turn:
                yield
        except TimeoutError:
            if not turn.expired():
                raise
            raise ConnectionAbortedError("others wait, and this newcomer has had its turn") from None
        finally:
            slot.turns.remove(turn)
            if not slot.turns and self._by_peer.get(peer) is slot:
                del self._by_peer[peer]


@dataclass(slots=True, eq=False)
class _Copy:
    """A frozen state. `used_s`: when a newcomer last asked for it, or left."""

    held: HeldCopy
    manifest: Manifest
    parts: Parts
    made_s: float
    used_s: float


class Donor:
    """Serves one replica's state, which `provide` returns as a copy, or in tensors that nobody writes into."""

    def __init__(
        self,
        provide: Provide,
        compute: Compute,
        shapes: Sequence[tuple[int, ...]],
        terms: DonorLimits,
        moments: Sequence[int] | None = None,
    ) -> None:
        """`shapes`: of the weights, float32. `moments`: bytes of one moment of each, as many by default."""
        self._provide, self._compute, self._terms = provide, compute, terms
        self._cut = StateCut([4 * prod(shape) for shape in shapes], moments)
        self._copies: dict[str, _Copy] = {}
        self._under_way: Counter[str] = Counter()  # pieces on their way, by the name of their copy
        self._freezing, self._asking = asyncio.Lock(), asyncio.Lock()
        self._norm: tuple[int, float] | None = None  # a round, and the norm of its slow weights
        self._timer: asyncio.TimerHandle | None = None
        self._again_s = 0.0
        self._slots = DonorSlots(terms.deadline_s / TURNS)
        self._counts: Counter[str] = Counter()

    def knows(self, round: int, norm: float) -> None:
        """Take over the norm of a round's slow weights: a manifest without pieces then needs no weights."""
        self._norm = (round, norm)

    def close(self) -> None:
        """Let go of all copies and make no other: the replica is given up."""
        self._provide = _given_up  # a stream that waits for its newcomer shall not keep the replica either
        self._copies.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def statistics(self) -> dict[str, int | float]:
        """Return counts: copies held and made, pieces and bytes given, newcomers that were told to come back."""
        slots = {"visitors": len(self._slots), "displaced": self._slots.displaced}
        return {**self._counts, **slots, "held": len(self._copies)}

    async def serve(self, conversation: Conversation) -> None:
        """Answer the requests of one stream until the newcomer leaves.

        Raises ConnectionAbortedError if the newcomer is too slow, asks for no such piece, or loses its place.
        """
        request = await self._next(conversation)
        if isinstance(request, StateRequest) and request.parts is Parts.OUTLINE:
            # It is small, and many ask for it: it takes no place.
            await within(self._terms.piece_s, conversation.send(await self._bare_manifest()))
            return
        slot = self._slots.enter(conversation.peer)
        if slot is None:
            self._counts["turned_away"] += 1
            await within(self._terms.piece_s, conversation.send(Busy(retry_after_s=RETRY_S)))
            return
        async with self._slots.turn(conversation.peer, slot):
            while request is not None:
                with self._giving(request):
                    await self._answer(conversation, request, slot)
                    request = await self._next(conversation)

    async def _next(self, conversation: Conversation) -> object | None:
        try:
            return await within(self._terms.piece_s, conversation.receive())
        except ConnectionResetError:
            return None

    async def _answer(self, conversation: Conversation, request: object, slot: DonorSlot) -> None:
        if isinstance(request, StateRequest):
            manifest = await self._manifest(request)
            # The time that we took to freeze a copy does not count.
            listed_sections = present(manifest) if isinstance(manifest, Manifest) else ()
            slot.begin(sum(map(self._cut.size_bytes, listed_sections)))
            await within(self._terms.deadline_s, conversation.send(manifest))
        elif isinstance(request, PieceRequest):
            piece = await self._piece(request)
            slot.begin(self._cut.size_bytes(Section.SLOW))
            # Nor does the time for which our own upload limit lets a piece wait.
            await within(self._terms.deadline_s, conversation.send(piece))
            slot.given_bytes += piece.data.nbytes if isinstance(piece, Piece) else 0
        else:
            raise ConnectionAbortedError(f"expected a request, got {type(request).__name__}")

    async def _piece(self, request: PieceRequest) -> Piece | Gone:
        self._let_go()
        copy = self._copies.get(request.snapshot)
        if copy is None:
            return Gone()
        spans = self._cut.of(request.section)
        if request.section not in present(copy.manifest) or not 0 <= request.number < len(spans):
            raise ConnectionAbortedError(f"there is no piece {request.number} of {request.section}")
        self._use(copy)
        try:
            data = await self._compute(copy.held.read, request.section, spans[request.number])
        except OSError:
            self._copies.pop(request.snapshot, None)
            return Gone()
        self._counts["pieces"] += 1
        self._counts["bytes"] += data.nbytes
        return Piece(data=data)

    @contextmanager
    def _giving(self, request: object) -> Iterator[None]:
        """Hold a copy while a piece of it is on its way, which takes minutes on a slow line.

        By its name: a copy that is let go meanwhile, for a new one or with its stage, leaves the memory at once.
        """
        name = request.snapshot if isinstance(request, PieceRequest) else ""
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way -= Counter([name])  # which forgets names of which none is left
            copy = self._copies.get(name)
            if copy is not None:
                copy.used_s = now_s()

    async def _manifest(self, request: StateRequest) -> Manifest | Busy:
        """Return the manifest of a copy with `request.parts`; make a copy if none will do."""
        self._counts["manifests"] += 1
        if request.parts is Parts.OUTLINE:
            return await self._bare_manifest()
        async with self._freezing:
            self._let_go()
            copy = self._fitting(request, (await self._counters()).round)
            if copy is None:
                if self._again_s > now_s():
                    return Busy(retry_after_s=RETRY_S)
                try:
                    copy = await self._freeze(request.parts)
                except asyncio.CancelledError:
                    self._again_s = now_s() + ABANDONED_S
                    raise
                except ConnectionError:
                    raise
                except OSError:
                    self._counts["refused_by_disk"] += 1
                    self._again_s = now_s() + ABANDONED_S
                    return Busy(retry_after_s=RETRY_S)
            self._use(copy)
            if request.parts is Parts.ALL:
                return copy.manifest
            return replace(copy.manifest, momentum=None, gathered=None, first=None, second=None)

    async def _counters(self) -> ReplicaState:
        found = await self._provide(Parts.OUTLINE)
        return found if isinstance(found, ReplicaState) else found.counters

    async def _bare_manifest(self) -> Manifest:
        # One computation of a round's norm serves all newcomers.
        async with self._asking:
            state = await self._counters()
            if self._norm is None or self._norm[0] != state.round:
                self._norm = (state.round, await self._compute(norm, state.slow))
            return _manifest(state, self._norm[1], {})

    def _fitting(self, request: StateRequest, round: int) -> _Copy | None:
        """Return a copy that will do: the one asked for, one of this round, or the last if no more may be made.

        If no copy is recent, make room for a new one; newcomers that still fetch the old one ask again.
        """
        recent = [
            copy
            for copy in self._copies.values()
            if copy.parts in (request.parts, Parts.ALL) and round - copy.manifest.round <= RECENT_ROUNDS
        ]
        for copy in recent:
            if copy.manifest.snapshot == request.snapshot:
                return copy
        if of_round := [copy for copy in recent if copy.manifest.round == round]:
            return of_round[0]
        if len(self._copies) < COPIES:
            return None
        if recent:
            return recent[-1]
        unused = min(self._copies.values(), key=lambda copy: (self._under_way[copy.manifest.snapshot] > 0, copy.used_s))
        del self._copies[unused.manifest.snapshot]
        return None

    async def _freeze(self, parts: Parts) -> _Copy:
        provided = await self._provide(parts)
        held = CopyInMemory(provided) if isinstance(provided, ReplicaState) else provided
        digests: dict[Section, tuple[bytes, ...]] = {}
        for section in held.sections:
            if parts is Parts.ALL or section is Section.SLOW:
                found: list[bytes] = []
                for batch in _batches(self._cut.of(section)):
                    found += await self._compute(_digests, held, section, batch)
                digests[section] = tuple(found)
        manifest = _manifest(held.counters, await self._compute(held.norm), digests)
        if self._provide is _given_up:
            await _given_up(parts)
        copy = self._copies[manifest.snapshot] = _Copy(held, manifest, parts, now_s(), now_s())
        self._counts["copies"] += 1
        return copy

    def _use(self, copy: _Copy) -> None:
        copy.used_s = now_s()
        if self._timer is None:
            self._look_again()

    def _look_again(self) -> None:
        self._timer = None
        self._let_go()
        if self._copies:
            next_s = min(self._until_s(copy) for copy in self._copies.values())
            self._timer = asyncio.get_running_loop().call_at(next_s, self._look_again)

    def _let_go(self) -> None:
        self._copies = {name: copy for name, copy in self._copies.items() if self._until_s(copy) > now_s()}

    def _until_s(self, copy: _Copy) -> float:
        used_s = now_s() if self._under_way[copy.manifest.snapshot] else copy.used_s
        return min(used_s + HOLD_S, copy.made_s + self._terms.deadline_s)


async def _given_up(_: Parts) -> ReplicaState:
    raise ConnectionAbortedError("this replica is given up")


async def within(limit_s: float, work: Awaitable[T], why: str = "the newcomer was silent for") -> T:
    """Await `work`; raise ConnectionAbortedError if it takes longer. `why`: the begin of the sentence that says so."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"{why} {limit_s:g} s") from silence


def _manifest(state: ReplicaState, norm: float, digests: dict[Section, tuple[bytes, ...]]) -> Manifest:
    names = ("round", "inner_steps", "progress", "optimiser_steps", "meetings", "last_met")
    counters: dict[str, Any] = {name: getattr(state, name) for name in names} | {"norm": norm}
    name = name_of(tuple(counters.values()), [each for section in digests.values() for each in section])
    hashes: dict[str, Any] = {section.value: listed(found) for section, found in digests.items()}
    return Manifest(snapshot=name, **counters, **hashes)


def _digests(held: HeldCopy, section: Section, spans: Sequence[Span]) -> list[bytes]:
    return [digest(held.read(section, span)) for span in spans]


def _batches(spans: Sequence[Span]) -> list[list[Span]]:
    batches: list[list[Span]] = [[]]
    total = 0
    for span in spans:
        if total + span.size_bytes > HASHED_AT_ONCE_BYTES and batches[-1]:
            batches.append([])
            total = 0
        batches[-1].append(span)
        total += span.size_bytes
    return batches
