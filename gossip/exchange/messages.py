"""What two replicas of one stage say to each other.

In a round:

    asker  Propose ->          <- Accept | Decline      asked
    both   Probe ->            <- Probe                 (only after Accept)
    both   Weights ->          <- Weights               (as both probes ask for)
    asker  Acknowledge ->      <- Acknowledge           asked, which has taken its step by then

Between two rounds, where slow weights travel ahead of time:

    asker  ProposePrefetch ->  <- Accept | Decline      asked
    both   Probe ->            <- Probe                 (only after Accept)
    both   Weights ->          <- Weights               (slow ones only)
                               <- Acknowledge           asked, which has all by then

When a newcomer catches up, or an export gathers the model, over several streams at once:

    newcomer  StateRequest ->  <- Manifest | Busy       donor
    newcomer  PieceRequest ->  <- Piece | Gone | Busy   donor, as often as the newcomer likes

A refusal is a value; a loss is one of the standard library's `ConnectionError`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor


NOTHING = -1  # the version of weights that one does not hold
LARGEST_COUNT = 2**48
"""The largest count of rounds and steps: more than any run takes, and few enough to go on counting from."""

# Numbers with their bounds; the decoder of messages enforces them.
Count = Annotated[int, (0, LARGEST_COUNT)]
Version = Annotated[int, (NOTHING, LARGEST_COUNT)]
Fraction = Annotated[float, (0.0, 1.0)]
Seconds = Annotated[float, (0.0, 1e9)]
Norm = Annotated[float, (0.0, 1e30)]


class DeclineReason(StrEnum):
    """Why a proposal was declined."""

    NOT_OPEN = "not open yet"
    HOPING = "still hoping for a partner that it prefers"
    ENGAGED = "in an exchange with another replica"
    ASKING = "waiting for another replica's answer"
    YIELD = "two proposals crossed: mine goes first"
    MET = "met already in this round"
    LEAVING = "leaving"
    NOT_NEXT = "expecting another partner in the next round, or not done with this one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Propose:
    """Ask to meet. `round`: the round that the asker is in, from 1."""

    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Accept:
    """Meet now. `round`: the round that the asked is in."""

    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Decline:
    """Do not meet. `retry_after_s`: when asking again makes sense. `round`: the one that the asked opened last."""

    reason: DeclineReason
    retry_after_s: Seconds
    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposePrefetch:
    """Ask to swap slow weights before a meeting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The little that both sides must know before weights travel.

    `round`: the sender's; `last_met`: the round in which its weights last met anybody's, -1 where the sender has
    disowned them. `version`: of the sender's slow weights, another one after every outer step. `holds`: the version of
    the receiver's slow weights that the sender holds, NOTHING if none. `slow`: float32 [k], the slow weights at
    coordinates that both sides know. `fast`: the snapshot likewise, where the codec's step follows from it; None
    elsewhere.
    `inner_steps`: of the snapshot since its weights last met anybody's; 0 ahead of a round.
    """

    round: Count
    last_met: Version
    version: Count
    holds: Version
    slow: Tensor
    fast: Tensor | None
    inner_steps: Count = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One side of an exchange, in the run's codec (`settings.wire_specs`).

    `fast`: the snapshot; empty ahead of a round. `slow`: the slow weights; empty where gamma = beta, so that the rule
    does not need them, and where the receiver holds them already. A side that adopts sends both empty; it receives one
    of the two in the codec's absolute form: the slow weights where the rule needs them, else the snapshot.
    """

    fast: tuple[Tensor, ...]
    slow: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge:
    """The sender holds the other's weights, they are plausible, and its own have reached the transport."""


class Parts(StrEnum):
    """How much of a replica's state is asked for."""

    OUTLINE = "outline"
    """Counters and a norm alone: to compare a donor with."""
    SLOW = "slow"
    """Slow weights and counters: for an export."""
    ALL = "all"
    """Also the outer momentum and the inner optimiser's tensors: for a newcomer."""


class Section(StrEnum):
    """A set of tensors, one a parameter, of which a state has several. The values name fields of `Manifest`."""

    SLOW = "slow"
    MOMENTUM = "momentum"
    GATHERED = "gathered"
    FIRST = "first"
    """The first half of the inner optimiser's tensors: AdamW's first moments."""
    SECOND = "second"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRequest:
    """Ask for a manifest of the donor's state. `snapshot`: the name of a copy that is preferred if it is still held."""

    parts: Parts
    snapshot: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A copy that a donor keeps for others to fetch. `snapshot` names it; the counters are those of its state.

    `norm`: of the slow weights. The other fields are the sections: uint8 [pieces, 32], the SHA-256 of each piece in the
    order of `chunks.cut`; None where the section does not exist or was not asked for.
    """

    snapshot: str
    round: Count
    inner_steps: Count
    progress: Fraction
    optimiser_steps: Count
    meetings: Count
    last_met: Version
    norm: Norm
    slow: Tensor | None = None
    momentum: Tensor | None = None
    gathered: Tensor | None = None
    first: Tensor | None = None
    second: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRequest:
    """Send me this piece of that copy. `number`: in the order of `chunks.cut`."""

    snapshot: str
    section: Section
    number: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The piece that was asked for. `data`: uint8, as long as the cut says."""

    data: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """That copy is not held any more: ask for another manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """What a newcomer needs to become a replica; it travels in pieces.

    `slow`, `momentum`: one tensor per parameter in the stage's order; `momentum` is empty for `Parts.SLOW`, and where
    the rule has none (alpha = 0). `gathered`, `meetings`: of the running momentum period; empty and 0 at its beginning,
    and for `Parts.SLOW`. `optimiser`: the inner optimiser's tensors in an order that the node fixes, two for each
    parameter; empty where they are not sent. `round`: rounds finished. `progress`: of the run, 0 to 1.
    `optimiser_steps`: the inner optimiser's own counter. `last_met`: the round in which these weights last met
    anybody's, 0 if in none.
    """

    slow: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    optimiser: tuple[Tensor, ...]
    round: int
    inner_steps: int
    progress: float
    optimiser_steps: int
    gathered: tuple[Tensor, ...] = ()
    meetings: int = 0
    last_met: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """The donor serves others now. `retry_after_s`: when asking again makes sense."""

    retry_after_s: Seconds


class Implausible(ConnectionAbortedError):
    """A replica's message cannot be right: its count, a shape, a type, a value not finite, or a norm far from ours."""
