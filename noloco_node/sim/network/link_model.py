"""Lines between simulated peers: latency, losses, and bandwidth that simultaneous transfers share.

Times are seconds, rates bytes a second. A transfer from i to j moves at

    rate = min(up_i / transfers that leave i, down_j / transfers that reach j)

until its bytes are through, so its start or end changes only those that share one of its two links. Where a link has a
share for rounds, their transfers together have that while others are under way, as `noloco_node.limits` grants it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

MOST = 1e12
"""Of any time, rate or size in a scenario: a clock could not add up more."""
Positive: TypeAlias = Annotated[float, Meta(ge=1e-12, le=MOST)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=int(MOST))]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0.0, le=MOST)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1.0)]

SILENCE_S = 6.0
"""After which a peer that says nothing is given up."""
OPEN_S = 20.0
"""How long a dial into the dark takes to fail."""


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a message is on its way, its size aside: a mean, a standard deviation, and the shape of the draw."""

    shape: Literal["constant", "uniform", "lognormal"] = "constant"
    mean_s: NotNegative = 0.02
    std_s: NotNegative = 0.0

    def sampler(self, rng: Random) -> Callable[[], float]:
        """Return a function that draws one latency in seconds, never negative; what does not change is worked out once.

        A uniform draw that would be negative is 0, so its mean grows where `std_s` > `mean_s` / sqrt(3).
        """
        mean_s = self.mean_s
        if self.shape == "constant" or self.std_s == 0.0:
            return lambda: mean_s
        if self.shape == "uniform":
            half = math.sqrt(3.0) * self.std_s
            return lambda: max(0.0, rng.uniform(mean_s - half, mean_s + half))
        variance = math.log1p((self.std_s / mean_s) ** 2)
        mu, sigma, gauss, exp = math.log(mean_s) - variance / 2, math.sqrt(variance), rng.gauss, math.exp
        return lambda: exp(gauss(mu, sigma))


class NetworkConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of all lines.

    `loss`: share of messages that are lost, each with its stream: both ends see it break. `late`: share of messages
    that take `late_s` longer; what follows in the same conversation waits behind them. `duplicate`: share of messages
    that arrive twice. `roster_lag_s`: the records that a reading of the DHT finds are up to so old.
    """

    latency: Latency = Latency()
    loss: Share = 0.0
    late: Share = 0.0
    late_s: NotNegative = 2.0
    duplicate: Share = 0.0
    roster_lag_s: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One peer's line. Transfers that run at the same time share it. `dials_only`: nobody can open a stream to it."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    dials_only: bool = False

    def __post_init__(self) -> None:
        if not (self.up_bytes_per_s > 0 and self.down_bytes_per_s > 0):
            raise ValueError("the rates of a line are above 0")


class LinkUse(NamedTuple):
    """The use of one direction of a peer's line: bytes moved, and bytes that it could have moved."""

    moved_bytes: float
    capacity_bytes: float

    @property
    def utilisation(self) -> float:
        return self.moved_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


class Link:
    """One direction of one peer's line. `round_share`: what rounds have of it; None: they are as others."""

    __slots__ = ("_capacity_bytes", "_changed_s", "_rounds", "flows", "moved_bytes", "rate", "round_share")

    def __init__(self, rate: float, now_s: float, round_share: float | None = None) -> None:
        self.rate, self.round_share = rate, round_share
        self._rounds = 0
        self.moved_bytes = 0.0
        self.flows: dict[Transfer, None] = {}
        self._capacity_bytes, self._changed_s = 0.0, now_s

    def use(self, now_s: float) -> LinkUse:
        """Return what was moved since the beginning, transfers under way included."""
        moved_bytes = self.moved_bytes + sum(flow.unsettled_bytes(now_s) for flow in self.flows)
        return LinkUse(moved_bytes, self._capacity_bytes + self._could_move(now_s))

    def change(self, rate: float, now_s: float) -> None:
        self._capacity_bytes += self._could_move(now_s)
        self._changed_s, self.rate = now_s, rate
        for flow in list(self.flows):
            flow.retime(now_s)

    def add(self, flow: Transfer) -> None:
        self.flows[flow] = None
        self._rounds += flow.in_round

    def remove(self, flow: Transfer) -> None:
        del self.flows[flow]
        self._rounds -= flow.in_round

    def rate_of(self, flow: Transfer) -> float:
        count, rounds = len(self.flows), self._rounds
        if self.round_share is None or not 0 < rounds < count:
            return self.rate / count
        return self.rate * (self.round_share / rounds if flow.in_round else (1.0 - self.round_share) / (count - rounds))

    def _could_move(self, now_s: float) -> float:
        lasted_s = now_s - self._changed_s
        return self.rate * lasted_s if lasted_s else 0.0


class AccessLine(NamedTuple):
    """Both directions of the line of one peer."""

    up: Link
    down: Link


class Transfer:
    """So many bytes on their way through a sender's uplink and a receiver's downlink; calls `done` when through."""

    __slots__ = ("_done", "_down", "_rate", "_settled_s", "_timer", "_up", "in_round", "remaining_bytes")

    def __init__(
        self, up: Link, down: Link, size_bytes: float, done: Callable[[], object], *, in_round: bool = False
    ) -> None:
        self._up, self._down, self._done, self.in_round = up, down, done, in_round
        self.remaining_bytes = float(size_bytes)
        self._rate = 0.0
        self._timer: asyncio.TimerHandle | None = None
        now_s = self._settled_s = asyncio.get_running_loop().time()
        up.add(self)
        down.add(self)
        self._retime_neighbours(now_s)

    def cancel(self) -> None:
        """Stop: what has not passed never will, and the others get this transfer's share. No more after the end."""
        now_s = asyncio.get_running_loop().time()
        self.settle(now_s)
        self._leave(now_s)

    def unsettled_bytes(self, now_s: float) -> float:
        lasted_s = now_s - self._settled_s
        return min(self.remaining_bytes, self._rate * lasted_s) if lasted_s else 0.0

    def settle(self, now_s: float) -> None:
        moved = self.unsettled_bytes(now_s)
        self._settled_s = now_s
        self.remaining_bytes -= moved
        self._up.moved_bytes += moved
        self._down.moved_bytes += moved

    def retime(self, now_s: float) -> None:
        """Take the rate that the two links have for this transfer now."""
        rate = min(self._up.rate_of(self), self._down.rate_of(self))
        if rate == self._rate:
            return
        self.settle(now_s)
        self._rate = rate
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(now_s + self.remaining_bytes / rate, self._finish)

    def _finish(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._up.moved_bytes += self.remaining_bytes
        self._down.moved_bytes += self.remaining_bytes
        self.remaining_bytes = 0.0
        self._leave(now_s)
        self._done()

    def _leave(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._up.remove(self)
        self._down.remove(self)
        self._retime_neighbours(now_s)

    def _retime_neighbours(self, now_s: float) -> None:
        for flow in list(self._up.flows):
            flow.retime(now_s)
        for flow in list(self._down.flows):
            flow.retime(now_s)
