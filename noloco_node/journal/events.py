"""The journal: what happened to this peer, one JSON object a line.

A journal serves three readers: a person with `jq`, the live view of the demo, and the summary of a run. So it is flat,
append-only text; every line says when (`at`, unix seconds) and what (`event`), and stands for itself.

Each event is one write to a file opened for appending, so a crash tears one line at most. The reader skips what it
cannot decode, and the writer begins a new line after a torn one. At `max_bytes` the file moves to `journal.1.jsonl`,
over the one before: the two together bound the disk that a journal takes. A disk that is full or gone costs events,
which are counted, and never the training: a journal is worth less than the run that it describes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from noloco_node.errors import Exit, Trouble
from noloco_node.swarm.roster import State

MAX_BYTES = 64 * 2**20
"""Size at which a journal is rotated, if nobody says otherwise: some 300,000 inner steps."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    at: float = 0.0
    """Unix seconds; the journal writes it."""


class Started(_Event, frozen=True, tag="started"):
    """A node is up.

    `run`: id of the run. `version`: of the program that runs. `device`: where it computes. `parameters`: how many its
    stage has. `pid`: id of the process.
    """

    peer: str
    stage: int
    run: str
    version: str
    device: str = "cpu"
    parameters: int = 0
    pid: int = 0


class StateChanged(_Event, frozen=True, tag="state"):
    """The node does something else now. `state`: what it does. `waiting`: what it waits for, in words."""

    state: State
    waiting: str | None = None


class Placed(_Event, frozen=True, tag="placed"):
    """A newcomer chose a stage. `device_s`: what a microbatch takes it there, as measured; 0 unknown."""

    stage: int
    why: str
    device_s: float = 0.0


class Moved(_Event, frozen=True, tag="moved"):
    """The replica moves to another stage, in the same process.

    `origin` and `target`: the stages that it leaves and takes. `discarded`: as in `finished`.
    """

    origin: int
    target: int
    why: str
    discarded: int = 0


class InnerStep(_Event, frozen=True, tag="inner_step"):
    """One step of the inner optimiser.

    `loss`: mean nats a token of the window as far as it is known here; None where no reply carried one.
    `tokens`: tokens of the window. `seconds`: since the inner step before. `device_s`: of these seconds, those
    for which the device worked. `stale`: microbatches whose forward pass was before the last step, with two windows in
    flight. `learning_rate`: of this step.
    """

    step: int
    progress: float
    loss: float | None
    tokens: int
    seconds: float
    learning_rate: float
    device_s: float = 0.0
    stale: int = 0


class OuterStep(_Event, frozen=True, tag="outer_step"):
    """One outer step.

    `partner`: id of the replica met, None in a solo round. `staleness`: inner steps between snapshot and correction.
    `gap`: norm of own minus mean slow weights over the norm of the mean; None where there was nobody to compare with.
    `staleness_rounds`: rounds since these weights last met anybody's, 1 where in the one before; `partner_staleness`:
    rounds since the partner's did. `adopted`: ours were too stale to count, and the partner's were taken over.
    `seconds`: from the acceptance of the offer to the partner's receipt.
    """

    round: int
    partner: str | None
    gap: float | None
    staleness: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    staleness_rounds: int = 0
    partner_staleness: int = 0
    adopted: bool = False


class TooStale(_Event, frozen=True, tag="too_stale"):
    """A partner had met nobody for too many rounds to count: it took our weights, and our round stays open.

    `partner_staleness`: for how many rounds.
    """

    round: int
    partner: str
    partner_staleness: int
    bytes_sent: int
    bytes_received: int


class Deferred(_Event, frozen=True, tag="deferred"):
    """No partner before the next round was due. `in_a_row`: deferrals since the last outer step, this one included."""

    round: int
    in_a_row: int


class Hops(_Event, frozen=True, tag="hops"):
    """Microbatches by next hop. `counts`: by peer id, those that came back, in all since the start."""

    counts: dict[str, int]


class Traffic(_Event, frozen=True, tag="traffic"):
    """Bytes by purpose. `sent` and `received`: by the conversation's topic, in all since the start."""

    sent: dict[str, int]
    received: dict[str, int]


class Budget(_Event, frozen=True, tag="budget"):
    """The bandwidth budget. `bytes`: by name what is allowed and used of it, a second or of this month."""

    bytes: dict[str, float]


class Noticed(_Event, frozen=True, tag="noticed"):
    """Something around this node: a sleep, a clock that was set, a stage that nobody serves, an old roster.

    `what`: which, in a word or two; `text`: as the owner was told; `over`: what lasted has ended.
    """

    what: str
    text: str
    over: bool = False


class Refused(_Event, frozen=True, tag="refused"):
    """A refusal. `reason`: in a word. `here`: we refused the peer; otherwise it refused us."""

    peer: str
    reason: str
    here: bool = False
    count: int = 1


class Lost(_Event, frozen=True, tag="lost"):
    """A call, an exchange or a reply broke off. `what`: which of them; `why`: the loss in words."""

    peer: str
    what: str
    why: str
    count: int = 1


class Violation(_Event, frozen=True, tag="violation"):
    """A peer sent what no peer may send. `topic`: of the conversation."""

    peer: str
    topic: str
    why: str


