"""The figures of a simulation: one struct, which is the JSON, and from which the text and the pictures are made.

Everything in it but `real_s` follows from the scenario, to the bit. Shares of time are of the time in which a peer
trained: from the start of its process to the end of its last round, or to its crash.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from noloco_node import __version__
from noloco_node.observe.bottleneck import Cause
from noloco_node.sim.report.collector import EventCollector, Happened, Migrated, Row, StageTime
from noloco_node.sim.scenario.scenario import Scenario
from noloco_node.sim.scenario.setup import SimSetup
from noloco_node.sim.world import LOOK_S, World

MOMENTS = 60
"""Pieces of the timeline, at most."""


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the run up to `until_s`; devices and gap by stage. None where there was nothing to measure."""

    until_s: float
    tokens_per_s: float
    devices: tuple[float | None, ...]
    gap: tuple[float | None, ...]
    loss: float | None


def training_s(rows: Sequence[Row], ended_s: float) -> float:
    """Return the seconds from the last moment without a gradient to the first with all of them."""
    total = rows[-1].microbatches
    begun_s = max((row.at_s for row in rows if not row.microbatches), default=0.0)
    done_s = min((row.at_s for row in rows if row.microbatches == total), default=ended_s)
    return max(0.0, min(done_s, ended_s) - begun_s)


