"""What a replica's rounds need of the world, and what they tell it.

The shell hands a `GossipReplica` (the weights), `RoundContext` (the partners, a way to talk to them, a thread for
arithmetic, a journal) and `RoundSettings`; it gets events back. Nothing of the pipeline, the network or the disk is
known here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gossip.events import Event
from gossip.exchange.formats import Format
from gossip.exchange.swap import Compute, Conversation
from gossip.rule.outer_step import UNDELAYED, Delay, Outer, OuterState, Tensors


class GossipReplica(Protocol):
    """What a round may do to the replica."""

    async def snapshot(self) -> Tensors:
        """Return a copy of the fast weights, float32 on the CPU. Called only in a pause between two inner steps."""

    async def correct(self, correction: Tensors) -> None:
        """Add this to the fast weights. Called only in a pause between two inner steps."""

    def alone(self, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Take in no microbatch, wait until none is in flight, and take them in again at the end.

        Whoever comes meanwhile is refused, with this hint. Used by the blocking form alone.
        """


class Candidate(NamedTuple):
    """A live replica of our stage that has caught up, and the rounds that it says it has finished.

    `speed`: its inner steps a second, as it claims, in any unit that the stage has in common; 0 is unknown.
    """

    peer: str
    round: int
    speed: float = 0.0


class RoundProgress(NamedTuple):
    """How a replica gets on. `progress`: of the run, 0 to 1. `speed`: ours, in the unit of the candidates'."""

    progress: float = 0.0
    speed: float = 0.0


UNKNOWN = RoundProgress()


class Timing(Protocol):
    """How long to wait for each partner's answer to an offer, dial included; it learns from what it is told."""

    def deadline_s(self, peer: str, /) -> float:
        """Return how long to wait for a peer."""

    def took(self, peer: str, seconds: float, /) -> None:
        """Note what a wait took that was answered."""

    def record_timeout(self, peer: str, begun_s: float, now_s: float, /) -> None:
        """Note a wait that ended at its deadline (loop seconds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundContext:
    """What the rounds are handed.

    `partners` leaves ourselves out, and returns the very same tuple until the roster is another one. `record` takes
    events in order and does not wait. `answers`: None waits `RoundTimeouts.answer_s` for each. `saw` is told of each
    meeting in which both sides step: the partner, the inner steps that it says it has taken since it met anybody, and
    ours.
    """

    compute: Compute
    partners: Callable[[], tuple[Candidate, ...]]
    converse: Callable[[str], AbstractAsyncContextManager[Conversation]]
    record: Callable[[Event], None]
    answers: Timing | None = None
    saw: Callable[[str, int, int], None] = lambda partner, theirs, ours: None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimeouts:
    """How long to wait, in seconds.

    `answer_s`: for a dial and an answer. `exchange_s`: from acceptance to the end; in the blocking form work stands
    still for so long at worst, in the overlapped one exchanges that ran out of it have more time next. `sleep_s`:
    longest sleep before partners are asked again. `jitter_s`: spread of asking.
    """

    answer_s: float = 5.0
    exchange_s: float = 120.0
    sleep_s: float = 20.0
    jitter_s: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """How this run gossips. The fields of the run file's section `outer`, its seed, and our patience."""

    seed: int
    outer: Outer
    delay: Delay = UNDELAYED
    codec: Format = Format.FLOAT32
    staleness_at_most: int = 16
    inner_steps_per_round: int = 50
    late_inner_steps_per_round: int | None = None
    dynamic_steps: bool = False
    weigh_by_steps: bool = False
    overlap_steps: int = 8
    deferrals_before_solo: int = 4
    blocking: bool = False
    fixed: frozenset[int] = frozenset()
    """Numbers of the tensors that training does not move: a round leaves them exactly as they are."""
    patience: RoundTimeouts = RoundTimeouts()


class Origin(NamedTuple):
    """Where a replica's rounds begin: fresh, copied from a donor, or read from a checkpoint."""

    state: OuterState
    """In memory that is the replica's from now on: its rounds write into it."""
    rounds: int = 0
    """Rounds finished."""
    inner_steps: int = 0
    last_met: int = 0
    """The round in which these weights last met anybody's, 0 if in none: a copy of stale weights is as stale."""
    gathered: bool = True
    """Whether the slow weights hold every inner step that the fast ones do."""
