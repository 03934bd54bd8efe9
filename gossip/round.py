"""One replica's gossip rounds: when to open one, whom to ask, what to do when nobody is there.

Every H own inner steps the replica copies its fast weights (the **snapshot**) and *opens* a round, and trains on. While
the round is open a background task asks possible partners in this round's order, and incoming offers are answered at
once; whichever comes first. The two exchange their snapshots while both train on, each applies the outer rule to the
same facts, and the correction is added at the next pause between inner steps. No work stands still for lack of one.

- A snapshot older than `overlap_steps` is retaken while the round stays open, so a correction is late by that and the
  time of the exchange at most.
- No partner by the time the next round is due: **defer**. No outer step is taken and the pseudo-gradient keeps growing;
  solo steps instead would narrow the stable range of gamma and raise the floor of the disagreement. After several
  deferrals in a row comes a **solo round**, the same rule with a mean over one. Alone in the roster: solo at once.
- The **blocking form** (the paper's) shuts the gate only when a partner has accepted: both drain what is in flight,
  then take their snapshots, exchange and correct, under one deadline. Shutting it before, while still waiting for a
  partner, can deadlock across stages: the partner's step may need microbatches that are stuck at the shut gate.
- The last round of a run does not wait for H steps. Who finds no partner steps alone then: work that is in no slow
  weights would be in no export either.

Weights and snapshots change under one lock, `_pause`; where the gate is involved, it is taken before the lock.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from gossip.cadence import Cadence
from gossip.exchange import Conversation, conclude, gap, size_bytes, swap
from gossip.matching import Standing, answer
from gossip.messages import Accepted, Declined, Implausible, Offer
from gossip.nesterov import OuterState, Stepped
from gossip.others import Others
from gossip.outer import OuterOptimiser, Snapshot, to_the_end
from gossip.port import Deferred, Lost, Origin, OuterStep, Replica, Settings, Surroundings
from gossip.prospects import ASKED_AT_MOST, SLACK_S, Prospects

POLL_S = 1.0
"""How often the last round looks whether anybody is left."""
COUNTED = (
    *("met", "solo", "deferred", "lost", "implausible", "retaken"),
    *("offers_sent", "offers_received", "declined", "unanswered", "bytes_sent", "bytes_received"),
)


class _Engagement:
    """A meeting that was agreed and has not ended. Compared by identity: a new one is never taken for an old one."""

    __slots__ = ("partner", "since_s")

    def __init__(self, partner: str, since_s: float) -> None:
        self.partner, self.since_s = partner, since_s


class _Settled(NamedTuple):
    """A step that waits for the next pause; its event still lacks the staleness."""

    stepped: Stepped
    snapshot_step: int
    event: OuterStep


class Rounds:
    """The gossip of one replica: `between_steps` for the shell, `run` as a background task, `serve` for streams."""

    def __init__(
        self, me: str, settings: Settings, origin: Origin, replica: Replica, surroundings: Surroundings
    ) -> None:
        self._me = me
        self._settings = settings
        self._replica = replica
        self._around = surroundings
        self._others = Others(me, settings.seed, surroundings.partners)
        self._optimiser = OuterOptimiser(settings, origin.state, replica, surroundings.compute)
        self._cadence = Cadence(settings.inner_steps_per_round, origin.rounds, origin.inner_steps)
        self._rng = random.Random(f"{settings.seed}|jitter|{me}")
        self._prospects = Prospects(settings.patience, self._rng)
        self._open = False
        self._leaving = False
        self._snapshot: Snapshot | None = None
        self._asking: str | None = None
        self._engagement: _Engagement | None = None
        self._settled: _Settled | None = None
        self._gathered = origin.inner_steps
        """The inner steps that the slow weights hold."""
        self._blocked_s = 1.0
        self._pause = asyncio.Lock()
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()

    @property
    def state(self) -> OuterState:
        """Slow weights and momentum after the last round that was applied."""
        return self._optimiser.state

    @property
    def finished(self) -> int:
        """The number of the last finished round, met or solo: what the roster's record says."""
        return self._cadence.finished

    def statistics(self) -> dict[str, int | float]:
        """Return counters since the start, and where the replica is."""
        counted: dict[str, int | float] = {name: self._counts[name] for name in COUNTED}
        return counted | {
            "round": self._cadence.round,
            "finished": self._cadence.finished,
            "healed": self._cadence.healed,
            "deferred_in_a_row": self._cadence.deferred_in_a_row,
            "open": int(self._open),
            "engaged": int(self._engagement is not None),
        }

    def __repr__(self) -> str:
        if self._engagement is not None:
            doing = f"meeting {self._engagement.partner}"
        elif self._settled is not None:
            doing = "about to step"
        else:
            doing = f"open, asking {self._asking or 'nobody just now'}" if self._open else "closed"
        return f"<Rounds of {self._me}: round {self._cadence.round}, {self._counts['met']} met, {doing}>"

    # What the shell calls.

    async def between_steps(self, inner_steps: int, seconds_per_step: float) -> None:
        """Do what is due in a pause between two inner steps, with nothing in flight.

        `inner_steps`: this replica's count. `seconds_per_step`: what one takes now, for the estimates given to askers.
        """
        async with self._pause:
            self._cadence.tick(inner_steps, seconds_per_step)
            if self._settled is not None:
                await self._apply(self._settled)
            if self._open and self._engagement is None:
                await self._tend()
            if not self._open and self._cadence.due and not self._leaving:
                await self._open_round()
            if self._open:
                # Somebody more may have become good enough.
                self._tell()

    async def run(self) -> None:
        """Ask partners while a round is open, until cancelled."""
        while True:
            peer, wait_s = self._whom()
            if peer is None:
                await self._nap(wait_s)
                continue
            await self._ask(peer)
            if self._open and self._engagement is None:
                await self._nap(self._rng.uniform(0.0, self._settings.patience.jitter_s))

    async def serve(self, conversation: Conversation) -> None:
        """Answer one incoming offer at once; if it is accepted, meet. Raises a `ConnectionError` where that breaks."""
        peer, patience = conversation.peer, self._settings.patience
        try:
            async with asyncio.timeout(patience.answer_s) as deadline:
                offer = await conversation.receive()
                if not isinstance(offer, Offer):
                    raise ConnectionAbortedError(f"expected an offer, got {type(offer).__name__}")
                self._counts["offers_received"] += 1
                reply = answer(self._standing(peer), peer, offer)
                if isinstance(reply, Declined):
                    await conversation.send(reply)
                    return
                engagement = self._engage(peer, offer.round)
                deadline.reschedule(_now() + patience.exchange_s)
                await self._meet(conversation, engagement, reply)
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"{peer} was silent") from silence

    async def last_round(self, deadline_s: float) -> None:
        """End the gossip: open a round now, meet a partner if one is found within `deadline_s`, else step alone.

        Called in a pause that lasts, with `run` still running. Offers are declined from then on. Where the slow weights
        hold all inner steps already, there is nothing to bring: a round more would be momentum alone.
        """
        await self._meeting_over()
        async with self._pause:
            if self._settled is not None:
                await self._apply(self._settled)
            if self._gathered == self._cadence.inner_steps:
                self._leaving, self._open, self._snapshot = True, False, None
                return
            await self._open_round(last=True)
        await self._wait_while(self._hopeful, _now() + deadline_s)
        await self._meeting_over()
        self._leaving = True
        async with self._pause:
            if self._settled is not None:
                await self._apply(self._settled)
            elif self._open:
                await self._step_alone()

    async def _meeting_over(self) -> None:
        """Wait for the meeting under way, if there is one, for as long as meetings may take; then give it up."""
        await self._wait_while(lambda: self._engagement is not None, _now() + self._settings.patience.exchange_s)
        self._engagement = None

    async def leave(self) -> None:
        """Take part in no further round; what has been agreed and is complete is still applied.

        Called in a pause that lasts: a partner that has stepped with us counts on our step too.
        """
        self._leaving, self._open, self._snapshot, self._engagement = True, False, None, None
        async with self._pause:
            if self._settled is not None:
                await self._apply(self._settled)
        self._tell()

    # In a pause, under the lock.

    async def _tend(self) -> None:
        """Look after an open round that nobody has accepted yet."""
        if self._prospects.nobody_left(self._others.peers):
            await self._step_alone()
        elif self._cadence.due:
            if self._cadence.deferred_in_a_row < self._settings.deferrals_before_solo:
                self._defer()
            else:
                await self._step_alone()
        elif self._snapshot is not None:
            age = self._cadence.inner_steps - self._snapshot.inner_steps
            if age >= max(1, self._settings.overlap_steps):
                self._snapshot = await self._take_snapshot()
                self._counts["retaken"] += 1

    def _defer(self) -> None:
        self._open, self._snapshot = False, None
        self._cadence.defer()
        self._counts["deferred"] += 1
        self._around.record(Deferred(round=self._cadence.round, in_a_row=self._cadence.deferred_in_a_row))

    async def _take_snapshot(self) -> Snapshot:
        return await self._optimiser.snapshot(self._cadence.inner_steps)

    async def _open_round(self, *, last: bool = False) -> None:
        self._cadence.open(self._others.rounds, last=last)
        self._prospects.clear()
        if not self._others.peers:
            await self._step_alone()
            return
        if not self._settings.blocking:
            self._snapshot = await self._take_snapshot()
        self._open = True
        self._tell()

    async def _step_alone(self) -> None:
        self._open, self._snapshot = False, None
        started_s = _now()
        taken = await self._take_snapshot()
        stepped = await self._optimiser.alone(taken)
        event = OuterStep(round=self._cadence.round, seconds=_now() - started_s)
        await self._apply(_Settled(stepped, taken.inner_steps, event))

    async def _apply(self, settled: _Settled) -> None:
        self._settled = None
        self._gathered = settled.snapshot_step
        await to_the_end(self._correct(settled))

    async def _correct(self, settled: _Settled) -> None:
        await self._optimiser.correct(settled.stepped)
        event = replace(settled.event, staleness=self._cadence.inner_steps - settled.snapshot_step)
        self._cadence.finish(event.round)
        self._counts["solo" if event.partner is None else "met"] += 1
        self._counts["bytes_sent"] += event.bytes_sent
        self._counts["bytes_received"] += event.bytes_received
        self._around.record(event)
        self._tell()

    # Asking and being asked.

    def _whom(self) -> tuple[str | None, float | None]:
        """Return whom to ask now; or nobody and how long to wait (None: until something changes)."""
        if not self._open or self._engagement is not None:
            return None, None
        order = self._others.order(self._cadence.round)
        places = range(min(len(order), ASKED_AT_MOST))
        # Whoever is preferred less is hoped against for longer: the good enough are the first ones.
        good_enough = list(takewhile(lambda place: not self._hopes_s(place, len(order)), places))
        return self._prospects.next(order[: len(good_enough)], _now())

    def _hopes_s(self, place: int, count: int) -> float:
        return self._cadence.hopes_s(place, count, self._settings.patience.sleep_s)

    async def _ask(self, peer: str) -> None:
        patience = self._settings.patience
        self._asking = peer
        self._counts["offers_sent"] += 1
        engagement = None
        try:
            async with (
                asyncio.timeout(patience.answer_s) as deadline,
                self._around.converse(peer) as conversation,
            ):
                await conversation.send(Offer(round=self._cadence.round))
                reply = await conversation.receive()
                self._asking = None
                if isinstance(reply, Declined):
                    self._counts["declined"] += 1
                    if self._open:
                        self._cadence.adopt(reply.round, self._others.rounds)
                    self._prospects.declined(peer, reply, _now())
                elif not isinstance(reply, Accepted):
                    raise ConnectionAbortedError(f"expected an answer, got {type(reply).__name__}")
                elif self._open and self._engagement is None:
                    engagement = self._engage(peer, reply.round)
                    deadline.reschedule(_now() + patience.exchange_s)
                    await self._meet(conversation, engagement, None)
        except (ConnectionError, TimeoutError):
            if engagement is None:
                self._counts["unanswered"] += 1
                self._prospects.put_off(peer, patience.sleep_s, _now())
        finally:
            self._asking = None

    def _standing(self, sender: str) -> Standing:
        order = self._others.order(self._cadence.round) if self._open else ()
        place = order.index(sender) if sender in order else len(order)
        return Standing(
            me=self._me,
            round=self._cadence.round,
            open=self._open,
            engaged=self._engagement is not None,
            asking=self._asking,
            leaving=self._leaving,
            hopes_s=self._hopes_s(place, max(len(order), place + 1)),
            ready_in_s=self._cadence.ready_in_s(self._settings.patience.sleep_s),
        )

    def _hopeful(self) -> bool:
        if not self._open:
            return False
        return self._engagement is not None or not self._prospects.nobody_left(self._others.peers)

    # Meeting.

    def _engage(self, peer: str, their_round: int) -> _Engagement:
        """Bind ourselves, open and free, to one partner."""
        self._cadence.adopt(their_round, self._others.rounds)
        self._engagement = _Engagement(peer, _now())
        return self._engagement

    async def _meet(self, conversation: Conversation, engagement: _Engagement, accepted: Accepted | None) -> None:
        """Exchange and step, once agreed. `accepted`: our answer, still to be sent, where we are the asked."""
        why, implausible = "the partner was silent or went away", False
        try:
            if accepted is not None:
                await conversation.send(accepted)
            if self._settings.blocking:
                started_s = _now()
                async with self._replica.alone(self._blocked_s), self._pause:
                    taken = await self._take_snapshot()
                    await self._exchange(conversation, engagement, taken, asked=accepted is not None)
                self._blocked_s = _now() - started_s
            else:
                async with self._pause:
                    kept = self._snapshot
                if kept is None:
                    raise ConnectionAbortedError("the round was closed meanwhile")
                await self._exchange(conversation, engagement, kept, asked=accepted is not None)
        except ConnectionError as loss:
            why, implausible = str(loss), isinstance(loss, Implausible)
            raise
        finally:
            if self._engagement is engagement:
                self._lose(engagement, why, implausible)

    def _lose(self, engagement: _Engagement, why: str, implausible: bool) -> None:
        self._engagement = None
        self._counts["lost"] += 1
        self._counts["implausible"] += implausible
        self._prospects.put_off(engagement.partner, self._settings.patience.sleep_s, _now())
        self._around.record(
            Lost(round=self._cadence.round, partner=engagement.partner, why=why, implausible=implausible)
        )
        self._tell()

    async def _exchange(
        self, conversation: Conversation, engagement: _Engagement, snapshot: Snapshot, *, asked: bool
    ) -> None:
        stepped, event = await self._trade(conversation, engagement.partner, snapshot)

        async def commit() -> None:
            if self._engagement is not engagement:
                raise ConnectionAbortedError("the round was given up meanwhile")
            self._engagement, self._snapshot, self._open = None, None, False
            ended = replace(event, round=self._cadence.round, seconds=_now() - engagement.since_s)
            self._settled = _Settled(stepped, snapshot.inner_steps, ended)
            if self._settings.blocking:
                await self._apply(self._settled)
            self._tell()

        await conclude(conversation, commit, asked=asked)

    async def _trade(self, conversation: Conversation, partner: str, snapshot: Snapshot) -> tuple[Stepped, OuterStep]:
        """Exchange weights and compute the step; the partner's weights are not kept longer than that."""
        mine = self._optimiser.weights(snapshot)
        theirs = await swap(conversation, mine, self._around.compute)
        stepped = await self._optimiser.with_partner(mine, theirs)
        event = OuterStep(
            round=self._cadence.round,
            seconds=0.0,
            partner=partner,
            gap=gap(mine.probe, theirs.probe),
            bytes_sent=size_bytes(mine),
            bytes_received=size_bytes(theirs),
        )
        return stepped, event

    # Waking up.

    def _tell(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_while(self, condition: Callable[[], bool], until_s: float) -> None:
        while condition() and (left_s := until_s - _now()) > SLACK_S:
            await self._nap(min(POLL_S, left_s))

    async def _nap(self, seconds: float | None) -> None:
        """Sleep until something changes, at most for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def _now() -> float:
    return asyncio.get_running_loop().time()
