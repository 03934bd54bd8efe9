"""`SwarmView`: a swarm at one moment. Every view is drawn from it, and `--json` prints it.

`roster_observer` makes it of records in the DHT, `journal_observer` of journals. Times are unix seconds. Words of
strangers are in here unchanged: code that prints them uses `plain`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Generic, TypeVar

import msgspec

from noloco_node.observe.bottleneck import CAUSES, Bottleneck, StageView, present_bottleneck, wait_words
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.swarm.shards import StageSize

T = TypeVar("T")

SHORT_ID = 8  # letters of a peer id that a person sees; its last ones, for the first are alike
MOST_WORDS = 200  # of what a peer says of itself in words
MOST_CHANGES = 100  # arrivals, departures and the like that a view remembers

TOLD_ROUTES = "microbatches that came back, as peers told of them in the last minute"
ALL_ROUTES = "microbatches that came back"
AT_WORK, COMPUTING = "at work", "computing"
"""What `busy` counts. Of records: the time by the wall clock for which a device has a microbatch in hand. Of journals:
the time for which the device computes; of a CPU, that for which its thread has a core."""
SETTLED_STEPS = 16
"""Inner steps after which the loss of a peer that came to train counts for the swarm's. The weights of a checkpoint are
old: the first windows have a loss that the others had long ago, until the next rounds pull the weights to theirs."""
LONGEST_VIRTUAL_S = 1e9  # times below are seconds since a simulation began; later ones are unix seconds


class PeerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one peer that every view shows; None where unknown.

    `busy`: share of the time for which its device works, or the line that limits it. `share`: of its stage's speed.
    `tokens`: of its windows, as it says; `tokens_signed`: those that it drew as a source and has receipts for.
    `sent_per_s`, `received_per_s`: bytes over its line. `waits`: what it waits for, and `budget`: what it uses of the
    line that its owner allows, both in words. `held_out`: loss of its last evaluation on held-out text.
    """

    name: str
    stage: int
    state: str
    round: int = 0
    tokens: int = 0
    tokens_signed: int | None = None
    there_s: float | None = None
    line_bytes: int | None = None
    joules: float | None = None
    tokens_per_s: float = 0.0
    share: float | None = None
    busy: float | None = None
    loss: float | None = None
    held_out: float | None = None
    gap: float | None = None
    waits: str | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    budget: str | None = None


class PeerView(PeerFigures, frozen=True, kw_only=True):
    """One peer. `cause`: why it waits, if it says so; `since`: when the wait began. `met`: id of its last partner.

    `tokens_claimed`: that it says it drew as a source. `settled`: it has trained for `SETTLED_STEPS` since it came.
    """

    peer: str
    inner_steps: int = 0
    partner: str | None = None
    cause: WaitCause | None = None
    since: float | None = None
    tokens_claimed: int | None = None
    met: str | None = None
    settled: bool = True

    @property
    def trains(self) -> bool:
        return self.state == PeerState.TRAINING


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Microbatches that one peer passes on to another and gets back, a second."""

    origin: str
    target: str
    per_s: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A peer came, went, moved, or said something that a person should know."""

    at: float
    name: str
    text: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the course of a run."""

    at: float
    progress: float
    tokens_per_s: float
    loss: float | None
    gap: float | None
    held_out: float | None = None


class GivenInAll(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of what peers say they have given. `drawn`: tokens that sources claim; `signed`: of these, by receipts.

    Both are zero where no receipts are read.
    """

    tokens: int
    there_s: float
    line_bytes: int
    joules: float
    drawn: int
    signed: int


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a run beside its peers. `tokens`: trained so far, by all. `trouble`: why the view may be out of date.

    `held_out`: loss of the newest evaluation on held-out text, as the peer says that made it.
    `routes_told`: which routes are known, in words. `busy_name`: what a share of time called busy counts.
    """

    name: str
    run_id: str = ""
    progress: float
    tokens: int
    budget_tokens: int | None
    tokens_per_s: float
    held_out: float | None = None
    trouble: str | None = None
    routes_told: str = TOLD_ROUTES
    busy_name: str = AT_WORK


class SwarmFigures(RunTotals, frozen=True, kw_only=True):
    """The figures of a swarm that every view shows. `bottleneck`: a sentence; `limit`: the stage that it names."""

    at: float
    loss: float | None
    gap: float | None
    bottleneck: str
    limit: int | None = None
    stages: tuple[StageView, ...]
    given: GivenInAll


class SwarmView(SwarmFigures, frozen=True, kw_only=True):
    """A swarm at one moment. `left_s`: None where nothing moves. `routes`: taken lately, as far as is known here."""

    left_s: float | None
    peers: tuple[PeerView, ...]
    changes: tuple[Change, ...] = ()
    course: tuple[Moment, ...] = ()
    routes: tuple[Route, ...] = ()


class Thinned(Generic[T]):
    """At most `limit` of all points, evenly: when it is full, it drops every second one and takes half as many."""

    def __init__(self, limit: int = 512) -> None:
        self.points: list[T] = []
        self._limit, self._stride, self._seen = limit, 1, 0

    def add(self, point: T) -> None:
        if self._seen % self._stride == 0:
            self.points.append(point)
        self._seen += 1
        if len(self.points) >= self._limit:
            self.points = self.points[::2]
            self._stride *= 2


class SwarmObserver:
    """Puts views of a swarm together; between them it remembers what changed, and the course of the run."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._course = Thinned[Moment]()

    def tell(self, name: str, text: str, at: float) -> None:
        """Add a change."""
        self._changes.append(Change(at=at, name=name, text=text))

    def put_together(
        self,
        totals: RunTotals,
        stages: int,
        peers: Sequence[PeerView],
        at: float,
        routes: Sequence[Route] = (),
        *,
        sizes: Sequence[StageSize] = (),
        is_speed_known: bool = True,
    ) -> SwarmView:
        """Return a view, and add its moment to the course.

        `sizes`: of the stages, where `peers` may be a sample; none: all are there. `is_speed_known`: the speed counts
        all sources; false while some have taken only their first step.
        """
        by_stage: list[list[PeerView]] = [[] for _ in range(stages)]
        for peer in peers:
            if 0 <= peer.stage < stages:
                by_stage[peer.stage].append(peer)
        known = sizes or (None,) * stages
        seen = tuple(_stage_view(number, *stage) for number, stage in enumerate(zip(by_stage, known, strict=True)))
        loss, gap = _loss([peer for peer in peers if peer.stage == 0] or peers), _mean([peer.gap for peer in peers])
        speed, budget = totals.tokens_per_s, totals.budget_tokens
        is_over = totals.progress >= 1.0 or _all_finished(peers)
        left_s = 0.0 if is_over else None
        if not is_over and budget is not None and speed > 0.0 and is_speed_known:
            left_s = max(0.0, budget - totals.tokens) / speed
        bottleneck = present_bottleneck(seen, speed, is_over=is_over)
        if is_over and totals.progress < 1.0:
            bottleneck = Bottleneck("The run is over: all peers that are there have finished.")
        self._course.add(
            Moment(at=at, progress=totals.progress, tokens_per_s=speed, loss=loss, gap=gap, held_out=totals.held_out)
        )
        return SwarmView(
            **msgspec.structs.asdict(totals),
            at=at,
            left_s=left_s,
            loss=loss,
            gap=gap,
            bottleneck=bottleneck.sentence,
            limit=bottleneck.stage,
            stages=seen,
            peers=tuple(sorted(_with_shares(peers, seen), key=lambda peer: (peer.stage, peer.name, peer.peer))),
            changes=tuple(sorted(self._changes, key=lambda change: change.at)),  # silence is noticed late
            course=tuple(self._course.points),
            given=_given_in_all(peers, sizes),
            routes=tuple(routes),
        )


