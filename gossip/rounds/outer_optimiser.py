"""The outer step of one replica's slow weights: what it says of its weights, and the step that follows from a meeting.

Applies the rule of `outer_step` to a replica that trains on meanwhile. The heavy arithmetic runs where the shell wants
it. What came in a meeting is checked and kept as it came; nothing moves, and the step may still be thrown away.
`correct` then moves the slow weights and what the codec owes, in place (`piecewise_step`), and the fast ones. Whoever
may be cancelled calls it through `to_the_end`: all move, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.codec import Coded, Encoded, Feedback, Sides, check, encode
from gossip.exchange.formats import absolute
from gossip.exchange.influence import InfluenceBound, check_alike, measure
from gossip.exchange.int4_step import common_steps
from gossip.exchange.swap import Compute, norm, probe_coordinates
from gossip.interface import GossipReplica, RoundSettings
from gossip.rounds.piecewise_step import Owed, Rule, Step, take_step
from gossip.rounds.weights_lock import WeightsLock
from gossip.rule.meeting_shares import EVEN, Shares, shares_by_steps
from gossip.rule.outer_step import OuterState, Tensors

Steps = tuple[float, ...]
"""Of int4, one a parameter; empty in other codecs."""


class Snapshot(NamedTuple):
    """A copy of the fast weights, and the inner steps that the replica had taken by then."""

    fast: Tensors
    inner_steps: int


class OuterOptimiser:
    """Slow weights and momentum of one replica, and what may be done with them.

    `version`: the number of outer steps taken here, so another one whenever the slow weights are others. `weights`: the
    lock under which they move. `partners`: the other replicas.
    """

    def __init__(
        self,
        settings: RoundSettings,
        state: OuterState,
        replica: GossipReplica,
        compute: Compute,
        partners: Callable[[], Sized] = tuple,
    ) -> None:
        self._rule, self._codec = Rule(settings.outer, settings.delay, settings.fixed), settings.codec
        self._weighs = settings.weigh_by_steps
        self._replica = replica
        self._compute, self._partners = compute, partners
        self._coordinates = probe_coordinates(settings.seed, [tensor.numel() for tensor in state.slow])
        self._owed = self._nothing_owed()
        self._state = _of_rule(state, settings.outer.alpha)
        self.weights = WeightsLock()
        self._fast_bound, self._slow_bound = InfluenceBound(), InfluenceBound()
        """Of the fast and of the slow weights that partners bring."""
        self.version = 0

    @property
    def state(self) -> OuterState:
        """The state as it is: its tensors move with the next step."""
        return self._state

    def _nothing_owed(self) -> Owed:
        return Owed(Feedback(self._codec), Feedback(self._codec))

    @property
    def needs_slow(self) -> bool:
        """Whether the partner's slow weights are needed: where gamma = beta they cancel."""
        return self._rule.outer.gamma != self._rule.outer.beta

    async def snapshot(self, inner_steps: int) -> Snapshot:
        """Copy the fast weights, in a pause."""
        return Snapshot(_contiguous(await self._replica.snapshot()), inner_steps)

    # What is said.

    def slow_probe(self) -> Tensor:
        """Return the slow weights, with what is owed of them, at the coordinates that both sides know."""
        return self._owed.slow.probe(self.state.slow, self._coordinates)

    def fast_probe(self, snapshot: Snapshot) -> Tensor | None:
        """Return the snapshot likewise; None where the codec needs no probe of it."""
        if not self._codec.is_modular:
            return None
        return self._owed.fast.probe(snapshot.fast, self._coordinates)

    def steps(self, mine: Tensor | None, theirs: Tensor | None) -> Steps:
        """Return the steps of int4 that follow from two probes, the same on both sides."""
        if not self._codec.is_modular or mine is None or theirs is None:
            return ()
        return common_steps(mine, theirs, [len(indices) for indices in self._coordinates])

    def shares(self, own_steps: int, their_steps: int) -> Shares:
        """Return what the two sides count in the mean, given the inner steps that each brings."""
        return shares_by_steps(own_steps, their_steps) if self._weighs else EVEN

    async def encode_fast(self, snapshot: Snapshot, steps: Steps) -> Encoded:
        """Return the snapshot as it travels."""
        return await self._compute(encode, self._codec, snapshot.fast, self._owed.fast.residual, steps)

    async def encode_slow(self, steps: Steps) -> Encoded:
        """Return the slow weights likewise: the same for the same steps, until the next outer step."""
        return await self._compute(encode, self._codec, self.state.slow, self._owed.slow.residual, steps)

    async def encode_absolute(self, snapshot: Snapshot) -> Encoded:
        """Return what somebody who adopts our weights gets: of its form, without what is owed."""
        return await self._compute(encode, absolute(self._codec), self._adopted(snapshot))

    def _adopted(self, snapshot: Snapshot) -> Tensors:
        """Return which of our weights are adopted, or replaced: the slow ones where they travel, else the fast ones."""
        return self.state.slow if self.needs_slow else snapshot.fast

    # What is heard. All raise Implausible where it cannot be right.

    async def hear_fast(self, wire: Tensors, snapshot: Snapshot, mine: Encoded) -> Sides:
        """Check the partner's fast weights, given what we have sent of ours."""
        return await self._compute(self._heard, wire, snapshot.fast, self._owed.fast, mine)

    async def hear_slow(self, wire: Tensors, mine: Encoded) -> Sides:
        """Check the partner's slow weights likewise."""
        return await self._compute(self._heard, wire, self.state.slow, self._owed.slow, mine)

    def _heard(self, wire: Tensors, own: Tensors, owed: Feedback, mine: Encoded) -> Sides:
        theirs = mine.coded._replace(wire=wire)
        check(theirs, own, owed, mine.norm)
        return Sides(mine.coded, theirs)

    async def bound_fast(self, partner: str, sides: Sides, snapshot: Snapshot) -> Sides:
        """Return what was heard with the part of it that counts; raise Implausible where none does."""
        owed, bound = self._owed.fast, self._fast_bound
        return await self._compute(self._bounded, bound, partner, sides, (snapshot.fast, owed), snapshot)

    async def bound_slow(self, partner: str, sides: Sides, snapshot: Snapshot) -> Sides:
        """Do likewise with slow weights; the snapshot says how far ours have come since."""
        owed, bound = self._owed.slow, self._slow_bound
        return await self._compute(self._bounded, bound, partner, sides, (self.state.slow, owed), snapshot)

    def _bounded(
        self, bound: InfluenceBound, partner: str, sides: Sides, ours: tuple[Tensors, Feedback], snapshot: Snapshot
    ) -> Sides:
        deviation = measure(sides.theirs, *ours, self.state.slow, snapshot.fast)
        return sides._replace(share=bound.share(partner, deviation, only=len(self._partners()) < 2))

    async def adopting(self, wire: Tensors, snapshot: Snapshot, *, alike: bool) -> Step:
        """Check weights that we are to adopt, and that they are like ours; return the step to them."""
        theirs = Coded(absolute(self._codec), wire)
        await self._compute(_check_absolute, theirs, self._adopted(snapshot), alike)
        return Step(snapshot.fast, adopts=theirs)

    # What follows from it.

    async def correct(self, step: Step) -> None:
        """Take a step, in a pause: move the slow weights, and add the correction to the fast ones."""
        async with self.weights.moving():
            await self._compute(self._take, step)
            await self._replica.correct(step.snapshot)

    def _take(self, step: Step) -> None:
        self._state = take_step(step, self._state, self._owed, self._rule)
        if step.adopts is not None:
            self._owed = self._nothing_owed()
        self.version += 1


def _check_absolute(theirs: Coded, own: Tensors, alike: bool) -> None:
    check(theirs, own, Feedback(theirs.form), norm(own))
    if alike:
        check_alike(theirs, own)


def _of_rule(state: OuterState, alpha: float) -> OuterState:
    """Return a state with a momentum if the rule has one: a missing one is zero."""
    slow, momentum, gathered = map(_contiguous, state[:3])
    if not alpha:
        return OuterState(slow)
    return OuterState(slow, momentum or tuple(map(torch.zeros_like, slow)), gathered, state.meetings)


def _contiguous(tensors: Tensors) -> Tensors:
    return tuple([tensor.detach().contiguous() for tensor in tensors])


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
