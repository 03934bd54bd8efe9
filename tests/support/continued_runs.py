"""A run that goes on from a checkpoint, and what its nodes are given: all of the model, or parts to fetch the rest."""

from pathlib import Path
from typing import Any

from checkpoints import listed, weights_section, write_model
from memory_swarms import Peer, recipe
from toy_gossip import at_once

from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import model_layout
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import WeightServer
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
ADAPTER = '[adapter]\nrank = 2\nbase = "float32"\n'


class Continued:
    """A run that goes on from a checkpoint. `more`: as in `memory_swarms.recipe`."""

    def __init__(self, directory: Path, *, own_tokenizer: bool = False, adapter: str = "", **more: Any) -> None:
        self.directory = directory
        self.model = write_model(directory / "checkpoint", sizes=SIZES, shard_size="3KB")
        plain = recipe(**{"steps": 40} | more).text
        section = weights_section(directory / "checkpoint")
        words = [directory / "checkpoint" / name for name in ("config.json", "tokenizer_config.json")]
        tokenizer = f'[data]\ntokenizer = "files"\n{listed("data.tokenizer_files", words)}'
        text = plain.replace("[pipeline]", f"{section}{tokenizer if own_tokenizer else ''}{adapter}[pipeline]")
        self.recipe = RunFileText(text, "the test's run file")
        self.layout = model_layout(self.recipe.run)
        self.hub: Any = SimNetwork()

    def whole(self) -> WeightStore:
        return WeightStore.whole(self.directory / "checkpoint", self.recipe.run.model.weights)

    def tokenizer(self, name: str) -> WeightStore:
        return WeightStore.filling(self.directory / f"{name}'s tokenizer", self.recipe.run.data.tokenizer_files)

    def owners_tokenizer(self) -> WeightStore:
        return WeightStore.whole(self.directory / "checkpoint", self.recipe.run.data.tokenizer_files)

    def peer(self, name: str, stage: int, store: WeightStore | None = None, **more: Any) -> Peer:
        store = store or WeightStore.filling(self.directory / name, self.recipe.run.model.weights)
        if self.recipe.run.data.tokenizer_files:
            more = {"tokenizer": self.tokenizer(name), **more}
        return Peer(
            self.hub,
            self.recipe,
            name,
            stage,
            first_weights=RunWeights(
                self.layout.prepared, self.layout.checkpoint, store, frozen=self.layout.adapter is not None
            ),
            **more,
        )

    async def bootstrap(self) -> None:
        network, schema = self.hub.network("bootstrap"), weight_exchange.SCHEMA
        await network.serve(weight_exchange.TOPIC, schema, WeightServer(self.whole(), at_once).serve)
        if self.recipe.run.data.tokenizer_files:
            server = WeightServer(self.owners_tokenizer(), at_once)
            await network.serve(weight_exchange.TOKENIZER_TOPIC, schema, server.serve)
