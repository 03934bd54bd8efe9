"""Playing the journals of a run that is over: its state at any time, and the keys by which a person steers.

To go back, events are folded again from the beginning: a hundred thousand take a part of a second.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Self

import msgspec

from noloco_node.errors import UserError, config_error
from noloco_node.journal import events
from noloco_node.journal.reader import journals_in, read
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.swarm_view import Change, SwarmView
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import decode_run
from noloco_node.storage.home import HomePaths
from noloco_node.units import UnixSeconds, format_clock

TRACE = "events.jsonl"  # what `simulate --trace` writes
MOMENTS = 240  # of the course of a recording
SILENT_S = 30.0  # without a line in its journal, before a peer counts as gone: one that lives writes more often
SILENT = "its journal falls silent"

KEYS = {
    "\x1b[C": "forward",
    "\x1b[D": "back",
    "\x1b[A": "faster",
    "\x1b[B": "slower",
    "\x1b[H": "begin",
    "\x1b[F": "end",
    "l": "forward",
    "h": "back",
    "+": "faster",
    "-": "slower",
    " ": "pause",
    "q": "quit",
}
"""What a terminal sends, by what it means here."""
WHOLE_S = 60.0  # in which a recording is played from beginning to end at first
STEPS = 50  # steps forward or back from one end of a recording to the other
FASTEST, SLOWEST = 2.0**16, 2.0**-4


class PlaybackState(msgspec.Struct, frozen=True, kw_only=True):
    """How far and how fast a recording is played: `at_s` of `whole_s`, seconds from its beginning."""

    at_s: float
    whole_s: float
    speed: float
    paused: bool
    at_end: bool


class Playback:
    """The time of a run while its recording is played: from `begun` to `ended`, unix seconds."""

    def __init__(self, begun: float, ended: float) -> None:
        self._begun, self._ended = begun, ended
        self.now, self.paused, self.over = begun, False, False
        self.speed = 1.0
        while self.speed < FASTEST and (ended - begun) / self.speed > WHOLE_S:
            self.speed *= 2.0

    @property
    def at_end(self) -> bool:
        return self.now >= self._ended

    def advance(self, seconds: float) -> None:
        """Let real time pass."""
        if not self.paused:
            self._go(self.now + self.speed * seconds)

    def press(self, key: str) -> None:
        """Do what a key means; a number from 0 to 1 goes to that share of the recording."""
        step = (self._ended - self._begun) / STEPS
        match key:
            case "forward":
                self._go(self.now + step)
            case "back":
                self._go(self.now - step)
            case "begin":
                self._go(self._begun)
            case "end":
                self._go(self._ended)
            case "faster":
                self.speed = min(FASTEST, 2.0 * self.speed)
            case "slower":
                self.speed = max(SLOWEST, self.speed / 2.0)
            case "pause":
                self.paused = not self.paused
            case "quit":
                self.over = True
            case share:  # of the whole, to go to
                with suppress(ValueError):
                    self._go(self._begun + float(share) * (self._ended - self._begun))

    def state(self) -> PlaybackState:
        at_s, whole_s = self.now - self._begun, self._ended - self._begun
        return PlaybackState(at_s=at_s, whole_s=whole_s, speed=self.speed, paused=self.paused, at_end=self.at_end)

    def footer(self) -> str:
        """Return a line with the position and the keys."""
        how = "paused" if self.paused else "at its end" if self.at_end else f"x{self.speed:g}"
        at, whole = format_clock(self.now - self._begun), format_clock(self._ended - self._begun)
        return f"{at} of {whole}, {how}   space: pause  ←→: step  ↑↓: speed  q: end"

    def _go(self, now: float) -> None:
        self.now = min(max(now, self._begun), self._ended)


class Keyboard:
    """A context that reads single keys from the terminal, and restores it; no keys if standard input is no terminal."""

    def __init__(self) -> None:
        self.is_there = sys.stdin.isatty()
        self._before: list[object] | None = None

    def __enter__(self) -> Self:
        if self.is_there:
            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def pressed(self) -> list[str]:
        """Return the meanings of the keys pressed since the last call."""
        if not self.is_there or not select.select([sys.stdin], [], [], 0)[0]:
            return []
        return meanings(os.read(sys.stdin.fileno(), 256).decode(errors="ignore"))


def meanings(typed: str) -> list[str]:
    """Return the meanings of the keys that a terminal has sent; pass over others."""
    found = []
    while typed:
        key = next((key for key in KEYS if typed.startswith(key)), None)
        if key is not None:
            found.append(KEYS[key])
        typed = typed[len(key or " ") :]
    return found


class Recording:
    """Journals of a run that is over or crashed; `at` shows any time between `begun` and `ended`."""

    def __init__(
        self,
        journals: Mapping[str, Sequence[events.Event]],
        name: str,
        run: RunConfig | None,
        faults: Sequence[Change] = (),
        run_id: str = "",
    ) -> None:
        """`journals`: events in order, by the name of their peer. `faults`: of a simulation. `run_id`: if known."""
        self._title, self._run, self._faults, self._run_id = name, run, faults, run_id
        self._events = sorted(
            chain.from_iterable(((event.at, peer, event) for event in taken) for peer, taken in journals.items()),
            key=itemgetter(0),
        )
        if not self._events:
            raise config_error(
                "There is nothing to play.", "no event in these journals is legible", "give the home of a node"
            )
        self.begun, self.ended = self._events[0][0], self._events[-1][0]
        told = [event for _, _, event in self._events]
        self._stages = {event.stage for event in told if isinstance(event, events.Started)}
        self._stages |= {event.target for event in told if isinstance(event, events.Moved)}
        self._rewind()

    def _rewind(self) -> None:
        self._by_name: dict[str, PeerHistory] = {}
        self._heard: dict[str, float] = {}
        self._observer = JournalObserver(self._title, (), self._run, self._run_id)
        self._next, self._now, self._told = 0, self.begun, 0

    def at(self, now: float) -> SwarmView:
        now = min(max(now, self.begun), self.ended)
        if now < self._now:
            self._rewind()
        step = max(1e-3, (self.ended - self.begun) / MOMENTS)
        while self._now + step < now:  # so that the course has them all, however far it jumps
            self._fold(self._now + step)
            self._observer.view(self._now)
        self._fold(now)
        return self._without_guess(self._observer.view(now))

    def _without_guess(self, view: SwarmView) -> SwarmView:
        """Of a stage whose journals are elsewhere nobody can say here that it was empty."""
        untold = [str(stage.stage) for stage in view.stages if stage.stage not in self._stages]
        if not untold or view.left_s == 0.0:
            return view
        sentence = f"No journal of stage {', '.join(untold)} is here, so what held the swarm back is not known."
        return msgspec.structs.replace(view, bottleneck=sentence, limit=None)

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
    return Recording(taken, title, run, run_id="" if last is None else last.run)


class _TraceLine(msgspec.Struct):
    """The fields of a simulation's line beside its event. `text`: a fault, in words."""

    event: str
    at: UnixSeconds
    node: str = ""
    text: str = ""


def _read_trace(path: Path) -> Recording:
    taken: dict[str, list[events.Event]] = {}
    faults: list[Change] = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                found = msgspec.json.decode(line, type=_TraceLine)
            except (ValueError, RecursionError):  # the second: brackets nested without end
                continue
            event = events.decode(line)
            if event is not None and found.node:
                taken.setdefault(found.node, []).append(event)
            elif found.event == "fault":
                faults.append(Change(at=found.at, name="fault:", text=found.text))
    return Recording(taken, path.absolute().parent.name, None, faults)


def _of_run(journal: Iterable[events.Event], run: str) -> Iterator[events.Event]:
    """Yield the events of one run: a home may have joined several."""
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
    """Return the run whose file lies in a home or beside it, if it is legible."""
    for path in (HomePaths(home).run_file, HomePaths(home.parent).run_file):
        try:
            return decode_run(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError, UserError):
            continue
    return None
