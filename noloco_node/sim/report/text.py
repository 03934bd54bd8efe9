"""A simulation's report as a person reads it: what was simulated, how fast it went, and what it waited for."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import msgspec

from noloco_node.observe.bottleneck import Cause
from noloco_node.sim.report.bottleneck import bottleneck
from noloco_node.sim.report.figures import COMPUTING, PeerSpread, Report, StageReport
from noloco_node.sim.scenario.faults import Fault, kind_of, unfold
from noloco_node.sim.scenario.scenario import planned
from noloco_node.units import format_bytes, format_count, format_duration

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
WIDTH = 100
"""Columns of the sentence; the tables are about as wide."""


def lines(report: Report) -> list[str]:
    """Return the report as plain text."""
    return [
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


def heading(report: Report) -> list[str]:
    """Say what was simulated, and what stood for what."""
    swarm, scenario = report.scenario.swarm, report.scenario
    sizes = size_words(report)
    if not report.parameters:
        return [f"{scenario.name}: a swarm of quadratic bowls, {sizes}, seed {scenario.seed}."]
    parameters = format_count(report.parameters)
    text = [f"{scenario.name}: a run of {parameters} parameters in {sizes}, seed {scenario.seed}."]
    if swarm.model == "transformer":
        return [*text, "The model was really trained; devices and lines were simulated."]
    prices = "what its operations take" if scenario.devices.tflops else f"{scenario.devices.forward_s} s forward"
    return [*text, f"Passes cost {prices}, messages weigh what they would; only the arithmetic is replaced, by bowls."]


def size_words(report: Report) -> str:
    """Return how large the swarm is."""
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
    text = [f"{'use of':<12}{'peers':>6}   {'devices':<22}{'uplinks':<22}{'downlinks':<22}".rstrip()]
    for stage in stages:
        cells = "".join(f"{_spread(each):<22}" for each in (stage.devices, stage.up, stage.down))
        text.append(f"  stage {stage.stage:<4}{stage.peers:>6}   {cells}".rstrip())
    return text


def _waits(stages: Sequence[StageReport]) -> list[str]:
    """Return the time by cause; what nobody waited for is left out."""
    shown = [name for name in COLUMNS if any(stage.time.get(name, 0.0) >= 0.0005 for stage in stages)]
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
    """Return a line for each of the first, and one that counts the rest."""
    text = [f"  {at_s:>8.1f} s   {what}" for at_s, what in happened[:MOST_LISTED]]
    return text + ([f"  and {len(happened) - MOST_LISTED:,} more"] if len(happened) > MOST_LISTED else [])


def fault_words(fault: Fault) -> str:
    """Return a fault in one line."""
    given = {name: value for name, value in msgspec.structs.asdict(fault).items() if value and name != "at_s"}
    groups, lasts = given.pop("groups", ()), given.pop("for_s", None)
    words = [kind_of(fault), str(given.pop("peer", "")), ", ".join("+".join(group) for group in groups)]
    words += [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in given.items()]
    words += [] if lasts is None else [f"for {lasts:g} s"]
    return " ".join(word for word in words if word)
