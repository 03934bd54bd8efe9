"""A swarm as its peers' journals tell it: while they are written, or long after.

A `Recording` plays journals that are over. Back is forth from the beginning: a fold cannot be undone, and folding a
hundred thousand events again takes a part of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path

import msgspec

from noloco_node.errors import UserError, config_error
from noloco_node.journal import events
from noloco_node.journal.reader import journals_in, read
from noloco_node.observe.bottleneck import wait_words
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.swarm_view import (
    ALL_ROUTES,
    MOST_CHANGES,
    Change,
    Course,
    PeerView,
    Route,
    RunTotals,
    SwarmView,
    swarm_view,
)
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.run.runfile import decode_run
from noloco_node.storage.home import HomePaths

TRACE = "events.jsonl"
"""What `simulate --trace` writes."""
MOMENTS = 240
"""Of the course of a recording."""
SILENT_S = 30.0
"""Without a line in its journal, before a peer counts as gone: one that lives writes more often."""
SILENT = "its journal falls silent"


class JournalObserver:
    """Makes views of histories that somebody feeds. `run`: the run file, where there is one."""

    def __init__(self, name: str, histories: Sequence[PeerHistory], run: RunConfig | None) -> None:
        self._name, self.histories, self._run = name, list(histories), run
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._course = Course()

    def take(self, history: PeerHistory, event: events.Event) -> None:
        """Fold an event of one peer in."""
        text = change_text(event)
        if text is not None:
            self._changes.append(Change(at=event.at, name=history.name, text=text))
        history.take(event)

    def note(self, history: PeerHistory, text: str, at: float) -> None:
        """Note what no journal can say of its peer: its end."""
        history.gone = text
        self.tell(history.name, text, at)

    def tell(self, name: str, text: str, at: float) -> None:
        """Add to what happened what is in no journal."""
        self._changes.append(Change(at=at, name=name, text=text))

    def view(self, now: float) -> SwarmView:
        """Return the swarm as of `now` (unix seconds)."""
        sources = [history for history in self.histories if history.stage == 0]
        tokens, budget = sum(history.tokens for history in sources), None
        progress = max((history.progress for history in self.histories), default=0.0)
        if self._run is not None:
            budget = self._run.budget_samples * self._run.pipeline.sequence_length
            progress = max(progress, min(1.0, tokens / budget))
        elif progress > 0.0:
            budget = round(tokens / progress)
        if sources and all(history.finished == events.RUN_OVER for history in sources):
            progress = 1.0  # what was in a partial window is in no inner step
        totals = RunTotals(
            name=self._name,
            progress=progress,
            tokens=tokens,
            budget_tokens=budget,
            tokens_per_s=sum(history.tokens_per_s(now) for history in sources),
            is_speed_known=all(history.recent for history in sources if history.underway),
            routes=tuple(chain.from_iterable(map(routes, self.histories))),
            routes_told=ALL_ROUTES,
        )
        names = {history.peer: history.name for history in self.histories if history.peer}
        signed = self._signed()
        peers = [_with_receipts(peer_view(history, names, now), signed) for history in self.histories]
        stages = self._run.pipeline.stages if self._run else 1 + max((each.stage for each in self.histories), default=0)
        return swarm_view(totals, stages, peers, self._changes, self._course, now)

    def _signed(self) -> dict[str, int]:
        """Return the tokens of sources for which there are receipts, as far as any journal tells."""
        signed: dict[str, int] = {}
        for history in self.histories:
            own = {} if history.peer is None or not history.signed_tokens else {history.peer: history.signed_tokens}
            for peer, tokens in (*history.others_signed.items(), *own.items()):
                signed[peer] = max(signed.get(peer, 0), tokens)
        return signed


class Recording:
    """Journals of a run that is over, or crashed, to be looked at as of any time between `begun` and `ended`."""

    def __init__(
        self,
        journals: Mapping[str, Sequence[events.Event]],
        name: str,
        run: RunConfig | None,
        faults: Sequence[Change] = (),
    ) -> None:
        """`journals`: the events of each, in order, by the name of its peer. `faults`: that befell a simulation."""
        self._title, self._run, self._faults = name, run, faults
        self._events = sorted(
            chain.from_iterable(((event.at, peer, event) for event in taken) for peer, taken in journals.items()),
            key=itemgetter(0),
        )
        if not self._events:
            raise config_error(
                "There is nothing to play.", "no event in these journals is legible", "give the home of a node"
            )
        self.begun, self.ended = self._events[0][0], self._events[-1][0]
        self._rewind()

    def _rewind(self) -> None:
        self._by_name: dict[str, PeerHistory] = {}
        self._heard: dict[str, float] = {}
        self._observer = JournalObserver(self._title, (), self._run)
        self._next, self._now, self._told = 0, self.begun, 0

    def at(self, now: float) -> SwarmView:
        """Return the swarm as of `now`."""
        now = min(max(now, self.begun), self.ended)
        if now < self._now:
            self._rewind()
        step = max(1e-3, (self.ended - self.begun) / MOMENTS)
        while self._now + step < now:  # so that the course has them all, however far it jumps
            self._fold(self._now + step)
            self._observer.view(self._now)
        self._fold(now)
        return self._observer.view(now)

    def _fold(self, now: float) -> None:
        while self._next < len(self._events) and self._events[self._next][0] <= now:
            _, name, event = self._events[self._next]
            if name not in self._by_name:
                self._by_name[name] = PeerHistory(name, 0)
                self._observer.histories.append(self._by_name[name])
            self._note_silence(name, event.at)
            self._by_name[name].gone = None
            self._observer.take(self._by_name[name], event)
            self._heard[name] = event.at
            self._next += 1
        self._now = now
        while self._told < len(self._faults) and self._faults[self._told].at <= now:
            fault = self._faults[self._told]
            self._observer.tell(fault.name, fault.text, fault.at)
            self._told += 1
        for name in self._by_name:
            self._note_silence(name, now)

    def _note_silence(self, name: str, now: float) -> None:
        history, heard = self._by_name[name], self._heard.get(name, now)
        if now - heard >= SILENT_S and history.gone is None and history.finished is None:
            self._observer.note(history, SILENT, heard)


def read_journals(places: Sequence[Path]) -> Recording:
    """Return the recording of the last run in journals: files, homes, or directories of homes; or of a simulation.

    Raises `UserError` where none is there.
    """
    traces = [path for place in places for path in (place, place / TRACE) if path.name == TRACE and path.is_file()]
    if traces:
        return _read_trace(traces[0])
    journals = journals_in(places)
    run = next((found for path in journals.values() if (found := _run_of(path.parent)) is not None), None)
    title = run.name if run is not None else places[0].absolute().name
    taken = {name: list(read(path)) for name, path in journals.items()}
    begun = [event for each in taken.values() for event in each if isinstance(event, events.Started)]
    last = max(begun, key=lambda event: event.at, default=None)
    if last is not None:
        taken = {name: list(_of_run(each, last.run)) for name, each in taken.items()}
    return Recording(taken, title, run)


class _TraceLine(msgspec.Struct):
    """What a line of a simulation's events says beside its event. `text`: of a fault, in words."""

    event: str
    at: float
    node: str = ""
    text: str = ""


