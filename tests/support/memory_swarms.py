"""A whole swarm of production nodes in memory and virtual time: real tiny models, real routing, gates and rounds."""

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from gossip.transfer.assembly import ChunkStore
from noloco_node.journal import events
from noloco_node.machine.interface import EvaluationHost, FirstWeights, Reporter, Runner
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.replica import Replica
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.sim.hardware.memory_host import MemoryHost, MemoryStore
from noloco_node.sim.hardware.priced_stage import VirtualDevice
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.stage import Stage


def recipe(
    *,
    stages: int = 2,
    replicas: int = 1,
    steps: int = 20,
    window: int = 2,
    per_round: int = 5,
    architecture: str = "llama",
    codec: str = "float32",
    width: int = 16,
    layers: int = 0,
    extra: str = "",
) -> RunFileText:
    """A run of a model small enough for a test, of one layer a stage unless `layers` says another number.

    In float32 what travels is exact, and so is what a test may ask for.
    """
    layers = layers or stages
    sizes = {
        "llama": f"vocab_size = 32\nhidden_size = {width}\nintermediate_size = 24\nnum_hidden_layers = {layers}\n"
        "num_attention_heads = 2\nmax_position_embeddings = 16",
        "gpt2": f"vocab_size = 32\nn_embd = {width}\nn_layer = {layers}\nn_head = 2\nn_positions = 16",
    }[architecture]
    text = f"""
name = "test"
seed = 7
[model]
architecture = "{architecture}"
[model.sizes]
{sizes}
[pipeline]
stages = {stages}
replicas = {replicas}
sequence_length = 8
microbatch_size = 2
microbatches_per_step = {window}
codec = "{codec}"
[inner]
steps = {steps}
learning_rate = 0.01
warmup_steps = 2
[outer]
inner_steps_per_round = {per_round}
overlap_steps = {min(2, per_round - 1)}
{extra}
"""
    return RunFileText(text, "the test's run file")


class Text:
    """Random tokens in an order of (seed, peer); every draw is kept."""

    def __init__(self, run: Any, peer: str) -> None:
        self.failure: Exception | None = None
        self._shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length + 1)
        self._seed, self.drawn = Random(f"{run.seed}|{peer}").randrange(2**31), []

    async def draw(self) -> Tensor:
        if self.failure is not None:
            raise self.failure
        generator = torch.Generator().manual_seed(self._seed + len(self.drawn))
        tokens = torch.randint(32, self._shape, generator=generator)
        self.drawn.append(tokens)
        return tokens

    def position(self) -> dict[str, Any]:
        return {"drawn": len(self.drawn)}

    async def restore(self, position: Mapping[str, Any]) -> bool:
        while len(self.drawn) < position["drawn"]:
            self.drawn.append(torch.empty(0))
        return True

    def news(self) -> list[str]:
        return []


class Memory:
    """Snapshots in memory, which several peers may share. `refuses`: why there is no room for another one."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Checkpoint]] = {}
        self.refuses: Exception | None = None
        self.has_room = True
        self.reads = 0


class _Archive(MemoryStore):
    """Keeps snapshots in a test's own memory."""

    def __init__(self, present: Callable[[], Checkpoint | None], memory: Memory) -> None:
        super().__init__(present)
        self._memory = memory

    async def require_room(self, size_bytes: int) -> None:
        if not self._memory.has_room:
            raise OSError(28, f"{size_bytes} bytes have no room")

    async def keep(self, snapshot: Checkpoint) -> None:
        if self._memory.refuses is not None:
            raise self._memory.refuses
        self._memory.kept.setdefault(snapshot.counters.stage, []).append(snapshot)

    async def stages(self) -> tuple[int, ...]:
        return tuple(sorted({*await super().stages(), *self._memory.kept}))

    async def slow(self, stage: int) -> Checkpoint | None:
        self._memory.reads += 1
        return self._memory.kept[stage][-1] if stage in self._memory.kept else await super().slow(stage)


class _Host(MemoryHost):
    """Notes of which stages the state was copied. `chunk_store`: where a test wants one."""

    chunk_store: Callable[[int], ChunkStore] | None = None
    copied_stages: list[int]

    def partial_download(self, stage: int) -> ChunkStore | None:
        return None if self.chunk_store is None else self.chunk_store(stage)

    def prepare_text(self, stage: int) -> None:
        self.copied_stages.append(stage)


class Peer:
    def __init__(
        self,
        hub: SimNetwork,
        recipe: RunFileText,
        name: str,
        stage: int | None,
        job_s: float = 0.05,
        saved: Checkpoint | None = None,
        snapshots: Memory | None = None,
        keep: Callable[[int], ChunkStore] | None = None,
        moves: bool = False,
        first_weights: FirstWeights | None = None,
        tokenizer: WeightStore | None = None,
        device: Runner | None = None,
        evaluation: EvaluationHost | None = None,
        refresh_s: float = 0.2,
        **options: Any,
    ) -> None:
        self.name, self.leave = name, asyncio.Event()
        self.events: list[events.Event] = []
        self.said: list[str] = []
        self.saved = saved
        self.shelf = _Archive(lambda: self.saved, snapshots or Memory())
        self.text = Text(recipe.run, name)
        self.stages: list[Stage] = []
        self.plan = model_layout(recipe.run)
        self.stepped: tuple[Tensor, ...] = ()
        self.copied_stages: list[int] = []
        self.device = VirtualDevice(job_s) if device is None else device
        host = _Host(
            self.device,
            self.shelf,
            build=lambda number: self._build(recipe, number),
            open_text=self._open_text,
            save=self._save,
        )
        host.first_weights, host.tokenizer = first_weights, tokenizer
        host.chunk_store, host.copied_stages, host.evaluation = keep, self.copied_stages, evaluation
        self.node = Node(
            recipe,
            self.plan,
            hub.network(name),
            host,
            NodeOptions(
                stage=stage,
                moves=moves,
                linger_s=30.0,
                refresh_s=refresh_s,
                keep_snapshots=2 if snapshots else 0,
                **options,
            ),
            Reporter(record=self._record, say=self.said.append),
        )
        self.task = asyncio.create_task(self.node.live(self.leave), name=name)

    def _record(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.InnerStep):
            self.stepped = self.stages[-1].weights()

    def _build(self, recipe: RunFileText, number: int) -> Stage:
        self.stages.append(make_stage(recipe.run, self.plan, number, torch.device("cpu")))
        return self.stages[-1]

    async def _open_text(self) -> Text:
        return self.text

    async def _save(self, checkpoint: Checkpoint) -> str:
        self.saved = checkpoint
        return "memory"

    @property
    def replica(self) -> Replica:
        """What it trains; it has a stage by now."""
        assert self.node.replica is not None
        return self.node.replica

    @property
    def counters(self) -> Counters:
        """Those of its last checkpoint."""
        return self.saved.counters

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def ended(*peers: Peer, within_s: float = 600.0) -> None:
    """Wait until these have ended, without an error."""
    async with asyncio.timeout(within_s):
        await asyncio.gather(*[peer.task for peer in peers])


async def asked_to_leave(*peers: Peer, within_s: float = 300.0) -> None:
    """Ask these to leave, and wait until they have."""
    for peer in peers:
        peer.leave.set()
    await ended(*peers, within_s=within_s)


async def until(condition: Callable[[], bool], patience_s: float = 600.0) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - the time is virtual
            await asyncio.sleep(0.1)
