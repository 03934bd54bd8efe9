"""One replica's slow weights: snapshot, step, correct.

Applies the rule of `nesterov` to a replica that trains on meanwhile. The heavy arithmetic runs where the shell wants
it. A step is first computed from facts that do not change, and may still be thrown away; `correct` then moves the fast
weights and the slow ones. Whoever may be cancelled calls it through `to_the_end`: both move, or neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import NamedTuple

from gossip.exchange import Compute, probe, probe_coordinates
from gossip.messages import Weights
from gossip.nesterov import OuterState, Stepped, Tensors, step_alone, step_pair
from gossip.port import Replica, Settings


class Snapshot(NamedTuple):
    """A copy of the fast weights, and the inner steps that the replica had taken by then."""

    fast: Tensors
    inner_steps: int


class OuterOptimiser:
    """Slow weights and momentum of one replica, and what may be done with them."""

    def __init__(self, settings: Settings, state: OuterState, replica: Replica, compute: Compute) -> None:
        self._outer = settings.outer
        self._replica = replica
        self._compute = compute
        self._coordinates = probe_coordinates(settings.seed, [tensor.numel() for tensor in state.slow])
        self.state = state

    def __repr__(self) -> str:
        return f"<OuterOptimiser: {len(self.state.slow)} tensors, {self._outer}>"

    async def snapshot(self, inner_steps: int) -> Snapshot:
        """Copy the fast weights, in a pause."""
        return Snapshot(await self._replica.snapshot(), inner_steps)

    def weights(self, snapshot: Snapshot) -> Weights:
        """Return our side of an exchange: the slow weights travel only where the rule needs them."""
        needs_slow = self._outer.gamma != self._outer.beta
        return Weights(
            fast=snapshot.fast,
            slow=self.state.slow if needs_slow else (),
            probe=probe(self.state.slow, self._coordinates),
        )

    async def with_partner(self, mine: Weights, theirs: Weights) -> Stepped:
        """Compute the step of a pair; nothing moves yet."""
        return await self._compute(step_pair, self.state, mine.fast, theirs.fast, theirs.slow or None, self._outer)

    async def alone(self, snapshot: Snapshot) -> Stepped:
        """Compute a solo step; nothing moves yet."""
        return await self._compute(step_alone, self.state, snapshot.fast, self._outer)

    async def correct(self, stepped: Stepped) -> None:
        """Add the correction to the fast weights and replace the slow ones, in a pause."""
        await self._replica.correct(stepped.correction)
        self.state = stepped.state


async def to_the_end(work: Coroutine[None, None, None]) -> None:
    """Await `work` to its end even when cancelled: half corrected weights are worse than a late cancellation."""
    task = asyncio.create_task(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as late:
            cancelled = late
    task.result()
    if cancelled is not None:
        raise cancelled
