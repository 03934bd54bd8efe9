"""How a run gossips: the section `outer` of its run file, timeouts, and the formats in which weights travel.

Here each setting is declared once, with its default, its bounds and what it means. `noloco_node.run.validation` has the
rules that no type states. Nothing here loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple


class Format(StrEnum):
    """The number format in which weights travel.

    float32 and bfloat16: every tensor in its own shape. int8: codes int8 [values] and scales float32 [blocks], where
    value = code * scale of its block. int4: codes uint8 [bytes], two values a byte, of each only value / step mod 16.

    int8 and int4 put all parameters into one tensor, in their order; no two parameters share a block or a byte. In
    int4 a parameter of n values takes h = ceil(n / 2) bytes: byte i holds value i in its low half and value h + i in
    its high half, so both halves are contiguous; where n is odd, the last high half is zero.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_modular(self) -> bool:
        """Whether values travel modulo 16 of steps that both sides derive from probes, and are found near the own."""
        return self is Format.INT4


# The least and the most that a number may be; `noloco_node.run.fields` holds a run file to them.
MOST_STEPS_PER_ROUND = 10**6
StepCount = Annotated[int, (1, MOST_STEPS_PER_ROUND)]
SkipCount = Annotated[int, (1, 10_000)]
StepPeriod = Annotated[int, (1, 1000)]
LineShare = Annotated[float, (0.01, 0.99)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig:
    """The gossip round. The defaults were chosen in the laboratory, mostly on one seed (research/results.md); NoLoCo as
    published (arXiv 2506.10911) is 0.5, 0.7, 0.7, a round every 50 steps, float32, blocking.
    """

    inner_steps_per_round: StepCount = 10
    late_inner_steps_per_round: StepCount | None = None
    """At the end of the run; from `inner_steps_per_round` at its beginning they follow a geometric course."""
    dynamic_steps: bool = True
    """Slower replicas take fewer inner steps a round, so that they reach their rounds together with the fastest."""
    weigh_by_steps: bool = False
    """In the mean of a meeting each replica counts by the inner steps since its last one, at most four times the other;
    otherwise both count alike."""
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    momentum_period: StepPeriod = 1
    """Outer steps after which the momentum moves once; 1 is the paper's rule (`gossip.rule.outer_step`)."""
    momentum_spread: float = 0.0
    """Share of the momentum that each outer step of a period but the last one applies."""
    codec: Format = Format.INT4
    """Number format of the weights that a round exchanges; each but float32 carries its rounding error on."""
    line_share: LineShare = 0.2
    """Of a line whose rate is known, what rounds take while microbatches wait for it."""
    staleness_at_most: StepCount = 16
    """Rounds since its weights last met anybody's (1: in the round before) beyond which a replica takes its partner's
    weights instead of a mean."""
    blocking: bool = False
    """The paper's form: admit nothing, drain, then exchange. Otherwise training goes on until the partner is there."""
    overlap_steps: int = 8
    """A snapshot older than this many inner steps is retaken while the round stays open."""
    skips_before_solo: SkipCount = 4

    @property
    def weight_sets(self) -> int:
        """Sets of weights that each side of a pair sends: with gamma = beta the fast ones alone, else slow ones too."""
        return 1 if self.gamma == self.beta else 2

    @property
    def gathers(self) -> bool:
        """Whether what a period of the momentum has gathered is kept."""
        return bool(self.alpha) and self.momentum_period > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimeouts:
    """How long to wait, in seconds.

    `answer_s`: for a dial and an answer. `exchange_s`: for a meeting, from acceptance to the end; the blocking form
    stands still for so long at worst, the overlapped form allows more after a meeting that ran out of time. `sleep_s`:
    until a partner that was silent or lost is asked again, and the longest sleep while a round is open. `jitter_s`:
    spread of asking.
    """

    answer_s: float = 5.0
    exchange_s: float = 120.0
    sleep_s: float = 20.0
    jitter_s: float = 0.1


BLOCK = 256  # values of one parameter that share a scale in int8: 1.6 % on top of the codes

Shape = tuple[int, ...]


def absolute(form: Format) -> Format:
    """Return the form in which weights travel to somebody who is to take them over, and may be anywhere.

    With the step of int4, which follows the distance, an adopted weight would be noise.
    """
    return Format.BFLOAT16 if form.is_modular else form


class WireSpec(NamedTuple):
    """One tensor that travels: the name of its dtype, and its shape."""

    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * {"float32": 4, "bfloat16": 2}.get(self.dtype, 1)


def wire_specs(form: Format, shapes: Sequence[Shape]) -> tuple[WireSpec, ...]:
    """Return what travels for parameters of these shapes, in order."""
    if form in (Format.FLOAT32, Format.BFLOAT16):
        return tuple(WireSpec(form.value, tuple(shape)) for shape in shapes)
    sizes = [math.prod(shape) for shape in shapes]
    if form is Format.INT8:
        return WireSpec("int8", (sum(sizes),)), WireSpec("float32", (sum(map(blocks, sizes)),))
    return (WireSpec("uint8", (sum(map(packed_bytes, sizes)),)),)


def wire_bytes(form: Format, shapes: Sequence[Shape]) -> int:
    """Return the bytes of all tensors that travel for parameters of these shapes."""
    return sum(spec.size_bytes for spec in wire_specs(form, shapes))


def blocks(size: int) -> int:
    """Return the scales that a parameter of `size` values takes in int8."""
    return -(-size // BLOCK)


def packed_bytes(size: int) -> int:
    """Return the bytes that a parameter of `size` values takes in int4."""
    return -(-size // 2)
