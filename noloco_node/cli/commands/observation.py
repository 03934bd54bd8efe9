"""The command `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli.event_loop import run_until_interrupted
from noloco_node.cli.option_groups.directories import LocalOption
from noloco_node.cli.option_groups.web import WebOpenOption, WebOption, page_place
from noloco_node.cli.options import OWNER_RUN, HomeOption, OwnerOption, default_home, invite_text


def watch(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INVITE | DIR]",
            help="Invite of a living swarm, or the home of a node of it; with --journal homes of nodes, or directories "
            "that hold such homes.",
            show_default="the invite that the usual home keeps",
        ),
    ] = None,
    journal: Annotated[
        bool,
        typer.Option("--journal", help="Play the journals of a run that is over, or crashed, forward and back."),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the present state, or the last, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, instead of a picture.")] = False,
    home: HomeOption = None,
    local: LocalOption = None,
    run: OwnerOption = OWNER_RUN,
    web: WebOption = None,
    web_open: WebOpenOption = False,
) -> None:
    """Show what a swarm does and what holds it back: live on a terminal, in lines elsewhere. Ctrl-C ends it."""
    from noloco_node.cli import observation

    given = places or []
    shown = observation.Shown(once, as_json, page_place(web, is_open=web_open))
    if journal:
        run_until_interrupted(observation.replay([Path(place) for place in given], shown))
    elif len(given) > 1:
        raise typer.BadParameter("give one INVITE, or --journal and directories")
    else:
        from noloco_node.swarm.connection import Visitor
        from noloco_node.swarm.invite import found

        home = home or default_home("node")
        visitor = Visitor(tuple(local or ()), home, run)
        invite = found(invite_text(given[0]) if given else None, home)
        run_until_interrupted(observation.watch(invite, shown, visitor))
