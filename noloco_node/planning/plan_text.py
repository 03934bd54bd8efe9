"""What a run file means, in words and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import wrap

import msgspec

from noloco_node.planning.plan import Memory, RunPlan, plan
from noloco_node.planning.windows import in_words
from noloco_node.run.config import RunConfig
from noloco_node.units import format_bytes, format_count

WIDTH = 80


def describe(plan: RunPlan) -> list[str]:
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    frozen = sum(stage.frozen_parameters for stage in plan.stages)
    over = f" over {format_count(frozen)} frozen" if frozen else ""
    parameters = f"{format_count(plan.parameters)} parameters{over}"
    lines = [
        f"{plan.name}: {parameters} in {stages}, run id {plan.run_id[:16]}",
        "",
        *_stage_table(plan),
        "",
        _largest_memory(plan),
        _phases(plan),
        *_moments(plan),
        _more_graphs(plan),
        "",
        f"Tokens: {format_count(plan.tokens)} in all, {format_count(plan.tokens_per_step)} an inner step of a replica; "
        f"{plan.rounds} rounds a replica.",
    ]
    if plan.fetched_bytes:
        which = "" if len(plan.stages) == 1 else ": the part of its stage"
        lines.append(
            f"A machine fetches the model that the run starts from, {format_bytes(plan.fetched_bytes)}, once{which}."
        )
    if len(plan.stages) > 1:
        lines += [
            f"A microbatch's hop: {format_bytes(plan.hop_down_bytes)} down, {format_bytes(plan.hop_up_bytes)} back.",
            *in_words(plan.efficiency, plan.remedies, plan.replicas),
        ]
    return lines + [f"Warning: {warning}" for warning in plan.warnings]


def _stage_table(plan: RunPlan) -> list[str]:
    rows = [
        [
            str(number),
            f"{stage.layers[0]} to {stage.layers[1] - 1}",
            format_count(stage.parameters),
            f"{stage.work:.1%}",
            format_bytes(stage.memory.total),
            format_bytes(stage.gpu.computing),
            format_bytes(stage.gpu.beside),
            format_bytes(stage.round_bytes),
        ]
        for number, stage in enumerate(plan.stages)
    ]
    return _table(["stage", "layers", "parameters", "work", "on a CPU", "on a GPU", "beside it", "a round"], rows)


def _largest_memory(plan: RunPlan) -> str:
    number, memory = max(enumerate(stage.memory for stage in plan.stages), key=lambda stage: stage[1].total)
    sizes = {
        name: getattr(memory, name)
        for name in Memory.__struct_fields__
        if not name.endswith(("_graph", "_graphs", "coded_moments"))
    }
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in sizes.items() if size)
    return f"Memory at stage {number} on a CPU, in float32, with the graph of one microbatch: {parts}."


def _phases(plan: RunPlan) -> str:
    number, memory = max(enumerate(stage.gpu for stage in plan.stages), key=lambda stage: stage[1].beside)
    return f"Beside a GPU stage {number} takes, by phase: {in_phases(memory)}."


def _moments(plan: RunPlan) -> list[str]:
    moments = max(stage.gpu.coded_moments for stage in plan.stages)
    if not moments:
        return []
    size = format_bytes(moments)
    return [
        f"Where a GPU has less memory than that, the node keeps as many moments beside it as need be, {size} at most."
    ]


def in_phases(memory: Memory) -> str:
    """Return what a replica needs beside its device in each phase, in words."""
    return ", ".join(f"{phase} {format_bytes(size)}" for phase, size in memory.phases.items())


def report(run: RunConfig, *, as_json: bool = False) -> str:
    """Return what a run file means, as text or as one JSON object; raise `UserError` where it is wrong."""
    found = plan(run)
    return msgspec.json.encode(found).decode() if as_json else "\n".join(fitted(describe(found)))


def fitted(lines: Iterable[str]) -> list[str]:
    indented = ((line, len(line) - len(line.lstrip())) for line in lines)
    wrapped = (wrap(line, WIDTH, subsequent_indent=" " * (indent + 2 if indent else 0)) for line, indent in indented)
    return [piece for pieces in wrapped for piece in pieces or [""]]


def _more_graphs(plan: RunPlan) -> str:
    def most(more: Callable[[Memory], int]) -> tuple[int, int]:
        cpu, gpu = (max(more(memory) for memory in each) for each in zip(*memories, strict=True))
        return cpu, gpu

    def in_words(more: tuple[int, int]) -> str:
        return f"{format_bytes(more[0])} more, or {format_bytes(more[1])} on a GPU"

    memories = [(stage.memory, stage.gpu) for stage in plan.stages]
    whole = most(lambda memory: memory.whole_graph - memory.graph)
    others = most(lambda memory: memory.other_graphs)
    more = f"{1.0 / (1.0 + plan.backward):.0%}"
    said = (
        f"These graphs are the least: the backward pass computes each layer again, {more} more work. A graph of the "
        f"whole pass, which is kept where it fits, takes {in_words(whole)}."
    )
    if any(others):
        said += f" Graphs of all others in flight take {in_words(others)}; those that do not fit are computed again."
    return said


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
