"""A meeting from its agreement to its end: snapshot, exchange, receipts; then a step waits, or nothing has changed.

Whatever breaks it is a loss: counted, journalled, and the partner is put off for a while; our round stays open, or
defers. In the overlapped form the snapshot is the one that was taken when the round opened. In the blocking form the
replica is quiesced first, and the step is applied before it takes in microbatches again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gossip.events import MeetingLost, OuterStepTaken, PartnerTooStale
from gossip.exchange.messages import Accepted, Implausible
from gossip.exchange.swap import Conversation, conclude
from gossip.interface import GossipReplica, RoundContext
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot
from gossip.rounds.prefetch import SlowWeightPrefetcher
from gossip.rounds.round_state import Meeting, PendingStep, RoundState, now
from gossip.rounds.weight_exchange import ExchangeResult, exchange_weights


class Meetings:
    """The meetings of one replica, one at a time; `apply` applies a step that is agreed, in a pause."""

    def __init__(
        self,
        round_state: RoundState,
        optimiser: OuterOptimiser,
        prefetcher: SlowWeightPrefetcher,
        replica: GossipReplica,
        context: RoundContext,
        apply: Callable[[PendingStep], Awaitable[None]],
    ) -> None:
        self._round_state, self._optimiser, self._prefetcher = round_state, optimiser, prefetcher
        self._replica, self._context, self._apply = replica, context, apply
        self._blocked_s = 1.0

    async def meet(self, conversation: Conversation, meeting: Meeting, accepted: Accepted | None) -> None:
        """Exchange and step, once agreed. `accepted`: our answer, still to be sent, where we are the asked."""
        round_state = self._round_state
        why, implausible = "the partner was silent or went away", False
        try:
            if accepted is not None:
                await conversation.send(accepted)
            if round_state.settings.blocking:
                started_s = now()
                async with self._quiesced(), round_state.pause:
                    taken = await self._optimiser.snapshot(round_state.schedule.inner_steps)
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
    async def _quiesced(self) -> AsyncIterator[None]:
        """Take in no microbatch in the body. Raises ConnectionAbortedError if those in flight do not come back."""
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
        round_state.counts["implausible"] += implausible
        round_state.note_vain_meeting(meeting.partner)
        self._context.record(
            MeetingLost(round=round_state.schedule.round, partner=meeting.partner, why=why, implausible=implausible)
        )

    async def _exchange(self, conversation: Conversation, meeting: Meeting, snapshot: Snapshot, *, asked: bool) -> None:
        round_state = self._round_state
        at_most = round_state.settings.staleness_at_most
        brings = snapshot.inner_steps - round_state.met_at
        result = await exchange_weights(
            conversation, snapshot, self._optimiser, self._prefetcher, round_state.met, brings, at_most
        )

        async def commit() -> None:
            if round_state.meeting is not meeting:
                raise ConnectionAbortedError("the round was given up meanwhile")
            round_state.counts["spared"] += result.spared
            round_state.counts["clipped"] += result.clipped
            if result.step is None:
                self._note_too_stale(meeting.partner, result)
                return
            if not result.adopted:
                self._context.saw(meeting.partner, result.partner_steps, brings)
            pending = PendingStep(result.step, snapshot.inner_steps, self._event(meeting, result), result.last_met)
            if round_state.settings.blocking:
                round_state.close()
                round_state.note_met(meeting.partner)
                await self._apply(pending)
            else:
                round_state.step(pending)

        await conclude(conversation, commit, asked=asked)

    def _event(self, meeting: Meeting, result: ExchangeResult) -> OuterStepTaken:
        return OuterStepTaken(
            round=self._round_state.schedule.round,
            seconds=now() - meeting.since_s,
            partner=meeting.partner,
            gap=result.gap,
            staleness_rounds=result.staleness,
            partner_staleness=result.partner_staleness,
            adopted=result.adopted,
            bytes_sent=result.bytes_sent,
            bytes_received=result.bytes_received,
        )

    def _note_too_stale(self, partner: str, result: ExchangeResult) -> None:
        """Go on with our open round: the partner has ended its own with our weights."""
        round_state = self._round_state
        round_state.end_meeting()
        round_state.counts["too_stale"] += 1
        round_state.counts["bytes_sent"] += result.bytes_sent
        round_state.counts["bytes_received"] += result.bytes_received
        round_state.note_vain_meeting(partner)
        self._context.record(
            PartnerTooStale(
                round=round_state.schedule.round,
                partner=partner,
                partner_staleness=result.partner_staleness,
                bytes_sent=result.bytes_sent,
                bytes_received=result.bytes_received,
            )
        )
