"""Which donor a newcomer asks next, and when: those that could not give just now are asked again, some passes long.

Plain bookkeeping of what came of each attempt: no time, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LONGEST_WAIT_S = 20.0
"""Longest sleep before the donors are asked again, whatever they say."""


class DonorBusy(ConnectionRefusedError):
    """A donor that lives does not give just now, or no donor does. `retry_after_s`: when asking again makes sense."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Turn(NamedTuple):
    """Whom to ask, after how many seconds."""

    donor: str
    wait_s: float = 0.0


class DonorQueue:
    """The donors of one download, in the order in which to ask them. Only those that were busy are asked again."""

    def __init__(self, order: Sequence[str], passes: int) -> None:
        self._pass = deque(order)
        self._passes_left = passes - 1
        self._causes: dict[str, str] = {}
        self._waits: dict[str, float] = {}
        """For how long each of the busy ones is left alone."""

    def next(self) -> Turn | None:
        """Return the next turn; None where nobody is left to ask."""
        if self._pass:
            return Turn(self._pass.popleft())
        if not self._waits or not self._passes_left:
            return None
        self._passes_left -= 1
        self._pass.extend(self._waits)
        return Turn(self._pass.popleft(), min(self._waits.values()))

    def note(self, donor: str, failure: ConnectionError) -> str:
        """Learn what came of a turn; return it in words."""
        self._causes[donor] = str(failure) or type(failure).__name__
        self._waits.pop(donor, None)
        if isinstance(failure, DonorBusy):
            wait_s = failure.retry_after_s
            self._waits[donor] = wait_s if 0.0 < wait_s < LONGEST_WAIT_S else LONGEST_WAIT_S
        return self._causes[donor]

    def failure(self) -> ConnectionRefusedError:
        """Return what to raise where nobody is left to ask: with each donor's last cause."""
        causes = "; ".join(f"{donor}: {cause}" for donor, cause in self._causes.items())
        why = f"no replica gave its state ({causes or 'there is none to ask'})"
        return DonorBusy(why, min(self._waits.values())) if self._waits else ConnectionRefusedError(why)