def _read_trace(path: Path) -> Recording:
    """Return the recording of a simulation that wrote its events."""
    taken: dict[str, list[events.Event]] = {}
    faults: list[Change] = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                found = msgspec.json.decode(line, type=_TraceLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            event = events.decode(line)
            if event is not None and found.node:
                taken.setdefault(found.node, []).append(event)
            elif found.event == "fault":
                faults.append(Change(at=found.at, name="fault:", text=found.text))
    return Recording(taken, path.absolute().parent.name, None, faults)


def _of_run(journal: Iterable[events.Event], run: str) -> Iterator[events.Event]:
    """Yield what a journal says of one run: a home may have taken part in several."""
    before: list[events.Event] = []
    now: str | None = None
    for event in journal:
        if isinstance(event, events.Started):
            now = event.run
            if now == run:
                yield from before
            before = []
        if now is None:
            before.append(event)  # of the way into the first run
        elif now == run:
            yield event


def _run_of(home: Path) -> RunConfig | None:
    """Return the run of the run file that lies in a home or beside it, if one does and is legible."""
    for path in (HomePaths(home).run_file, HomePaths(home.parent).run_file):
        try:
            return decode_run(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError, UserError):
            continue
    return None


def routes(history: PeerHistory) -> Iterator[Route]:
    """Yield the routes on which a peer passes microbatches on."""
    if history.is_there:
        origin = history.peer or history.name
        yield from (Route(origin=origin, target=target, per_s=per_s) for target, per_s in history.routes.items())


def peer_view(history: PeerHistory, names: Mapping[str, str], now: float) -> PeerView:
    """Return a peer as its journal tells of it. `names`: of other peers, by id."""
    state = str(history.state or (PeerState.TRAINING if history.steps else "starting"))
    if history.finished is not None:
        state = str(PeerState.FINISHED)
    elif history.gone is not None:
        state = "gone"
    given = history.contribution
    wait = history.waiting if history.gone is None else None
    partner = history.partner and names.get(history.partner, history.partner[-8:])
    return PeerView(
        peer=history.peer or history.name,
        name=history.name,
        stage=history.stage,
        state=state,
        inner_steps=history.steps,
        round=history.round,
        partner=("alone" if history.round and partner is None else partner),
        tokens_per_s=history.tokens_per_s(now),
        busy=history.busy_share(now),
        loss=history.loss,
        gap=history.gap_last,
        waits=history.gone if wait is None else wait_words(wait, history.stage),
        cause=None if wait is None else wait.cause,
        since=None if wait is None else history.since - (wait.seconds or 0.0),
        met=history.partner,
        tokens=history.tokens,
        there_s=None if given is None else given.there_s,
        line_bytes=None if given is None else given.sent_bytes + given.received_bytes,
        joules=None if given is None or not given.joules else given.joules,
        sent_per_s=history.sent_per_s if history.is_there else None,
        received_per_s=history.received_per_s if history.is_there else None,
    )


def _with_receipts(peer: PeerView, signed: Mapping[str, int]) -> PeerView:
    if peer.peer not in signed:
        return peer
    # What was signed for may have been lost on its way back, and is drawn again.
    return msgspec.structs.replace(peer, tokens_claimed=peer.tokens, tokens_signed=min(peer.tokens, signed[peer.peer]))


def change_text(event: events.Event) -> str | None:
    """Return what an event means to a person; None where it is of every day."""
    match event:
        case events.Started():
            return f"began at stage {event.stage}"
        case events.Moved():
            return f"moved from stage {event.origin} to stage {event.target}: {event.why}"
        case events.CatchUp(what="began" | "done"):
            return f"{'copies' if event.what == 'began' else 'has copied'} the weights of stage {event.stage}"
        case events.Noticed():
            return event.text + (" (over)" if event.over else "")
        case events.PeerViolation():
            return f"was sent what no peer may send by {event.peer[-8:]}: {event.why}"
        case events.SpotCheck(finding="quarantined"):
            return f"leaves {event.peer[-8:]} alone for {event.for_s:.0f} s: its gradients are not those of others"
        case events.SpotCheck(finding="doubted"):
            return "finds half of the next stage at fault, and so does not believe its own checks for a while"
        case events.Finished():
            return f"ended: {event.why}"
        case _:
            return None
