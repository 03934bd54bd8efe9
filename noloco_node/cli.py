"""The command line: what a person types, and how an error looks to them.

Every command is a few lines: its heavy imports happen when it runs, so that `--help` and `--version` answer at once.
Each `Trouble` becomes one message (what, why, what to try) on the standard error and its exit code."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from noloco_node import __version__
from noloco_node.errors import Exit, Trouble, trouble_of

T = TypeVar("T")

app = typer.Typer(
    name="noloco-node",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model together with strangers: each peer holds one stage of the model, sends microbatches "
    "along random routes, and draws together with one random partner a round. No all-reduce, no coordinator.",
)

InviteArgument = Annotated[
    str,
    typer.Argument(metavar="INVITE", help="The one line that a bootstrap peer or `status` prints.", show_default=False),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Directory of this node: identity, journal, checkpoints. One running node each.",
        show_default=False,
    ),
]
ListenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        metavar="MULTIADDR",
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001. May be given more than once.",
        show_default="every interface, a free port",
    ),
]
AnnounceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--announce",
        metavar="MULTIADDR",
        help="Address at which others reach you, when it is not the one you listen on (behind NAT, in Docker).",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noloco-node {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.toml"),
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 125m, 1b or 7b.")] = "tiny",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a commented run file: the recipe that all peers of a run share."""
    from noloco_node.presets import write_run_file

    write_run_file(path, preset, overwrite=force)
    typer.echo(f"Wrote {path}. Read it, change what you like, then:  noloco-node check {path}")


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A run file.")] = Path("run.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of sentences.")] = False,
) -> None:
    """Say what a run file means (memory, bytes, work, efficiency), or which field is wrong and why."""
    from noloco_node.plan import report

    typer.echo(report(path, as_json=as_json))


@app.command()
def bootstrap(
    run: Annotated[Path, typer.Option("--run", help="The run file to serve.")] = Path("run.toml"),
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    home: HomeOption = None,
    invite: Annotated[
        str | None,
        typer.Option(
            help="Invite of a swarm that is already there, to take a lost bootstrap peer's place.", show_default=False
        ),
    ] = None,
) -> None:
    """Host a bootstrap peer: newcomers find the swarm and its run file here. Prints the invite to pass on."""
    from noloco_node.bootstrap import BootstrapConfig, host

    config = BootstrapConfig(
        run=run,
        home=home or _default_home("bootstrap"),
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        invite=invite,
    )
    _run(host(config))


@app.command()
def join(
    invite: InviteArgument,
    stage: Annotated[
        int | None, typer.Option(help="Stage to serve.", show_default="the one with the fewest replicas")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            help="Local text to train on instead of the run's source: a file, directory or glob.", show_default=False
        ),
    ] = None,
    home: HomeOption = None,
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for torch.", show_default="all cores")] = None,
    linger: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to go on serving the weights after the end of the run.")
    ] = 600.0,
    refresh: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often to tell the others of oneself and to read the roster.")
    ] = 10.0,
    slowdown: Annotated[
        float,
        typer.Option(
            metavar="TIMES", help="Act as a device so many times slower than yours: for trials of uneven swarms."
        ),
    ] = 1.0,
) -> None:
    """Join a swarm: take a stage and train with the others to the end. Ctrl-C once leaves politely, twice at once."""
    from noloco_node.config import NodeConfig
    from noloco_node.join import join as join_swarm

    config = NodeConfig(
        home=str(home or _default_home("node")),
        stage=stage,
        device=device,
        data=data,
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        threads=threads,
        linger_s=linger,
        refresh_s=refresh,
        slowdown=slowdown,
    )
    _run(join_swarm(invite, config))


