"""Slow weights ahead of time: swapped with the next partner while both still train, so that a meeting is shorter.

Where gamma differs from beta, the rule needs the partner's slow weights too. They do not move between two rounds, and
the next partner follows from the seed, so a replica that has ended its round swaps slow weights with it in the
background. If another partner comes after all, or slow weights have moved since, they travel in the meeting: there each
side says which version it holds. A swap costs memory and, if it was in vain, traffic; never a wait.
"""

from __future__ import annotations

import asyncio

from gossip.exchange.messages import (
    NOTHING,
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Implausible,
    Probe,
    ProposePrefetch,
    Weights,
)
from gossip.exchange.swap import check_own, check_probe, size_bytes, swap
from gossip.interface import Conversation, MeetingLost, RoundContext
from gossip.rounds.matching import SLACK_S
from gossip.rounds.outer_optimiser import OuterOptimiser
from gossip.rounds.round_state import Prefetch, Prefetched, RoundState, now

SWAPS_AT_MOST = 2
"""With one peer, of one version of our slow weights; the second replaces a first that broke or is outdated."""


class SlowWeightPrefetcher:
    """One replica's swaps ahead of its rounds: `run` proposes in the background, `answer_one` answers.

    `swapping`: the peer of the swap under way.
    """

    def __init__(self, round_state: RoundState, optimiser: OuterOptimiser, context: RoundContext) -> None:
        self._round_state, self._optimiser, self._context = round_state, optimiser, context
        self.swapping: str | None = None
        self._asking: str | None = None
        self._put_off: tuple[str, int, float] | None = None
        """A peer not to ask again, for which version of our slow weights, and until when."""

    @property
    def _prefetch(self) -> Prefetch:
        return self._round_state.prefetch  # another one after an outer step

    async def run(self) -> None:
        round_state = self._round_state
        while self._optimiser.needs_slow:
            peer = self._next_partner()
            wait_s = round_state.timeouts.sleep_s
            if peer is not None and self.swapping is None and self._wants(peer):
                wait_s = self._wait_s(peer)
                if wait_s <= SLACK_S:
                    await self._propose(peer)
                    continue
            await round_state.nap(wait_s)

    async def answer_one(self, conversation: Conversation, deadline: asyncio.Timeout) -> None:
        """Answer a proposal at once; if it is accepted, move the deadline to that of a meeting, and swap."""
        round_state = self._round_state
        reason = self._refusal(conversation.peer)
        if reason is not None:
            refusal = Decline(
                reason=reason, retry_after_s=round_state.schedule.ready_in_s, round=round_state.schedule.round
            )
            await conversation.send(refusal)
            return
        deadline.reschedule(now() + round_state.timeouts.exchange_s)
        await self._swap(conversation, Accept(round=round_state.schedule.round))

    def _next_partner(self) -> str | None:
        """Return the peer that we expect to meet next, or None while our slow weights may move before that."""
        round_state = self._round_state
        if not round_state.between_rounds:
            return None
        return next(iter(round_state.partners.order(round_state.next_round)), None)

    def _wait_s(self, peer: str) -> float:
        put_off = self._put_off
        if put_off is None or put_off[:2] != (peer, self._optimiser.version):
            return 0.0
        return put_off[2] - now()

    def _wants(self, peer: str) -> bool:
        return self._prefetch.of(peer) is None and self._prefetch.begun[peer] < SWAPS_AT_MOST

    def _refusal(self, sender: str) -> DeclineReason | None:
        if self._round_state.leaving:
            return DeclineReason.LEAVING
        if self.swapping is not None:
            return DeclineReason.ENGAGED
        swaps_left = self._optimiser.needs_slow and self._prefetch.begun[sender] < SWAPS_AT_MOST
        if not swaps_left or self._next_partner() != sender:
            return DeclineReason.NOT_NEXT
        if self._asking is None:
            return None
        if self._asking != sender:
            return DeclineReason.ASKING
        # Both have just proposed the same: the lower peer id's goes first.
        return None if sender < self._round_state.me else DeclineReason.YIELD

    async def _propose(self, peer: str) -> None:
        round_state, patience = self._round_state, self._round_state.timeouts
        self._asking = peer
        again_s = patience.sleep_s
        try:
            async with asyncio.timeout(patience.answer_s) as deadline, self._context.converse(peer) as conversation:
                await conversation.send(ProposePrefetch())
                reply = await conversation.receive()
                self._asking = None
                if isinstance(reply, Decline):
                    again_s = min(max(reply.retry_after_s, 0.0), patience.sleep_s)
                elif not isinstance(reply, Accept):
                    raise ConnectionAbortedError(f"expected an answer, got {type(reply).__name__}")
                elif self.swapping is None and self._next_partner() == peer:
                    deadline.reschedule(now() + patience.exchange_s)
                    await self._swap(conversation, None)
                    again_s = 0.0
        except (ConnectionError, TimeoutError) as loss:
            # `_swap` has counted what is implausible.
            round_state.counts["unanswered"] += not isinstance(loss, Implausible)
        finally:
            self._asking = None
            until_s = now() + again_s + round_state.rng.uniform(0.5, 1.5) * patience.jitter_s
            self._put_off = (peer, self._optimiser.version, until_s)

    async def _swap(self, conversation: Conversation, accepted: Accept | None) -> None:
        """Swap, once agreed. `accepted`: our answer, still to be sent, where we are the asked."""
        self.swapping = conversation.peer
        # No memory for two copies; and a meeting that begins meanwhile must not use what this swap replaces.
        self._prefetch.held = None
        self._prefetch.begun[conversation.peer] += 1
        try:
            if accepted is not None:
                await conversation.send(accepted)
            await self._swap_once(conversation, asked=accepted is not None)
        except Implausible as lie:
            self._round_state.counts["implausible"] += 1
            lost = MeetingLost(
                round=self._round_state.next_round, partner=conversation.peer, why=str(lie), implausible=True
            )
            self._context.record(lost)
            raise
        finally:
            self.swapping = None
            self._round_state.ring()

    async def _swap_once(self, conversation: Conversation, *, asked: bool) -> None:
        optimiser, version = self._optimiser, self._optimiser.version
        round, last_met = self._round_state.weight_age
        mine = Probe(
            round=round, last_met=last_met, version=version, holds=NOTHING, slow=optimiser.slow_probe(), fast=None
        )
        check_own(mine)
        self._prefetch.bytes_sent += size_bytes(mine)
        theirs = await swap(conversation, mine)
        check_probe(theirs, mine)
        self._prefetch.bytes_received += size_bytes(theirs)
        steps = optimiser.steps(mine.slow, theirs.slow)
        encoded = await optimiser.encode_slow(steps)
        self._must_be(version)
        sent = Weights(fast=(), slow=encoded.coded.wire)
        self._prefetch.bytes_sent += size_bytes(sent)
        came = await swap(conversation, sent)
        self._prefetch.bytes_received += size_bytes(came)
        slow = await optimiser.hear_slow(came.slow, encoded)
        self._must_be(version)
        self._prefetch.held = Prefetched(conversation.peer, version, theirs.version, slow)
        self._round_state.counts["sent_ahead"] += 1
        # The asker stays until the asked has all, since its leaving ends the conversation.
        if asked:
            await conversation.send(Acknowledge())
        elif not isinstance(await conversation.receive(), Acknowledge):
            raise ConnectionAbortedError("expected an acknowledgement")

    def _must_be(self, version: int) -> None:
        """Raise ConnectionAbortedError if an outer step has moved the slow weights in the meantime."""
        if self._optimiser.version != version:
            raise ConnectionAbortedError("the slow weights moved meanwhile")
