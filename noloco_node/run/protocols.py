"""What peers of one run talk about, and the exact shape of everything they may say.

All of it follows from the run file, so both ends know it before the first byte arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gossip.exchange.messages import (
    Accept,
    Acknowledge,
    Busy,
    Decline,
    Gone,
    Manifest,
    Piece,
    PieceRequest,
    Probe,
    Propose,
    ProposePrefetch,
    Section,
    StateRequest,
    Weights,
)
from gossip.exchange.swap import PROBE
from gossip.settings import absolute, wire_specs
from gossip.transfer.chunks import DIGEST_BYTES, StateCut
from noloco_node.network.schema import MessageSpec, OneOf, Schema, TensorSpec
from noloco_node.run.config import RunConfig
from pipeline.inner_step import moment_bytes
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch, Refused, SequenceLosses

MICROBATCH = "microbatch"
GOSSIP = "gossip"
STATE = "state"

Shapes = Sequence[tuple[int, ...]]


def topic(kind: str, stage: int) -> str:
    """Return the topic of conversations with a replica of one stage.

    Middle stages have equal shapes: only the name keeps a peer from taking another stage's messages for its own when
    somebody's roster still lists it at the stage that it served before.
    """
    return f"{kind}/{stage}"


def microbatch_schema(run: RunConfig, width: int) -> Schema:
    """Return what a stage and the one before it say to each other."""
    cells = run.pipeline.ids_shape
    codec = ACTIVATION_CODECS[run.pipeline.codec]
    down, back = (TensorSpec((*cells, code.row(width)), code.dtype) for code in codec)
    return Schema(
        {
            Microbatch: MessageSpec(
                "Microbatch",
                {"hidden": down, "targets": TensorSpec(run.pipeline.targets_shape, "int64")},
                added=("source", "forward_only"),
            ),
            Gradient: MessageSpec("Gradient", {"hidden": back}, added=("computed_by",)),
            SequenceLosses: MessageSpec(
                "SequenceLosses", {"sums": TensorSpec((run.pipeline.microbatch_size,), "float32")}
            ),
            Refused: MessageSpec("Refused"),
        }
    )


def gossip_schema(run: RunConfig, shapes: Shapes) -> Schema:
    """Return what two replicas of a stage with parameters of these shapes say to each other in a round."""
    codec, both = run.outer.codec, run.outer.weight_sets == 2
    # To somebody who adopts weights they go in a form of their own, where the codec's is not absolute.
    forms = tuple(dict.fromkeys((codec, absolute(codec))))
    coded = tuple(tuple(TensorSpec(spec.shape, spec.dtype) for spec in wire_specs(form, shapes)) for form in forms)
    probe = TensorSpec((min(PROBE, sum(map(prod, shapes))),), "float32")
    # Ahead of a round no snapshot is there to be probed.
    fast_probe = OneOf((probe, None)) if codec.is_modular else None
    messages = {
        Propose: MessageSpec("Propose"),
        Accept: MessageSpec("Accept"),
        Decline: MessageSpec("Decline"),
        Probe: MessageSpec("Probe", {"slow": probe, "fast": fast_probe}),
        Weights: MessageSpec("Weights", {"fast": OneOf((*coded, ())), "slow": OneOf((*coded, ())) if both else ()}),
        Acknowledge: MessageSpec("Acknowledge"),
    }
    return Schema(messages | {ProposePrefetch: MessageSpec("ProposePrefetch")} if both else messages)


def moment_sizes(run: RunConfig, shapes: Shapes) -> tuple[int, ...]:
    """Return the bytes of one moment of each parameter of these shapes."""
    return tuple(moment_bytes(shape, run.inner.state) for shape in shapes)


def state_schema(shapes: Shapes, moments: Sequence[int] | None = None) -> Schema:
    """Return what a newcomer, or somebody who exports, and a replica of this stage say to each other.

    `moments`: as `moment_sizes` returns them, float32 by default; who asks for no moments needs none.
    """
    cut = StateCut([4 * prod(shape) for shape in shapes], moments)
    hashes = OneOf((TensorSpec((len(cut.spans), DIGEST_BYTES), "uint8"), None))
    sizes = dict.fromkeys(span.size_bytes for section in Section for span in cut.of(section))
    return Schema(
        {
            StateRequest: MessageSpec("StateRequest"),
            Busy: MessageSpec("Busy"),
            Manifest: MessageSpec("Manifest", {str(section): hashes for section in Section}),
            PieceRequest: MessageSpec("PieceRequest"),
            Piece: MessageSpec("Piece", {"data": OneOf(tuple(TensorSpec((size,), "uint8") for size in sizes))}),
            Gone: MessageSpec("Gone"),
        }
    )
