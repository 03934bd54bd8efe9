"""Other methods in which replicas average with random ones, all in step.

`epidemic`: epidemic learning (arXiv 2310.01972): each pushes its weights to random others, and averages what came.
`gasloc`: GASLoC (arXiv 2606.11081, its rule from second-hand texts): gossip in pairs with a momentum on the weights
after the local steps.
"""

from __future__ import annotations

import asyncio
from random import Random

import torch

from gossip.rule.outer_step import Tensors
from research.laboratory.experiments.cell import Rule
from research.laboratory.experiments.hardware_model import exchange_s
from research.laboratory.methods.near_code import message_bytes, toward
from research.laboratory.methods.replicas import Swarm
from research.laboratory.methods.synchronous import groups, rounds, share_of, taken_since


async def epidemic(swarm: Swarm) -> None:
    """Push to random others, and take the mean of what came and one's own."""
    cell = swarm.cell
    drawing = Random(f"{cell.seed}|pushes")
    counted = [replica.steps for replica in swarm.replicas]
    async for _ in rounds(swarm):
        taken = taken_since(swarm, counted)
        held = [replica.stages[0].weights() for replica in swarm.replicas]
        sent = cell.pushes * message_bytes(held[0], cell.codec)
        await asyncio.sleep(exchange_s(sent, swarm.weight_bytes))
        for own, came in enumerate(pushed(drawing, cell.replicas, cell.pushes)):
            together = [own, *came]
            shares = [share_of(other, together, taken if cell.weighed else None) for other in came]
            mean = toward(held[own], [held[other] for other in came], shares, cell.codec)
            swarm.replicas[own].stages[0].set_weights(mean)
        _note(swarm, sent)


async def gasloc(swarm: Swarm) -> None:
    """Gossip in random pairs, each replica with a momentum of its own: alpha; beta is the outer rate."""
    cell = swarm.cell
    drawing = Random(f"{cell.seed}|groups")
    counted = [replica.steps for replica in swarm.replicas]
    starts = [replica.stages[0].weights() for replica in swarm.replicas]
    before = starts
    async for _ in rounds(swarm):
        taken = taken_since(swarm, counted)
        after = [
            proposed(start, replica.stages[0].weights(), cell.rule)
            for start, replica in zip(starts, swarm.replicas, strict=True)
        ]
        sent = message_bytes(after[0], cell.codec)
        await asyncio.sleep(exchange_s(sent, swarm.weight_bytes))
        starts = list(starts)
        for pair in groups(drawing, cell.replicas, 2):
            for own, other in (pair, pair[::-1]):
                share = share_of(other, pair, taken if cell.weighed else None)
                mean = toward(after[own], [after[other]], [share], cell.codec)
                starts[own] = accelerated(mean, after[own], before[own], cell.rule)
                swarm.replicas[own].stages[0].set_weights(starts[own])
        before = after
        _note(swarm, sent)


def proposed(start: Tensors, arrived: Tensors, rule: Rule) -> Tensors:
    """Return where the local steps lead at the outer rate."""
    return tuple(torch.lerp(begin, end, rule.beta) for begin, end in zip(start, arrived, strict=True))


def accelerated(mean: Tensors, after: Tensors, before: Tensors, rule: Rule) -> Tensors:
    """Return a mean, moved on by a share of what the weights after the local steps have moved since the last round."""
    return tuple(
        torch.add(middle, torch.sub(now, then), alpha=rule.alpha)
        for middle, now, then in zip(mean, after, before, strict=True)
    )


def pushed(drawing: Random, replicas: int, pushes: int) -> list[list[int]]:
    """Return who has pushed to each replica, everybody to as many others."""
    came: list[list[int]] = [[] for _ in range(replicas)]
    for sender in range(replicas):
        others = [one for one in range(replicas) if one != sender]
        for receiver in drawing.sample(others, pushes):
            came[receiver].append(sender)
    return came


def _note(swarm: Swarm, sent: float) -> None:
    for replica in swarm.replicas:
        replica.sent_bytes += sent
        replica.rounds += 1
