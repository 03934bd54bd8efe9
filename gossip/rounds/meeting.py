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
from gossip.interface import Lost, OuterStep, Replica, Surroundings, TooStale
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot
from gossip.rounds.prefetch_cache import Shelf
from gossip.rounds.round_state import Engagement, Settled, Situation, now
from gossip.rounds.weight_exchange import Claim, Traded, trade


class Meetings:
    """The meetings of one replica, one at a time; `apply` applies a step that is agreed, in a pause."""

    def __init__(
        self,
        situation: Situation,
        optimiser: OuterOptimiser,
        shelf: Shelf,
        replica: Replica,
        around: Surroundings,
        apply: Callable[[Settled], Awaitable[None]],
    ) -> None:
        self._situation, self._optimiser, self._shelf = situation, optimiser, shelf
        self._replica, self._around, self._apply = replica, around, apply
        self._blocked_s = 1.0

    def __repr__(self) -> str:
        return f"<Meetings: {self._situation.engagement or 'none under way'}>"

    def statistics(self) -> dict[str, int | float]:
        """Return how many came to nothing, and how many of those by weights that could not be right."""
        counts = self._situation.counts
        return {"lost": counts["lost"], "implausible": counts["implausible"]}

    async def meet(self, conversation: Conversation, engagement: Engagement, accepted: Accepted | None) -> None:
        """Exchange and step, once agreed. `accepted`: our answer, still to be sent, where we are the asked."""
        situation = self._situation
        why, implausible = "the partner was silent or went away", False
        try:
            if accepted is not None:
                await conversation.send(accepted)
            if self._situation.settings.blocking:
                started_s = now()
                async with self._gate_shut(), situation.pause:
                    taken = await self._optimiser.snapshot(situation.cadence.inner_steps)
                    await self._exchange(conversation, engagement, taken, asked=accepted is not None)
                self._blocked_s = now() - started_s
            else:
                async with situation.pause:
                    kept = situation.snapshot
                if kept is None:
                    raise ConnectionAbortedError("the round was closed meanwhile")
                await self._exchange(conversation, engagement, kept, asked=accepted is not None)
        except ConnectionError as loss:
            why, implausible = str(loss), isinstance(loss, Implausible)
            raise
        finally:
            if situation.engagement is engagement:
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

    def _lose(self, engagement: Engagement, why: str, implausible: bool) -> None:
        situation = self._situation
        situation.engagement = None
        situation.counts["lost"] += 1
        situation.counts["implausible"] += implausible
        self._put_off(engagement.partner)
        self._around.record(
            Lost(round=situation.cadence.round, partner=engagement.partner, why=why, implausible=implausible)
        )
        situation.ring()

    async def _exchange(
        self, conversation: Conversation, engagement: Engagement, snapshot: Snapshot, *, asked: bool
    ) -> None:
        situation = self._situation
        claim = Claim(situation.met, situation.settings.staleness_at_most)
        traded = await trade(conversation, snapshot, self._optimiser, self._shelf, claim)

        async def commit() -> None:
            if situation.engagement is not engagement:
                raise ConnectionAbortedError("the round was given up meanwhile")
            situation.engagement = None
            situation.counts["spared"] += traded.spared
            if traded.step is None:
                self._note_too_stale(engagement.partner, traded)
            else:
                situation.snapshot, situation.open = None, False
                event = self._event(engagement, traded)
                situation.settled = Settled(traded.step, snapshot.inner_steps, event, traded.last_met)
                if situation.settings.blocking:
                    await self._apply(situation.settled)
            situation.ring()

        await conclude(conversation, commit, asked=asked)

    def _event(self, engagement: Engagement, traded: Traded) -> OuterStep:
        return OuterStep(
            round=self._situation.cadence.round,
            seconds=now() - engagement.since_s,
            partner=engagement.partner,
            gap=traded.gap,
            staleness_rounds=traded.staleness,
            partner_staleness=traded.partner_staleness,
            adopted=traded.adopted,
            bytes_sent=traded.bytes_sent,
            bytes_received=traded.bytes_received,
        )

    def _note_too_stale(self, partner: str, traded: Traded) -> None:
        """Go on with our open round: the partner has ended its own with our weights."""
        situation = self._situation
        situation.counts["too_stale"] += 1
        situation.counts["bytes_sent"] += traded.bytes_sent
        situation.counts["bytes_received"] += traded.bytes_received
        self._put_off(partner)
        self._around.record(
            TooStale(
                round=situation.cadence.round,
                partner=partner,
                partner_staleness=traded.partner_staleness,
                bytes_sent=traded.bytes_sent,
                bytes_received=traded.bytes_received,
            )
        )

    def _put_off(self, partner: str) -> None:
        """Ask this partner later, if at all, and do not let it have as many meetings in this round as it likes."""
        situation = self._situation
        situation.in_vain[partner] += 1
        situation.prospects.put_off(partner, situation.settings.patience.sleep_s, now())
