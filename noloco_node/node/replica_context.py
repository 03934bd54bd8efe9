"""A replica's place in the run, and what it knows of the swarm and its machine."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gossip.exchange.messages import ReplicaState
from gossip.settings import RoundTimeouts
from gossip.transfer.chunks import HeldCopy
from noloco_node.journal import events
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.run.config import RunConfig
from noloco_node.swarm.roster import Roster
from pipeline.inner_step import Schedule

HEARING_S = 30.0
"""Bounds a proposal and its answer in a meeting; the timeout of an answer adapts to earlier answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """A replica's place in the run. `stage`: number of its stage. `run_id`: the run's digest.

    `deadlines`: False bounds neither a meeting nor its answer in time, so that tests see a wait that never ends.
    `slowest_bytes_per_s`: we give up a partner with a slower line; deadlines of an exchange follow from it.
    `line_s`: seconds of our budgeted line for a microbatch, 0 without a limit.
    """

    run: RunConfig
    run_id: str
    stage: int
    peer: str
    deadlines: bool = True
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    line_s: float = 0.0

    @property
    def last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.run.pipeline.is_last(self.stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaContext:
    """The replica's view of the swarm and of its machine. `record`: takes journal events.

    `hold`: copies a state to where it does not change. `vocabulary`: of the model, in tokens. `unix_time`: by our
    clock. `shut_out`: shuts a peer out for so many seconds, at any stage.
    """

    network: PeerNetwork
    roster: Callable[[], Roster]
    record: Callable[[events.Event], None]
    hold: Callable[[ReplicaState], Awaitable[HeldCopy]]
    microbatch_schema: Schema
    gossip_schema: Schema
    vocabulary: int
    unix_time: Callable[[], float] = time.time
    shut_out: Callable[[str, float], None] = lambda peer, for_s: None


def rate_schedule(run: RunConfig) -> Schedule:
    inner = run.inner
    return Schedule(
        peak=inner.learning_rate,
        steps=inner.steps,
        warmup_steps=inner.warmup_steps,
        final_fraction=inner.final_fraction,
    )


def round_timeouts(config: ReplicaConfig, weight_bytes: int) -> RoundTimeouts:
    """Return how long rounds wait; the deadline of an exchange follows from its most bytes."""
    if not config.deadlines:
        return RoundTimeouts(answer_s=math.inf, exchange_s=math.inf)
    most_bytes = 2 * config.run.outer.weight_sets * weight_bytes
    return RoundTimeouts(answer_s=HEARING_S, exchange_s=60.0 + most_bytes / config.slowest_bytes_per_s)
