"""One sentence says what keeps a swarm from going faster; the simulator's report and the live views share its words.

A simulation knows exactly what each device waited for over a whole run (`noloco_node.sim.report.text`). A live view
knows only what peers report at this moment. It says the first of these that holds:

1. the run is over, or nobody is there;
2. a stage has no replica, or none that trains yet;
3. half of a stage's replicas look for one of the next stage;
4. nothing is trained;
5. the devices of one stage, or of all stages alike, are nearly always busy; or one stage is far busier than the rest;
6. half of a stage's replicas wait for room at the next;
7. otherwise replicas wait for each other, and no device is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from noloco_node.run.peer_state import Wait, WaitCause
from noloco_node.swarm.shards import StageSize

NEARLY_FULL, HALF_FULL = 0.75, 0.5
ALIKE = 0.85  # stages whose devices are at least so busy, measured by the busiest, count as equally busy
STANDS_OUT = 1.5


class Cause(StrEnum):
    """Why a device stands still; of several causes, the first one counts."""

    JOINING = "joining"  # the peer looks for a place, or copies the weights of another
    ENDING = "ending"  # the run's tokens are used up, or the peer is on its way out
    GOSSIP = "gossip"  # a blocking round drains and exchanges, or the pause between two steps takes long
    ROUTE = "no route"  # no replica of the next stage can be reached; or the source pauses before it tries again
    ROOM = "room at the next stage"  # replicas of the next stage refused for now
    WINDOW = "end of the window"
    """More microbatches wait at the admission window, but the window is complete but for those that are further down;
    or gradients have come that belong to the next window."""
    REPLIES = "replies"  # all microbatches of the window, or of both, are further down, and no more are at the gate
    MICROBATCHES = "microbatches"  # the window has room, and the stage before sends nothing


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
CAUSES = {
    WaitCause.ROOM: Cause.ROOM,
    WaitCause.REPLICA: Cause.ROUTE,
    WaitCause.ANSWER: Cause.ROUTE,
    WaitCause.MICROBATCHES: Cause.MICROBATCHES,
}
"""Why the device of a replica stands still that waits for this; for anything else, it does not stand still."""
WORDS = {
    WaitCause.REPLICA: "a replica of the next stage to appear in the roster",
    WaitCause.ANSWER: "an answer of the next stage",
    WaitCause.ROOM: "room at the next stage",
    WaitCause.MICROBATCHES: "microbatches from stage {before}",
    WaitCause.STATE: "a replica of stage {stage} that gives its state",
    WaitCause.WEIGHTS: "the weights that the run starts from",
    WaitCause.TOKENIZER: "the run's tokenizer",
    WaitCause.DISK: "its disk, nothing saved",
    WaitCause.OTHER: "",
}


class Bottleneck(NamedTuple):
    """What holds a swarm back, and the stage to look at, if it is one."""

    sentence: str
    stage: int | None = None


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. `replicas`: peers that are there; `training`: those of them that train. `busy`, `gap`: means.

    `error`: the relative standard error of these numbers and of the speed; 0 where all peers are known.

    `waits`: the most frequent wait of its replicas, in words; `waiting`: how many have it; `cause`: why their devices
    stand still, if they do.
    """

    stage: int
    replicas: int
    training: int
    tokens_per_s: float = 0.0
    busy: float | None = None
    gap: float | None = None
    waits: str | None = None
    waiting: int = 0
    cause: Cause | None = None
    error: float = 0.0

    @property
    def size(self) -> StageSize:
        return StageSize(self.replicas, self.error)


def wait_words(wait: Wait, stage: int) -> str:
    words = WORDS[wait.cause].format(stage=stage, before=stage - 1)
    return ": ".join(filter(None, (words, wait.detail)))


def all_waits(waiting: Sequence[Wait], stage: int) -> str:
    """Return all waits of a peer, and how long each has lasted, in one line."""
    ends = ("" if wait.seconds is None else f", for {wait.seconds:.0f} s" for wait in waiting)
    return "; ".join(wait_words(wait, stage) + end for wait, end in zip(waiting, ends, strict=True))


