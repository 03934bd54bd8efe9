"""What two replicas of one stage say to each other.

In a round:

    asker  Offer ->            <- Accepted | Declined   asked
    both   Probe ->            <- Probe                 (only after Accepted)
    both   Weights ->          <- Weights               (as both probes ask for)
    asker  Received ->         <- Received              asked, who has taken its step by then

Between two rounds, where slow weights travel ahead of time:

    asker  Ahead ->            <- Accepted | Declined   asked
    both   Probe ->            <- Probe                 (only after Accepted)
    both   Weights ->          <- Weights               (slow ones only)
                               <- Received              asked, who has all by then

When a newcomer catches up, or somebody exports the model, over several streams at once:

    newcomer  StateRequest ->  <- Manifest | Busy       donor
    newcomer  PieceRequest ->  <- Piece | Gone | Busy   donor, as often as the newcomer likes

A refusal is a value; a loss is one of the standard library's `ConnectionError`s (`ConnectionRefusedError`: not
reachable; `ConnectionAbortedError`: given up as silent or in violation; `ConnectionResetError`: the stream broke).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor


NOTHING = -1
"""The version of what one does not hold."""
LARGEST_COUNT = 2**48
"""Of rounds and steps: more than anybody takes, and few enough to go on counting from."""

# Numbers with the least and the most that they may be, which whoever decodes a message holds to.
Count = Annotated[int, (0, LARGEST_COUNT)]
Version = Annotated[int, (NOTHING, LARGEST_COUNT)]
Fraction = Annotated[float, (0.0, 1.0)]
Seconds = Annotated[float, (0.0, 1e9)]
Norm = Annotated[float, (0.0, 1e30)]


class DeclineReason(StrEnum):
    """Why an offer was declined."""

    NOT_OPEN = "not open yet"
    HOPING = "still hoping for a partner that it prefers"
    ENGAGED = "in an exchange with another replica"
    ASKING = "waiting for another replica's answer"
    YIELD = "two offers crossed: mine goes first"
    MET = "met already in this round"
    LEAVING = "leaving"
    NOT_NEXT = "expecting another partner in the next round, or not done with this one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Let us meet. `round`: the round that the asker is in, from 1."""

    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Yes, now. `round`: the round that the asked is in."""

    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined:
    """No. `retry_after_s`: the asked's estimate of when asking again makes sense. `round`: the one it opened last."""

    reason: DeclineReason
    retry_after_s: Seconds
    round: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchOffer:
    """Let us swap slow weights before we meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What both must know before weights travel, and is small.

    `round`: the one that the sender is in; `last_met`: the one in which its weights last met anybody's, -1 where the
    sender has disowned them (`gossip.rule.shares`).
    `version`: a number for the slow weights, another one after every outer step. `holds`: the version of the other's
    slow weights that the sender holds, NOTHING if none.
    `slow`: float32 [k], the slow weights at coordinates that both sides know, with what a lossy codec still owes of
    them: enough to report the gap. `fast`: the snapshot likewise, where the codec's step follows from it; None
    elsewhere.
    `inner_steps`: that the snapshot has behind it since its weights last met anybody's; 0 ahead of a round.
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
    """One side of an exchange, as the run's codec has it (`formats.wire_specs`).

    `fast`: the snapshot; empty ahead of a round. `slow`: the slow weights likewise; empty when gamma = beta, where the
    rule does not need them, and where the other holds them already.
    To somebody who adopts one of the two goes, in the codec's absolute form: the slow weights where the rule needs
    them, else the snapshot. From somebody who adopts both are empty.
    """

    fast: tuple[Tensor, ...]
    slow: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """I hold your weights, they are plausible, and mine have reached the transport."""


class Parts(StrEnum):
    """How much of a replica's state somebody asks for."""

    OUTLINE = "outline"
    """Counters and a norm alone: to compare a donor with."""
    SLOW = "slow"
    """Slow weights and counters: for an export."""
    ALL = "all"
    """Also the outer momentum and the inner optimiser's tensors: for a newcomer."""


class Section(StrEnum):
    """A set of tensors like the weights, of which a state has several. The values name fields of `Manifest`."""

    SLOW = "slow"
    MOMENTUM = "momentum"
    GATHERED = "gathered"
    FIRST = "first"
    """The first half of the inner optimiser's tensors: AdamW's first moments."""
    SECOND = "second"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRequest:
    """What is there of your state? `snapshot`: the name of a copy that is rather wanted, if it is still held."""

    parts: Parts
    snapshot: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a donor holds still for others to fetch. `snapshot` names this copy; the counters are those of its state.

    `norm`: of the slow weights. The other fields are the sections: uint8 [pieces, 32], the SHA-256 of each piece in the
    order of `chunks.cut`; None where the section is not there or was not asked for.
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
    the rule has none (alpha = 0).
    `gathered`, `meetings`: of the running momentum period; empty and 0 at its beginning, and for `Parts.SLOW`.
    `optimiser`: the inner optimiser's tensors in an order that the shell fixes, two for each parameter; empty where
    they are not sent.
    `round`: rounds finished. `progress`: of the run, 0 to 1. `optimiser_steps`: the inner optimiser's own counter.
    `last_met`: the round in which these weights last met anybody's, 0 if in none. What a lossy codec owes does not
    travel: it is the donor's to send.
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
    """Not now: others are being served. `retry_after_s`: when asking again makes sense."""

    retry_after_s: Seconds


class Implausible(ConnectionAbortedError):
    """What a replica sent cannot be right: its count, a shape, a type, not finite, or a norm far from our own."""
