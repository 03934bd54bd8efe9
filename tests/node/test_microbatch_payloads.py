"""What a neighbour sends is looked at before a stage computes with it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from noloco_node.network.calls import SendTurns
from noloco_node.network.wire import Violation
from noloco_node.node.microbatches import MicrobatchClient, MicrobatchServer
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.protocols import gossip_schema, microbatch_schema
from noloco_node.sim import clock
from noloco_node.swarm.roster import Roster
from pipeline.activation_codec import encode
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch

RUN = RunConfig(
    model=ModelConfig(architecture="llama"),
    pipeline=PipelineConfig(microbatch_size=1, sequence_length=2, codec="int5-int3"),
)
TARGETS = torch.zeros(1, 2, dtype=torch.int64)
CODEC = ACTIVATION_CODECS["int5-int3"]


def spoilt(wire: Tensor) -> Tensor:
    wire[0, 1, :2] = torch.tensor([float("inf")]).bfloat16().view(torch.uint8)
    return wire


class Talk:
    """A conversation with one who says one thing."""

    peer = "peer-liar"

    def __init__(self, says: object) -> None:
        self._says = says
        self.heard: list[object] = []

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def receive(self) -> object:
        return self._says

    async def send(self, message: object) -> None:
        self.heard.append(message)


class Network:
    """A network whose every peer says one thing."""

    def __init__(self, says: object) -> None:
        self._says = says

    def talk(self, *_: object) -> Talk:
        return Talk(self._says)


class Untouched:
    """A worker that nothing may reach."""

    async def process(self, microbatch: Microbatch, sender: str) -> Gradient:
        raise AssertionError(f"{sender}'s microbatch was taken: {microbatch}")


def context(says: object, journal: list[Any]) -> ReplicaContext:
    return ReplicaContext(
        network=cast(Any, Network(says)),
        roster=lambda: Roster(stages=()),
        record=journal.append,
        hold=cast(Any, None),
        microbatch_schema=microbatch_schema(RUN, 64),
        gossip_schema=gossip_schema(RUN, ((3,),)),
        vocabulary=8,
    )


def config(stage: int) -> ReplicaConfig:
    return ReplicaConfig(run=RUN, run_id="0" * 64, stage=stage, peer="peer-me")


def test_activations_without_a_bound_are_a_violation_and_reach_no_stage() -> None:
    hidden = spoilt(encode(CODEC.down, torch.randn(1, 2, 64)))
    liar = Talk(Microbatch(hidden=hidden, targets=TARGETS, progress=0.0, budget_s=9.0))
    server = MicrobatchServer(config(1), context(None, []), cast(Any, Untouched()), SendTurns(1))
    with pytest.raises(Violation, match="top of a token"):
        clock.run(server.serve(cast(Any, liar)))
    assert liar.heard == []


def test_a_gradient_without_a_bound_is_a_violation_that_is_journalled() -> None:
    journal: list[Any] = []
    lie = Gradient(hidden=spoilt(encode(CODEC.back, torch.randn(1, 2, 64))), loss=1.0, tokens=2)
    client = MicrobatchClient(config(0), context(lie, journal), SendTurns(1))
    microbatch = Microbatch(
        hidden=encode(CODEC.down, torch.randn(1, 2, 64)), targets=TARGETS, progress=0.0, budget_s=9.0
    )
    with pytest.raises(Violation, match="top of a token"):
        clock.run(client.call("peer-liar", microbatch))
    assert [(event.peer, event.topic) for event in journal] == [("peer-liar", "microbatch")]
