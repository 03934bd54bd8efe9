"""Gossip by appointment: who meets whom, when and with which step sizes is agreed as soon as the last meeting ends.

A replica whose meeting is over asks others, in the random order of its next round. Two that agree settle a moment for
both snapshots, and swap the probes from which step sizes follow. The next snapshots do not exist yet, so these are
probes of the last ones: step sizes are stale by a round, and widened by the cell's factor. The conversation stays open,
and at that moment each side sends its codes together with its snapshot. All else is the production's: the codec, the
bounds, the acknowledgements, the step. Where an appointment breaks, or a round is due without one, the round goes on as
always: a partner is asked for, and probes come first.

The moment is one of the slower machine's pauses, not before its round is due, and else the nearest to the middle of
both openings. The faster machine takes its snapshot at its first pause after it. Clocks are taken to be alike, and
machines to know what a step will take.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from torch import Tensor

from gossip.exchange.messages import NOTHING, Accept, Count, Decline, DeclineReason, Probe, Seconds
from gossip.exchange.swap import check_own, check_probe, swap
from gossip.interface import Conversation, GossipReplica, Origin, RoundContext
from gossip.rounds.matching import PICKY_SHARE, SLACK_S, SOON_S, PartnerView, RoundSchedule
from gossip.rounds.meeting import MeetingProtocol
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot
from gossip.rounds.round_state import Closed, Meeting, PendingCorrection, PendingStep, RoundState, now
from gossip.rounds.rounds import Rounds
from gossip.settings import OuterConfig
from noloco_node.network.schema import MessageSpec, Schema

APPOINTMENTS = "appointments"
AHEAD_S = 0.6
"""How long before its moment an appointment is made at the latest: the rest of what is said then takes so long."""
PATIENCE_S = 1.5
"""For how long after a meeting no round opens without an appointment: otherwise a meeting that lasted until the next
round is due would leave no time for one, and the next would last as long again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Ask for an appointment, or agree. `due_s`: when the sender's round `round` would open. `step_s`: of its steps."""

    round: Count
    due_s: Seconds
    step_s: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An appointment. `mine`: what we told of our weights. `opened`: our meeting, once our round is open."""

    offer: Offer
    partner: str
    mine: Probe
    opened: asyncio.Future[Meeting]


def appointment_schema(meetings: Schema) -> Schema:
    """Return what two replicas say to each other, given what they say in a meeting."""
    schema = Schema({Offer: MessageSpec("Offer")})
    # A simulated network encodes nothing.
    schema.rules.update(meetings.rules)
    schema.names.update(meetings.names)
    return schema


def agreed_s(mine: Offer, theirs: Offer) -> float:
    """Return the moment that follows from both offers, the same on both sides."""
    slow, fast = sorted((mine, theirs), key=lambda offer: (-offer.step_s, offer.due_s))
    return slow.due_s + slow.step_s * max(0, round((fast.due_s - slow.due_s) / 2 / slow.step_s))


class _Schedule(RoundSchedule):
    """The production's; a round with an appointment is due at its moment, `at_s`, another after `patient_until_s`."""

    at_s: float | None = None
    patient_until_s = 0.0

    @property
    def due(self) -> bool:
        if self.at_s is None:
            return super().due and now() >= self.patient_until_s - SLACK_S
        return now() >= self.at_s - SLACK_S


class _Agreed:
    """The conversation of an appointment, as a meeting has it: what was agreed counts as if it came now."""

    def __init__(self, conversation: Conversation, theirs: Probe, first: asyncio.Task[object]) -> None:
        self._conversation = conversation
        self._coming: list[Probe | asyncio.Task[object]] = [theirs, first]

    @property
    def peer(self) -> str:
        return self._conversation.peer

    async def send(self, message: object) -> None:
        if not isinstance(message, Accept | Probe):
            await self._conversation.send(message)

    async def receive(self) -> object:
        if not self._coming:
            return await self._conversation.receive()
        coming = self._coming.pop(0)
        return coming if isinstance(coming, Probe) else await coming


