"""What messages weigh, by the run's codecs: those between stages, and a round's, with the memory that they take.

A round's exchange is one set of weights as the codec has it, two where gamma differs from beta, and the probes. Slow
weights that travel ahead of time travel instead of, not beside, those of the meeting; only their probe is one more.

Memory is what stands in tensors in each phase of a peer's life; `benchmarks.memory.phases` measures the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from gossip.settings import Format, OuterConfig, wire_bytes
from noloco_node.run.config import PipelineConfig
from pipeline.messages import ACTIVATION_CODECS

PROBE_BYTES = 4 * 4096
"""A sample of weights that goes with an exchange (`gossip.exchange.swap.PROBE`), at most."""

Shapes = Sequence[tuple[int, ...]]


class HopBytes(NamedTuple):
    """Bytes of a microbatch between two stages: activations and targets on the way down, gradients on the way back."""

    down: int
    back: int


def hop_bytes(pipeline: PipelineConfig, width: int) -> HopBytes:
    """Return what a microbatch weighs where `width` numbers of a token travel."""
    tokens = pipeline.microbatch_size * pipeline.sequence_length
    down, back = (code.size_bytes(tokens, width) for code in ACTIVATION_CODECS[pipeline.codec])
    return HopBytes(down + 8 * prod(pipeline.targets_shape), back)


class GossipMemory(NamedTuple):
    """Bytes. `momentum`: of the outer rule. `gathered`: what a period of it has gathered.

    `owed`: what the codec has left out so far. `ahead`: slow weights of both sides that have travelled before a
    meeting; `exchange`: what travels in it, of both.

    Checkpoints and copies for newcomers are written to the disk from the replica's own memory, and take none.
    """

    momentum: int
    gathered: int
    owed: int
    ahead: int
    exchange: int


def sets(outer: OuterConfig) -> int:
    """Return the sets of weights that each side of a pair sends: with gamma = beta the fast ones alone."""
    return 1 if outer.gamma == outer.beta else 2


def coded_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    """Return the bytes of the weights that one side of a pair sends."""
    return sets(outer) * wire_bytes(outer.codec, shapes)


def round_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    """Return the bytes that a peer sends its partner in a round, probes included."""
    probes = 1 + outer.codec.is_modular + (sets(outer) == 2)
    return coded_bytes(outer, shapes) + probes * min(PROBE_BYTES, float32_bytes(shapes))


def gossip_memory(outer: OuterConfig, shapes: Shapes) -> GossipMemory:
    """Return what gossip needs besides slow weights, momentum and snapshot."""
    once, lossy = float32_bytes(shapes), outer.codec is not Format.FLOAT32
    momentum = once if outer.alpha else 0
    gathered = momentum if outer.momentum_period > 1 else 0
    return GossipMemory(
        momentum=momentum,
        gathered=gathered,
        # In bfloat16.
        owed=sets(outer) * once // 2 if lossy else 0,
        ahead=2 * wire_bytes(outer.codec, shapes) if sets(outer) == 2 else 0,
        # What travels is decoded a piece at a time, and a step is taken in place.
        exchange=2 * coded_bytes(outer, shapes),
    )


def float32_bytes(shapes: Shapes) -> int:
    """Return the bytes of one set of weights."""
    return 4 * sum(map(prod, shapes))
