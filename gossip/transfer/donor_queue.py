"""Which donor a newcomer asks next, and when: those that could not give just now are asked again, some passes long.

Plain bookkeeping of what came of each attempt: no time, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gossip.exchange.messages import ReplicaState

LONGEST_WAIT_S = 20.0
"""Longest sleep before the donors are asked again, whatever they say."""


@dataclass(frozen=True, slots=True)
class Complete:
    """A donor's attempt gave what was missing."""

    state: ReplicaState


@dataclass(frozen=True, slots=True)
class TryLater:
    """The donor lives, and may give after so many seconds."""

    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Dead:
    """The donor does not answer, or not in time."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuted:
    """What the donor said or sent cannot be right."""

    why: str


Failure = TryLater | Dead | Refuted
Outcome = Complete | Failure
"""What came of one attempt to copy from one donor."""


class Turn(NamedTuple):
    """Whom to ask, after how many seconds."""

    donor: str
    wait_s: float = 0.0


class DonorQueue:
    """The donors of one download, in the order in which to ask them. Only those that say `TryLater` are asked again."""

    def __init__(self, order: Sequence[str], passes: int) -> None:
        self._pass = deque(order)
        self._passes_left = passes - 1
        self._failures: dict[str, Failure] = {}

    def next(self) -> Turn | None:
        """Return the next turn; None where nobody is left to ask."""
        if self._pass:
            return Turn(self._pass.popleft())
        waits = self._waits()
        if not waits or not self._passes_left:
            return None
        self._passes_left -= 1
        self._pass.extend(waits)
        return Turn(self._pass.popleft(), min(waits.values()))

    def note(self, donor: str, failure: Failure) -> None:
        """Learn what came of a turn."""
        self._failures[donor] = failure

    @property
    def retry_after_s(self) -> float | None:
        """When asking again makes sense; None where it does not."""
        return min(self._waits().values(), default=None)

    @property
    def why(self) -> str:
        """Each donor's last cause."""
        causes = "; ".join(f"{donor}: {failure.why}" for donor, failure in self._failures.items())
        return f"no replica gave its state ({causes or 'there is none to ask'})"

    def _waits(self) -> dict[str, float]:
        return {
            donor: failure.retry_after_s if 0.0 < failure.retry_after_s < LONGEST_WAIT_S else LONGEST_WAIT_S
            for donor, failure in self._failures.items()
            if isinstance(failure, TryLater)
        }
