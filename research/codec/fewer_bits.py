"""How far apart replicas stay that meet in random pairs and send few bits a weight, by the modular code.

    python -m research.codec.fewer_bits

Eight replicas drift, a value by itself, and meet in random pairs; fewer bits go with rounds as much more frequent, so
that all send a bit a value and step. The code is the production's but for its number of bits: a value modulo 2^b steps,
found near the receiver's own, what rounding leaves out carried on. The step follows the largest distance that a probe
shows, times a margin, or its root mean square. Distances have a tail, and scales that differ between values.

A meeting with exact weights halves the disagreement's variance v. Rounded to a step s, two values a distance d apart
are decoded at 0 or s from each other (or a step more), in the mean at d; so after the meeting their distance is in the
mean square s^2 p (1 - p), p the fraction of d / s. For distances of root mean square sigma, s = c sigma, sigma^2 = 2 v,
a meeting changes v by a factor of

    1 / 2 + c^2 / 2 E p (1 - p)        about 1 / 2 + c^2 / 12; for Gaussian distances below 1 where c < 2.5

whatever else is done: error feedback keeps the mean of all, and does not bring them nearer. With a step of
m r / 2^(b-1), r the largest distance, the bound is on m r / sigma: 20 with 4 bits, 10 with 3 and 5 with 2. A smaller m
lets values wrap, and those that wrap move away from each other.

Public copies (as in CHOCO-SGD, arXiv 1902.00340) are another code for few bits: each side of a pair keeps what the
other has told it so far, and what travels is the difference from that, rounded by blocks. Nothing wraps. But replicas
that meet at random meet the same partner only now and then, and the difference has grown meanwhile: by their own drift,
and by the progress that all have made together, which the distance of a pair does not show. And a replica keeps two
sets of weights for each partner. Seconds on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from research.laboratory.methods.coded_mean import rounded

REPLICAS, VALUES, STEPS = 8, 4000, 120
PROBED = 1000
BUDGET = 1
"""Bits a value and step."""
By = Literal["largest", "rms", "copies"]
Tail = Literal["Gaussian", "Laplace"]


class Code(NamedTuple):
    """`factor`: of the largest probed distance, or of the root mean square, that 2^(bits - 1) steps are.

    Of public copies: the progress of all in a step, over the drift of one.
    """

    bits: int
    by: By
    factor: float


class Seen(NamedTuple):
    """`apart`: root mean square disagreement over the drift of one step. `wrapped`: share of values that did."""

    apart: float
    wrapped: float


CODES = (
    Code(4, "largest", 1.5),
    Code(3, "largest", 1.5),
    Code(3, "largest", 1.0),
    Code(3, "rms", 4.0),
    Code(2, "largest", 1.5),
    Code(2, "rms", 3.0),
    Code(4, "copies", 0.15),
    Code(3, "copies", 0.15),
    Code(2, "copies", 0.15),
    Code(3, "copies", 0.0),
    Code(3, "copies", 1.0),
)
TAILS: tuple[Tail, ...] = ("Gaussian", "Laplace")
SPREADS = (0.0, 0.5)
"""Standard deviation of the logarithm of a value's scale."""


def growth(ratio: float) -> float:
    """Return the factor by which a meeting changes the disagreement's variance, for a step of so many rms distances.

    Distances are Gaussian.
    """
    distances = torch.special.ndtri((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000).abs()
    part = (distances / ratio).frac()
    return 0.5 + ratio * ratio / 2.0 * float((part * (1.0 - part)).mean())


def drift(tail: Tail, scales: Tensor, source: torch.Generator) -> Tensor:
    """Draw what each value of each replica moves by itself in a step."""
    drawn = torch.randn(REPLICAS, VALUES, generator=source)
    if tail == "Laplace":
        drawn = drawn.sign() * torch.empty(REPLICAS, VALUES).exponential_(generator=source) / math.sqrt(2.0)
    return drawn * scales


def meet(one: Tensor, other: Tensor, code: Code) -> float:
    """Let two rows meet: each moves by half of what it decodes; return the share that wrapped.

    What error feedback owes stays in the rows: they are what is meant, weights and residual together.
    """
    half, levels = 2 ** (code.bits - 1), 2**code.bits
    distances = (one - other)[:PROBED].abs()
    size = float(distances.max()) if code.by == "largest" else float(distances.square().mean().sqrt())
    step = max(code.factor * size / half, 1e-12)
    mine, theirs = (row / step for row in (one, other))
    sent, came = mine.round(), theirs.round()
    heard = came + levels * ((mine - came) / levels).round()
    answered = sent + levels * ((theirs - sent) / levels).round()
    one += 0.5 * step * (heard - sent)
    other += 0.5 * step * (answered - came)
    return float((heard != came).float().mean())


def meet_by_copies(one: Tensor, other: Tensor, told: tuple[Tensor, Tensor], bits: int) -> None:
    """Let two rows meet: each moves by half of what the public copies, once told, are apart."""
    for row, copy in zip((one, other), told, strict=True):
        copy += rounded(row - copy, bits)
    half = (told[1] - told[0]) / 2
    one += half
    other -= half


def settled(code: Code | None, tail: Tail, spread: float, seed: int = 0) -> Seen:
    """Let replicas drift and meet; return how far apart they are in the second half. No code: exact, every 4 steps."""
    source, order = torch.Generator().manual_seed(seed), Random(seed)
    scales = torch.randn(VALUES, generator=source).mul(spread).exp()
    every = 4 if code is None else code.bits // BUDGET
    rows, apart, wrapped = torch.zeros(REPLICAS, VALUES), list[float](), list[float]()
    told = torch.zeros(REPLICAS, REPLICAS, VALUES)
    progress = scales * code.factor if code is not None and code.by == "copies" else torch.zeros(VALUES)
    for number in range(1, STEPS + 1):
        rows += drift(tail, scales, source) + progress
        if number % every:
            continue
        pairs = order.sample(range(REPLICAS), REPLICAS)
        for one, other in zip(pairs[::2], pairs[1::2], strict=True):
            if code is None:
                rows[one] = rows[other] = (rows[one] + rows[other]) / 2
            elif code.by == "copies":
                meet_by_copies(rows[one], rows[other], (told[one, other], told[other, one]), code.bits)
            else:
                wrapped.append(meet(rows[one], rows[other], code))
        if 2 * number > STEPS:
            apart.append(float(((rows - rows.mean(0)) / scales).square().mean().sqrt()))
    return Seen(sum(apart) / len(apart), sum(wrapped) / len(wrapped) if wrapped else 0.0)


def lines(codes: Sequence[Code] = CODES) -> list[str]:
    """Return the table."""
    header = "".join(f"{f'{tail}, spread {spread:g}':>26}" for tail in TAILS for spread in SPREADS)
    table = [f"{'disagreement over a step of drift; wrapped':<44}{header}"]
    for code in (None, *codes):
        name = "exact, every 4 steps"
        if code is not None:
            name = f"{code.bits} bits every {code.bits}, {code.factor:g} x the {code.by}"
            if code.by == "copies":
                name = f"{code.bits} bits every {code.bits}, public copies, progress {code.factor:g}"
        cells = [settled(code, tail, spread) for tail in TAILS for spread in SPREADS]
        table.append(f"{name:<44}" + "".join(f"{one.apart:>17.2f} {one.wrapped:>8.0e}" for one in cells))
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
