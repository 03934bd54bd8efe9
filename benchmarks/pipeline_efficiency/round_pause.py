"""The pause that ends a round: how long a device stops if the outer step is taken in the pause, or beside the training.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_efficiency.round_pause --device cpu
    python -m benchmarks.pipeline_efficiency.round_pause --device cpu --codec bfloat16 --alpha 0.5

A swarm of one (`benchmarks.pipeline_efficiency.stage_on_device`) with the production's device threads, stage and outer
optimiser. Each turn has a meeting with a partner that has learned something else, a window of microbatches, its inner
step, and the pause after it. Two forms take turns: *in the pause* takes the outer step there and corrects the fast
weights; *beside* takes it while the window is computed, and only corrects them in the pause. The meeting is not timed.
Shown are the median, the least and the most of all turns, in milliseconds by the wall clock, and the median ratio of
neighbours: of the pause, of the window (what the arithmetic beside it costs), and of both together. `step` is the outer
step alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median

import torch

from benchmarks.pipeline_efficiency.stage_on_device import SwarmOfOne, a_run
from gossip.exchange import kernels
from gossip.exchange.codec import OwnWeights
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot, Step
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig
from noloco_node.machine.device import choose_device, finish_work
from noloco_node.planning.model_layout import model_layout

APART = 1e-3
"""How far each side's weights are from what both began with, as inner steps take them."""
PARTS = ("pause", "window", "together", "step")


class Trainee:
    """What the rounds ask of a replica."""

    def __init__(self, swarm: SwarmOfOne) -> None:
        self._swarm = swarm

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the fast weights, or their difference from slow ones."""
        return await self._swarm.device.run(self._swarm.stage.weights, slow)

    async def correct(self, correction: Tensors) -> None:
        """Add to the fast weights."""
        await self._swarm.device.run(self._swarm.stage.correct, correction)


async def meeting(optimiser: OuterOptimiser, turn: int) -> Step:
    """Return the step that follows from a meeting with somebody who has learned something else."""
    snapshot, source = await optimiser.snapshot(0), torch.Generator().manual_seed(turn)
    other = tuple(slow + APART * torch.randn(slow.shape, generator=source) for slow in optimiser.state.slow)
    mine_probe, other_probe = optimiser.fast_probe(snapshot), optimiser.fast_probe(Snapshot(OwnWeights(other), 0))
    steps = optimiser.steps(mine_probe, other_probe)
    mine = await optimiser.encode_fast(snapshot, steps)
    came = await optimiser.encode_fast(Snapshot(OwnWeights(other), 0), steps)
    heard = await optimiser.hear_fast(came.coded.wire, snapshot, mine)
    return Step(snapshot.fast, heard)


async def measure(args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each part in each turn, by form."""
    run = a_run(args, 1)
    swarm = SwarmOfOne(run, model_layout(run), device)
    settings = OuterConfig(codec=Format(args.codec), alpha=args.alpha)
    weights = OuterState(swarm.stage.weights())
    optimiser = OuterOptimiser(settings, weights, Trainee(swarm), swarm.device.beside, seed=0)  # type: ignore[arg-type]
    print(f"{sum(tensor.numel() for tensor in weights.slow):,} parameters", flush=True)

    async def timed(work: Awaitable[object]) -> float:
        begun_s = time.perf_counter()
        await work
        finish_work(device)
        return time.perf_counter() - begun_s

    found: dict[str, dict[str, list[float]]] = {
        form: {part: [] for part in PARTS} for form in ("in the pause", "beside")
    }
    for turn in range(args.repeats + 1):
        for form, parts in list(found.items())[:: 1 if turn % 2 else -1]:
            step = await meeting(optimiser, turn)
            if form == "beside":
                taking = asyncio.create_task(timed(optimiser.take(step)))
                window_s = await timed(swarm.window())
                if not taking.done():
                    raise SystemExit("the window is over before the outer step: take a larger one")
                step_s, before_s = await taking, 0.0
            else:
                window_s = await timed(swarm.window())
                step_s = before_s = await timed(optimiser.take(step))
            pause_s = before_s + await timed(optimiser.correct(step.correction))
            if turn:  # the first one pays for what is done once
                for part, seconds in zip(PARTS, (pause_s, window_s, pause_s + window_s, step_s), strict=True):
                    parts[part].append(seconds)
    swarm.device.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32"])
    for name, value in (("width", 512), ("layers", 8), ("tokens", 256), ("batch", 1), ("window", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--feed-forward", type=int, default=0, help="0: four times the width")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--run", type=Path, metavar="FILE", help="take sizes, window and state of this run file")
    parser.add_argument("--state", choices=["float32", "int8"], help="of the optimiser (inner.state)")
    parser.add_argument("--codec", choices=list(Format), default="int4", help="of the rounds")
    parser.add_argument("--alpha", type=float, default=0.0, help="decay of the outer momentum")
    args = parser.parse_args()
    device = choose_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    how = "compiled" if kernels.COMPILED is not None and args.codec == "int4" else "by torch"
    print(f"{name}, torch {torch.__version__}, {args.codec}, alpha {args.alpha:g}, the step {how}")
    found = asyncio.run(measure(args, device))
    result: dict[str, object] = {"device": name, "codec": args.codec, "alpha": args.alpha}
    print(f"{'ms':<9} {'in the pause':>24} {'beside':>24} {'ratio':>24}")
    for part in PARTS:
        before, after = (forms[part] for forms in found.values())
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        rows = [[1e3 * each for each in before], [1e3 * each for each in after], ratios]
        result[part] = [[median(row), min(row), max(row)] for row in rows]
        shown = [
            f"{median(row):.{digits}f} ({min(row):.{digits}f}-{max(row):.{digits}f})"
            for row, digits in zip(rows, (1, 1, 2), strict=True)
        ]
        print(f"{part:<9} " + " ".join(f"{each:>24}" for each in shown))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
