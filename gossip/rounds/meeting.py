"""A meeting, from the first proposal to a step that was agreed: partners are asked and answered, weights are exchanged.

A replica asks partners one after the other. While it waits for an answer it declines the proposals of others, so no
cycle of waiting can form. Both sides of a meeting send probes first, and derive from them whose weights count, how
weights are coded, and whether slow weights need to travel. A side whose weights are too stale sends none. It adopts the
weights of its partner, which travel in an absolute format, and has finished its round. The partner takes no step and
keeps its round open.

A meeting that breaks is a loss: counted, recorded, and the partner is put off for a while. Nothing moves then, and our
round stays open. The overlapped form exchanges the snapshot that was taken when the round opened. The blocking form
first drains the replica, and takes the whole step before it admits microbatches again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from gossip.exchange.codec import Sides
from gossip.exchange.messages import Accept, Decline, Implausible, Probe, Propose, Weights
from gossip.exchange.swap import check_own, check_probe, conclude, gap, size_bytes, swap
from gossip.interface import Conversation, GossipReplica, MeetingLost, OuterStepTaken, PartnerTooStale, RoundContext
from gossip.rounds.matching import answer
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot, Step
from gossip.rounds.round_state import Meeting, PendingStep, Prefetch, RoundState, now
from gossip.rule import outer_step

NO_WEIGHTS = Weights(fast=(), slow=())


class MeetingProtocol:
    """One replica's meetings, one at a time: `run` asks in the background, `answer_one` answers each incoming proposal.

    `step` ends the round with an agreed step.
    """

    def __init__(
        self,
        round_state: RoundState,
        optimiser: OuterOptimiser,
        replica: GossipReplica,
        context: RoundContext,
        step: Callable[[PendingStep], Awaitable[None]],
    ) -> None:
        self._round_state, self._optimiser = round_state, optimiser
        self._replica, self._context, self._step = replica, context, step
        self._blocked_s = 1.0

    async def run(self) -> None:
        """Ask partners while a round is open, until cancelled."""
        round_state, jitter_s = self._round_state, self._round_state.timeouts.jitter_s
        while True:
            peer, wait_s = self._next_to_ask()
            if peer is None:
                await round_state.nap(wait_s)
                continue
            await self._ask(peer)
            if round_state.is_free:
                await round_state.nap(round_state.rng.uniform(0.0, jitter_s))

    async def answer_one(self, conversation: Conversation, proposal: Propose, deadline: asyncio.Timeout) -> None:
        """Answer a proposal at once; if it is accepted, move the deadline to that of a meeting, and meet."""
        round_state, peer = self._round_state, conversation.peer
        round_state.counts["proposals_received"] += 1
        reply = answer(round_state.answer_state(peer), peer, proposal)
        if isinstance(reply, Decline):
            round_state.note_proposal(peer)
            await conversation.send(reply)
            return
        meeting = round_state.engage(peer, proposal.round)
        await self._meet_until(conversation, meeting, reply, deadline)

    def _next_to_ask(self) -> tuple[str | None, float | None]:
        """Return the peer to ask now, or None and how long to wait (None: until something changes)."""
        round_state = self._round_state
        if not round_state.is_free:
            return None, None
        order = round_state.partners.order(round_state.schedule.round)
        delay_s = round_state.schedule.preference_delay_s
        # Later preferences wait longer, so the good enough are the first ones.
        good_enough = bisect_right(range(len(order)), 0.0, key=lambda place: delay_s(place, len(order)))
        return round_state.queue.next(order[:good_enough], now())

    async def _ask(self, peer: str) -> None:
        round_state, patience = self._round_state, self._round_state.timeouts
        answers, asked_s = self._context.answers, now()
        allowed_s = answers.deadline_s(peer) if answers else patience.answer_s
        round_state.ask(peer)
        meeting, reached = None, False
        try:
            async with asyncio.timeout(allowed_s) as deadline, self._context.converse(peer) as conversation:
                reached = True
                await conversation.send(Propose(round=round_state.schedule.round))
                reply = await conversation.receive()
                round_state.asking = None
                if answers:
                    answers.took(peer, now() - asked_s)
                if isinstance(reply, Decline):
                    round_state.counts["declined"] += 1
                    if round_state.is_open:
                        round_state.schedule.adopt(reply.round, round_state.claims)
                    round_state.queue.declined(peer, reply, now())
                elif not isinstance(reply, Accept):
                    raise ConnectionAbortedError(f"expected an answer, got {type(reply).__name__}")
                elif round_state.is_free:
                    meeting = round_state.engage(peer, reply.round)
                    await self._meet_until(conversation, meeting, None, deadline)
        except (ConnectionError, TimeoutError) as loss:
            if answers and round_state.asking is not None and isinstance(loss, TimeoutError):
                answers.record_timeout(peer, asked_s, now())
            if meeting is None:
                # A peer that took no call has not held us up: the line may be down, and back soon.
                why = str(loss) or f"{peer} has not answered in time"
                round_state.note_silence(peer, asked_s if reached else now(), allowed_s, why)
        finally:
            round_state.asking = None

    async def _meet_until(
        self, conversation: Conversation, meeting: Meeting, accepted: Accept | None, deadline: asyncio.Timeout
    ) -> None:
        """Meet within the time that a meeting may take, and note whether that was enough.

        `accepted`: our answer, still to be sent, where we are the asked.
        """
        deadline.reschedule(now() + self._round_state.exchange_s)
        try:
            await self._meet(conversation, meeting, accepted)
        except asyncio.CancelledError:
            if deadline.expired():
                self._round_state.note_exchange(late=True)
            raise
        self._round_state.note_exchange(late=False)

    async def _meet(self, conversation: Conversation, meeting: Meeting, accepted: Accept | None) -> None:
        round_state = self._round_state
        why, implausible = "the partner was silent or went away", False
        try:
            if accepted is not None:
                await conversation.send(accepted)
            if round_state.settings.blocking:
                started_s = now()
                async with self._drained(), round_state.pause:
                    inner_steps = round_state.schedule.inner_steps
                    taken = await self._optimiser.snapshot(inner_steps, round_state.round_fraction)
                    await self._exchange(conversation, meeting, taken, asked=accepted is not None)
                self._blocked_s = now() - started_s
            else:
                async with round_state.pause:
                    kept = round_state.snapshot
                if kept is None:
                    raise ConnectionAbortedError("the round was closed meanwhile")
                await self._exchange(conversation, meeting, kept, asked=accepted is not None)
        except ConnectionError as loss:
            why, implausible = str(loss), isinstance(loss, Implausible)
            raise
        finally:
            if round_state.meeting is meeting:
                self._lose(meeting, why, implausible)

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Admit no microbatch in the body. Raises ConnectionAbortedError if those in flight do not come back."""
        drained = False
        try:
            async with self._replica.alone(self._blocked_s):
                drained = True
                yield
        except TimeoutError as silence:
            if drained:
                raise
            raise ConnectionAbortedError("our own gate did not drain: microbatches in flight") from silence

    def _lose(self, meeting: Meeting, why: str, implausible: bool) -> None:
        round_state = self._round_state
        round_state.end_meeting()
        round_state.counts["lost"] += 1
        round_state.reasons["lost"] = why
        round_state.counts["implausible"] += implausible
        round_state.note_vain_meeting(meeting)
        self._context.record(
            MeetingLost(round=round_state.schedule.round, partner=meeting.partner, why=why, implausible=implausible)
        )

    async def _exchange(self, conversation: Conversation, meeting: Meeting, snapshot: Snapshot, *, asked: bool) -> None:
        """Swap probes and weights; nothing moves before both sides have acknowledged them.

        Raises Implausible where the partner's messages cannot be right, another `ConnectionError` where they do not
        come or our own weights are not finite.
        """
        round_state, mine = self._round_state, self._probe(conversation.peer, snapshot)
        check_own(mine)
        theirs = await swap(conversation, mine)
        check_probe(theirs, mine)
        exchange = _Exchange(conversation, snapshot, self._optimiser, mine, theirs)
        own, partner = (outer_step.WeightAge(side.round, side.last_met) for side in (mine, theirs))
        own_staleness, their_staleness = (
            outer_step.staleness(side, outer_step.clock(own, partner)) for side in (own, partner)
        )
        whose = outer_step.whose_weights_count(own, partner, round_state.settings.staleness_at_most)
        if whose is outer_step.WhoseWeights.BOTH:
            swapped = await _average(exchange, round_state.prefetch)
        elif whose is outer_step.WhoseWeights.MINE:
            swapped = await _lend(exchange)
        else:
            swapped = await _adopt(exchange, disowned=own.last_met == outer_step.DISOWNED)
        adopted = whose is outer_step.WhoseWeights.THEIRS
        sent, received = size_bytes(mine, swapped.sent), size_bytes(theirs, swapped.came)

        def must_go_on() -> None:
            if round_state.meeting is not meeting:
                raise ConnectionAbortedError("the round was given up meanwhile")

        async def commit() -> None:
            must_go_on()
            round_state.counts["spared"] += swapped.spared
            if swapped.step is None:
                self._note_too_stale(meeting, their_staleness, sent, received)
                return
            round_state.counts["clipped"] += swapped.step.clipped
            # A partner that lends its weights takes no step, and brings these inner steps to another meeting.
            self._context.saw(meeting.partner, 0 if adopted else theirs.inner_steps, mine.inner_steps)
            event = OuterStepTaken(
                round=round_state.schedule.round,
                seconds=now() - meeting.since_s,
                partner=meeting.partner,
                gap=gap(mine.slow, theirs.slow),
                staleness_rounds=own_staleness,
                partner_staleness=their_staleness,
                adopted=adopted,
                bytes_sent=sent,
                bytes_received=received,
            )
            last_met = outer_step.last_met_after(own, partner, adopted=adopted)
            await self._step(PendingStep(swapped.step, snapshot.inner_steps, event, last_met))

        must_go_on()  # a partner that has our acknowledgement takes the step
        await conclude(conversation, commit, asked=asked)

    def _probe(self, peer: str, snapshot: Snapshot) -> Probe:
        """Return what we tell a peer of our weights."""
        round_state, optimiser = self._round_state, self._optimiser
        own = round_state.weight_age
        return Probe(
            round=own.round,
            last_met=own.last_met,
            version=optimiser.version,
            holds=round_state.prefetch.version_held(peer),
            slow=optimiser.slow_probe(),
            fast=optimiser.fast_probe(snapshot),
            inner_steps=snapshot.inner_steps - round_state.steps_when_met,
        )

    def _note_too_stale(self, meeting: Meeting, partner_staleness: int, sent: int, received: int) -> None:
        """Go on with our open round: the partner has ended its own with our weights."""
        round_state = self._round_state
        round_state.end_meeting()
        round_state.counts.update({"too_stale": 1, "bytes_sent": sent, "bytes_received": received})
        round_state.note_vain_meeting(meeting)
        self._context.record(
            PartnerTooStale(
                round=round_state.schedule.round,
                partner=meeting.partner,
                partner_staleness=partner_staleness,
                bytes_sent=sent,
                bytes_received=received,
            )
        )


