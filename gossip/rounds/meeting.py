"""A meeting from its agreement to its end: snapshot, exchange, receipts; then a step waits, or nothing has changed.

Whatever breaks it is a loss: counted, journalled, and the partner is put off for a while; our round stays open, or
defers. In the overlapped form the snapshot is the one that was taken when the round opened. In the blocking form the
gate is shut first, and the step is applied before it opens again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gossip.exchange.messages import Accepted, Implausible
from gossip.exchange.swap import Conversation, conclude
from gossip.interface import GossipReplica, MeetingLost, OuterStepTaken, PartnerTooStale, RoundContext
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot
from gossip.rounds.prefetch_cache import PrefetchCache
from gossip.rounds.round_state import Meeting, PendingStep, RoundState, now
from gossip.rounds.weight_exchange import ExchangeResult, MeetingStanding, exchange_weights


class Meetings:
    """The meetings of one replica, one at a time; `apply` applies a step that is agreed, in a pause."""

    def __init__(
        self,
        round_state: RoundState,
        optimiser: OuterOptimiser,
        shelf: PrefetchCache,
        replica: GossipReplica,
        around: RoundContext,
        apply: Callable[[PendingStep], Awaitable[None]],
    ) -> None:
        self._situation, self._optimiser, self._shelf = round_state, optimiser, shelf
        self._replica, self._around, self._apply = replica, around, apply
        self._blocked_s = 1.0

    def __repr__(self) -> str:
        return f"<Meetings: {self._situation.engagement or 'none under way'}>"

    def statistics(self) -> dict[str, int | float]:
        """Return how many came to nothing, and how many of those by weights that could not be right."""
        counts = self._situation.counts
        return {"lost": counts["lost"], "implausible": counts["implausible"]}

    async def meet(self, conversation: Conversation, engagement: Meeting, accepted: Accepted | None) -> None:
        """Exchange and step, once agreed. `accepted`: our answer, still to be sent, where we are the asked."""
        round_state = self._situation
        why, implausible = "the partner was silent or went away", False
        try:
            if accepted is not None:
                await conversation.send(accepted)
            if self._situation.settings.blocking:
                started_s = now()
                async with self._gate_shut(), round_state.pause:
                    taken = await self._optimiser.snapshot(round_state.round_schedule.inner_steps)
                    await self._exchange(conversation, engagement, taken, asked=accepted is not None)
                self._blocked_s = now() - started_s
            else:
                async with round_state.pause:
                    kept = round_state.snapshot
                if kept is None:
                    raise ConnectionAbortedError("the round was closed meanwhile")
                await self._exchange(conversation, engagement, kept, asked=accepted is not None)
        except ConnectionError as loss:
            why, implausible = str(loss), isinstance(loss, Implausible)
            raise
        finally:
            if round_state.engagement is engagement:
                self._lose(engagement, why, implausible)

    @asynccontextmanager
    async def _gate_shut(self) -> AsyncIterator[None]:
        """Shut the gate for the body. Raises ConnectionAbortedError if what is in flight does not come back."""
        shut = False
        try:
            async with self._replica.alone(self._blocked_s):
                shut = True
                yield
        except TimeoutError as silence:
            if shut:
                raise
            raise ConnectionAbortedError("our own gate did not drain: microbatches in flight") from silence

    def _lose(self, engagement: Meeting, why: str, implausible: bool) -> None:
        round_state = self._situation
        round_state.engagement = None
        round_state.counts["lost"] += 1
        round_state.counts["implausible"] += implausible
        self._put_off(engagement.partner)
        self._around.record(
            MeetingLost(
                round=round_state.round_schedule.round, partner=engagement.partner, why=why, implausible=implausible
            )
        )
        round_state.ring()

    async def _exchange(
        self, conversation: Conversation, engagement: Meeting, snapshot: Snapshot, *, asked: bool
    ) -> None:
        round_state = self._situation
        claim = MeetingStanding(round_state.met, round_state.settings.staleness_at_most)
        traded = await exchange_weights(conversation, snapshot, self._optimiser, self._shelf, claim)

        async def commit() -> None:
            if round_state.engagement is not engagement:
                raise ConnectionAbortedError("the round was given up meanwhile")
            round_state.engagement = None
            round_state.counts["spared"] += traded.spared
            if traded.step is None:
                self._note_too_stale(engagement.partner, traded)
            else:
                round_state.snapshot, round_state.open = None, False
                event = self._event(engagement, traded)
                round_state.settled = PendingStep(traded.step, snapshot.inner_steps, event, traded.last_met)
                if round_state.settings.blocking:
                    await self._apply(round_state.settled)
            round_state.ring()

        await conclude(conversation, commit, asked=asked)

    def _event(self, engagement: Meeting, traded: ExchangeResult) -> OuterStepTaken:
        return OuterStepTaken(
            round=self._situation.round_schedule.round,
            seconds=now() - engagement.since_s,
            partner=engagement.partner,
            gap=traded.gap,
            staleness_rounds=traded.staleness,
            partner_staleness=traded.partner_staleness,
            adopted=traded.adopted,
            bytes_sent=traded.bytes_sent,
            bytes_received=traded.bytes_received,
        )

    def _note_too_stale(self, partner: str, traded: ExchangeResult) -> None:
        """Go on with our open round: the partner has ended its own with our weights."""
        round_state = self._situation
        round_state.counts["too_stale"] += 1
        round_state.counts["bytes_sent"] += traded.bytes_sent
        round_state.counts["bytes_received"] += traded.bytes_received
        self._put_off(partner)
        self._around.record(
            PartnerTooStale(
                round=round_state.round_schedule.round,
                partner=partner,
                partner_staleness=traded.partner_staleness,
                bytes_sent=traded.bytes_sent,
                bytes_received=traded.bytes_received,
            )
        )

    def _put_off(self, partner: str) -> None:
        """Ask this partner later, if at all, and do not let it have as many meetings in this round as it likes."""
        round_state = self._situation
        round_state.record_timeout[partner] += 1
        round_state.prospects.put_off(partner, round_state.settings.patience.sleep_s, now())
