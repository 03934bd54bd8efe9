"""How long a microbatch takes of a replica that waits for others: what windows cost, in closed form.

A window is filled and drained once an inner step. With one in flight a replica stands still meanwhile; with two the
next one fills the wait, as long as a window takes no longer for the way down and back than for its own work.

Replicas that drain at different times fill each other's waits, which is left out: the forecast for two stages of
several replicas is up to a sixth too low, and elsewhere within a tenth (`tests/planning/test_windows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from noloco_node.run.config import PipelineConfig

_UNEVEN_DRAIN, _UNEVEN_PACE = 0.4, 1.04
"""Where a window is no multiple of the replicas, bags share it out with a rest, and arrivals meet a replica in the
middle of its window. With one window in flight those that do not get in wait until the others have been all the way
down and back, at every stage: the drain grows with half of the stages to this power. With two it costs this factor.
Both are fitted to production nodes in virtual time."""
_SHARP = 4
"""With two windows in flight, pace and way are no sharp maximum: at equal lengths each waits for the other at times."""


class MicrobatchSeconds(NamedTuple):
    """Seconds that a microbatch takes of a replica: of its device, its uplink and its downlink without rounds."""

    device_s: float
    up_s: float
    down_s: float


def seconds_each(pipeline: PipelineConfig, pace_s: float, way_s: float) -> float:
    """Return what a microbatch takes of a replica where nothing but its windows holds up who needs `pace_s` for one.

    `way_s`: down the pipeline and back.
    """
    window, even = pipeline.microbatches_per_step, pipeline.microbatches_per_step % pipeline.replicas == 0
    if pipeline.windows_in_flight == 1:
        drain_s = max(0.0, way_s - pace_s) / window
        return pace_s + drain_s * (1.0 if even else max(1.0, pipeline.stages / 2) ** _UNEVEN_DRAIN)
    both_s = float((pace_s**_SHARP + (way_s / window) ** _SHARP) ** (1 / _SHARP))
    return both_s * (1.0 if even else _UNEVEN_PACE)


def way_seconds(loads: Sequence[MicrobatchSeconds], latency_s: float) -> float:
    """Return what a microbatch takes down the pipeline and back where nobody else is on the way."""
    computing_s = sum(load.device_s for load in loads)
    # What leaves one peer reaches another: the slower of the two lines counts.
    moving_s = max(sum(load.up_s for load in loads), sum(load.down_s for load in loads))
    return computing_s + moving_s + 2 * (len(loads) - 1) * latency_s
