"""What theory says of NoLoCo's outer rule, against the production rule under a quadratic loss.

    python -m research.theory.command [--quick] [--picture research/pictures/theory.png]

a. The variance among replicas grows with the square of the inner learning rate while rate x curvature x steps is small.
b. Without noise the disagreement of many replicas contracts by a known factor a round.
c. alpha 0.9 with gamma 0.7 diverges, and a run file may not ask for it.
d. Replicas that find no partner and defer keep the stable range; solo steps narrow it, and raise the floor more.

The recursion that every measurement is compared with, and its derivation, are in `theory/moments.py`; `theory/swarm.py`
runs the production rule. Exit code 1 if a figure is off by more than its tolerance, which stands beside each check.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from research.theory.noise import bending, floors
from research.theory.picture import picture
from research.theory.report import Report, Scale
from research.theory.stable_range import contractions, decays, divergence, edges

ABOUT_MOMENTUM = """
  What the momentum does.
  Deferred: nothing moves. Slow weights and momentum stay, the fast weights train on, and the next meeting finds the
  pseudo-gradient of all inner steps since.
  Alone (a mean over one): m <- alpha m + beta (phi - theta). No pull; the own pseudo-gradient undiluted (variance s^2
  where a pair has s^2 / 2); and the push of the last meeting goes on: without progress phi coasts, by alpha m +
  alpha^2 m + ... in all."""


def main() -> int:
    """Measure, print, check, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and coordinates, wider tolerances")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the figures as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scale = (
        Scale(coordinates=128, share=0.15, slack=3.0, alphas=(0.5,), crowds=(48, 256, 1024))
        if arguments.quick
        else Scale()
    )
    report = Report(scale.slack)
    print(f"production rule, {scale.seeds} seeds, torch {torch.__version__}, one thread; mean (smallest to largest)")
    bends = bending(report, scale)
    contractions(report, scale)
    growths = divergence(report, scale)
    found = edges(report, scale)
    floors(report, scale)
    print(ABOUT_MOMENTUM)
    if arguments.picture:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        arguments.picture.write_bytes(picture(bends, decays(scale), growths, found))
    return report.verdict()


if __name__ == "__main__":
    sys.exit(main())