@app.command()
def status(
    invite: InviteArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print who serves what: stages, replicas, speeds, rounds, progress, losses."""
    from noloco_node.status import look

    typer.echo(_run(look(invite, as_json=as_json)))


@app.command()
def export(
    invite: InviteArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory for the checkpoint.")],
) -> None:
    """Gather every stage, average its replicas, write one Hugging Face checkpoint."""
    from noloco_node.gather import export_swarm

    typer.echo(_run(export_swarm(invite, out)))


@app.command()
def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `export` wrote.")],
    data: Annotated[
        str | None, typer.Option(help="Text to evaluate on.", show_default="the run's held-out split")
    ] = None,
    batches: Annotated[int, typer.Option(help="At most so many batches of 8 sequences.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a sentence.")] = False,
) -> None:
    """Print validation loss and perplexity of an exported checkpoint."""
    from noloco_node.evaluation import evaluate_directory

    typer.echo(evaluate_directory(directory, data=data, batches=batches, as_json=as_json))


@app.command()
def demo(
    stages: Annotated[int, typer.Option(min=1, help="Stages of the model.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of each stage.")] = 2,
    minutes: Annotated[float, typer.Option(min=0.2, help="About how long to train.")] = 2.0,
    home: Annotated[Path, typer.Option(help="Directory for journals, logs, picture and checkpoint.")] = Path(
        "noloco-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    heterogeneous: Annotated[
        bool,
        typer.Option("--heterogeneous", help="Slow one replica down to a quarter: rounds follow each one's speed."),
    ] = False,
) -> None:
    """Train a small model with a whole swarm on this machine, and take the model home."""
    from noloco_node.demo.order import SLOWDOWN, DemoConfig
    from noloco_node.demo.run import demonstrate

    config = DemoConfig(
        stages=stages,
        replicas=replicas,
        minutes=minutes,
        home=home,
        seed=seed,
        slowdown=SLOWDOWN if heterogeneous else 1.0,
    )
    _run(demonstrate(config))


@app.command()
def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", help="A scenario; without one the flags make it.")
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(min=1, max=20_000, help="Peers in all: stages times replicas.", show_default="2 a stage"),
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, max=256, help="Stages of the model.", show_default="2")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Gossip rounds of each replica.", show_default="20")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all that is drawn.", show_default="0")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for picture and report.", show_default="noloco-simulation"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text; no files without --out.")
    ] = False,
    explore: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Run K random fault schedules and check what must always hold."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Write every event; with --seed alone, replay that schedule of --explore."),
    ] = False,
) -> None:
    """Run a whole swarm in virtual time, faults included, and say how fast it would be and what holds it up."""
    from noloco_node.sim.report.command import Flags, Wanted, repeat, search, simulate_scenario

    flags = Flags(peers, stages, rounds, seed)
    wanted = Wanted(out, as_json, trace)
    try:
        if explore is not None:
            code = search(scenario, flags, wanted, explore, typer.echo)
        elif trace and seed is not None and scenario is None and not flags.of_the_swarm:
            code = repeat(seed, wanted, typer.echo)
        else:
            code = simulate_scenario(scenario, flags, wanted, typer.echo)
        raise typer.Exit(code)
    except KeyboardInterrupt:  # typer would leave without a word
        typer.echo("noloco-node: interrupted, nothing was written", err=True)
        raise typer.Exit(Exit.INTERRUPTED) from None


def _default_home(kind: str) -> Path:
    return Path.home() / ".noloco" / kind


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on uvloop where it exists."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        app()
    except Trouble as trouble:
        typer.echo(f"noloco-node: {trouble}", err=True)
        sys.exit(trouble.code)
    except BaseExceptionGroup as group:
        held = trouble_of(group)
        if held is None:
            raise
        typer.echo(f"noloco-node: {held}", err=True)
        sys.exit(held.code)
    except (KeyboardInterrupt, asyncio.CancelledError):  # cancelled: the second signal of `departure`
        typer.echo("noloco-node: interrupted", err=True)
        sys.exit(Exit.INTERRUPTED)
    finally:
        gc.freeze()  # or the interpreter spends a second on the graveyard of torch before it is gone
