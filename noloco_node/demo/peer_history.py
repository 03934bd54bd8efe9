"""One peer's journal, folded event by event into what a person asks about.

The live view and the summary read the same histories, so they cannot disagree. A history is a fold: whoever feeds it
the same events gets the same numbers, live or years later. It takes no more memory with time: curves are thinned evenly
when they are full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from gossip.events import OuterStepTaken, RoundDeferred
from noloco_node.journal.events import (
    Event,
    Finished,
    Hops,
    InnerStep,
    Lost,
    PeerViolation,
    RefusedMicrobatch,
    Started,
    StateChanged,
    Traffic,
)
from noloco_node.run.peer_state import PeerState


class Point(NamedTuple):
    """A value at `x`: unix seconds in a history, tokens or a share of them in a picture."""

    x: float
    value: float


class Curve:
    """At most `limit` points: when it is full, every second one goes and the rest are taken half as often."""

    def __init__(self, limit: int = 4096) -> None:
        self.points: list[Point] = []
        self._limit, self._stride, self._seen = limit, 1, 0

    def add(self, x: float, value: float) -> None:
        """Take a point, or pass it over where the curve is thinned."""
        if self._seen % self._stride == 0:
            self.points.append(Point(x, value))
        self._seen += 1
        if len(self.points) >= self._limit:
            self.points = self.points[::2]
            self._stride *= 2


class StepRate(NamedTuple):
    """When an inner step ended (unix seconds), how long it took, and how many tokens it had."""

    at: float
    seconds: float
    tokens: int


class PeerHistory:
    """What one peer did so far."""

    RECENT = 8
    """Inner steps that the present speed is measured over."""

    def __init__(self, name: str, stage: int, slowdown: float = 1.0) -> None:
        self.name, self.stage, self.slowdown = name, stage, slowdown
        self.peer: str | None = None
        self.parameters = 0
        self.state: PeerState | None = None
        self.waiting: str | None = None
        self.since = 0.0
        self.step = 0
        self.progress = 0.0
        self.tokens = 0
        self.loss: float | None = None
        self.gap: float | None = None
        self.losses, self.gaps, self.drawn = Curve(), Curve(), Curve()
        self.first_step: StepRate | None = None
        self.busy_s = self.worked_s = 0.0
        self._underway = False
        self.recent: deque[StepRate] = deque(maxlen=self.RECENT)
        self.round = self.met = self.solo = self.deferred = self.staleness = 0
        self.partner: str | None = None
        self.gossip_sent = self.gossip_received = 0
        self.hops: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.refused: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.violations = 0
        self.finished: Finished | None = None
        self.gone: str | None = None
        """How its process ended, where somebody saw it end; a journal cannot tell."""

    def take(self, event: Event) -> None:
        """Fold one event in."""
        match event:
            case InnerStep():
                self._take_inner_step(event)
            case OuterStepTaken():
                self._take_outer_step(event)
            case Started():
                self.peer, self.stage, self.parameters = event.peer, event.stage, event.parameters
                self._underway = False
            case StateChanged():
                self.state, self.waiting, self.since = event.state, event.waiting, event.at
            case RoundDeferred():
                self.deferred += 1
            case Hops():
                self.hops = event.counts
            case Traffic():
                self.sent, self.received = event.sent, event.received
            case RefusedMicrobatch():
                self.refused[event.reason] += 0 if event.here else event.count
            case Lost():
                self.lost[event.what] += event.count
            case PeerViolation():
                self.violations += 1
            case Finished():
                self.finished, self.waiting, self.since = event, None, event.at

    def _take_inner_step(self, event: InnerStep) -> None:
        pace = StepRate(event.at, event.seconds, event.tokens)
        self.first_step = self.first_step or pace
        self.recent.append(pace)
        if self._underway:  # the first step of a life has waited for the swarm to come together
            self.busy_s += event.device_s
            self.worked_s += event.seconds
        self._underway = True
        self.step, self.progress = event.step, max(self.progress, event.progress)
        self.tokens += event.tokens
        self.drawn.add(event.at, self.tokens)
        if event.loss is not None:
            self.losses.add(event.at, event.loss)
            self.loss = event.loss if self.loss is None else 0.8 * self.loss + 0.2 * event.loss

    def _take_outer_step(self, event: OuterStepTaken) -> None:
        self.round, self.partner = event.round, event.partner
        self.met += event.partner is not None
        self.solo += event.partner is None
        self.staleness += event.staleness
        self.gossip_sent += event.bytes_sent
        self.gossip_received += event.bytes_received
        if event.gap is not None:
            self.gap = event.gap
            self.gaps.add(event.at, event.gap)

    @property
    def busy(self) -> float | None:
        """The share of its wall time at work for which its device worked; None where no step says so."""
        return self.busy_s / self.worked_s if self.busy_s > 0 else None

    def tokens_per_s(self, now: float) -> float:
        """Return the speed over the last steps as of `now` (unix seconds): it falls while nothing comes."""
        if not self.recent or self.finished is not None or self.gone is not None:
            return 0.0
        first = self.recent[0]
        # The step that is under way counts once it takes longer than the last one did.
        until = max(self.recent[-1].at, now - self.recent[-1].seconds)
        return sum(pace.tokens for pace in self.recent) / max(until - first.at + first.seconds, 1e-9)


def over_tokens(curve: Curve, histories: Sequence[PeerHistory]) -> list[Point]:
    """Return the points over the tokens that all sources together had trained on at their time.

    A common measure for all peers, and an exact one: the progress in a journal is only what its peer had heard of.
    """
    sources = [history for history in histories if history.stage == 0]
    return [Point(sum(_tokens_at(source, point.x) for source in sources), point.value) for point in curve.points]


def _tokens_at(source: PeerHistory, at: float) -> float:
    points, first = source.drawn.points, source.first_step
    after = bisect_left(points, at, key=attrgetter("x"))
    if first is None or after == len(points):
        return float(source.tokens)
    end = points[after]
    start = points[after - 1] if after else Point(first.at - first.seconds, 0.0)
    share = (at - start.x) / max(end.x - start.x, 1e-9)
    return start.value + max(0.0, share) * (end.value - start.value)
