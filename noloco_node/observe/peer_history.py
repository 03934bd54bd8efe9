"""`PeerHistory` folds one peer's journal, event by event; `ContributionLedger` adds up what it gave to each run.

The live view and the demo's summary read the same histories, so they cannot disagree. The same events give the same
numbers, live or years later. Memory is bounded: full curves are thinned evenly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.journal import events
from noloco_node.observe.swarm_view import Thinned
from noloco_node.run.peer_state import PeerState, Wait
from noloco_node.swarm.roster import Given

LONGEST_PAUSE_S = 120.0  # between two lines of a journal whose node was there all the time: it writes more often
RECENT = 8  # inner steps that the present speed is measured over
Number = TypeVar("Number", int, float)


class Contribution(msgspec.Struct, kw_only=True):
    """The contribution of a home to one run. `there_s`: how long the node was there; other times are unix seconds.

    `tokens`: of its windows, at any stage; `signed_tokens`: those that it drew as a source and the last stage signed.
    `joules`: of the device meanwhile; 0 if it does not tell.
    """

    run: str
    peers: list[str] = msgspec.field(default_factory=list)
    stages: list[int] = msgspec.field(default_factory=list)
    first_at: float
    last_at: float
    there_s: float = 0.0
    device_s: float = 0.0
    tokens: int = 0
    signed_tokens: int = 0
    inner_steps: int = 0
    rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    joules: float = 0.0

    def given(self) -> Given:
        """Return it as a field of our record."""
        return Given(self.tokens, round(self.there_s), self.sent_bytes, self.received_bytes, round(self.joules))


class ContributionLedger:
    """Adds up events by run; `by_run` has the runs in the order in which the home joined them."""

    def __init__(self) -> None:
        self.by_run: dict[str, Contribution] = {}
        self.now: Contribution | None = None  # the contribution to the present run; None before there is one
        self.sent, self.received = Counter[str](), Counter[str]()  # bytes to all runs, by purpose
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._joules, self._pid = 0.0, 0
        self._moves = False  # the node moves to another stage, where its totals go on
        self._heard_at = 0.0  # when the event before came, by a clock that may be set back

    def given(self, run: str) -> Given | None:
        """Return the contribution to a run as a field of our record; None without one."""
        found = self.by_run.get(run)
        return None if found is None else found.given()

    def take(self, event: events.Event) -> None:
        if isinstance(event, events.Started) and not (isinstance(event, events.Continued) and self.now is not None):
            begun = Contribution(run=event.run, first_at=event.at, last_at=event.at)
            begun = self.by_run.setdefault(event.run, begun)
            if begun is not self.now:
                self.now, self._heard_at = begun, event.at
            begun.peers += [event.peer] * (event.peer not in begun.peers)
            begun.stages += [event.stage] * (event.stage not in begun.stages)
            self._begin_totals(event.pid)
        now = self.now
        if now is None:
            return
        pause_s, self._heard_at = event.at - self._heard_at, event.at
        now.there_s += pause_s if 0.0 < pause_s <= LONGEST_PAUSE_S else 0.0
        now.last_at = max(now.last_at, event.at)
        match event:
            case events.InnerStep():
                now.inner_steps += 1
                now.tokens += event.tokens
                now.device_s += max(0.0, event.device_s)
            case OuterStepTaken():
                now.rounds += event.partner is not None
            case events.Traffic():
                sent, received = _all_grown(self._sent, event.sent), _all_grown(self._received, event.received)
                self.sent.update(sent)
                self.received.update(received)
                now.sent_bytes += sum(sent.values())
                now.received_bytes += sum(received.values())
                self._sent, self._received = event.sent, event.received
            case events.Energy():
                now.joules += _grown(self._joules, event.joules)
                self._joules = event.joules
            case events.Receipts():
                now.signed_tokens = max(now.signed_tokens, event.own)
            case events.Moved() | events.Finished():
                self._moves = isinstance(event, events.Moved)
            case _:
                pass

    def _begin_totals(self, pid: int) -> None:
        """Totals of traffic begin anew with each session, those of energy with each process."""
        if not self._moves or pid != self._pid:
            self._sent = self._received = {}
        if pid != self._pid:
            self._joules = 0.0
        self._moves, self._pid = False, pid


def _grown(before: Number, now: Number) -> Number:
    """Return by how much a total has grown; one that is smaller than before has begun anew."""
    return now - before if now >= before else now


def _all_grown(before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
    """Do as `_grown` does with totals by name, which begin anew together."""
    if any(now.get(name, 0) < total for name, total in before.items()):
        return now
    return {name: total - before.get(name, 0) for name, total in now.items()}


def ledger_of(journal: Iterable[events.Event]) -> ContributionLedger:
    ledger = ContributionLedger()
    for event in journal:
        ledger.take(event)
    return ledger


class Point(NamedTuple):
    """A value at `x`: unix seconds in a history, tokens or a share of them in a picture."""

    x: float
    value: float


Curve: TypeAlias = Thinned[Point]


def _curve() -> Curve:
    return Curve(4096)


@dataclass(slots=True)
class PeerHistory:
    """What one peer did so far. Times are unix seconds."""

    name: str
    stage: int
    slowdown: float = 1.0
    ledger: ContributionLedger = field(default_factory=ContributionLedger)
    peer: str | None = None
    parameters: int = 0  # of its stage
    state: PeerState | None = None
    waiting: Wait | None = None
    since: float = 0.0  # when `state` and `waiting` last changed
    began_at: float | None = None  # when its first inner step began
    ended_at: float = 0.0  # when its last inner step ended
    progress: float = 0.0  # of the run, 0 to 1, as of its last inner step
    recent: deque[events.InnerStep] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The last inner steps of this session but its first, which has waited for the swarm to come together."""
    steps: int = 0
    tokens: int = 0
    drawn_tokens: int = 0
    """Of its windows at stage 0: there each token of the swarm is drawn, by one peer. It may have moved since."""
    loss: float | None = None  # of the last inner steps, smoothed
    losses: Curve = field(default_factory=_curve)
    drawn: Curve = field(default_factory=_curve)  # `drawn_tokens` so far
    busy_s: float = 0.0
    worked_s: float = 0.0
    session_steps: int = 0  # inner steps of this session
    round: int = 0
    partner: str | None = None
    gap_first: float | None = None
    gap_last: float | None = None
    gaps: Curve = field(default_factory=_curve)
    met: int = 0
    solo: int = 0
    skipped: int = 0
    staleness: int = 0  # of all rounds together
    hops: dict[str, int] = field(default_factory=dict)
    former_hops: Counter[str] = field(default_factory=Counter)  # of assignments before this one, whose totals are over
    hops_at: float | None = None
    routes: dict[str, float] = field(default_factory=dict)
    """Microbatches a second by next hop, between the last two totals."""
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    traffic_at: float | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    violations: int = 0
    others_signed: dict[str, int] = field(default_factory=dict)
    """Tokens of other sources for which it has seen receipts, by peer."""
    evaluated: events.Evaluated | None = None  # its last evaluation
    finished: str | None = None  # why its training ended
    gone: str | None = None  # how its process ended, where the observer saw that; a journal cannot tell

    def take(self, event: events.Event) -> None:
        self.ledger.take(event)
        match event:
            case events.InnerStep():
                self._take_inner_step(event)
            case OuterStepTaken():
                self._take_outer_step(event)
            case events.Continued() if self.peer is not None:
                pass
            case events.Started():
                self.peer, self.stage, self.finished = event.peer, event.stage, None
                self.parameters = event.parameters
                self.start_life()
            case events.StateChanged():
                self.state, self.waiting, self.since = event.state, event.waiting, event.at
            case RoundSkipped():
                self.skipped += 1
            case events.Hops():
                self._take_hops(event)
            case events.Traffic():
                self._take_traffic(event)
            case events.RefusedMicrobatch(here=False):
                self.refused[event.reason] += event.count
            case events.Lost():
                self.lost[event.what] += event.count
            case events.PeerViolation():
                self.violations += event.count
            case events.Receipts():
                self.others_signed = event.signed
            case events.Evaluated():
                self.evaluated = event
            case events.Finished():
                self.finished, self.waiting, self.since = event.why, None, event.at

    def start_life(self) -> None:
        """Its process is a new one: the peer is there, and has no speed yet."""
        self.gone, self.session_steps = None, 0
        self.loss = None  # the new process has the weights of a checkpoint or of a donor
        self.recent.clear()
        self.former_hops.update(self.hops)
        self.hops, self.hops_at, self.traffic_at = {}, None, None  # totals begin anew
        self.routes, self.sent_per_s, self.received_per_s = {}, None, None

    def _take_inner_step(self, event: events.InnerStep) -> None:
        if self.began_at is None:
            self.began_at = event.at - event.seconds
        if self.underway:
            self.recent.append(event)
            self.busy_s += event.device_s
            self.worked_s += event.seconds
        self.session_steps += 1
        self.ended_at, self.progress = event.at, event.progress
        self.steps = event.step
        self.tokens += event.tokens
        self.drawn_tokens += event.tokens * (self.stage == 0)
        self.drawn.add(Point(event.at, self.drawn_tokens))
        if event.loss is not None:
            self.losses.add(Point(event.at, event.loss))
            self.loss = event.loss if self.loss is None else 0.8 * self.loss + 0.2 * event.loss

    def _take_outer_step(self, event: OuterStepTaken) -> None:
        self.round, self.partner = event.round, event.partner
        self.met += event.partner is not None
        self.solo += event.partner is None
        self.staleness += event.staleness
        if event.gap is not None:
            self.gap_first = event.gap if self.gap_first is None else self.gap_first
            self.gap_last = event.gap
            self.gaps.add(Point(event.at, event.gap))

    def _take_hops(self, event: events.Hops) -> None:
        if self.hops_at is not None and event.at > self.hops_at:
            known = self.hops.keys() if event.others else event.counts.keys()  # one that was not listed has no rate yet
            grown = {peer: event.counts[peer] - self.hops.get(peer, 0) for peer in event.counts.keys() & known}
            self.routes = {peer: more / (event.at - self.hops_at) for peer, more in grown.items() if more > 0}
        self.hops, self.hops_at = event.counts, event.at

    def _take_traffic(self, event: events.Traffic) -> None:
        if self.traffic_at is not None and event.at > self.traffic_at:
            for_s = event.at - self.traffic_at
            self.sent_per_s = max(0, sum(event.sent.values()) - sum(self.sent.values())) / for_s
            self.received_per_s = max(0, sum(event.received.values()) - sum(self.received.values())) / for_s
        self.sent, self.received, self.traffic_at = event.sent, event.received, event.at

    @property
    def signed_tokens(self) -> int | None:
        """Tokens that it drew as a source and has receipts for; None if there are none."""
        return (None if self.ledger.now is None else self.ledger.now.signed_tokens) or None

    @property
    def is_there(self) -> bool:
        """Whether the peer still trains, as far as its journal and the observer tell."""
        return self.finished is None and self.gone is None

    @property
    def underway(self) -> bool:
        """Whether it has taken an inner step in this session."""
        return self.session_steps > 0

    @property
    def busy(self) -> float | None:
        """The share of the time between its steps for which its device worked; None if no step tells."""
        return self.busy_s / self.worked_s if self.busy_s > 0 else None

    @property
    def mean_staleness(self) -> float:
        return self.staleness / max(1, self.met + self.solo)

    def tokens_per_s(self, now: float) -> float:
        """Return the speed over the last steps as of `now` (unix seconds); it falls while no step comes."""
        if not self.recent or not self.is_there:
            return 0.0
        return sum(step.tokens for step in self.recent) / self._recent_s(now)

    def busy_share(self, now: float) -> float | None:
        """Return the share of the time of the last steps for which the device worked, as of `now`; None if unknown."""
        worked_s = sum(step.device_s for step in self.recent)
        return min(1.0, worked_s / self._recent_s(now)) if worked_s > 0.0 else None

    def _recent_s(self, now: float) -> float:
        # The step that is under way counts once it takes longer than the last one did. Steps are as long as they say:
        # the clock that dates them may have been set since.
        last = self.recent[-1]
        more_s = max(0.0, now - last.at - last.seconds)
        return max(sum(step.seconds for step in self.recent) + more_s, 1e-9)
