"""Everything that is recorded, made anew."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compatibility import admissions, agreements, files, messages, simulations
from compatibility.recorded import RECORDED, written

NAMED_BY = "crash-and-restart"
"""The simulation whose topics and keys are recorded."""


def tables(directory: Path) -> dict[str, Any]:
    """Return the tables that need no simulation, by the names of their files. `directory`: for what is written."""
    return {
        "messages.json": messages.recorded(),
        "command-line.json": agreements.command_line(),
        "records.json": agreements.records(),
        "admissions.json": admissions.recorded(directory),
        "orders.json": agreements.orders(),
        "initial-weights.json": agreements.initial_weights(),
        "printed.json": agreements.printed(),
        "export.json": agreements.exported(RECORDED / "home", directory),
    }


def record(whole: Path | None) -> None:
    """Write everything in place of what was recorded. `whole`: where whole simulations are left, if anywhere."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    (RECORDED / "simulations").mkdir(parents=True)
    files.write_home(RECORDED / "home")
    files.write_parts(RECORDED / "parts")
    with TemporaryDirectory() as directory:
        for name, table in tables(Path(directory)).items():
            (RECORDED / name).write_bytes(written(table))
    for name in simulations.SCENARIOS:
        found = simulations.simulated(name)
        (RECORDED / simulations.recorded_of(name)).write_bytes(written(simulations.digested(found)))
        if name == NAMED_BY:
            (RECORDED / "names.json").write_bytes(written(agreements.names(found.topics, found.keys)))
        if whole is not None:
            simulations.left_whole(found, whole, name, written)
