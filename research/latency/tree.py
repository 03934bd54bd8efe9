"""A tree all-reduce and a pair average, message by message, in virtual time.

What NoLoCo (arXiv 2506.10911, section on latency) compares is a tree all-reduce, t_all = 2 t_c log2(n), and the average
of a pair, 2 t_c; the ratio, log2(n), is the "10x" at 1024 replicas. With random latencies the paper plots a simulated
ratio and does not say which tree it is. This one reproduces the figure; others do not:

- **The complete binary tree.** The n workers are its leaves. At each of log2(n) levels two subtrees meet: *both* send
  what they have to the meeting, which goes on when the later one is there. Then the result goes down again, one message
  from each meeting to each of the two. So 2n - 2 messages go up and as many down, 2 log2(n) one after the other. Time
  ends when the last worker holds the result. Levels are not synchronised: a subtree goes on as soon as it is complete.
- **The pair** is the same tree with two leaves: a meeting of two and the way back, 2 E[max(t1, t2)], which for a
  log-normal latency is 2 t_c (1 + erf(sigma / 2)), and 2 t_c without spread.

The obvious alternative is the **binomial** tree, where a worker is itself a node at every level up to its own and sends
itself no message: 2 (n - 1) messages, and a pair average is then one message and its reply, 2 t_c on average whatever
the spread. It is measured beside the other.

Each member of a tree is an actor: it counts what arrives, adds it up, and sends on. The values are real: at the end
each worker must hold the sum over all. A message costs one call of `carry` and one timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Literal, NamedTuple

from noloco_node.sim import clock
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork

Carry = Callable[[str, str, Callable[[], None]], None]
"""Delivers one message: (sender, receiver, what its arrival does)."""
Shape = Literal["complete", "binomial"]


class Member:
    """One node of the tree. A worker brings a value of its own, and is told the sum of all."""

    __slots__ = ("_carry", "_missing", "_parts", "_sum", "arrived", "children", "name", "parent")

    def __init__(self, name: str, carry: Carry, *, worker: bool) -> None:
        self.name, self._carry = name, carry
        self.parent: Member | None = None
        self.children: list[Member] = []
        self.arrived: Callable[[float], None] | None = None
        """What a worker does with the result."""
        self._parts = self._missing = int(worker)
        self._sum = 0.0

    def adopt(self, child: Member) -> None:
        """Take another member below this one."""
        child.parent = self
        self.children.append(child)
        self._parts += 1
        self._missing += 1

    def collect(self, value: float) -> None:
        """Add a worker's own value or a child's partial sum; send on what is complete."""
        self._sum += value
        self._missing -= 1
        if self._missing:
            return
        total, self._sum, self._missing = self._sum, 0.0, self._parts
        if self.parent is None:
            self.learn(total)
        else:
            self._carry(self.name, self.parent.name, partial(self.parent.collect, total))

    def learn(self, total: float) -> None:
        """Pass the result on, and keep it if this is a worker."""
        for child in self.children:
            self._carry(self.name, child.name, partial(child.learn, total))
        if self.arrived is not None:
            self.arrived(total)


def plant(shape: Shape, workers: int, carry: Carry) -> list[Member]:
    """Return the workers of a new tree; their number is a power of two."""
    if workers < 2 or workers & (workers - 1):
        raise ValueError(f"{workers} workers are not a power of two")
    leaves = [Member(f"worker {number}", carry, worker=True) for number in range(workers)]
    below, level = leaves, 0
    while len(below) > 1:
        level += 1
        above = []
        for number, (left, right) in enumerate(zip(below[::2], below[1::2], strict=True)):
            if shape == "binomial":
                left.adopt(right)
                above.append(left)
            else:
                meeting = Member(f"meeting {level}.{number}", carry, worker=False)
                meeting.adopt(left)
                meeting.adopt(right)
                above.append(meeting)
        below = above
    return leaves


def messages(shape: Shape, workers: int) -> int:
    """Return how many messages one all-reduce takes."""
    return (2 if shape == "binomial" else 4) * (workers - 1)


class Together:
    """Lets all workers of a tree begin at the same moment, and sees when the last one holds the result."""

    def __init__(self, workers: Sequence[Member]) -> None:
        self._workers = workers
        self._missing = 0
        self._end: asyncio.Future[None] | None = None
        for worker in workers:
            worker.arrived = self._arrived

    async def once(self) -> float:
        """Return the virtual seconds that one all-reduce took."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._missing, self._end = len(self._workers), loop.create_future()
        for worker in self._workers:
            worker.collect(1.0)
        await self._end
        return loop.time() - begun_s

    def _arrived(self, total: float) -> None:
        assert self._end is not None
        self._missing -= 1
        if total != len(self._workers) and not self._end.done():
            self._end.set_exception(ArithmeticError(f"the sum of {len(self._workers)} ones was {total}"))
        elif not self._missing and not self._end.done():
            self._end.set_result(None)


class Trials(NamedTuple):
    """A batch of all-reduces to be measured. `spread`: standard deviation of a latency over its mean, which is 1 s."""

    shape: Shape
    workers: int
    spread: float
    trials: int
    seed: int
    number: int = 0
    """Of this batch among those of the same setting: each draws other latencies."""


class Times(NamedTuple):
    """Moments of measured times, which add up."""

    trials: int
    total_s: float
    squares_s2: float

    def __add__(self, other: object) -> Times:
        if not isinstance(other, Times):
            return NotImplemented
        return Times(self.trials + other.trials, self.total_s + other.total_s, self.squares_s2 + other.squares_s2)

    @property
    def mean_s(self) -> float:
        """The mean time."""
        return self.total_s / self.trials

    @property
    def relative_error(self) -> float:
        """The standard error of the mean over the mean."""
        variance = max(0.0, self.squares_s2 / self.trials - self.mean_s**2)
        return float((variance / self.trials) ** 0.5) / self.mean_s


def moments(times_s: Sequence[float]) -> Times:
    """Return the moments of some times."""
    return Times(len(times_s), sum(times_s), sum(time_s * time_s for time_s in times_s))


def world(batch: Trials) -> SimNetwork:
    """Return the lines of a batch: log-normal latencies of mean 1 s, drawn for this batch alone."""
    what = f"{batch.shape}|{batch.workers}|{batch.spread}|{batch.number}"
    weather = NetworkConditions(latency=Latency(shape="lognormal", mean_s=1.0, std_s=batch.spread))
    return SimNetwork(weather, seed=Random(f"{batch.seed}|latency|{what}").getrandbits(63))


def carrier(hub: SimNetwork) -> Carry:
    """Return what delivers each message after a latency of its own, whatever went before."""

    def carry(sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(hub.draw_latency(), arrive)

    return carry


def measure(batch: Trials) -> Times:
    """Take a batch of trials, one after the other, on the simulator's lines."""

    async def trials() -> list[float]:
        hub = world(batch)
        together = Together(plant(batch.shape, batch.workers, carrier(hub)))
        return [await together.once() for _ in range(batch.trials)]

    return moments(clock.run(trials()))
