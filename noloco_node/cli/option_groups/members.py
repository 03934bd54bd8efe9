"""What the owner of a run may say to `noloco-node members`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class MemberAction(StrEnum):
    """What `members` does."""

    LIST = "list"
    INVITE = "invite"
    REVOKE = "revoke"
    BAN = "ban"


@dataclass(frozen=True)
class MemberOptions:
    """What the owner of a run says to `members`."""

    who: Annotated[
        str | None,
        typer.Argument(
            metavar="[PEER]", help="A peer id, or the first digits of a key as `list` prints it.", show_default=False
        ),
    ] = None
    run: Annotated[Path, typer.Option("--run", help="The run file, beside which the owner's key lies.")] = Path(
        "run.toml"
    )
    invite: Annotated[
        str | None,
        typer.Option(
            help="The line that a bootstrap peer printed, or a file that holds it: `invite` adds a credential to it, "
            "`revoke` and `ban` hand that peer the list.",
            show_default=False,
        ),
    ] = None
    days: Annotated[float, typer.Option(metavar="X", min=0.0, help="How long the invite lasts, or the ban.")] = 30.0
    note: Annotated[str, typer.Option(help="Whom it is for; kept in your list alone.", show_default=False)] = ""
    may_sign: Annotated[
        bool, typer.Option("--may-sign", help="Let the peer host a bootstrap peer that signs tickets for others.")
    ] = False
