"""Who serves what, as the roster says: read by anybody who holds an invite, without joining."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import time_left
from noloco_node.observe.swarm_view import SwarmView, plain, short
from noloco_node.swarm import invite as invites
from noloco_node.swarm.connection import Visitor, visited
from noloco_node.swarm.peer_name import shown_name
from noloco_node.swarm.roster import PeerRecord, Roster, some_addresses
from noloco_node.swarm.run_distribution import RunFileText

MOST_CREDITS = 64
"""Sources that the table shows."""


async def look(invite: str, *, as_json: bool, visitor: Visitor) -> str:
    """Return a table, or one JSON object, of all peers of a run."""
    async with visited(invite, visitor) as (_, recipe, membership):
        roster, late = membership.roster, membership.news_age_s
    # What stands on a screen, or in a log, lets nobody in who reads it there.
    wider = invites.without_secret(invites.widened(invites.parse(invite), some_addresses(roster)))
    if as_json:
        return msgspec.json.encode(summary(recipe, roster, wider)).decode()
    return picture(recipe, roster, late) + f"\nThe same swarm by more addresses:\n  {wider}"


def summary(recipe: RunFileText, roster: Roster, invite: str) -> dict[str, Any]:
    """Return what `--json` prints."""
    view = _view(recipe, roster)
    return {
        "run": recipe.run.name,
        "run_id": recipe.digest,
        "progress": view.progress,
        "tokens_per_s": view.tokens_per_s,
        "left_s": view.left_s,
        "bottleneck": view.bottleneck,
        "samples": roster.run_samples,
        "samples_covered": roster.covered_samples,
        "credits": roster.credits,
        "budget_samples": recipe.run.budget_samples,
        "sources": roster.sources,
        "sources_finished": roster.sources_finished,
        "stages": roster.stages,
        "invite": invite,
    }


def picture(recipe: RunFileText, roster: Roster, late: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return a table of all peers, stage by stage, and below it what some of them wait for.

    `late`: of peers that may be dead the age of their last news, in seconds.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    view = _view(recipe, roster)
    # Within eighty columns: names and figures whole. Words have lines of their own.
    table = Table(
        title=f"{recipe.run.name} ({recipe.digest[:12]}), {view.progress:.1%} of the token budget",
        caption="ms: device time of a microbatch",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("stage", "peer", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", "round", "progress", "loss", "gap", "tokens/s", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, records in enumerate(roster.stages):
        table.add_section()
        for record in sorted(records, key=lambda record: record.peer):
            table.add_row(str(number), *_row(record))
        if not records:
            table.add_row(str(number), "[bold red]nobody[/]")
    text = io.StringIO()
    console = Console(file=text, width=max(80, shutil.get_terminal_size().columns))
    console.print(table)
    console.print(f"{view.tokens_per_s:,.0f} tokens/s, {time_left(view)}. {_said(view.bottleneck)}", highlight=False)
    peers = sorted((record for stage in roster.stages for record in stage), key=lambda record: record.peer)
    silent = [(each.peer, f"for {late[each.peer]:.0f} s: it may be dead") for each in peers if each.peer in late]
    moving = {each.peer: f"moves to stage {each.moves_to}" for each in peers if each.moves_to is not None}
    waits = [(each.peer, each.waiting or moving.get(each.peer)) for each in peers]
    budgets = [(each.peer, each.budget) for each in peers]
    tokens = recipe.run.pipeline.sequence_length
    credits = [
        (each.peer, f"{each.claimed * tokens:,} claimed, {each.covered * tokens:,} covered by receipts")
        for each in roster.credits
    ]
    names = [(each.peer, shown_name(each.name)) for each in peers]
    for title, rows in (
        ("Names:", names),
        ("No news:", silent),
        ("Waiting for:", waits),
        ("Bandwidth used, of what a budget allows:", budgets),
        ("Tokens of each source:", credits[:MOST_CREDITS]),
    ):
        said = [(peer, words) for peer, words in rows if words]
        if said:
            grid = Table.grid(padding=(0, 1))
            for peer, words in said:
                grid.add_row(f" {_said(short(peer))}", _said(words))
            console.print(title, grid)
    return text.getvalue()


def _row(record: PeerRecord) -> tuple[str, ...]:
    return (
        _said(short(record.peer)),
        str(record.state),
        str(record.inner_steps),
        str(record.round),
        f"{record.progress:.1%}",
        "" if record.loss is None else f"{record.loss:.3f}",
        "" if record.gap is None else f"{record.gap:.4f}",
        f"{record.tokens_per_s:,.0f}",
        f"{1000 * record.device_s:.0f}" if record.device_s else "",
    )


def _said(words: str | None) -> str:
    """Return what a stranger says of itself as plain text: neither markup nor signs that move a terminal's cursor."""
    from rich.markup import escape

    return escape(plain(words))


def _view(recipe: RunFileText, roster: Roster) -> SwarmView:
    return RosterObserver(recipe.run, recipe.digest).view(roster, time.time())
