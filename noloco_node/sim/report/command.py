"""What `noloco-node simulate` does: put the scenario together, run it, print and write the results.

Flags override the file. The command looks at the output directory before the simulation begins, so that a wrong one is
refused at once, and writes results whole at the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from msgspec import structs

from noloco_node.errors import Exit, UserError, config_error, leaves, os_errors_as, storage_error, usage_error
from noloco_node.run.fields import refuse
from noloco_node.run.runfile import load_run
from noloco_node.sim.clock import Deadlock
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.report.text import lines
from noloco_node.sim.report.watchers import EventTrace, PageWatcher, ProgressBar
from noloco_node.sim.scenario.faults import Hostile
from noloco_node.sim.scenario.scenario import Scenario, line_of, load_scenario, problems
from noloco_node.sim.scenario.setup import SimSetup, base, build_setup
from noloco_node.sim.world import Stuck, Watcher, World, patience_s, simulate
from noloco_node.storage import atomic_file
from noloco_node.storage.home import typed
from noloco_node.terminal import Bar
from noloco_node.units import format_duration
from noloco_node.web.places import PagePlace
from noloco_node.web.server import Page, page_in_thread

DEFAULT_OUT = Path("noloco-simulation")
MOST_PATIENCE_S = 1e8  # a simulation of peers that wait longer would take days
_HINT = "free some space, or give another with --out"


class SimulationRequest(NamedTuple):
    """What a person asked for. Of the swarm, None keeps the scenario's; `peers`: stages times replicas.

    `out`: where the results go; None takes the default, or with `as_json` writes nothing.
    """

    peers: int | None = None
    stages: int | None = None
    rounds: int | None = None
    seed: int | None = None
    out: Path | None = None
    as_json: bool = False
    trace: bool = False
    page: PagePlace | None = None

    @property
    def directory(self) -> Path | None:
        if self.out is not None:
            return typed(self.out)
        return DEFAULT_OUT if self.trace or not self.as_json else None


def simulate_scenario(path: Path | None, wanted: SimulationRequest, say: Callable[[str], None]) -> int:
    """Simulate a scenario; `say` prints what the command returns. Return the exit code; raises `UserError`.

    A swarm that came to a standstill has its report, and 1.
    """
    setting = complete(put_together(path, wanted), path)
    directory = wanted.directory
    if directory is not None:
        _look_at(directory)
    with page_in_thread(wanted.page) as page:
        report = _simulate(setting, directory if wanted.trace else None, page)
        if directory is not None:
            _write(directory, report)
        if wanted.as_json:
            say(msgspec.json.encode(report).decode())
        else:
            say("\n".join(lines(report)))
            say(f"\nIn {directory}: swarm.png, report.txt, report.json{', events.jsonl' if wanted.trace else ''}")
        if page is not None:
            print("the page stays until Ctrl-C", file=sys.stderr, flush=True)
            with suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600.0)
    return Exit.OK if report.standstill is None else Exit.BUG


# The scenario.


def put_together(path: Path | None, wanted: SimulationRequest) -> Scenario:
    """Return the file's scenario with the changes that a person asked for; raise `UserError` where they cannot be."""
    scenario = Scenario() if path is None else load_scenario(path)
    swarm = scenario.swarm
    if swarm.run is not None and not Path(swarm.run).is_file():
        raise config_error(
            f"{path}: swarm.run names a run file that is not there.",
            f"there is no file {swarm.run}",
            "correct the path, which is relative to the scenario; `noloco-node init` writes a run file",
        )
    if wanted.seed is not None:
        scenario = structs.replace(scenario, seed=wanted.seed)
    if wanted.stages is not None:
        swarm = structs.replace(swarm, stages=wanted.stages)
    if wanted.rounds is not None:
        swarm = structs.replace(swarm, rounds=wanted.rounds)
    if wanted.peers is not None:
        stages = swarm.stages
        if stages is None:
            stages = (base(False) if swarm.run is None else load_run(Path(swarm.run))).pipeline.stages
        swarm = structs.replace(swarm, stages=stages, replicas=_replicas(wanted.peers, stages))
    return structs.replace(scenario, swarm=swarm)


