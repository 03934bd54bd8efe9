"""The outer step of one replica's slow weights: what it says of its weights, what it hears, and the step in place.

`OuterOptimiser` applies the rule of `gossip.rule.outer_step` to a replica that trains on meanwhile; heavy arithmetic
runs on the node's thread. Nothing moves, and the step may still be thrown away, until `take` moves the slow weights.
`take` may run while the replica trains: it touches no fast weights. `correct` then adds the correction to the fast
ones, in a pause. The caller keeps readers out meanwhile (`gossip.rounds.weights_lock`), and awaits both to their end
even if it is cancelled.

`take_step` moves slow weights, momentum and the snapshot a piece at a time, and decodes what both sent anew for each
piece: it cannot fail half-way for what a partner has sent. The snapshot becomes the correction. Each value goes through
the same operations in the same order as in `research.theory.pair_step`, so the pieces may be of any size.
A side that adopts has no correction: its new slow weights replace the fast ones, since a difference from weights that
may be anywhere would be rounded too coarsely.

With a lossy codec the rule takes means and pull over what *both* sides decode, or a pair that meets would drift apart.
The slow weights still move from their exact values. The correction is what the rule yields of decoded weights: slow
ones after the step minus the snapshot. So what rounding has left out of the snapshot stays in the fast weights and goes
out with the next one, and what it has done to slow weights is taken back there. Snapshot and correction are bfloat16
differences then; what that rounds away from the snapshot stays in the fast weights likewise. Where a partner counts
only in part, our own weights enter exactly: in int4 the partner's probe decides how coarsely ours are rounded, and that
rounding could move us farther than the bound allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange import kernels
from gossip.exchange.codec import PIECE, Coded, Encoded, OwnWeights, Reader, Sides, check, encode, pieces, scratch
from gossip.exchange.swap import InfluenceBound, common_steps, measure, probe_coordinates
from gossip.interface import Candidate, Compute, GossipReplica
from gossip.rule.outer_step import EVEN, Delay, Outer, OuterState, Shares, Tensors, mean_into, move, shares_by_steps
from gossip.settings import Format, OuterConfig, absolute


class Snapshot(NamedTuple):
    """The fast weights at a moment, and the inner steps that the replica had taken by then.

    `fast`: a copy where the codec is exact; else a difference from the slow weights, which move with the next step.
    `round_fraction`: the inner steps since our last outer step over those of the fastest replica in a round, at most 1.
    """

    fast: OwnWeights
    inner_steps: int
    round_fraction: float = 1.0


class Step(NamedTuple):
    """A step that may still be thrown away. `snapshot`: of the fast weights, whose memory becomes the correction; the
    base of a difference is the slow weights that the step moves.

    `fast`: what both sides have sent; None where nobody was met. `slow`: likewise, None where the rule needs the fast
    ones only. `adopts`: the partner's weights, where ours were too stale to count; the others are None then.
    `shares`: what the two sides count in the means.
    """

    snapshot: OwnWeights
    fast: Sides | None = None
    slow: Sides | None = None
    adopts: Coded | None = None
    shares: Shares = EVEN

    @property
    def correction(self) -> Tensors:
        """The snapshot's own memory, which holds the correction after the step."""
        return self.snapshot.difference or self.snapshot.base

    @property
    def clipped(self) -> bool:
        """Whether less than all of what a partner sent counts."""
        return any(sides is not None and sides.share != 1.0 for sides in (self.fast, self.slow))


class Rule(NamedTuple):
    """The outer rule of a run. `fixed`: numbers of the tensors that it leaves exactly as they are."""

    outer: Outer
    delay: Delay
    fixed: frozenset[int] = frozenset()


