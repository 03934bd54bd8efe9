"""Who serves what, as the roster says: read by anybody who holds an invite, without joining."""

from __future__ import annotations

import io
import shutil
from typing import Any

import msgspec

from noloco_node import invite as invites
from noloco_node.recipe import Recipe
from noloco_node.roster import PeerRecord, Roster
from noloco_node.swarm import visited

BESIDE_BOOTSTRAP = 4
"""Addresses of ordinary peers in the invite that `status` prints: with them it outlives its bootstrap peers."""


async def look(invite: str, *, as_json: bool) -> str:
    """Return a table, or one JSON object, of all peers of a run."""
    async with visited(invite) as (_, recipe, presence):
        roster = presence.roster
    wider = widened(invite, roster)
    if as_json:
        return msgspec.json.encode(summary(recipe, roster, wider)).decode()
    return picture(recipe, roster) + f"\nThe same swarm by more addresses:\n  {wider}"


def widened(invite: str, roster: Roster) -> str:
    """Return the invite with the addresses of some living peers added."""
    parsed = invites.parse(invite)
    known = [str(address) for address in parsed.addresses]
    living = [record.addresses[0] for stage in roster.stages for record in stage if record.addresses]
    return invites.format(
        parsed.digest, [*known, *[address for address in living if address not in known][:BESIDE_BOOTSTRAP]]
    )


def summary(recipe: Recipe, roster: Roster, invite: str) -> dict[str, Any]:
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


def picture(recipe: Recipe, roster: Roster) -> str:
    """Return a table of all peers, stage by stage."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{recipe.run.name} ({recipe.digest[:12]}), {_progress(recipe, roster):.1%} of the token budget"
    )
    for heading in ("stage", "peer", "state"):
        table.add_column(heading)
    for heading in ("step", "round", "progress", "loss", "gap", "tokens/s", "ms a microbatch"):
        table.add_column(heading, justify="right")
    table.add_column("waits for")
    for number, records in enumerate(roster.stages):
        table.add_section()
        for record in sorted(records, key=lambda record: record.peer):
            table.add_row(str(number), *_row(record))
        if not records:
            table.add_row(str(number), "[bold red]nobody[/]")
    text = io.StringIO()
    Console(file=text, width=max(100, shutil.get_terminal_size().columns)).print(table)
    return text.getvalue()


def _row(record: PeerRecord) -> tuple[str, ...]:
    return (
        record.peer[-8:],
        str(record.state),
        str(record.inner_steps),
        str(record.round),
        f"{record.progress:.1%}",
        "" if record.loss is None else f"{record.loss:.3f}",
        "" if record.gap is None else f"{record.gap:.4f}",
        f"{record.tokens_per_s:,.0f}",
        f"{1000 * record.device_s:.0f}" if record.device_s else "",
        record.waiting or "",
    )


def _progress(recipe: Recipe, roster: Roster) -> float:
    return min(1.0, roster.run_samples / recipe.run.budget_samples)
