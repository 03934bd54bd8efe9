"""The methods in which all replicas step in step: nobody begins a round before everybody has ended the last.

`parallel`: fully synchronous data parallel training, one step on the mean gradient; any other method may begin with a
`common_start` of it. `independent`: nobody talks.
`central`: Local-SGD and DiLoCo, the outer rule on the mean over all replicas; a mean over all is what this project's
own packages never form. It may have the number format, the dynamic steps and the weighed means that gossip has, or
send but the largest values of each replica (SparseLoCo).
`pairs`: NoLoCo as published, in groups of 2, 4 or 8 drawn anew each round, with routes through two stages where the
cell asks for them; it may have dynamic steps and weighed means, and corrections that come some inner steps late, but
before the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random

import torch

from gossip.rounds.matching import dynamic_steps
from gossip.rule.outer_step import Outer, OuterState
from research.laboratory.experiments.hardware_model import all_gather, all_reduce, exchange_s
from research.laboratory.methods.coded_mean import CodedMean
from research.laboratory.methods.replicas import Model, Replica, Swarm, mean_of
from research.laboratory.methods.server_rules import Server, begin, heavy_ball, nesterov
from research.laboratory.methods.sparse_mean import SparseMean
from research.theory.pair_step import outer_step, pseudo_gradient


async def parallel(swarm: Swarm) -> None:
    """Step all replicas on the mean of their gradients: one set of weights, held by the first."""
    await _on_mean_gradients(swarm, swarm.cell.budget)


async def common_start(swarm: Swarm) -> None:
    """Train so for the cell's share of the budget; then everybody has the same weights, and memory of the optimiser."""
    own = [replica.stages for replica in swarm.replicas]
    await _on_mean_gradients(swarm, round(swarm.cell.common_start * swarm.cell.budget))
    keeper = swarm.replicas[0]
    for replica, stages in zip(swarm.replicas[1:], own[1:], strict=True):
        replica.stages = stages
        for stage, kept in zip(stages, keeper.stages, strict=True):
            stage.set_weights(kept.weights())
            stage.load_optimiser_state(kept.optimiser_state())
    for replica in swarm.replicas:
        replica.rounds = 0
    swarm.model = swarm.mean


async def _on_mean_gradients(swarm: Swarm, until: int) -> None:
    """Train until so many inner steps of the budget are spent."""
    cell, keeper = swarm.cell, swarm.replicas[0]
    swarm.model = keeper.weights
    for replica in swarm.replicas[1:]:
        replica.stages = keeper.stages
    wait_s, sent = all_reduce(cell.replicas, swarm.weight_bytes)
    while swarm.taken < until:
        rate = swarm.rate()
        async with asyncio.TaskGroup() as group:
            for replica in swarm.replicas:
                group.create_task(swarm.spend(replica))
        for replica in swarm.replicas:
            keeper.stages[0].loss(*replica.text.draw())
        keeper.stages[0].step(rate, cell.replicas)
        await asyncio.sleep(wait_s)
        for replica in swarm.replicas:
            replica.sent_bytes += sent
            replica.rounds += 1
            swarm.note_step(replica)


async def independent(swarm: Swarm) -> None:
    """Let everybody train alone."""
    while swarm.left > 0:
        await swarm.step_together()


async def central(swarm: Swarm) -> None:
    """Take outer steps on the mean over all replicas: Local-SGD (beta 1, alpha 0), DiLoCo."""
    cell = swarm.cell
    rule = nesterov if cell.rule.lookahead else heavy_ball
    constants = Server(rate=cell.rule.beta, momentum=cell.rule.alpha)
    states = [begin(part) for part in swarm.mean()]
    model = [state.weights for state in states]
    mean: CodedMean | SparseMean
    if cell.density == 1.0:
        mean = CodedMean(model, cell)
        wait_s, sent = all_reduce(cell.replicas, swarm.weight_bytes, mean.sent_bytes)
    else:
        mean = SparseMean(model, cell)
        wait_s, sent = all_gather(cell.replicas, swarm.weight_bytes, mean.sent_bytes)
    counted = [replica.steps for replica in swarm.replicas]
    async for _ in rounds(swarm):
        brought = [
            [pseudo_gradient(state.weights, part) for state, part in zip(states, replica.weights(), strict=True)]
            for replica in swarm.replicas
        ]
        weights = taken_since(swarm, counted)
        await asyncio.sleep(wait_s)
        gradient = mean.of(brought, weights if cell.weighed else None)
        states = [rule(state, part, constants) for state, part in zip(states, gradient, strict=True)]
        for replica in swarm.replicas:
            replica.load([state.weights for state in states])
            replica.sent_bytes += sent
            replica.rounds += 1


