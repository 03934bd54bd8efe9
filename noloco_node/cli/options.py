"""The arguments and options of the command line: those that several commands have in common, and those of commands that
have many.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli.option_groups.directories import LocalOption, WeightsOption
from noloco_node.cli.option_groups.web import WebOpenOption, WebOption
from noloco_node.errors import config_error
from noloco_node.limits.budget import OwnerLimits, read_owner_limits, read_size
from noloco_node.run.config import MOST_SLOWDOWN
from noloco_node.storage.checkpoint import KEPT
from noloco_node.terminal import warn

INVITE_VARIABLE = "NOLOCO_INVITE"
TYPED_SECRET = (
    "this invite is a secret, and every user of this machine can read it in the list of processes: give a file that "
    "holds it, or - to read it from the standard input"
)


def invite_text(given: str | None) -> str | None:
    """Return an invite as typed, or read it: from a file, or from the standard input (`-`). What is typed shows in
    the list of processes, which a person is told of a secret. `UserError` where a file cannot be read."""
    if given is None:
        return None
    if given == "-":
        return sys.stdin.readline().strip()
    path = os.path.expanduser(given)
    if not os.path.isfile(path):  # which no invite is too long for
        if given in sys.argv and "#" in given and not given.endswith("#open"):
            warn(TYPED_SECRET)
        return given
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a file that holds the line which `noloco-node bootstrap` printed, or the line itself"
        raise config_error(f"The invite cannot be read from {given}.", str(error), hint) from error


KeptInviteArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[INVITE]",
        help="The one line that a bootstrap peer, a node or `status` prints; a file that holds it; - to read it; or "
        "the home of a node, which keeps one.",
        callback=invite_text,
        envvar=INVITE_VARIABLE,
        show_default="the one that --home keeps",
    ),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Directory of this node: identity, journal, checkpoints. One running node each.",
        show_default="~/.noloco/node, of a bootstrap peer ~/.noloco/bootstrap",
    ),
]
OwnerOption = Annotated[
    Path,
    typer.Option(
        "--run",
        help="Where you own the run: its run file, with your key beside it (run.owner). The owner needs no invite of "
        "its own to look.",
    ),
]
OWNER_RUN = Path("run.toml")
HomesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--from-home",
        metavar="HOME",
        help="Home of a node of the run: its checkpoint, and the snapshots it keeps. May be given more than once.",
        show_default=False,
    ),
]
ListenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        metavar="MULTIADDR",
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001 or /ip6/::/tcp/4001; for QUIC with "
        "/udp/4001/quic-v1 at its end. May be given more than once.",
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
UploadOption = Annotated[
    str | None,
    typer.Option(
        "--max-upload",
        metavar="RATE",
        help="Most that is sent, such as 20mbit or 2.5MB/s. Others send a peer what its line carries.",
        show_default=False,
    ),
]
DownloadOption = Annotated[
    str | None,
    typer.Option("--max-download", metavar="RATE", help="Most that is taken, such as 50mbit.", show_default=False),
]
CapOption = Annotated[
    str | None,
    typer.Option(
        "--monthly-cap",
        metavar="SIZE",
        help="Traffic of a calendar month, both ways, such as 300GB. When it is used up the node leaves politely and "
        "comes back next month.",
        show_default=False,
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve figures for Prometheus at this port, to this machine alone.",
        show_default=False,
    ),
]
MetricsOpenOption = Annotated[
    bool, typer.Option("--metrics-open", help="Let --metrics name an address that others can reach.")
]


def default_home(kind: str) -> Path:
    """Return where a node, or a bootstrap peer, lives unless its owner says otherwise."""
    return Path.home() / ".noloco" / kind


@dataclass(frozen=True)
class BootstrapOptions:
    """What the owner of a bootstrap peer asks for."""

    run: Annotated[Path, typer.Option("--run", help="The run file to serve.")] = Path("run.toml")
    listen: ListenOption = None
    announce: AnnounceOption = None
    home: HomeOption = None
    invite: Annotated[
        str | None,
        typer.Option(
            help="Invite of a swarm that is already there, to take a lost bootstrap peer's place; or the home of a "
            "node of it.",
            callback=invite_text,
            show_default=False,
        ),
    ] = None
    weights: WeightsOption = None
    relays: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=16,
            help="Relays for peers behind routers, at the ports after the peer's own; 0 for none. What they carry uses "
            "this machine's line, and libp2p's relays can be held to no rate.",
        ),
    ] = 4
    metrics: MetricsOption = None
    metrics_open: MetricsOpenOption = False
    web: WebOption = None
    web_open: WebOpenOption = False


@dataclass(frozen=True)
class JoinOptions:
    """What one peer may choose for itself, whatever the run: what an owner says of this machine to `join`."""

    stage: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Stage to serve, and never to leave.", show_default="the one that limits the swarm"
        ),
    ] = None
    stay: Annotated[
        bool, typer.Option("--stay", help="Do not move to another stage later, even if it is needed there.")
    ] = False
    device: Annotated[
        str, typer.Option(help="Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.")
    ] = "auto"
    data: Annotated[
        str | None,
        typer.Option(
            help="Local text to train on instead of the run's source: a file, directory or glob; of rows a field of "
            "theirs, rows.jsonl#FIELD.",
            show_default=False,
        ),
    ] = None
    local: LocalOption = None
    weights: WeightsOption = None
    home: HomeOption = None
    listen: ListenOption = None
    announce: AnnounceOption = None
    relayed: Annotated[
        bool,
        typer.Option(
            "--relayed",
            help="Be reached through the swarm's relays. Without it others are asked whether they can dial you.",
        ),
    ] = False
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads for torch.", show_default="all cores")
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory that the run may take of the device, such as 8GB: a stage that needs more is not served.",
            show_default="all that is free",
        ),
    ] = None
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most that is fetched to the disk for the run's model, such as 20GB.",
            show_default="all that is free",
        ),
    ] = None
    max_upload: UploadOption = None
    max_download: DownloadOption = None
    monthly_cap: CapOption = None
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO",
            help="Take part only at these hours of the day here, such as 22-08; wait in between. From the second time "
            "on an outage is waited out.",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Checkpoints to keep: one is written every round, as far as a twentieth of the time goes.",
        ),
    ] = KEPT
    keep_snapshots: Annotated[
        int,
        typer.Option(
            metavar="ROUNDS",
            min=0,
            help="Keep snapshots of all other stages, each so many rounds after the last: a stage that dies comes back "
            "from there. 0: none.",
        ),
    ] = 0
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name that others see beside this peer's id.", show_default=False),
    ] = None
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Begin at step 0 with the run's first weights, where the run had gone further and nobody is left who "
            "has its weights.",
        ),
    ] = False
    linger: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="For how long to go on serving the weights after the run."),
    ] = 600.0
    refresh: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="How often to tell the others of oneself and to read the roster."
        ),
    ] = 10.0
    slowdown: Annotated[
        float,
        typer.Option(
            metavar="TIMES",
            min=1.0,
            max=MOST_SLOWDOWN,
            help="Act as a device so many times slower than yours: for trials of uneven swarms.",
        ),
    ] = 1.0
    metrics: MetricsOption = None
    metrics_open: MetricsOpenOption = False
    web: WebOption = None
    web_open: WebOpenOption = False

    @cached_property
    def allowance(self) -> OwnerLimits:
        """What the owner lets a node take of the line, and when; raises `UserError` where that cannot be read."""
        return read_owner_limits(self.max_upload, self.max_download, self.monthly_cap, self.hours)

    @cached_property
    def most_memory_bytes(self) -> int | None:
        """What the run may take of the device's memory; None: all that is free."""
        return None if self.max_memory is None else read_size(self.max_memory, "--max-memory")

    @cached_property
    def most_disk_bytes(self) -> int | None:
        """What the run's model may take of the disk when it is fetched; None: all that is free."""
        return None if self.max_disk is None else read_size(self.max_disk, "--max-disk")


@dataclass(frozen=True)
class SimulateOptions:
    """What `simulate` is told of the swarm, and of what to do with it."""

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
        int | None, typer.Option(metavar="N", min=1, help="Gossip rounds of each replica.", show_default="20")
    ] = None
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Seed of all that is drawn.", show_default="0")
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
