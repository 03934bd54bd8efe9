"""One bounded exchange with one partner: both send, both receive, and what arrives is checked before anybody uses it.

Weights honestly differ between replicas, so they cannot be compared by hash. What can be checked is that they have our
count, shapes and types, that they are finite, and that their norm is near ours: replicas of one stage start alike and
are pulled together, so a ratio of `NORM_RATIO` is far beyond what honest ones show. Counts, shapes and types are those
of the codec and checked there; all else is checked on what was decoded.

After the weights comes a short handshake. The asker says that it has what it needs; the asked then takes its step and
says so; the asker takes its own step only after that. The asked has the last word because the asker's leaving cancels
whatever the asked still does. Of all the messages only the loss of the last one leaves one side stepped and the other
not; that is counted and not negotiated.

First of all both send a **probe**: `PROBE` coordinates of the slow weights, drawn from the run's seed, so that both
draw the same ones without a word. It shows how far the two are apart, and what the weights that follow are coded by.

The functions here do not bound their own time: the caller sets one deadline over the whole conversation.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gossip.exchange.messages import Implausible, Probe, Received, Weights
from gossip.rule.outer_step import Tensors

PROBE = 4096
"""Coordinates of the slow weights, and with int4 of the snapshot too, that travel ahead of the rest (16 KiB each)."""
NORM_RATIO = 10.0
"""A partner's norm outside [ours / ratio, ours * ratio] is implausible."""

NOT_FINITE = "our own weights are not finite"

T = TypeVar("T")
Message = TypeVar("Message", Probe, Weights)


class Conversation(Protocol):
    """One ordered stream of typed messages between us and a peer whom the transport has authenticated."""

    @property
    def peer(self) -> str:
        """The other's peer id."""

    async def send(self, message: object) -> None:
        """Send one message."""

    async def receive(self) -> object:
        """Return the next message. Raises a `ConnectionError` where none will come."""


class Compute(Protocol):
    """Runs a function where heavy arithmetic belongs: the device's thread."""

    def __call__(self, function: Callable[..., T], /, *args: object) -> Awaitable[T]:
        """Return what `function(*args)` returns, raise what it raises."""


async def swap(conversation: Conversation, mine: Message) -> Message:
    """Send a message and receive the partner's of the same kind at the same time.

    Raises ConnectionAbortedError where another kind comes, another `ConnectionError` where nothing comes.
    """
    sending = asyncio.create_task(conversation.send(mine))
    receiving = asyncio.create_task(conversation.receive())
    await all_or_failure((sending, receiving))
    theirs = receiving.result()
    if not isinstance(theirs, type(mine)):
        raise ConnectionAbortedError(f"expected {type(mine).__name__}, got {type(theirs).__name__}")
    return theirs


async def all_or_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all; end all with the first that fails, and raise what failed: a bug first, then a lie, then a loss.

    Not a task group: one that fails in the moment in which it is cancelled raises the failure and forgets the
    cancellation (Python 3.11, 3.12), and whoever outlives a loss would live on.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        failures = [failure for task in tasks if not task.cancelled() and (failure := task.exception()) is not None]
    if failures:
        raise min(failures, key=lambda each: (isinstance(each, ConnectionError), not isinstance(each, Implausible)))


async def conclude(conversation: Conversation, commit: Callable[[], Awaitable[None]], *, asked: bool) -> None:
    """Exchange receipts and commit: the asked first, then it has the last word; the asker after that."""
    if not asked:
        await conversation.send(Received())
    receipt = await conversation.receive()
    if not isinstance(receipt, Received):
        raise ConnectionAbortedError(f"expected a receipt, got {type(receipt).__name__}")
    await commit()
    if asked:
        await conversation.send(Received())


def check_probe(theirs: Probe, mine: Probe) -> None:
    """Raise Implausible unless the partner's probe is like ours, finite, and of a round not before its last meeting."""
    came, right = ([(tensor.dtype, list(tensor.shape)) for tensor in _tensors(probe)] for probe in (theirs, mine))
    if came != right:
        raise Implausible(f"probe: {came} where ours is {right}")
    check_finite(_tensors(theirs), "probe")
    if theirs.last_met > theirs.round:
        raise Implausible(f"probe: last met anybody in round {theirs.last_met}, and is in round {theirs.round}")


def check_own(mine: Probe) -> None:
    """Raise ConnectionAbortedError unless our probe is finite: nobody else is to blame if it is not."""
    if not math.isfinite(norm(_tensors(mine))):
        raise ConnectionAbortedError(NOT_FINITE)


def check_norm(their_norm: float, own_norm: float, what: str) -> None:
    """Raise Implausible unless the norm of the partner's weights is finite and near that of our own.

    Raises ConnectionAbortedError where ours is not finite.
    """
    if not math.isfinite(their_norm):
        raise Implausible(f"{what}: not finite")
    if not math.isfinite(own_norm):
        raise ConnectionAbortedError(NOT_FINITE)
    if not own_norm / NORM_RATIO <= their_norm <= own_norm * NORM_RATIO:
        raise Implausible(f"{what}: norm {their_norm:.3g} where ours is {own_norm:.3g}")


def check_finite(tensors: Tensors, what: str) -> float:
    """Return the norm over all tensors; raise Implausible unless it is finite."""
    total = norm(tensors)
    if not math.isfinite(total):
        raise Implausible(f"{what}: not finite")
    return total


def norm(tensors: Tensors) -> float:
    """Return the norm over all tensors; not finite if a value is not, or if a tensor's norm overflows float32."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def size_bytes(*messages: Probe | Weights) -> int:
    """Return the bytes of all tensors of these messages."""
    return sum(tensor.nbytes for message in messages for tensor in _tensors(message))


def _tensors(message: Probe | Weights) -> Tensors:
    if isinstance(message, Probe):
        return (message.slow,) if message.fast is None else (message.slow, message.fast)
    return (*message.fast, *message.slow)


def probe_coordinates(seed: int, sizes: Sequence[int], k: int = PROBE) -> Tensors:
    """Draw `k` coordinates uniformly over tensors of these sizes (elements); all of them where there are fewer.

    Returns one int64 tensor of flat indices per tensor, ascending. Python's generator rather than torch's: its floats
    are the same in every version.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    if total <= k:
        return tuple(torch.arange(size) for size in sizes)
    rng = random.Random(f"{seed}|probe")
    inside: list[list[int]] = [[] for _ in sizes]
    for flat in sorted(int(rng.random() * total) for _ in range(k)):
        number = bisect_right(ends, flat)
        inside[number].append(flat - ends[number] + sizes[number])
    return tuple(torch.tensor(indices, dtype=torch.int64) for indices in inside)


def gap(own_probe: Tensor, partner_probe: Tensor) -> float:
    """Return the norm of own minus mean slow weights over the norm of the mean, as the probes show it."""
    middle = (own_probe + partner_probe) / 2
    apart, size = float(torch.linalg.vector_norm(own_probe - middle)), float(torch.linalg.vector_norm(middle))
    if size == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / size
