"""How busy the slowest stage of a run will be, and what a person can change today to make it busier.

The forecast is `noloco_node.planning.windows`', for three lengths of a message, since the network is not known here.
What can be changed without another network or other machines is the window: a longer one runs dry less often, and one
that is a multiple of the replicas is shared out without a rest.
With a smaller microbatch the batch stays the same, and a message then takes longer in forward passes than before: that
is counted.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from noloco_node.planning.windows import MicrobatchSeconds, seconds_each, way_seconds
from noloco_node.run.config import PipelineConfig

MESSAGES = (0.0, 1.0, 3.0)
"""How long a message may take, in forward passes of the slowest stage of the run as it is."""
BUSY = 0.85
"""Efficiency with which nobody needs advice."""
_LONGEST = 256
"""Window that is suggested: beyond, filling and draining no longer count."""


class WindowSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """Another window and, where the batch is to stay the same, another microbatch."""

    microbatches_per_step: int
    microbatch_size: int
    batch: float
    """Sequences of an inner step, in batches of the run as it is."""
    efficiency: tuple[float, ...]


def predict_efficiency(pipeline: PipelineConfig, work: tuple[float, ...]) -> tuple[float, ...]:
    """Return the share of its time for which the slowest stage works, for each of `MESSAGES`.

    `work`: of a microbatch at each stage, in any unit.
    """
    return _predict(pipeline, work, 1)


def suggest_windows(pipeline: PipelineConfig, work: tuple[float, ...]) -> tuple[WindowSuggestion, ...]:
    """Return what other windows would give: a longer one, and one twice as long as that."""
    window, replicas = pipeline.microbatches_per_step, pipeline.replicas
    least = 2 * window if window % replicas == 0 else window
    first = -(-least // replicas) * replicas
    if first > 4 * window:
        first = 2 * window
    found = []
    for longer in (first, 2 * first):
        if longer > _LONGEST:
            break
        factor, rest = divmod(longer, window)
        shrinks = rest == 0 and pipeline.microbatch_size % factor == 0
        found.append(
            WindowSuggestion(
                microbatches_per_step=longer,
                microbatch_size=pipeline.microbatch_size // (factor if shrinks else 1),
                batch=1.0 if shrinks else longer / window,
                efficiency=_predict(
                    structs.replace(pipeline, microbatches_per_step=longer), work, factor if shrinks else 1
                ),
            )
        )
    return tuple(found)


def _predict(pipeline: PipelineConfig, work: tuple[float, ...], message: int) -> tuple[float, ...]:
    """`message`: how many times as long as `MESSAGES` one takes, in forward passes of the microbatch as it is here."""
    loads = [MicrobatchSeconds(3.0 * each / max(work), 0.0, 0.0) for each in work]
    return tuple(3.0 / seconds_each(pipeline, 3.0, way_seconds(loads, length * message)) for length in MESSAGES)


def in_words(now: tuple[float, ...], others: tuple[WindowSuggestion, ...], replicas: int) -> list[str]:
    """Say a prediction and its remedies in lines of plain text."""
    nothing, one, three = now
    lines = [
        f"The slowest stage works about {nothing:.0%} of the time if messages take none, {one:.0%} if a message "
        f"takes as long as its forward pass, and {three:.0%} if three times as long.",
    ]
    for other in others:
        nothing, one, three = other.efficiency
        fields = f"microbatches_per_step = {other.microbatches_per_step}"
        if other.batch == 1.0:
            fields += f", microbatch_size = {other.microbatch_size}"
            batch = "the same batch"
        else:
            batch = f"a batch {other.batch:.3g} times as large"
        even = replicas > 1 and other.microbatches_per_step % replicas == 0
        why = f"{batch}, a multiple of the replicas" if even else batch
        lines.append(f"  {nothing:4.0%}, {one:4.0%}, {three:4.0%} with {fields} ({why})")
    return lines
