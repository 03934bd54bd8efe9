"""A newcomer becomes a replica: it copies slow weights, outer momentum and counters from one that lives.

It is then where its donor is, also in the momentum period and in the round in which anybody was last met: a copy of
stale weights is as stale as they are. Only what a lossy codec owes stays with the donor, which will send it.

The fast weights do not travel: the newcomer starts from the slow ones, as every replica does right after a round. Each
newcomer asks the replicas in an order of its own, the rendezvous hash of (seed, newcomer, donor), so that many
newcomers spread over many donors without a word. A donor serves a few at once and tells the others to come back.

The donor freezes a copy and lists the hashes of its pieces (`donor`, `chunks`); the newcomer fetches them over several
streams at once. A piece that has come and is right stays (`assembly`): a stream that breaks is dialled again, and where
a donor dies or its copy is let go, the next one's manifest says what is still missing. Whom to ask
next, and when, is `DonorQueue`'s; what of a donor is believed, `donor_checks`'.

An export asks for the slow weights alone, from every replica.
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
from gossip.exchange.swap import NORM_RATIO, all_or_failure, check_finite, norm
from gossip.interface import Compute, Conversation
from gossip.rule.outer_step import Tensors
from gossip.rule.shares import ROUND_BOUND
from gossip.transfer.assembly import ChunkArrived, DonorLost, Key, StateAssembly
from gossip.transfer.chunks import DIGEST_BYTES, present, sections
from gossip.transfer.donor import STREAMS

OUTLYING_ROUNDS = 16
OUTLYING_PROGRESS = 0.25
ROUNDED = 1.01
"""What rounding adds to a bound."""
TINY_MOMENT = 1e-18


class NormVotes(NamedTuple):
    """What others of a donor's stage say of themselves in their manifests."""

    rounds: Sequence[int] = ()
    progress: Sequence[float] = ()
    norms: Sequence[float] = ()


def objection(manifest: Manifest, others: NormVotes) -> str | None:
    """Return why a donor is a gross outlier among its stage, itself counted; None where it is not.

    A norm is measured by the median of all voices, the lower one of two: weights blow up far oftener than they vanish.
    So somebody is always left to copy from.
    """
    norm = median_low([manifest.norm, *others.norms])
    if not norm / NORM_RATIO <= manifest.norm <= norm * NORM_RATIO:
        return f"its slow weights have the norm {manifest.norm:.3g}, those of its stage {norm:.3g}"
    if others.rounds:
        behind = median_low(others.rounds) - manifest.round
        if abs(behind) > OUTLYING_ROUNDS:
            return f"it is in round {manifest.round}, its stage in round {median_low(others.rounds)}"
    if others.progress:
        progress = median_low(others.progress)
        if abs(progress - manifest.progress) > OUTLYING_PROGRESS:
            return f"its progress is {manifest.progress:.2f}, that of its stage {progress:.2f}"
    return None


def round_to_start_in(state_round: int, rounds: Sequence[int]) -> int:
    """Return the round that a newcomer is in: its stage's, or its donor's, where the two are a little apart.

    Of both only the donor has shown anything, so what the stage says lifts a newcomer by a bound.
    """
    if not rounds:
        return state_round
    middle = median_low(rounds)
    return min(max(state_round, middle), min(state_round, middle) + ROUND_BOUND)


