"""What a tenth of hostile peers of all kinds together does to training: 4 stages x 10 replicas, one liar in each stage.

    python -m benchmarks.robustness.hostile_tenth --seeds 0 1 2

The model, text and measure of `training_attacks`, with a layer a stage. Two sets of four liars, each beside the same
swarm without one. `shut out` are honest peers that somebody honest put into quarantine or banned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.robustness.training_attacks import Ascending, Shape, biased, outcome, prepared, show
from tests.explorer.attack_kinds import first_weights, gradients, like, weights
from tests.explorer.attacks import Attack, boast, hang

SHAPE = Shape(stages=4, replicas=10)
STEPS = 24
Liars = Mapping[str, Callable[[], Attack]]
SETS: Mapping[str, Liars] = {
    "clean": {},
    "loud": {
        "s0r0": partial(weights, torch.neg),
        "s1r0": lambda: Attack(record=boast, answer=hang),
        "s2r0": partial(gradients, torch.neg, boasts=True),
        "s3r0": partial(gradients, like, boasts=True),
    },
    "quiet": {
        "s0r0": lambda: Attack(arithmetic=Ascending),
        "s1r0": first_weights,
        "s2r0": partial(weights, like),
        "s3r0": partial(gradients, biased),
    },
}


def main() -> None:
    """Print a line for each set and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of each source")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    for seed in wanted.seeds:
        setup = prepared(seed, wanted.steps, shape=SHAPE)
        for name in wanted.sets or SETS:
            begun_s = time.process_time()
            show(name, seed, outcome(setup, {peer: attack() for peer, attack in SETS[name].items()}))
            print(f"    {time.process_time() - begun_s:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
