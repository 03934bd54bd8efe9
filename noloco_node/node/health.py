"""Tells the owner what goes wrong around a node: when it begins, every few minutes while it lasts, and at its end.

- a stage that no peer serves: which, since when, and what to do. Nothing is lost here, and training resumes by itself;
- a training that stands still, and rounds that meet nobody: why, as the counts of the time since say;
- an old roster: the DHT cannot be read, or no other peer publishes. Peers are still called as they were last seen;
- a clock that differs by more than a minute from the time by which the peers go;
- a machine that slept, a process that stood still, a clock that was set. Then the node publishes and reads at once, and
  suspects no peer for a while, because calls broke off while the node was away.

The last case follows from three clocks. The event loop's clock runs evenly and, on most systems, stops while the
machine sleeps; the system tells how long it slept. The time of day runs through a sleep, and may be set at any moment.
If loop time and sleep do not explain the change of the time of day, the clock was set. If the loop is far too late, the
process was stopped or starved. On a system that does not tell its sleep, a sleep looks like a clock that was put
forward.

Conditions that last are also part of our record, so that `status` shows them from anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, NoReturn

from noloco_node.machine.interface import Host, Reporter
from noloco_node.machine.system import counts_sleep
from noloco_node.network.swarm_clock import CLOCK_DOUBT_S
from noloco_node.run.peer_state import AT_WORK
from noloco_node.swarm.membership import LIFETIME_S, Membership
from noloco_node.swarm.roster import Derived, Roster
from noloco_node.swarm.run_samples import run_over
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration

LEAST_S = 5.0  # shorter sleeps and changes of the clock are not reported
STILL_S = 10.0  # the event loop may be late by this: a busy machine is not a stopped one
TICK_S = 5.0
REMIND_S = 300.0
NEVER_SERVED_S = 60.0
"""No warning of a stage that no peer has served yet for this long, since swarms take time to begin."""
OF_TRAINING = ("stall", "rounds")  # the conditions of the stage that we serve
GRACE_S = 15.0  # after we were away, no peer is suspected for this long


class JumpKind(StrEnum):
    SLEPT = "slept"
    STOOD_STILL = "stood still"
    CLOCK_SET = "clock set"


class ClockSample(NamedTuple):
    """The clocks at one moment: the event loop's, the time of day, and the seconds slept since the machine started."""

    loop_s: float
    unix_s: float
    asleep_s: float


class ClockJump(NamedTuple):
    """What happened between two samples, and its seconds; negative for a clock that was set back."""

    kind: JumpKind
    seconds: float


def compare(
    before: ClockSample, after: ClockSample, expected_s: float, *, loop_counts_sleep: bool = False
) -> tuple[ClockJump, ...]:
    """Return what happened between two samples that should be `expected_s` apart."""
    slept_s = after.asleep_s - before.asleep_s
    ran_s = after.loop_s - before.loop_s - (slept_s if loop_counts_sleep else 0.0)
    set_s = after.unix_s - before.unix_s - ran_s - slept_s
    still_s = ran_s - expected_s
    found = []
    if slept_s >= LEAST_S:
        found.append(ClockJump(JumpKind.SLEPT, slept_s))
    if still_s >= STILL_S:
        found.append(ClockJump(JumpKind.STOOD_STILL, still_s))
    if abs(set_s) >= LEAST_S:
        found.append(ClockJump(JumpKind.CLOCK_SET, set_s))
    return tuple(found)


def sentence(jump: ClockJump) -> str:
    how_long = format_duration(abs(jump.seconds))
    if jump.kind is JumpKind.SLEPT:
        return f"this machine slept for {how_long}: looking who is there, and going on"
    if jump.kind is JumpKind.STOOD_STILL:
        return f"this process stood still for {how_long} (stopped, or starved): looking who is there, and going on"
    if jump.seconds > 0.0:
        return f"the clock went forward by {how_long} (it was set, or the machine slept): saying anew that we are here"
    return f"the clock was set back by {how_long}: saying anew that we are here"


class Condition(NamedTuple):
    """A condition that lasts. `brief`: for our record; `text`: for our owner; `over`: the line for its end."""

    brief: str
    text: str
    over: str


class Said(NamedTuple):
    """When we last told the owner of a condition (loop seconds), and the line for its end."""

    at_s: float
    over: str


class Spoken(NamedTuple):
    """A line for the owner, its condition, and whether the condition is over."""

    what: str
    text: str
    over: bool


def warnings_due(
    said: Mapping[str, Said], conditions: Mapping[str, Condition], now_s: float
) -> tuple[tuple[Spoken, ...], dict[str, Said]]:
    """Return the warnings due now and the updated warning history."""
    spoken = [Spoken(what, known.over, True) for what, known in said.items() if what not in conditions]
    after = {}
    for what, condition in conditions.items():
        known = said.get(what)
        if known is None or now_s - known.at_s >= REMIND_S:
            spoken.append(Spoken(what, condition.text, False))
            known = Said(now_s, condition.over)
        after[what] = known
    return tuple(spoken), after


def deserted(number: int, seconds: float, joining: int) -> Condition:
    """Describe a stage that has had no replica at work for so long. `joining`: peers that join it."""
    since = f"stage {number} has had no replica for {'a moment' if seconds < 1.0 else format_duration(seconds)}"
    if joining:
        return Condition(
            f"{since}, {joining} joining",
            f"{since}; {joining} {'peer is' if joining == 1 else 'peers are'} joining it, and training resumes then",
            f"stage {number} is served again",
        )
    return Condition(
        since,
        f"{since}: microbatches cannot pass. Start a peer with --stage {number}; one that returns brings its "
        "checkpoint, and kept snapshots revive the stage as well. Nothing is lost here, and training resumes by itself",
        f"stage {number} is served again",
    )