class OuterOptimiser:
    """Slow weights and momentum of one replica.

    `version`: the number of outer steps taken here; it changes with the slow weights. `seed`: of the run. `fixed`:
    numbers of the tensors that no round moves. `from_zero`: the others were zero at first. `partners`: the other
    replicas.
    """

    def __init__(
        self,
        settings: OuterConfig,
        state: OuterState,
        replica: GossipReplica,
        compute: Compute,
        *,
        seed: int,
        fixed: frozenset[int] = frozenset(),
        from_zero: bool = False,
        partners: Callable[[], Collection[Candidate]] = tuple,
    ) -> None:
        outer = Outer(settings.alpha, settings.beta, settings.gamma)
        self._rule = Rule(outer, Delay(settings.momentum_period, settings.momentum_spread), fixed)
        self._codec = settings.codec
        self._weighs = settings.weigh_by_steps
        self._replica, self._from_zero = replica, from_zero
        self._compute, self._partners = compute, partners
        self._coordinates = probe_coordinates(seed, [tensor.numel() for tensor in state.slow])
        self.state = _of_rule(state, settings.alpha)  # its tensors move with the next step
        self._fast_bound, self._slow_bound = (InfluenceBound(from_zero=from_zero) for _ in range(2))
        """Of the fast and of the slow weights that partners bring."""
        self.version = 0

    @property
    def needs_slow(self) -> bool:
        """Whether the partner's slow weights are needed: where gamma = beta they cancel."""
        return self._rule.outer.gamma != self._rule.outer.beta

    async def snapshot(self, inner_steps: int, round_fraction: float = 1.0) -> Snapshot:
        slow = () if self._codec is Format.FLOAT32 else self.state.slow
        taken = _contiguous(await self._replica.snapshot(slow))
        return Snapshot(OwnWeights(slow, taken) if slow else OwnWeights(taken), inner_steps, round_fraction)

    # What we send.

    def slow_probe(self) -> Tensor:
        """Return the slow weights at the coordinates that both sides know."""
        return OwnWeights(self.state.slow).probe(self._coordinates)

    def fast_probe(self, snapshot: Snapshot) -> Tensor | None:
        """Return the snapshot likewise; None where the codec needs no probe of it."""
        if not self._codec.is_modular:
            return None
        return snapshot.fast.probe(self._coordinates)

    def steps(self, mine: Tensor | None, theirs: Tensor | None) -> tuple[float, ...]:
        """Return the steps of int4 that follow from two probes, one a parameter, the same on both sides; else none."""
        if not self._codec.is_modular or mine is None or theirs is None:
            return ()
        return common_steps(mine, theirs, [len(indices) for indices in self._coordinates])

    def shares(self, own_steps: int, their_steps: int) -> Shares:
        """Return what the two sides count in the mean, given the inner steps that each brings."""
        return shares_by_steps(own_steps, their_steps) if self._weighs else EVEN

    async def encode_fast(self, snapshot: Snapshot, steps: tuple[float, ...]) -> Encoded:
        return await self._compute(encode, self._codec, snapshot.fast, steps)

    async def encode_slow(self, steps: tuple[float, ...]) -> Encoded:
        """Return the slow weights likewise: the same for the same steps, until the next outer step."""
        return await self._compute(encode, self._codec, OwnWeights(self.state.slow), steps)

    async def encode_absolute(self, snapshot: Snapshot) -> Encoded:
        """Return what a partner that adopts our weights gets: in the absolute form."""
        return await self._compute(encode, absolute(self._codec), self._adopted(snapshot))

    def _adopted(self, snapshot: Snapshot) -> OwnWeights:
        """Return the weights that are adopted or replaced: the slow ones where they travel, else the fast ones."""
        return OwnWeights(self.state.slow) if self.needs_slow else snapshot.fast

    # What the partner sent. All raise Implausible where it cannot be right.

    async def hear_fast(self, wire: Tensors, snapshot: Snapshot, mine: Encoded) -> Sides:
        """Check the partner's fast weights, given what we have sent of ours."""
        return await self._compute(self._heard, wire, snapshot.fast, mine)

    async def hear_slow(self, wire: Tensors, mine: Encoded) -> Sides:
        return await self._compute(self._heard, wire, OwnWeights(self.state.slow), mine)

    def _heard(self, wire: Tensors, own: OwnWeights, mine: Encoded) -> Sides:
        theirs = mine.coded._replace(wire=wire)
        check(theirs, own, mine.norm)
        return Sides(mine.coded, theirs)

    async def bound_fast(self, partner: str, sides: Sides, snapshot: Snapshot) -> Sides:
        """Return both sides with the share of the partner's that counts.

        Raises Implausible where none does, another ConnectionAbortedError where either side may be behind.
        """
        return await self._bounded(self._fast_bound, snapshot.fast, partner, sides, snapshot)

    async def bound_slow(self, partner: str, sides: Sides, snapshot: Snapshot) -> Sides:
        """Do likewise with slow weights; the snapshot says how far ours have come since."""
        ours = OwnWeights(self.state.slow)
        return await self._bounded(self._slow_bound, ours, partner, sides, snapshot)

    async def _bounded(
        self, bound: InfluenceBound, ours: OwnWeights, partner: str, sides: Sides, snapshot: Snapshot
    ) -> Sides:
        only = self._is_only(partner)

        def share() -> float:
            deviation = measure(sides.theirs, ours, self.state.slow, snapshot.fast)
            return bound.share(partner, deviation, round_fraction=snapshot.round_fraction, only=only)

        return sides._replace(share=await self._compute(share))

    def _is_only(self, partner: str) -> bool:
        """Say whether no other partner is listed. A partner that lists itself nowhere is not the only one for that.

        Asked before a computation, whose thread must not read the roster.
        """
        return all(each.peer == partner for each in self._partners())

    async def adopting(self, partner: str, wire: Tensors, snapshot: Snapshot, *, disowned: bool) -> Step:
        """Check a partner's weights that we are to adopt; return the step to them.

        `disowned`: ours are known to be worth nothing. Raises another ConnectionAbortedError than Implausible where the
        partner may be right, and we do not follow.
        """
        theirs = Coded(absolute(self._codec), wire)
        own, fast, only = self._adopted(snapshot), snapshot.fast, self._is_only(partner)

        def check_theirs() -> None:
            check(theirs, own, own.norm())
            if not disowned:
                deviation = measure(theirs, fast, self.state.slow, fast)
                self._fast_bound.check_adopted(deviation, only=only)

        await self._compute(check_theirs)
        return Step(fast, adopts=theirs)

    # The step.

    async def take(self, step: Step) -> Tensors | None:
        """Move the slow weights; return the correction of the fast ones, in the memory of the step's snapshot.

        None: the slow weights, which are a partner's, take the place of the fast ones.
        """
        await self._compute(self._take, step)
        return step.correction if step.adopts is None else None

    async def correct(self, correction: Tensors | None) -> None:
        """Correct the fast weights by what `take` has returned, in a pause."""
        if correction is None:
            await self._replica.replace(self.state.slow)
        else:
            await self._replica.correct(correction)

    def _take(self, step: Step) -> None:
        self.state = take_step(step, self.state, self._rule)
        self.version += 1


