"""Messages between two stages: a microbatch goes down, and a gradient or a refusal comes back as its reply.

A microbatch of held-out text has no backward pass: losses come back as its reply.

A refusal is a value. A loss is one of the standard library's errors: `ConnectionRefusedError` (the peer could not be
reached), `ConnectionAbortedError` (it fell silent or sent what no peer may send), `ConnectionResetError` (the stream
broke).

Activations and gradients travel in the run's codec:

    float32, bfloat16     values as they are, or rounded to 8 significant bits
    int8                  8 bits a value, both ways
    int6-int4, int5-int3  as many bits for activations, and for gradients

In a code of fewer than 16 bits a token is one row of bytes:

    top      bfloat16: an upper bound of all magnitudes in the row
    scales   uint8 a block: an upper bound of the block, as a fraction of the top
    codes    `bits` bits a value

A run may learn some of its tokens alone, such as the answers of a conversation. Which ones travels with the ids:

    id               a token that is learnt
    ~id              one that is only given
    ~(id + FIRST)    one that is only given, the first of a row: attention and positions begin anew

This module does not load torch: a plan asks for sizes without it. The arithmetic is in `pipeline.activation_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Numbers with their least and most value; the decoder of a message refuses others.
Fraction = Annotated[float, (0.0, 1.0)]
Seconds = Annotated[float, (0.0, 1e9)]
Loss = Annotated[float, (0.0, 1e30)]
Count = Annotated[int, (0, 2**48)]


class Reason(StrEnum):
    """Why a microbatch was refused."""

    FULL = "full"  # the queue is full, or the sender has used up its fair share of it
    GOSSIPING = "gossiping"  # the admission window is shut for the blocking form of a round
    NO_ROUTE = "no route"  # no replica of a later stage would take it
    EXPIRED = "expired"  # the travelling time budget ended; no peer is to blame
    LEAVING = "leaving"  # the peer is on its way out, or not ready yet
    QUOTA = "evaluation quota"
    """The sender, or all senders together, have had as many forward passes without a backward pass as the run plans."""
    NOT_FINITE = "not finite"  # the model computes what is no number; of microbatches without a backward pass alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """A call to a stage.

    `hidden`: activations [batch, sequence, row] in the run's codec; at stage 0 the token ids [batch, sequence], int64.
    `targets`: marked tokens to predict [batch, sequence], int64; where activations travel in a subspace with the first
    token of each sequence before them, [batch, sequence + 1], so that all stages know the ids.
    `progress`: share of the run's token budget whose gradient had come back when it was drawn, 0 to 1.
    `budget_s`: seconds left for which the sender waits for the reply.
    `source`: the peer that drew it, as the sender says; empty from the source itself, which the connection names.
    `forward_only`: no backward pass follows; the reply is the losses.
    """

    hidden: Tensor
    targets: Tensor
    progress: Fraction
    budget_s: Seconds
    source: str = ""
    forward_only: bool = False

    @property
    def learnt(self) -> int:
        """How many tokens its loss is a mean over."""
        return int((self.targets[:, -self.hidden.shape[1] :] >= 0).count_nonzero())

    @property
    def learnt_share(self) -> float:
        """The share of its tokens that count in the loss."""
        return self.learnt / self.hidden.shape[:2].numel()


UNLEARNT = -1  # stands for a target without a loss
FIRST = 2**30  # more than any id; the sum of both fits 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The reply to a microbatch: the gradient of its loss with respect to `hidden`, coded (None at stage 0).

    The loss is the sum over the tokens that are learnt, divided by the number of all targets: so gradients of a window
    add up to those of the mean over all of its tokens that are learnt, once this sum is divided by their share.
    `loss`: mean cross-entropy in nats a token that is learnt. `tokens`: how many these are.
    `computed_by`: the peer that computed the loss, as the sender says; empty from that peer itself.
    """

    hidden: Tensor | None
    loss: Loss
    tokens: Count
    computed_by: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLosses:
    """The reply to a microbatch that is `forward_only`.

    `sums`: of each sequence, the sum of the cross-entropy of its tokens that are learnt, in nats; float32 [batch].
    """

    sums: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Not now, or not here. `retry_after_s`: the callee's estimate of when asking again makes sense."""

    reason: Reason
    retry_after_s: Seconds = 0.0


Reply = Gradient | Refused
EvaluationReply = SequenceLosses | Refused

BLOCK = 32  # values of one token that share a scale: a quarter of a bit a value, and what a loud channel can spoil
TOP_BYTES = 2
_PLAIN = {32: "float32", 16: "bfloat16"}


class ActivationCode(NamedTuple):
    """How values travel one way. `dithered`: rounded without a bias; else to the nearest."""

    bits: int
    dithered: bool = False

    @property
    def plain(self) -> bool:
        """Whether values travel as floating-point numbers."""
        return self.bits in _PLAIN

    @property
    def dtype(self) -> str:
        return _PLAIN.get(self.bits, "uint8")

    def row(self, width: int) -> int:
        """Return the length of a token's row on the wire, in elements of `dtype`."""
        return width if self.plain else TOP_BYTES + width // BLOCK + width * self.bits // 8

    def size_bytes(self, tokens: int, width: int) -> int:
        return tokens * self.row(width) * {"float32": 4, "bfloat16": 2, "uint8": 1}[self.dtype]


class ActivationCodec(NamedTuple):
    """How activations travel down the pipeline, and their gradients back."""

    down: ActivationCode
    back: ActivationCode


def _ladder(down: int, back: int) -> ActivationCodec:
    return ActivationCodec(ActivationCode(down), ActivationCode(back, dithered=True))


ACTIVATION_CODECS = {
    "float32": ActivationCodec(ActivationCode(32), ActivationCode(32)),
    "bfloat16": ActivationCodec(ActivationCode(16), ActivationCode(16)),
    "int8": _ladder(8, 8),
    "int6-int4": _ladder(6, 4),
    "int5-int3": _ladder(5, 3),
}


def check_width(codec: str, width: int, subspace: int | None = None) -> None:
    """Raise ValueError if a subspace is not smaller than the model's width, or a token's row not whole blocks."""
    if subspace is not None and subspace >= width:
        raise ValueError(f"a subspace of {subspace} numbers is no smaller than the model's width, {width}")
    sent, whose = (width, "the model's") if subspace is None else (subspace, "the subspace's")
    if sent % BLOCK and not ACTIVATION_CODECS[codec].down.plain:
        raise ValueError(f"the codec {codec} takes widths that are multiples of {BLOCK}, and {whose} is {sent}")
