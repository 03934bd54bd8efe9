"""States large enough for some dozens of pieces, donors of them in a toy world, and what becomes of a copy."""

import asyncio
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from toy_gossip import Line, World, at_once

from gossip.exchange.messages import Manifest, Parts, Piece, ReplicaState, Section
from gossip.transfer.assembly import News, StateAssembly
from gossip.transfer.chunks import tensors_of
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import StateWanted, download_state

SHAPES = ((40, 256), (12,), (7, 3), (30, 256), (256,), ())
"""Two large tensors of many pieces, and small ones that are bundled."""
LIKE = tuple(torch.empty(shape, device="meta") for shape in SHAPES)
TERMS = DonorLimits(deadline_s=600.0, piece_s=200.0)


def drawn(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in SHAPES)


def state(seed: int = 1, **others: Any) -> ReplicaState:
    """A replica's whole state; another seed is another replica."""
    whole = ReplicaState(
        slow=drawn(seed),
        momentum=drawn(seed + 100),
        optimiser=drawn(seed + 200) + tuple(1.0 + tensor.square() for tensor in drawn(seed + 300)),
        round=6,
        inner_steps=170,
        progress=0.25,
        optimiser_steps=400,
        last_met=5,
    )
    return replace(whole, **others)


def of_parts(whole: ReplicaState, parts: Parts) -> ReplicaState:
    if parts is Parts.ALL:
        return whole
    return replace(whole, momentum=(), optimiser=(), gathered=(), meetings=0)


class Giving:
    """A donor of one state, which a test may replace, in a toy world."""

    def __init__(self, world: World, name: str, whole: ReplicaState, terms: DonorLimits = TERMS) -> None:
        self.whole, self.made = whole, 0
        self.donor = Donor(self._provide, at_once, SHAPES, terms)
        world.answerers[name] = self._answer

    async def _provide(self, parts: Parts) -> ReplicaState:
        await asyncio.sleep(0)
        self.made += parts is Parts.ALL
        return of_parts(self.whole, parts)

    async def _answer(self, line: Line) -> None:
        await self.donor.serve(line)


class Listening:
    """Counts the pieces that go over the lines of a world, and may cut donors off after so many."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {}
        self.manifests: list[Manifest] = []

    def __call__(self, sender: str, receiver: str, message: Any) -> Any:
        if isinstance(message, Piece):
            self.pieces[sender] = self.pieces.get(sender, 0) + 1
        if isinstance(message, Manifest):
            self.manifests.append(message)
        return message


def wanted(parts: Parts = Parts.ALL, deadline_s: float = 300.0) -> StateWanted:
    return StateWanted(parts=parts, like=LIKE, deadline_s=deadline_s)


def holding(news: list[News] | None = None) -> StateAssembly:
    return StateAssembly(LIKE, tell=news.append if news is not None else lambda _: None)


async def copy_from(
    world: World, order: list[str], held: StateAssembly | None = None, name: str = "new"
) -> ReplicaState:
    return await download_state(order, world.conversing(name), wanted(), at_once, held)


def same(one: ReplicaState, other: ReplicaState) -> bool:
    counters = ("round", "inner_steps", "progress", "optimiser_steps", "meetings", "last_met")
    return all(getattr(one, name) == getattr(other, name) for name in counters) and all(
        same_tensors(tensors_of(one, section), tensors_of(other, section)) for section in Section
    )


def same_tensors(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