def _of_rule(state: OuterState, alpha: float) -> OuterState:
    """Return a state with a momentum if the rule has one: a missing one is zero."""
    slow, momentum, gathered = map(_contiguous, state[:3])
    if not alpha:
        return OuterState(slow)
    return OuterState(slow, momentum or tuple(map(torch.zeros_like, slow)), gathered, state.meetings)


def _contiguous(tensors: Tensors) -> Tensors:
    return tuple([tensor.detach().contiguous() for tensor in tensors])


def take_step(step: Step, state: OuterState, rule: Rule, longest: int = PIECE) -> OuterState:
    """Take a step; return the state after it, in the same tensors. The snapshot's memory holds the correction then.

    `longest`: values of a piece, a whole number of blocks.
    """
    if step.adopts is not None:
        return _adopt(step.adopts, state, rule.fixed, longest)
    form = Format.FLOAT32 if step.fast is None else step.fast.theirs.form
    work, after = _Work(step, state, rule, longest), state
    for number, slow in enumerate(state.slow):
        if number in rule.fixed:
            step.correction[number].zero_()
            continue
        if (moved := work.move_compiled(number)) is None:
            for at in pieces(form, slow.numel(), longest):
                moved = work.move(number, at)
        after = moved or after
    gathered = (state.gathered or work.gathered) if after.gathered else ()
    return OuterState(state.slow, state.momentum, gathered, after.meetings)


def _adopt(theirs: Coded, state: OuterState, fixed: frozenset[int], longest: int) -> OuterState:
    """Go on from the partner's weights. The momentum starts at zero: it spoke of weights that are left behind."""
    reader, memory = Reader(theirs, state.slow), scratch(state.slow, longest)
    for number, slow in enumerate(state.slow):
        if number in fixed:
            continue
        for at in pieces(theirs.form, slow.numel(), longest):
            phi = slow.view(-1)[at]
            phi.copy_(reader.read(number, at, phi, memory))
    for momentum in state.momentum:
        momentum.zero_()
    return OuterState(state.slow, state.momentum)


