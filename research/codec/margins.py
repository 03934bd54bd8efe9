"""How many values wrap in the 4-bit code, and how coarse it is: the figures in research/results.md.

    python -m research.codec.margins [--draws 24] [--steps 50]

Two replicas hold weights some distance apart, as the laboratory's model does after inner steps of AdamW on texts of
their own, or as draws from a distribution; the scale differs between parameters (a standard deviation of 0.5 of its
logarithm) but where it is said to be one. Both show their probes, derive the steps and code, all by production code. A
value wraps where the receiver decodes another one than the sender. Under a minute on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.codec import OwnWeights
from gossip.exchange.swap import FEW, MARGIN, common_steps, probe_coordinates
from gossip.rule.outer_step import Tensors
from gossip.settings import Format
from research.codec.whole_sets import decode, encode
from research.laboratory.experiments.cell import Cell
from research.laboratory.methods.replicas import Swarm
from research.theory.pair_step import mean

MARGINS = (1.25, 1.5, 2.0)
SHAPES = ((3000, 100), (100000,), (100000,), (30000,), (500,), (500,))
SPREAD = 0.5
APART = 0.01
STILL_ROWS = 0.93
"""Share of the rows of the first parameter, an embedding, that nobody has seen."""
RADIUS_OF_RMS = 5.25
"""The rule that was not taken: so many root mean squares of the probed distances, ample for a Gaussian."""
STUDENT = 3
ROUNDS = 80
DRIFTS = (0.5, 0.1, 0.05)
"""Steps of an absolute code by which replicas drift between two rounds."""

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


class Apart(NamedTuple):
    """The weights of two replicas."""

    own: Tensors
    other: Tensors


class Seen(NamedTuple):
    """Shares of values that wrap, and root mean square of the rounding over that of the distance."""

    wrapped: float
    rounding: float


def gaussian(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw standard normal distances."""
    return torch.randn(shape, generator=source)


