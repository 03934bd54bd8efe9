"""What travels between two stages: a microbatch goes down, a gradient or a refusal comes back as its reply.

A refusal is a value. A loss is one of the standard library's `ConnectionError`s, so that neither this package nor
`gossip` needs the network's own types:

- `ConnectionRefusedError`: the peer could not be reached at all;
- `ConnectionAbortedError`: we gave the peer up, because it fell silent or because it sent what no peer may send;
- `ConnectionResetError`: the stream broke.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor


# Numbers with the least and the most that they may be, which whoever decodes a message holds to.
Fraction = Annotated[float, (0.0, 1.0)]
Seconds = Annotated[float, (0.0, 1e9)]
Loss = Annotated[float, (0.0, 1e30)]
Count = Annotated[int, (0, 2**48)]


class Reason(StrEnum):
    """Why a microbatch was refused."""

    FULL = "full"
    """The queue is full, or the sender has used up its fair share of it."""
    GOSSIPING = "gossiping"
    """The gate is shut for the blocking form of a round."""
    NO_ROUTE = "no route"
    """No replica of a later stage would take it."""
    EXPIRED = "expired"
    """The travelling time budget ended; nobody is to blame."""
    LEAVING = "leaving"
    """The peer is on its way out, or not ready yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """A call to a stage.

    `hidden`: activations [batch, sequence, row] in the run's codec; at stage 0 the token ids [batch, sequence], int64.
    `targets`: token ids to predict [batch, sequence], int64; where activations travel in a subspace with the first
    token of each sequence before them, [batch, sequence + 1], so that all stages know the ids.
    `progress`: share of the run's token budget whose gradient had come back when it was drawn, 0 to 1.
    `budget_s`: seconds left until nobody wants the reply any more.
    `source`: the peer that drew it, as whoever passes it on says; empty from the source itself, whom the line names.
    """

    hidden: Tensor
    targets: Tensor
    progress: Fraction
    budget_s: Seconds
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The reply to a microbatch: the gradient of its mean loss with respect to `hidden`, coded (None at stage 0).

    `loss`: mean cross-entropy in nats a token. `tokens`: how many tokens it is a mean over.
    `computed_by`: the peer that computed the loss, as whoever passes it back says; empty from that peer itself.
    """

    hidden: Tensor | None
    loss: Loss
    tokens: Count
    computed_by: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Not now, or not here. `retry_after_s`: the callee's own estimate of when asking again makes sense."""

    reason: Reason
    retry_after_s: Seconds = 0.0


Reply = Gradient | Refused
