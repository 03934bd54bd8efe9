"""What keeps a swarm from going faster, in one sentence: what the simulator's report and the live views have in common.

A simulation knows exactly what each device waited for over a whole run, and what its lines carried
(`noloco_node.sim.report.bottleneck`). A live view has only what peers say of themselves at this moment: their devices'
time a microbatch, their speed, and what they wait for in words. It says the first of these that holds:

1. the run is over, or nobody is there;
2. nobody serves a stage, or nobody of it trains yet;
3. half of a stage's replicas look for one of the next stage;
4. nothing is trained;
5. devices are nearly always busy: those of one stage, or all of them alike; or one stage stands out far above the rest;
6. half of a stage's replicas wait for room at the next;
7. else no device is the limit but the order of things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

NEARLY_FULL, HALF_FULL = 0.75, 0.5
ALIKE = 0.85
"""Stages whose devices are at least so busy, measured by the busiest, count as equally busy."""
STANDS_OUT = 1.5


class Cause(StrEnum):
    """What a device waits for. Order counts: the first that holds."""

    JOINING = "joining"
    """The peer looks for a place, or copies the weights of another."""
    ENDING = "ending"
    """The run's tokens are used up, or the peer is on its way out."""
    GOSSIP = "gossip"
    """A blocking round drains and exchanges, or the pause between two steps lasts."""
    ROUTE = "no route"
    """No replica of the next stage can be reached; or the source pauses before it tries again."""
    ROOM = "room at the next stage"
    """Replicas of the next stage refused for now."""
    WINDOW = "end of the window"
    """More microbatches wait at the gate, but the window is complete but for those that are further down; or gradients
    have come that belong to the next window."""
    REPLIES = "replies"
    """All microbatches of the window, or of both, are further down, and no more are at the gate."""
    MICROBATCHES = "microbatches"
    """The window has room, and the stage before sends nothing."""


WHILE = {
    Cause.JOINING: "looked for a place or copied weights",
    Cause.ENDING: "were leaving",
    Cause.GOSSIP: "stood still in blocking rounds",
    Cause.ROUTE: "looked for a replica of the next stage, and reached none",
    Cause.ROOM: "were refused by the next stage",
    Cause.WINDOW: "waited for the end of a window",
    Cause.REPLIES: "waited for replies",
    Cause.MICROBATCHES: "waited for microbatches",
}
SAID = (
    ("room at the next stage", Cause.ROOM),
    ("a replica of the next stage", Cause.ROUTE),
    ("an answer of the next stage", Cause.ROUTE),
    ("microbatches from stage", Cause.MICROBATCHES),
)
"""How a replica's words on what it waits for begin (`pipeline.next_stage`, `noloco_node.node.replica`)."""


class StageLoad(NamedTuple):
    """One stage at this moment. `busy`: share of their time for which devices that train work; None if unknown.

    `waits`: what `waiting` of its replicas wait for, in their words.
    """

    stage: int
    replicas: int
    training: int
    busy: float | None = None
    waits: str | None = None
    waiting: int = 0

    @property
    def cause(self) -> Cause | None:
        """What half of its replicas or more wait for."""
        if self.waits is None or 2 * self.waiting < self.replicas:
            return None
        return cause_of(self.waits)


def cause_of(waits: str) -> Cause | None:
    """Return what a replica waits for by its words; None if by these it is something else."""
    return next((cause for words, cause in SAID if waits.startswith(words)), None)


class Wording(NamedTuple):
    """How a sentence is told: of a run that is over, or of this moment."""

    were: str
    span: str


PAST, PRESENT = Wording("were", "the training"), Wording("are", "the time")


def devices_bottleneck(work: Mapping[int, float], wording: Wording) -> str | None:
    """Say which stage's devices are the limit, if any are. `work`: share of the time at work, by stage."""
    busiest = max(work, key=lambda stage: work[stage])
    rest = [share for stage, share in work.items() if stage != busiest]
    most, others = work[busiest], sum(rest) / len(rest) if rest else 0.0
    were, span = wording
    if rest and min(rest) >= ALIKE * most and most >= NEARLY_FULL:
        return f"The devices are the limit, of all stages alike: busy for {min(rest):.0%} of {span} or more."
    if most < NEARLY_FULL and (not rest or most < STANDS_OUT * max(rest)):
        return None
    if not rest:
        return f"The devices are the limit: they {were} busy for {most:.0%} of {span}."
    return (
        f"Stage {busiest} is the bottleneck: its devices {were} busy for {most:.0%} of {span}, "
        f"those of the other stages for {others:.0%}."
    )


def present_bottleneck(loads: Sequence[StageLoad], tokens_per_s: float, *, is_over: bool) -> str:
    """Return the sentence of this moment; `loads`: every stage in order."""
    if is_over:
        return "The run is over: its tokens are used up."
    if not any(load.replicas for load in loads):
        return "Nothing is trained: nobody is there."
    broken = _unserved(loads) or _out_of_reach(loads)
    if broken:
        return broken
    if tokens_per_s <= 0.0:
        stuck = [load for load in loads if load.cause is not None]
        if stuck:
            worst = max(stuck, key=lambda load: load.waiting / load.replicas)
            return f"Nothing is trained: stage {worst.stage} waits for {worst.waits}."
        return "No speed is known yet: the first inner steps are under way."
    work = {load.stage: load.busy for load in loads if load.busy is not None}
    sentence = devices_bottleneck(work, PRESENT) if len(work) == len(loads) else None
    refused = [load for load in loads if load.cause is Cause.ROOM]
    if sentence is None and refused:
        worst = max(refused, key=lambda load: load.waiting / load.replicas)
        return (
            f"Stage {worst.stage + 1} is the bottleneck: its replicas refuse microbatches, and {worst.waiting} of "
            f"{worst.replicas} of stage {worst.stage} wait for room."
        )
    if not work:
        return "Nobody has said yet how busy its device is."
    most = f"{max(work.values()):.0%} of the time"
    if len(loads) == 1:
        alone = f"The devices are busy for {most}, and there is no other stage to wait for: cores are shared, or rounds"
        return sentence or f"{alone} hold them up."
    return sentence or (
        f"No stage's devices are busy for more than {most}: replicas wait for each other, a line, a core, or the end "
        "of a window."
    )


def _unserved(loads: Sequence[StageLoad]) -> str | None:
    empty = [load.stage for load in loads if not load.replicas]
    if empty:
        which = f"stage {empty[0]}" if len(empty) == 1 else f"stages {', '.join(map(str, empty))}"
        return f"Nobody serves {which}: no microbatch gets through until somebody does."
    if not any(load.training for load in loads):
        return None  # nobody has begun yet, and no stage is behind
    idle = next((load for load in loads if not load.training), None)
    if idle is None:
        return None
    none = "its only replica does not train" if idle.replicas == 1 else f"none of its {idle.replicas} replicas trains"
    return f"Stage {idle.stage} is the bottleneck: {none}."


def _out_of_reach(loads: Sequence[StageLoad]) -> str | None:
    lost = [load for load in loads if load.cause is Cause.ROUTE]
    if not lost:
        return None
    worst = max(lost, key=lambda load: load.waiting / load.replicas)
    return (
        f"Stage {min(worst.stage + 1, len(loads) - 1)} is out of reach: {worst.waiting} of {worst.replicas} replicas "
        f"of stage {worst.stage} look for one of it."
    )
