"""The report of a simulation as text: what was simulated, how fast it went, and what it waited for."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import msgspec

from noloco_node.observe.bottleneck import HALF_FULL, NEARLY_FULL, STANDS_OUT, WHILE, Cause, devices_bottleneck
from noloco_node.sim.report.figures import COMPUTING, PeerSpread, Report, StageReport
from noloco_node.sim.scenario.faults import Fault, kind_of, unfold
from noloco_node.sim.scenario.scenario import planned
from noloco_node.sim.scenario.setup import MBIT_BYTES
from noloco_node.units import format_bytes, format_count, format_duration

TRIPS = 2
"""Latencies that a call from stage to stage costs, on a stream that is open."""
PIPELINE = (Cause.MICROBATCHES, Cause.REPLIES, Cause.WINDOW)
COLUMNS = {
    COMPUTING: "computing",
    str(Cause.MICROBATCHES): "micro-\nbatches",
    str(Cause.REPLIES): "replies",
    str(Cause.WINDOW): "window's\nend",
    str(Cause.ROOM): "room",
    str(Cause.ROUTE): "route",
    str(Cause.GOSSIP): "gossip",
    str(Cause.JOINING): "joining",
    str(Cause.ENDING): "ending",
}
MOST_LISTED = 20
WIDTH, MARGIN = 80, 12  # columns of a line, and of what says what is in it
MOST_WAITS = 6  # columns of a table of them


def lines(report: Report) -> list[str]:
    whole = [
        *heading(report),
        "",
        *textwrap.wrap(" ".join(filter(None, (report.standstill, bottleneck(report)))), WIDTH),
        "",
        f"{'speed':<12}{rate_words(report.tokens_per_s)} tokens a virtual second "
        f"({report.tokens:,} tokens of {report.budget_tokens:,} planned, "
        f"in {report.microbatches:,} microbatches of {report.microbatch_tokens:,})",
        f"{'time':<12}{format_duration(report.virtual_s)} virtual{_real(report)}",
        f"{'loss':<12}{_change(report.loss_first, report.loss_last)}",
        "",
        *_devices(report.stages),
        "",
        *_waits(report.stages),
        "",
        *_rounds(report.stages),
        "",
        *_microbatches(report),
        "",
        *_bytes(report),
        *_faults(report),
        *_moves(report),
        "",
        f"digest of all weights {report.digest}",
    ]
    return [part for line in whole for part in textwrap.wrap(line, WIDTH, subsequent_indent=MARGIN * " ") or [""]]


def heading(report: Report) -> list[str]:
    swarm, scenario = report.scenario.swarm, report.scenario
    sizes = size_words(report)
    if not report.parameters:
        return [f"{scenario.name}: a swarm of quadratic models, {sizes}, seed {scenario.seed}."]
    parameters = format_count(report.parameters)
    text = [f"{scenario.name}: a run of {parameters} parameters in {sizes}, seed {scenario.seed}."]
    if swarm.model == "transformer":
        return [*text, "The model was really trained; devices and lines were simulated."]
    prices = "what its operations take" if scenario.devices.tflops else f"{scenario.devices.forward_s} s forward"
    return [
        *text,
        f"Passes cost {prices}, messages weigh what they would; only the arithmetic is replaced, by quadratic models.",
    ]


def size_words(report: Report) -> str:
    stages, replicas = len(report.stages), report.replicas
    return f"{stages} stage{'s' * (stages > 1)} of {replicas} replica{'s' * (replicas > 1)}"


def rate_words(per_s: float) -> str:
    """Return a number of tokens a second as a person reads it."""
    return f"{per_s:,.0f}" if per_s >= 100.0 else f"{per_s:.3g}"


def _real(report: Report) -> str:
    if report.real_s <= 0.0:
        return ""
    return f", {format_duration(report.real_s)} real: {report.virtual_s / report.real_s:,.0f} times as fast"


def _change(first: float | None, last: float | None, form: str = "3f") -> str:
    if first is None or last is None:
        return "-"
    return f"{first:.{form}} -> {last:.{form}}"


def _spread(spread: PeerSpread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.0%} ({spread.least:.0%} to {spread.most:.0%})"


def _devices(stages: Sequence[StageReport]) -> list[str]:
    text = [f"{'use of':<12}{'peers':>6}   {'devices':<20}{'uplinks':<20}{'downlinks'}"]
    for stage in stages:
        cells = "".join(f"{_spread(each):<20}" for each in (stage.devices, stage.up, stage.down))
        text.append(f"  stage {stage.stage:<4}{stage.peers:>6}   {cells}".rstrip())
    return text


def _waits(stages: Sequence[StageReport]) -> list[str]:
    shown = [name for name in COLUMNS if any(stage.time.get(name, 0.0) >= 0.0005 for stage in stages)]
    tables = (shown[at : at + MOST_WAITS] for at in range(0, max(1, len(shown)), MOST_WAITS))
    return [line for table in tables for line in _table_of_waits(table, stages)]


def _table_of_waits(shown: Sequence[str], stages: Sequence[StageReport]) -> list[str]:
    upper = [COLUMNS[name].partition("\n")[0] if "\n" in COLUMNS[name] else "" for name in shown]
    lower = [COLUMNS[name].rpartition("\n")[2] for name in shown]
    text = [f"{'time of':<12}" + "".join(f"{word:>11}" for word in upper).rstrip()] if any(upper) else []
    text.append(f"{'' if text else 'time of':<12}" + "".join(f"{word:>11}" for word in lower))
    for stage in stages:
        cells = "".join(f"{stage.time.get(name, 0.0):>11.1%}" for name in shown)
        text += [f"  stage {stage.stage:<4}{cells}"]
    return text


def _rounds(stages: Sequence[StageReport]) -> list[str]:
    text = [f"{'rounds of':<12}{'steps':>8}{'met':>8}{'skipped':>10}{'solo':>6}   gap"]
    for stage in stages:
        counts = f"{stage.inner_steps:>8,}{stage.met:>8,}{stage.skipped:>10,}{stage.solo:>6,}"
        text.append(f"  stage {stage.stage:<4}{counts}   {_change(stage.gap_first, stage.gap_last, '2g')}")
    return text


def _list(counts: Mapping[str, int]) -> str:
    found = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return ", ".join(found) or "none"


def _microbatches(report: Report) -> list[str]:
    suspects = f"{report.true_suspects:,} true, {report.false_suspects:,} false"
    return [
        f"{'retried':<12}{_list(report.retried)}",
        f"{'given up':<12}{_list(report.given_up)}; {report.discarded:,} discarded at the end",
        f"{'twice':<12}{report.counted_twice:,} microbatches counted twice",
        f"{'suspects':<12}{suspects}",
        f"{'exchanges':<12}{report.exchanges_lost:,} broke off",
    ]


def _bytes(report: Report) -> list[str]:
    ways = ", ".join(f"{format_bytes(count)} {way}" for way, count in report.microbatch_bytes.items())
    text = [f"{'bytes':<12}by purpose, sent by all peers"]
    for purpose, count in report.sent_bytes.items():
        more = f"   {ways}" if purpose == "microbatch" else ""
        text.append(f"  {purpose:<10}{format_bytes(count):>12}{more}")
    published = report.network.get("records.published", 0)
    return [*text, f"{'records':<12}{published:,} published in the DHT"]


def _faults(report: Report) -> list[str]:
    scenario = report.scenario
    asked_for = len(unfold(scenario.fault, planned(len(report.stages), report.replicas), scenario.seed))
    if not asked_for:
        return []
    text = ["", f"{'faults':<12}{len(report.happened):,} of {asked_for:,} happened before the end"]
    return text + _first([(each.at_s, fault_words(each.fault)) for each in report.happened])


def _moves(report: Report) -> list[str]:
    if not report.moved:
        return []
    text = ["", f"{'moves':<12}{len(report.moved):,}, each of a replica to another stage"]
    return text + _first(
        [
            (each.at_s, f"{each.peer} from stage {each.origin} to stage {each.target}: {each.why}")
            for each in report.moved
        ]
    )


def _first(happened: Sequence[tuple[float, str]]) -> list[str]:
    text = [f"  {at_s:>8.1f} s   {what}" for at_s, what in happened[:MOST_LISTED]]
    return text + ([f"  and {len(happened) - MOST_LISTED:,} more"] if len(happened) > MOST_LISTED else [])


def fault_words(fault: Fault) -> str:
    given = {name: value for name, value in msgspec.structs.asdict(fault).items() if value and name != "at_s"}
    groups, lasts = given.pop("groups", ()), given.pop("for_s", None)
    words = [kind_of(fault), str(given.pop("peer", "")), ", ".join("+".join(group) for group in groups)]
    words += [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in given.items()]
    words += [] if lasts is None else [f"for {lasts:g} s"]
    return " ".join(word for word in words if word)


# What keeps the swarm from going faster.


def bottleneck(report: Report) -> str:
    """Say in one sentence what keeps the swarm from going faster: the first of these that holds.

    1. Nothing was trained.
    2. A stage was out of reach for half of the time. Devices that died look busy, while they lived.
    3. Lines are nearly full, and fuller than any devices are busy; or half full, and far more so, outside blocking
       rounds.
    4. Devices are nearly always busy: those of one stage, or all of them alike; or one stage stands out far above the
       rest.
    5. No device and no line is the limit but the order of things: the longest wait of idle devices says which.

    The waits of a pipeline (for microbatches, replies, the end of a window) have one cause in common: a window of work
    does not cover the way of a microbatch. The prices tell whether latency, transfers or the passes of the other stages
    make that way long. All shares are of the time of training: joining and ending aside.
    """
    waits = _idle_shares(report)
    if not report.microbatches:
        worst = _most(waits)
        return f"Nothing was trained: {'nobody was there' if worst is None else 'most peers ' + WHILE[worst]}."
    if any(_share(stage, Cause.ROUTE) >= HALF_FULL for stage in report.stages):
        return _other(report, Cause.ROUTE, waits[Cause.ROUTE])
    busiest = max(report.stages, key=lambda stage: stage.work)
    line = _line(report, busiest.work, _most(waits) == Cause.GOSSIP)
    if line:
        return line
    devices = devices_bottleneck({stage.stage: stage.work for stage in report.stages}, is_over=True)
    if devices:
        return devices.sentence
    pipeline = sum(waits.get(cause, 0.0) for cause in PIPELINE)
    others = {cause: share for cause, share in waits.items() if cause not in PIPELINE}
    worst = _most(others)
    if worst is None or others[worst] <= pipeline:
        return _pipeline(report, busiest, pipeline)
    return _other(report, worst, others[worst])


def _idle_shares(report: Report) -> dict[Cause, float]:
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
    own_s = busiest.passes_s * slowness + pauses_s
    others = [stage for stage in report.stages if stage is not busiest]
    way = {
        "passes": sum(stage.passes_s * slowness + pauses_s for stage in others),
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
