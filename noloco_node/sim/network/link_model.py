"""What the lines between simulated peers are like: how long a message takes, and how often it does not arrive.

Times are seconds, rates bytes a second. Everything here is data and its draws; `medium` acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal, TypeAlias

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

    @property
    def is_constant(self) -> bool:
        """Whether every draw is the mean."""
        return self.shape == "constant" or self.std_s == 0.0

    def sampler(self, rng: Random) -> Callable[[], float]:
        """Return a function that draws one latency in seconds, never negative; what does not change is worked out once.

        A uniform draw that would be negative is 0, so its mean grows where `std_s` > `mean_s` / sqrt(3).
        """
        mean_s = self.mean_s
        if self.is_constant:
            return lambda: mean_s
        if self.shape == "uniform":
            half = math.sqrt(3.0) * self.std_s
            return lambda: max(0.0, rng.uniform(mean_s - half, mean_s + half))
        variance = math.log1p((self.std_s / mean_s) ** 2)
        mu, sigma, gauss, exp = math.log(mean_s) - variance / 2, math.sqrt(variance), rng.gauss, math.exp
        return lambda: exp(gauss(mu, sigma))


class NetworkConditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all lines have in common.

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