def devices_bottleneck(work: Mapping[int, float], *, is_over: bool) -> Bottleneck | None:
    """Say which stage's devices are the limit, or were in a run that is over. `work`: share of busy time, by stage."""
    busiest = max(work, key=lambda stage: work[stage])
    rest = [share for stage, share in work.items() if stage != busiest]
    most, others = work[busiest], sum(rest) / len(rest) if rest else 0.0
    were, span = ("were", "the training") if is_over else ("are", "the time")
    if rest and min(rest) >= ALIKE * most and most >= NEARLY_FULL:
        share = f"{min(rest):.0%} of {span} or more" if min(rest) < 0.995 else f"all of {span}"
        alike = f"The devices are the limit, of all stages alike: busy for {share}."
        return Bottleneck(alike)
    if most < NEARLY_FULL and (not rest or most < STANDS_OUT * max(rest)):
        return None
    if not rest:
        return Bottleneck(f"The devices are the limit: they {were} busy for {most:.0%} of {span}.")
    alone = f"Stage {busiest} is the bottleneck: its devices {were} busy for {most:.0%} of {span}, "
    return Bottleneck(f"{alone}those of the other stages for {others:.0%}.", busiest)


def present_bottleneck(stages: Sequence[StageView], tokens_per_s: float, *, is_over: bool) -> Bottleneck:
    """Return what holds the swarm back at this moment; `stages`: all, in order."""
    if is_over:
        return Bottleneck("The run is over: its tokens are used up.")
    if not any(each.replicas for each in stages):
        return Bottleneck("Nothing is trained: nobody is there.")
    broken = _unserved(stages) or _out_of_reach(stages)
    if broken:
        return broken
    if tokens_per_s <= 0.0:
        stuck = _worst(stages, *Cause)
        if stuck is not None:
            return Bottleneck(f"Nothing is trained: stage {stuck.stage} waits for {stuck.waits}.", stuck.stage)
        return Bottleneck("No speed is known yet: the first inner steps are under way.")
    work = {each.stage: each.busy for each in stages if each.busy is not None}
    found = devices_bottleneck(work, is_over=False) if len(work) == len(stages) else None
    if found is not None:
        return found
    refused = _worst(stages, Cause.ROOM)
    if refused is not None:
        full = refused.stage + 1
        share = f"{refused.waiting} of {refused.replicas} of stage {refused.stage} wait for room."
        return Bottleneck(f"Stage {full} is the bottleneck: its replicas refuse microbatches, and {share}", full)
    if not work:
        return Bottleneck("Nobody has said yet how busy its device is.")
    most = f"{max(work.values()):.0%} of the time"
    if len(stages) == 1:
        alone = f"The devices are busy for {most}, and there is no other stage to wait for: cores are shared, or rounds"
        return Bottleneck(f"{alone} hold them up.")
    order = "replicas wait for each other, a line, a core, or the end of a window."
    return Bottleneck(f"No stage's devices are busy for more than {most}: {order}")


def _worst(stages: Sequence[StageView], *causes: Cause) -> StageView | None:
    """Return the stage with the largest share of replicas that wait for one of these, if it is a half or more."""
    stuck = [each for each in stages if each.cause in causes and 2 * each.waiting >= each.replicas]
    return max(stuck, key=lambda each: each.waiting / each.replicas, default=None)


def _unserved(stages: Sequence[StageView]) -> Bottleneck | None:
    empty = [each.stage for each in stages if not each.replicas]
    if empty:
        which = f"stage {empty[0]}" if len(empty) == 1 else f"stages {', '.join(map(str, empty))}"
        return Bottleneck(f"Nobody serves {which}: no microbatch gets through until somebody does.", empty[0])
    idle = next((each for each in stages if not each.training), None)
    if idle is None or not any(each.training for each in stages):
        return None  # where nobody has begun yet, no stage is behind
    none = "its only replica does not train" if idle.replicas == 1 else f"none of its {idle.replicas} replicas trains"
    return Bottleneck(f"Stage {idle.stage} is the bottleneck: {none}.", idle.stage)


def _out_of_reach(stages: Sequence[StageView]) -> Bottleneck | None:
    lost = _worst(stages, Cause.ROUTE)
    if lost is None:
        return None
    target = min(lost.stage + 1, len(stages) - 1)
    share = f"{lost.waiting} of {lost.replicas} replicas of stage {lost.stage} look for one of it."
    return Bottleneck(f"Stage {target} is out of reach: {share}", target)
