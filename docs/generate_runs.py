"""Writes docs/scenarios/runs: the run files that `init` plans for sixteen machines of volunteers.

    python docs/generate_runs.py

`init` knows machines that are all alike. For a crowd of four kinds of GPU it is asked for those with 8 GiB or more, 12
or more, 16 or more, and 24, each time with the crowd's median device and line; the plan with the most tokens a second
is written. Peers whose GPU is smaller than that are refused before they copy anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from noloco_node.cli.run_file import MachineOptions, write_run
from noloco_node.errors import UserError
from noloco_node.planning.search import plan_for
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run

RUNS = Path(__file__).with_name("scenarios") / "runs"
PRESETS = ("1b", "7b")
USUAL = MachineOptions(ram="24GiB")
CROWDS = {
    "24gib-100-20": (replace(USUAL, gpu="24GiB", line="100mbit/20mbit"),),
    "24gib-100-100": (replace(USUAL, gpu="24GiB", line="100mbit"),),
    "12gib-100-20": (replace(USUAL, gpu="12GiB", line="100mbit/20mbit"),),
    # Four machines each of 8, 12, 16 and 24 GiB, 20 to 120 TFLOP/s and 20 to 200 Mbit/s up.
    "mixed": tuple(
        replace(USUAL, peers=peers, gpu=f"{least}GiB", line="100mbit/60mbit")
        for peers, least in ((16, 8), (12, 12), (8, 16), (4, 24))
    ),
}
"""Machines by the name of their file; of several the best are taken."""


def best(preset: str, crowd: tuple[MachineOptions, ...]) -> MachineOptions:
    """Return the machines of a crowd on which a plan has the most tokens a second."""
    run = decode_run(run_text(preset), preset)

    def speeds() -> Iterator[tuple[float, MachineOptions]]:
        for machines in crowd:
            try:
                yield plan_for(run, machines.machines()).expected.tokens_per_s, machines
            except UserError:
                continue  # nothing fits

    return max(speeds(), key=lambda found: found[0])[1]


def write(preset: str, name: str) -> Path:
    """Write one run file; return its path."""
    crowd, path = CROWDS[name], RUNS / f"{preset}-{name}.toml"
    machines = crowd[0] if len(crowd) == 1 else best(preset, crowd)
    print(write_run(path, preset, None, None, machines, overwrite=True), end="\n\n")
    return path


if __name__ == "__main__":
    RUNS.mkdir(exist_ok=True)
    for preset in PRESETS:
        for name in CROWDS:
            write(preset, name)