async def pairs(swarm: Swarm) -> None:
    """Gossip in groups drawn anew each round, everybody waiting for everybody: NoLoCo as published."""
    cell, rule = swarm.cell, swarm.cell.rule
    outer = Outer(rule.alpha, rule.beta, rule.gamma)
    sets = 1 if rule.gamma == rule.beta else 2
    state = [
        [OuterState(part, tuple(torch.zeros_like(t) for t in part)) for part in replica.weights()]
        for replica in swarm.replicas
    ]
    drawing = Random(f"{cell.seed}|groups")
    sent: float = sets * swarm.weight_bytes
    wait_s = exchange_s(sent, swarm.weight_bytes)
    if cell.group > 2:
        wait_s, sent = all_reduce(cell.group, sets * swarm.weight_bytes)
    counted = [replica.steps for replica in swarm.replicas]
    async for _ in rounds(swarm):
        taken = taken_since(swarm, counted)
        for replica in swarm.replicas:
            replica.arrive(early=True)
        late: list[Model] = [[] for _ in swarm.replicas]
        await asyncio.sleep(0.0 if cell.overlap else wait_s)
        for stage in range(len(swarm.replicas[0].stages)):
            fast = [replica.stages[stage].weights() for replica in swarm.replicas]
            for group in groups(drawing, cell.replicas, cell.group):
                weights = [max(1, taken[one]) for one in group] if cell.weighed else None
                slow_mean = mean_of([[state[one][stage].slow] for one in group], weights)[0]
                fast_mean = mean_of([[fast[one]] for one in group], weights)[0]
                for one in group:
                    before = state[one][stage]
                    after = outer_step(before, fast_mean, slow_mean, outer)
                    state[one][stage] = after = ahead(before, after, rule.alpha) if rule.lookahead else after
                    if cell.overlap:
                        late[one].append(pseudo_gradient(after.slow, fast[one]))
                    else:
                        swarm.replicas[one].stages[stage].set_weights(after.slow)
        for replica, corrections in zip(swarm.replicas, late, strict=True):
            if cell.overlap:
                replica.correct_later(corrections, cell.overlap)
            replica.sent_bytes += sent
            replica.rounds += 1
    for replica in swarm.replicas:
        replica.arrive(early=True)


def ahead(before: OuterState, after: OuterState, alpha: float) -> OuterState:
    """Return where Nesterov's look-ahead arrives, given where heavy ball does.

    With u what a meeting adds to the momentum, m <- alpha m + u is the same in both; heavy ball then moves by m, the
    look-ahead by u + alpha m. So it has moved further by alpha times what the momentum has grown by.
    """
    slow = tuple(
        torch.sub(phi, torch.sub(m, earlier), alpha=alpha)
        for phi, m, earlier in zip(after.slow, after.momentum, before.momentum, strict=True)
    )
    return after._replace(slow=slow)


def groups(drawing: Random, replicas: int, size: int) -> list[list[int]]:
    """Return the replicas in random groups of this size."""
    order = list(range(replicas))
    drawing.shuffle(order)
    return [order[begin : begin + size] for begin in range(0, replicas, size)]


def share_of(one: int, members: Sequence[int], weights: Sequence[int] | None = None) -> float:
    """Return the share that one of some members has in their mean, weighed if there are weights.

    Somebody who has nothing to bring counts a little, so that a mean of such is one.
    """
    if weights is None:
        return 1.0 / len(members)
    return max(1, weights[one]) / sum(max(1, weights[member]) for member in members)


def taken_since(swarm: Swarm, counted: list[int]) -> list[int]:
    """Return the inner steps of each replica since they were counted, and count them now."""
    before, counted[:] = counted[:], [replica.steps for replica in swarm.replicas]
    return [now - then for now, then in zip(counted, before, strict=True)]


async def rounds(swarm: Swarm) -> AsyncIterator[None]:
    """Take the inner steps of one round after the other; the last one may be shorter.

    Everybody steps in step, or takes as many steps as suit its speed, and waits for the others at the round's end.
    """
    while swarm.left > 0:
        steps = swarm.steps_of_round()
        if swarm.cell.dynamic:
            async with asyncio.TaskGroup() as group:
                for replica in swarm.replicas:
                    group.create_task(swarm.train(replica, own_steps(swarm, replica, steps)))
            yield
            continue
        for _ in range(steps):
            if swarm.left > 0:
                await swarm.step_together()
        yield


def own_steps(swarm: Swarm, replica: Replica, steps: int) -> int:
    """Return how many of the steps of the fastest a replica takes: by the production's rule, as gossip does."""
    if not swarm.cell.dynamic:
        return steps
    others = [1.0 / other.step_s for other in swarm.replicas if other is not replica]
    return dynamic_steps(1.0 / replica.step_s, others, steps)