def old_roster(seconds: float) -> Condition:
    """Describe a roster without news for so long."""
    since = f"nothing was heard of the swarm for {format_duration(seconds)}"
    return Condition(
        since,
        f"{since}: the DHT does not answer, or nobody else publishes. Going on with the peers known then; "
        "if it lasts, look at this machine's network",
        "the swarm is heard again",
    )


def wrong_clock(skew_s: float) -> Condition:
    """Describe our clock, which is ahead by so much or, if negative, behind."""
    side = "ahead of" if skew_s > 0.0 else "behind"
    wrong = f"this machine's clock is {format_duration(abs(skew_s))} {side} the other peers'"
    return Condition(
        wrong,
        f"{wrong}. We go by theirs. If ours is the wrong one, set it: `timedatectl set-ntp true` on Linux",
        "this machine's clock is right again",
    )


def unlisted(seconds: float) -> Condition:
    """Describe that the DHT has taken no record of ours for so long."""
    since = f"no node of the DHT has taken our record for {format_duration(seconds)}"
    return Condition(
        since,
        f"{since}: the others do not know that we are here. The nodes that keep the records of our stage cannot be "
        "reached, or have no room for more; we go on trying. If it lasts, look at this machine's network, or join with "
        "another --stage",
        "our record is in the DHT again",
    )


def _served(roster: Roster) -> tuple[bool, ...]:
    return tuple(any(record.state in AT_WORK for record in records) for records in roster.stages)


class HealthMonitor:
    """Checks clocks and roster every few seconds while it runs.

    `forgive(seconds)`: suspect no peer for so long. `of_training(explained)`: returns the conditions of the training;
    `explained`: the time until now is no stall of its own, because we were away or have told why it stands still.
    """

    def __init__(
        self,
        membership: Membership,
        reporter: Reporter,
        host: Host,
        forgive: Callable[[float], None],
        of_training: Callable[[bool], dict[str, Condition]],
    ) -> None:
        self._membership, self._reporter, self._forgive = membership, reporter, forgive
        self._of_training, self._host = of_training, host
        self._clocks = self._look_at_clocks()
        self._served_now = Derived(lambda: membership.roster, _served)
        self._empty_since: dict[int, float] = {}
        self._served: set[int] = set()
        self._said: dict[str, Said] = {}
        self._conditions: dict[str, Condition] = {}

    @property
    def trouble(self) -> tuple[str, ...]:
        """The present conditions, each in few words."""
        return tuple(condition.brief for condition in self._conditions.values())

    def leave_stage(self) -> None:
        """Forget what was said of the training at a stage that we leave."""
        self._forget(what for what in self._said if what in OF_TRAINING)

    def _forget(self, names: Iterable[str]) -> None:
        """Forget conditions whose end we shall not see: they are not called over."""
        for what in tuple(names):
            del self._said[what]

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(TICK_S)
            self.look(TICK_S)

    def look(self, expected_s: float) -> None:
        """Check clocks and roster, `expected_s` after the last time, and give the warnings due."""
        before, self._clocks = self._clocks, self._look_at_clocks()
        sleeps = counts_sleep(asyncio.get_running_loop())
        happened = compare(before, self._clocks, expected_s, loop_counts_sleep=sleeps)
        for happening in happened:
            self._reporter.notice(str(happening.kind), sentence(happening))
        if happened:
            self._membership.publish_now()
        away = any(happening.kind is not JumpKind.CLOCK_SET or happening.seconds > 0.0 for happening in happened)
        if away:
            self._forgive(GRACE_S)
        self._conditions = self._look_around(self._membership.roster, away)
        if not self._conditions and not self._said:
            return
        # A condition that we cannot see now is not over.
        blind = "roster" in self._conditions
        kept = {what: known for what, known in self._said.items() if blind and what not in self._conditions}
        known = {what: known for what, known in self._said.items() if what not in kept}
        spoken, said = warnings_due(known, self._conditions, self._clocks.loop_s)
        self._said = said | kept
        for what, text, over in spoken:
            self._reporter.notice(what, text, over=over)

    def _look_at_clocks(self) -> ClockSample:
        return ClockSample(loop_s(), self._host.unix_time() + self._host.clock_ahead_s(), self._host.asleep_s())

    def _look_around(self, roster: Roster, away: bool) -> dict[str, Condition]:
        now_s, found, unsaid = self._clocks.loop_s, dict[str, Condition](), "stall" not in self._said
        skew_s = self._host.clock_ahead_s()
        if abs(skew_s) >= CLOCK_DOUBT_S:
            found["clock"] = wrong_clock(skew_s)
        if roster.old_since_s is not None:
            # Then we cannot tell which peers are gone.
            self._of_training(unsaid)
            return found | {"roster": old_roster(now_s - roster.old_since_s)}
        since_s = self._membership.unlisted_since_s
        if since_s is not None and now_s - since_s >= LIFETIME_S:
            found["record"] = unlisted(now_s - since_s)
        over = run_over(roster.sources, roster.sources_finished)
        watched = () if over else self._membership.watched
        self._forget(what for what in self._said if what.startswith("stage ") and int(what[6:]) not in watched)
        for number in watched:
            if self._served_now()[number]:
                self._served.add(number)
                self._empty_since.pop(number, None)
                continue
            empty_s = now_s - self._empty_since.setdefault(number, now_s)
            if number in self._served or empty_s >= NEVER_SERVED_S:
                found[f"stage {number}"] = deserted(number, empty_s, len(roster.stage(number)))
        return found if over else found | self._of_training(unsaid and (away or bool(self._empty_since)))