class AppointedMeetings(MeetingProtocol):
    """A replica's meetings, and its appointments: `appoint` asks for them in the background, `answer_offer` answers.

    `step_s`: what an inner step takes. `wider`: the factor of step sizes. `kept`: appointments at which it met.
    """

    def __init__(
        self,
        round_state: RoundState,
        optimiser: OuterOptimiser,
        replica: GossipReplica,
        context: RoundContext,
        step: Callable[[PendingStep], Awaitable[None]],
        terms: Terms,
    ) -> None:
        super().__init__(round_state, optimiser, replica, context, step)
        self._terms = terms
        self.kept = 0
        self._held: Held | None = None
        self._told: tuple[str, Probe] | None = None
        self._stale: Tensor | None = None
        self._asking: str | None = None
        self._not_before: dict[str, float] = {}
        self._waiting: set[str] = set()  # those that have asked us in vain
        self._partners = PartnerView(round_state.me, context.seed, context.partners)
        self._opened_s = self._free_s = now()
        self._opened_at = round_state.schedule.inner_steps
        self._last = False

    # Called by the rounds.

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """Keep the probe of a snapshot for the next appointment."""
        probe = self._optimiser.fast_probe(snapshot)
        self._stale = None if probe is None else probe * self._terms.wider

    def note_free(self) -> None:
        """Note that our meeting is over."""
        self._free_s = now()
        self._schedule.patient_until_s = self._free_s + PATIENCE_S

    def keep(self, *, last: bool) -> None:
        """Meet as it was agreed, if it was: our round has opened. `last`: it is the last."""
        round_state, held, self._held = self._round_state, self._held, None
        self._opened_s, self._opened_at, self._last = now(), round_state.schedule.inner_steps, last
        self._not_before.clear()
        self._plan(None)
        if held is not None and round_state.is_free:
            self._told = (held.partner, held.mine)
            held.opened.set_result(round_state.engage(held.partner, held.offer.round))

    def cancel(self) -> None:
        """Break our appointment."""
        if self._held is not None:
            self._held.opened.set_exception(ConnectionAbortedError("leaving"))
            self._held, self._last = None, True

    # Making appointments.

    async def appoint(self) -> None:
        """Ask for an appointment whenever we have none for the next round, until cancelled."""
        while True:
            peer, wait_s = self._next_to_appoint()
            if peer is None:
                await self._round_state.nap(wait_s)
                continue
            self._asking = peer
            self._waiting.discard(peer)
            with suppress(ConnectionError, TimeoutError):
                self._not_before[peer] = math.inf
                async with self._terms.talk(peer) as conversation:
                    await self._ask_for_one(conversation)
            self._asking = None

    async def _ask_for_one(self, conversation: Conversation) -> None:
        mine = self._offer()
        await conversation.send(mine)
        reply = await conversation.receive()
        self._asking = None
        self._round_state.ring()
        if isinstance(reply, Decline):
            self._not_before[conversation.peer] = now() + reply.retry_after_s
        elif isinstance(reply, Offer) and self._is_free_for_one:
            await self._hold(conversation, mine, reply, asked=False)

    async def answer_offer(self, conversation: Conversation) -> None:
        """Answer one offer, and meet if it is accepted."""
        theirs = await conversation.receive()
        if not isinstance(theirs, Offer):
            raise ConnectionAbortedError(f"expected an offer, got {type(theirs).__name__}")
        peer, until_s = conversation.peer, now() + SOON_S
        while self._asking not in (None, peer) and now() < until_s - SLACK_S:
            await self._round_state.nap(until_s - now())
        reply = self._answer(peer)
        if isinstance(reply, Decline):
            self._waiting.add(peer)
        await conversation.send(reply)
        if isinstance(reply, Offer):
            try:
                await self._hold(conversation, reply, theirs, asked=True)
            except TimeoutError as silence:
                raise ConnectionAbortedError(f"{peer} was silent") from silence

    def _answer(self, sender: str) -> Offer | Decline:
        if not self._is_free_for_one:
            # We shall ask it as soon as we are free.
            return self._declined(DeclineReason.NOT_NEXT, math.inf)
        if self._asking == sender and sender > self._round_state.me:
            return self._declined(DeclineReason.YIELD, SOON_S)
        if self._asking not in (None, sender):
            return self._declined(DeclineReason.ASKING, SOON_S)
        hoping_s = self._good_enough_s(sender) - now()
        return self._declined(DeclineReason.HOPING, hoping_s) if hoping_s > SLACK_S else self._offer()

    def _declined(self, reason: DeclineReason, retry_after_s: float) -> Decline:
        return Decline(reason=reason, retry_after_s=retry_after_s, round=self._round_state.schedule.round)

    def _next_to_appoint(self) -> tuple[str | None, float | None]:
        """Return the peer to ask now, or None and how long to wait (None: until something changes)."""
        if not self._is_free_for_one:
            return None, None
        when = {peer: max(self._good_enough_s(peer), self._not_before.get(peer, 0.0)) for peer in self._order()}
        ready = [peer for peer, then_s in when.items() if then_s <= now() + SLACK_S]
        if ready:
            return next((peer for peer in ready if peer in self._waiting), ready[0]), None
        first_s = min(when.values(), default=math.inf)
        return None, None if first_s == math.inf else first_s - now()

    @property
    def _is_free_for_one(self) -> bool:
        """Whether we have ended our last meeting, and have no appointment for the next round."""
        phase = self._round_state.phase
        is_over = isinstance(phase, Closed | PendingCorrection) and self._stale is not None
        return is_over and self._held is None and not (self._last or self._round_state.leaving)

    @property
    def _round(self) -> int:
        """The number of our next round."""
        phase = self._round_state.phase
        return phase.event.round + 1 if isinstance(phase, PendingCorrection) else self._round_state.next_round

    def _order(self) -> list[str]:
        """Return the others in the order of our next round, but that we met last at the end."""
        met = next(reversed(self._round_state.met_partners), None)
        return sorted(self._partners.order(self._round), key=lambda peer: peer == met)

    def _good_enough_s(self, peer: str) -> float:
        """Return when a peer will do: the first in the order at once, the last half-way to our next opening."""
        order = self._order()
        place = order.index(peer) if peer in order else len(order)
        return self._free_s + PICKY_SHARE * place / max(1, len(order) - 1) * (self._due_s - self._free_s)

    def _steps_until(self, then_s: float) -> int:
        """Return how many inner steps we shall have taken since our last opening at our first pause from then on."""
        return math.ceil((then_s - self._opened_s - SLACK_S) / self._terms.step_s)

    @property
    def _due_s(self) -> float:
        """The pause in which our next round opens if we agree with nobody, or the first that leaves time to agree."""
        steps = max(self._round_state.schedule.steps, self._steps_until(now() + AHEAD_S))
        return self._opened_s + steps * self._terms.step_s

    def _offer(self) -> Offer:
        return Offer(round=self._round, due_s=self._due_s, step_s=self._terms.step_s)

    async def _hold(self, conversation: Conversation, mine: Offer, theirs: Offer, *, asked: bool) -> None:
        """Agree with a partner, wait for our opening, and meet."""
        at_s, opened = agreed_s(mine, theirs), asyncio.get_running_loop().create_future()
        held = self._held = Held(theirs, conversation.peer, self._prediction(at_s), opened)
        self._plan(at_s)
        first: asyncio.Task[object] | None = None
        try:
            check_own(held.mine)
            probe = await swap(conversation, held.mine)
            check_probe(probe, held.mine)
            first = asyncio.create_task(_first_of(conversation))
            await asyncio.wait({first, opened}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                first.result()  # raises where the appointment broke
            meeting = await opened
            self.kept += 1
            async with asyncio.timeout(None) as deadline:
                accepted = Accept(round=mine.round) if asked else None
                await self._meet_until(_Agreed(conversation, probe, first), meeting, accepted, deadline)
        finally:
            if self._held is held:
                self._held = None
                self._plan(None)
            if first is not None:
                first.cancel()
                await asyncio.wait({first})

    def _plan(self, at_s: float | None) -> None:
        self._schedule.at_s = at_s
        self._round_state.ring()

    @property
    def _schedule(self) -> _Schedule:
        schedule = self._round_state.schedule
        assert isinstance(schedule, _Schedule)
        return schedule

    def _prediction(self, at_s: float) -> Probe:
        """Return what our probe will say at a moment, with a fast part that is a round old."""
        round_state, phase = self._round_state, self._round_state.phase
        last_met, met_at = round_state.last_met, round_state.steps_when_met
        if isinstance(phase, PendingCorrection):
            last_met = phase.last_met if round_state.owns or phase.event.adopted else last_met
            met_at = met_at if phase.event.partner is None else phase.snapshot_step
        return Probe(
            round=self._round,
            last_met=last_met,
            version=self._optimiser.version,
            holds=NOTHING,
            slow=self._optimiser.slow_probe(),
            fast=self._stale,
            inner_steps=max(0, self._opened_at + self._steps_until(at_s) - met_at),
        )

    # In a meeting.

    def _probe(self, peer: str, snapshot: Snapshot) -> Probe:
        told, self._told = self._told, None
        return told[1] if told is not None and told[0] == peer else super()._probe(peer, snapshot)


async def _first_of(conversation: Conversation) -> object:
    return await conversation.receive()


@dataclass(frozen=True, slots=True)
class Terms:
    """How a replica makes appointments: by `talk`; `step_s` and `wider` as `AppointedMeetings` has them."""

    talk: Callable[[str], AbstractAsyncContextManager[Conversation]]
    step_s: float
    wider: float


class AppointedRounds(Rounds):
    """The production's rounds, with appointments."""

    def __init__(
        self,
        me: str,
        settings: OuterConfig,
        origin: Origin,
        replica: GossipReplica,
        context: RoundContext,
        terms: Terms,
    ) -> None:
        super().__init__(me, settings, origin, replica, context)
        round_state = self._round_state
        round_state.schedule = self._schedule = _Schedule(
            settings.inner_steps_per_round, origin.rounds, origin.inner_steps, context.timeouts.sleep_s
        )
        self.appointments = AppointedMeetings(round_state, self._optimiser, replica, context, self._end_round, terms)
        self._meetings = self.appointments

    def statistics(self) -> dict[str, int | float]:
        """Return also how many appointments were kept."""
        return super().statistics() | {"appointed": self.appointments.kept}

    async def run(self) -> None:
        """Do what rounds do, and make appointments, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            group.create_task(self.appointments.appoint())

    async def leave(self) -> None:
        """Take part in no further round."""
        self.appointments.cancel()
        await super().leave()

    async def _take_snapshot(self) -> Snapshot:
        snapshot = await super()._take_snapshot()
        self.appointments.note_snapshot(snapshot)
        return snapshot

    async def _open_round(self, *, last: bool = False) -> None:
        await super()._open_round(last=last)
        self.appointments.keep(last=last)

    async def _end_round(self, pending: PendingStep) -> None:
        self.appointments.note_free()
        await super()._end_round(pending)
