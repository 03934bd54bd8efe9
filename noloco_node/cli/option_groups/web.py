"""The options of commands that show a swarm in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noloco_node.errors import Exit, UserError
from noloco_node.observe.served_place import parse_place
from noloco_node.storage.home import HomePaths

if TYPE_CHECKING:
    from noloco_node.web.page_server import PagePlace

WebOption = Annotated[
    str | None,
    typer.Option(
        "--web",
        metavar="[HOST:]PORT",
        help="Show the swarm in a browser at this port, to this machine alone unless an address is given; 0 takes any "
        "port. The address that is printed holds a random token.",
        show_default=False,
    ),
]
WebOpenOption = Annotated[
    bool, typer.Option("--web-open", help="Leave the token of --web out: whoever reaches the address sees the page.")
]


def page_place(web: str | None, *, is_open: bool, home: HomePaths | None = None) -> PagePlace | None:
    """Return where a page is to be served, if at all; raise `UserError` where that is no place.

    `home`: keeps the token, so that the address stays the same after a restart.
    """
    if web is None:
        if is_open:
            raise UserError(
                "There is no page to open.",
                why="--web-open was given without --web",
                hint="add --web and a port",
                code=Exit.USAGE,
            )
        return None
    place = parse_place(web, "--web")
    from noloco_node.web.page_server import PagePlace, kept_token, new_token

    if is_open:
        return PagePlace(place, "")
    return PagePlace(place, new_token() if home is None else kept_token(home.page_token))
