"""One training run of the laboratory: what it trains, by which method, on which machines.

A cell is all that a run depends on, so its digest names the run: a result is kept under it, and a cell that is asked
for again, by another table or after an interruption, is not run twice. What a method does not look at stays at its
default, so that two cells that would do the same are the same.

A field that was added after results had been kept counts in the digest only where it is not at its default: so what
was kept before keeps its name.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Method = Literal[
    "parallel",
    "independent",
    "central",
    "pairs",
    "server",
    "gossip",
    "streaming",
    "shards",
    "epidemic",
    "gasloc",
    "quorum_mean",
    "late_mean",
]
Speeds = Literal["none", "slight", "moderate", "very", "nearly"]
Scale = Literal["full", "small", "tiny", "adapted"]
Codec = Literal["float32", "bfloat16", "int8", "int4", "int3", "int2"]
Corpus = Literal["library", "torch"]
Prose = Literal["prose"]
"""The text that only runs under `Conditions` or with `Adapters` use beside the library's."""
Sharding = Literal["alike", "fixed", "sampled"]
Discount = Literal["none", "poly", "threshold"]
Optimiser = Literal["adamw", "adamw_08", "adamw_nesterov", "muon", "orthogonal"]
Line = Literal["1000/1000", "100/100", "100/20", "20/5"]
"""Mbit/s down and up; the last one stalls now and then."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outer rule. `lookahead`: Nesterov's form instead of heavy ball.

    `period` and `spread`: N and c of a delayed momentum. `buffer`: contributions that a server collects before it steps
    (FedBuff).
    """

    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    lookahead: bool = False
    period: int = 1
    spread: float = 0.0
    buffer: int = 1


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines and lines of volunteers (`volunteer_model`), under which a run ends after `hours`, not by a budget.

    `churn`: how often a peer that is there goes away, times an hour. `inequality`: how many times as long as the
    fastest machine's an inner step of the slowest takes.
    """

    churn: float = 0.0
    inequality: float = 1.0
    line: Line = "100/100"
    hours: float = 3.0


class Adapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters (LoRA) over a frozen model that one machine has trained on another text, from the cell's seed.

    `trained`: both matrices of each adapter; B alone (FFA-LoRA); or, in gossip, B in one round and A in the next.
    """

    base_text: Corpus | Prose
    base_steps: int = 500
    base_rate: float = 1e-2
    rank: int = 4
    trained: Literal["both", "b", "alternating"] = "both"


class FineTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one machine does with the merged model of a run: a short training on another text, once at each rate."""

    text: Corpus | Prose
    steps: int = 80
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run.

    `steps`: inner steps of each replica; times `replicas` it is the budget, which replicas of unequal speed share
    unequally. `inner_steps`: of the fastest replica between two rounds, `late_inner_steps` at the end of the run (None:
    the same all along). `group`: replicas that meet in a round. `routing`: between two stages, None for one stage.
    `dynamic`: inner steps between rounds follow a replica's speed.

    `common_start`: share of the budget that is trained data-parallel before the method begins. `often_at_end`: share of
    it, the last one, in which rounds are as frequent as at the beginning. `last_rounds`: rounds in pairs, all replicas
    at once, after the last inner step.
    `weighed`: of gossip and of means over all or over groups: they are weighed by the inner steps that each brings.
    `scale`: how large the model is, `text`: what it is trained on and judged by (`task`).
    `fragments`: in which the weights travel, one after the other. `overlap`: inner steps that a replica takes while one
    travels. `mixing`: the share of its own weights that it keeps when one arrives.
    `density`: of a mean over all, the share of values that a replica sends. `pushes`: replicas to which each sends.
    `batch`: by which factor an inner step has more sequences; it takes as many times as long.
    `sharding`: all replicas draw from all of the text, or each from a part of its own, cut by file names; or, at a
    server, each round from the part that is behind most.
    Of a server alone: `grace_s`: how long the first to arrive waits for others to begin with. `discount`: of
    pseudo-gradients by their staleness. `compensation`: of how far the weights have moved meanwhile.
    Of asynchronous gossip alone: `slower_lines`: by which factor. `charged`: coding and outer steps take the device's
    time, in their turn. `beside`: they take it beside the inner steps. `roster_lag_s`: by how much what is known of the
    others is out of date. `appointments`: who meets whom and when is agreed a round ahead, with step sizes that are
    stale by a round and wider by this factor; None: in the round itself, as in production.
    `conditions`: of the methods `quorum_mean`, `late_mean` and `gossip`; `steps` are then those of the fastest machine.
    `adapters`: what is trained in the place of all weights; `text` is then what they are trained on and judged by.
    `fine_tuning`: what the merged model is trained on at the end; its losses there are among the notes of the result.
    `optimiser`: by what replicas step inside; all held-out text is then scored at the end. None: by AdamW.
    "adamw_08": AdamW with 0.8 for beta1 instead of 0.9. "adamw_nesterov": AdamW that steps by Nesterov's momentum.
    "orthogonal": the same, with the steps of the layers' matrices orthogonal (`inner.orthogonal`).
    """

    method: Method
    replicas: int
    steps: int
    learning_rate: float
    seed: int = 0
    speeds: Speeds = "none"
    rule: Rule = Rule()
    inner_steps: int = 1
    late_inner_steps: int | None = None
    group: int = 2
    routing: Literal["random", "fixed"] | None = None
    dynamic: bool = False
    codec: Codec = "float32"
    common_start: float = 0.0
    often_at_end: float = 0.0
    last_rounds: int = 0
    weighed: bool = False
    slower_lines: float = 1.0
    charged: bool = False
    beside: bool = False
    roster_lag_s: float = 0.0
    scale: Scale = "full"
    text: Corpus | Prose = "library"
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    density: float = 1.0
    pushes: int = 1
    batch: int = 1
    sharding: Sharding = "alike"
    grace_s: float = 0.0
    discount: Discount = "none"
    compensation: float = 0.0
    conditions: Conditions | None = None
    adapters: Adapters | None = None
    fine_tuning: FineTuning | None = None
    optimiser: Optimiser | None = None
    appointments: float | None = None

    @property
    def budget(self) -> int:
        """Inner steps of all replicas together."""
        return self.replicas * self.steps

    @property
    def key(self) -> str:
        """The digest under which the result is kept."""
        counting = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, default in ADDED_LATER.items():
            if counting[name] == default:
                del counting[name]
        return hashlib.sha256(msgspec.json.encode(counting)).hexdigest()[:16]


ADDED_LATER = {
    field.name: field.default
    for field in msgspec.structs.fields(Cell)
    if field.name
    in (
        *("common_start", "often_at_end", "last_rounds", "weighed", "slower_lines", "charged", "beside"),
        *("roster_lag_s", "scale", "text", "fragments", "overlap", "mixing", "density", "pushes"),
        *("batch", "sharding", "grace_s", "discount", "compensation", "conditions", "adapters"),
        *("fine_tuning", "optimiser", "appointments"),
    )
}
"""Fields that results from before do not know, and their defaults."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm at one moment of a run. Losses are nats a token on held-out text.

    `share`: of the token budget that is spent, or of the hours. `merged`: loss of the merged model. `single`: mean loss
    of two replicas. `spread`: standard deviation of a weight among replicas, root mean square over all weights.
    `sent_bytes`: by all replicas until then, where it is counted.
    """

    share: float
    virtual_s: float
    merged: float
    single: float
    spread: float
    learning_rate: float
    sent_bytes: float = 0.0


class Result(msgspec.Struct, kw_only=True):
    """What a run came to. `single`: mean over all replicas at the end. `busy`: device time over virtual time, mean of
    all replicas, while the budget lasts. `bytes_per_step`: sent by a replica, over its inner steps.
    `fast_busy`: of the fastest replica. `held_out`: losses of parts of the held-out text whose mean is `merged`.
    """

    cell: Cell
    merged: float
    single: float
    spread: float
    virtual_s: float
    busy: float
    fast_busy: float
    bytes_per_step: float
    rounds: float
    steps_taken: tuple[int, ...]
    curve: tuple[Point, ...]
    wall_s: float
    notes: dict[str, float] = {}
    held_out: tuple[float, ...] = ()
    code: str = ""
    """A digest of the sources that the result depends on; empty for one from before they were noted."""
