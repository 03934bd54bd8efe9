"""What a replica's rounds need of the node, and the events that they report.

The node hands `Rounds` a `GossipReplica` (the weights), a `RoundContext` (partners, conversations, a thread for
arithmetic) and the settings of the run (`gossip.settings`). The rounds report events, which the node's journal mostly
writes as they are, fields in this order; `at` (unix seconds) is set by the journal. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from gossip.settings import RoundTimeouts

if TYPE_CHECKING:
    from gossip.rule.outer_step import OuterState, Tensors

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStepTaken:
    """One outer step.

    `partner`: id of the replica met, None in a solo round. `staleness`: inner steps between snapshot and correction.
    `gap`: norm of own minus mean slow weights over the norm of the mean; None where there was nobody to compare with.
    `staleness_rounds`: rounds since these weights last met anybody's, 1 where in the one before; `partner_staleness`:
    rounds since the partner's did. `adopted`: ours were too stale to count, and the partner's were taken over.
    `seconds`: from the acceptance of the proposal to the partner's acknowledgement.
    """

    round: int
    partner: str | None = None
    gap: float | None = None
    staleness: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float
    staleness_rounds: int = 0
    partner_staleness: int = 0
    adopted: bool = False
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerTooStale:
    """A partner had met nobody for too many rounds to count: it took our weights, and our round stays open.

    `partner_staleness`: for how many rounds.
    """

    round: int
    partner: str
    partner_staleness: int
    bytes_sent: int
    bytes_received: int
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSkipped:
    """No partner came before the next round was due. `in_a_row`: rounds skipped since the last outer step."""

    round: int
    in_a_row: int
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingLost:
    """An agreed meeting came to nothing. `implausible`: the partner's weights could not be right."""

    round: int
    partner: str
    why: str
    implausible: bool


Event = OuterStepTaken | PartnerTooStale | RoundSkipped | MeetingLost


class Conversation(Protocol):
    """One ordered stream of typed messages between us and a peer whom the transport has authenticated."""

    @property
    def peer(self) -> str:
        """The other's peer id."""

    async def send(self, message: object) -> None:
        """Send one message."""

    async def receive(self) -> object:
        """Return the next message. Raises a `ConnectionError` where none will come."""


class Compute(Protocol):
    """Runs a function where heavy arithmetic belongs: in a thread beside the device's, one after the other."""

    def __call__(self, function: Callable[..., T], /, *args: object) -> Awaitable[T]:
        """Return what `function(*args)` returns, raise what it raises."""


class GossipReplica(Protocol):
    """What a round may do to the replica."""

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the fast weights, float32 on the CPU, or their difference from any `slow` ones in bfloat16.

        Called only in a pause between two inner steps.
        """

    async def correct(self, correction: Tensors) -> None:
        """Add this, float32 or bfloat16, to the fast weights. Called only in a pause between two inner steps."""

    async def replace(self, weights: Tensors) -> None:
        """Replace the fast weights by a copy of these. Called only in a pause between two inner steps."""

    def alone(self, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Admit no microbatch, wait until none is in flight, and admit them again at the end.

        A microbatch that comes meanwhile is refused, with this hint. Only the blocking form uses it.
        """


class Candidate(NamedTuple):
    """A live replica of our stage that has caught up, and the rounds that it says it has finished.

    `speed`: its inner steps a second, as it claims, in any unit that the stage has in common; 0 is unknown.
    """

    peer: str
    round: int
    speed: float = 0.0


class RoundProgress(NamedTuple):
    """`progress`: of the run, 0 to 1. `speed`: of our replica, in the unit of the candidates'."""

    progress: float = 0.0
    speed: float = 0.0


UNKNOWN = RoundProgress()


class Timing(Protocol):
    """How long to wait for each partner's answer to a proposal, dial included; it learns from past waits."""

    def deadline_s(self, peer: str, /) -> float:
        """Return how long to wait for a peer."""

    def took(self, peer: str, seconds: float, /) -> None:
        """Note what a wait took that was answered."""

    def record_timeout(self, peer: str, begun_s: float, now_s: float, /) -> None:
        """Note a wait that ended at its deadline (loop seconds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundContext:
    """The means by which rounds reach the node.

    `partners` leaves ourselves out, and returns the same tuple until the roster changes. `record` takes events in order
    and does not wait. `seed`: of the run. `fixed`: numbers of the tensors that neither training nor a round moves.
    `from_zero`: all weights that rounds move were zero at first, so those of two honest replicas need not be alike.
    `answers`: None waits `RoundTimeouts.answer_s` for each. `saw` is called for each meeting in which we step, with
    the partner, the inner steps that it claims since it met anybody (0 where it lends us its weights), and ours.
    """

    seed: int
    compute: Compute
    partners: Callable[[], tuple[Candidate, ...]]
    converse: Callable[[str], AbstractAsyncContextManager[Conversation]]
    record: Callable[[Event], None]
    fixed: frozenset[int] = frozenset()
    from_zero: bool = False
    timeouts: RoundTimeouts = field(default_factory=RoundTimeouts)
    answers: Timing | None = None
    saw: Callable[[str, int, int], None] = lambda partner, theirs, ours: None


class Origin(NamedTuple):
    """Where a replica's rounds begin: fresh, copied from a donor, or read from a checkpoint."""

    state: OuterState  # in memory that is the replica's from now on: its rounds write into it
    rounds: int = 0  # rounds finished
    inner_steps: int = 0
    last_met: int = 0
    """The round in which these weights last met anybody's, 0 if in none: a copy of stale weights is as stale."""
    gathered: bool = True  # whether the slow weights hold every inner step that the fast ones do
