"""An outer step in place: slow weights, momentum, what is owed and the snapshot move a piece at a time.

What came is checked before, and what both sent is decoded anew for each piece, so a step takes no memory but some
pieces. It cannot fail half-way for what a partner has sent. The snapshot becomes the correction.

With a lossy codec means and pull are taken over what *both* decode, or a pair that meets would drift apart. Only these:
the slow weights move from where they really are, and the correction starts at the real snapshot. Where a partner counts
in part, ours count as they are: in int4 its probe has set how coarsely ours were rounded, and that must not do what its
weights may not. Nothing is noted as sent then.

Each value goes through the same operations in the same order as in `gossip.rule.outer_step.step_pair`, and none of them
looks at another value: the pieces may be of any size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.codec import Coded, Feedback, Reader, Sides
from gossip.exchange.formats import Format
from gossip.exchange.quantise import PIECE, pieces, scratch
from gossip.rule.meeting_shares import EVEN, Shares
from gossip.rule.outer_step import Delay, Outer, OuterState, Tensors, mean_into, move


class Step(NamedTuple):
    """A step that may still be thrown away. `snapshot`: of the fast weights, which it uses up.

    `fast`: what both sides have sent; None where nobody was met. `slow`: likewise, None where the rule needs the fast
    ones only. `adopts`: the partner's weights, where ours were too stale to count; the others are None then.
    `shares`: what the two sides count in the means.
    """

    snapshot: Tensors
    fast: Sides | None = None
    slow: Sides | None = None
    adopts: Coded | None = None
    shares: Shares = EVEN

    @property
    def clipped(self) -> bool:
        """Whether less than all of what a partner sent counts."""
        return any(sides is not None and sides.share != 1.0 for sides in (self.fast, self.slow))


class Owed(NamedTuple):
    """What a codec has left out of the fast and of the slow weights."""

    fast: Feedback
    slow: Feedback


class Rule(NamedTuple):
    """The outer rule of a run. `fixed`: numbers of the tensors that it leaves exactly as they are."""

    outer: Outer
    delay: Delay
    fixed: frozenset[int] = frozenset()


def take_step(step: Step, state: OuterState, owed: Owed, rule: Rule, longest: int = PIECE) -> OuterState:
    """Take a step; return the state after it, in the same tensors. The snapshot holds the correction then.

    `longest`: values of a piece, a whole number of blocks.
    """
    if step.adopts is not None:
        return _adopt(step.adopts, step.snapshot, state, rule.fixed, longest)
    if step.fast is not None:
        owed.fast.begin(step.snapshot)
    if step.slow is not None:
        owed.slow.begin(state.slow)
    form = Format.FLOAT32 if step.fast is None else step.fast.theirs.form
    work, after = _Work(step, state, owed, rule, longest), state
    for number, slow in enumerate(state.slow):
        if number in rule.fixed:
            step.snapshot[number].zero_()
            continue
        for at in pieces(form, slow.numel(), longest):
            after = work.move(number, at)
    gathered = (state.gathered or work.gathered) if after.gathered else ()
    return OuterState(state.slow, state.momentum, gathered, after.meetings)


def _adopt(theirs: Coded, snapshot: Tensors, state: OuterState, fixed: frozenset[int], longest: int) -> OuterState:
    """Go on from the partner's weights. The momentum starts at zero: it spoke of weights that are left behind."""
    reader, memory = Reader(theirs, state.slow), scratch(state.slow, longest)
    for number, slow in enumerate(state.slow):
        if number in fixed:
            snapshot[number].zero_()
            continue
        for at in pieces(theirs.form, slow.numel(), longest):
            phi, fast = slow.view(-1)[at], snapshot[number].view(-1)[at]
            phi.copy_(reader.read(number, at, phi, memory))
            torch.sub(phi, fast, out=fast)
    for momentum in state.momentum:
        momentum.zero_()
    return OuterState(state.slow, state.momentum)