class _Swapped(NamedTuple):
    """The step that follows from a swap of weights, both messages, and whether slow weights were spared."""

    step: Step | None
    sent: Weights
    came: Weights
    spared: bool = False


class _Exchange(NamedTuple):
    """An exchange after both probes."""

    conversation: Conversation
    snapshot: Snapshot
    optimiser: OuterOptimiser
    mine: Probe
    theirs: Probe


async def _average(exchange: _Exchange, prefetch: Prefetch) -> _Swapped:
    """Swap weights in the run's codec; both sides use what both decode."""
    conversation, snapshot, optimiser, mine, theirs = exchange
    fast_steps = optimiser.steps(mine.fast, theirs.fast)
    # The steps of slow weights that travel now; ours that have travelled ahead have other steps.
    slow_steps = optimiser.steps(mine.slow, theirs.slow) if optimiser.needs_slow else ()
    prefetched = prefetch.of(conversation.peer)
    given = prefetched if prefetched is not None and theirs.holds == prefetched.version == mine.version else None

    fast = await optimiser.encode_fast(snapshot, fast_steps)
    slow = await optimiser.encode_slow(slow_steps) if optimiser.needs_slow and given is None else None
    sent = Weights(fast=fast.coded.wire, slow=() if slow is None else slow.coded.wire)
    came = await swap(conversation, sent)

    heard = await optimiser.hear_fast(came.fast, snapshot, fast)
    sides = await optimiser.bound_fast(conversation.peer, heard, snapshot)
    slow_sides: Sides | None = None
    if optimiser.needs_slow:
        # Each side's slow weights have come now, or ahead of time; both decode the ones that the other holds.
        if came.slow:
            slow_sides = await optimiser.hear_slow(came.slow, slow or await optimiser.encode_slow(slow_steps))
        elif prefetched is not None and prefetched.their_version == theirs.version:
            slow_sides = prefetched.slow
        else:
            raise Implausible("no slow weights, and we hold none of this version")
        if given is None:
            assert slow is not None
            slow_sides = slow_sides._replace(mine=slow.coded)
        else:
            slow_sides = slow_sides._replace(mine=given.slow.mine)
        slow_sides = await optimiser.bound_slow(conversation.peer, slow_sides, snapshot)
    elif came.slow:
        raise Implausible("slow weights, which gamma = beta does not need")
    step = Step(snapshot.fast, sides, slow_sides, shares=optimiser.shares(mine.inner_steps, theirs.inner_steps))
    return _Swapped(step, sent, came, spared=given is not None)


async def _lend(exchange: _Exchange) -> _Swapped:
    """Send the weights that the partner adopts; its own do not count."""
    wire = (await exchange.optimiser.encode_absolute(exchange.snapshot)).coded.wire
    sent = Weights(fast=(), slow=wire) if exchange.optimiser.needs_slow else Weights(fast=wire, slow=())
    came = await swap(exchange.conversation, sent)
    if came.fast or came.slow:
        raise Implausible("weights that are too stale to count")
    return _Swapped(None, sent, came)


async def _adopt(exchange: _Exchange, *, disowned: bool) -> _Swapped:
    """Go on from the partner's weights. `disowned`: ours are known to be worth nothing."""
    came = await swap(exchange.conversation, NO_WEIGHTS)
    wire, surplus = (came.slow, came.fast) if exchange.optimiser.needs_slow else (came.fast, came.slow)
    if surplus:
        raise Implausible("two sets of weights to adopt")
    partner, optimiser = exchange.conversation.peer, exchange.optimiser
    step = await optimiser.adopting(partner, wire, exchange.snapshot, disowned=disowned)
    return _Swapped(step, NO_WEIGHTS, came)
