"""The command `members`."""

from __future__ import annotations

from typing import Annotated

import typer

from noloco_node.cli.event_loop import run
from noloco_node.cli.option_groups.dataclass_options import taking
from noloco_node.cli.option_groups.members import MemberAction, MemberOptions


@taking(MemberOptions)
def members(
    action: Annotated[MemberAction, typer.Argument(metavar="ACTION", help="list, invite, revoke or ban.")],
    options: MemberOptions,
) -> None:
    """Let peers into your run and shut them out, with the owner's key beside the run file; it needs no network.

    `invite` prints an invite for one identity: for PEER, or for whoever shows it
    first. `revoke` ends a ticket or an invitation, `ban` shuts a peer out for
    some days; both hand the list to a bootstrap peer, and say whether it has it.
    """
    from noloco_node.cli.members import administer

    typer.echo(administer(action, options))
    if action in (MemberAction.REVOKE, MemberAction.BAN):
        from noloco_node.cli.revocation_report import report

        typer.echo(run(report(options)))
