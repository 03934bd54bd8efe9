"""What a round computes, in real seconds: the source of the constants in `laboratory/experiments/hardware_model.py`.

    python -m research.codec.coding_seconds [--meetings 16]

Two replicas of the laboratory's model take a few inner steps apart and meet, again and again: what travels is encoded
and decoded, the outer rule is applied and the weights corrected, all by the production's outer optimiser on one thread.
Everything that it hands to the device is timed, and the inner steps too. A meeting counts for both its sides, an inner
step for one. Medians are printed, for machines are noisy; what counts is the ratio of both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from gossip.settings import Format
from noloco_node.sim import clock
from research.laboratory.experiments.cell import Cell
from research.laboratory.methods.final_rounds import Still, meet, plain_mean
from research.laboratory.methods.replicas import Swarm

T = TypeVar("T")
APART = 3
"""Inner steps of each replica between two meetings."""


class Times(NamedTuple):
    """Real seconds, a meeting or an inner step each. `calls`: what one side of a meeting computes, in number."""

    inner_steps: list[float]
    meetings: list[float]
    calls: float
    weight_bytes: int


class Watch:
    """Computes at once, and takes the time of it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    async def compute(self, function: Callable[..., T], /, *args: object) -> T:
        """Return what `function(*args)` returns."""
        started_s = time.perf_counter()
        result = function(*args)
        self.seconds += time.perf_counter() - started_s
        self.calls += 1
        return result


async def measure(form: Format, meetings: int) -> Times:
    """Let two replicas train and meet so often."""
    cell = Cell(method="pairs", replicas=2, steps=max(200, APART * meetings), learning_rate=5e-3)
    swarm, settings = Swarm(cell, lambda share: None), plain_mean(form)
    steps: list[float] = []
    watches: list[Watch] = []
    for _ in range(meetings):
        for replica in swarm.replicas:
            for _ in range(APART):
                started_s = time.perf_counter()
                replica.stages[0].loss(*replica.text.draw())
                replica.stages[0].step(5e-3, 1)
                steps.append(time.perf_counter() - started_s)
        watches.append(watch := Watch())
        await meet(*(Still(replica.stages[0]).optimiser(settings, 0, watch.compute) for replica in swarm.replicas))
    calls = sum(watch.calls for watch in watches) / meetings / 2
    return Times(steps, [watch.seconds / 2 for watch in watches], calls, swarm.weight_bytes)


def main() -> None:
    """Measure every codec and print the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meetings", type=int, default=16, metavar="N", help="Let two replicas meet so often.")
    meetings = parser.parse_args().meetings
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {meetings} meetings a codec, {APART} inner steps between them")
    print(f"{'codec':<9} {'ms a meeting':>12} {'calls':>6} {'ns a byte and call':>19} {'share of an inner step':>23}")
    every: list[float] = []
    found = {form: clock.run(measure(form, meetings)) for form in Format}
    for times in found.values():
        every += times.inner_steps
    step_s = median(every)
    for form, times in found.items():
        meeting_s = median(times.meetings)
        rate = meeting_s / times.calls / times.weight_bytes
        print(f"{form:<9} {1e3 * meeting_s:12.2f} {times.calls:6.1f} {1e9 * rate:19.2f} {meeting_s / step_s:23.1%}")
    print(f"an inner step: {1e3 * step_s:.1f} ms; the weights as float32: {times.weight_bytes:,} bytes")


if __name__ == "__main__":
    main()
