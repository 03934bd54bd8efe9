"""What two replicas of one stage say to each other in a round.

    asker  Offer ->            <- Accepted | Declined   asked
    both   Weights ->          <- Weights               (only after Accepted)

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
    """No. `retry_after_s`: when asking again makes sense, as the asked estimates it. `round`: its own."""

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


class Implausible(ConnectionAbortedError):
    """A partner's weights have the right shape and cannot be right all the same."""
