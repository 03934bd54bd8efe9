"""What several commands share: arguments, options, and how they are read; and the options of `join`.

An option of any other single command stands with that command. An option is called as its parameter; a flag names
itself, or it would have a --no-... beside it.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from noloco_node.errors import Exit, UserError, config_error, reason_of, usage_error
from noloco_node.limits.budget import OwnerLimits, read_owner_limits, read_size
from noloco_node.observe.curves import CurveFormat, read_formats
from noloco_node.run.config import MOST_SLOWDOWN
from noloco_node.storage.checkpoint import KEPT
from noloco_node.storage.home import HomePaths, typed
from noloco_node.swarm import invite as invites
from noloco_node.swarm.invite import Invite
from noloco_node.terminal import warn
from noloco_node.web.places import PagePlace, kept_token, new_token, parse_place

INVITE_VARIABLE = "NOLOCO_INVITE"
MOST_PROMPTS, LONGEST_PROMPT = 4, 200
LARGEST_SEED = 2**63 - 1  # that a run file takes
TYPED_SECRET = (
    "this invite is a secret, and every user of this machine can read it in the list of processes: give a file that "
    "holds it, or - to read it from the standard input"
)


def invite_text(given: str | None) -> str | None:
    """Return an invite as typed, or read it from a file or the standard input (`-`).

    Warns of a typed secret, which the list of processes shows. Raises `UserError` if a file cannot be read, or where
    the text is neither an invite nor a path of something.
    """
    if given is None:
        return None
    typed, path = given == "-", os.path.expanduser(given.strip())
    if not typed and not os.path.isfile(path):  # unlike Path.is_file, this takes a text of any length
        if given in sys.argv and "#" in given and not given.endswith("#open"):
            warn(TYPED_SECRET)
        if given.strip() and not given.lstrip().startswith("noloco") and not os.path.isdir(path):
            raise config_error(
                f"There is no invite {given[:80]!r}.",
                "it is no file and no home of a node, and an invite begins with 'noloco'",
                "check the path, or paste the line which `noloco-node bootstrap` printed",
            )
        return given
    try:
        return (sys.stdin.readline() if typed else Path(path).read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"The invite cannot be read from {'the standard input' if typed else given}."
        hint = "give a file that holds the line which `noloco-node bootstrap` printed, or the line itself"
        raise config_error(what, reason_of(error), hint) from error


def directory_there(given: Path | None) -> Path | None:
    """Return a directory that a person named; `UserError` (CONFIG) if it does not exist."""
    # Unlike those of Path, these functions take a path of any length.
    if given is not None and not os.path.isdir(place := typed(given)):
        why = "it is a file" if os.path.exists(place) else "nothing has this name"
        hint = "an existing directory; it is read relative to the one in which the command was started"
        raise config_error(f"There is no directory {str(given)!r}.", why, hint)
    return given


def invite_of_run(given: str, digest: str, run_file: Path, hint: str) -> Invite:
    """Return an invite that was given, or that a given home keeps; `UserError` if it is for another run than a file's.

    `hint`: where to find the right one.
    """
    invite = invites.parse(invites.found(given, Path()))
    if invite.digest != digest:
        raise UserError(
            "The invite is for another run than the run file.",
            why=f"the invite names {invite.digest[:12]}, {run_file} is {digest[:12]}",
            hint=hint,
            code=Exit.OTHER_RUN,
        )
    return invite


def all_there(given: Sequence[str | Path] | None) -> Sequence[str | Path] | None:
    for each in given or ():
        directory_there(Path(each))
    return given


def check_values(options: object) -> None:
    """Raise `UserError` (USAGE) for a field of a dataclass of options that is not of its type, or outside its bounds.

    Typer has checked what a person typed; a program, or the comment of a run file, may give anything.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        (kind, option), given = get_args(hint), getattr(options, name)
        if given is None or option.min is None:
            try:
                msgspec.convert(given, kind)
            except msgspec.ValidationError as error:
                why = str(error).replace("`", "")
                raise usage_error(
                    f"{name} = {given!r} cannot be used.", why, "another value, or leave it out"
                ) from error
            continue
        most, is_whole = inf if option.max is None else option.max, int in (kind, *get_args(kind))
        try:
            number = operator.index(given) if is_whole else float(given)
        except (TypeError, ValueError):
            number = nan
        if isinstance(given, bool | str | bytes) or not (isfinite(number) and option.min <= number <= most):
            why = f"it is no {'whole ' * is_whole}number from {option.min:g} to {most:g}"
            raise usage_error(f"{name} = {given!r} cannot be used.", why, f"{name}={option.min:g}, or leave it out")


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
        parser=typed,
        metavar="DIR",
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
ListenOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001 or /ip6/::/tcp/4001; for QUIC with "
        "/udp/4001/quic-v1 at its end. May be given more than once.",
        show_default="every interface, a free port",
    ),
]
AnnounceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="Address at which others reach you, when it is not the one you listen on (behind NAT, in Docker).",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where to compute: auto (the GPU with the most free memory, if there is one), cpu, cuda, cuda:N or mps "
        "(the GPU of an Apple processor).",
    ),
]
LocalOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="A directory of this machine that the run file may name, with a tokenizer. May be given more than "
        "once. The file comes from others: nothing else of this machine is read for it.",
        callback=all_there,
    ),
]


def weights_option(what: str, show_default: bool | str = True) -> Any:
    """Return the option `--weights`, a directory with a model; `what`: which."""
    return typer.Option(metavar="DIR", help=what, callback=directory_there, show_default=show_default)


