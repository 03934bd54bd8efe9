"""What messages weigh, by the run's codecs: those between stages, and a round's, with the memory that they take.

A round's exchange is one set of weights as the codec has it, two where gamma differs from beta, and the probes. Slow
weights that travel ahead of time travel instead of, not beside, those of the meeting; only their probe is one more.

Memory is what exists at once at the worst moment, when the step has just been computed: what was exchanged, the state
before, and the state after.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from gossip.exchange.formats import Format, wire_bytes
from noloco_node.run.config import OuterConfig, PipelineConfig
from pipeline.codec_formats import ACTIVATION_CODECS

PROBE_BYTES = 4 * 4096
"""A sample of weights that goes with an exchange (`gossip.exchange.swap.PROBE`), at most."""

Shapes = Sequence[tuple[int, ...]]


class HopBytes(NamedTuple):
    """Bytes of a microbatch between two stages: activations and targets on the way down, gradients on the way back."""

    down: int
    back: int


def hop_bytes(pipeline: PipelineConfig, width: int) -> HopBytes:
    """Return what a microbatch weighs in a model of this width."""
    tokens = pipeline.microbatch_size * pipeline.sequence_length
    down, back = (code.size_bytes(tokens, width) for code in ACTIVATION_CODECS[pipeline.codec])
    return HopBytes(down + 8 * tokens, back)


class GossipMemory(NamedTuple):
    """Bytes. `exchange`: the weights of an exchange, coded and decoded. `step`: what an outer step is made of.

    `owed`: what the codec has left out so far. `ahead`: the next partner's slow weights. `gathered`: what a momentum
    period has gathered.
    """

    exchange: int
    step: int
    owed: int
    ahead: int
    gathered: int


def sets(outer: OuterConfig) -> int:
    """Return the sets of weights that each side of a pair sends: with gamma = beta the fast ones alone."""
    return 1 if outer.gamma == outer.beta else 2


def coded_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    """Return the bytes of the weights that one side of a pair sends."""
    return sets(outer) * wire_bytes(Format(outer.codec), shapes)


def round_bytes(outer: OuterConfig, shapes: Shapes) -> int:
    """Return the bytes that a peer sends its partner in a round, probes included."""
    probes = 1 + Format(outer.codec).is_modular + (sets(outer) == 2)
    return coded_bytes(outer, shapes) + probes * min(PROBE_BYTES, float32_bytes(shapes))


def gossip_memory(outer: OuterConfig, shapes: Shapes) -> GossipMemory:
    """Return what gossip needs besides slow weights, momentum and snapshot."""
    once, lossy = float32_bytes(shapes), Format(outer.codec) is not Format.FLOAT32
    # In float32 what travels is there, and what comes is used. Otherwise theirs and ours exist coded and decoded. (The
    # copy that int4 decodes around has gone before the step needs its place.)
    exchange = 2 * sets(outer) * once + 2 * coded_bytes(outer, shapes) if lossy else sets(outer) * once
    return GossipMemory(
        exchange=exchange,
        # New slow weights, momentum and correction; and what the period has gathered, anew.
        step=(4 if outer.momentum_period > 1 else 3) * once,
        owed=sets(outer) * once if lossy else 0,
        ahead=once if sets(outer) == 2 else 0,
        gathered=once if outer.momentum_period > 1 else 0,
    )


def float32_bytes(shapes: Shapes) -> int:
    """Return the bytes of one set of weights."""
    return 4 * sum(map(prod, shapes))
