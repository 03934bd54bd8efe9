"""The arithmetic of a round on the host, compiled and by torch: nanoseconds a value of one side of a meeting in int4.

    python -m benchmarks.pipeline_efficiency.round_arithmetic
    python -m benchmarks.pipeline_efficiency.round_arithmetic --alpha 0.5    # with a momentum

Two replicas of the same weights have learned different things and meet. Both forms take turns in one process, on one
thread, with copies of the same values, and yield the same bits, which is checked. The parts are those of a meeting:
encode what is sent, measure what came, take the outer step. Shown are the median, the least and the most of all turns.
Time is that for which the process had a core. The C library keeps the memory that it is given back; with `--fresh` it
gets what is sent from the system each time, as a node does for large stages. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from gossip.exchange import kernels
from gossip.exchange.codec import Coded, OwnWeights, Sides, encode
from gossip.exchange.swap import measure
from gossip.rounds.outer_optimiser import Rule, Step, take_step
from gossip.rule.outer_step import Delay, Outer, OuterState, Tensors
from gossip.settings import Format

SHAPES = tuple(shape for _ in range(4) for shape in ((2048, 2048), (2048,), (2048, 21)))
"""17 million values in twelve tensors, as two layers of a model have them."""
PARTS = ("encode", "measure", "step")
APART = 1e-3
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
T = TypeVar("T")


class Meeting:
    """One side of a meeting, again and again from the same values."""

    def __init__(self, outer: Outer) -> None:
        source = torch.Generator().manual_seed(1)

        def drawn(scale: float) -> Tensors:
            return tuple(torch.randn(shape, generator=source) * scale for shape in SHAPES)

        self.outer, self.values = outer, sum(torch.Size(shape).numel() for shape in SHAPES)
        self.slow, self.momentum = drawn(0.02), drawn(APART) if outer.alpha else ()
        self.learned, other = (tuple(tensor.bfloat16() for tensor in drawn(APART)) for _ in range(2))
        self.steps = (APART * 9 / 8,) * len(SHAPES)
        self.came = Coded(
            Format.INT4, encode(Format.INT4, OwnWeights(self.slow, other), self.steps).coded.wire, self.steps
        )

    def run(self) -> tuple[dict[str, float], Tensors]:
        """Return the seconds of each part, and all that was written."""
        slow, learned, momentum = (
            tuple(tensor.clone() for tensor in each) for each in (self.slow, self.learned, self.momentum)
        )
        fast, seconds = OwnWeights(slow, learned), dict[str, float]()

        def timed(part: str, work: Callable[[], T]) -> T:
            begun_s = time.process_time()
            result = work()
            seconds[part] = time.process_time() - begun_s
            return result

        mine = timed("encode", lambda: encode(Format.INT4, fast, self.steps)).coded
        timed("measure", lambda: measure(self.came, fast, slow, fast))
        step, state = Step(fast, Sides(mine, self.came)), OuterState(slow, momentum)
        timed("step", lambda: take_step(step, state, Rule(self.outer, Delay())))
        return seconds, (*mine.wire, *slow, *momentum, *learned)


def main() -> None:
    """Let both forms take turns, and print what each part takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="measure each form so often")
    parser.add_argument("--alpha", type=float, default=0.0, help="decay of the momentum; 0 has none")
    parser.add_argument("--fresh", action="store_true", help="take memory from the system each time")
    args = parser.parse_args()
    if not args.fresh:
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    torch.set_num_threads(1)
    compiled = kernels.COMPILED
    if compiled is None:
        raise SystemExit("the compiled form is not there: python setup.py build_ext --inplace")
    meeting = Meeting(Outer(args.alpha, 1.0, 1.0))
    found: dict[str, list[dict[str, float]]] = {"compiled": [], "torch": []}
    for turn in range(args.turns + 1):
        written = {}
        for name, form in (("compiled", compiled), ("torch", None))[:: 1 if turn % 2 else -1]:
            kernels.COMPILED = form
            seconds, written[name] = meeting.run()
            if turn:  # the first one fetches memory from the system
                found[name].append({part: 1e9 * seconds[part] / meeting.values for part in PARTS})
        if not all(map(torch.equal, written["compiled"], written["torch"])):
            raise SystemExit("the two forms differ")
    kernels.COMPILED = compiled
    result: dict[str, dict[str, list[float]]] = {}
    print(f"torch {torch.__version__}, one thread, {meeting.values:,} values, {args.turns} turns; ns a value")
    print(f"{'':<9} {'compiled':>22} {'torch':>22} {'times':>6}")
    for part in (*PARTS, "together"):
        every = {
            name: [sum(turn.values()) if part == "together" else turn[part] for turn in turns]
            for name, turns in found.items()
        }
        result[part] = {name: [median(all_), min(all_), max(all_)] for name, all_ in every.items()}
        ratio = median(slow / fast for slow, fast in zip(every["torch"], every["compiled"], strict=True))
        shown = "".join(f"{m:9.2f} ({low:.2f}-{high:.2f})" for m, low, high in result[part].values())
        print(f"{part:<9} {shown} {ratio:6.1f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