class MomentBounds(NamedTuple):
    """What AdamW's moments can be.

    A second moment is a mean of squares: it is never negative. Where the gradients are clipped, the first moments' norm
    is at most `norm`, and the second moments' sum its square. And no first moment is more than `ratio` times the root
    of its second: both are means of the same gradients, so that Cauchy and Schwarz bound one by the other.
    """

    ratio: float = 1e3
    norm: float = math.inf

    def check(self, first: Tensors, second: Tensors) -> None:
        """Raise Implausible for moments that no gradients leave."""
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
"""For whoever does not know the run's optimiser."""


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
    """Raise Implausible unless arithmetic with the state is safe: the one port of all tensors that a donor gives.

    All values are finite, the weights of about the norm that others were compared with, and the inner optimiser's
    moments such as AdamW's gradients can have left. Shapes and counters are those of the manifest, checked before.
    """
    found = norm(state.slow)
    if not announced_norm / NORM_RATIO <= found <= announced_norm * NORM_RATIO:
        raise Implausible(f"slow weights of the norm {found:.3g} came where {announced_norm:.3g} was announced")
    check_finite(state.momentum, "outer momentum")
    check_finite(state.gathered, "gathered momentum")
    check_finite(state.optimiser, "optimiser")
    half = len(state.optimiser) // 2
    moments.check(state.optimiser[:half], state.optimiser[half:])


DIAL_AGAIN_S = 0.5
"""Before a stream that broke is dialled again, doubled each time."""
FAILURES_AT_MOST = 3
"""Breaks and dials in vain, with no piece between them, until a stream is given up; with the last one, the donor."""
LEAST_PIECE_S = 30.0
LONGEST_WAIT_S = 20.0
"""Longest sleep before the donors are asked again, whatever they say."""
SLOWER_TIMES = 4
"""A donor may take so many times its deadline, as long as pieces come: without its copy they are worth less."""

Talk = AbstractAsyncContextManager[Conversation]
Converse = Callable[[str], Talk]


async def _no_objection(donor: str, manifest: Manifest) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWanted:
    """What to ask for and what must come back.

    `like`: tensors (the meta device will do) with the shapes of the slow weights, float32. `deadline_s`: for all that
    one donor gives, over a line that is good enough. `objection`: says why a donor's manifest is not to be believed, or
    None. `moments`: how large the inner optimiser's tensors can be.
    """

    parts: Parts
    like: Tensors
    deadline_s: float
    objection: Callable[[str, Manifest], Awaitable[str | None]] = field(default=_no_objection)
    moments: MomentBounds = OF_ANY_RUN


class DonorBusy(ConnectionRefusedError):
    """A donor that lives does not give just now, or no donor does. `retry_after_s`: when asking again makes sense."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Turn(NamedTuple):
    """Whom to ask, after how many seconds."""

    donor: str
    wait_s: float = 0.0


class DonorQueue:
    """The donors of one download, in the order in which to ask them: no time, no I/O.

    Only those that were busy are asked again.
    """

    def __init__(self, order: Sequence[str], passes: int) -> None:
        self._pass = deque(order)
        self._passes_left = passes - 1
        self._causes: dict[str, str] = {}
        self._waits: dict[str, float] = {}
        """For how long each of the busy ones is left alone."""

    def next(self) -> Turn | None:
        """Return the next turn; None where nobody is left to ask."""
        if self._pass:
            return Turn(self._pass.popleft())
        if not self._waits or not self._passes_left:
            return None
        self._passes_left -= 1
        self._pass.extend(self._waits)
        return Turn(self._pass.popleft(), min(self._waits.values()))

    def note(self, donor: str, failure: ConnectionError) -> str:
        """Learn what came of a turn; return it in words."""
        self._causes[donor] = str(failure) or type(failure).__name__
        self._waits.pop(donor, None)
        if isinstance(failure, DonorBusy):
            wait_s = failure.retry_after_s
            self._waits[donor] = wait_s if 0.0 < wait_s < LONGEST_WAIT_S else LONGEST_WAIT_S
        return self._causes[donor]

    def failure(self) -> ConnectionRefusedError:
        """Return what to raise where nobody is left to ask: with each donor's last cause."""
        causes = "; ".join(f"{donor}: {cause}" for donor, cause in self._causes.items())
        why = f"no replica gave its state ({causes or 'there is none to ask'})"
        return DonorBusy(why, min(self._waits.values())) if self._waits else ConnectionRefusedError(why)


