"""A newcomer becomes a replica: it copies slow weights, momenta and counters from a replica that trains.

Fast weights do not travel: the newcomer starts from the slow ones. What a lossy codec has rounded off stays in the
donor's fast weights, and the donor sends it with its next snapshot. Each newcomer asks the replicas in an order of its
own, so that many newcomers spread over many donors. A right piece stays (`assembly`): a broken stream is dialled again,
and if the donor dies, the next manifest says what is still missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from gossip.exchange.codec import NORM_RATIO, check_finite, norm
from gossip.exchange.messages import (
    Busy,
    Gone,
    Implausible,
    Manifest,
    Parts,
    Piece,
    PieceRequest,
    ReplicaState,
    Section,
    StateRequest,
)
from gossip.exchange.swap import all_or_failure
from gossip.interface import Compute, Conversation
from gossip.rule.outer_step import ROUND_BOUND, Tensors
from gossip.transfer.assembly import ChunkArrived, DonorLost, Key, StateAssembly
from gossip.transfer.chunks import DIGEST_BYTES, present, sections
from gossip.transfer.donor import STREAMS, now_s, within

OUTLYING_ROUNDS = 16
OUTLYING_PROGRESS = 0.25
ROUNDED = 1.01  # what rounding adds to a bound
TINY_MOMENT = 1e-18
DIAL_AGAIN_S = 0.5  # before a broken stream is dialled again, doubled each time
FAILURES_AT_MOST = 3  # breaks and vain dials without a piece between them end a stream; the last stream, the donor
LEAST_PIECE_S = 30.0
LONGEST_WAIT_S = 20.0  # the longest sleep before the donors are asked again
SLOWER_TIMES = 4  # a donor may take so many times its deadline: without its copy its pieces are worth less
Talk = AbstractAsyncContextManager[Conversation]
Converse = Callable[[str], Talk]
Objection = Callable[[str, Manifest], Awaitable[str | None]]  # returns why to refuse a donor's manifest, or None


def objection(donor: Manifest, others: Sequence[Manifest]) -> str | None:
    """Return why a donor is a gross outlier among replicas of its stage, or None.

    The norm is compared with the lower median of all norms, the donor's included: weights blow up far oftener than they
    vanish, and so a donor always remains.
    """
    norm = median_low([donor.norm, *(other.norm for other in others)])
    if not norm / NORM_RATIO <= donor.norm <= norm * NORM_RATIO:
        return f"its slow weights have the norm {donor.norm:.3g}, those of its stage {norm:.3g}"
    if not others:
        return None
    round, progress = median_low(each.round for each in others), median_low(each.progress for each in others)
    if abs(round - donor.round) > OUTLYING_ROUNDS:
        return f"it is in round {donor.round}, its stage in round {round}"
    if abs(progress - donor.progress) > OUTLYING_PROGRESS:
        return f"its progress is {donor.progress:.2f}, that of its stage {progress:.2f}"
    return None


def round_to_start_in(state_round: int, rounds: Sequence[int]) -> int:
    """Return the round that a newcomer starts in: the later of its stage's and its donor's.

    Only the donor has shown a state, so the stage lifts a newcomer by `ROUND_BOUND` at most.
    """
    if not rounds:
        return state_round
    middle = median_low(rounds)
    return min(max(state_round, middle), min(state_round, middle) + ROUND_BOUND)


class MomentBounds(NamedTuple):
    """The moments that AdamW can have.

    A second moment is a mean of squares, so never negative. With clipped gradients the first moments' norm is at most
    `norm`, and the second moments' sum at most its square. By Cauchy and Schwarz a first moment is at most `ratio`
    times the root of its second.

    `magnitudes`: returns tensors whose values the moments of a section do not exceed, and to which the same applies.
    """

    ratio: float = 1e3
    norm: float = math.inf
    magnitudes: Callable[[Tensors], Tensors] = lambda moments: moments

    def check(self, first: Tensors, second: Tensors) -> None:
        for mean, square in zip(first, second, strict=True):
            if square.numel() and float(square.min()) < 0.0:
                raise Implausible("optimiser: a second moment is negative")
            # Squares of tiny gradients are zero in float32.
            if bool((mean.abs() > ROUNDED * self.ratio * square.sqrt() + TINY_MOMENT).any()):
                raise Implausible("optimiser: a first moment is too large for its second")
        most = ROUNDED * self.norm
        if norm(first) > most or sum(float(square.sum()) for square in second) > most**2:
            raise Implausible(f"optimiser: moments of gradients longer than {self.norm:.3g}, to which they are clipped")


OF_ANY_RUN = MomentBounds()


def check_manifest(manifest: Manifest, parts: Parts, pieces: int) -> None:
    """Raise Implausible unless the sections are those asked for, with a hash a piece, and the counters possible."""
    there = present(manifest)
    # A momentum that is left out is none, or zero. Donors of earlier versions give one where the rule has none.
    momentum, optimiser = Section.MOMENTUM in there, Section.FIRST in there or Section.SECOND in there
    if tuple(there) != sections(parts, momentum=momentum, meetings=manifest.meetings, optimiser=optimiser):
        raise Implausible(f"the sections {', '.join(there) or '(none)'} for {parts}")
    if any(tuple(digests.shape) != (pieces, DIGEST_BYTES) for digests in there.values()):
        raise Implausible(f"not a hash for each of {pieces} pieces")
    if manifest.last_met > manifest.round:
        raise Implausible(f"last met anybody in round {manifest.last_met}, and is in round {manifest.round}")


def check_values(state: ReplicaState, announced_norm: float, moments: MomentBounds = OF_ANY_RUN) -> None:
    """Raise Implausible unless arithmetic with a donor's tensors is safe.

    All values must be finite, the weights of about the norm that the manifest announced, and the moments within their
    bounds. Shapes and counters are those of the manifest, checked before.
    """
    found = norm(state.slow)
    if not announced_norm / NORM_RATIO <= found <= announced_norm * NORM_RATIO:
        raise Implausible(f"slow weights of the norm {found:.3g} came where {announced_norm:.3g} was announced")
    check_finite(state.momentum, "outer momentum")
    check_finite(state.gathered, "gathered momentum")
    optimiser = moments.magnitudes(state.optimiser)
    check_finite(optimiser, "optimiser")
    half = len(optimiser) // 2
    moments.check(optimiser[:half], optimiser[half:])


async def no_objection(donor: str, manifest: Manifest) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWanted:
    """The state that a newcomer asks for and accepts.

    `like`: tensors (the meta device will do) with the shapes of the slow weights, float32. `deadline_s`: for all pieces
    of one donor, over a line that is good enough.
    """

    parts: Parts
    like: Tensors
    deadline_s: float
    objection: Objection = field(default=no_objection)
    moments: MomentBounds = OF_ANY_RUN


class DonorBusy(ConnectionRefusedError):
    """A living donor does not give just now, or no donor does. `retry_after_s`: when to ask again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Turn(NamedTuple):
    """The donor to ask, after so many seconds."""

    donor: str
    wait_s: float = 0.0


