"""The bytes of messages and of gossip's memory, what a stage asks of a line, and what a budget makes of it.

A microbatch passes a stage twice: activations and targets come and go, gradients go and come back. The bytes of a round
are spread over its microbatches. Under a budget that is so many seconds of line a microbatch. A replica announces the
larger of these and the seconds of its device, and others route by that: a narrow line gets what it carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from gossip.settings import Format, OuterConfig, absolute, wire_bytes
from noloco_node.limits.budget import OwnerLimits
from noloco_node.run.config import PipelineConfig, RunConfig
from noloco_node.units import format_bytes, format_duration, format_rate, format_roughly
from pipeline.messages import ACTIVATION_CODECS

PROBE_BYTES = 4 * 4096  # a sample of weights that goes with an exchange (`gossip.exchange.swap.PROBE`), at most

Shapes = Sequence[tuple[int, ...]]


class HopBytes(NamedTuple):
    """Bytes of a microbatch between two stages: activations and targets on the way down, gradients on the way back."""

    down: int
    back: int


def hop_bytes(pipeline: PipelineConfig, width: int) -> HopBytes:
    """Return what a microbatch weighs where `width` numbers of a token travel."""
    down, back = (code.size_bytes(pipeline.microbatch_tokens, width) for code in ACTIVATION_CODECS[pipeline.codec])
    return HopBytes(down + 8 * prod(pipeline.targets_shape), back)


def coded_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    return outer.weight_sets * wire_bytes(outer.codec, shapes)


def round_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    """Return the bytes that a peer sends its partner in a round, probes included."""
    probes = 1 + outer.codec.is_modular + (outer.weight_sets == 2)
    return coded_bytes(outer, shapes) + probes * min(PROBE_BYTES, float32_bytes(shapes))


def gossip_memory(outer: OuterConfig, shapes: Shapes) -> dict[str, int]:
    """Return what gossip needs besides slow weights, as `planning.plan.Memory` names it.

    Checkpoints and copies for newcomers take none.
    """
    once = float32_bytes(shapes)
    return {
        "outer_momentum": once if outer.alpha else 0,
        "gathered": once if outer.gathers else 0,
        # With a lossy codec a difference in bfloat16.
        "snapshot": once if outer.codec is Format.FLOAT32 else once // 2,
        "ahead": 2 * wire_bytes(outer.codec, shapes) if outer.weight_sets == 2 else 0,
        # What travels is decoded a piece at a time, and a step is taken in place.
        "exchange": 2 * coded_bytes(outer, shapes),
        "adopted": wire_bytes(absolute(outer.codec), shapes),
    }


def float32_bytes(shapes: Shapes) -> int:
    return 4 * sum(map(prod, shapes))


if TYPE_CHECKING:
    from noloco_node.machine.interface import Dimensions

SLOWEST_BYTES_PER_S = 2**20  # of a line that is still good enough, if nobody says otherwise
ROUND_S = 60.0  # that partners wait for an exchange, whatever its size, before its bytes are counted
NARROW_S = 2.0  # a microbatch that takes so long on the line is cause for a word: few devices take as long for theirs


class MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch at one stage, its share of a round included; `whole_round`: of a round, each way."""

    up: float
    down: float
    whole_round: float = 0.0


def microbatch_bytes(run: RunConfig, plan: Dimensions, stage: int) -> MicrobatchBytes:
    pipeline = run.pipeline
    down, back = hop_bytes(pipeline, plan.width)
    sends, takes = not pipeline.is_last(stage), stage > 0
    weights = round_bytes(run.outer, tuple(plan.shapes[stage].values())) if pipeline.replicas > 1 else 0
    rounds = weights / (run.outer.inner_steps_per_round * pipeline.microbatches_per_step)
    return MicrobatchBytes(sends * down + takes * back + rounds, takes * down + sends * back + rounds, weights)


