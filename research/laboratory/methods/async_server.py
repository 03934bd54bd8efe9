"""Asynchronous Local-SGD as its paper has it: workers that report to a server, each when it is done.

A worker asks for the server's weights, takes its inner steps, and sends what it started from minus what it arrived at;
the server applies its rule at once (naive), to the mean of a full buffer (FedBuff), or with a delayed momentum. While
a worker's messages travel it does nothing, as in the paper; what the server sends counts as the worker's traffic, for
somebody has to send it. Who arrives in the moment that the question takes is heard before the answer; with a grace
period the first to arrive waits for others, and all who come meanwhile begin together. A pseudo-gradient that is late
may count less, or be corrected (`server_rules`). Text may be cut into shards, of which each round of a worker takes the
one that is behind most: shard i is drawn with a probability in proportion to max(0, 1 / shards - its share of what has
been drawn) (equation 2 of the paper). At the end every worker brings what it has, and a buffer is emptied as full as it
is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random

import torch

from gossip.rule.outer_step import Delay, Tensors
from research.laboratory.experiments.cell import Rule
from research.laboratory.experiments.hardware_model import LATENCY_S, exchange_s
from research.laboratory.experiments.task import Text
from research.laboratory.methods.replicas import Model, Replica, Swarm, now_s
from research.laboratory.methods.server_rules import (
    STALENESS_AT_MOST,
    Server,
    ServerState,
    begin,
    buffered,
    compensated,
    delayed_nesterov,
    discounted,
    heavy_ball,
    nesterov,
)
from research.theory.pair_step import pseudo_gradient

Apply = Callable[[ServerState, Tensors], ServerState]


async def server(swarm: Swarm) -> None:
    """Train at a server's until the budget is spent."""
    desk = _Desk(swarm)
    swarm.model = desk.model
    async with asyncio.TaskGroup() as group:
        for replica in swarm.replicas:
            group.create_task(desk.work(replica))
    desk.close()
    for replica in swarm.replicas:
        replica.load(desk.model())


class _Desk:
    """The server, and the way of its workers to it and back."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        (weights,) = swarm.replicas[0].weights()
        self._state = begin(weights)
        self._apply = applying(swarm.cell.rule)
        self._fastest_s = min(replica.step_s for replica in swarm.replicas)
        self._way_s = exchange_s(swarm.weight_bytes, swarm.weight_bytes)
        self._steps_taken = 0
        self._begin_s = 0.0
        """Until when those who have arrived wait for each other."""
        self._shards = [replica.text for replica in swarm.replicas]
        self._drawing = Random(f"{swarm.cell.seed}|shards")

    def __repr__(self) -> str:
        return f"<_Desk of {self._swarm!r}>"

    def model(self) -> Model:
        """Return the server's weights."""
        return [self._state.weights]

    def _steps(self, replica: Replica) -> int:
        steps = self._swarm.steps_of_round()
        if not self._swarm.cell.dynamic:
            return steps
        # The paper's formula, for exact speeds; the production's allows for those that were measured.
        return max(1, math.floor(self._fastest_s / replica.step_s * steps))

    async def work(self, replica: Replica) -> None:
        """Fetch, train, report, until the budget is spent."""
        swarm, (stage,) = self._swarm, replica.stages
        while swarm.left > 0:
            await asyncio.sleep(LATENCY_S)
            started, steps_before = self._state.weights, self._steps_taken
            await asyncio.sleep(self._way_s)
            stage.set_weights(started)
            if swarm.cell.sharding == "sampled":
                replica.text = self._shard()
            if not await swarm.train(replica, self._steps(replica)):
                return
            arrived = stage.weights()
            await asyncio.sleep(self._way_s)
            self._take(started, arrived, self._steps_taken - steps_before)
            replica.sent_bytes += 2 * swarm.weight_bytes
            replica.rounds += 1
            if swarm.cell.grace_s:
                if now_s() >= self._begin_s:
                    self._begin_s = now_s() + swarm.cell.grace_s
                await asyncio.sleep(self._begin_s - now_s())

    def _take(self, started: Tensors, arrived: Tensors, staleness: int) -> None:
        cell, gradient = self._swarm.cell, pseudo_gradient(started, arrived)
        if cell.discount == "threshold" and staleness > STALENESS_AT_MOST:
            return
        if cell.compensation:
            gradient = compensated(gradient, started, self._state.weights, cell.compensation)
        if cell.discount != "none":
            gradient = discounted(gradient, staleness)
        self._state = self._apply(self._state, gradient)
        self._steps_taken += 1

    def _shard(self) -> Text:
        drawn = sum(shard.drawn for shard in self._shards)
        behind = [max(0.0, 1.0 / len(self._shards) - shard.drawn / max(1, drawn)) for shard in self._shards]
        return self._drawing.choices(self._shards, behind if any(behind) else None)[0]

    def close(self) -> None:
        """Apply what a buffer still holds."""
        rule, state = self._swarm.cell.rule, self._state
        if rule.buffer > 1 and state.arrivals:
            rest = tuple(torch.div(tensor, state.arrivals) for tensor in state.gathered)
            at_once = nesterov if rule.lookahead else heavy_ball
            empty = state._replace(gathered=(), arrivals=0)
            self._state = at_once(empty, rest, Server(rate=rule.beta, momentum=rule.alpha))


def applying(rule: Rule) -> Apply:
    """Return what a server does with a pseudo-gradient under a rule."""
    constants = Server(rate=rule.beta, momentum=rule.alpha)
    if rule.period > 1:
        return lambda state, g: delayed_nesterov(state, g, constants, Delay(rule.period, rule.spread))
    at_once = nesterov if rule.lookahead else heavy_ball
    if rule.buffer > 1:
        return lambda state, g: buffered(at_once, state, g, constants, rule.buffer)
    return lambda state, g: at_once(state, g, constants)