class DonorQueue:
    """The donors of one download, in the order in which to ask them. Only busy donors are asked again."""

    def __init__(self, order: Sequence[str], passes: int) -> None:
        self._pass = deque(order)
        self._passes_left = passes - 1
        self._causes: dict[str, str] = {}
        self._waits: dict[str, float] = {}  # seconds for which to leave each busy donor alone

    def next(self) -> Turn | None:
        """Return the next turn; None if no donor is left to ask."""
        if self._pass:
            return Turn(self._pass.popleft())
        if not self._waits or not self._passes_left:
            return None
        self._passes_left -= 1
        self._pass.extend(self._waits)
        return Turn(self._pass.popleft(), min(self._waits.values()))

    def note(self, donor: str, failure: ConnectionError) -> str:
        """Take the failure of a turn; return its cause in words."""
        self._causes[donor] = str(failure) or type(failure).__name__
        self._waits.pop(donor, None)
        if isinstance(failure, DonorBusy):
            wait_s = failure.retry_after_s
            self._waits[donor] = wait_s if 0.0 < wait_s < LONGEST_WAIT_S else LONGEST_WAIT_S
        return self._causes[donor]

    def failure(self) -> ConnectionRefusedError:
        """Return the error of a download in vain, with each donor's last cause."""
        causes = "; ".join(f"{donor}: {cause}" for donor, cause in self._causes.items())
        why = f"no replica gave its state ({causes or 'there is none to ask'})"
        return DonorBusy(why, min(self._waits.values())) if self._waits else ConnectionRefusedError(why)