def laplace(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw distances with an exponential tail on both sides."""
    return torch.empty(shape).exponential_(generator=source) * torch.randn(shape, generator=source).sign()


def student(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw distances with the heavy tail of Student's t."""
    squares = sum(torch.randn(shape, generator=source).square() for _ in range(STUDENT))
    return torch.randn(shape, generator=source) / torch.as_tensor(squares).div(STUDENT).sqrt()


def unseen_rows(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw Gaussian distances; of an embedding most rows did not move."""
    drawn = torch.randn(shape, generator=source)
    if len(shape) == 2:
        drawn[torch.rand(shape[0], generator=source) < STILL_ROWS] = 0.0
    return drawn


def synthetic(draw: Draw, seed: int, spread: float = SPREAD) -> Apart:
    """Draw two replicas whose distances are from a distribution."""
    source = torch.Generator().manual_seed(seed)
    own = tuple(torch.randn(shape, generator=source) for shape in SHAPES)
    scales = torch.randn(len(SHAPES), generator=source).mul(spread).exp().mul(APART).tolist()
    moved = (draw(shape, source).mul(scale) for shape, scale in zip(SHAPES, scales, strict=True))
    return Apart(own, tuple(torch.add(w, d) for w, d in zip(own, moved, strict=True)))


def trained(seed: int, steps: int) -> Apart:
    """Let two replicas of the laboratory take inner steps from the same weights, each on a text of its own."""
    cell = Cell(method="pairs", replicas=2, steps=4 * steps, learning_rate=5e-3, seed=seed)
    swarm = Swarm(cell, lambda share: None)
    for _ in range(steps):
        for replica in swarm.replicas:
            replica.stages[0].loss(*replica.text.draw())
            replica.stages[0].step(swarm.rate(), 1)
            swarm.taken += 1
    own, other = (replica.stages[0].weights() for replica in swarm.replicas)
    return Apart(own, other)


def probes(apart: Apart, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return both probes, and the number of coordinates in each parameter."""
    coordinates = probe_coordinates(seed, [tensor.numel() for tensor in apart.own])
    shown = [OwnWeights(weights).probe(coordinates) for weights in apart]
    return shown[0], shown[1], [len(indices) for indices in coordinates]


def steps_at(apart: Apart, seed: int, margin: float) -> tuple[float, ...]:
    """Return the steps that another margin would give: they are proportional to it."""
    return tuple(step * margin / MARGIN for step in common_steps(*probes(apart, seed)))


def steps_of_rms(apart: Apart, seed: int) -> tuple[float, ...]:
    """Return the steps of the rule that was not taken, per parameter as the one that was."""
    own, other, counts = probes(apart, seed)
    distances = own - other
    overall = float(distances.square().mean().sqrt())
    found = []
    for part in torch.split(distances, counts):
        enough = int(torch.count_nonzero(part)) >= FEW
        found.append(RADIUS_OF_RMS / 8 * (float(part.square().mean().sqrt()) if enough else overall))
    return tuple(found)


def seen(apart: Apart, steps: Sequence[float]) -> Seen:
    """Send one replica's weights to the other."""
    said = encode(Format.INT4, apart.own, steps)
    heard = decode(Format.INT4, said.wire, apart.other, steps)
    wrapped = count = 0
    rounding = distance = 0.0
    for own, other, meant, came, step in zip(*apart, said.decoded, heard, steps, strict=True):
        wrapped += int(((came - meant).abs() > 0.5 * step).sum())
        count += own.numel()
        rounding += float((meant - own).double().square().sum())
        distance += float((other - own).double().square().sum())
    return Seen(wrapped / count, math.sqrt(rounding / distance))


def pooled(every: Iterable[Seen]) -> Seen:
    """Return the means over draws of the same size."""
    wrapped, rounding = zip(*every, strict=True)
    return Seen(sum(wrapped) / len(wrapped), sum(rounding) / len(rounding))


def farther_by_feedback(drift: float) -> float:
    """Return how much farther apart error feedback leaves replicas that average in pairs, in the absolute int8.

    `drift`: what each weight moves by itself between two rounds, in steps of the code.
    """
    ends = []
    for feeds in (False, True):
        source, order = torch.Generator().manual_seed(0), Random(0)
        every: list[Tensors] = [(torch.randn(4096, generator=source),) for _ in range(8)]
        owed = [torch.zeros(4096) for _ in every]
        width = drift * float(encode(Format.INT8, every[0]).wire[1].mean())
        distances = []
        for number in range(ROUNDS):
            pairs = order.sample(range(len(every)), len(every))
            for one, other in zip(pairs[::2], pairs[1::2], strict=True):
                heard = []
                for side in (one, other):
                    meant = every[side][0] + owed[side] if feeds else every[side][0]
                    heard.append(encode(Format.INT8, (meant,)).decoded)
                    owed[side] = meant - heard[-1][0]
                middle = mean(heard[0], heard[1])
                every[one] = every[other] = middle
            every = [(w[0] + width * torch.randn(w[0].shape, generator=source),) for w in every]
            if number >= ROUNDS // 2:
                distances.append(float(torch.stack([w[0] for w in every]).std(0, unbiased=False).square().mean()))
        ends.append(math.sqrt(sum(distances) / len(distances)))
    return ends[1] / ends[0]


def line(name: str, found: Iterable[Seen]) -> str:
    """Return a line of the table."""
    return f"{name:<28}" + "   ".join(f"{_share(one.wrapped):>6} {one.rounding:7.2f}" for one in found)


def _share(part: float) -> str:
    return f"{part:.0e}" if part else "0"


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=24, metavar="N", help="Draw each distribution so often.")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="Train replicas so many inner steps apart.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(asked.draws)
    values = sum(math.prod(shape) for shape in SHAPES) * asked.draws
    replicas = [trained(seed, asked.steps) for seed in range(3)]
    weights = sum(tensor.numel() for pair in replicas for tensor in pair.own)
    print("share of values that wrap, and root mean square of the rounding over that of the distance")
    print(f"of {values:,} drawn values, and of {weights:,} weights of {len(replicas)} pairs of replicas")
    print(f"{'margin':<28}" + "   ".join(f"{margin:>14g}" for margin in MARGINS))
    name = f"transformer, {asked.steps} steps apart"
    print(line(name, [pooled(seen(a, steps_at(a, n, margin)) for n, a in enumerate(replicas)) for margin in MARGINS]))
    kinds: dict[str, Draw] = {
        "Gaussian": gaussian,
        "Laplace": laplace,
        "Student t3": student,
        "Gaussian, most rows unseen": unseen_rows,
    }
    by_rms: dict[str, Seen] = {}
    for name, draw in kinds.items():
        found: list[list[Seen]] = [[] for _ in (*MARGINS, "rms")]
        for seed in seeds:
            apart = synthetic(draw, seed)
            every = [*(steps_at(apart, seed, margin) for margin in MARGINS), steps_of_rms(apart, seed)]
            for kept, steps in zip(found, every, strict=True):
                kept.append(seen(apart, steps))
        print(line(name, map(pooled, found[:-1])))
        by_rms[name] = pooled(found[-1])
    alike = (synthetic(gaussian, seed, spread=0.0) for seed in seeds)
    print(line("Gaussian of one scale, 1.5", [pooled(seen(a, steps_at(a, n, 1.5)) for n, a in enumerate(alike))]))
    print(f"\na radius of {RADIUS_OF_RMS} root mean squares instead of the largest:")
    for name, one in by_rms.items():
        print(line(name, [one]))
    farther = ", ".join(f"{farther_by_feedback(drift):.2f} (drift {drift:g})" for drift in DRIFTS)
    print(f"\nin int8, error feedback leaves replicas so many times as far apart, by their drift in steps: {farther}")


if __name__ == "__main__":
    main()
