"""The command line: what a person types, and how an error looks to them.

Every command is a few lines: its heavy imports happen when it runs, so that `--help` and `--version` answer at once.
Each `UserError` becomes one message (what, why, what to try) on the standard error and its exit code."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from noloco_node import __version__
from noloco_node.cli.command_group import CommandGroup, drop_output
from noloco_node.cli.commands import journals, members, models, observation
from noloco_node.cli.event_loop import run
from noloco_node.cli.interrupt import unwound
from noloco_node.cli.option_groups.dataclass_options import taking
from noloco_node.cli.option_groups.directories import LocalOption, directory_there
from noloco_node.cli.option_groups.machines import MachineOptions
from noloco_node.cli.option_groups.web import WebOption, page_place
from noloco_node.cli.options import (
    OWNER_RUN,
    AnnounceOption,
    BootstrapOptions,
    CapOption,
    DownloadOption,
    HomeOption,
    HomesOption,
    JoinOptions,
    KeptInviteArgument,
    ListenOption,
    OwnerOption,
    SimulateOptions,
    UploadOption,
    default_home,
    invite_text,
)
from noloco_node.errors import COMPLAINT, Exit, UserError, reason_of, user_error_of
from noloco_node.limits.budget import read_owner_limits
from noloco_node.observe.metrics_server import metrics_place
from noloco_node.run.config import AdmissionRule
from noloco_node.terminal import LogLevel, complain, configure

app = typer.Typer(
    name="noloco-node",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model together with strangers: each peer holds one stage of the model, sends microbatches "
    "along random routes, and draws together with one random partner a round. No all-reduce, no coordinator.",
)
app.add_typer(journals.journal, name="journal")


@contextmanager
def _imports() -> Iterator[None]:
    """Keep the collector from what is imported: none of it is garbage, and to look takes a sixth of a node's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noloco-node {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(metavar="LEVEL", help="Least that is said: debug, info, warning or error.")
    ] = LogLevel.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Say it as JSON, one object a line.")] = False,
) -> None:
    configure(log_level, as_json=log_json)


@app.command()
@taking(MachineOptions)
def init(
    options: MachineOptions,
    path: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.toml"),
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 125m, 1b or 7b.")] = "tiny",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Go on from an exported checkpoint.",
            callback=directory_there,
            show_default=False,
        ),
    ] = None,
    admission: Annotated[
        AdmissionRule | None,
        typer.Option(
            metavar="RULE",
            help="Give the run an owner who says who may take part: open (a ticket for whoever works for it), invited "
            "(an invite is for one identity) or listed.",
            show_default="no owner: whoever has the invite",
        ),
    ] = None,
) -> None:
    """Write a commented run file, the recipe that all peers of a run share.

    With machines (any of --gpu, --ram, --line, --peers, --tflops, --latency-ms)
    it is cut for them: stages, windows, codec and rounds for the most tokens a
    second that fit, with the preset's budget of tokens.
    """
    from noloco_node.cli.new_run import write_run

    with unwound():
        typer.echo(write_run(path, preset, origin, admission, options, overwrite=force))


@app.command()
@taking(MachineOptions)
def check(
    options: MachineOptions,
    path: Annotated[Path, typer.Argument(help="A run file.")] = Path("run.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of sentences.")] = False,
    max_upload: UploadOption = None,
    max_download: DownloadOption = None,
    monthly_cap: CapOption = None,
) -> None:
    """Say what a run file means (memory, bytes, work, efficiency), or which field is wrong and why.

    Also what to expect on the machines that the file's comment names, or on
    others, and what a bandwidth budget carries; this part is text only.
    """
    from noloco_node.run.runfile import load_run

    # What cannot be read is said before torch is loaded, and before a long report, not below it.
    allowance = read_owner_limits(max_upload, max_download, monthly_cap, None)
    _ = options.figures(), load_run(path)
    from noloco_node.planning import bandwidth, machine_text
    from noloco_node.planning.plan_text import fitted, report

    typer.echo(report(path, as_json=as_json))
    if allowance.is_limited and not as_json:
        typer.echo("\n" + "\n".join(fitted(bandwidth.report(path, allowance))))
    if not as_json:
        options = options.completed_from(path)
        machines = options.machines() if options.are_given else None
        typer.echo("\n" + "\n".join(machine_text.report(path, machines)))


@app.command()
@taking(BootstrapOptions)
def bootstrap(options: BootstrapOptions) -> None:
    """Host a bootstrap peer: newcomers find the swarm and its run file here. Prints the invite to pass on."""
    from noloco_node.cli.bootstrap import host

    run(host(options))


@app.command()
@taking(JoinOptions)
def join(options: JoinOptions, invite: KeptInviteArgument = None) -> None:
    """Join a swarm: take a stage and train with the others to the end. Ctrl-C once leaves politely, twice at once."""
    from noloco_node.data.dataset_documents import check_source
    from noloco_node.libp2p.endpoint.addresses import check_announce, check_listen
    from noloco_node.swarm.invite import found, parse
    from noloco_node.swarm.peer_name import checked_name

    # Before torch is loaded: a refusal is to come at once.
    _ = options.allowance, options.most_memory_bytes, options.most_disk_bytes
    _ = metrics_place(options.metrics, is_open=options.metrics_open)
    _ = page_place(options.web, is_open=options.web_open), checked_name(options.name)
    parsed = parse(found(invite, options.home or default_home("node")))
    check_listen(options.listen or ())
    check_announce(options.announce or ())
    if options.data is not None:
        check_source(options.data)
    from noloco_node.terminal import say

    say("loading torch (a few seconds)")
    with _imports():
        from noloco_node.cli.join import join as join_swarm

    run(join_swarm(parsed, options))