def short(peer: str) -> str:
    return peer[-SHORT_ID:]


def plain(words: str | None) -> str:
    """Return a stranger's words as plain bounded text, without signs that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in (words or "")[:MOST_WORDS])


def _given_in_all(peers: Sequence[PeerView], sizes: Sequence[StageSize]) -> GivenInAll:
    """Return sums over all peers. Of a sample only some tell what they have given; each stands for as many."""
    telling = [peer for peer in peers if peer.there_s or not sizes]
    tell = Counter(peer.stage for peer in telling)
    counted = [
        (sizes[peer.stage].peers / tell[peer.stage] if 0 <= peer.stage < len(sizes) else 1.0, peer) for peer in telling
    ]
    return GivenInAll(
        tokens=round(sum(scale * peer.tokens for scale, peer in counted)),
        there_s=sum(scale * (peer.there_s or 0.0) for scale, peer in counted),
        line_bytes=round(sum(scale * (peer.line_bytes or 0) for scale, peer in counted)),
        joules=sum(scale * (peer.joules or 0.0) for scale, peer in counted),
        drawn=sum(peer.tokens_claimed or 0 for peer in peers if peer.tokens_signed is not None),
        # Of each peer at most what it claims: the two figures are of the same tokens.
        signed=sum(min(peer.tokens_signed or 0, peer.tokens_claimed or 0) for peer in peers),
    )


def _loss(sources: Sequence[PeerView]) -> float | None:
    """Return the mean loss of the sources that have trained for a while; else of those that train; else of all."""
    training = [peer for peer in sources if peer.trains]
    there = [peer for peer in sources if peer.state != "gone"]
    groups = ([peer for peer in training if peer.settled], training, there, sources)
    return next((mean for group in groups if (mean := _mean([peer.loss for peer in group])) is not None), None)


def _all_finished(peers: Sequence[PeerView]) -> bool:
    """Say whether all present peers have finished: a run ends a little before its last tokens are signed."""
    return {peer.state for peer in peers} - {"gone"} == {PeerState.FINISHED}


def _with_shares(peers: Sequence[PeerView], stages: Sequence[StageView]) -> Iterator[PeerView]:
    for peer in peers:
        whole = stages[peer.stage].tokens_per_s if 0 <= peer.stage < len(stages) else 0.0
        yield msgspec.structs.replace(peer, share=peer.tokens_per_s / whole) if whole > 0.0 else peer


def _stage_view(number: int, peers: Sequence[PeerView], size: StageSize | None) -> StageView:
    present = [peer for peer in peers if peer.state != "gone"]
    waits = [
        (words, None if peer.cause is None else CAUSES.get(peer.cause)) for peer in present if (words := _brief(peer))
    ]
    keys = [cause or words for words, cause in waits]
    counts = Counter(keys)
    most = max(counts, key=lambda key: (counts[key], key), default=None)
    worst, cause = (None, None) if most is None else waits[keys.index(most)]
    size = size or StageSize(len(present))
    scale = size.peers / max(1, len(present))
    return StageView(
        stage=number,
        replicas=round(size.peers),
        training=round(scale * sum(peer.trains for peer in present)),
        tokens_per_s=scale * sum(peer.tokens_per_s for peer in present),
        busy=_mean([peer.busy for peer in present if peer.trains]),
        gap=_mean([peer.gap for peer in present]),
        waits=worst,
        waiting=0 if most is None else round(scale * counts[most]),
        cause=cause,
        error=size.error,
    )


def _brief(peer: PeerView) -> str | None:
    """Return what a peer waits for without details, so that equal waits count together."""
    return peer.waits if peer.cause in (None, WaitCause.OTHER) else wait_words(Wait(peer.cause), peer.stage)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
