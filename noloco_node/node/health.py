"""What goes wrong around a node, said to its owner: once when it begins, every few minutes while it lasts, at its end.

- a stage that nobody serves: which, since when, what to do. Nothing is lost by it here, and training resumes by itself;
- a roster that is old, for the DHT cannot be read or nobody is heard: peers are still called as they were last seen;
- our own clock, if it differs from several peers' by more than records are made for;
- a machine that slept, a process that stood still, a clock that was set (`clocks`). Then we publish and read at once;
  and as whoever was away finds everybody else silent, nobody is suspected for what broke meanwhile.

What lasts is also part of our record, so that `status` shows it from anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from noloco_node.journal import events
from noloco_node.machine.clocks import ClockSample, JumpKind, compare, sentence
from noloco_node.machine.interface import Reporter
from noloco_node.run.peer_state import AT_WORK
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.peer_records import CLOCK_ERROR_S
from noloco_node.swarm.roster import Derived, Roster
from noloco_node.swarm.run_samples import run_over
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration

TICK_S = 5.0
REMIND_S = 300.0
NEVER_SERVED_S = 60.0
"""For which a stage that nobody has served yet is no news: swarms take their time to begin."""
SKEW_S = 60.0
"""By which our clock may differ before it is worth a word; it is measured to some ten seconds."""
GRACE_S = 15.0
"""For which nobody is suspected after we were away."""


class Condition(NamedTuple):
    """Something that lasts. `brief`: for our record; `text`: for our owner; `over`: what to say at its end."""

    brief: str
    text: str
    over: str


class Said(NamedTuple):
    """When a condition was said last (loop seconds), and what is to be said at its end."""

    at_s: float
    over: str


class Spoken(NamedTuple):
    """One thing to say: of which condition, in which words, and whether it is over."""

    what: str
    text: str
    over: bool


def warnings_due(
    said: Mapping[str, Said], conditions: Mapping[str, Condition], now_s: float
) -> tuple[tuple[Spoken, ...], dict[str, Said]]:
    """Return what is to be said now, and what will have been said then."""
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
    """Describe a stage that has had no replica at work for so long. `joining`: peers on their way to it."""
    since = f"stage {number} has had no replica for {format_duration(seconds)}"
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
    """Describe a roster of which nothing new was heard for so long."""
    since = f"nothing was heard of the swarm for {format_duration(seconds)}"
    return Condition(
        since,
        f"{since}: the DHT does not answer, or nobody else publishes. Going on with the peers known then; "
        "if it lasts, look at this machine's network",
        "the swarm is heard again",
    )


def wrong_clock(skew_s: float) -> Condition:
    """Describe our clock, which is ahead by so much or, where negative, behind."""
    side = "ahead of" if skew_s > 0.0 else "behind"
    wrong = f"this machine's clock is {format_duration(abs(skew_s))} {side} the other peers'"
    grave = "; beyond five minutes peers cannot see each other's records" if abs(skew_s) > CLOCK_ERROR_S / 2 else ""
    return Condition(
        wrong, f"{wrong}{grave}. Set it: `timedatectl set-ntp true` on Linux", "this machine's clock is right again"
    )


def _served(roster: Roster) -> tuple[bool, ...]:
    """Say of each stage whether anybody is at work there."""
    return tuple(any(record.state in AT_WORK for record in records) for records in roster.stages)


class HealthMonitor:
    """Looks around every few seconds while it runs. `forgive(seconds)`: suspect nobody for so long."""

    def __init__(
        self,
        membership: Membership,
        reporter: Reporter,
        unix_time: Callable[[], float],
        asleep_s: Callable[[], float],
        forgive: Callable[[float], None],
    ) -> None:
        self._membership, self._reporter, self._forgive = membership, reporter, forgive
        self._warn = reporter.warn or reporter.say
        self._unix_time, self._asleep_s = unix_time, asleep_s
        self._clocks = self._look_at_clocks()
        self._served_now = Derived(lambda: membership.roster, _served)
        self._empty_since: dict[int, float] = {}
        self._served: set[int] = set()
        self._said: dict[str, Said] = {}
        self._conditions: dict[str, Condition] = {}

    @property
    def trouble(self) -> tuple[str, ...]:
        """What lasts now, each in few words."""
        return tuple(condition.brief for condition in self._conditions.values())

    async def run(self) -> NoReturn:
        """Look around until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look(TICK_S)

    def look(self, expected_s: float) -> None:
        """Look at clocks and roster, `expected_s` after the last time, and say what is to be said."""
        before, self._clocks = self._clocks, self._look_at_clocks()
        happened = compare(before, self._clocks, expected_s)
        for happening in happened:
            self._warn(sentence(happening))
            self._reporter.record(events.Noticed(what=str(happening.kind), text=sentence(happening)))
        if happened:
            self._membership.publish_now()
        if any(happening.kind is not JumpKind.CLOCK_SET or happening.seconds > 0.0 for happening in happened):
            self._forgive(GRACE_S)
        self._conditions = self._look_around(self._membership.roster)
        if not self._conditions and not self._said:
            return
        # What cannot be seen now is not over.
        blind = "roster" in self._conditions
        kept = {what: known for what, known in self._said.items() if blind and what not in self._conditions}
        known = {what: known for what, known in self._said.items() if what not in kept}
        spoken, said = warnings_due(known, self._conditions, self._clocks.loop_s)
        self._said = said | kept
        for what, text, over in spoken:
            (self._reporter.say if over else self._warn)(text)
            self._reporter.record(events.Noticed(what=what, text=text, over=over))

    def _look_at_clocks(self) -> ClockSample:
        return ClockSample(loop_s(), self._unix_time(), self._asleep_s())

    def _look_around(self, roster: Roster) -> dict[str, Condition]:
        now_s, found = self._clocks.loop_s, {}
        if roster.old_since_s is not None:
            # Who is gone, and how right our clock is, cannot be said either.
            return {"roster": old_roster(now_s - roster.old_since_s)}
        over = run_over(roster.sources, roster.sources_finished)
        for number in self._membership.watched:
            if over or self._served_now()[number]:
                self._served.add(number)
                self._empty_since.pop(number, None)
                continue
            empty_s = now_s - self._empty_since.setdefault(number, now_s)
            if number in self._served or empty_s >= NEVER_SERVED_S:
                found[f"stage {number}"] = deserted(number, empty_s, len(roster.stage(number)))
        skew_s = self._membership.skew_s
        if skew_s is not None and abs(skew_s) >= SKEW_S:
            found["clock"] = wrong_clock(skew_s)
        return found
