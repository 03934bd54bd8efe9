"""Who serves what, as the roster says: read by anybody who holds an invite, without joining."""

from __future__ import annotations

import contextlib
import io
import shutil
from typing import Any

import msgspec

from noloco_node.libp2p.endpoint.addresses import parse_peer_address
from noloco_node.swarm import invite as invites
from noloco_node.swarm.connection import Visitor, visited
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText

BESIDE_BOOTSTRAP = 4
"""Addresses of ordinary peers in the invite that `status` prints: with them it outlives its bootstrap peers."""
MOST_WORDS = 200
"""Of what a peer says of itself in words."""


async def look(invite: str, *, as_json: bool, visitor: Visitor = Visitor()) -> str:  # noqa: B008 - it is frozen
    """Return a table, or one JSON object, of all peers of a run."""
    async with visited(invite, visitor) as (_, recipe, membership):
        roster = membership.roster
    wider = widened(invite, roster)
    if as_json:
        return msgspec.json.encode(summary(recipe, roster, wider)).decode()
    return picture(recipe, roster) + f"\nThe same swarm by more addresses:\n  {wider}"


def widened(invite: str, roster: Roster) -> str:
    """Return the invite with the addresses of some living peers added."""
    parsed = invites.parse(invite)
    known = [str(address) for address in parsed.addresses]
    living = [address for stage in roster.stages for record in stage for address in _place_of(record)]
    more = [address for address in living if address not in known][:BESIDE_BOOTSTRAP]
    return invites.format(parsed.digest, [*known, *more], parsed.entry)


def _place_of(record: PeerRecord) -> list[str]:
    """Return the first address of a peer, unless it is none, or leads to somebody else: the peer itself wrote it."""
    for address in record.addresses[:1]:
        with contextlib.suppress(ValueError):
            # A comma would smuggle a second address into the invite.
            if "," not in address and parse_peer_address(address).peer == record.peer:
                return [address]
    return []


def summary(recipe: RunFileText, roster: Roster, invite: str) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "run": recipe.run.name,
        "run_id": recipe.digest,
        "progress": _progress(recipe, roster),
        "samples": roster.run_samples,
        "budget_samples": recipe.run.budget_samples,
        "sources": roster.sources,
        "sources_finished": roster.sources_finished,
        "stages": roster.stages,
        "invite": invite,
    }


def picture(recipe: RunFileText, roster: Roster) -> str:
    """Return a table of all peers, stage by stage."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # All of it within a hundred columns: names and figures whole, and words that wrap.
    table = Table(
        title=f"{recipe.run.name} ({recipe.digest[:12]}), {_progress(recipe, roster):.1%} of the token budget",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("stage", "peer", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", "round", "progress", "loss", "gap", "tokens/s", "device ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("waits for")
    for number, records in enumerate(roster.stages):
        table.add_section()
        for record in sorted(records, key=lambda record: record.peer):
            table.add_row(str(number), *_row(record))
        if not records:
            table.add_row(str(number), "[bold red]nobody[/]")
    text = io.StringIO()
    console = Console(file=text, width=max(100, shutil.get_terminal_size().columns))
    console.print(table)
    # As a column they would leave the others no room.
    budgets = [(record.peer, record.budget) for records in roster.stages for record in records if record.budget]
    if budgets:
        used = Table.grid(padding=(0, 1))
        for peer, words in sorted(budgets):
            used.add_row(f" {_said(peer[-8:])}", _said(words))
        console.print("Bandwidth used, of what a budget allows:", used)
    return text.getvalue()


def _row(record: PeerRecord) -> tuple[str, ...]:
    return (
        _said(record.peer[-8:]),
        str(record.state),
        str(record.inner_steps),
        str(record.round),
        f"{record.progress:.1%}",
        "" if record.loss is None else f"{record.loss:.3f}",
        "" if record.gap is None else f"{record.gap:.4f}",
        f"{record.tokens_per_s:,.0f}",
        f"{1000 * record.device_s:.0f}" if record.device_s else "",
        _said(record.waiting) or (f"moves to stage {record.moves_to}" if record.moves_to is not None else ""),
    )


def _said(words: str | None) -> str:
    """Return what a stranger says of itself as plain text: neither markup nor signs that move a terminal's cursor."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else " " for letter in (words or "")[:MOST_WORDS]))


def _progress(recipe: RunFileText, roster: Roster) -> float:
    return min(1.0, roster.run_samples / recipe.run.budget_samples)