class _Silence(ConnectionAbortedError):
    """Nothing came in time."""


def donors(newcomer: str, replicas: Collection[str], seed: int) -> tuple[str, ...]:
    """Return the replicas in the order in which this newcomer asks them."""
    others = {peer for peer in replicas if peer != newcomer}
    return tuple(sorted(others, key=lambda peer: hashlib.sha256(f"{seed}|donor|{newcomer}|{peer}".encode()).digest()))


def piece_s(deadline_s: float, pieces: int) -> float:
    """Return how long one piece may take on one of several streams, if `pieces` of them may take `deadline_s`."""
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
    """Copy the state of the first donor that gives it, or of several; ask the busy ones again, up to `passes` times.

    `assembly` keeps what has come, also for another call. Raises ConnectionRefusedError, naming each donor's cause,
    where the donors do not give all of it; DonorBusy where one of them may give it later.
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
            # Of several who gave, all hashes right, nobody can say who has lied.
            await compute(assembly.clear if attempt.fetched and assembly.mixed else assembly.forget)
        if refused or attempt.selected:
            assembly.tell(DonorLost(donor=turn.donor, why=why, refused=refused))
    raise queue.failure()


async def manifest_of(conversation: Conversation, request: StateRequest, pieces: int) -> Manifest | Busy:
    """Ask one donor what it has, and check that it is possible; `pieces`: of a section. The caller sets the deadline.

    Raises Implausible where it cannot be right, another `ConnectionError` where it does not come.
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
    """Fetching what is missing from one donor. `selected`: it has begun to give; `fetched`: it gave everything."""

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
        """Copy; what has come and is right stays.

        Raises DonorBusy where the donor can give no more just now, Implausible where what it said or sent cannot be
        right, another `ConnectionError` where it does not answer, or not in time.
        """
        limit_s = SLOWER_TIMES * self._wanted.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._copy()
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"not done within {limit_s:g} s") from silence

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
        try:
            async with asyncio.timeout(agree_s):
                reply = await manifest_of(conversation, request, len(self._assembly.spans))
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"no manifest within {agree_s:g} s") from silence
        if isinstance(reply, Busy):
            raise DonorBusy("busy", reply.retry_after_s)
        refusal = await self._wanted.objection(self._donor, reply)
        if refusal is not None:
            raise Implausible(refusal)
        return reply

    async def _fetch(self, first: Conversation, line: AsyncExitStack) -> None:
        """Let several streams take what is missing; all end with the first that fails. `first` stays open in `line`."""
        self._streams = max(1, min(STREAMS, len(self._missing)))
        places = range(self._streams)
        tasks = [asyncio.create_task(self._stream(*((first, line) if place == 0 else ()))) for place in places]
        await all_or_failure(tasks)

    async def _stream(self, conversation: Conversation | None = None, line: AsyncExitStack | None = None) -> None:
        """Fetch pieces until none is missing, over one conversation after the other as they break.

        `conversation`: one that is open, in `line`; it is broken off like the others.
        """
        failures, silences, arrived = 0, 0, self._arrived
        while self._missing:
            try:
                # Silence and a slow line look alike as long as nothing has come: each try in vain waits twice as long.
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
        self._streams -= 1  # what is still under way on the others is theirs alone

    async def _drain(self, conversation: Conversation, times: int) -> None:
        """Fetch one piece after the other; the first may take so many times as long as the others."""
        while self._missing:
            key = self._missing.popleft()
            begun_s, allowed_s = _now(), min(times * self._piece_s, self._wanted.deadline_s)
            arrived = False
            try:
                async with asyncio.timeout(allowed_s):
                    await self._one(conversation, key)
                arrived, times = True, 1
                self._piece_s = min(max(self._piece_s, 2.0 * (_now() - begun_s)), self._wanted.deadline_s)
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


def _now() -> float:
    return asyncio.get_running_loop().time()
