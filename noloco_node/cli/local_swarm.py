"""`noloco-node demo` and `simulate`: a whole swarm on this machine, of real processes or in virtual time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli.options import LARGEST_SEED, WebOpenOption, WebOption, page_place
from noloco_node.machine.signals import run, unwound


def demo(
    stages: Annotated[int, typer.Option(metavar="N", min=1, help="Stages of the model.")] = 2,
    replicas: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Replicas of each stage; by default 3, or 2 where memory is short."),
    ] = None,
    minutes: Annotated[float, typer.Option(metavar="X", min=0.2, max=1e5, help="About how long to train.")] = 2.0,
    home: Annotated[Path, typer.Option(help="Directory for journals, logs, picture and checkpoint.")] = Path(
        "noloco-demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Seed of the run.")] = 0,
    heterogeneous: Annotated[
        bool,
        typer.Option("--heterogeneous", help="Slow one replica down to a quarter: rounds follow each one's speed."),
    ] = False,
    kill: Annotated[
        bool, typer.Option("--kill/--no-kill", help="Kill one peer on the way, and start it again.")
    ] = True,
    web: WebOption = None,
) -> None:
    """Train a small model with a whole swarm on this machine, and take the model home."""
    from noloco_node.demo.run import SLOWDOWN, DemoConfig, demonstrate, fitting_replicas
    from noloco_node.machine.memory import machine_free_bytes

    config = DemoConfig(
        stages=stages,
        replicas=replicas or fitting_replicas(stages, machine_free_bytes()),
        minutes=minutes,
        home=home,
        seed=seed,
        slowdown=SLOWDOWN if heterogeneous else 1.0,
        outage=kill,
    )
    # A demo in the background of a script ends on Ctrl-C too: its swarm would keep the machine busy.
    run(demonstrate(config, page_place(web, is_open=False)), hears_interrupts=True)


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `simulate`."""

    peers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=20_000, help="Peers in all: stages times replicas.", show_default="2 a stage"
        ),
    ] = None
    stages: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=256, help="Stages of the model.", show_default="2")
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=10**9, help="Gossip rounds of each replica.", show_default="20"),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Seed of all that is drawn.", show_default="0"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for picture and report.", show_default="noloco-simulation"),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text; no files without --out.")
    ] = False
    trace: Annotated[bool, typer.Option("--trace", help="Write every event to events.jsonl.")] = False
    web: WebOption = None
    web_open: WebOpenOption = False


def simulate(
    options: SimulateOptions,
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", help="A scenario; without one the flags make it.")
    ] = None,
) -> None:
    """Run a whole swarm in virtual time, faults included, and say how fast it would be and what holds it up."""
    # Not a pipe, which can be read once.
    if scenario is not None and (os.path.isfile(scenario) or os.path.isdir(scenario) or not os.path.exists(scenario)):
        from noloco_node.sim.scenario.scenario import load_scenario

        load_scenario(scenario)  # before torch is loaded
    from noloco_node.sim.report.command import SimulationRequest, simulate_scenario

    swarm = options.peers, options.stages, options.rounds, options.seed
    page = page_place(options.web, is_open=options.web_open)
    wanted = SimulationRequest(*swarm, options.out, options.as_json, options.trace, page)
    with unwound("nothing was written"):
        code = simulate_scenario(scenario, wanted, typer.echo)
    raise typer.Exit(code)
