"""`noloco-node status` and `watch`: a swarm as a visitor with an invite sees it.

`status` prints one table. `watch` shows the swarm as it is now, or as the journals of a run recorded it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import chain
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console

from noloco_node.cli import options
from noloco_node.errors import usage_error
from noloco_node.machine.signals import run, run_until_interrupted
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.observe.bottleneck import all_waits
from noloco_node.observe.playback import Keyboard, Playback, Recording, read_journals
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import LiveView, lines, time_left
from noloco_node.observe.swarm_view import SwarmView, plain, short
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import Visitor, visited
from noloco_node.swarm.roster import PeerRecord, Roster, shown_name, some_addresses
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background
from noloco_node.web.places import PagePlace

if TYPE_CHECKING:
    from noloco_node.web.server import Page

DRAW_EVERY_S = 1.0
PLAY_EVERY_S = 0.1
PLAIN_MOMENTS = 40  # views of a recording that is printed as lines
MOST_SOURCES_SHOWN = 64  # the most sources in the table
FIGURES: Mapping[str, Callable[[PeerRecord], str]] = {
    "step": lambda record: str(record.inner_steps),
    "round": lambda record: str(record.round),
    "progress": lambda record: f"{record.progress:.1%}",
    "loss": lambda record: "" if record.loss is None else f"{record.loss:.3f}",
    "gap": lambda record: "" if record.gap is None else f"{record.gap:.4f}",
    "tokens/s": lambda record: f"{record.tokens_per_s:,.0f}",
    "ms": lambda record: f"{1000 * record.device_s:.0f}" if record.device_s else "",
}
"""Of a peer in the table."""
SPARED = {80: ("progress", "gap", "ms"), 58: ("step", "round", "loss")}
"""Figures for which a terminal of fewer columns has no room."""


def status(
    invite: options.KeptInviteArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    local: options.LocalOption = None,
    home: options.HomeOption = None,
    owner_run: options.OwnerOption = options.OWNER_RUN,
) -> None:
    """Print the peers of each stage with their speeds, rounds, progress and losses."""
    home = home or options.default_home("node")
    typer.echo(
        run(look(invites.found(invite, home), as_json=as_json, visitor=Visitor(tuple(local or ()), home, owner_run)))
    )


async def look(invite: str, *, as_json: bool, visitor: Visitor) -> str:
    """Return a table, or one JSON object, of all peers of a run."""
    async with visited(invite, visitor) as (_, recipe, membership):
        roster, late = membership.roster, membership.news_age_s
    # Without its secret: others may read the screen or the log.
    wider = invites.without_secret(invites.widened(invites.parse(invite), some_addresses(roster)))
    if as_json:
        return msgspec.json.encode(summary(recipe, roster, wider)).decode()
    return picture(recipe, roster, late) + f"\nThe same swarm by more addresses:\n  {wider}"


def summary(recipe: RunFileText, roster: Roster, invite: str) -> dict[str, Any]:
    view = _view(recipe, roster)
    return {
        "run": recipe.run.name,
        "run_id": recipe.digest,
        "progress": view.progress,
        "tokens_per_s": view.tokens_per_s,
        "left_s": view.left_s,
        "bottleneck": view.bottleneck,
        "samples": roster.run_samples,
        "samples_signed": roster.signed_samples,
        "other_sources": roster.other_sources,
        "budget_samples": recipe.run.budget_samples,
        "replicas": [roster.size(number)._asdict() for number in range(len(roster.stages))],
        "sources": roster.sources,
        "sources_finished": roster.sources_finished,
        # Records travel as arrays; here their fields have names.
        "stages": [[msgspec.structs.asdict(record) for record in stage] for stage in roster.stages],
        "invite": invite,
    }


def picture(recipe: RunFileText, roster: Roster, late: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return a table of all peers by stage, and below it what some of them wait for.

    `late`: seconds since the last news of peers that may be dead.
    """
    view, width = _view(recipe, roster), shutil.get_terminal_size().columns
    # Names and figures fit eighty columns, or with fewer figures sixty or forty; words follow on lines of their own.
    is_known = view.progress > 0.0 or any(roster.stages)
    done = f"{view.progress:.1%} of the token budget" if is_known else "nobody is there to say how far it is"
    text = wrap(f"{plain(recipe.run.name)} ({recipe.digest[:12]}), {done}", width)
    text += ["", *_peer_table(roster, width)]
    text += wrap(f"{view.tokens_per_s:,.0f} tokens/s, {time_left(view)}. {plain(view.bottleneck)}", width)
    peers = sorted((record for stage in roster.stages for record in stage), key=lambda record: record.peer)
    silent = [(each.peer, f"for {late[each.peer]:.0f} s: it may be dead") for each in peers if each.peer in late]
    moving = {each.peer: f"moves to stage {each.moves_to}" for each in peers if each.moves_to is not None}
    waits = [(each.peer, all_waits(each.waiting, each.stage) or moving.get(each.peer)) for each in peers]
    budgets = [(each.peer, each.budget) for each in peers]
    tokens = recipe.run.tokens
    other_sources = [
        (each.peer, f"{tokens(each.claimed):,} claimed, {tokens(each.signed):,} signed by receipts")
        for each in roster.other_sources
    ]
    names = [(each.peer, shown_name(each.name)) for each in peers]
    for title, rows in (
        ("Names:", names),
        ("No news:", silent),
        ("Waiting for:", waits),
        ("Bandwidth used, of what a budget allows:", budgets),
        ("Tokens of each source:", other_sources[:MOST_SOURCES_SHOWN]),
    ):
        said = [(f" {plain(short(peer))} ", plain(words)) for peer, words in rows if words]
        if said:
            text.append(title)
        for peer, words in said:
            text += wrap(words, width, initial_indent=peer, subsequent_indent=" " * len(peer))
    return "\n".join(text) + "\n"


