"""Attackers on weights that know the bounds: what they say is too near to be clipped, each in its own direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossip.exchange.codec import norm
from gossip.exchange.swap import CLIP
from noloco_node.machine.interface import StageModel
from tests.explorer.attacks import Attack, TamperedStage

Way = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""From a replica's weights and the run's first ones to a direction of any length."""


class Pushing(TamperedStage):
    """Knows the bounds: trains, follows the others so as to be near, and says a push more than it has.

    It measures its own step as its partners measure theirs, and its push is `REACH` of what is clipped.
    """

    REACH = 0.9

    def __init__(self, stage: StageModel, way: Way) -> None:
        super().__init__(stage)
        self._way = way
        self._first = self._begun = stage.weights()
        self._push = [torch.zeros_like(each) for each in self._first]

    def correct(self, delta: Sequence[Tensor], /) -> None:
        """Take what was learned from others without the push."""
        self._stage.correct([each + push for each, push in zip(delta, self._push, strict=True)])
        self._begun = self._stage.weights()

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return its own."""
        return self._stage.current_weights()

    def claimed(self) -> tuple[Tensor, ...]:
        """Say more than it has."""
        own = self._stage.weights()
        way = self._way(own, self._first)
        moved = norm(tuple([each - before for each, before in zip(own, self._begun, strict=True)]))
        length = self.REACH * CLIP * moved / max(norm(tuple(way)), 1e-9)
        self._push = [length * each for each in way]
        return tuple(each + push for each, push in zip(own, self._push, strict=True))


def pushes(way: Way) -> Callable[[], Attack]:
    """Return an attack by a push that is too short to be clipped."""
    return lambda: Attack(arithmetic=lambda stage: Pushing(stage, way))


def one_way(own: Sequence[Tensor], first: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the same direction each time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(each.shape, generator=generator) for each in own]


def any_way(own: Sequence[Tensor], first: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return another direction each time."""
    return [torch.randn(each.shape) for each in own]


def longer(own: Sequence[Tensor], first: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the direction of longer weights."""
    return own


def back(own: Sequence[Tensor], first: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the way back to the first weights."""
    return [old - new for old, new in zip(first, own, strict=True)]
