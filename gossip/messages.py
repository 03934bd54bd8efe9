"""What two replicas of one stage say to each other.

In a round:

    asker  Offer ->            <- Accepted | Declined   asked
    both   Weights ->          <- Weights               (only after Accepted)
    asker  Received ->         <- Received              asked, who has taken its step by then

When a newcomer catches up, or somebody exports the model:

    newcomer  StateRequest ->  <- ReplicaState | Busy   donor

A refusal is a value; a loss is one of the standard library's `ConnectionError`s (`ConnectionRefusedError`: not
reachable; `ConnectionAbortedError`: given up as silent or in violation; `ConnectionResetError`: the stream broke).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class DeclineReason(StrEnum):
    """Why an offer was declined."""

    NOT_OPEN = "not open yet"
    HOPING = "still hoping for a partner that it prefers"
    ENGAGED = "in an exchange with another replica"
    ASKING = "waiting for another replica's answer"
    YIELD = "two offers crossed: mine goes first"
    MET = "met already in this round"
    LEAVING = "leaving"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Let us meet. `round`: the round that the asker is in, from 1."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Yes, now. `round`: the round that the asked is in."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined:
    """No. `retry_after_s`: the asked's estimate of when asking again makes sense. `round`: the one it opened last."""

    reason: DeclineReason
    retry_after_s: float
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One side of an exchange.

    `fast`: the snapshot, one tensor per parameter in the stage's order.
    `slow`: the slow weights likewise; empty when gamma = beta, where the rule does not need them.
    `probe`: float32 [k], a sample of the slow weights at coordinates that both sides know: enough to report the gap.
    """

    fast: tuple[Tensor, ...]
    slow: tuple[Tensor, ...]
    probe: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """I hold your weights, they are plausible, and mine have reached the transport."""


class Parts(StrEnum):
    """How much of a replica's state somebody asks for."""

    SLOW = "slow"
    """Slow weights and counters: for an export."""
    ALL = "all"
    """Also the outer momentum and the inner optimiser's tensors: for a newcomer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRequest:
    """Send me your state."""

    parts: Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """What a newcomer needs to become a replica.

    `slow`, `momentum`: one tensor per parameter in the stage's order; `momentum` is empty for `Parts.SLOW`.
    `optimiser`: the inner optimiser's tensors in an order that the shell fixes; empty where they are not sent.
    `round`: rounds finished. `progress`: of the run, 0 to 1. `optimiser_steps`: the inner optimiser's own counter.
    """

    slow: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    optimiser: tuple[Tensor, ...]
    round: int
    inner_steps: int
    progress: float
    optimiser_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Not now: others are being served. `retry_after_s`: when asking again makes sense."""

    retry_after_s: float


class Implausible(ConnectionAbortedError):
    """What a replica sent cannot be right: its count, a shape, a type, not finite, or a norm far from our own."""