class _Silence(ConnectionAbortedError):
    """No piece came in time."""


def donors(newcomer: str, replicas: Collection[str], seed: int) -> tuple[str, ...]:
    """Return the replicas in the order in which this newcomer asks them."""
    others = {peer for peer in replicas if peer != newcomer}
    return tuple(sorted(others, key=lambda peer: hashlib.sha256(f"{seed}|donor|{newcomer}|{peer}".encode()).digest()))


def piece_s(deadline_s: float, pieces: int) -> float:
    """Return how long one piece on one of several streams may take, if all pieces may take `deadline_s`."""
    return min(deadline_s, LEAST_PIECE_S + 2 * STREAMS * deadline_s / max(1, pieces))


async def download_state(
    order: Sequence[str],
    converse: Converse,
    wanted: StateWanted,
    compute: Compute,
    assembly: StateAssembly | None = None,
    *,
    passes: int = 5,
) -> ReplicaState:
    """Copy the state of the first donor that gives all of it, or of several; ask busy donors up to `passes` times.

    `assembly` keeps the pieces, also for another call. Raises ConnectionRefusedError, with each donor's cause, if the
    donors do not give all pieces; DonorBusy if one of them may give them later.
    """
    assembly = assembly or StateAssembly(wanted.like)
    queue = DonorQueue(order, passes)
    await compute(assembly.load)
    while (turn := queue.next()) is not None:
        if turn.wait_s:
            await asyncio.sleep(turn.wait_s)
        attempt = _Attempt(turn.donor, converse, wanted, compute, assembly)
        try:
            return await attempt.run()
        except ConnectionError as failure:
            why, refused = queue.note(turn.donor, failure), isinstance(failure, Implausible)
        if refused and attempt.selected:
            # Of several donors whose hashes were all right, any may have lied.
            await compute(assembly.clear if attempt.fetched and assembly.mixed else assembly.forget)
        if refused or attempt.selected:
            assembly.tell(DonorLost(donor=turn.donor, why=why, refused=refused))
    raise queue.failure()


async def manifest_of(conversation: Conversation, request: StateRequest, pieces: int) -> Manifest | Busy:
    """Ask a donor for its manifest and check it; `pieces`: of a section. The caller sets the deadline.

    Raises Implausible for a manifest that cannot be right, another `ConnectionError` if none comes.
    """
    await conversation.send(request)
    reply = await conversation.receive()
    if isinstance(reply, Busy):
        return reply
    if not isinstance(reply, Manifest):
        raise ConnectionAbortedError(f"expected a manifest, got {type(reply).__name__}")
    check_manifest(reply, request.parts, pieces)
    return reply


