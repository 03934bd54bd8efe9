"""Events of a node, and histories of them, for tests of journals and views."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from noloco_node.journal import events
from noloco_node.journal.writer import Journal
from noloco_node.observe.peer_history import PeerHistory


def inner(step: int, at: float = 0.0, **others: Any) -> events.InnerStep:
    """Return an inner step of half a second in a run of a hundred."""
    usual = {"progress": step / 100, "loss": 3.0, "tokens": 4096, "seconds": 0.5, "learning_rate": 1e-3}
    return events.InnerStep(at=at, step=step, **usual | others)


def started(peer: str, stage: int, at: float = 100.0, **others: Any) -> events.Started:
    return events.Started(at=at, peer=peer, stage=stage, **{"run": "r", "version": "0"} | others)


def history(name: str, stage: int, taken: Iterable[events.Event], slowdown: float = 1.0) -> PeerHistory:
    folded = PeerHistory(name, stage, slowdown)
    for event in taken:
        folded.take(event)
    return folded


def write_journal(home: Path, taken: Iterable[events.Event]) -> None:
    """Write the journal of a home, each event at its own time."""
    home.mkdir(exist_ok=True)
    taken = list(taken)
    with Journal(home / "journal.jsonl", now=iter([event.at for event in taken]).__next__) as journal:
        for event in taken:
            journal.write(event)
