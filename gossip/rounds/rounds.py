"""One replica's gossip rounds: when a round opens, who is asked, what follows if nobody comes.

Every H own inner steps the replica copies its fast weights (the **snapshot**), *opens* a round, and trains on. A
background task asks possible partners, and incoming proposals are answered at once. The first agreement counts: the two
exchange snapshots while both train on, and each applies the outer rule to the same facts, also while it trains on. The
correction of the fast weights is added at the next pause between inner steps.

- Without a partner by the time the next round is due, the round is **skipped**: no outer step is taken and the
  pseudo-gradient keeps growing. After `skips_before_solo` skipped rounds in a row comes a **solo round**, the same rule
  with a mean over one; alone in the roster, at once.
- The **blocking form** (the paper's) refuses microbatches only when a partner has accepted. Refusing them while still
  waiting for a partner can deadlock across stages.
- The last round of a run does not wait for H steps, and without a partner the replica steps alone: work that is in no
  slow weights would be in no export.
- The blocking form and a solo step take the whole step in the pause, so what a replica without a partner computes does
  not depend on how fast it is.

Fast weights and snapshots change under one lock, `RoundState.pause`; a replica is drained before the lock is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from gossip.exchange.messages import Propose, ProposePrefetch
from gossip.interface import (
    UNKNOWN,
    Conversation,
    GossipReplica,
    Origin,
    OuterStepTaken,
    RoundContext,
    RoundProgress,
    RoundSkipped,
)
from gossip.rounds.matching import local_step_count, steps_of_fastest
from gossip.rounds.meeting import MeetingProtocol
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot, Step
from gossip.rounds.prefetch import SlowWeightPrefetcher
from gossip.rounds.round_state import PendingStep, RoundState, now
from gossip.rounds.weights_lock import WeightsLock, to_the_end
from gossip.rule.outer_step import OuterState, WeightAge
from gossip.settings import OuterConfig


class RoundsView(NamedTuple):
    """The partner that a replica meets, the one that it swaps with ahead, and how many partners it asks later.

    `left_alone`: how many of these it has lost much time by.
    """

    meeting_partner: str | None
    prefetch_partner: str | None
    put_off: int
    left_alone: int


class Rounds:
    """The gossip of one replica: `between_steps` for the shell, `run` as a background task, `serve` for streams."""

    def __init__(
        self, me: str, settings: OuterConfig, origin: Origin, replica: GossipReplica, context: RoundContext
    ) -> None:
        self._settings, self._context = settings, context
        self._round_state = RoundState(me, settings, origin, context)
        self._schedule, self._counts = self._round_state.schedule, self._round_state.counts
        self._optimiser = OuterOptimiser(
            settings,
            origin.state,
            replica,
            context.compute,
            seed=context.seed,
            fixed=context.fixed,
            from_zero=context.from_zero,
            partners=context.partners,
        )
        self._prefetcher = SlowWeightPrefetcher(self._round_state, self._optimiser, context)
        self._meetings = MeetingProtocol(self._round_state, self._optimiser, replica, context, self._end_round)
        self.weights = WeightsLock()
        self.met_partners: Collection[str] = self._round_state.met_partners
        """The latest partners of meetings that ended in a step of ours."""

    @property
    def state(self) -> OuterState:
        """Slow weights and momentum after the last outer step; they move with the next one."""
        return self._optimiser.state

    @property
    def slow_steps(self) -> int | None:
        """The inner steps that the slow weights hold; None until our first outer step where it is not known."""
        return self._round_state.slow_steps

    @property
    def finished(self) -> int:
        """The number of the last finished round, met or solo, as our record states it."""
        return self._schedule.finished

    @property
    def slow_age(self) -> WeightAge:
        """The last round whose step the slow weights hold, and the one in which they last met anybody's, 0 if in none.

        For a moment it may be later than `finished`: others learn of a round once the fast weights have its correction.
        """
        age = self._round_state.slow_age
        return age._replace(last_met=max(0, age.last_met))

    def statistics(self) -> dict[str, int | float]:
        return self._round_state.statistics()

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why the last "unanswered" proposal came to nothing, and the last "lost" meeting; only what has happened."""
        return self._round_state.reasons

    @property
    def holds_training(self) -> bool:
        """Whether a blocking round is at its meeting: no microbatch is admitted before its end."""
        return self._settings.blocking and self._round_state.meeting is not None

    @property
    def disowned(self) -> bool:
        """Whether we have disowned our weights and not adopted others yet."""
        return not self._round_state.owns

    def disown(self) -> None:
        """Say that our weights count for nothing: in the next meeting we go on from the partner's.

        A meeting or a step under way may still be a mean with them; so another meeting follows.
        """
        self._round_state.disown()

    def forgive(self) -> None:
        """Let no time until now count as lost by a partner: we were away ourselves."""
        self._round_state.queue.forgive(now())

    @property
    def view(self) -> RoundsView:
        """The activity of the moment, for a screen."""
        meeting = self._round_state.meeting
        return RoundsView(
            meeting_partner=None if meeting is None else meeting.partner,
            prefetch_partner=self._prefetcher.swapping,
            put_off=self._round_state.queue.put_off_count,
            left_alone=self._round_state.queue.left_alone_count(now()),
        )

    # Called by the node.

    async def between_steps(self, inner_steps: int, seconds_per_step: float, going: RoundProgress = UNKNOWN) -> None:
        """Do what is due in a pause between two inner steps, with nothing in flight.

        `inner_steps`: this replica's count. `seconds_per_step`: of one step now, for the estimates given to askers.
        `going`: progress and speed, which the length of our rounds may follow.
        """
        round_state = self._round_state
        async with round_state.pause:
            speeds = [candidate.speed for candidate in round_state.partners.candidates()]
            next_steps = local_step_count(self._settings, going, speeds)
            of_fastest = steps_of_fastest(self._settings, going.progress)
            self._schedule.tick(inner_steps, seconds_per_step, next_steps, of_fastest)
            if round_state.step_task is None:
                await self._end_step()
            if round_state.is_free:
                await self._tend()
            # A step that is still computed delays the next opening, instead of the training.
            if round_state.is_closed and self._schedule.due and not round_state.leaving:
                await self._open_round()
            if round_state.is_open:
                # Another partner may have become good enough.
                round_state.ring()

    async def run(self) -> None:
        """Ask partners while a round is open, and prepare the next one where that helps, until cancelled.

        A step under way is then awaited to its end. Raises what a step raises that fails.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._meetings.run(), name="meetings")
            group.create_task(self._watch_steps(), name="outer steps")
            if self._optimiser.needs_slow:
                group.create_task(self._prefetcher.run(), name="ahead")

    async def _watch_steps(self) -> None:
        while True:
            if (task := self._round_state.step_task) is not None:
                await to_the_end(task)
            else:
                await self._round_state.nap(None)

    async def serve(self, conversation: Conversation) -> None:
        """Answer one incoming proposal at once, and do what was agreed.

        Raises a `ConnectionError` where that breaks.
        """
        try:
            async with asyncio.timeout(self._context.timeouts.answer_s) as deadline:
                first = await conversation.receive()
                if isinstance(first, Propose):
                    await self._meetings.answer_one(conversation, first, deadline)
                elif isinstance(first, ProposePrefetch):
                    await self._prefetcher.answer_one(conversation, deadline)
                else:
                    raise ConnectionAbortedError(f"expected a proposal, got {type(first).__name__}")
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"{conversation.peer} was silent") from silence

    async def last_round(self, deadline_s: float) -> None:
        """End the gossip: open a round now, meet a partner if one is found within `deadline_s`, else step alone.

        Called in a pause that lasts, with `run` still running. Proposals are declined from then on. Where the slow
        weights hold all inner steps already, no round follows: its step would be momentum alone.
        """
        round_state = self._round_state
        await self._meeting_over()
        async with round_state.pause:
            await self._end_step()
            if self.slow_steps == self._schedule.inner_steps:
                round_state.leave()
                return
            await self._open_round(last=True)
        await round_state.wait_while(round_state.hopeful, now() + deadline_s)
        await self._meeting_over()
        round_state.refuse_proposals()
        async with round_state.pause:
            await (self._step_alone() if round_state.is_open else self._end_step())

    async def _meeting_over(self) -> None:
        """Wait for the meeting under way, if there is one, for as long as meetings may take; then give it up."""
        round_state = self._round_state
        until_s = now() + self._context.timeouts.exchange_s
        await round_state.wait_while(lambda: round_state.meeting is not None, until_s)
        if round_state.meeting is not None:
            round_state.end_meeting()

    async def leave(self) -> None:
        """Take part in no further round; a step that was agreed is still taken.

        Called in a pause that lasts: a partner that has stepped with us counts on our step too.
        """
        self._round_state.leave()
        await self.settle()

    @property
    def settled(self) -> bool:
        """Whether slow and fast weights belong together: no outer step is under way, and no correction waits."""
        return self._round_state.settled

    async def settle(self) -> None:
        """End a step under way, and correct the fast weights; called in a pause."""
        if not self.settled:
            async with self._round_state.pause:
                await self._end_step()

    async def read_settled(self) -> Callable[[], None]:
        """Keep all weights as they are, settled, until the returned function is called; called in a pause."""
        while True:
            await self.settle()
            release = await self.weights.read()
            if self.settled:
                return release
            release()

    # In a pause, under the lock.

    async def _tend(self) -> None:
        """Step alone, skip, or retake the snapshot of an open round that has no partner yet, where that is due."""
        round_state = self._round_state
        if round_state.queue.nobody_left(round_state.partners.peers):
            await self._step_alone()
        elif self._schedule.due:
            if self._schedule.skipped_in_a_row < self._settings.skips_before_solo:
                self._skip()
            else:
                await self._step_alone()
        elif round_state.snapshot is not None:
            age = self._schedule.inner_steps - round_state.snapshot.inner_steps
            if age >= max(1, self._settings.overlap_steps):
                round_state.open(await self._take_snapshot())
                self._counts["retaken"] += 1

    def _skip(self) -> None:
        self._round_state.close()
        self._schedule.skip()
        self._counts["skipped"] += 1
        self._context.record(RoundSkipped(round=self._schedule.round, in_a_row=self._schedule.skipped_in_a_row))

    async def _take_snapshot(self) -> Snapshot:
        return await self._optimiser.snapshot(self._schedule.inner_steps, self._round_state.round_fraction)

    async def _open_round(self, *, last: bool = False) -> None:
        round_state = self._round_state
        round_state.begin_round(last=last)
        if not round_state.partners.peers:
            await self._step_alone()
            return
        round_state.open(None if self._settings.blocking else await self._take_snapshot())

    async def _step_alone(self) -> None:
        round_state = self._round_state
        round_state.close()
        started_s = now()
        taken = await self._take_snapshot()
        event = OuterStepTaken(
            round=self._schedule.round, seconds=now() - started_s, staleness_rounds=round_state.staleness
        )
        round_state.step(PendingStep(Step(taken.fast), taken.inner_steps, event, round_state.last_met), self._take)
        await self._end_step()

    # The outer step, beside the training.

    async def _end_round(self, pending: PendingStep) -> None:
        """End a round that was met; the blocking form, which is in a pause, takes the whole step at once."""
        self._round_state.step(pending, self._take)
        if self._settings.blocking:
            await self._end_step()

    async def _take(self, pending: PendingStep) -> None:
        # Nobody reads the slow weights before the phase says what they hold.
        async with self.weights.slow.moving():
            correction = await self._optimiser.take(pending.step)
            self._round_state.correct_later(correction)

    async def _end_step(self) -> None:
        """End a step under way, and correct the fast weights; called in a pause, under the lock."""
        if not self.settled:
            await to_the_end(self._correct())

    async def _correct(self) -> None:
        if (task := self._round_state.step_task) is not None:
            await asyncio.wait({task})
            task.result()
        round_state = self._round_state
        async with self.weights.fast.moving():
            pending = round_state.take_correction()
            round_state.slow_steps = pending.snapshot_step
            await self._optimiser.correct(pending.correction)
            event, ahead = pending.event, round_state.prefetch
            event = replace(
                event,
                staleness=self._schedule.inner_steps - pending.snapshot_step,
                bytes_sent=event.bytes_sent + ahead.bytes_sent,
                bytes_received=event.bytes_received + ahead.bytes_received,
            )
            if event.partner is not None:
                round_state.steps_when_met = pending.snapshot_step
            round_state.finish(event.round, pending.last_met, adopted=event.adopted)
        self._counts["solo" if event.partner is None else "met"] += 1
        self._counts["adopted"] += event.adopted
        self._counts["bytes_sent"] += event.bytes_sent
        self._counts["bytes_received"] += event.bytes_received
        self._context.record(event)
