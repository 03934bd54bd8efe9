"""Evaluations while a run goes on: by one peer at a time, on held-out text, in a pause between two inner steps.

An evaluation is due each time a replica has finished `every_rounds` more rounds. Then each peer computes from its
roster which one evaluates: that whose hash of (run id, number of the evaluation, peer id) is the highest. Peers with
equal rosters choose the same one without a message; with different ones two evaluate for once, or none does.

The fast weights are evaluated, which lie on the device. Right after a round they are the slow weights and the few inner
steps since the snapshot; the slow weights themselves would take as much of the device's memory again. In a pause no
weights change, so that all sequences meet the same ones. The pause is about as long as an inner step, or shorter
(`noloco_node.data.held_out_text.EvaluationText`). The text is read in a thread, when this peer is chosen for the first
time; its evaluation follows in the first pause in which the text is there.

In the same pause the model goes on from its owner's prompts, and its weights are written to the disk if no evaluation
of this peer had less loss: a pause needs no copy of them in memory.

In a pipeline the peers of stage 0 evaluate, by forward passes alone along the routes of training (`routed_losses`).
Senders draw the replicas that each microbatch goes through, so the loss is a mean over chains of replicas, and not that
of one model. Training does not pause for it, weights change meanwhile, and neither weights nor text are kept of it: no
peer has the weights of a whole chain.

At the end of a run one more peer evaluates the final weights (`at_the_end`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noloco_node.data.held_out_text import HeldOutText, Loss, LossSums, evaluated_sequences
from noloco_node.data.token_text import Prompts, Sampling, draw
from noloco_node.errors import UserError, reason_of
from noloco_node.journal import events
from noloco_node.machine.interface import EvaluationHost, Reporter
from noloco_node.network.wire import is_usable
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import Evaluation, PeerState
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.tasks import loop_s
from pipeline.activation_codec import as_microbatch, learnt
from pipeline.admission_window import EvaluationQuota
from pipeline.messages import EvaluationReply, Microbatch, Reason, SequenceLosses

EVALUATION = "evaluation"  # the name under which the journal has an evaluation that is left out (`events.Noticed`)
SAMPLING = Sampling(tokens=64)
AT_THE_END = -1  # stands for the number of the last evaluation where its peer is chosen: peers end in different rounds
EVALUATORS = 4
"""Peers that make an evaluation, on average, where no peer knows all sources; with none of them it is left out."""
LONGEST_END_S = 300.0
"""The peer that evaluates at the end waits and computes for so long at most. In a pipeline later stages wait for it."""
LOOK_S = 1.0
TRIES = 3  # of a microbatch, each by another route as far as there is one
MOST_LOSS = 1000.0
"""Nats a token that a replica may claim: a model that knows nothing has 12 with the largest vocabularies."""


def chosen(run_id: str, number: int, peers: Iterable[str], known: float = 1.0) -> str | None:
    """Return the one of these peers that makes an evaluation; None of no peers.

    `known`: the share of all peers that these are. Where it is less than all, no peer knows the
    first of all: each peer that may be among the first `EVALUATORS` makes the evaluation.
    """

    def weight(peer: str) -> bytes:
        return hashlib.sha256(f"{run_id}|evaluation|{number}|{peer}".encode()).digest()

    peers = list(peers)
    first = max(peers, key=weight, default=None)
    if first is None or known >= 1.0:
        return first
    rank = 1.0 - int.from_bytes(weight(first)[:8]) / 2**64
    return first if rank * len(peers) <= EVALUATORS * known else None


async def last_evaluation(roster: Callable[[], Roster], every_rounds: int) -> None:
    """Wait until no peer of stage 0 still evaluates the final weights through later stages; `LONGEST_END_S` at most."""

    def is_made(record: PeerRecord) -> bool:
        made = record.evaluation
        return made is not None and made.number > made.round // every_rounds

    def is_awaited() -> bool:
        sources = [each for each in roster().stage(0) if each.state in (PeerState.TRAINING, PeerState.FINISHED)]
        return bool(sources) and not any(map(is_made, sources))

    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_END_S):
            while is_awaited():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorContext:
    """How an evaluator reaches its node.

    `losses`: computes the losses of marked tokens, of each or of each sequence. `logits`: those of ids. `evaluated`:
    returns the weights with their loss. `busy_s`: seconds for which the device has worked. `is_ending`: whether the
    node has begun to leave its stage.
    """

    run_id: str
    run: RunConfig
    me: str
    host: EvaluationHost
    roster: Callable[[], Roster]
    losses: Callable[[Tensor], Awaitable[Tensor]]
    logits: Callable[[Tensor], Awaitable[Tensor]]
    evaluated: Callable[[float], Awaitable[Checkpoint]]
    busy_s: Callable[[], float]
    is_ending: Callable[[], bool]
    reporter: Reporter


class _Material(NamedTuple):
    """What an evaluation reads; no prompts for a pipeline, or where the model cannot be asked with them."""

    text: HeldOutText
    prompts: Prompts | None


class _Place(NamedTuple):
    """How far the replica is that is evaluated."""

    round: int
    step: int
    progress: float


class Evaluator:
    """Evaluates one replica whenever its peer is chosen. `round`: that it has finished when it begins."""

    def __init__(self, context: EvaluatorContext, round: int) -> None:
        self.newest: Evaluation | None = None  # our last evaluation, for our record
        self._context = context
        self._every_rounds = context.run.data.evaluate_every_rounds
        self._is_routed = context.run.pipeline.stages > 1  # whether losses come through other stages
        self._seen = round // self._every_rounds  # the last evaluation that was due
        self._ours: int | None = None  # the evaluation that we have to make
        self._opening: asyncio.Task[_Material] | None = None
        self._under_way: asyncio.Task[None] | None = None  # our last evaluation beside the training
        self._trouble = ""  # why the last evaluation was left out, if it was
        self._ended = False  # whether the training is over, so that an evaluation is not left for its end

    async def in_pause(self, round: int, step: int, progress: float) -> None:
        """Evaluate in a pause between two inner steps, in a pipeline beside the training, where that is ours to do."""
        self._look(round)
        busy = self._under_way is not None and not self._under_way.done()
        if self._ours is None or busy or (material := self._opened()) is None:
            return
        number, self._ours = self._ours, None
        evaluation = self._evaluate(number, material, _Place(round, step, progress))
        if self._is_routed:
            self._under_way = asyncio.create_task(self._guarded(number, evaluation), name="evaluation")
        else:
            await evaluation

    async def at_the_end(self, round: int, step: int, progress: float) -> None:
        """Evaluate the final weights if our peer is to do so, in `LONGEST_END_S` at most."""
        context = self._context
        await _end(self._under_way)
        if chosen(context.run_id, AT_THE_END, self._sources(PeerState.TRAINING, PeerState.FINISHED)) != context.me:
            return
        number, self._ended = round // self._every_rounds + 1, True
        await self._guarded(number, self._last(number, _Place(round, step, progress)))

    async def _last(self, number: int, place: _Place) -> None:
        try:
            async with asyncio.timeout(LONGEST_END_S):
                # In a pipeline the weights of the next stage shall be final too.
                while any(each.state is PeerState.TRAINING for each in self._next_stage()):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                await self._evaluate(number, await self._begin_to_read(), place)
        except TimeoutError:
            raise TimeoutError(f"it took longer than {LONGEST_END_S:.0f} s") from None

    def _next_stage(self) -> Sequence[PeerRecord]:
        return self._context.roster().stage(1) if self._is_routed else ()

    async def _guarded(self, number: int, evaluation: Coroutine[Any, Any, None]) -> None:
        """Make an evaluation that nobody waits for: whatever it raises is told."""
        try:
            await evaluation
        except Exception as trouble:
            self._leave_out(number, _said(trouble))

    async def _evaluate(self, number: int, material: _Material, place: _Place) -> None:
        context, begun_s, busy_s = self._context, loop_s(), self._context.busy_s()
        try:
            loss = await self._loss(material.text)
            if loss is None:
                return
            if not is_usable(loss.mean):
                self._context.reporter.notice(EVALUATION, f"evaluation {number} found a loss that is not finite")
                return
            samples = () if material.prompts is None else await self._samples(material.prompts)
        except (MemoryError, ValueError, ConnectionError) as error:  # also of a sample without a token that is learnt
            self._leave_out(number, str(error) or "no memory is left")
            return
        is_best = not self._is_routed and await self._keep_best(loss.mean)
        event = events.Evaluated(
            number=number,
            **place._asdict(),
            loss=loss.mean,
            margin=loss.margin if loss.margin is not None and is_usable(loss.margin) else None,
            tokens=loss.tokens,
            documents=loss.documents,
            seconds=loop_s() - begun_s,
            device_s=context.busy_s() - busy_s,
            best=is_best,
            samples=samples,
        )
        self.newest, self._trouble = event.evaluation, ""
        context.reporter.record(event)
        of = (", of the final weights" * self._ended) + (", a mean over chains of replicas" * self._is_routed)
        context.reporter.say(f"evaluation {number}{of}: {self.newest}" + ", the least so far" * is_best)
        for sample in samples:
            context.reporter.say(f"  {sample.prompt!r} goes on {sample.text!r}")

    async def aclose(self) -> None:
        """Wait for no text any more, and end what is under way."""
        await _end(self._opening)
        await _end(self._under_way)

    def _look(self, round: int) -> None:
        """Note which evaluation is due, and whether it is ours; a later one takes the place of one not made yet."""
        number, context = round // self._every_rounds, self._context
        if number <= self._seen:
            return
        self._seen = number
        sources, known = self._sources(PeerState.TRAINING), 1.0 / max(1.0, context.roster().scale(0))
        self._ours = number if chosen(context.run_id, number, sources, known) == context.me else None

    def _sources(self, *states: PeerState) -> set[str]:
        """Return the peers that may evaluate, we among them."""
        context = self._context
        return {context.me, *(each.peer for each in context.roster().stage(0) if each.state in states)}

    async def _read(self) -> _Material:
        host = self._context.host
        text, prompts = await host.text(), None
        try:
            prompts = None if self._is_routed else await host.prompts()
        except UserError as unfit:
            self._context.reporter.notice(EVALUATION, f"samples are left out: {unfit.what} {unfit.why}")
        return _Material(text, prompts)

    def _begin_to_read(self) -> asyncio.Task[_Material]:
        if self._opening is None:
            self._opening = asyncio.create_task(self._read(), name="held-out text")
        return self._opening

    def _opened(self) -> _Material | None:
        """Return what is evaluated on once it is there; begin to read it if nobody has."""
        opening = self._begin_to_read()
        if not opening.done():
            return None
        try:
            return opening.result()
        except Exception as trouble:  # also of what parses the text: no evaluation ends the training
            self._leave_out(self._ours, _said(trouble))
        self._ours = self._opening = None  # it is read anew when we are chosen again
        return None

    def _leave_out(self, number: int | None, why: str) -> None:
        if why != self._trouble:  # a text that is too short stays too short
            self._context.reporter.notice(EVALUATION, f"evaluation {number} is left out: {why}")
        self._trouble = why

    async def _loss(self, text: HeldOutText) -> Loss | None:
        """Return the loss on the sample; None if the node leaves meanwhile."""
        sums, context = LossSums(text.documents), self._context
        # Microbatches of a pipeline are filled up: only the last one shall have to be.
        batches = [torch.cat(text.batches)] if self._is_routed and text.batches else text.batches
        for batch in batches:
            for sequences in torch.split(batch, context.run.pipeline.microbatch_size):
                if self._is_left():
                    return None
                sums.add(sequences, await context.losses(sequences))
        return sums.loss()

    def _is_left(self) -> bool:
        """Say whether an evaluation beside the training is given up, since the node leaves its stage."""
        return self._context.is_ending() and not self._ended

    async def _samples(self, prompts: Prompts) -> tuple[events.TextSample, ...]:
        """Let the model go on from each prompt; what is there so far if the node leaves meanwhile."""
        samples = []
        for prompt, tokens in prompts.tokens.items():
            drawn = await self._continuation(tokens, prompts)
            samples.append(events.TextSample(prompt=prompt, text="".join(prompts.spelled(prompt, drawn))))
        return tuple(samples)

    async def _continuation(self, prompt: Sequence[int], prompts: Prompts) -> list[int]:
        # Equal draws in each evaluation: what differs between two samples is the model.
        generator, context = torch.Generator().manual_seed(SAMPLING.seed), self._context
        drawn: list[int] = []
        while prompt and len(drawn) < SAMPLING.tokens and not prompts.is_over(drawn) and not self._is_left():
            logits = await context.logits(torch.tensor([[*prompt, *drawn][-context.run.pipeline.sequence_length :]]))
            last = logits[0, -1]
            if not last.max().isfinite() or (token := draw(last, SAMPLING, generator)) in prompts.ends:
                break
            drawn.append(token)
        return drawn

    async def _keep_best(self, loss: float) -> bool:
        """Keep the weights if no evaluation of this peer had less loss; say whether none had."""
        context, is_best = self._context, False
        try:
            best = await context.host.best_loss()
            is_best = best is None or loss < best
            if is_best:
                await context.host.keep(await context.evaluated(loss))
        except (OSError, MemoryError, RuntimeError) as error:  # weights come from the device, which may be lost by now
            self._context.reporter.notice(
                EVALUATION, f"the weights of the best evaluation are not kept: {_said(error)}"
            )
        return is_best


async def _end(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _said(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"{error.what} {error.why}"
    kind = type(error).__name__
    return reason_of(error) if isinstance(error, OSError) else f"{kind}: {error}" if str(error) else kind


def evaluation_quota(run: RunConfig) -> EvaluationQuota:
    """Return what senders may ask of a stage, by the evaluations that the run file plans."""
    pipeline, outer, every = run.pipeline, run.outer, run.data.evaluate_every_rounds
    if not every:
        return EvaluationQuota()
    passes = -(-evaluated_sequences(run) // pipeline.microbatch_size)
    steps = min(outer.inner_steps_per_round, outer.late_inner_steps_per_round or outer.inner_steps_per_round)
    return EvaluationQuota(passes, every * steps * pipeline.microbatches_per_step)


async def routed_losses(
    run: RunConfig, evaluate: Callable[[Microbatch], Awaitable[EvaluationReply]], tokens: Tensor
) -> Tensor:
    """Return the sum of the losses of each sequence of marked tokens [b, s + 1], b no more than a microbatch has.

    Raises ConnectionError if no route leads to the last stage, and ValueError for losses that no model has.
    """
    pipeline, count = run.pipeline, len(tokens)
    if not learnt(tokens[:, 1:]):
        return torch.zeros(count)  # which no stage takes
    # A microbatch has one size: the last sequence fills it up.
    whole = torch.cat([tokens, tokens[-1:].expand(pipeline.microbatch_size - count, -1)])
    asked = as_microbatch(whole, told=pipeline.subspace is not None, progress=0.0, budget_s=pipeline.budget_s)
    reason = Reason.NO_ROUTE
    for _ in range(TRIES):
        reply = await evaluate(replace(asked, forward_only=True))
        if isinstance(reply, SequenceLosses):
            sums = reply.sums[:count]
            if not bool(((sums >= 0.0) & (sums <= MOST_LOSS * pipeline.sequence_length)).all()):
                raise ValueError(f"a replica claims a loss of {sums.max():.4g} nats in a sequence")
            return sums
        if (reason := reply.reason) in (Reason.QUOTA, Reason.NOT_FINITE):
            break
    raise ConnectionRefusedError(f"the stages behind refused it: {reason}")
