"""A machine in memory and virtual time, as a node sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from gossip.exchange.messages import ReplicaState
from gossip.transfer.assembly import ChunkStore
from gossip.transfer.held_copy import CopyInMemory, HeldCopy
from noloco_node.machine.interface import FirstWeights, Runner, SnapshotStore, StageModel, Text
from noloco_node.sim.hardware.memory_store import MemoryStore
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.weight_store import WeightStore


class MemoryHost:
    """Implements `noloco_node.machine.interface.Host`.

    Its time of day is the event loop's, it never sleeps, nobody knows how much memory is free, and what has come of a
    download is gone with the process. `line_s`: by stage; none where the line has no limit that the owner knows.
    """

    def __init__(
        self,
        device: Runner,
        disk: MemoryStore,
        *,
        build: Callable[[int], StageModel],
        open_text: Callable[[], Awaitable[Text]],
        save: Callable[[Checkpoint], Awaitable[str]],
        snapshots: SnapshotStore | None = None,
        first_weights: FirstWeights | None = None,
        tokenizer: WeightStore | None = None,
        line_s: Sequence[float] = (),
    ) -> None:
        self.device, self.former, self.snapshots = device, disk, snapshots
        self.first_weights, self.tokenizer = first_weights, tokenizer
        self.needs_bytes: list[int] = []
        self.graph_bytes: list[int] = []
        self.beside_bytes: list[int] = []
        self._build, self._open_text, self._save, self._line_s = build, open_text, save, line_s

    def build(self, stage: int) -> StageModel:
        return self._build(stage)

    def free_bytes(self, given_back: int = 0) -> int | None:
        return None

    def free_beside_bytes(self) -> int | None:
        return None

    def prepare_text(self, stage: int) -> None:
        pass

    async def open_text(self) -> Text:
        return await self._open_text()

    async def last_stage(self) -> int | None:
        return await self.former.served()

    async def load(self, stage: int) -> Checkpoint | None:
        return await self.former.load(stage)

    async def save(self, checkpoint: Checkpoint) -> str:
        groups = {name: tuple([tensor.clone() for tensor in group]) for name, group in checkpoint.tensors.items()}
        return await self._save(Checkpoint(checkpoint.counters, groups))

    async def hold(self, state: ReplicaState) -> HeldCopy:
        slow, momentum, optimiser, gathered = (
            tuple([tensor.clone() for tensor in tensors])
            for tensors in (state.slow, state.momentum, state.optimiser, state.gathered)
        )
        return CopyInMemory(replace(state, slow=slow, momentum=momentum, optimiser=optimiser, gathered=gathered))

    def partial_download(self, stage: int, weight_bytes: int) -> ChunkStore | None:
        return None

    def unix_time(self) -> float:
        return asyncio.get_running_loop().time()

    def asleep_s(self) -> float:
        return 0.0

    def line_s(self, stage: int) -> float:
        return self._line_s[stage] if self._line_s else 0.0
