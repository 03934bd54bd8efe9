"""The arguments and options that several commands of the command line have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

InviteArgument = Annotated[
    str,
    typer.Argument(metavar="INVITE", help="The one line that a bootstrap peer or `status` prints.", show_default=False),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Directory of this node: identity, journal, checkpoints. One running node each.",
        show_default="~/.noloco/node, of a bootstrap peer ~/.noloco/bootstrap",
    ),
]
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
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001, /ip6/::/tcp/4001 or "
        "/ip4/0.0.0.0/udp/4001/quic-v1. May be given more than once.",
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
