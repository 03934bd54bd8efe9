"""Asking for a partner while a round is open, and answering whoever asks.

Possible partners are asked one after the other, in this round's order, as soon as each is good enough (`matching`);
incoming offers are answered at once. Whichever agrees first binds both, and `meet` does the rest. Nobody is ever held
while somebody else is asked.

For an answer we wait as long as this partner's answers usually take, where the shell measures that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import takewhile

from gossip.exchange.messages import Accepted, Declined, Offer
from gossip.exchange.swap import Conversation
from gossip.interface import RoundContext
from gossip.rounds.matching import answer
from gossip.rounds.partners import ASKED_AT_MOST
from gossip.rounds.round_state import Meeting, RoundState, now

Meet = Callable[[Conversation, Meeting, Accepted | None], Awaitable[None]]
"""Exchange and step, once agreed; with our own answer, still to be sent, where we are the asked."""


class Offers:
    """The offers of one replica: `run` as a background task, `answer_one` for each that comes in."""

    def __init__(self, round_state: RoundState, context: RoundContext, meet: Meet) -> None:
        self._round_state, self._context, self._meet = round_state, context, meet

    async def run(self) -> None:
        """Ask partners while a round is open, until cancelled."""
        round_state, jitter_s = self._round_state, self._round_state.timeouts.jitter_s
        while True:
            peer, wait_s = self._whom()
            if peer is None:
                await round_state.nap(wait_s)
                continue
            await self._ask(peer)
            if round_state.is_free:
                await round_state.nap(round_state.rng.uniform(0.0, jitter_s))

    async def answer_one(self, conversation: Conversation, offer: Offer, deadline: asyncio.Timeout) -> None:
        """Answer an offer at once; if it is accepted, move the deadline on to a meeting's, and meet."""
        round_state, peer = self._round_state, conversation.peer
        round_state.counts["offers_received"] += 1
        reply = answer(round_state.answer_state(peer), peer, offer)
        if isinstance(reply, Declined):
            await conversation.send(reply)
            return
        meeting = round_state.engage(peer, offer.round)
        await self._meet_until(conversation, meeting, reply, deadline)

    def _whom(self) -> tuple[str | None, float | None]:
        """Return whom to ask now; or nobody and how long to wait (None: until something changes)."""
        round_state = self._round_state
        if not round_state.is_free:
            return None, None
        order = round_state.partners.order(round_state.schedule.round)
        places = range(min(len(order), ASKED_AT_MOST))
        # Whoever is preferred less is hoped against for longer: the good enough are the first ones.
        good_enough = list(
            takewhile(lambda place: not round_state.schedule.preference_delay_s(place, len(order)), places)
        )
        return round_state.queue.next(order[: len(good_enough)], now())

    async def _ask(self, peer: str) -> None:
        round_state, patience = self._round_state, self._round_state.timeouts
        answers, asked_s = self._context.answers, now()
        round_state.ask(peer)
        meeting = None
        try:
            async with (
                asyncio.timeout(answers.deadline_s(peer) if answers else patience.answer_s) as deadline,
                self._context.converse(peer) as conversation,
            ):
                await conversation.send(Offer(round=round_state.schedule.round))
                reply = await conversation.receive()
                round_state.note_answer()
                if answers:
                    answers.took(peer, now() - asked_s)
                if isinstance(reply, Declined):
                    self._note_refusal(peer, reply)
                elif not isinstance(reply, Accepted):
                    raise ConnectionAbortedError(f"expected an answer, got {type(reply).__name__}")
                elif round_state.is_free:
                    meeting = round_state.engage(peer, reply.round)
                    await self._meet_until(conversation, meeting, None, deadline)
        except (ConnectionError, TimeoutError) as loss:
            if answers and round_state.asking is not None and isinstance(loss, TimeoutError):
                answers.record_timeout(peer, asked_s, now())
            if meeting is None:
                round_state.counts["unanswered"] += 1
                round_state.queue.put_off(peer, patience.sleep_s, now())
        finally:
            round_state.note_answer()

    async def _meet_until(
        self,
        conversation: Conversation,
        meeting: Meeting,
        accepted: Accepted | None,
        deadline: asyncio.Timeout,
    ) -> None:
        """Meet within the time that a meeting may take, and learn whether that was enough."""
        deadline.reschedule(now() + self._round_state.exchange_s)
        try:
            await self._meet(conversation, meeting, accepted)
        except asyncio.CancelledError:
            if deadline.expired():
                self._round_state.note_exchange(late=True)
            raise
        self._round_state.note_exchange(late=False)

    def _note_refusal(self, peer: str, reply: Declined) -> None:
        round_state = self._round_state
        round_state.counts["declined"] += 1
        if round_state.is_open:
            round_state.schedule.adopt(reply.round, round_state.claims)
        round_state.queue.declined(peer, reply, now())
