"""Held-out text in memory."""

import asyncio

from noloco_node.data.held_out_text import HeldOutText
from noloco_node.data.token_text import Prompts
from noloco_node.run.config import DataConfig
from noloco_node.storage.checkpoint import Checkpoint


class Held:
    """Held-out text in memory (`noloco_node.machine.interface.EvaluationHost`)."""

    def __init__(self, text: HeldOutText | Exception, *prompts: str) -> None:
        self._text, self.reads, self._prompts = text, 0, Prompts(DataConfig(), prompts)
        self.kept: list[Checkpoint] = []
        self.full = False
        self.unfit: Exception | None = None
        """What opening the prompts raises."""

    async def text(self) -> HeldOutText:
        self.reads += 1
        await asyncio.sleep(0.0)
        if isinstance(self._text, Exception):
            raise self._text
        return self._text

    async def prompts(self) -> Prompts:
        if self.unfit is not None:
            raise self.unfit
        return self._prompts

    async def best_loss(self) -> float | None:
        return min((each.counters.held_out_loss for each in self.kept), default=None)

    async def keep(self, evaluated: Checkpoint) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.kept.append(evaluated)
