"""The source: a stage-0 peer turns text into microbatches and keeps a fixed number of them on their way.

One coroutine is one microbatch in flight: it draws tokens, stamps them with the progress of the run, and hands them
to its own worker as if they had come from outside. A refusal costs nothing but time: the same tokens are tried again,
because a sample that no gradient came back for has not been trained on. What comes back is counted; the sum over all
sources is the run's progress, and at 1 every source stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Protocol

from noloco_node.tasks import loop_s
from pipeline.messages import Gradient, Microbatch, Refused, Reply

if TYPE_CHECKING:
    from torch import Tensor

RETRY_S = 1.0
"""Pause before the same tokens are tried again after no stage would take them, where the refusal names none."""
LONGEST_RETRY_S = 30.0
"""Whatever a refusal names: the next stage may have healed, or other replicas."""


class Process(Protocol):
    """The worker's way in."""

    def __call__(self, microbatch: Microbatch, sender: str) -> Awaitable[Reply]: ...


class MicrobatchSource:
    """Draws tokens, sends microbatches and counts the samples whose gradient came back."""

    def __init__(
        self,
        draw: Callable[[], Awaitable[Tensor]],
        process: Process,
        progress: Callable[[int, float], float],
        *,
        samples: int = 0,
        prove: Callable[[str, int], None],
        me: str,
        budget_s: float,
        rng: Random,
        told: bool = False,
    ) -> None:
        """Hand in the callables.

        `draw`: the next tokens [batch, sequence + 1], int64. `process`: the worker's. `progress`: the run's progress,
        given this source's own samples so far, and when the last of them came back. `samples`: of an earlier life.
        `prove`: takes who computed the loss of how many samples. `budget_s`: how long one microbatch may travel.
        `told`: later stages have to know all ids.
        """
        self.samples = samples
        self.returned_s = loop_s()
        """When a gradient came back last, or we began."""
        self._draw, self._process, self._progress, self._prove = draw, process, progress, prove
        self._me, self._budget_s, self._rng, self._told = me, budget_s, rng, told

    async def run(self, in_flight: int) -> None:
        """Keep `in_flight` microbatches on their way until the run's token budget is used up."""
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(self._keep_sending())

    async def _keep_sending(self) -> None:
        while self._run_progress() < 1.0:
            tokens = await self._draw()
            while not await self._try(tokens):
                if self._run_progress() >= 1.0:
                    return

    def _run_progress(self) -> float:
        return self._progress(self.samples, self.returned_s)

    async def _try(self, tokens: Tensor) -> bool:
        microbatch = Microbatch(
            hidden=tokens[:, :-1],
            targets=tokens if self._told else tokens[:, 1:],
            progress=self._run_progress(),
            budget_s=self._budget_s,
        )
        match await self._process(microbatch, self._me):
            case Gradient(computed_by=signer):
                self.samples += len(tokens)
                self.returned_s = loop_s()
                self._prove(signer, len(tokens))
                return True
            case Refused(retry_after_s=retry_after_s):
                # The estimate is a stranger's: not a number reads as none.
                rest_s = min(retry_after_s, LONGEST_RETRY_S) if retry_after_s > 0.0 else RETRY_S
                await asyncio.sleep(rest_s * self._rng.uniform(0.8, 1.2))
                return False
