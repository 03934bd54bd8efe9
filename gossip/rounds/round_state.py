"""Where a replica's gossip stands: the phase of its round, its partners, and the step that follows from it.

`Rounds` opens and ends rounds, `MeetingProtocol` meets, `SlowWeightPrefetcher` works between rounds; all share this
object. Each transition wakes those that wait for a change, so none is missed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gossip.exchange.codec import Sides
from gossip.exchange.messages import NOTHING
from gossip.interface import Candidate, Origin, OuterStepTaken, RoundContext
from gossip.rounds.matching import SLACK_S, AnswerState, PartnerQueue, PartnerView, RoundClaims, RoundSchedule
from gossip.rounds.outer_optimiser import Snapshot, Step
from gossip.rule.outer_step import DISOWNED, Tensors, WeightAge, staleness
from gossip.settings import OuterConfig

POLL_S = 1.0  # how often the last round looks whether anybody is left
LATE_AT_MOST = 4  # exchanges in a row that ran out of time, each of which doubles the time of the next
MOST_MET = 256  # partners that are remembered to have been met
COUNTED = (
    *("met", "solo", "skipped", "lost", "implausible", "clipped", "retaken"),
    *("adopted", "too_stale", "sent_ahead", "spared"),
    *("proposals_sent", "proposals_received", "declined", "unanswered", "bytes_sent", "bytes_received"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """A meeting that was agreed and has not ended. Compared by identity: a new one is never taken for an old one."""

    partner: str
    since_s: float


class Prefetched(NamedTuple):
    """Slow weights that a peer and we have swapped ahead of a round, and of which versions."""

    peer: str
    version: int
    """Of ours; both versions change with every outer step."""
    their_version: int
    slow: Sides


@dataclass(slots=True, eq=False)
class Prefetch:
    """The swaps of slow weights since the last outer step: by peer how many have begun, and what they sent in all.

    `held`: of the last peer that has given all.
    """

    held: Prefetched | None = None
    begun: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    bytes_received: int = 0

    def of(self, peer: str) -> Prefetched | None:
        return self.held if self.held is not None and self.held.peer == peer else None

    def version_held(self, peer: str) -> int:
        return NOTHING if (held := self.of(peer)) is None else held.their_version


class PendingStep(NamedTuple):
    """A step that was agreed, or that a replica takes alone; its event still lacks the staleness.

    `last_met`: the round in which the weights after it last met anybody's.
    """

    step: Step
    snapshot_step: int
    event: OuterStepTaken
    last_met: int


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """No round is open, and the fast weights have the correction of the last step."""


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """A round is open and free for a partner. `snapshot`: None in the blocking form, which takes it in the meeting."""

    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True, eq=False)
class InMeeting:
    """A round is open, and bound to one partner."""

    snapshot: Snapshot | None
    meeting: Meeting


@dataclass(frozen=True, slots=True, eq=False)
class Stepping:
    """The round is over, and its outer step is computed beside the training.

    `task`: ends with the phase; if it fails, the phase stays, because slow weights may be half moved.
    """

    pending: PendingStep
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True, eq=False)
class PendingCorrection:
    """The slow weights have moved, and the correction of the fast ones waits for the next pause; the rest is that of
    the step. `correction`: None where the slow weights take their place.
    """

    correction: Tensors | None
    snapshot_step: int
    event: OuterStepTaken
    last_met: int


@dataclass(frozen=True, slots=True, eq=False)
class Correcting:
    """The correction is added to the fast weights.

    If that fails, the phase stays, because they may be half corrected.
    """

    pending: PendingCorrection


Phase = Closed | Open | InMeeting | Stepping | PendingCorrection | Correcting
"""The phases of a round and their transitions:

    Closed    -> Open (open), Stepping (step)
    Open      -> Open (open, with another snapshot), InMeeting (engage), Closed (close, leave)
    InMeeting -> InMeeting (open), Open (end_meeting), Stepping (step), Closed (close, leave)
    Stepping  -> PendingCorrection (correct_later)
    PendingCorrection -> Correcting (take_correction)
    Correcting -> Closed (finish)
