"""What a peer has given to which runs, by its own journal: nobody else vouches for it.

A journal keeps its last hundred megabytes or so; what is older is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gossip.interface import OuterStepTaken
from noloco_node.admission.ticket import peer_of_file
from noloco_node.errors import config_error
from noloco_node.journal import events
from noloco_node.journal.reader import read
from noloco_node.observe.swarm_view import plain
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.roster import Given
from noloco_node.units import format_bytes, format_count, format_duration, format_energy

LONGEST_PAUSE_S = 120.0
"""Between two lines of a journal whose node was there all the time: it writes more often."""


class Contribution(msgspec.Struct, kw_only=True):
    """What was given to one run. Times are unix seconds; `there_s`: for which the node was there.

    `tokens`: of its windows, whatever its stage; `signed_tokens`: of those that it drew as a source, those that the
    last stage has signed for. `joules`: of the device meanwhile; 0 where it does not tell.
    """

    run: str
    peers: list[str] = msgspec.field(default_factory=list)
    stages: list[int] = msgspec.field(default_factory=list)
    first_at: float
    last_at: float
    there_s: float = 0.0
    device_s: float = 0.0
    tokens: int = 0
    signed_tokens: int = 0
    inner_steps: int = 0
    rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    joules: float = 0.0

    def given(self) -> Given:
        """Return what our record says of it."""
        return Given(self.tokens, round(self.there_s), self.sent_bytes, self.received_bytes, round(self.joules))


class ContributionLedger:
    """Adds up events, journalled long ago or just now: `by_run`, in the order of the first time."""

    def __init__(self) -> None:
        self.by_run: dict[str, Contribution] = {}
        self.now: Contribution | None = None
        """What is given to the run that is taken part in; None before there is one."""
        self._sent = self._received = self._pid = 0
        self._joules = 0.0
        self._moves = False
        """Whether the node is on its way to another stage: its totals go on there."""

    def given(self, run: str) -> Given | None:
        """Return what our record says of what was given to a run; None of none."""
        found = self.by_run.get(run)
        return None if found is None else found.given()

    def take(self, event: events.Event) -> None:
        """Add an event."""
        if isinstance(event, events.Started):
            begun = Contribution(run=event.run, first_at=event.at, last_at=event.at)
            begun = self.now = self.by_run.setdefault(event.run, begun)
            begun.peers += [event.peer] * (event.peer not in begun.peers)
            begun.stages += [event.stage] * (event.stage not in begun.stages)
            self._begin_totals(event.pid)
        now = self.now
        if now is None:
            return
        pause_s = event.at - now.last_at
        now.there_s += pause_s if 0.0 < pause_s <= LONGEST_PAUSE_S else 0.0
        now.last_at = max(now.last_at, event.at)
        match event:
            case events.InnerStep():
                now.inner_steps += 1
                now.tokens += event.tokens
                now.device_s += max(0.0, event.device_s)
            case OuterStepTaken():
                now.rounds += event.partner is not None
            case events.Traffic():
                sent, received = sum(event.sent.values()), sum(event.received.values())
                now.sent_bytes += sent - self._sent
                now.received_bytes += received - self._received
                self._sent, self._received = sent, received
            case events.Energy():
                now.joules += event.joules - (self._joules if event.joules >= self._joules else 0.0)
                self._joules = event.joules
            case events.Receipts():
                now.signed_tokens = max(now.signed_tokens, event.own)
            case events.Moved():
                self._moves = True
            case _:
                pass

    def _begin_totals(self, pid: int) -> None:
        """Begin the totals that begin with a life: of traffic with each network, of energy with each process."""
        if not self._moves:
            self._sent = self._received = 0
        if pid != self._pid:
            self._joules = 0.0
        self._moves, self._pid = False, pid


def ledger_of(journal: Iterable[events.Event]) -> ContributionLedger:
    """Return the ledger of what a journal says."""
    ledger = ContributionLedger()
    for event in journal:
        ledger.take(event)
    return ledger


def report(home: Path, *, as_json: bool) -> str:
    """Return what the journal of a home says was given, as text or as one JSON object a run."""
    journal, me = HomePaths(home).journal, peer_of_file(HomePaths(home).identity)
    found = list(ledger_of(read(journal)).by_run.values())
    if not found:
        raise config_error(
            f"{home} has given nothing yet.",
            ("its journal does not tell of any run" if journal.exists() else "it has no journal")
            + (f" (you are {me})" if me else ""),
            "name the home of a node that took part with --home",
        )
    if as_json:
        return "\n".join(msgspec.json.encode(each).decode() for each in found)
    return "\n".join([*([f"you are {me}"] if me else []), *(line for each in found for line in _lines(each))])


def _lines(given: Contribution) -> list[str]:
    stages = ", ".join(map(str, sorted(given.stages)))
    rows: list[tuple[str, Any]] = [
        ("as", ", ".join(plain(peer) for peer in given.peers)),
        ("at stage", stages),
        ("there", format_duration(given.there_s)),
        ("computed", f"{format_duration(given.device_s)} of CPU or GPU time, joining and serving not counted"),
        ("tokens", f"{format_count(given.tokens)} in {given.inner_steps:,} inner steps, {given.rounds:,} meetings"),
    ]
    if given.signed_tokens:
        rows.append(("signed", f"receipts for {format_count(given.signed_tokens)} tokens that were drawn here"))
    rows.append(("sent", f"{format_bytes(given.sent_bytes)}, received {format_bytes(given.received_bytes)}"))
    if given.joules:
        rows.append(("energy", f"{format_energy(given.joules)}, as the device tells"))
    return [f"run {plain(given.run)[:12]}, {_day(given.first_at)} to {_day(given.last_at)}"] + [
        f"  {name:<10}{value}" for name, value in rows
    ]


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
