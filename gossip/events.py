"""What happens in a replica's rounds, as the shell is told it; its journal writes most of it just so.

Fields are written in this order. `at`: unix seconds; whoever keeps an event sets it. Nothing here loads torch: a
journal is read without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStepTaken:
    """One outer step.

    `partner`: id of the replica met, None in a solo round. `staleness`: inner steps between snapshot and correction.
    `gap`: norm of own minus mean slow weights over the norm of the mean; None where there was nobody to compare with.
    `staleness_rounds`: rounds since these weights last met anybody's, 1 where in the one before; `partner_staleness`:
    rounds since the partner's did. `adopted`: ours were too stale to count, and the partner's were taken over.
    `seconds`: from the acceptance of the offer to the partner's receipt.
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
class RoundDeferred:
    """No partner before the next round was due. `in_a_row`: deferrals since the last outer step, this one included."""

    round: int
    in_a_row: int
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingLost:
    """A meeting that had been agreed came to nothing. `implausible`: the partner's weights could not be right."""

    round: int
    partner: str
    why: str
    implausible: bool


Event = OuterStepTaken | PartnerTooStale | RoundDeferred | MeetingLost