"""
CLOSED = Closed()


class RoundState:
    """One replica's round: its phase, and what the parts of its gossip know in common.

    The phase changes only by the methods under "Transitions"; one that the phase does not allow raises RuntimeError.
    They wake those who wait, unless they say why not. `leaving`: no further round will be met, but a step that was
    agreed is still taken. `asking`: the peer whose answer we wait for, which may outlast the round. `last_met`: the
    round in which our weights last met anybody's, 0 if in none, DISOWNED until we have adopted others.
    `steps_when_met`: the inner steps of the snapshot of that meeting, or with which the weights began here.
    `slow_steps`: the inner steps that the slow weights hold; None until our first outer step where it is not known.
    """

    def __init__(self, me: str, settings: OuterConfig, origin: Origin, context: RoundContext) -> None:
        self.me, self.settings, self.timeouts = me, settings, context.timeouts
        self.partners = PartnerView(me, context.seed, context.partners)
        self.schedule = RoundSchedule(
            settings.inner_steps_per_round, origin.rounds, origin.inner_steps, self.timeouts.sleep_s
        )
        self.rng = random.Random(f"{context.seed}|jitter|{me}")
        self.queue = PartnerQueue(self.timeouts, self.rng)
        self.counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}  # of the last partner that was "unanswered", or "lost" in a meeting
        self.pause = asyncio.Lock()
        self.phase: Phase = CLOSED
        self.leaving = False
        self.asking: str | None = None
        self.last_met, self.steps_when_met = origin.last_met, origin.inner_steps
        self.slow_steps = origin.inner_steps if origin.gathered else None
        self.prefetch = Prefetch()
        self.met_partners: dict[str, None] = {}
        """The partners of meetings that ended in a step of ours, the latest last."""
        self._claims = RoundClaims()
        self._claimants: Sequence[Candidate] | None = None
        """The claims of these candidates; computed anew for others, and once there is another partner."""
        self._late = 0  # recent exchanges that ran out of time, less those that did not
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a round is open, met or not."""
        return isinstance(self.phase, Open | InMeeting)

    @property
    def is_free(self) -> bool:
        """Whether a round is open, and a partner may still be agreed on."""
        return isinstance(self.phase, Open)

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot of the open round; None where none is open, and in the blocking form."""
        return self.phase.snapshot if isinstance(self.phase, Open | InMeeting) else None

    @property
    def meeting(self) -> Meeting | None:
        return self.phase.meeting if isinstance(self.phase, InMeeting) else None

    @property
    def settled(self) -> bool:
        """Whether slow and fast weights belong together: no outer step is under way, and no correction waits."""
        return not isinstance(self.phase, Stepping | PendingCorrection | Correcting)

    @property
    def is_closed(self) -> bool:
        """Whether a round may be opened: none is, and the last one is over with its correction."""
        return isinstance(self.phase, Closed)

    @property
    def step_task(self) -> asyncio.Task[None] | None:
        """The outer step under way."""
        return self.phase.task if isinstance(self.phase, Stepping) else None

    @property
    def between_rounds(self) -> bool:
        """Whether the slow weights are those of the next meeting, which we may still have."""
        return self.is_closed and not self.leaving

    @property
    def weight_age(self) -> WeightAge:
        return WeightAge(self.schedule.round, self.last_met)

    @property
    def round_fraction(self) -> float:
        """The inner steps of our pseudo-gradient over those of the fastest replica in a round: above 0, at most 1."""
        if self.slow_steps is None:
            return 1.0
        return min(1.0, max(1, self.schedule.inner_steps - self.slow_steps) / self.schedule.of_fastest)

    @property
    def slow_age(self) -> WeightAge:
        """The last round whose step the slow weights hold; `finish` counts it once the correction is in."""
        pending = self.phase.pending if isinstance(self.phase, Correcting) else self.phase
        if not isinstance(pending, PendingCorrection):
            return WeightAge(self.schedule.finished, self.last_met)
        event = pending.event
        return WeightAge(event.round, pending.last_met if self.owns or event.adopted else self.last_met)

    @property
    def owns(self) -> bool:
        """Whether our weights count for something: we have not disowned them, or have adopted others since."""
        return self.last_met != DISOWNED

    def disown(self) -> None:
        """Say that our weights count for nothing, until a step that adopts others is finished."""
        self.last_met = DISOWNED

    @property
    def staleness(self) -> int:
        """Rounds since our weights last met anybody's, by our own number."""
        return staleness(self.weight_age, self.schedule.round)

    @property
    def next_round(self) -> int:
        return self.schedule.next_round(self.claims)

    @property
    def claims(self) -> RoundClaims:
        """The rounds that the others claim to have finished."""
        listed = self.partners.candidates()
        if listed is not self._claimants:
            self._claimants = listed
            self._claims = RoundClaims(
                [each.round for each in listed], [each.round for each in listed if each.peer in self.met_partners]
            )
        return self._claims

    @property
    def exchange_s(self) -> float:
        """How long a meeting may take: longer after each that ran out of time, but not in the blocking form."""
        return self.timeouts.exchange_s * (1.0 if self.settings.blocking else 2.0**self._late)

    def note_exchange(self, *, late: bool) -> None:
        self._late = min(LATE_AT_MOST, self._late + 1) if late else max(0, self._late - 1)

    def answer_state(self, sender: str) -> AnswerState:
        """Return the facts that decide on a proposal of `sender`."""
        order = self.partners.order(self.schedule.round) if self.is_open else ()
        place = order.index(sender) if sender in order else len(order)
        return AnswerState(
            me=self.me,
            round=self.schedule.round,
            open=self.is_open,
            engaged=self.meeting is not None,
            asking=self.asking,
            leaving=self.leaving,
            had=self.queue.declines(sender, self.partners.peers, now()),
            preference_delay_s=self.schedule.preference_delay_s(place, max(len(order), place + 1)),
            ready_in_s=self.schedule.ready_in_s,
        )

    def hopeful(self) -> bool:
        """Say whether this round may still be met."""
        return self.meeting is not None or (self.is_free and not self.queue.nobody_left(self.partners.peers))

    def statistics(self) -> dict[str, int | float]:
        """Return counters since the start, and where the replica is."""
        return {
            **{name: self.counts[name] for name in COUNTED},
            "round": self.schedule.round,
            "finished": self.schedule.finished,
            "healed": self.schedule.healed,
            "skipped_in_a_row": self.schedule.skipped_in_a_row,
            "last_met": max(0, self.last_met),
            "staleness": self.staleness,
            "open": int(self.is_open),
            "engaged": int(self.meeting is not None),
        }

    # Transitions.

    def open(self, snapshot: Snapshot | None) -> None:
        """Let the round be met. A round that is open goes on with this snapshot, and so does a meeting in it."""
        if not self.settled or self.leaving:
            raise self._illegal("open")
        self.phase = Open(snapshot) if self.meeting is None else InMeeting(snapshot, self.meeting)
        self.ring()

    def engage(self, peer: str, their_round: int) -> Meeting:
        """Bind ourselves to one partner. Wakes nobody: there is less to do than before."""
        if not isinstance(self.phase, Open):
            raise self._illegal("engage")
        self.schedule.adopt(their_round, self.claims)
        meeting = Meeting(peer, now())
        self.phase = InMeeting(self.phase.snapshot, meeting)
        return meeting

    def end_meeting(self) -> None:
        """End the meeting without a step of ours: the round is free again."""
        if not isinstance(self.phase, InMeeting):
            raise self._illegal("end_meeting")
        self.phase = Open(self.phase.snapshot)
        self.ring()

    def step(self, pending: PendingStep, take: Callable[[PendingStep], Coroutine[Any, Any, None]]) -> None:
        """End the round, and its meeting if there was one, with a step, which `take` computes from now on."""
        if not isinstance(self.phase, Closed | InMeeting):
            raise self._illegal("step")
        self.queue.forget_proposals()
        if isinstance(self.phase, InMeeting):
            self._note_met(self.phase.meeting)
        self.phase = Stepping(pending, asyncio.create_task(take(pending), name="outer step"))
        self.ring()

    def correct_later(self, correction: Tensors | None) -> None:
        """Leave the correction of a step that is computed to the next pause. Wakes nobody: all wait for that pause."""
        if not isinstance(self.phase, Stepping):
            raise self._illegal("correct_later")
        _, snapshot_step, event, last_met = self.phase.pending
        self.phase = PendingCorrection(correction, snapshot_step, event, last_met)

    def take_correction(self) -> PendingCorrection:
        """Return the correction that waits, to be applied now; if that fails half-way, it is not tried again."""
        if not isinstance(self.phase, PendingCorrection):
            raise self._illegal("take_correction")
        pending, self.phase = self.phase, Correcting(self.phase)
        return pending

    def close(self) -> None:
        """End the round without a step; a meeting in it is given up.

        Wakes nobody: in the same pause the caller takes a step, or opens the next round, and that does.
        """
        if not self.settled:
            raise self._illegal("close")
        self.phase = CLOSED

    def finish(self, round: int, last_met: int, *, adopted: bool = False) -> None:
        """Count an outer step, which has moved the weights; `adopted`: it has replaced them by a partner's.

        A mean with disowned weights is no better than these.
        """
        if not isinstance(self.phase, Correcting):
            raise self._illegal("finish")
        self.phase = CLOSED
        self.schedule.finish(round)
        self.prefetch = Prefetch()
        if self.owns or adopted:
            self.last_met = last_met
        self.ring()

    def refuse_proposals(self) -> None:
        """Decline all proposals from now on. Wakes nobody: no wait depends on it."""
        self.leaving = True

    def leave(self) -> None:
        """End the round, and open none any more; a step that was agreed is still taken."""
        self.leaving = True
        if self.settled:
            self.phase = CLOSED
        self.ring()

    def _illegal(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what} of a round that is {type(self.phase).__name__}, leaving: {self.leaving}")

    # Notes that change no phase.

    def begin_round(self, *, last: bool) -> None:
        """Count a new round, in which everybody may be asked anew."""
        self.schedule.open(self.claims, last=last)
        self.queue.clear(self.partners.peers, now())

    def ask(self, peer: str) -> None:
        self.asking = peer
        self.counts["proposals_sent"] += 1

    def note_proposal(self, peer: str) -> None:
        """Remember who waits for a partner while we cannot meet it: at most as many names as the roster has."""
        if peer in self.partners.peers:
            self.queue.proposed(peer)

    def note_vain_meeting(self, meeting: Meeting) -> None:
        peer, since_s, peers = meeting.partner, meeting.since_s, self.partners.peers
        self.queue.note_loss(peer, since_s, self.exchange_s, peers, now(), in_meeting=True)

    def note_silence(self, peer: str, since_s: float, allowed_s: float, why: str) -> None:
        """Note that a peer has not answered our proposal since then, and that it was allowed so long."""
        self.counts["unanswered"] += 1
        self.reasons["unanswered"] = why
        self.queue.note_loss(peer, since_s, allowed_s, self.partners.peers, now(), in_meeting=False)

    def _note_met(self, meeting: Meeting) -> None:
        """Note that a partner has brought weights that we could use."""
        partner = meeting.partner
        self.queue.met(partner, now() - meeting.since_s)
        self._claimants = None
        self.met_partners.pop(partner, None)
        self.met_partners[partner] = None
        if len(self.met_partners) > MOST_MET:
            del self.met_partners[next(iter(self.met_partners))]

    # Waking up.

    def ring(self) -> None:
        """Wake all that wait; also called where a condition changed without a transition."""
        self._changed.set()
        self._changed = asyncio.Event()

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
    return asyncio.get_running_loop().time()