def timeline_of(rows: Sequence[Row], setting: SimSetup) -> tuple[TimelinePoint, ...]:
    stages, every = setting.run.pipeline.stages, range(setting.run.pipeline.stages)
    zero = (0.0,) * stages
    start = Row(0.0, 0, zero, zero, zero, (0,) * stages, 0.0, 0)
    pieces = min(MOMENTS, len(rows))
    marks = [start, *(rows[(number + 1) * len(rows) // pieces - 1] for number in range(pieces))]
    return tuple(
        TimelinePoint(
            until_s=now.at_s,
            tokens_per_s=(now.microbatches - then.microbatches) * setting.microbatch_tokens / (now.at_s - then.at_s),
            devices=tuple(_ratio(now.busy_s[s] - then.busy_s[s], now.alive_s[s] - then.alive_s[s]) for s in every),
            gap=tuple(_quotient(now.gap[s] - then.gap[s], now.gaps[s] - then.gaps[s]) for s in every),
            loss=_quotient(now.loss - then.loss, now.losses - then.losses),
        )
        for then, now in pairwise(marks)
        if now.at_s > then.at_s
    )


def _ratio(worked_s: float, alive_s: float) -> float | None:
    """A job counts when it begins, so that a short piece may hold more work than time."""
    return min(1.0, max(0.0, worked_s / alive_s)) if alive_s > 1e-9 else None


def _quotient(total: float, count: int) -> float | None:
    return total / count if count else None


COMPUTING, UNSEEN = "computing", "unseen"
ENDS = 0.1
"""Share of the run whose mean is the loss at the start, and at the end."""


class PeerSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of several peers."""

    mean: float
    least: float
    most: float


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stage.

    `passes_s`: device seconds of a microbatch, forward and backward. `time`: shares of the peers' time, at work and by
    what they waited for; they add up to 1. `devices`: share of time at work, over the peers. `up`, `down`: shares of
    the lines' capacity, None where they are without limit.
    """

    stage: int
    peers: int
    forward_s: float
    passes_s: float
    devices: PeerSpread
    up: PeerSpread | None
    down: PeerSpread | None
    time: dict[str, float]
    inner_steps: int
    met: int
    skipped: int
    solo: int
    gap_first: float | None
    gap_last: float | None
    sent_bytes: int
    received_bytes: int

    @property
    def training(self) -> float:
        """Share of the time in which the peers trained: joining and ending aside."""
        return 1.0 - self.time.get(Cause.JOINING, 0.0) - self.time.get(Cause.ENDING, 0.0)

    @property
    def work(self) -> float:
        return min(1.0, self.time[COMPUTING] / self.training) if self.training > 0.0 else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole simulation.

    `budget_tokens`: after which it was to end. Sources learn of each other's by records, and so overshoot it.
    `virtual_s`: until the last step; `training_s`: from the first replica's start to the last gradient at a source,
    over which `tokens_per_s` is. `window`: microbatches of an inner step. `retried`: calls after which another replica
    was asked, by reason. `given_up`: microbatches that their source had to begin again. `discarded`: of windows that no
    step used. `sent_bytes`: by purpose; `microbatch_bytes`: forward (activations) and backward (gradients).
    """

    version: str
    digest: str
    scenario: Scenario
    parameters: int
    replicas: int
    window: int
    windows_in_flight: int
    microbatch_tokens: int
    virtual_s: float
    training_s: float
    real_s: float = 0.0
    tokens: int
    budget_tokens: int
    microbatches: int
    tokens_per_s: float
    loss_first: float | None
    loss_last: float | None
    stages: tuple[StageReport, ...]
    retried: dict[str, int]
    given_up: dict[str, int]
    counted_twice: int
    discarded: int
    true_suspects: int
    false_suspects: int
    exchanges_lost: int
    sent_bytes: dict[str, int]
    microbatch_bytes: dict[str, int]
    network: dict[str, int]
    happened: tuple[Happened, ...]
    course: tuple[TimelinePoint, ...]
    moved: tuple[Migrated, ...] = ()
    standstill: str | None = None
    """The sentence about peers that waited for ever, where no peer could take a step any more."""


def make_report(world: World, collector: EventCollector) -> Report:
    """Sum up a world that has come to its end; to be called within its loop."""
    collector.close()
    setting, run, counts = world.setting, world.setting.run, world.network.statistics()
    # What comes after the last step is no part of the course; its last row says what became of all. A course has a
    # length, also where all was over at once.
    rows = [row for row in collector.rows if row.at_s < world.ended_s]
    rows.append(collector.rows[-1]._replace(at_s=world.ended_s or collector.rows[-1].at_s or LOOK_S))
    course, lasted_s = timeline_of(rows, setting), training_s(rows, world.ended_s)
    totals = _totals(collector)
    microbatches = collector.stage_times.microbatches()
    tokens = microbatches * setting.microbatch_tokens
    losses = [moment.loss for moment in course if moment.loss is not None]
    several = max(1, round(ENDS * len(losses)))
    return Report(
        version=__version__,
        digest=world.digest(),
        scenario=setting.scenario,
        parameters=setting.parameters,
        replicas=run.pipeline.replicas,
        window=run.pipeline.microbatches_per_step,
        windows_in_flight=run.pipeline.windows_in_flight,
        microbatch_tokens=setting.microbatch_tokens,
        virtual_s=world.ended_s,
        training_s=lasted_s,
        tokens=tokens,
        budget_tokens=collector.budget * setting.microbatch_tokens,
        microbatches=microbatches,
        tokens_per_s=tokens / lasted_s if lasted_s else 0.0,
        loss_first=_mean(losses[:several]),
        loss_last=_mean(losses[-several:]),
        stages=tuple(_stage(number, world, collector, course) for number in range(run.pipeline.stages)),
        retried=_nonzero(totals, "downstream.lost_", "downstream.refused_"),
        given_up={reason: totals[f"source.{reason}"] for reason in ("expired", "no_route")},
        counted_twice=totals["worker.counted_twice"],
        discarded=collector.sums.discarded,
        true_suspects=collector.true_suspects,
        false_suspects=collector.false_suspects,
        exchanges_lost=totals["rounds.lost"],
        sent_bytes=_purposes(counts),
        microbatch_bytes=_directions(setting, counts),
        network=_network(counts),
        happened=tuple(collector.happened),
        course=course,
        moved=tuple(collector.moved),
        standstill=world.standstill,
    )


def _totals(collector: EventCollector) -> Counter[str]:
    totals: Counter[str] = Counter()
    for stage_time in collector.stage_times.all:
        if stage_time.stage is None:
            continue
        found = stage_time.counters()
        totals.update({name: int(value) for name, value in found.items() if isinstance(value, int)})
        if found and stage_time.stage == 0:
            totals.update({f"source.{name}": int(found[f"worker.{name}"]) for name in ("expired", "no_route")})
    return totals


def _nonzero(totals: Counter[str], *prefixes: str) -> dict[str, int]:
    found = ((name, count) for prefix in prefixes for name, count in sorted(totals.items()) if name.startswith(prefix))
    return {name.partition(".")[2]: count for name, count in found if count}


def _stage(number: int, world: World, collector: EventCollector, course: Sequence[TimelinePoint]) -> StageReport:
    stage_times = [stage_time for stage_time in collector.stage_times.all if stage_time.stage == number]
    devices = _devices(stage_times)
    counts = [counters for stage_time in stage_times if (counters := stage_time.counters())]
    gaps = [moment.gap[number] for moment in course if moment.gap[number] is not None]
    traffic = [stage_time.traffic for stage_time in stage_times if stage_time.traffic is not None]
    up, down = _lines(stage_times)
    return StageReport(
        stage=number,
        peers=len({stage_time.peer.name for stage_time in stage_times}),
        forward_s=world.setting.prices[number].forward_s,
        passes_s=world.setting.prices[number].passes_s,
        devices=devices,
        up=up,
        down=down,
        time=_time(devices.mean, collector.causes[number]),
        inner_steps=collector.sums.inner_steps[number],
        met=sum(int(count["rounds.met"]) for count in counts),
        skipped=sum(int(count["rounds.skipped"]) for count in counts),
        solo=sum(int(count["rounds.solo"]) for count in counts),
        gap_first=gaps[0] if gaps else None,
        gap_last=gaps[-1] if gaps else None,
        sent_bytes=sum(sum(each.sent.values()) for each in traffic),
        received_bytes=sum(sum(each.received.values()) for each in traffic),
    )


def _devices(stage_times: Sequence[StageTime]) -> PeerSpread:
    """Return the share of time at work: the mean over all time, the extremes over peers."""
    worked_s: dict[str, float] = {}
    alive_s: dict[str, float] = {}
    for stage_time in stage_times:
        name = stage_time.peer.name
        worked_s[name] = worked_s.get(name, 0.0) + stage_time.busy_s
        alive_s[name] = alive_s.get(name, 0.0) + stage_time.alive_s(0.0)
    shares = [worked_s[name] / alive_s[name] for name in alive_s if alive_s[name] > 0.0]
    total_s = sum(alive_s.values())
    mean = sum(worked_s.values()) / total_s if total_s else 0.0
    return PeerSpread(mean=mean, least=min(shares, default=0.0), most=max(shares, default=0.0))


def _time(work: float, causes: Counter[Cause]) -> dict[str, float]:
    looks = sum(causes.values())
    if not looks:
        return {COMPUTING: work, UNSEEN: 1.0 - work}
    return {COMPUTING: work} | {str(cause): (1.0 - work) * causes[cause] / looks for cause in Cause if causes[cause]}


def _lines(stage_times: Sequence[StageTime]) -> tuple[PeerSpread | None, PeerSpread | None]:
    """Return how full uplinks and downlinks were, each peer's by the end of its last session."""
    last = {stage_time.peer.name: stage_time.lines for stage_time in stage_times}
    up, down = (
        [lines[side].utilisation for lines in last.values() if lines and 0.0 < lines[side].capacity_bytes < math.inf]
        for side in (0, 1)
    )
    return _spread(up), _spread(down)


def _spread(shares: Sequence[float]) -> PeerSpread | None:
    return PeerSpread(mean=sum(shares) / len(shares), least=min(shares), most=max(shares)) if shares else None


def _purposes(counts: dict[str, int | float]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, value in counts.items():
        if name.startswith("bytes."):
            found[name.removeprefix("bytes.").partition("/")[0]] += int(value)
    return dict(sorted(found.items()))


def _directions(setting: SimSetup, counts: dict[str, int | float]) -> dict[str, int]:
    return {
        "forward": int(counts.get("messages.Microbatch", 0)) * setting.sizes.microbatch_bytes,
        "backward": int(counts.get("messages.Gradient", 0)) * setting.sizes.gradient_bytes,
    }


def _network(counts: dict[str, int | float]) -> dict[str, int]:
    words = ("conversations.", "dials.", "records.", "messages.")
    return {name: int(counts[name]) for name in sorted(counts) if name.startswith(words)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
