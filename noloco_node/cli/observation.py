"""`noloco-node watch`: a swarm as it is now, or as the journals of a run that is over have it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from noloco_node.machine.signals import signals_interrupt
from noloco_node.observe.journal_observer import Recording, read_journals
from noloco_node.observe.live_view import LiveView
from noloco_node.observe.playback import Keyboard, Playback
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import lines
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.swarm.connection import Visitor, visited
from noloco_node.tasks import background

DRAW_EVERY_S = 1.0
PLAY_EVERY_S = 0.1
PLAIN_MOMENTS = 40
"""Of a recording that is told in lines."""


async def watch(invite: str, *, once: bool, as_json: bool, visitor: Visitor) -> None:
    """Show the swarm of an invite until interrupted."""
    async with visited(invite, visitor) as (_, recipe, membership):
        observer = RosterObserver(recipe.run, recipe.digest)
        view = observer.view(membership.roster, time.time(), membership.news_age_s)
        if once:
            _print_view(view, as_json=as_json)
            return
        seen = membership.roster
        with signals_interrupt(), LiveView(_console(plain=as_json), whole_screen=True) as live:
            async with background(membership.run()):
                while True:
                    if as_json:
                        _print_view(view, as_json=True)
                    else:
                        live.show(view)
                    while seen is membership.roster:
                        await asyncio.sleep(DRAW_EVERY_S)
                        if not as_json:
                            live.show(view)  # the terminal may have another size by now
                    seen = membership.roster
                    view = observer.view(seen, time.time(), membership.news_age_s)


async def replay(places: Sequence[Path], *, once: bool, as_json: bool) -> None:
    """Play the journals of a run."""
    recording = await asyncio.to_thread(read_journals, places)
    if once:
        _print_view(recording.at(recording.ended), as_json=as_json)
        return
    console = _console(plain=as_json)
    if not console.is_terminal:
        _tell(recording, LiveView(console, whole_screen=True), as_json=as_json)
        return
    playback = Playback(recording.begun, recording.ended)
    with signals_interrupt(), LiveView(console, whole_screen=True) as live, Keyboard() as keyboard:
        while not playback.over and (keyboard.is_there or not playback.at_end):
            live.show(recording.at(playback.now), playback.footer())
            await asyncio.sleep(PLAY_EVERY_S)
            playback.advance(PLAY_EVERY_S)
            for key in keyboard.pressed():
                playback.press(key)


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
