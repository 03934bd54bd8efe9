"""A newcomer becomes a replica: it copies slow weights, outer momentum and counters from one that lives.

It is then where its donor is, also in the momentum period and in the round in which anybody was last met: a copy of
stale weights is as stale as they are. Only what a lossy codec owes stays with the donor, which will send it.

The fast weights do not travel: the newcomer starts from the slow ones, as every replica does right after a round. Each
newcomer asks the replicas in an order of its own, the rendezvous hash of (seed, newcomer, donor), so that many
newcomers spread over many donors without a word. A donor serves a few at once and tells the others to come back.

An export asks for the slow weights alone, from every replica.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from gossip.exchange import Compute, Conversation, check_finite, check_like
from gossip.messages import Busy, Implausible, Parts, ReplicaState, StateRequest
from gossip.nesterov import Tensors

LONGEST_WAIT_S = 20.0
"""Longest sleep before the donors are asked again, whatever they say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to ask for and what must come back.

    `like`: tensors (the meta device will do) with the shapes and dtypes of the slow weights; `optimiser_like` those of
    the inner optimiser's tensors, which a donor may also leave out. `deadline_s`: for one donor's whole reply.
    """

    parts: Parts
    like: Tensors
    optimiser_like: Tensors
    deadline_s: float


def donors(newcomer: str, replicas: Collection[str], seed: int) -> tuple[str, ...]:
    """Return the replicas in the order in which this newcomer asks them."""
    others = {peer for peer in replicas if peer != newcomer}
    return tuple(sorted(others, key=lambda peer: hashlib.sha256(f"{seed}|donor|{newcomer}|{peer}".encode()).digest()))


async def catch_up(
    order: Sequence[str],
    converse: Callable[[str], AbstractAsyncContextManager[Conversation]],
    wanted: Wanted,
    compute: Compute,
    *,
    passes: int = 5,
) -> ReplicaState:
    """Copy the state of the first donor that gives it; ask the busy ones again, up to `passes` times in all.

    Raises ConnectionRefusedError, naming each donor's cause, where none gives it.
    """
    causes: dict[str, str] = {}
    remaining = tuple(order)
    for attempt in range(passes):
        busy: dict[str, float] = {}
        for peer in remaining:
            try:
                async with asyncio.timeout(wanted.deadline_s), converse(peer) as conversation:
                    reply = await fetch(conversation, wanted, compute)
            except ConnectionError as loss:
                causes[peer] = str(loss)
            except TimeoutError:
                causes[peer] = f"no complete reply within {wanted.deadline_s:g} s"
            else:
                if isinstance(reply, ReplicaState):
                    return reply
                causes[peer] = "busy"
                busy[peer] = _bounded_wait(reply.retry_after_s)
        remaining = tuple(busy)
        if not remaining:
            break
        if attempt + 1 < passes:
            await asyncio.sleep(min(busy.values()))
    told = "; ".join(f"{peer}: {cause}" for peer, cause in causes.items())
    raise ConnectionRefusedError(f"no replica gave its state ({told or 'there is none to ask'})")


def _bounded_wait(retry_after_s: float) -> float:
    return retry_after_s if 0.0 < retry_after_s < LONGEST_WAIT_S else LONGEST_WAIT_S


async def fetch(conversation: Conversation, wanted: Wanted, compute: Compute) -> ReplicaState | Busy:
    """Ask one donor and check its reply; the caller sets the deadline.

    Raises Implausible where the state cannot be right, another `ConnectionError` where it does not come.
    """
    await conversation.send(StateRequest(parts=wanted.parts))
    reply = await conversation.receive()
    if isinstance(reply, Busy):
        return reply
    if not isinstance(reply, ReplicaState):
        raise ConnectionAbortedError(f"expected a state, got {type(reply).__name__}")
    await compute(check_state, reply, wanted)
    return reply


def check_state(state: ReplicaState, wanted: Wanted) -> None:
    """Raise Implausible unless counts, shapes and dtypes are as wanted, all values finite and the counters possible."""
    whole = wanted.parts is Parts.ALL
    check_like(state.slow, wanted.like, "slow weights")
    check_like(state.momentum, wanted.like if whole else (), "outer momentum")
    check_like(state.gathered, wanted.like if whole and state.meetings else (), "gathered momentum")
    if state.optimiser or not whole:
        check_like(state.optimiser, wanted.optimiser_like if whole else (), "optimiser")
    check_finite(state.slow, "slow weights")
    check_finite(state.momentum, "outer momentum")
    check_finite(state.gathered, "gathered momentum")
    check_finite(state.optimiser, "optimiser")
    counters = (state.round, state.inner_steps, state.optimiser_steps, state.meetings, state.last_met)
    if min(counters) < 0 or state.last_met > state.round or not 0.0 <= state.progress <= 1.0:
        raise Implausible(f"counters: rounds, steps, meetings, last met {counters}, progress {state.progress}")


async def serve(
    conversation: Conversation,
    provide: Callable[[Parts], Awaitable[ReplicaState]],
    turns: asyncio.Semaphore,
    *,
    deadline_s: float,
) -> None:
    """Answer one request: with a copy of the state that `provide` makes, or with Busy when all `turns` are taken.

    A copy may be as large as the replica itself: `turns` bounds how many exist at once. Raises ConnectionAbortedError
    where the newcomer is too slow or asks for something else.
    """
    try:
        async with asyncio.timeout(deadline_s):
            request = await conversation.receive()
            if not isinstance(request, StateRequest):
                raise ConnectionAbortedError(f"expected a request, got {type(request).__name__}")
            if turns.locked():
                await conversation.send(Busy(retry_after_s=LONGEST_WAIT_S / 4))
                return
            async with turns:
                await conversation.send(await provide(request.parts))
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"the newcomer was not done within {deadline_s:g} s") from silence
