"""Evaluations while a run goes on: by one peer at a time, on held-out text, in a pause between two inner steps.

An evaluation is due each time a replica has finished `every_rounds` more rounds. Then each peer computes from its
roster which one evaluates: that whose hash of (run id, number of the evaluation, peer id) is the highest. Peers with
equal rosters choose the same one without a message; with different ones two evaluate for once, or none does.

The fast weights are evaluated, which lie on the device. Right after a round they are the slow weights and the few inner
steps since the snapshot; the slow weights themselves would take as much of the device's memory again. In a pause no
weights change, so that all sequences meet the same ones. The pause is about as long as an inner step, or shorter
(`noloco_node.data.held_out_text.EvaluationText`). The text is read in a thread, when this peer is chosen for the first
time; its evaluation follows in the first pause in which the text is there.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.data.held_out_text import HeldOutText, Loss, LossSums
from noloco_node.errors import UserError
from noloco_node.journal import events
from noloco_node.machine.interface import EvaluationHost, Reporter
from noloco_node.network.wire import is_usable
from noloco_node.run.peer_state import Evaluation, PeerState
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s

EVALUATION = "evaluation"
"""What is noticed where an evaluation comes to nothing."""


def chosen(run_id: str, number: int, peers: Iterable[str]) -> str | None:
    """Return the one of these peers that makes an evaluation; None of no peers."""

    def weight(peer: str) -> bytes:
        return hashlib.sha256(f"{run_id}|evaluation|{number}|{peer}".encode()).digest()

    return max(peers, key=weight, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorContext:
    """How an evaluator reaches its node. `sequences`: that fit a pass. `busy_s`: seconds that the device has worked.

    `token_losses`: computes the losses of marked tokens on the device. `is_ending`: whether the node has begun to
    leave its stage.
    """

    run_id: str
    me: str
    every_rounds: int
    sequences: int
    host: EvaluationHost
    roster: Callable[[], Roster]
    token_losses: Callable[[Tensor], Awaitable[Tensor]]
    busy_s: Callable[[], float]
    is_ending: Callable[[], bool]
    reporter: Reporter


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
        self._text: asyncio.Task[HeldOutText] | None = None

    async def in_pause(self, round: int, step: int, progress: float) -> None:
        """Evaluate in a pause between two inner steps, where that is due and ours to do."""
        self._look(round)
        if self._ours is None or (text := self._read()) is None:
            return
        number, self._ours = self._ours, None
        begun_s, busy_s = loop_s(), self._context.busy_s()
        try:
            loss = await self._loss(text)
        except MemoryError as error:
            self._tell(f"evaluation {number} is left out for want of memory: {error}")
            return
        if loss is None:
            return
        if not is_usable(loss.mean):
            self._tell(f"evaluation {number} found a loss that is not finite")
            return
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
        )
        self.newest = event.evaluation
        self._context.reporter.record(event)
        self._context.reporter.say(f"evaluation {number}: {self.newest}")

    async def aclose(self) -> None:
        """Wait for no text any more."""
        if self._text is not None:
            self._text.cancel()
            await asyncio.gather(self._text, return_exceptions=True)

    def _look(self, round: int) -> None:
        """Note which evaluation is due, and whether it is ours; a later one takes the place of one not made yet."""
        number, context = round // self._context.every_rounds, self._context
        if number <= self._seen:
            return
        self._seen = number
        training = [each.peer for each in context.roster().stage(0) if each.state is PeerState.TRAINING]
        self._ours = number if chosen(context.run_id, number, {*training, context.me}) == context.me else None

    def _read(self) -> HeldOutText | None:
        """Return the text once it is there; begin to read it if nobody has."""
        if self._text is None:
            self._text = asyncio.create_task(self._context.host.text(), name="held-out text")
        if not self._text.done():
            return None
        try:
            return self._text.result()
        except (UserError, OSError) as trouble:
            why = f"{trouble.what} {trouble.why}" if isinstance(trouble, UserError) else str(trouble)
            self._tell(f"evaluation {self._ours} is left out: {why}")
        self._ours = self._text = None  # it is read anew when we are chosen again
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

    def _tell(self, text: str) -> None:
        (self._context.reporter.warn or self._context.reporter.say)(text)
        self._context.reporter.record(events.Noticed(what=EVALUATION, text=text))
