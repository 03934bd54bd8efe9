"""Writing the journal: one JSON object a line, appended and rotated.

Each event is one write to a file opened for appending, so a crash tears one line at most; the writer begins a new line
after it. At MAX_BYTES the file replaces `journal.1.jsonl`: the two together bound the disk that a journal takes. The
first line of a new file repeats what began the session that goes on, which neither file may hold any more. A full disk
costs events, and never the training: the owner is told when it begins, and how many lines it cost once it is over.

`JournalThrottle` keeps strangers from filling the journal. It records refusals, losses, violations and findings of spot
checks one by one, up to a number an hour for each peer and kind; then it records one whenever their count has doubled,
with how many have come since (`count`). So a flood of a million takes some dozens of lines.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from noloco_node.errors import one_line, os_errors_as, storage_error
from noloco_node.journal import events
from noloco_node.journal.events import Event, fields_of
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.tasks import loop_s

MAX_BYTES = 64 * 2**20  # some 300,000 inner steps
TAKEN_S = 60.0  # a disk that has refused no line for so long takes them again: one that is nearly full takes some


class Journal(AbstractContextManager["Journal"]):
    """The writing end; one process, one journal."""

    def __init__(
        self,
        path: Path,
        max_bytes: int = MAX_BYTES,
        now: Callable[[], float] = CLOCK.unix_s,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open `path` for appending; raise `UserError` where it cannot be opened at all. `tell`: warns the owner."""
        self._path, self._max_bytes, self._now, self._tell = path, max_bytes, now, tell
        self._closed, self._last = False, b""
        self._lost, self._lost_at = 0, 0.0  # lines that the disk refused, and when the last one was
        self._session: events.Started | None = None
        hint = "free some space, or give another directory with --home"
        with os_errors_as(storage_error, f"cannot open the journal {path}", hint):
            self._file, self._torn = _opened(path)

    def write(self, event: Event) -> None:
        """Append `event` with the present time; an error of the disk loses it, and is not raised."""
        if self._closed:
            return
        at = self._now()
        if self._lost and abs(at - self._lost_at) >= TAKEN_S:
            self._end_loss(at)
        try:
            self._write(event, at)
        except OSError as error:
            if not self._lost:
                self._tell(f"the journal {self._path} loses lines ({error.strerror}); free some space")
            self._lost, self._lost_at = self._lost + 1, at
        if isinstance(event, events.Started | events.Finished):
            self._session = event if isinstance(event, events.Started) else None

    def _write(self, event: Event, at: float) -> None:
        line = _line(event, at)
        size, is_there = self._found()
        begins = False
        if not is_there:
            self._reopen()
            size = os.fstat(self._file).st_size
            begins = not self._ends_in_last(size)
        if size and size + self._torn + len(line) > self._max_bytes:
            self._rotate()
            begins = True
        if begins and self._session is not None:
            self._append(_line(events.Continued(**msgspec.structs.asdict(self._session)), at))
        self._append(line)

    def _found(self) -> tuple[int, bool]:
        """Return the bytes of the file, and whether it still lies where it belongs: its owner may move or remove it.

        Where all of its directory was moved, the lines follow it.
        """
        if self._file < 0:
            return 0, False
        here = os.fstat(self._file)
        with suppress(FileNotFoundError):
            return here.st_size, os.path.samestat(here, os.stat(self._path))
        return here.st_size, not self._path.parent.exists()

    def _end_loss(self, at: float) -> None:
        """Say how many lines were lost, unless the disk refuses that as well."""
        text = f"the journal {self._path} is written again; {self._lost} of its lines were lost"
        self._lost_at = at
        with suppress(OSError):
            self._write(events.Noticed(what="journal", text=one_line(text), over=True), at)
            self._lost = 0
            self._tell(text)

    def _append(self, line: bytes) -> None:
        line = b"\n" * self._torn + line
        self._torn = os.write(self._file, line) < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._last = line

    def close(self) -> None:
        """Close the file, once or more often; later events are lost."""
        if self._lost and not self._closed:
            self._end_loss(self._now())
        if self._file >= 0:
            os.close(self._file)
        self._file, self._closed = -1, True

    def _ends_in_last(self, size: int) -> bool:
        """Say whether the file ends in the line that we wrote last: some file systems change the numbers of files."""
        length = len(self._last)
        return 0 < length <= size and os.pread(self._file, length, size - length) == self._last

    def _rotate(self) -> None:
        """Begin a file; the present one becomes the older half."""
        os.replace(self._path, rotated(self._path))
        self._reopen()

    def _reopen(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1  # stays so when the next line raises, and the next write tries again
        self._file, self._torn = _opened(self._path)

    def __exit__(self, *_: object) -> None:
        self.close()


def rotated(path: Path) -> Path:
    """Return where a journal's older half lies: `journal.jsonl` -> `journal.1.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _line(event: Event, at: float) -> bytes:
    return msgspec.json.encode({**fields_of(event), "at": at}) + b"\n"


def _opened(path: Path) -> tuple[int, bool]:
    """Return the descriptor of a file for appending, and whether its last line is torn."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    size = os.fstat(file).st_size
    return file, size > 0 and os.pread(file, 1, size - 1) != b"\n"


ONE_BY_ONE = 32  # refusals and losses by one peer of one kind; of violations the first alone
PERIOD_S = 3600.0
MOST_KINDS = 256  # kinds counted apart; further ones, of many identities, are counted together

MOST_HOPS = 32  # next hops in one line: 32 names are 2 KiB, 17 MB a day

_Throttled = events.RefusedMicrobatch | events.Lost | events.PeerViolation | events.SpotCheck


class JournalThrottle:
    """Passes events to `record`, those of floods as counts."""

    def __init__(self, record: Callable[[events.Event], None]) -> None:
        self._record = record
        self._since_s = -math.inf
        self._counts: dict[tuple[object, ...], tuple[int, int]] = {}
        """Events of each kind in this period, and how many of them were told."""

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, _Throttled):
            self._record(_of_most(event) if isinstance(event, events.Hops) else event)
            return
        if loop_s() - self._since_s >= PERIOD_S:
            self._since_s = loop_s()
            self._counts.clear()
        kind, most = _kind_of(event)
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = (type(event),)
        seen, told = self._counts.get(kind, (0, 0))
        seen += 1
        if seen <= most or seen >= 2 * told:
            self._record(msgspec.structs.replace(event, count=seen - told))
            told = seen
        self._counts[kind] = seen, told


def _of_most(hops: events.Hops) -> events.Hops:
    """Return the hops that returned most, and the others as one sum; leave out those that returned nothing."""
    worked = sorted((peer for peer, count in hops.counts.items() if count), key=lambda peer: -hops.counts[peer])
    listed = {peer: hops.counts[peer] for peer in worked[:MOST_HOPS]}
    return events.Hops(at=hops.at, counts=listed, others=sum(hops.counts.values()) - sum(listed.values()) + hops.others)


def _kind_of(event: _Throttled) -> tuple[tuple[object, ...], int]:
    match event:
        case events.RefusedMicrobatch():
            return (type(event), event.peer, event.reason, event.here), ONE_BY_ONE
        case events.Lost():
            return (type(event), event.peer, event.what), ONE_BY_ONE
        case events.PeerViolation():
            return (type(event), event.peer, event.topic), 1
        case events.SpotCheck():
            return (type(event), event.peer, event.finding), ONE_BY_ONE
