"""One replica at work: a window of microbatches, an inner step, a pause; and every so often a round.

This module connects pieces that know nothing of each other. The admission window fills a window, the device takes the
inner step at the learning rate that the run's progress asks for, and in the pause that follows the rounds may copy or
correct the fast weights. Every access to weights is a job of the device's one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from random import Random
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any

from gossip.exchange.messages import Parts, ReplicaState
from gossip.interface import Event, MeetingLost, OuterStepTaken, RoundContext, RoundProgress
from gossip.rounds.rounds import Rounds
from gossip.rounds.weights_lock import to_the_end
from gossip.rule.outer_step import Tensors
from gossip.settings import RoundTimeouts
from gossip.transfer.chunks import HeldCopy
from noloco_node import __version__
from noloco_node.evaluation.evaluator import evaluation_quota, routed_losses
from noloco_node.journal import events
from noloco_node.machine.device import WatchedDevice
from noloco_node.machine.interface import StageModel
from noloco_node.network.interface import Conversation
from noloco_node.network.timeouts import ANSWERS, AdaptiveTimeout
from noloco_node.network.wire import is_usable
from noloco_node.node.microbatches import MicrobatchClient, MicrobatchServer, SendTurns
from noloco_node.node.node_context import NodeContext, NodeOptions
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.protocols import GOSSIP, gossip_schema, topic
from noloco_node.state_sync.starting_state import StartingState, StartingWeights
from noloco_node.storage.checkpoint import Checkpoint, Counters, EvaluatedCounters
from noloco_node.swarm.partners import Partners
from noloco_node.swarm.receipts import MOST_BROUGHT
from noloco_node.swarm.roster import PeerRecord, speed
from noloco_node.tasks import loop_s
from pipeline.activation_codec import ids_of
from pipeline.admission_window import MOST_IN_FLIGHT, AdmissionWindow, WindowOutcome
from pipeline.inner_step import OptimiserState, Progress, advance, begin, learning_rate
from pipeline.messages import ACTIVATION_CODECS
from pipeline.next_stage import NextStage, NextStageClient, Wanted
from pipeline.spot_checks import CheckSettings, SpotChecks
from pipeline.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

DRAIN_S = 30.0  # how long the blocking form of a round waits for what is in flight
HEARING_S = 30.0  # bounds a proposal and its answer in a meeting; the timeout of an answer adapts to earlier answers
IDLE_S = 5.0  # shorter waits are not reported
USUAL_OF = 16  # inner steps whose median duration is usual
LEFT_OUT = 8  # after so many inner steps in a row that change nothing the owner is told; one batch alone may be odd
LATE_STEPS = 5.0  # an inner step that takes so many times as long as usual is late: it has no speed any more
CAUSES = {Wanted.REPLICA: WaitCause.REPLICA, Wanted.ROOM: WaitCause.ROOM, Wanted.ANSWER: WaitCause.ANSWER}


def round_timeouts(run: RunConfig, options: NodeOptions, weight_bytes: int) -> RoundTimeouts:
    """Return how long rounds wait; the deadline of an exchange follows from its most bytes."""
    if not options.deadlines:
        return RoundTimeouts(answer_s=math.inf, exchange_s=math.inf)
    most_bytes = 2 * run.outer.weight_sets * weight_bytes
    return RoundTimeouts(answer_s=HEARING_S, exchange_s=60.0 + most_bytes / options.slowest_bytes_per_s)


class Replica:
    """The weights of one stage on this machine, and all that changes them.

    `stage`: its number. `shut_out`: shuts a peer out for so many seconds, at any stage.
    """

    def __init__(
        self,
        context: NodeContext,
        stage: int,
        model: StageModel,
        starting_state: StartingState,
        shut_out: Callable[[str, float], None],
    ) -> None:
        run, pipeline, device, origin = context.run, context.run.pipeline, context.host.device, starting_state.origin
        window, windows = pipeline.microbatches_per_step, pipeline.windows_in_flight
        # The last stage waits for no other: a second window would gain it nothing. It queues what it would have had in
        # flight.
        self.peer, self.stage, self.last = context.me, stage, pipeline.is_last(stage)
        self.admission = AdmissionWindow(
            window, (1 + windows) * min(window, MOST_IN_FLIGHT), 1 if self.last else windows
        )
        self.inner_steps = origin.inner_steps
        self.progress: Progress = begin(starting_state.progress, loop_s())
        self._model, self._device, self._context = model, device, context
        watched = WatchedDevice(device)
        self._run = watched.run
        self.training_failed = watched.failed  # set to the reason when the device or the program has failed for good
        turns = SendTurns(pipeline.replicas)
        client = self._client = MicrobatchClient(context, stage, turns)
        ways = NextStageClient(
            hops=client.hops, call=client.call, evaluators=client.evaluators, evaluate=client.evaluate
        )
        checks = CheckSettings(share=pipeline.check_share, stage=stage, stages=pipeline.stages)
        self._checks = SpotChecks(
            ways,
            ACTIVATION_CODECS[pipeline.codec],
            checks,
            device.beside,
            lambda verdict: context.reporter.record(events.SpotCheck(**verdict._asdict())),
            shut_out,
            Random(f"{run.seed}|checks|{context.me}"),
        )
        if checks.rate > 0.0:
            ways = replace(ways, hops=self._checks.hops, check=self._checks.check)
        self.next_stage = None if self.last else NextStage(ways, Random(f"{run.seed}|routing|{context.me}"))
        budget_s, quota = pipeline.budget_s, evaluation_quota(run)
        self.worker = Worker(model, self.admission, self._run, self.next_stage, budget_s, device.clock, quota)
        self.microbatches = MicrobatchServer(context, stage, self.worker, turns)
        self._gossip_schema = gossip_schema(run, model.shapes)
        self._partners = Partners(context.me, stage, lambda: context.membership.roster)
        weight_bytes = sum(tensor.nbytes for tensor in origin.state.slow)
        self.rounds = Rounds(context.me, run.outer, origin, self, self._round_context(weight_bytes))
        self.starting_weights = StartingWeights(starting_state, self.rounds, run.outer.staleness_at_most)
        self._line_s = context.host.line_s(stage)
        self._loss: float | None = None
        self._gap: float | None = None
        self._partner: str | None = None
        self._tokens_per_s = 0.0
        self.seconds_per_step = 1.0  # the time from one inner step to the next, of the last window; 1 before the first
        self._durations: deque[float] = deque(maxlen=USUAL_OF)
        self._stepped_at, self._busy_s, self._left_out = loop_s(), device.busy_s, 0
        self.awaits_text = False  # whether its source has asked for text that has not come

    def _round_context(self, weight_bytes: int) -> RoundContext:
        run, options = self._context.run, self._context.options
        return RoundContext(
            seed=run.seed,
            compute=self._device.beside,
            partners=self._partners,
            converse=self._converse,
            record=self._journal,
            fixed=self._model.fixed,
            from_zero=run.adapter.is_trained and run.adapter.freeze_a,
            timeouts=round_timeouts(run, options, weight_bytes),
            answers=AdaptiveTimeout(ANSWERS) if options.deadlines else None,
            saw=self._saw,
        )

    # The training itself.

    async def train(self, in_pause: Callable[[], Awaitable[None]]) -> None:
        """Fill windows and take inner steps until the admission window closes; call `in_pause` between two of them."""
        while (outcomes := await self.admission.full()) is not None:
            # A step that the optimiser has taken must be counted, and known to the rounds, even if we are cancelled.
            await to_the_end(self._step(outcomes, in_pause))

    async def _step(self, outcomes: tuple[WindowOutcome, ...], in_pause: Callable[[], Awaitable[None]]) -> None:
        async with self.rounds.weights.fast.moving():
            self.progress = advance(self.progress, [outcome.progress for outcome in outcomes], loop_s())
            rate = learning_rate(self.progress.value, self._context.run.inner)
            # Gradients are those of sums: a microbatch counts by its tokens that are learnt.
            learnt = max(1, sum(outcome.tokens for outcome in outcomes))
            report = await self._run(self._model.step, rate, learnt / self._context.run.pipeline.microbatch_tokens)
            self._note_step(outcomes, rate, report.applied)
        going = RoundProgress(self.progress.value, speed(self._microbatch_s))
        await self.rounds.between_steps(self.inner_steps, self.seconds_per_step, going)
        await in_pause()
        self.admission.next_window()

    def _tell_left_out(self, applied: bool) -> None:
        before, self._left_out = self._left_out, 0 if applied else self._left_out + 1
        if self._left_out == LEFT_OUT:
            why = "their gradients are NaN or infinite, or memory is short"
            self._context.reporter.notice("steps", f"the last {LEFT_OUT} inner steps were left out: {why}")
        elif applied and before >= LEFT_OUT:
            text = f"inner steps change the weights again; {before} were left out"
            self._context.reporter.notice("steps", text, over=True)

    def _note_step(self, outcomes: tuple[WindowOutcome, ...], rate: float, applied: bool) -> None:
        self.inner_steps += 1
        self._tell_left_out(applied)
        now_s, tokens = loop_s(), len(outcomes) * self._context.run.pipeline.microbatch_tokens
        # A loss over no token is none: a foreign module may not say its loss.
        known_losses = [(each.loss, each.tokens) for each in outcomes if each.loss is not None and each.tokens]
        losses = [loss for loss, _ in known_losses]
        self._loss = fmean(losses, [count for _, count in known_losses]) if losses else None
        others = (record for records in self._context.membership.roster.stages for record in records)
        # Generators: once the weights have been judged nobody reads them, and a roster may be long.
        known = (record.loss for record in others if record.peer != self.peer and record.loss is not None)
        rounds = (candidate.round for candidate in self._partners())
        if (failed := self.starting_weights.failed(losses, known, rounds)) is not None:
            ours, usual = failed
            disowned = events.Disowned(stage=self.stage, round=self.rounds.finished, loss=ours, usual=usual)
            self._context.reporter.record(disowned)
        self.seconds_per_step = max(1e-6, now_s - self._stepped_at)
        self._durations.append(self.seconds_per_step)
        device_s = self._device.busy_s - self._busy_s
        self._stepped_at, self._busy_s = now_s, self._device.busy_s
        newest = tokens / self.seconds_per_step
        self._tokens_per_s = 0.8 * self._tokens_per_s + 0.2 * newest if self._tokens_per_s else newest
        self._context.reporter.record(
            events.InnerStep(
                step=self.inner_steps,
                progress=self.progress.value,
                loss=self._loss,
                tokens=tokens,
                seconds=self.seconds_per_step,
                learning_rate=rate if applied else 0.0,
                device_s=device_s,
                stale=sum(outcome.stale for outcome in outcomes),
            )
        )

    @property
    def late_s(self) -> float:
        """For how many seconds an inner step may last and be no late one; infinite before the first."""
        return max(IDLE_S, LATE_STEPS * median_low(self._durations)) if self._durations else math.inf

    @property
    def stranded(self) -> bool:
        """Whether all our microbatches wait for a replica of the next stage, and none for one that is merely busy.

        Microbatches that have their gradient are left out: they wait for the others.
        """
        away = self.admission.in_flight - self.admission.turns.waiting
        return self.next_stage is not None and 0 < away <= self.next_stage.stranded

    async def losses(self, tokens: Tensor) -> Tensor:
        """Return the losses of marked `tokens` [b, s + 1]: of each but the first, or in a pipeline of each sequence."""
        if self.last:
            return await self._run(self._model.token_losses, ids_of(tokens[:, :-1]), tokens[:, 1:])
        return await routed_losses(
            self._context.run, lambda microbatch: self.worker.evaluate(microbatch, self.peer), tokens
        )

    async def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of each token [b, s, vocabulary], in a run of one stage."""
        return await self._run(self._model.infer, ids)

    async def discard(self) -> int:
        """Forget the partial window's gradients and all microbatches in flight; return how many the window held."""
        self.worker.abandon()
        await self._run(self._model.discard)
        return self.admission.succeeded

    async def aclose(self) -> None:
        """End the conversations kept for further microbatches; the admission window is closed for new ones."""
        self.microbatches.close()
        if self.next_stage is not None:
            await self.next_stage.aclose()
        await self._client.aclose()

    # What peers ask of us.

    async def state(self, parts: Parts) -> ReplicaState | HeldCopy:
        """Return a copy of our state for a newcomer, or of the slow weights for an export; an outline is no copy.

        Raises `OSError` if the disk refuses the copy.
        """
        if parts is Parts.OUTLINE:
            return self._state(OptimiserState(0, ()), whole=False)
        whole = parts is Parts.ALL
        async with self.rounds.weights.reading():
            optimiser = await self._run(self._model.optimiser_state) if whole else OptimiserState(0, ())
            return await self._context.host.hold(self._state(optimiser, whole=whole))

    def _state(self, optimiser: OptimiserState, *, whole: bool) -> ReplicaState:
        outer, age = self.rounds.state, self.rounds.slow_age
        return ReplicaState(
            slow=outer.slow,
            momentum=outer.momentum if whole else (),
            optimiser=optimiser.moments,
            round=age.round,
            inner_steps=self.inner_steps,
            progress=self.progress.value,
            optimiser_steps=optimiser.steps,
            gathered=outer.gathered if whole else (),
            meetings=outer.meetings if whole else 0,
            last_met=age.last_met,
        )

    # What the rounds ask of us (gossip.interface.GossipReplica).

    async def snapshot(self, slow: Tensors) -> Tensors:
        return await self._run(self._model.weights, slow)

    async def correct(self, correction: Tensors) -> None:
        await self._run(self._model.correct, correction)

    async def replace(self, weights: Tensors) -> None:
        await self._run(self._model.set_weights, weights)

    def alone(self, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Shut the admission window until nothing is in flight."""
        return self.admission.alone(retry_after_s, DRAIN_S if self._context.options.deadlines else math.inf)

    @asynccontextmanager
    async def _converse(self, peer: str) -> AsyncIterator[Conversation]:
        talk = self._context.network.talk(peer, topic(GOSSIP, self.stage), self._gossip_schema)
        try:
            async with talk as conversation:
                yield conversation
        except ConnectionRefusedError:
            self._partners.lose(peer)
            raise

    def _saw(self, partner: str, theirs: int, ours: int) -> None:
        """Give a partner a receipt for the inner steps that it claims, as far as they are likely."""
        run = self._context.run
        if run.pipeline.stages > 1:
            return  # the last stage sees the samples themselves
        likely = min(theirs, MOST_BROUGHT * max(ours, run.outer.inner_steps_per_round))
        self.microbatches.issued.add(partner, likely * run.samples_per_step, brought=ours * run.samples_per_step)

    # What we say of ourselves.

    def _journal(self, event: Event) -> None:
        match event:
            case MeetingLost(implausible=True):
                self._context.reporter.record(events.PeerViolation(peer=event.partner, topic=GOSSIP, why=event.why))
            case MeetingLost():
                self._context.reporter.record(events.Lost(peer=event.partner, what="exchange", why=event.why))
            case _:
                if isinstance(event, OuterStepTaken):
                    self._gap, self._partner = event.gap, event.partner
                self._context.reporter.record(event)

    @property
    def _microbatch_s(self) -> float:
        """Seconds a microbatch, of the device or of the line, whichever limits us; 0 until known."""
        if not self.worker.statistics()["succeeded"]:
            return 0.0  # the line alone would make newcomers believe in a replica that is faster than ours
        return max(self.worker.device_s, self._line_s)

    def describe(self, state: PeerState) -> PeerRecord:
        """Return our record for the roster."""
        waits, tokens_per_s, idle_s = None, self._tokens_per_s, loop_s() - self._stepped_at
        if state is not PeerState.FINISHED:
            waits = self.waits()
            if idle_s > self.late_s:  # what it was before says nothing of now
                tokens_per_s = min(tokens_per_s, self._context.run.tokens(self._context.run.samples_per_step) / idle_s)
        return PeerRecord(
            peer=self.peer,
            stage=self.stage,
            state=state,
            round=self.rounds.finished,
            inner_steps=self.inner_steps,
            progress=self.progress.value,
            device_s=self._microbatch_s,
            tokens_per_s=tokens_per_s,
            # Readers refuse a record with a number that is not finite.
            loss=_publishable(self._loss),
            gap=_publishable(self._gap),
            partner=self._partner,
            waiting=() if waits is None else (waits,),
            version=__version__,
        )

    def waits(self) -> Wait | None:
        """Return what the replica waits for; None while it works."""
        now_s, wait = loop_s(), self.next_stage.waiting if self.next_stage else None
        if wait is not None and now_s - wait.since_s > IDLE_S:
            return Wait(CAUSES[wait.wanted], round(now_s - wait.since_s, 1), wait.detail)
        idle_s, admission = now_s - self._stepped_at, self.admission
        if admission.in_flight == 0 and admission.succeeded < admission.window and idle_s > IDLE_S:
            if self.stage:
                return Wait(WaitCause.MICROBATCHES, round(idle_s, 1))
            model = self._context.run.model
            if self.awaits_text and (not model.is_foreign or model.is_in_stages):  # else the program computes meanwhile
                return Wait(WaitCause.OTHER, round(idle_s, 1), "text to train on")
        return None

    async def checkpoint(self, samples: int, data_position: dict[str, object] | None) -> Checkpoint:
        """Return all that this replica needs to go on later, in its own memory; the caller says when it has read it.

        If the training has failed, that is only what lies in main memory: the slow weights and their momentum.
        """
        failed = self.training_failed.done()
        # Fast weights without the correction of a step that the slow ones have would be neither before nor after it.
        read = await (self.rounds.weights.read() if failed else self.rounds.read_settled())
        fast: Tensors = ()
        optimiser = OptimiserState(0, ())
        try:
            if not failed:
                fast = await self._run(self._model.current_weights)
                optimiser = await self._run(self._model.optimiser_state)
        except BaseException:
            read()
            raise
        outer, age = self.rounds.state, self.rounds.slow_age
        return Checkpoint(
            Counters(
                **self._place(age.round),
                samples=samples,
                optimiser_steps=optimiser.steps,
                meetings=outer.meetings,
                last_met=age.last_met,
                slow_steps=self.rounds.slow_steps,
                data_position=data_position,
            ),
            {"slow": outer.slow}
            | ({"fast": fast, "optimiser": optimiser.moments} if fast else {})
            | ({"momentum": outer.momentum} if outer.momentum else {})
            | ({"gathered": outer.gathered} if outer.gathered else {}),
            read,
        )

    async def evaluated(self, loss: float) -> Checkpoint:
        """Return the fast weights with their loss on held-out text, in our own memory: they stay in this pause."""
        counters = EvaluatedCounters(
            **self._place(self.rounds.finished), samples=0, optimiser_steps=0, held_out_loss=loss
        )
        return Checkpoint(counters, {"fast": await self._run(self._model.current_weights)})

    def _place(self, round: int) -> dict[str, Any]:
        """Return the counters that say of whom weights are, and how far they have come."""
        return {
            "run_id": self._context.run_file.digest,
            "peer": self.peer,
            "stage": self.stage,
            "round": round,
            "inner_steps": self.inner_steps,
            "progress": self.progress.value,
        }

    def statistics(self) -> dict[str, int | float]:
        """Return the counters of the admission window, the worker and the rounds, each under its own prefix."""
        parts = {
            "gate": self.admission.statistics(),
            "worker": self.worker.statistics(),
            "downstream": self.next_stage.statistics() if self.next_stage else {},
            "rounds": self.rounds.statistics(),
            "stage": self._model.statistics(),
            "activations": self.microbatches.bound.statistics(),
            "gradients": self._client.bound.statistics(),
            "checks": self._checks.statistics(),
        }
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}


def _publishable(value: float | None) -> float | None:
    return value if value is not None and value >= 0.0 and is_usable(value) else None