WeightsOption = Annotated[
    Path | None,
    weights_option(
        "The checkpoint that the run goes on from (init --from DIR), or the frozen model that init --lora wrote: "
        "others fetch it from here. One peer that has it is enough."
    ),
]
UploadOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Most that is sent, such as 20mbit or 2.5MB/s. Others send a peer what its line carries.",
    ),
]
DownloadOption = Annotated[str | None, typer.Option(metavar="RATE", help="Most that is taken, such as 50mbit.")]
CapOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Traffic of a calendar month, both ways, such as 300GB. When it is used up the node leaves politely and "
        "comes back next month.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(metavar="[HOST:]PORT", help="Serve figures for Prometheus at this port, to this machine alone."),
]
MetricsOpenOption = Annotated[
    bool, typer.Option("--metrics-open", help="Let --metrics name an address that others can reach.")
]
WebOption = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Show the swarm in a browser at this port, to this machine alone unless an address is given; 0 takes any "
        "port. The address that is printed holds a random token.",
    ),
]
WebOpenOption = Annotated[
    bool,
    typer.Option("--web-open", help="Leave the token of --web out: everybody who reaches the address sees the page."),
]


def default_home(kind: str) -> Path:
    """Return the usual home of a node, or of a bootstrap peer; raise `UserError` (USAGE) for a user without any."""
    try:
        return Path.home() / ".noloco" / kind
    except RuntimeError as error:  # in a container, a user by number alone
        why = "neither HOME nor the system's list of users names one"
        raise usage_error("This user has no home directory.", why, "--home with a directory of yours") from error


def page_place(web: str | None, *, is_open: bool, home: HomePaths | None = None) -> PagePlace | None:
    """Return where to serve a page, if at all; raise `UserError` if `web` is no place.

    `home`: keeps the token, so that the address stays the same after a restart.
    """
    if web is None:
        if is_open:
            raise usage_error("There is no page to open.", "--web-open was given without --web", "add --web and a port")
        return None
    place = parse_place(web, "--web")
    if is_open:
        return PagePlace(place, "")
    return PagePlace(place, new_token() if home is None else kept_token(home.page_token))


@dataclass(frozen=True)
class JoinOptions:
    """The options of `join`: what the owner of this machine chooses for this peer alone."""

    stage: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Stage to serve, and never to leave.", show_default="the one that limits the swarm"
        ),
    ] = None
    stay: Annotated[
        bool, typer.Option("--stay", help="Do not move to another stage later, even if it is needed there.")
    ] = False
    device: DeviceOption = "auto"
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="all|LIST",
            help="Run a node on each of several devices: all GPUs, or a list such as cuda:0,cuda:1. Each has a home of "
            "its own below --home. Limits of the line, main memory, --max-disk and the CPU threads are divided among "
            "them; ports that are given count up.",
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Local text to train on instead of the run's source: a file, directory or glob; of rows a field of "
            "theirs, rows.jsonl#FIELD."
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
        int | None, typer.Option(metavar="N", min=1, max=4096, help="CPU threads for torch.", show_default="all cores")
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory that the run may take of the device, such as 8GB: a stage that needs more is not served.",
            show_default="all that is free",
        ),
    ] = None
    max_ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most main memory that the run may take, such as 24GB: beside a GPU, and on a CPU or an Apple "
            "processor in all.",
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
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROMPT",
            help="Text from which the model goes on at each evaluation that this node makes, in a run of one stage "
            "(evaluate_every_rounds). May be given more than once.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name that others see beside this peer's id.")] = None
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Begin at step 0 with the run's first weights, if the run had gone further and no peer is left that "
            "has its weights.",
        ),
    ] = False
    linger: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, max=1e9, help="For how long to go on serving the weights after the run."
        ),
    ] = 600.0
    refresh: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=100.0,  # three renewals make the longest life of a record (`swarm.stage_records`)
            help="How often to tell the others of oneself and to read the roster.",
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
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(CurveFormat),
            help="Draw losses, learning rate and rounds there while the node trains: train/loss, eval/loss and so on, "
            "over its inner steps. Files lie in the home's `curves`; pip installs the package. May be given more than "
            "once.",
        ),
    ] = None

    @property
    def curves(self) -> tuple[CurveFormat, ...]:
        """What `--log-to` names; raises `UserError` if one is unknown or not installed."""
        return read_formats(self.log_to or ())

    @cached_property
    def allowance(self) -> OwnerLimits:
        """The owner's limits of line and hours; raises `UserError` if they cannot be read."""
        return read_owner_limits(self.max_upload, self.max_download, self.monthly_cap, self.hours)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts of `--sample`; raises `UserError` if they are too many, too long, empty or no text."""
        prompts = tuple(self.sample or ())
        # Bytes of the command line that are not UTF-8 come as surrogates, which no journal can hold.
        is_text = all(each.encode(errors="replace").decode() == each for each in prompts)
        if not is_text or len(prompts) > MOST_PROMPTS or any(not 0 < len(each) <= LONGEST_PROMPT for each in prompts):
            raise usage_error(
                "--sample cannot take these prompts.",
                why=f"the training waits while the model writes, so there are {MOST_PROMPTS} at most, each of 1 to "
                f"{LONGEST_PROMPT} characters in UTF-8",
                hint='a few short ones, such as --sample "Once upon a time"',
            )
        return prompts

    @cached_property
    def most_memory_bytes(self) -> int | None:
        """The bytes of the device's memory that the run may use; None is all that is free."""
        return None if self.max_memory is None else read_size(self.max_memory, "--max-memory")

    @cached_property
    def most_ram_bytes(self) -> int | None:
        """The bytes of main memory that the run may use; None is all that is free."""
        return None if self.max_ram is None else read_size(self.max_ram, "--max-ram")

    @cached_property
    def most_disk_bytes(self) -> int | None:
        """The bytes of disk that downloads of the run's model may use; None is all that is free."""
        return None if self.max_disk is None else read_size(self.max_disk, "--max-disk")
