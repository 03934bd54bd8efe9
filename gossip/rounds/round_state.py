"""Where a replica's gossip stands: its round, whom it asks, whom it meets, and what waits for the next pause.

One object that the parts of a replica's gossip share: `Rounds` opens and ends rounds, `Offers` asks and answers,
`Meetings` meets, `Ahead` works between two rounds. Each changes what its own story is about, and rings for the others:
whoever waits here wakes and looks again, so no change is missed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gossip.interface import Origin, OuterStepTaken, RoundContext, RoundSettings
from gossip.rounds.matching import AnswerState, heal
from gossip.rounds.outer_optimiser import Snapshot, Step
from gossip.rounds.partners import SLACK_S, PartnerQueue, PartnerView
from gossip.rounds.round_schedule import RoundSchedule
from gossip.rule.staleness import ROUND_BOUND, Met, staleness

POLL_S = 1.0
"""How often the last round looks whether anybody is left."""
LATE_AT_MOST = 4
"""Exchanges in a row that ran out of time, each of which doubles the time of the next."""
VAIN_AT_MOST = 3
"""Meetings without a step of ours that one partner may have in a round: weather, beyond it mischief."""
COUNTED = (
    *("met", "solo", "deferred", "lost", "implausible", "retaken", "adopted", "too_stale"),
    *("offers_sent", "offers_received", "declined", "unanswered", "bytes_sent", "bytes_received"),
    *("sent_ahead", "spared"),
)


class Meeting:
    """A meeting that was agreed and has not ended. Compared by identity: a new one is never taken for an old one."""

    __slots__ = ("partner", "since_s")

    def __init__(self, partner: str, since_s: float) -> None:
        self.partner, self.since_s = partner, since_s

    def __repr__(self) -> str:
        return f"<Engagement with {self.partner} since {self.since_s:.1f} s>"


class PendingStep(NamedTuple):
    """A step that waits for the next pause; its event still lacks the staleness.

    `last_met`: the round in which the weights after it last met anybody's.
    """

    step: Step
    snapshot_step: int
    event: OuterStepTaken
    last_met: int


class RoundState:
    """One replica between two openings. `last_met`: the round in which its weights last met anybody's."""

    def __init__(self, me: str, settings: RoundSettings, origin: Origin, around: RoundContext) -> None:
        self.me, self.settings = me, settings
        self.others = PartnerView(me, settings.seed, around.partners)
        self.round_schedule = RoundSchedule(settings.inner_steps_per_round, origin.rounds, origin.inner_steps)
        self.rng = random.Random(f"{settings.seed}|jitter|{me}")
        self.prospects = PartnerQueue(settings.patience, self.rng)
        self.last_met = origin.last_met
        self.record_timeout: Counter[str] = Counter()
        """With whom how many meetings of this round have ended without a step of ours."""
        self.late = 0
        """Exchanges that ran out of time of late, less those that did not."""
        self.open = False
        self.leaving = False
        self.snapshot: Snapshot | None = None
        self.asking: str | None = None
        self.engagement: Meeting | None = None
        self.settled: PendingStep | None = None
        self.counts: Counter[str] = Counter()
        self.pause = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def between_rounds(self) -> bool:
        """Whether the slow weights are those of the next meeting: none is open, and no step waits."""
        return not (self.open or self.leaving or self.engagement or self.settled)

    @property
    def met(self) -> Met:
        """What we say of our weights in a meeting."""
        return Met(self.round_schedule.round, self.last_met)

    @property
    def staleness(self) -> int:
        """Rounds since our weights last met anybody's, by our own number."""
        return staleness(self.met, self.round_schedule.round)

    @property
    def next_round(self) -> int:
        """The number that the next round will have, as the roster is now."""
        finished = self.round_schedule.finished
        following = 1 + heal(finished, (), (finished, *self.others.rounds), ROUND_BOUND)
        return max(self.round_schedule.round, following)

    @property
    def exchange_s(self) -> float:
        """How long a meeting may take. Nothing stands still for it, so a slow line is given more time each time.

        In the blocking form work does stand still, and the time stays as it is.
        """
        return self.settings.patience.exchange_s * (1.0 if self.settings.blocking else 2.0**self.late)

    def note_exchange(self, *, late: bool) -> None:
        """Note that a meeting ran out of time, or that it did not."""
        self.late = min(LATE_AT_MOST, self.late + 1) if late else max(0, self.late - 1)

    def preference_delay_s(self, place: int, count: int) -> float:
        """Return for how long preference number `place` of `count` is not good enough; 0 if it is."""
        return self.round_schedule.preference_delay_s(place, count, self.settings.patience.sleep_s)

    def ready_in_s(self) -> float:
        """Estimate the seconds until the next opening."""
        return self.round_schedule.ready_in_s(self.settings.patience.sleep_s)

    def standing(self, sender: str) -> AnswerState:
        """Return what an offer of `sender` is answered by."""
        order = self.others.order(self.round_schedule.round) if self.open else ()
        place = order.index(sender) if sender in order else len(order)
        return AnswerState(
            me=self.me,
            round=self.round_schedule.round,
            open=self.open,
            engaged=self.engagement is not None,
            asking=self.asking,
            leaving=self.leaving,
            had=self.record_timeout[sender] >= VAIN_AT_MOST,
            preference_delay_s=self.preference_delay_s(place, max(len(order), place + 1)),
            ready_in_s=self.ready_in_s(),
        )

    def engage(self, peer: str, their_round: int) -> Meeting:
        """Bind ourselves, open and free, to one partner."""
        self.round_schedule.adopt(their_round, self.others.rounds)
        self.engagement = Meeting(peer, now())
        return self.engagement

    def hopeful(self) -> bool:
        """Say whether this round may still be met."""
        if not self.open:
            return False
        return self.engagement is not None or not self.prospects.nobody_left(self.others.peers)

    def statistics(self) -> dict[str, int | float]:
        """Return counters since the start, and where the replica is."""
        counted: dict[str, int | float] = {name: self.counts[name] for name in COUNTED}
        return counted | {
            "round": self.round_schedule.round,
            "finished": self.round_schedule.finished,
            "healed": self.round_schedule.healed,
            "deferred_in_a_row": self.round_schedule.deferred_in_a_row,
            "last_met": self.last_met,
            "staleness": self.staleness,
            "open": int(self.open),
            "engaged": int(self.engagement is not None),
        }

    def __repr__(self) -> str:
        if self.engagement is not None:
            doing = f"meeting {self.engagement.partner}"
        elif self.settled is not None:
            doing = "about to step"
        else:
            doing = f"open, asking {self.asking or 'nobody just now'}" if self.open else "closed"
        return f"round {self.round_schedule.round}, {self.counts['met']} met, {doing}"

    # Waking up.

    def ring(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def nap(self, seconds: float | None) -> None:
        """Sleep until something changes, at most for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def wait_while(self, condition: Callable[[], bool], until_s: float) -> None:
        """Wait as long as the condition holds, until a loop time at most."""
        while condition() and (left_s := until_s - now()) > SLACK_S:
            await self.nap(min(POLL_S, left_s))


def now() -> float:
    """Return the loop's time in seconds."""
    return asyncio.get_running_loop().time()