def _peer_table(roster: Roster, width: int) -> list[str]:
    """Return the lines of a table of all peers by stage. Not by rich, which takes a second for 3,000 of them."""
    spared = {each for least, figures in SPARED.items() if width < least for each in figures}
    figures = {heading: figure for heading, figure in FIGURES.items() if heading not in spared}
    heads = ("stage", "peer", "state", *figures)
    stages = [
        [
            (str(number), plain(short(each.peer)), str(each.state), *(figure(each) for figure in figures.values()))
            for each in sorted(records, key=lambda record: record.peer)
        ]
        for number, records in enumerate(roster.stages)
    ]
    widths = [max(map(len, column)) for column in zip(heads, *chain.from_iterable(stages), strict=True)]
    left, room = widths[: -len(figures)], width - len(widths)
    while sum(widths) > room and max(widths[len(left) :]) > 1:  # a stranger may claim a figure of thirty digits
        widest = max(range(len(left), len(widths)), key=widths.__getitem__)
        widths[widest] -= 1

    def line(cells: Sequence[str]) -> str:
        right = zip(cells[len(left) :], widths[len(left) :], strict=True)
        fitted = [cell.rjust(most) if len(cell) <= most else f"{cell[: most - 1]}…" for cell, most in right]
        return " " + " ".join((*map(str.ljust, cells, left), *fitted))

    lines = [line(heads), " " + "─" * (sum(widths) + len(widths) - 1)]
    for number, rows in enumerate(stages):
        start = " " + str(number).ljust(widths[0] + 1)
        if roster.is_sample:
            lines.append(f"{start}{len(rows)} of {roster.size(number)}")
        lines += [line(cells) for cells in rows] or [f"{start}nobody"]
        lines.append("")
    return lines if "ms" in spared else [*lines, " ms: device time of a microbatch"]


def _view(recipe: RunFileText, roster: Roster) -> SwarmView:
    return RosterObserver(recipe.run, recipe.digest).view(roster, CLOCK.unix_s())


class Shown(NamedTuple):
    """How to show a swarm. `once`: print one view and leave; `page`: where to show it in a browser."""

    once: bool
    as_json: bool
    page: PagePlace | None


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
        bool, typer.Option("--journal", help="Play the journals of a run that is over, or crashed, forward and back.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the present view, or the last one, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, instead of a picture.")] = False,
    home: options.HomeOption = None,
    local: options.LocalOption = None,
    run: options.OwnerOption = options.OWNER_RUN,
    web: options.WebOption = None,
    web_open: options.WebOpenOption = False,
) -> None:
    """Show a swarm at work and its bottleneck: live on a terminal, as lines elsewhere. Ctrl-C ends it."""
    given = places or []
    shown = Shown(once, as_json, options.page_place(web, is_open=web_open))
    if once and shown.page is not None:
        raise usage_error(
            "There is no page to look at.",
            why="--web shows the swarm for as long as the command runs, and --once ends it at once",
            hint="leave out one of the two",
        )
    if journal:
        run_until_interrupted(replay([Path(place) for place in given], shown))
    elif len(given) > 1:
        raise typer.BadParameter("give one INVITE, or --journal and directories")
    else:
        home = home or options.default_home("node")
        visitor = Visitor(tuple(local or ()), home, run)
        invite = invites.found(options.invite_text(given[0]) if given else None, home)
        run_until_interrupted(_follow(invite, shown, visitor))


async def _follow(invite: str, shown: Shown, visitor: Visitor) -> None:
    """Show the swarm of an invite until interrupted."""
    async with visited(invite, visitor) as (_, recipe, membership):
        observer = RosterObserver(recipe.run, recipe.digest)
        view = observer.view(membership.roster, CLOCK.unix_s(), membership.news_age_s)
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
                    view = observer.view(seen, CLOCK.unix_s(), membership.news_age_s)


async def replay(places: Sequence[Path], shown: Shown) -> None:
    """Play the journals of a run."""
    recording = await asyncio.to_thread(read_journals, places)
    if shown.once:
        _print_view(recording.at(recording.ended), as_json=shown.as_json)
        return
    console = _console(plain=shown.as_json)
    if not console.is_interactive and shown.page is None:
        _tell(recording, LiveView(console, whole_screen=True), as_json=shown.as_json)
        return
    playback = Playback(recording.begun, recording.ended)
    async with _page(shown, takes_keys=True) as page:
        await _play(recording, playback, console, page)


async def _play(recording: Recording, playback: Playback, console: Console, page: Page | None) -> None:
    address = None if page is None else page.address
    live = LiveView(console, whole_screen=True, address=address) if console.is_interactive else None
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
    from noloco_node.web.server import page_served

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
    # A reader of the lines has the course already, moment by moment.
    brief = msgspec.structs.replace(view, course=())
    typer.echo(msgspec.json.encode(brief).decode() if as_json else "\n".join(lines(view)))
