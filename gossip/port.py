"""What a replica's rounds need of the world, and what they tell it.

The shell hands a `Replica` (the weights), `Surroundings` (the partners, a way to talk to them, a thread for arithmetic,
a journal) and `Settings`; it gets events back. Nothing of the pipeline, the network or the disk is known here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gossip.exchange import Compute, Conversation
from gossip.nesterov import Outer, OuterState, Tensors


class Replica(Protocol):
    """What a round may do to the replica."""

    async def snapshot(self) -> Tensors:
        """Return a copy of the fast weights, float32 on the CPU. Called only in a pause between two inner steps."""

    async def correct(self, correction: Tensors) -> None:
        """Add this to the fast weights. Called only in a pause between two inner steps."""

    def alone(self, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Shut the gate, wait until nothing is in flight, and open it again at the end.

        Whoever comes meanwhile is refused, with this hint. Used by the blocking form alone.
        """


class Candidate(NamedTuple):
    """A live replica of our stage that has caught up, and the rounds that it says it has finished."""

    peer: str
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the rounds are handed.

    `partners` leaves ourselves out, and returns the very same tuple until the roster is another one. `record` takes
    events in order and does not wait.
    """

    compute: Compute
    partners: Callable[[], tuple[Candidate, ...]]
    converse: Callable[[str], AbstractAsyncContextManager[Conversation]]
    record: Callable[[Event], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait, in seconds.

    `answer_s`: for a dial and an answer. `exchange_s`: from acceptance to the end; in the blocking form work stands
    still for so long at worst. `sleep_s`: longest sleep before partners are asked again. `jitter_s`: spread of asking.
    """

    answer_s: float = 5.0
    exchange_s: float = 120.0
    sleep_s: float = 20.0
    jitter_s: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How this run gossips. The fields of the run file's section `outer`, its seed, and our patience."""

    seed: int
    outer: Outer
    inner_steps_per_round: int = 50
    overlap_steps: int = 8
    deferrals_before_solo: int = 4
    blocking: bool = False
    patience: Patience = Patience()


class Origin(NamedTuple):
    """Where a replica's rounds begin: fresh, copied from a donor, or read from a checkpoint."""

    state: OuterState
    rounds: int = 0
    """Rounds finished."""
    inner_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep:
    """An outer step was taken. `partner` and `gap` are None in a solo round.

    `staleness`: inner steps between snapshot and correction. `seconds`: from acceptance to the partner's receipt.
    """

    round: int
    seconds: float
    partner: str | None = None
    gap: float | None = None
    staleness: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """No partner before the next round was due: no outer step. `in_a_row`: how often now without one."""

    round: int
    in_a_row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A meeting that had been agreed came to nothing. `implausible`: the partner's weights could not be right."""

    round: int
    partner: str
    why: str
    implausible: bool


Event = OuterStep | Deferred | Lost