class CatchUp(_Event, frozen=True, tag="catch_up"):
    """A newcomer copies the state of its stage.

    `what`: began; resumed (pieces were here already); mixed (whole parameters of the donor before stay); lost or
    refused (the donor); done. `donor`: id of the peer that gives. `total_bytes`: of the state.
    `held_bytes`: those of them that are here. `fetched_bytes` and
    `seconds`: since the first request, over all donors.
    """

    what: str
    stage: int
    donor: str | None
    round: int
    total_bytes: int
    held_bytes: int
    fetched_bytes: int
    seconds: float
    why: str | None = None


class Finished(_Event, frozen=True, tag="finished"):
    """The node's training is over. `discarded`: microbatches of a partial window that no inner step used."""

    why: str
    step: int
    round: int
    progress: float
    discarded: int = 0


Event = (
    Started
    | StateChanged
    | Placed
    | Moved
    | InnerStep
    | OuterStep
    | TooStale
    | Deferred
    | Hops
    | Traffic
    | Budget
    | Noticed
    | Refused
    | Lost
    | Violation
    | CatchUp
    | Finished
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Journal:
    """The writing end; one process, one journal."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, now: Callable[[], float] = time.time) -> None:
        """Open `path` for appending; raise `Trouble` where it cannot be opened at all."""
        self._path, self._max_bytes, self._now = path, max_bytes, now
        self._events = self._dropped = self._rotations = self._bytes = 0
        self._closed = False
        try:
            self._file = _open(path)
        except OSError as error:
            raise Trouble(
                f"cannot open the journal {path}",
                why=error.strerror or str(error),
                attempt="free some space, or give another directory with --home",
                code=Exit.STORAGE,
            ) from error
        self._size, self._torn = _size_and_torn(path)

    def write(self, event: Event) -> None:
        """Append `event` with the time of now; never raises for the disk's sake."""
        if self._closed:
            self._dropped += 1
            return
        line = _ENCODER.encode(msgspec.structs.replace(event, at=self._now())) + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            if self._file < 0 or (self._size and self._size + len(line) > self._max_bytes):
                self._rotate()
                line = line.lstrip(b"\n")
            written = os.write(self._file, line)
        except OSError:
            self._dropped += 1
            return
        self._size += written
        self._bytes += written
        self._torn = written < len(line)
        if self._torn:
            self._dropped += 1
        else:
            self._events += 1

    def close(self) -> None:
        """Close the file; closing twice is harmless, and whatever is written later counts as dropped."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._closed = -1, True

    def statistics(self) -> dict[str, int | float]:
        """Return events and bytes written, events dropped by a bad disk, and rotations."""
        return {
            "events": self._events,
            "bytes": self._bytes,
            "dropped": self._dropped,
            "rotations": self._rotations,
        }

    def _rotate(self) -> None:
        if self._file >= 0:
            os.replace(self._path, rotated(self._path))
            os.close(self._file)
            self._file = -1  # stays so when the next line raises, and the next write tries again
            self._rotations += 1
        self._file = _open(self._path)
        self._size, self._torn = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Journal({self._path}, events={self._events}, dropped={self._dropped})"


def rotated(path: Path) -> Path:
    """Return where a journal's older half lies: `journal.jsonl` -> `journal.1.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a journal, its rotated half first; what does not decode (a torn line) is passed over.

    A journal that does not exist has no events.
    """
    for half in (rotated(path), path):
        try:
            with half.open("rb") as lines:
                for line in lines:
                    event = _decode(line)
                    if event is not None:
                        yield event
        except FileNotFoundError:
            continue


class Tail:
    """The reading end of a journal that is still being written; rotation is followed, a missing file awaited."""

    CHUNK_BYTES = 2**20

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._inode = -1
        self._rest = b""
        self._events = self._passed_over = 0

    def poll(self) -> list[Event]:
        """Return the events that were written since the last call, at most about a mebibyte of them."""
        if self._file < 0 and not self._open():
            return []
        chunk = os.read(self._file, self.CHUNK_BYTES)
        if not chunk and self._moved_on():
            os.close(self._file)
            self._rest = b""
            if not self._open():
                return []
            chunk = os.read(self._file, self.CHUNK_BYTES)
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-self.CHUNK_BYTES :]  # no event is that long: what is cut here would not decode anyway
        events = [event for line in lines if line and (event := _decode(line)) is not None]
        self._events += len(events)
        self._passed_over += sum(1 for line in lines if line) - len(events)
        return events

    def close(self) -> None:
        """Close the file; a later `poll` begins anew."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._rest = -1, b""

    def statistics(self) -> dict[str, int | float]:
        """Return events read and lines passed over."""
        return {"events": self._events, "passed_over": self._passed_over}

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._file = -1
            return False
        self._inode = os.fstat(self._file).st_ino
        return True

    def _moved_on(self) -> bool:
        try:
            return os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return False

    def __repr__(self) -> str:
        return f"Tail({self._path}, events={self._events})"


def _decode(line: bytes) -> Event | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _size_and_torn(path: Path) -> tuple[int, bool]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return 0, False
        file.seek(-1, os.SEEK_END)
        return size, file.read(1) != b"\n"
