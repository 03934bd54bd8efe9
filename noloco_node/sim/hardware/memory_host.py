"""The machine of a simulated node: its disk, its text and its clock, in memory and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gossip.exchange.messages import ReplicaState
from gossip.transfer.chunks import CopyInMemory, HeldCopy
from noloco_node.data.blocks import run_blocks
from noloco_node.data.held_out_text import HeldOutText
from noloco_node.data.token_text import Prompts
from noloco_node.machine.interface import Host, Runner, StageModel, Text
from noloco_node.run.config import DataConfig, RunConfig
from noloco_node.storage.checkpoint import Checkpoint, EvaluatedCounters


class MemoryStore:
    """Implements `machine.interface.CheckpointArchive`. `present`: returns the last checkpoint that the peer saved."""

    def __init__(self, present: Callable[[], Checkpoint | None]) -> None:
        self._present = present
        self._aside: dict[int, Checkpoint] = {}

    async def served(self) -> int | None:
        present = self._present()
        return None if present is None else present.counters.stage

    async def load(self, stage: int) -> Checkpoint | None:
        """Return a copy of the last checkpoint of a stage, or None: a replica writes into what it goes on from."""
        present = self._present()
        found = present if present is not None and present.counters.stage == stage else self._aside.get(stage)
        if found is None:
            return None
        groups = found.tensors.items()
        return Checkpoint(found.counters, {group: tuple([each.clone() for each in kept]) for group, kept in groups})

    async def set_aside(self, own: int) -> None:
        """Keep the last checkpoint if it is of another stage than `own`."""
        present = self._present()
        if present is not None and present.counters.stage != own:
            self._aside[present.counters.stage] = present

    async def require_room(self, size_bytes: int) -> None:
        raise OSError("a simulated disk keeps no snapshots")

    async def keep(self, snapshot: Checkpoint) -> None:
        await self.require_room(0)

    async def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._aside))

    async def slow(self, stage: int) -> Checkpoint | None:
        kept = self._aside.get(stage)
        return None if kept is None else Checkpoint(kept.counters, {"slow": kept.tensors["slow"]})


class MemoryHost(Host):
    """The machine of a simulated node.

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
        line_s: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.device, self.checkpoints = device, disk
        self._build, self._open_text, self._save, self._line_s = build, open_text, save, line_s

    def build(self, stage: int) -> StageModel:
        return self._build(stage)

    async def open_text(self) -> Text:
        return await self._open_text()

    async def save(self, checkpoint: Checkpoint) -> str:
        groups = {name: tuple([tensor.clone() for tensor in group]) for name, group in checkpoint.tensors.items()}
        return await self._save(Checkpoint(checkpoint.counters, groups))

    async def hold(self, state: ReplicaState) -> HeldCopy:
        slow, momentum, optimiser, gathered = (
            tuple([tensor.clone() for tensor in tensors])
            for tensors in (state.slow, state.momentum, state.optimiser, state.gathered)
        )
        return CopyInMemory(replace(state, slow=slow, momentum=momentum, optimiser=optimiser, gathered=gathered))

    def unix_time(self) -> float:
        return asyncio.get_running_loop().time()

    def line_s(self, stage: int) -> float:
        return self._line_s[stage] if self._line_s else 0.0


class MemoryEvaluation:
    """Implements `noloco_node.machine.interface.EvaluationHost`; keeps no weights. `read`: returns held-out text."""

    def __init__(self, read: Callable[[], HeldOutText]) -> None:
        self._read = read
        self._best: float | None = None

    async def text(self) -> HeldOutText:
        return self._read()

    async def prompts(self) -> Prompts:
        return Prompts(DataConfig(), ())

    async def best_loss(self) -> float | None:
        return self._best

    async def keep(self, evaluated: Checkpoint) -> None:
        assert isinstance(evaluated.counters, EvaluatedCounters)
        self._best = evaluated.counters.held_out_loss


class BlockText:
    """A `noloco_node.machine.interface.Text` that reads where it stands: virtual time does not pass meanwhile."""

    def __init__(self, run: RunConfig, peer: str, vocabulary: int) -> None:
        self._blocks, self._batch = run_blocks(run, None, peer, vocabulary), run.pipeline.microbatch_size

    async def draw(self) -> Tensor:
        return self._blocks.next_batch(self._batch)

    def position(self) -> dict[str, Any]:
        return self._blocks.position()

    async def restore(self, position: Mapping[str, Any]) -> bool:
        """Go back to a position; False where it is of another text."""
        return self._blocks.restore(dict(position))

    def news(self) -> list[str]:
        return self._blocks.news()
