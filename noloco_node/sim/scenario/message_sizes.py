"""What messages of a simulation weigh on the line: as the run file's would, or as the scenario says without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossip.exchange.messages import Piece, Probe, ReplicaState, Weights
from gossip.settings import OuterConfig, wire_bytes
from noloco_node.planning.message_sizes import PROBE_BYTES, HopBytes, float32_bytes, hop_bytes
from noloco_node.run.config import PipelineConfig
from noloco_node.run.protocols import GOSSIP, STATE
from noloco_node.sim.hardware.quadratic_model import SIZE, WIDE
from noloco_node.sim.scenario.scenario import Scenario
from pipeline.messages import Gradient, Microbatch

if TYPE_CHECKING:
    from noloco_node.planning.model_layout import ModelLayout

FRAME_BYTES = 100
"""Of a message without tensors."""
WEIGHT_SETS = 4
"""Sets of weights in a whole state: slow weights, momentum, two moments."""
BOWL_BYTES = {"bowl": 4 * SIZE, "wide bowl": 4 * WIDE}
"""Of the weights that a bowl really has."""


class MessageSizes:
    """The sizes of one simulation's messages. `stage_bytes`: of the weights of each stage, of all alike without a plan.

    `microbatch_bytes`, `gradient_bytes`: of the two messages of a hop.
    """

    def __init__(
        self, scenario: Scenario, pipeline: PipelineConfig, outer: OuterConfig, plan: ModelLayout | None
    ) -> None:
        network, codec = scenario.network, outer.codec
        # Of each topic: a set of weights as the codec has it, and a probe of it; a whole state.
        self._weights: dict[str, int] = {}
        self._probes: dict[str, int] = {}
        self._states: dict[str, int] = {}
        hop = HopBytes(network.microbatch_bytes, network.microbatch_bytes)
        self.stage_bytes = [network.weights_bytes]
        self._other_weights = round(network.weights_bytes * wire_bytes(codec, [(2**20,)]) / 2**22)
        self._other_state = WEIGHT_SETS * network.weights_bytes
        if plan is not None:
            hop = hop_bytes(pipeline, plan.width)
            shapes_of_stages = [tuple(shapes.values()) for shapes in plan.shapes]
            self.stage_bytes = [float32_bytes(shapes) for shapes in shapes_of_stages]
            for number, (shapes, total) in enumerate(zip(shapes_of_stages, self.stage_bytes, strict=True)):
                self._weights[f"{GOSSIP}/{number}"] = wire_bytes(codec, shapes)
                self._probes[f"{GOSSIP}/{number}"] = min(PROBE_BYTES, total)
                self._states[f"{STATE}/{number}"] = WEIGHT_SETS * total
        self.microbatch_bytes, self.gradient_bytes = FRAME_BYTES + hop.down, FRAME_BYTES + hop.back
        self._held_bytes = BOWL_BYTES.get(scenario.swarm.model)

    @property
    def largest_state_bytes(self) -> int:
        """Of the largest stage's whole state."""
        return FRAME_BYTES + WEIGHT_SETS * max(self.stage_bytes)

    def size_bytes(self, message: object, topic: str) -> int:
        """Return what a message weighs, by its kind and topic."""
        match message:
            case Microbatch():
                return self.microbatch_bytes
            case Gradient():
                return self.gradient_bytes
            case Weights():
                brought = bool(message.fast) + bool(message.slow)
                return FRAME_BYTES + brought * self._weights.get(topic, self._other_weights)
            case Probe():
                return FRAME_BYTES + (1 + (message.fast is not None)) * self._probes.get(topic, 0)
            case ReplicaState():
                return FRAME_BYTES + self._states.get(topic, self._other_state)
            case Piece():
                # A share of a section, which is as large as the weights, or as those that a bowl stands for.
                whole = self._states.get(topic, self._other_state) // WEIGHT_SETS
                return FRAME_BYTES + message.data.nbytes * whole // (self._held_bytes or whole)
        return FRAME_BYTES
