"""What keeps a swarm from going faster, in one sentence.

The first of these that holds:

1. nothing was trained;
2. lines are nearly full, and fuller than any devices are busy; or half full, and far more so;
3. devices are nearly always busy: those of one stage, or all of them alike; or one stage stands out far above the rest;
4. else no device and no line is the limit but the order of things: what idle devices waited for most says which.

The waits of a pipeline (for microbatches, replies, the end of a window) have one cause in common: a window's worth of
work does not cover the way that a microbatch goes. Whether latency makes that way long, or transfers, or the passes of
the other stages, follows from the prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from noloco_node.sim.report.figures import Report, Spread, StageReport
from noloco_node.sim.report.tally import Cause
from noloco_node.sim.setting import MBIT_BYTES

NEARLY_FULL, HALF_FULL = 0.75, 0.5
ALIKE = 0.85
"""Stages whose devices are at least so busy, measured by the busiest, count as equally busy."""
STANDS_OUT = 1.5
PIPELINE = (Cause.MICROBATCHES, Cause.REPLIES, Cause.WINDOW)


def bottleneck(report: Report) -> str:
    """Return the sentence."""
    waits = _waits(report)
    if not report.microbatches:
        return f"Nothing was trained: the time went by with {_most(waits) or 'nothing'}."
    busiest = max(report.stages, key=lambda stage: stage.work)
    line = _line(report, busiest.work)
    if line:
        return line
    sentence = _devices(report.stages, busiest)
    if sentence:
        return sentence
    pipeline = sum(waits.get(cause, 0.0) for cause in PIPELINE)
    others = {cause: share for cause, share in waits.items() if cause not in PIPELINE}
    worst = _most(others)
    if worst is None or others[worst] <= pipeline:
        return _pipeline(report, busiest, pipeline)
    return _other(report, worst, others[worst])


def _waits(report: Report) -> dict[str, float]:
    """Return the idle time by cause, a mean over the stages."""
    waits: dict[str, float] = {}
    for stage in report.stages:
        for cause in Cause:
            waits[cause] = waits.get(cause, 0.0) + stage.time.get(cause, 0.0) / len(report.stages)
    return waits


def _most(waits: Mapping[str, float]) -> str | None:
    return max(waits, key=lambda cause: waits[cause], default=None)


def _line(report: Report, work: float) -> str | None:
    found: list[tuple[float, int, str]] = []
    for stage in report.stages:
        spreads: tuple[tuple[str, Spread | None], ...] = (("up", stage.up), ("down", stage.down))
        found += [
            (min(1.0, spread.mean / stage.training), -stage.stage, side)
            for side, spread in spreads
            if spread is not None and stage.training > 0.0
        ]
    full, number, side = max(found, default=(0.0, 0, ""))
    if full < work or (full < NEARLY_FULL and full < max(HALF_FULL, STANDS_OUT * work)):
        return None
    return (
        f"The {side}links of stage {-number} are the bottleneck: they were {full:.0%} full, "
        f"while no stage's devices were busy for more than {work:.0%} of the time."
    )


def _devices(stages: Sequence[StageReport], busiest: StageReport) -> str | None:
    rest = [stage.work for stage in stages if stage is not busiest]
    others = sum(rest) / len(rest) if rest else 0.0
    least = min(rest, default=busiest.work)
    if rest and least >= ALIKE * busiest.work and busiest.work >= NEARLY_FULL:
        return f"The devices are the limit, of all stages alike: they were busy for {least:.0%} of the time or more."
    if busiest.work < NEARLY_FULL and (not rest or busiest.work < STANDS_OUT * max(rest)):
        return None
    if not rest:
        return f"The devices are the limit: they were busy for {busiest.work:.0%} of the time."
    return (
        f"Stage {busiest.stage} is the bottleneck: its devices were busy for {busiest.work:.0%} of the time, "
        f"those of the other stages for {others:.0%}."
    )


def _pipeline(report: Report, busiest: StageReport, share: float) -> str:
    """Say what makes the way of a microbatch longer than its window: latency, transfers or passes."""
    latency_s = 2 * (len(report.stages) - 1) * report.scenario.network.latency.mean_s
    transfers_s = _transfers_s(report)
    passes_s = 3 * (sum(stage.forward_s for stage in report.stages) - busiest.forward_s)
    window_s = 3 * report.window * busiest.forward_s
    idle = f"Devices waited for other stages for {share:.0%} of the time"
    work = f"A window of {report.window} microbatches is {window_s:.3g} s of work at a stage"
    if transfers_s > max(latency_s, passes_s):
        return f"The lines are too slow for the windows. {work}, each is in transfer for {transfers_s:.3g} s. {idle}."
    if latency_s > passes_s:
        why = f"each is on its way between stages for {latency_s:.3g} s"
        return f"The windows are too small for the latency. {work}, {why}. {idle}."
    why = f"each spends {passes_s:.3g} s at other stages"
    return f"The windows are too small for so many stages. {work}, {why}. {idle}."


def _transfers_s(report: Report) -> float:
    """Return the seconds that a microbatch is in transfer, there and back, on lines that are otherwise empty."""
    network = report.scenario.network
    mbit = min(network.up_mbit_per_s or math.inf, network.down_mbit_per_s or math.inf)
    sent = max(1, report.network.get("messages.Microbatch", 0))
    both_bytes = sum(report.microbatch_bytes.values()) / sent
    return (len(report.stages) - 1) * both_bytes / (mbit * MBIT_BYTES)


def _other(report: Report, cause: str, share: float) -> str:
    stage = max(report.stages, key=lambda stage: stage.time.get(cause, 0.0))
    match cause:
        case Cause.GOSSIP:
            return f"Blocking rounds are the bottleneck: devices stood still in them for {share:.0%} of the time."
        case Cause.ROOM:
            return (
                f"Stage {stage.stage + 1} is the bottleneck: its replicas refused microbatches, and those of stage "
                f"{stage.stage} waited for room for {stage.time[cause]:.0%} of their time."
            )
        case Cause.ROUTE:
            return (
                f"Stage {min(stage.stage + 1, len(report.stages) - 1)} was out of reach: replicas of stage "
                f"{stage.stage} waited for {stage.time[cause]:.0%} of their time for one of it."
            )
        case Cause.JOINING:
            return f"Joining took longest: {share:.0%} of the peers' time. A longer run would show more."
        case _:
            return f"The end of the run took longest: {share:.0%} of the peers' time. A longer run would show more."
