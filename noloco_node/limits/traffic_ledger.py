"""What a peer has spent of its line this month: a small file in its home, so that a restart does not forget.

Written once a minute while anything moves and when a shift ends; a node that is killed
forgets a minute at most. A file that cannot be read counts as nothing spent, and a disk that refuses costs the counting
and not the training: both are said.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.limits.budget import MonthUsage, month_of, spend
from noloco_node.storage import atomic_file


class TrafficLedger:
    """The count of one home. `now`: the time of day here, as the calendar has it."""

    def __init__(self, path: Path, now: Callable[[], datetime], say: Callable[[str], None]) -> None:
        self._path, self._now, self._say = path, now, say
        self._spent = self._read()
        self._written, self._refused = self._spent, False

    @property
    def spent(self) -> MonthUsage:
        """What was spent this month."""
        return spend(self._spent, self._now(), 0, 0)

    def add(self, sent_bytes: int, received_bytes: int) -> None:
        """Count so many bytes."""
        self._spent = spend(self._spent, self._now(), sent_bytes, received_bytes)

    def keep(self) -> None:
        """Write the file if anything is new; a disk that refuses is said once."""
        if self._spent == self._written:
            return
        try:
            atomic_file.write(self._path, msgspec.json.encode(self._spent))
        except OSError as error:
            if not self._refused:
                self._say(
                    f"cannot note the traffic of this month in {self._path}: {error.strerror}; a restart forgets it"
                )
            self._refused = True
        else:
            self._written, self._refused = self._spent, False

    def _read(self) -> MonthUsage:
        nothing = MonthUsage(month=month_of(self._now()))
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=MonthUsage)
        except FileNotFoundError:
            return nothing
        except OSError as error:
            raise UserError(
                f"cannot read {self._path}",
                why=error.strerror or str(error),
                hint="repair its permissions, or give another directory with --home",
                code=Exit.STORAGE,
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._say(f"{self._path} is garbled: counting this month's traffic from zero")
            return nothing
        return found if min(found.sent_bytes, found.received_bytes) >= 0 else nothing
