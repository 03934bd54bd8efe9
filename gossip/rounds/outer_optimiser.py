"""The outer step of one replica's slow weights: what it says of its weights, and the step that follows from a meeting.

Applies the rule of `outer_step` to a replica that trains on meanwhile. The heavy arithmetic runs where the shell
wants it. A step is first computed from facts that do not change, and may still be thrown away; `correct` then moves the
fast weights, the slow ones and what the codec owes. Whoever may be cancelled calls it through `to_the_end`: all move,
or nothing.

With a lossy codec means and pull are taken over what *both* decode, or a pair that meets would drift apart. Only these:
the slow weights move from where they really are, and the correction starts at the real snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.codec import Encoded, Feedback, common_steps, decode, encode
from gossip.exchange.formats import Format, absolute
from gossip.exchange.swap import Compute, check_norm, probe_coordinates
from gossip.interface import GossipReplica, RoundSettings
from gossip.rule.outer_step import OuterState, Stepped, Tensors, adopt, step_alone, step_pair

Steps = tuple[float, ...]
"""Of int4, one a parameter; empty in other codecs."""


class Snapshot(NamedTuple):
    """A copy of the fast weights, and the inner steps that the replica had taken by then."""

    fast: Tensors
    inner_steps: int


class Seen(NamedTuple):
    """Weights as both sides use them: decoded. `slow`: None where the rule needs the fast ones only."""

    fast: Tensors
    slow: Tensors | None


class Step(NamedTuple):
    """A step that may still be thrown away. `said`: our exact snapshot, and how the partner saw us; None if nobody did.

    `adopted`: it goes on from the partner's weights, so nothing is owed any more.
    """

    stepped: Stepped
    said: tuple[Tensors, Seen] | None = None
    adopted: bool = False


class OuterOptimiser:
    """Slow weights and momentum of one replica, and what may be done with them.

    `version`: the number of outer steps taken here, so another one whenever the slow weights are others.
    """

    def __init__(self, settings: RoundSettings, state: OuterState, replica: GossipReplica, compute: Compute) -> None:
        self._outer, self._delay, self._codec = settings.outer, settings.delay, settings.codec
        self._replica = replica
        self._compute = compute
        self._coordinates = probe_coordinates(settings.seed, [tensor.numel() for tensor in state.slow])
        self._owed_fast, self._owed_slow = Feedback(settings.codec), Feedback(settings.codec)
        self.state = state
        self.version = 0

    @property
    def needs_slow(self) -> bool:
        """Whether the partner's slow weights are needed: where gamma = beta they cancel."""
        return self._outer.gamma != self._outer.beta

    async def snapshot(self, inner_steps: int) -> Snapshot:
        """Copy the fast weights, in a pause."""
        return Snapshot(await self._replica.snapshot(), inner_steps)

    # What is said.

    def slow_probe(self) -> Tensor:
        """Return the slow weights, with what is owed of them, at the coordinates that both sides know."""
        return self._owed_slow.probe(self.state.slow, self._coordinates)

    def fast_probe(self, snapshot: Snapshot) -> Tensor | None:
        """Return the snapshot likewise; None where the codec needs no probe of it."""
        if not self._codec.is_modular:
            return None
        return self._owed_fast.probe(snapshot.fast, self._coordinates)

    def steps(self, mine: Tensor | None, theirs: Tensor | None) -> Steps:
        """Return the steps of int4 that follow from two probes, the same on both sides."""
        if not self._codec.is_modular or mine is None or theirs is None:
            return ()
        return common_steps(mine, theirs, [len(indices) for indices in self._coordinates])

    async def encode_fast(self, snapshot: Snapshot, steps: Steps) -> Encoded:
        """Return the snapshot as it travels, and as the partner will see it."""
        return await self._compute(encode, self._codec, snapshot.fast, self._owed_fast.residual, steps)

    async def encode_slow(self, steps: Steps) -> Encoded:
        """Return the slow weights likewise: the same for the same steps, until the next outer step."""
        return await self._compute(encode, self._codec, self.state.slow, self._owed_slow.residual, steps)

    async def encode_absolute(self, snapshot: Snapshot) -> Encoded:
        """Return what somebody who adopts our weights gets: of its form, without what is owed."""
        return await self._compute(encode, absolute(self._codec), self._adopted(snapshot))

    async def decode_absolute(self, wire: Tensors, snapshot: Snapshot) -> Tensors:
        """Return the weights to adopt; raises Implausible where they cannot be right."""
        return await self._compute(_decode, absolute(self._codec), wire, self._adopted(snapshot), (), ())

    def _adopted(self, snapshot: Snapshot) -> Tensors:
        """Return which of our weights are adopted, or replaced: the slow ones where they travel, else the fast ones."""
        return self.state.slow if self.needs_slow else snapshot.fast

    async def decode_fast(self, wire: Tensors, snapshot: Snapshot, steps: Steps) -> Tensors:
        """Return the partner's fast weights; raises Implausible where they cannot be right."""
        return await self._compute(_decode, self._codec, wire, snapshot.fast, self._owed_fast.residual, steps)

    async def decode_slow(self, wire: Tensors, steps: Steps) -> Tensors:
        """Return the partner's slow weights; raises Implausible where they cannot be right."""
        return await self._compute(_decode, self._codec, wire, self.state.slow, self._owed_slow.residual, steps)

    # What follows from it.

    async def with_partner(self, snapshot: Snapshot, mine: Seen, theirs: Seen) -> Step:
        """Compute the step of a pair; nothing moves yet."""
        stepped = await self._compute(self._pair, snapshot.fast, mine, theirs)
        return Step(stepped, None if self._codec is Format.FLOAT32 else (snapshot.fast, mine))

    def _pair(self, snapshot: Tensors, mine: Seen, theirs: Seen) -> Stepped:
        exact, seen = self.state, self.state if mine.slow is None else self.state._replace(slow=mine.slow)
        after = step_pair(seen, mine.fast, theirs.fast, theirs.slow, self._outer, self._delay)
        if self._codec is Format.FLOAT32:
            return after
        for number, (moved, correction) in enumerate(zip(after.state.slow, after.correction, strict=True)):
            if mine.slow is not None:
                moved.add_(exact.slow[number]).sub_(mine.slow[number])
            torch.sub(moved, snapshot[number], out=correction)
        return after

    async def alone(self, snapshot: Snapshot) -> Step:
        """Compute a solo step; nothing moves yet."""
        return Step(await self._compute(step_alone, self.state, snapshot.fast, self._outer, self._delay))

    async def adopting(self, snapshot: Snapshot, theirs: Tensors) -> Step:
        """Compute the step to a partner's weights; nothing moves yet."""
        stepped = await self._compute(adopt, self.state, snapshot.fast, theirs)
        return Step(stepped, adopted=True)

    async def correct(self, step: Step) -> None:
        """Add the correction to the fast weights and replace the slow ones, in a pause."""
        await self._replica.correct(step.stepped.correction)
        if step.said is not None:
            snapshot, seen = step.said
            await self._compute(self._owed_fast.settle, snapshot, seen.fast)
            if seen.slow is not None:
                await self._compute(self._owed_slow.settle, self.state.slow, seen.slow)
        elif step.adopted:
            self._owed_fast, self._owed_slow = Feedback(self._codec), Feedback(self._codec)
        self.state = step.stepped.state
        self.version += 1


def _decode(codec: Format, wire: Tensors, own: Tensors, residual: Tensors, steps: Sequence[float]) -> Tensors:
    """Decode and check. What int4 decodes is looked for around what we ourselves mean to send, as the probes are."""
    near = own
    if codec.is_modular and residual:
        near = tuple(torch.add(tensor, owed) for tensor, owed in zip(own, residual, strict=True))
    decoded = decode(codec, wire, near, steps)
    check_norm(decoded, own, f"weights in {codec}")
    return decoded


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