app.command()(members.members)


@app.command()
def status(
    invite: KeptInviteArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    local: LocalOption = None,
    home: HomeOption = None,
    owner_run: OwnerOption = OWNER_RUN,
) -> None:
    """Print who serves what: stages, replicas, speeds, rounds, progress, losses."""
    from noloco_node.cli.status import look
    from noloco_node.swarm.connection import Visitor
    from noloco_node.swarm.invite import found

    home = home or default_home("node")
    typer.echo(run(look(found(invite, home), as_json=as_json, visitor=Visitor(tuple(local or ()), home, owner_run))))


app.command()(observation.watch)
app.command()(journals.me)


@app.command()
def doctor(
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="[INVITE]",
            help="Of the swarm to join; without one only this machine.",
            callback=invite_text,
            show_default=False,
        ),
    ] = None,
    home: HomeOption = None,
    device: Annotated[
        str, typer.Option(help="Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.")
    ] = "auto",
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    local: LocalOption = None,
) -> None:
    """Say before joining what would be in the way, and what to do: clock, addresses, reach, line, memory, disk.

    Exit code 11 when something will prevent joining.
    """
    from noloco_node.doctor.command import DoctorRequest, report

    wish = DoctorRequest(
        home=home or default_home("node"),
        device=device,
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        local=tuple(local or ()),
    )
    text, code = run(report(invite, wish, as_json=as_json))
    typer.echo(text)
    raise typer.Exit(code)


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory for the checkpoint.")],
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE",
            help="Invite of a living swarm, or a home that keeps one.",
            callback=invite_text,
            show_default=False,
        ),
    ] = None,
    from_home: HomesOption = None,
    local: LocalOption = None,
    home: HomeOption = None,
    owner_run: OwnerOption = OWNER_RUN,
) -> None:
    """Gather every stage, average its replicas, write one Hugging Face checkpoint; after an interruption, go on."""
    from noloco_node.export.sources import check_export
    from noloco_node.swarm.connection import Visitor
    from noloco_node.swarm.invite import found

    place = home or default_home("node")
    given = None if invite is None else found(invite, place)
    check_export(out, given, from_home or ())
    from noloco_node.export.exporter import export as export_model

    visitor = Visitor(tuple(local or ()), place, owner_run)
    typer.echo(run(export_model(out, given, from_home or (), visitor)))


app.command()(models.evaluate)
app.command()(models.generate)


@app.command()
def demo(
    stages: Annotated[int, typer.Option(metavar="N", min=1, help="Stages of the model.")] = 2,
    replicas: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Replicas of each stage; by default 3, or 2 where memory is short."),
    ] = None,
    minutes: Annotated[float, typer.Option(metavar="X", min=0.2, help="About how long to train.")] = 2.0,
    home: Annotated[Path, typer.Option(help="Directory for journals, logs, picture and checkpoint.")] = Path(
        "noloco-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
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
    import psutil

    from noloco_node.demo.options import SLOWDOWN, DemoConfig, fitting_replicas
    from noloco_node.demo.run import demonstrate

    config = DemoConfig(
        stages=stages,
        replicas=replicas or fitting_replicas(stages, psutil.virtual_memory().available),
        minutes=minutes,
        home=home,
        seed=seed,
        slowdown=SLOWDOWN if heterogeneous else 1.0,
        outage=kill,
    )
    run(demonstrate(config, page_place(web, is_open=False)))


@app.command()
@taking(SimulateOptions)
def simulate(
    options: SimulateOptions,
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", help="A scenario; without one the flags make it.")
    ] = None,
) -> None:
    """Run a whole swarm in virtual time, faults included, and say how fast it would be and what holds it up."""
    if scenario is not None:
        from noloco_node.sim.scenario.scenario import load_scenario

        load_scenario(scenario)  # before torch is loaded
    from noloco_node.sim.report.command import SimulationFlags, SimulationRequest, simulate_scenario

    flags = SimulationFlags(options.peers, options.stages, options.rounds, options.seed)
    page = page_place(options.web, is_open=options.web_open)
    wanted = SimulationRequest(options.out, options.as_json, options.trace, page)
    with unwound("nothing was written"):
        code = simulate_scenario(scenario, flags, wanted, typer.echo)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        app()
    except (UserError, BaseExceptionGroup) as error:
        trouble = user_error_of(error)
        if trouble is None:
            raise
        complain(f"{COMPLAINT}{trouble}")
        sys.exit(trouble.code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        refusal = UserError(
            "What the command returns or keeps cannot be written.",
            why=reason_of(error),
            hint="free some space, or write to another disk",
            code=Exit.STORAGE,
        )
        drop_output()
        complain(f"{COMPLAINT}{refusal}")
        sys.exit(refusal.code)
    finally:
        gc.freeze()  # or the interpreter spends a second on the graveyard of torch before it is gone