def _replicas(peers: int, stages: int) -> int:
    if peers % stages == 0:
        return peers // stages
    near = [count for count in (peers - peers % stages, peers - peers % stages + stages) if count]
    raise usage_error(
        f"{peers} peers cannot be shared out over {stages} stages.",
        "all stages of a simulated swarm have equally many replicas",
        " or ".join(f"--peers {count}" for count in near),
    )


def complete(scenario: Scenario, path: Path | None) -> SimSetup:
    """Work a scenario out, and look at its faults again now that it is known who takes part."""
    if any(isinstance(fault, Hostile) for fault in scenario.fault):
        raise config_error(
            f"{path}: hostile peers are not simulated by this command.",
            "they are part of the project's tests, which know what they must not achieve",
            f"in a checkout of the project: python -m tests.explorer --scenario {path}",
        )
    setting, origin = build_setup(scenario), "the flags" if path is None else str(path)
    if (longest_s := patience_s(setting)) > MOST_PATIENCE_S:
        raise config_error(
            f"{origin}: this swarm is too slow to be simulated.",
            f"its peers may wait for each other for a time that is {format_duration(longest_s)}",
            "faster devices and lines, less latency, a shorter swarm.refresh_s, or faults that slow them down less",
        )
    pipeline = setting.run.pipeline
    swarm = structs.replace(
        scenario.swarm,
        stages=pipeline.stages,
        replicas=pipeline.replicas,
        inner_steps_per_round=setting.run.outer.inner_steps_per_round,
        late_inner_steps_per_round=setting.run.outer.late_inner_steps_per_round,
    )
    text = path.read_text("utf-8-sig") if path is not None and path.is_file() else ""  # a pipe was read already
    refuse(problems(structs.replace(scenario, swarm=swarm)), origin, partial(line_of, text))
    return setting


# The work.


def _simulate(setting: SimSetup, trace: Path | None, page: Page | None) -> Report:
    torch.set_num_threads(1)  # threads would cost more than they give, and the sums would depend on their number
    begun_s = time.perf_counter()
    with ExitStack() as stack:
        bar, file = stack.enter_context(closing(Bar())), None
        collectors: list[EventCollector] = []
        pages: list[PageWatcher] = []
        if trace is not None:
            stack.callback(_unmake, trace)
            with _written(trace):
                trace.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(trace_file(trace / "events.jsonl"))

        def watch(world: World) -> list[Watcher]:
            collectors.append(EventCollector(world))
            if page is not None:
                pages.append(PageWatcher(world, page))
            traces = [] if file is None else [EventTrace(world, file)]
            return [*collectors, ProgressBar(world, bar), *traces, *pages]

        def finish(world: World) -> Report:
            for each in pages:
                each.show()
            return make_report(world, collectors[0])

        try:
            report = simulate(setting, watch, finish)
        except (Stuck, Deadlock, BaseExceptionGroup) as error:
            raise _plainly(error, setting) from error
    return structs.replace(report, real_s=time.perf_counter() - begun_s)


def _plainly(error: BaseException, setting: SimSetup) -> BaseException:
    for each in leaves(error):
        if isinstance(each, UserError):
            return each
        if isinstance(each, Stuck | Deadlock):
            return UserError(
                f"{setting.scenario.name} (seed {setting.scenario.seed}) came to a standstill.",
                why=str(each),
                hint="report it with the scenario: nobody should ever wait for ever",
                code=Exit.BUG,
            )
    return error


# The files.


def _look_at(directory: Path) -> None:
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    why = f"{there} is {'not writable' if there.is_dir() else 'no directory'}"
    raise storage_error(f"cannot write {directory}", why, _HINT)


def _write(directory: Path, report: Report) -> None:
    from noloco_node.sim.report.plot import picture

    files = {
        "swarm.png": picture(report),
        "report.txt": "\n".join([*lines(report), ""]).encode(),
        "report.json": msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
    }
    with _written(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with _written(directory / name):
            atomic_file.write(directory / name, content, public=True)


def _unmake(directory: Path) -> None:
    """Remove a directory that has remained empty."""
    with suppress(OSError):
        directory.rmdir()


@contextmanager
def trace_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which is at `path` once the block has ended well."""
    with _written(path), atomic_file.replacing(path) as aside:
        with aside.open("wb") as file:
            yield file
        atomic_file.flush(aside)


def _written(path: Path) -> AbstractContextManager[None]:
    return os_errors_as(storage_error, f"cannot write {path}", _HINT)