class _Work:
    """One step under way. `gathered`: new tensors for what a momentum period gathers, where one has just begun."""

    def __init__(self, step: Step, state: OuterState, rule: Rule, longest: int) -> None:
        self._step, self.state, self._rule = step, state, rule
        self._fast, self._slow = (None if sides is None else _BothSides(sides, state.slow) for sides in step[1:3])
        self._near, *memory = (scratch(state.slow, longest) for _ in range(5))
        self._fast_memory, self._slow_memory = memory[:2], memory[2:]
        self.gathered: Tensors = ()
        if rule.delay.period > 1 and state.momentum and not state.gathered:
            self.gathered = tuple([torch.zeros_like(slow) for slow in state.slow])

    def move_compiled(self, number: int) -> OuterState | None:
        """Do with a whole parameter what `move` does with its pieces; None where no compiled form does this step."""
        (slow, momentum, gathered, _), seen, outer = self.state, self._fast, self._rule.outer
        plain = not gathered and self._rule.delay.period == 1 and self._slow is None
        compiled = kernels.COMPILED if self._step.snapshot.difference else None
        if compiled is None or seen is None or not seen.whole or not plain:
            return None
        places = *self._step.snapshot.addresses(number), momentum[number].data_ptr() if momentum else None
        compiled.kernels_step(*places, *seen.theirs.arguments(number), *self._step.shares, outer.alpha, outer.beta)
        return OuterState(slow, momentum)

    def move(self, number: int, at: slice) -> OuterState:
        slow, momentum, gathered, meetings = self.state
        phi = slow[number].view(-1)[at]
        before = OuterState((phi,), _part(momentum, number, at), _part(gathered, number, at), meetings)
        fast_mean, sent = self._mean(self._fast, self._step.snapshot, number, at, *self._fast_memory)
        moved = phi
        if self._slow is None:
            # Alone the mean is over one; in a pair the partner's slow weights cancel, or there would be some.
            alone = self._step.fast is None and self._rule.outer.gamma != self._rule.outer.beta
            slow_mean = (self._slow_memory[0][: len(phi)].copy_(phi),) if alone else None
            after = move(before, (fast_mean,), slow_mean, self._rule.outer, self._rule.delay)
        else:
            pair_mean, decoded = self._mean(self._slow, OwnWeights(slow), number, at, *self._slow_memory)
            if self._slow.lossy:
                moved = decoded.clone()
            after = move(before._replace(slow=(moved,)), (fast_mean,), (pair_mean,), self._rule.outer, self._rule.delay)
            if self._slow.lossy:
                phi.add_(moved).sub_(decoded)
        if after.gathered and self.gathered:
            self.gathered[number].view(-1)[at].copy_(after.gathered[0])
        torch.sub(moved, sent, out=self._step.correction[number].view(-1)[at])
        return after

    def _mean(
        self, seen: _BothSides | None, weights: OwnWeights, number: int, at: slice, own: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean of what both decode of a piece of one set of weights, and what both decode of ours.

        `seen` None: there is no partner, and both are our own piece.
        """
        exact, out = weights.read(number, at, self._near), out[: at.stop - at.start]
        if seen is None:
            return out.copy_(exact), exact
        sent, theirs = seen.read(number, at, exact, own, out)
        if seen.share != 1.0:
            sent = own[: len(exact)].copy_(exact)
            theirs = torch.sub(theirs, exact, out=out).mul_(seen.share).add_(exact)
        return mean_into(out, sent, theirs, self._step.shares), sent


class _BothSides:
    """Both sides' weights as both see them. Not `lossy`: ours are exact. `whole`: in int4, and all of it counts."""

    def __init__(self, sides: Sides, own: Tensors) -> None:
        form = sides.theirs.form
        self.lossy, self._modular, self.share = form is not Format.FLOAT32, form.is_modular, sides.share
        self.whole = self._modular and self.share == 1.0
        self._mine = Reader(sides.mine, own) if self.lossy else None
        self.theirs = Reader(sides.theirs, own)

    def read(self, number: int, at: slice, exact: Tensor, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return a piece of ours and of the partner's; `exact`: what ours were encoded from."""
        if self._modular:
            return self.theirs.read_both(number, at, exact, own, theirs)
        mine = exact if self._mine is None else self._mine.read(number, at, exact, own)
        return mine, self.theirs.read(number, at, exact, theirs)


def _part(tensors: Tensors, number: int, at: slice) -> Tensors:
    return (tensors[number].view(-1)[at],) if tensors else ()
