"""What keeps a swarm from going faster, in one sentence.

The first of these that holds:

1. nothing was trained;
2. a stage was out of reach for half of the time: who died looks busy, for as long as it lived;
3. lines are nearly full, and fuller than any devices are busy; or half full, and far more so, outside blocking rounds;
4. devices are nearly always busy: those of one stage, or all of them alike; or one stage stands out far above the rest;
5. else no device and no line is the limit but the order of things: what idle devices waited for most says which.

The waits of a pipeline (for microbatches, replies, the end of a window) have one cause in common: a window's worth of
work does not cover the way that a microbatch goes. Whether latency makes that way long, or transfers, or the passes of
the other stages, follows from the prices. All shares are of the time of training: joining and ending aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from noloco_node.observe.bottleneck import HALF_FULL, NEARLY_FULL, PAST, STANDS_OUT, WHILE, Cause, devices_bottleneck
from noloco_node.sim.report.figures import PeerSpread, Report, StageReport
from noloco_node.sim.scenario.setup import MBIT_BYTES

TRIPS = 2
"""Latencies that a call from stage to stage costs, on a stream that is open."""
PIPELINE = (Cause.MICROBATCHES, Cause.REPLIES, Cause.WINDOW)


def bottleneck(report: Report) -> str:
    """Return the sentence."""
    waits = _waits(report)
    if not report.microbatches:
        worst = _most(waits)
        return f"Nothing was trained: {'nobody was there' if worst is None else 'most peers ' + WHILE[worst]}."
    if any(_share(stage, Cause.ROUTE) >= HALF_FULL for stage in report.stages):
        return _other(report, Cause.ROUTE, waits[Cause.ROUTE])
    busiest = max(report.stages, key=lambda stage: stage.work)
    line = _line(report, busiest.work, _most(waits) == Cause.GOSSIP)
    if line:
        return line
    devices = devices_bottleneck({stage.stage: stage.work for stage in report.stages}, PAST)
    if devices:
        return devices.sentence
    pipeline = sum(waits.get(cause, 0.0) for cause in PIPELINE)
    others = {cause: share for cause, share in waits.items() if cause not in PIPELINE}
    worst = _most(others)
    if worst is None or others[worst] <= pipeline:
        return _pipeline(report, busiest, pipeline)
    return _other(report, worst, others[worst])


def _waits(report: Report) -> dict[Cause, float]:
    """Return the idle time by cause, a mean over the stages; joining and ending in all the time, others in training."""
    return {cause: sum(_share(stage, cause) for stage in report.stages) / len(report.stages) for cause in Cause}


def _share(stage: StageReport, cause: Cause) -> float:
    whole = 1.0 if cause in (Cause.JOINING, Cause.ENDING) else stage.training
    return min(1.0, stage.time.get(cause, 0.0) / whole) if whole > 0.0 else 0.0


def _most(waits: Mapping[Cause, float]) -> Cause | None:
    return max((cause for cause in waits if waits[cause] > 0.0), key=lambda cause: waits[cause], default=None)


def _line(report: Report, work: float, gossip: bool) -> str | None:
    """Say which lines are the limit. `gossip`: devices waited for blocking rounds most, whatever lines they fill."""
    found: list[tuple[float, int, str]] = []
    for stage in report.stages:
        spreads: tuple[tuple[str, PeerSpread | None], ...] = (("up", stage.up), ("down", stage.down))
        found += [
            (min(1.0, spread.mean / stage.training), -stage.stage, side)
            for side, spread in spreads
            if spread is not None and stage.training > 0.0
        ]
    full, number, side = max(found, default=(0.0, 0, ""))
    if full < work or (full < NEARLY_FULL and (gossip or full < max(HALF_FULL, STANDS_OUT * work))):
        return None
    return (
        f"The {side}links of stage {-number} are the bottleneck: they were {full:.0%} full in training, "
        f"while no stage's devices were busy for more than {work:.0%} of it."
    )


def _pipeline(report: Report, busiest: StageReport, share: float) -> str:
    """Say what makes the way of a microbatch longer than its window: latency, transfers or passes."""
    devices = report.scenario.devices
    slowness = sum(devices.slowness) / len(devices.slowness)
    pauses_s = 2 * devices.stutter_share * devices.stutter_pause_s
    own_s = 3 * busiest.forward_s * slowness + pauses_s
    others = [stage for stage in report.stages if stage is not busiest]
    way = {
        "passes": sum(3 * stage.forward_s * slowness + pauses_s for stage in others),
        "transfers": _transfers_s(report),
        "latency": TRIPS * len(others) * report.scenario.network.latency.mean_s,
    }
    longest = max(way, key=lambda part: way[part])
    first = {
        "passes": "The windows are too small for so many stages.",
        "transfers": "The lines are too slow for the windows.",
        "latency": "The windows are too small for the latency.",
    }[longest]
    if len(others) == 1 and longest == "passes":
        first = "The windows are too small."
    parts = ", ".join(f"{seconds:.3g} s of {part}" for part, seconds in way.items() if seconds >= 0.0005)
    several, in_flight = report.windows_in_flight > 1, report.window * report.windows_in_flight
    count = f"{'Two windows' if several else 'A window'} of {report.window} microbatch{'es' * (report.window > 1)}"
    work = (
        f"{count} {'are' if several else 'is'} {in_flight * own_s:.3g} s of work at a stage; "
        f"the way of one through the others adds {parts}"
    )
    return f"{first} {work}. Devices waited for other stages for {share:.0%} of the training."


def _transfers_s(report: Report) -> float:
    """Return the seconds that a microbatch is in transfer, there and back, on lines that are otherwise empty."""
    network = report.scenario.network
    mbit = min(network.up_mbit_per_s or math.inf, network.down_mbit_per_s or math.inf)
    sent = max(1, report.network.get("messages.Microbatch", 0))
    both_bytes = sum(report.microbatch_bytes.values()) / sent
    return (len(report.stages) - 1) * both_bytes / (mbit * MBIT_BYTES)


def _other(report: Report, cause: Cause, share: float) -> str:
    stage = max(report.stages, key=lambda stage: _share(stage, cause))
    match cause:
        case Cause.GOSSIP:
            return f"Blocking rounds are the bottleneck: devices stood still in them for {share:.0%} of the training."
        case Cause.ROOM:
            return (
                f"Stage {stage.stage + 1} is the bottleneck: its replicas refused microbatches, and those of stage "
                f"{stage.stage} waited for room for {_share(stage, cause):.0%} of the training."
            )
        case Cause.ROUTE:
            return (
                f"Stage {min(stage.stage + 1, len(report.stages) - 1)} was out of reach: replicas of stage "
                f"{stage.stage} waited for {_share(stage, cause):.0%} of the training for one of it."
            )
        case Cause.JOINING:
            return f"Joining took longest: {share:.0%} of the peers' time. A longer run would show more."
        case _:
            return f"The end of the run took longest: {share:.0%} of the peers' time. A longer run would show more."
