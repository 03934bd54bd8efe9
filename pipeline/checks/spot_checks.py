"""Spot checks of the next stage: some microbatches go to a second replica as well, and what both return is compared.

A check is an ordinary microbatch. Its receiver cannot tell, so it trains on it, passes it on and signs for it like any
other: with a mark, a liar would answer the marked ones honestly, and so vouch for any other liar. Whose answer is
checked has given it before the second replica hears of the microbatch. The price is that one sample in so many counts
twice at the stages behind, as it does where a reply is lost.

The sender waits for the check: who turns out to be the odd one of three has done no harm, for the answer of the second
counts instead. A check that finds nobody in time is none.

`call` and `hops` stand between a sender and its `NextStageClient`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from pipeline.activations.formats import ActivationCodec
from pipeline.activations.influence import LEAST_VALUES
from pipeline.checks.verdicts import LEAST_REPLICAS, CheckBudget, CheckFinding, Verdict, Verdicts
from pipeline.messages import Gradient, Microbatch, Reply
from pipeline.next_stage import NextStageClient
from pipeline.routing import Hop
from pipeline.worker import Run

if TYPE_CHECKING:
    from torch import Tensor

MOST_ASKED = 4
"""Replicas that are asked for a check; some are busy."""
MOST_ANSWERED = 1024
TINY = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """`share`: of the whole pipeline's compute that checks may take. `stage`: the sender's, of so many `stages`."""

    share: float
    stage: int
    stages: int

    @property
    def rate(self) -> float:
        """Checks for each call: every stage that calls another spends alike, and a call costs the stages behind."""
        behind = self.stages - 1 - self.stage
        return self.share * self.stages / ((self.stages - 1) * behind) if behind > 0 else 0.0


class SpotChecks:
    """Checks what replicas of the next stage return. `record`: takes verdicts; `compute`: runs arithmetic."""

    def __init__(
        self,
        ways: NextStageClient,
        codec: ActivationCodec,
        settings: CheckSettings,
        compute: Run,
        record: Callable[[Verdict], None],
        rng: Random,
    ) -> None:
        self._ways, self._codec, self._compute, self._record, self._rng = ways, codec, compute, record, rng
        self._budget = CheckBudget(settings.rate)
        self._verdicts = Verdicts(deep=settings.stage + 2 < settings.stages)
        self._answered: dict[str, None] = {}
        """Who has returned a gradient to us: names alone are no majority."""
        self._counts: Counter[str] = Counter()

    def hops(self) -> Sequence[Hop]:
        """Return the replicas of the next stage that are not in quarantine."""
        hops = self._ways.hops()
        if not self._verdicts.quarantined:
            return hops
        for verdict in self._verdicts.paroled(_now_s()):
            self._note(verdict)
        return tuple([hop for hop in hops if hop.peer not in self._verdicts.quarantined])

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        """Call a replica, and now and then a second and a third with the same; raises what the first call does."""
        deadline_s = _now_s() + microbatch.budget_s
        reply = await self._ways.call(peer, microbatch)
        if not isinstance(reply, Gradient) or not _fits(reply, microbatch):
            return reply
        if self._codec.down.values(microbatch.hidden.shape) < LEAST_VALUES:
            return reply
        self._answered.pop(peer, None)
        self._answered[peer] = None
        if len(self._answered) > MOST_ANSWERED:
            del self._answered[next(iter(self._answered))]
        self._budget.earn()
        if not self._budget.allows(suspected=self._verdicts.suspects(peer), drawn=self._rng.random()):
            return reply
        others = [hop.peer for hop in self.hops() if hop.peer in self._answered and hop.peer != peer]
        if 1 + len(others) < LEAST_REPLICAS:
            return reply
        self._rng.shuffle(others)
        try:
            # Time is left for the way up, or a check would lose what it was to protect.
            async with asyncio.timeout_at((_now_s() + deadline_s) / 2):
                return await self._checked(peer, reply, microbatch, others)
        except TimeoutError:
            self._counts["too_late"] += 1
            return reply

    def statistics(self) -> dict[str, int | float]:
        """Return totals since the start: calls that were made for checks, pairs that agreed, and findings."""
        names = ("calls", "agreed", "too_late", *CheckFinding)
        return {str(name): self._counts[name] for name in names}

    async def _checked(self, peer: str, reply: Gradient, microbatch: Microbatch, others: Sequence[str]) -> Gradient:
        """Ask others what they make of a microbatch; return what is to be taken for its gradient."""
        answers, apart = {peer: reply}, dict[tuple[str, str], float]()
        for other in others[:MOST_ASKED]:
            answer = await self._ask(other, microbatch)
            if answer is None:
                continue
            for known, before in answers.items():
                apart[known, other] = await self._compute(partial(self._distance, before, answer, microbatch))
            answers[other] = answer
            if len(answers) == 2 and self._verdicts.agree(peer, other, apart[peer, other]):
                self._counts["agreed"] += 1
                break
            if len(answers) == LEAST_REPLICAS:
                return self._judged(peer, answers, apart)
        return reply

    def _judged(self, peer: str, answers: dict[str, Gradient], apart: dict[tuple[str, str], float]) -> Gradient:
        replicas = [hop.peer for hop in self._ways.hops() if hop.peer in self._answered]
        verdicts = self._verdicts.judge(apart, replicas, _now_s())
        for verdict in verdicts:
            self._note(verdict)
        reply = answers.pop(peer)
        if verdicts and verdicts[0].peer == peer:
            believed = next(iter(answers.values()))
            # Who computed the loss of the first has signed for it.
            reply = replace(reply, hidden=believed.hidden, loss=believed.loss)
        return reply

    async def _ask(self, peer: str, microbatch: Microbatch) -> Gradient | None:
        self._budget.spend()
        self._counts["calls"] += 1
        try:
            reply = await self._ways.call(peer, microbatch)
        except ConnectionError:
            return None  # the caller of a replica that it needs finds out more
        return reply if isinstance(reply, Gradient) and _fits(reply, microbatch) else None

    def _distance(self, one: Gradient, other: Gradient, microbatch: Microbatch) -> float:
        from pipeline.activations.codec import decode
        from pipeline.forward_pass import gradient_seed

        seed = gradient_seed(self._codec, microbatch.hidden)
        first, second = (
            decode(self._codec.back, hidden, seed) for hidden in (one.hidden, other.hidden) if hidden is not None
        )
        return max(distance(first, second), ((one.loss - other.loss) / (abs(one.loss) + abs(other.loss) + TINY)) ** 2)

    def _note(self, verdict: Verdict) -> None:
        self._counts[verdict.finding] += 1
        self._record(verdict)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the square of the difference of two gradients over the sum of their squares.

    0: the same; 1: nothing in common; 2: opposite.
    """
    both = float(one.square().sum() + other.square().sum())
    return float((one - other).square().sum()) / both if both > 0.0 else 0.0


def _fits(reply: Gradient, microbatch: Microbatch) -> bool:
    return reply.hidden is not None and reply.hidden.shape[:-1] == microbatch.hidden.shape[:-1]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