class _Attempt:
    """The fetching of missing pieces from one donor. `selected`: it has begun to give; `fetched`: it gave all."""

    def __init__(
        self, donor: str, converse: Converse, wanted: StateWanted, compute: Compute, assembly: StateAssembly
    ) -> None:
        self.selected = self.fetched = False
        self._donor, self._converse, self._wanted = donor, converse, wanted
        self._compute, self._assembly = compute, assembly
        self._missing: deque[Key] = deque()
        self._snapshot = ""
        self._streams = self._arrived = 0
        self._piece_s = piece_s(wanted.deadline_s, len(assembly.spans))

    async def run(self) -> ReplicaState:
        """Fetch the missing pieces and return the state.

        Raises DonorBusy if the donor can give no more just now, Implausible if what it sent cannot be right, another
        `ConnectionError` if it does not answer in time.
        """
        return await within(SLOWER_TIMES * self._wanted.deadline_s, self._copy(), "not done within")

    async def _copy(self) -> ReplicaState:
        async with AsyncExitStack() as line:
            first = await line.enter_async_context(self._converse(self._donor))
            manifest = await self._agree(first)
            needed, selected = await self._compute(self._assembly.follow, manifest, self._donor)
            self.selected = True
            self._assembly.tell(selected)
            self._missing, self._snapshot = deque(needed), manifest.snapshot
            self._piece_s = piece_s(self._wanted.deadline_s, len(present(manifest)) * len(self._assembly.spans))
            await self._fetch(first, line)
        self.fetched = True
        state = self._assembly.state()
        await self._compute(check_values, state, manifest.norm, self._wanted.moments)
        return state

    async def _agree(self, conversation: Conversation) -> Manifest:
        request = StateRequest(parts=self._wanted.parts, snapshot=self._assembly.snapshot)
        # To freeze and hash a copy may take as long as to send a good part of it.
        share = 1.0 if self._wanted.parts is Parts.ALL else 1.0 / len(Section)
        agree_s = LEAST_PIECE_S + share * self._wanted.deadline_s / 4
        asking = manifest_of(conversation, request, len(self._assembly.spans))
        reply = await within(agree_s, asking, "no manifest within")
        if isinstance(reply, Busy):
            raise DonorBusy("busy", reply.retry_after_s)
        refusal = await self._wanted.objection(self._donor, reply)
        if refusal is not None:
            raise Implausible(refusal)
        return reply

    async def _fetch(self, first: Conversation, line: AsyncExitStack) -> None:
        """Let several streams take the missing pieces; all end with the first that fails. `first` is open in `line`."""
        self._streams = max(1, min(STREAMS, len(self._missing)))
        places = range(self._streams)
        tasks = [asyncio.create_task(self._stream(*((first, line) if place == 0 else ()))) for place in places]
        await all_or_failure(tasks)

    async def _stream(self, conversation: Conversation | None = None, line: AsyncExitStack | None = None) -> None:
        """Fetch pieces until none is missing, dialling again after a break. `conversation`: open in `line`."""
        failures, silences, arrived = 0, 0, self._arrived
        while self._missing:
            try:
                # Silence and a slow line look alike until a piece has come: each vain try waits twice as long.
                if conversation is not None:
                    await self._drain(conversation, 2**silences)
                else:
                    async with self._converse(self._donor) as another:
                        await self._drain(another, 2**silences)
            except (Implausible, DonorBusy):
                raise
            except ConnectionError as loss:
                if line is not None:
                    await line.__aexit__(type(loss), loss, loss.__traceback__)
                conversation = line = None
                if self._arrived > arrived:
                    failures = silences = 0
                failures, silences, arrived = failures + 1, silences + isinstance(loss, _Silence), self._arrived
                if failures >= FAILURES_AT_MOST:
                    self._streams -= 1
                    if self._streams:
                        return  # the others go on
                    raise
                await asyncio.sleep(DIAL_AGAIN_S * 2**failures)
        self._streams -= 1  # the other streams finish their own pieces

    async def _drain(self, conversation: Conversation, times: int) -> None:
        """Fetch one piece after the other; the first may take `times` as long as the others."""
        while self._missing:
            key = self._missing.popleft()
            begun_s, allowed_s = now_s(), min(times * self._piece_s, self._wanted.deadline_s)
            arrived = False
            try:
                async with asyncio.timeout(allowed_s):
                    await self._one(conversation, key)
                arrived, times = True, 1
                self._piece_s = min(max(self._piece_s, 2.0 * (now_s() - begun_s)), self._wanted.deadline_s)
            except TimeoutError as silence:
                raise _Silence(f"no piece within {allowed_s:g} s") from silence
            finally:
                if not arrived:
                    self._missing.appendleft(key)

    async def _one(self, conversation: Conversation, key: Key) -> None:
        await conversation.send(PieceRequest(snapshot=self._snapshot, section=key.section, number=key.number))
        reply = await conversation.receive()
        if isinstance(reply, Gone):
            raise DonorBusy("it holds the copy no more", 0.1)
        if isinstance(reply, Busy):
            raise ConnectionResetError("busy")
        if not isinstance(reply, Piece):
            raise ConnectionAbortedError(f"expected a piece, got {type(reply).__name__}")
        await self._compute(self._assembly.put, key, reply.data)
        self._arrived += 1
        self._assembly.tell(ChunkArrived(size_bytes=reply.data.nbytes))
