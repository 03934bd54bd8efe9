"""What the owner of a machine says of it to `noloco-node join`, and how that is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import typer

from noloco_node.cli.options import (
    AnnounceOption,
    CapOption,
    DeviceOption,
    DownloadOption,
    HomeOption,
    ListenOption,
    LocalOption,
    MetricsOpenOption,
    MetricsOption,
    UploadOption,
    WebOpenOption,
    WebOption,
    WeightsOption,
)
from noloco_node.limits.budget import OwnerLimits, read_owner_limits, read_size
from noloco_node.run.config import MOST_SLOWDOWN
from noloco_node.storage.checkpoint import KEPT


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
    device: DeviceOption = "auto"
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
