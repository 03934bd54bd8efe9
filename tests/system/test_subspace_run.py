"""A swarm whose stages send a subspace: it learns, meets in int4, and is taken home as an ordinary checkpoint."""

from math import log
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from noloco_node.export.huggingface import joined
from noloco_node.planning.bandwidth import hop_bytes
from noloco_node.planning.model_layout import ModelLayout
from noloco_node.sim.scenario.scenario import Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import World, simulate
from pipeline.stage import Stage

RUN = """
name = "narrow"
precision = "float32"
inner = { steps = 16, learning_rate = 5e-3, warmup_steps = 2 }
outer = { inner_steps_per_round = 4, overlap_steps = 2, codec = "int4" }

[pipeline]
stages = 3
replicas = 2
sequence_length = 32
microbatch_size = 4
microbatches_per_step = 2
windows_in_flight = 2
codec = "int6-int4"
subspace = 32

[model]
architecture = "llama"

[model.sizes]
vocab_size = 384
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 3
num_attention_heads = 2
max_position_embeddings = 64
initializer_range = 0.125
"""


def test_a_swarm_with_a_subspace_learns_gossips_and_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    setup = build_setup(Scenario(seed=1, swarm=SwarmConfig(run=str(path), model="transformer", duration_s=36_000.0)))
    layout = setup.dimensions
    assert isinstance(layout, ModelLayout)
    # Codes of 6 and 4 bits of 32 numbers a token with a scale and a top, and the ids.
    assert tuple(hop_bytes(setup.run.pipeline, layout.width)) == (128 * 27 + 8 * 4 * 33, 128 * 19)

    def ended(world: World) -> tuple[list[Stage], int]:
        replicas = [peer.replica for peer in world.peers.values() if peer.replica is not None]
        stages = []
        for number in range(3):
            first = next(each for each in replicas if each.stage == number)
            stage = setup.build(number)
            assert isinstance(stage, Stage)
            stage.set_weights(first.rounds.state.slow)
            stages.append(stage)
        met = sum(int(each.statistics()["rounds.met"]) for each in replicas)
        return stages, met

    stages, met = simulate(setup, lambda _: [], ended)
    assert met > 6
    weights = [dict(zip(stage.names, stage.weights(), strict=True)) for stage in stages]
    ordinary = joined(layout.prepared.config, [layout.ordinary(number, each) for number, each in enumerate(weights)])
    ordinary.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.frombuffer(bytearray(b"    def __init__(self, name):\n        "), dtype=torch.uint8).long()[None]
    ids = ids[:, :32] + 3
    hidden = ids
    for stage in stages:
        hidden = stage.infer(hidden, ids)
    expected = loaded(input_ids=ids).logits
    assert torch.dist(hidden, expected) <= 1e-5 * expected.norm()
    loss = torch.nn.functional.cross_entropy(hidden[0, :-1], ids[0, 1:])
    assert loss.item() < 0.75 * log(384)