def bandwidth_seconds(moved: MicrobatchBytes, allowance: OwnerLimits) -> float:
    """Return the seconds that the slower direction of a budget's line needs for a microbatch; 0 without a limit."""
    ways = ((moved.up, allowance.upload_bytes_per_s), (moved.down, allowance.download_bytes_per_s))
    return max((count / rate for count, rate in ways if rate is not None), default=0.0)


def slowest_bytes_per_s(allowance: OwnerLimits, otherwise: float) -> float:
    """Return the rate for our own deadlines: half of the budget's, for a copy shares the line with microbatches."""
    rates = [rate / 2 for rate in (allowance.upload_bytes_per_s, allowance.download_bytes_per_s) if rate is not None]
    return min([otherwise, *rates])


def bandwidth_table(run: RunConfig, stages: Sequence[MicrobatchBytes], allowance: OwnerLimits) -> list[str]:
    """Say in lines of plain text what a budget carries at each stage, and warn where that is too little."""
    tokens = run.pipeline.microbatch_tokens
    lines, warnings = ["With this budget:"], list[str]()
    for number, moved in enumerate(stages):
        each_s = bandwidth_seconds(moved, allowance)
        words = f"  stage {number}: {format_bytes(moved.up)} up and {format_bytes(moved.down)} down a microbatch"
        if each_s:
            words += f"; the line carries one in {format_roughly(each_s)} s, {tokens / each_s:,.0f} tokens/s"
        lines.append(words + _hours(moved, each_s, allowance))
        warnings += [f"At stage {number} {warning}" for warning in _warnings(run, moved, allowance)]
    whole = run.inner.steps * run.pipeline.microbatches_per_step * max(moved.up + moved.down for moved in stages)
    cap = allowance.monthly_cap_bytes
    if cap is not None and whole > cap:
        warnings.append(
            f"The whole run moves about {format_bytes(whole)} at one peer, and the monthly cap is {format_bytes(cap)}: "
            "the node will pause when that is used up, and come back in the next month."
        )
    return lines + [f"Warning: {warning}" for warning in warnings]


def _warnings(run: RunConfig, moved: MicrobatchBytes, allowance: OwnerLimits) -> Iterator[str]:
    each_s, travel_s = bandwidth_seconds(moved, allowance), run.pipeline.budget_s
    most = run.pipeline.most_in_flight
    if each_s * most > travel_s:
        needed = max(moved.up, moved.down) * most / travel_s
        yield (
            f"this budget cannot carry the traffic: the {most} microbatches in flight need {each_s * most:.0f} s of "
            f"line, and a microbatch may travel for {travel_s:.0f} s. Allow {format_rate(needed)} or more, or take a "
            "smaller model."
        )
    elif each_s > NARROW_S:
        yield (
            "the line, not the device, would be the limit: others will send such a peer a microbatch every "
            f"{each_s:.1f} s at most."
        )
    round_s = bandwidth_seconds(MicrobatchBytes(moved.whole_round, moved.whole_round), allowance)
    # Partners reckon with the whole weights in float32; what travels is that or less.
    if round_s > ROUND_S + 2 * moved.whole_round / SLOWEST_BYTES_PER_S:
        yield (
            f"a round takes {round_s:.0f} s of this line, and partners may give up before: such a peer would hardly "
            "ever meet anybody. Allow more, or choose a smaller codec in [outer]."
        )


def _hours(moved: MicrobatchBytes, each_s: float, allowance: OwnerLimits) -> str:
    cap = allowance.monthly_cap_bytes
    if cap is None or not each_s or not moved.up + moved.down:
        return ""
    return f"; {format_bytes(cap)} last {format_duration(cap / (moved.up + moved.down) * each_s)} at that rate"


def report(run: RunConfig, allowance: OwnerLimits) -> list[str]:
    """Return what a budget makes of a run; `UserError` where its model is wrong."""
    from noloco_node.planning.model_layout import model_layout

    plan = model_layout(run)
    return bandwidth_table(run, [microbatch_bytes(run, plan, stage) for stage in run.pipeline.all_stages], allowance)
