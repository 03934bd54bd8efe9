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
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from noloco_node.data.held_out_text import HeldOutText, Loss, LossSums
from noloco_node.data.token_text import Prompts, Sampling, draw
from noloco_node.errors import UserError, reason_of
from noloco_node.journal import events
from noloco_node.machine.interface import EvaluationHost, Reporter
from noloco_node.network.wire import is_usable
from noloco_node.run.peer_state import Evaluation, PeerState
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s

EVALUATION = "evaluation"
"""The name under which the journal has an evaluation that is left out (`events.Noticed`)."""
SAMPLING = Sampling(tokens=64)


def chosen(run_id: str, number: int, peers: Iterable[str]) -> str | None:
    """Return the one of these peers that makes an evaluation; None of no peers."""

    def weight(peer: str) -> bytes:
        return hashlib.sha256(f"{run_id}|evaluation|{number}|{peer}".encode()).digest()

    return max(peers, key=weight, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorContext:
    """How an evaluator reaches its node. `sequences`: that fit a pass. `length`: of a sequence, in tokens.

    `token_losses`: computes the losses of marked tokens on the device, `logits` those of ids. `evaluated`: returns the
    weights with their loss. `busy_s`: seconds for which the device has worked. `is_ending`: whether the node has begun
    to leave its stage.
    """

    run_id: str
    me: str
    every_rounds: int
    sequences: int
    length: int
    host: EvaluationHost
    roster: Callable[[], Roster]
    token_losses: Callable[[Tensor], Awaitable[Tensor]]
    logits: Callable[[Tensor], Awaitable[Tensor]]
    evaluated: Callable[[float], Awaitable[Checkpoint]]
    busy_s: Callable[[], float]
    is_ending: Callable[[], bool]
    reporter: Reporter


class _Material(NamedTuple):
    """What an evaluation reads."""

    text: HeldOutText
    prompts: Prompts


async def _read(host: EvaluationHost) -> _Material:
    return _Material(await host.text(), await host.prompts())


class Evaluator:
    """Evaluates one replica whenever its peer is chosen. `round`: that it has finished when it begins."""

    def __init__(self, context: EvaluatorContext, round: int) -> None:
        self.newest: Evaluation | None = None
        """Our last evaluation, for our record."""
        self._context = context
        self._seen = round // context.every_rounds
        """The last evaluation that was due."""
        self._ours: int | None = None
        """The evaluation that we have to make."""
        self._opening: asyncio.Task[_Material] | None = None

    async def in_pause(self, round: int, step: int, progress: float) -> None:
        """Evaluate in a pause between two inner steps, where that is due and ours to do."""
        self._look(round)
        if self._ours is None or (material := self._opened()) is None:
            return
        number, self._ours = self._ours, None
        begun_s, busy_s = loop_s(), self._context.busy_s()
        try:
            loss = await self._loss(material.text)
            if loss is None:
                return
            if not is_usable(loss.mean):
                self._tell(f"evaluation {number} found a loss that is not finite")
                return
            samples = await self._samples(material.prompts)
        except (MemoryError, ValueError) as error:  # also of a sample without a token that is learnt
            self._tell(f"evaluation {number} is left out: {error or 'no memory is left'}")
            return
        is_best = await self._keep_best(loss.mean)
        event = events.Evaluated(
            number=number,
            round=round,
            step=step,
            progress=progress,
            loss=loss.mean,
            margin=loss.margin if loss.margin is not None and is_usable(loss.margin) else None,
            tokens=loss.tokens,
            documents=loss.documents,
            seconds=loop_s() - begun_s,
            device_s=self._context.busy_s() - busy_s,
            best=is_best,
            samples=samples,
        )
        self.newest = event.evaluation
        self._context.reporter.record(event)
        self._context.reporter.say(f"evaluation {number}: {self.newest}" + ", the least so far" * is_best)
        for sample in samples:
            self._context.reporter.say(f"  {sample.prompt!r} goes on {sample.text!r}")

    async def aclose(self) -> None:
        """Wait for no text any more."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    def _look(self, round: int) -> None:
        """Note which evaluation is due, and whether it is ours; a later one takes the place of one not made yet."""
        number, context = round // self._context.every_rounds, self._context
        if number <= self._seen:
            return
        self._seen = number
        training = [each.peer for each in context.roster().stage(0) if each.state is PeerState.TRAINING]
        self._ours = number if chosen(context.run_id, number, {*training, context.me}) == context.me else None

    def _opened(self) -> _Material | None:
        """Return what is evaluated on once it is there; begin to read it if nobody has."""
        if self._opening is None:
            self._opening = asyncio.create_task(_read(self._context.host), name="held-out text")
        if not self._opening.done():
            return None
        try:
            return self._opening.result()
        except Exception as trouble:  # also of what parses the text: no evaluation ends the training
            why = f"{trouble.what} {trouble.why}" if isinstance(trouble, UserError) else _said(trouble)
            self._tell(f"evaluation {self._ours} is left out: {why}")
        self._ours = self._opening = None  # it is read anew when we are chosen again
        return None

    async def _loss(self, text: HeldOutText) -> Loss | None:
        """Return the loss on the sample; None if the node leaves meanwhile."""
        sums, context = LossSums(text.documents), self._context
        for batch in text.batches:
            for sequences in torch.split(batch, context.sequences):
                if context.is_ending():
                    return None
                sums.add(sequences, await context.token_losses(sequences))
        return sums.loss()

    async def _samples(self, prompts: Prompts) -> tuple[events.TextSample, ...]:
        """Let the model go on from each prompt; what is there so far if the node leaves meanwhile."""
        return tuple(
            [
                events.TextSample(
                    prompt=text, text="".join(prompts.spelled(await self._continuation(tokens, prompts.ends)))
                )
                for text, tokens in prompts.tokens.items()
            ]
        )

    async def _continuation(self, prompt: Sequence[int], ends: Collection[int]) -> list[int]:
        # Equal draws in each evaluation: what differs between two samples is the model.
        generator, context = torch.Generator().manual_seed(SAMPLING.seed), self._context
        drawn: list[int] = []
        while prompt and len(drawn) < SAMPLING.tokens and not context.is_ending():
            logits = await context.logits(torch.tensor([[*prompt, *drawn][-context.length :]]))
            last = logits[0, -1]
            if not last.max().isfinite() or (token := draw(last, SAMPLING, generator)) in ends:
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
        except (OSError, MemoryError) as error:
            self._tell(f"the weights of the best evaluation are not kept: {_said(error)}")
        return is_best

    def _tell(self, text: str) -> None:
        (self._context.reporter.warn or self._context.reporter.say)(text)
        self._context.reporter.record(events.Noticed(what=EVALUATION, text=text))


def _said(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
