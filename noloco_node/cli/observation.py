"""`noloco-node watch`: a swarm as it is now, or as the journals of a run that is over have it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import typer
from rich.console import Console

from noloco_node.observe.journal_observer import Recording, read_journals
from noloco_node.observe.live_view import LiveView
from noloco_node.observe.playback import Keyboard, Playback
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import lines
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.swarm.connection import Visitor, visited
from noloco_node.tasks import background

if TYPE_CHECKING:
    from noloco_node.web.page_server import Page, PagePlace

DRAW_EVERY_S = 1.0
PLAY_EVERY_S = 0.1
PLAIN_MOMENTS = 40
"""Of a recording that is told in lines."""


class Shown(NamedTuple):
    """How a swarm is to be shown. `once`: and no more; `page`: where in a browser too."""

    once: bool
    as_json: bool
    page: PagePlace | None


async def watch(invite: str, shown: Shown, visitor: Visitor) -> None:
    """Show the swarm of an invite until interrupted."""
    async with visited(invite, visitor) as (_, recipe, membership):
        observer = RosterObserver(recipe.run, recipe.digest)
        view = observer.view(membership.roster, time.time(), membership.news_age_s)
        if shown.once:
            _print_view(view, as_json=shown.as_json)
            return
        seen = membership.roster
        async with _page(shown) as page, background(membership.run()):
            address = None if page is None else page.address
            with LiveView(_console(plain=shown.as_json), whole_screen=True, address=address) as live:
                while True:
                    if page is not None:
                        page.show(view)
                    if shown.as_json:
                        _print_view(view, as_json=True)
                    else:
                        live.show(view)
                    while seen is membership.roster:
                        await asyncio.sleep(DRAW_EVERY_S)
                        if not shown.as_json:
                            live.show(view)  # the terminal may have another size by now
                    seen = membership.roster
                    view = observer.view(seen, time.time(), membership.news_age_s)


async def replay(places: Sequence[Path], shown: Shown) -> None:
    """Play the journals of a run."""
    recording = await asyncio.to_thread(read_journals, places)
    if shown.once:
        _print_view(recording.at(recording.ended), as_json=shown.as_json)
        return
    console = _console(plain=shown.as_json)
    if not console.is_terminal and shown.page is None:
        _tell(recording, LiveView(console, whole_screen=True), as_json=shown.as_json)
        return
    playback = Playback(recording.begun, recording.ended)
    async with _page(shown, takes_keys=True) as page:
        await _play(recording, playback, console, page)


async def _play(recording: Recording, playback: Playback, console: Console, page: Page | None) -> None:
    address = None if page is None else page.address
    live = LiveView(console, whole_screen=True, address=address) if console.is_terminal else None
    with live or nullcontext(), Keyboard() as keyboard:
        while not playback.over and (page is not None or keyboard.is_there or not playback.at_end):
            view = recording.at(playback.now)
            if live is not None:
                live.show(view, playback.footer())
            if page is not None:
                page.show(view, playback.state())
            await asyncio.sleep(PLAY_EVERY_S)
            playback.advance(PLAY_EVERY_S)
            for key in (*keyboard.pressed(), *(() if page is None else page.pressed())):
                playback.press(key)


@asynccontextmanager
async def _page(shown: Shown, *, takes_keys: bool = False) -> AsyncIterator[Page | None]:
    if shown.page is None:
        yield None
        return
    from noloco_node.web.page_server import page_served

    async with page_served(shown.page, takes_keys=takes_keys) as page:
        yield page


def _tell(recording: Recording, live: LiveView, *, as_json: bool) -> None:
    step = (recording.ended - recording.begun) / PLAIN_MOMENTS
    for number in range(PLAIN_MOMENTS + 1):
        view = recording.at(recording.begun + number * step)
        if as_json:
            _print_view(view, as_json=True)
        else:
            live.show(view)


def _console(*, plain: bool) -> Console:
    return Console(force_terminal=False if plain else None)


def _print_view(view: SwarmView, *, as_json: bool) -> None:
    # Whoever reads on has the course already, moment by moment.
    brief = msgspec.structs.replace(view, course=())
    typer.echo(msgspec.json.encode(brief).decode() if as_json else "\n".join(lines(view)))
