"""The methods that send a part of the weights at a time: so a little travels often, rather than all now and then.

A round's inner steps are divided among as many parts as there are fragments of the weights; after each part one
fragment is sent, the next one after the next. So each fragment is sent once a round.

`streaming`: Streaming DiLoCo (arXiv 2501.18512), the outer rule on the mean over all replicas of one fragment; it
arrives a few inner steps later, and is mixed with the local weights of then.
`shards`: each fragment is averaged with a partner of its own, drawn anew; with one fragment, plain gossip in pairs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random

import torch

from gossip.rule.outer_step import Tensors
from research.laboratory.experiments.hardware_model import all_reduce, exchange_s
from research.laboratory.methods.coded_mean import CodedMean
from research.laboratory.methods.near_code import message_bytes, toward
from research.laboratory.methods.replicas import Replica, Swarm
from research.laboratory.methods.server_rules import Server, begin, heavy_ball, nesterov
from research.laboratory.methods.synchronous import groups, own_steps, share_of, taken_since
from research.theory.pair_step import pseudo_gradient


async def streaming(swarm: Swarm) -> None:
    """Take outer steps on the mean over all replicas, a fragment at a time, while they train on."""
    cell = swarm.cell
    rule = nesterov if cell.rule.lookahead else heavy_ball
    constants = Server(rate=cell.rule.beta, momentum=cell.rule.alpha)
    pieces = _fragments_of(swarm)
    states = [begin(_taken(swarm.replicas[0], piece)) for piece in pieces]
    means = [CodedMean([state.weights], cell) for state in states]
    costs = [all_reduce(cell.replicas, swarm.weight_bytes, mean.sent_bytes) for mean in means]
    counted = [[0] * cell.replicas for _ in pieces]
    on_its_way: int | None = None

    async def arrive(number: int) -> None:
        for replica in swarm.replicas:
            mixed = zip(_taken(replica, pieces[number]), states[number].weights, strict=True)
            _put(replica, pieces[number], tuple(torch.lerp(far, local, cell.mixing) for local, far in mixed))

    for number, steps in _parts_of_rounds(swarm):
        first = [min(cell.overlap, own) for own in steps]
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.0 if on_its_way is None else costs[on_its_way][0]))
            group.create_task(_train(swarm, first))
        if on_its_way is not None:
            await arrive(on_its_way)
        await _train(swarm, [own - done for own, done in zip(steps, first, strict=True)])
        brought = [[pseudo_gradient(states[number].weights, _taken(one, pieces[number]))] for one in swarm.replicas]
        weights = taken_since(swarm, counted[number])
        (gradient,) = means[number].of(brought, weights if cell.weighed and any(weights) else None)
        states[number] = rule(states[number], gradient, constants)
        on_its_way = number
        _note(swarm, costs[number][1], len(pieces))
        if not cell.overlap:
            await asyncio.sleep(costs[number][0])
            await arrive(number)
            on_its_way = None
    if on_its_way is not None:
        await arrive(on_its_way)


async def shards(swarm: Swarm) -> None:
    """Average a fragment at a time, with a partner of its own; all wait for all."""
    cell = swarm.cell
    drawing = Random(f"{cell.seed}|groups")
    pieces = _fragments_of(swarm)
    counted = [[0] * cell.replicas for _ in pieces]
    for number, steps in _parts_of_rounds(swarm):
        await _train(swarm, steps)
        held = [_taken(replica, pieces[number]) for replica in swarm.replicas]
        taken, sent = taken_since(swarm, counted[number]), message_bytes(held[0], cell.codec)
        await asyncio.sleep(exchange_s(sent, swarm.weight_bytes))
        for pair in groups(drawing, cell.replicas, 2):
            for own, other in (pair, pair[::-1]):
                share = share_of(other, pair, taken if cell.weighed else None)
                _put(swarm.replicas[own], pieces[number], toward(held[own], [held[other]], [share], cell.codec))
        _note(swarm, sent, len(pieces))


def fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return which parameters belong to each fragment: whole ones, in order, as much in each as they allow."""
    found: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for number, size in enumerate(sizes):
        found[(2 * before + size) * count // (2 * sum(sizes))].append(number)
        before += size
    return [piece for piece in found if piece]


def parts(steps: int, count: int) -> list[int]:
    """Return inner steps divided into so many parts, as equal as whole steps can be."""
    return [steps * (number + 1) // count - steps * number // count for number in range(count)]


def _fragments_of(swarm: Swarm) -> list[list[int]]:
    (weights,) = swarm.replicas[0].weights()
    return fragments([tensor.numel() for tensor in weights], swarm.cell.fragments)


def _parts_of_rounds(swarm: Swarm) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of a fragment, and the inner steps of each replica before it is sent, until the budget ends."""
    count = len(_fragments_of(swarm))
    while swarm.left > 0:
        steps = swarm.steps_of_round()
        divided = [parts(own_steps(swarm, replica, steps), count) for replica in swarm.replicas]
        for number in range(count):
            if swarm.left > 0:
                yield number, [own[number] for own in divided]


async def _train(swarm: Swarm, steps: Sequence[int]) -> None:
    """Let each replica take so many inner steps; all wait for all."""
    async with asyncio.TaskGroup() as group:
        for replica, own in zip(swarm.replicas, steps, strict=True):
            group.create_task(swarm.train(replica, own))


def _taken(replica: Replica, piece: Sequence[int]) -> Tensors:
    weights = replica.stages[0].weights()
    return tuple(weights[number] for number in piece)


def _put(replica: Replica, piece: Sequence[int], values: Tensors) -> None:
    weights = list(replica.stages[0].weights())
    for number, tensor in zip(piece, values, strict=True):
        weights[number] = tensor
    replica.stages[0].set_weights(weights)


def _note(swarm: Swarm, sent: float, count: int) -> None:
    """Count what has been sent, and the part of a round that it was."""
    for replica in swarm.replicas:
        replica.sent_bytes += sent
        replica.rounds += 1 / count
