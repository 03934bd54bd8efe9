"""The command `members`."""

from __future__ import annotations

from typing import Annotated

import typer

from noloco_node.cli.option_groups.dataclass_options import taking
from noloco_node.cli.option_groups.members import MemberAction, MemberOptions


@taking(MemberOptions)
def members(
    action: Annotated[MemberAction, typer.Argument(metavar="ACTION", help="list, invite, revoke or ban.")],
    options: MemberOptions,
) -> None:
    """Let peers into your run and shut them out: works without a network, on the owner's key beside the run file.

    `invite` prints an invite for one identity: for PEER, or for whoever shows it
    first. `revoke` ends a ticket or an invitation, `ban` shuts a peer out for
    some days.
    """
    from noloco_node.cli.members import administer

    typer.echo(administer(action, options))