class _Work:
    """One step under way. `gathered`: what a momentum period gathers, where it has just begun."""

    def __init__(self, step: Step, state: OuterState, owed: Owed, rule: Rule, longest: int) -> None:
        self._step, self._state, self._owed, self._rule = step, state, owed, rule
        self._fast, self._slow = (None if sides is None else _Seen(sides, state.slow) for sides in step[1:3])
        self._near, self._own, self._fast_mean, self._slow_mean = (scratch(state.slow, longest) for _ in range(4))
        self.gathered: Tensors = ()
        if rule.delay.period > 1 and state.momentum and not state.gathered:
            self.gathered = tuple([torch.zeros_like(slow) for slow in state.slow])

    def move(self, number: int, at: slice) -> OuterState:
        """Move one piece; return its state."""
        slow, momentum, gathered, meetings = self._state
        fast, phi = self._step.snapshot[number].view(-1)[at], slow[number].view(-1)[at]
        before = OuterState((phi,), _part(momentum, number, at), _part(gathered, number, at), meetings)
        fast_mean, _ = self._mean(self._fast, self._owed.fast, self._step.snapshot, number, at, self._fast_mean)
        if self._slow is None:
            # Alone the mean is over one; in a pair the partner's slow weights cancel, or there would be some.
            alone = self._step.fast is None and self._rule.outer.gamma != self._rule.outer.beta
            slow_mean = (self._slow_mean[: len(phi)].copy_(phi),) if alone else None
            after = move(before, (fast_mean,), slow_mean, self._rule.outer, self._rule.delay)
        else:
            pair_mean, decoded = self._mean(self._slow, self._owed.slow, slow, number, at, self._slow_mean)
            seen = decoded.clone() if self._slow.lossy else phi
            after = move(before._replace(slow=(seen,)), (fast_mean,), (pair_mean,), self._rule.outer, self._rule.delay)
            if self._slow.lossy:
                phi.add_(seen).sub_(decoded)
        if after.gathered and self.gathered:
            self.gathered[number].view(-1)[at].copy_(after.gathered[0])
        torch.sub(phi, fast, out=fast)
        return after

    def _mean(
        self, seen: _Seen | None, owed: Feedback, weights: Tensors, number: int, at: slice, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean of what both decode of a piece of one set of weights, and what both decode of ours.

        Takes note of what ours owes then. `seen` None: there is no partner, and both are our own piece.
        """
        out = out[: at.stop - at.start]
        if seen is None:
            return out.copy_(weights[number].view(-1)[at]), out
        meant = owed.meant(weights, number, at, self._near)
        own, theirs = seen.read(number, at, meant, self._own, out)
        if seen.share != 1.0:
            own = self._own[: len(meant)].copy_(weights[number].view(-1)[at])
            theirs = torch.sub(theirs, meant, out=out).mul_(seen.share).add_(own)
        else:
            owed.settle(number, at, meant, own)
        mean_into(out, own, theirs, self._step.shares)
        return out, own


class _Seen:
    """Both sides' weights as both see them. Not `lossy`: ours are exact."""

    def __init__(self, sides: Sides, own: Tensors) -> None:
        form = sides.theirs.form
        self.lossy, self._modular, self.share = form is not Format.FLOAT32, form.is_modular, sides.share
        self._mine = Reader(sides.mine, own) if self.lossy else None
        self._theirs = Reader(sides.theirs, own)

    def read(self, number: int, at: slice, meant: Tensor, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return a piece of ours and of the partner's; `meant`: what ours were encoded from."""
        if self._modular:
            return self._theirs.read_both(number, at, meant, own, theirs)
        mine = meant if self._mine is None else self._mine.read(number, at, meant, own)
        return mine, self._theirs.read(number, at, meant, theirs)


def _part(tensors: Tensors, number: int, at: slice) -> Tensors:
    return (tensors[number].view(-1)[at],) if tensors else ()
