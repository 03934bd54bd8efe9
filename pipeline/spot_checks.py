"""Spot checks of the next stage: a second replica gets some microbatches too, and the two replies are compared.

A check is an ordinary microbatch: a replica cannot answer checks honestly and other microbatches not. The second
replica is asked after the first has answered. The sender waits for the check, so an odd reply does no harm: another
replaces it. The replies of a replica are checked until one has agreed. docs/design/trust.md has the reasons.

The usual distance between honest replies is learnt from pairs that agree. Where two are farther apart than TIMES of the
median, a third replica is asked. If one reply is so far from both others, while these agree, more replicas are asked:
two that collude are not to outvote an honest one. A replica is struck if three others agree, and it is far from them:

    score       a strike adds its distance (2: the opposite of the others, 1: noise or nothing); a passed check
                takes a part of it away
    suspected   while a replica has a score, each of its microbatches is checked, as far as the budget allows
    quarantine  follows when the score is at its limit and most other replicas have accused it; each lasts longer
    parole      after a quarantine one strike is enough for the next

Where stages lie behind the next, an honest replica passes on what a liar there returned, so limits are higher. A sender
that finds half of the stage guilty is probably at fault itself: it frees all of them and judges no replica for a while.

A replica that adds the same vector to every gradient is near in each token. So the distance of a check is also that of
the means over tokens, and a sender takes the mean over some tokens of every gradient that it gets. The mean of a
replica's differences from the others is short if they point here and there, as those of honest replicas do, and a
constant one adds up. A replica goes into quarantine if this mean is long, is most of what its differences are, and
stands apart from the means of most other replicas.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import combinations
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeline.activation_codec import LEAST_VALUES, count_of, decode, gradient_seed
from pipeline.messages import ActivationCodec, Gradient, Microbatch
from pipeline.next_stage import NextStageClient, check_gradient, now_s
from pipeline.routing import Hop
from pipeline.worker import Run

if TYPE_CHECKING:
    from torch import Tensor


TIMES = 6.0
"""Of the usual distance, which is a square: two and a half times the usual difference."""
WRONG = 0.9
"""A distance from three that are alike that is wrong whatever is usual: two that have nothing in common are at 1."""
LEAST_KNOWN, MOST_KNOWN, MOST_COMPARED = 3, 32, 16
"""Distances known before any replica is judged; those remembered of a replica, and of how many replicas."""
LEAST_REPLICAS = 3
MOST_ACCUSERS = 8
MOST_PEERS = 256
LIMIT, PASSED = 3.5, 1 / 4
"""The score of a quarantine, and what a check that was passed takes away, where the next stage is the last."""
DEEP_LIMIT, DEEP_PASSED = 16.0, 2.0
"""The same where stages lie behind it."""
PAROLE = 0.5
"""Score that is missing to the limit after a quarantine."""
QUARANTINES_S = (600.0, 3600.0, 6 * 3600.0)
DOUBT_S = 600.0
FIRST_CHECKS = 36.0
"""Calls that a sender may spend on checks before it knows any replica; it is also the most that it saves."""
RESERVE = 12.0
"""Of these, calls for suspects alone: three checks, as many as shut out a replica that begins to lie late."""
FOR_DRAWS = 6.0
"""Of the rest, calls that are earned for draws alone, at most."""
FULL_CHECK = 4
"""Replicas that are asked for a check at most; some are busy. So many calls are set aside while it lasts."""
DRAWN = 1 / 4
"""The chance of a microbatch to be checked while the budget allows it."""

SAMPLED_TOKENS = 128
"""Tokens of a gradient whose mean is taken: the work does not grow with the microbatch."""
LEAST_GRADIENTS, MOST_GRADIENTS = 4, 16
"""Gradients of a replica before its offset is judged, and those that it is the mean of at most, as of the others. Older
ones count for less, so that the fifth is the first that is judged."""
LEAST_OFFSET = 0.5
"""The square of an offset, as a share of a gradient's, times the gradients: after sixteen 0.18 of a typical value."""
CONSTANT_SHARE = 0.6
"""The least share of the squares of differences that is their mean's, for it to count as constant."""


class CheckFinding(StrEnum):
    """A finding of the checks about a replica."""

    STRUCK = "struck"
    QUARANTINED = "quarantined"
    PAROLED = "paroled"
    DOUBTED = "doubted"
    """Ourselves: half of the stage was found guilty."""


class Verdict(NamedTuple):
    """A finding. `distance`: of its answer from the others'. `usual`: between replicas; 0 where it is
    not known. `for_s`: how long it holds.
    """

    peer: str
    finding: CheckFinding
    distance: float = 0.0
    usual: float = 0.0
    for_s: float = 0.0


class CheckBudget:
    """How many calls go into checks: `rate` of those that are made, and FIRST_CHECKS at the beginning.

    Half of the rate, up to FOR_DRAWS, is for draws alone. Otherwise one replica whose answers never agree would take
    all checks, and nobody would find the replicas that begin to lie late.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left = FIRST_CHECKS if rate > 0.0 else 0.0
        self._for_draws = 0.0
        """What only draws may spend of it."""

    def earn(self) -> None:
        """Count a call that was no check."""
        self._left = min(max(FIRST_CHECKS, self._left), self._left + self._rate)
        self._for_draws = min(FOR_DRAWS, self._for_draws + self._rate / 2.0)

    @contextmanager
    def check(self, *, is_draw: bool) -> Iterator[list[str]]:
        """Set the calls of a check aside, lest others at the same time spend them; yield a list for those it makes."""
        calls: list[str] = []
        for_draws = min(FULL_CHECK, self._for_draws) if is_draw else 0.0
        self._left -= FULL_CHECK
        self._for_draws -= for_draws
        try:
            yield calls
        finally:
            self._left += FULL_CHECK - len(calls)
            self._for_draws += max(0.0, for_draws - len(calls))

    def allows(self, *, suspected: bool, is_new: bool, drawn: float) -> bool:
        """Say whether a microbatch is to be checked. `is_new`: its replica has not agreed; `drawn`: from 0 to 1."""
        left = self._left - RESERVE * (not suspected)
        if suspected or is_new:
            return left - self._for_draws >= FULL_CHECK
        return drawn < DRAWN and max(left, self._for_draws) >= FULL_CHECK


class _Record(NamedTuple):
    """Of one replica. `accusers`: the last ones, each once. `until_s`: the end of its quarantine; 0: it is in none."""

    score: float = 0.0
    accusers: tuple[str, ...] = ()
    quarantines: int = 0
    until_s: float = 0.0


class _Offset(NamedTuple):
    """Of one replica: the mean of its differences from the others and of their squares, over so many gradients."""

    mean: Tensor
    square: float = 0.0
    gradients: float = 0.0


class Offsets:
    """By how much the gradients of each replica differ from those of the others on average."""

    def __init__(self) -> None:
        self._offsets: dict[str, _Offset] = {}
        self._last: deque[tuple[str, Tensor]] = deque(maxlen=MOST_GRADIENTS)
        """The last gradients of any replica: they change for all while a model learns."""

    def note(self, peer: str, gradient: Tensor, others: Collection[str]) -> tuple[float, list[str]] | None:
        """Note the mean of a gradient; return the square of a constant offset, and the replicas that are without it.

        `others`: those that it is compared with. None if the offset is not constant, or if half of the others have it.
        """
        last = [(other, each) for other, each in self._last if other in others]
        self._last.append((peer, gradient))
        if 1 + len({other for other, _ in last}) < LEAST_REPLICAS:
            return None
        difference = gradient - torch.stack([each for _, each in last]).mean(0)
        mean, square, gradients = self._offsets.pop(peer, _Offset(torch.zeros_like(gradient)))
        gradients = 1.0 + (1.0 - 1.0 / MOST_GRADIENTS) * gradients
        mean = mean + (difference - mean) / gradients
        square += (float(difference.dot(difference)) - square) / gradients
        self._offsets[peer] = _Offset(mean, square, gradients)
        if len(self._offsets) > MOST_PEERS:
            del self._offsets[next(iter(self._offsets))]
        length = float(mean.dot(mean))
        if gradients < LEAST_GRADIENTS or length < max(LEAST_OFFSET / gradients, CONSTANT_SHARE * square):
            return None
        known = {other: self._offsets[other] for other in others if other in self._offsets}
        without = [
            other
            for other, each in known.items()
            if each.gradients >= LEAST_GRADIENTS and float(each.mean.dot(mean)) < length / 4.0
        ]
        return (length, without) if 2 * len(without) > len(others) else None

    def forget(self, peer: str) -> None:
        """Forget a replica."""
        self._offsets.pop(peer, None)


class Majority(NamedTuple):
    """The answers to one microbatch that are `alike`: within `near`. `odd`: how far answers are that are not."""

    alike: tuple[str, ...]
    near: float
    odd: dict[str, float]

    @classmethod
    def of(cls, apart: Mapping[tuple[str, str], float]) -> Majority:
        """Find it by the distances of all pairs of three or more answers: two of three, three of more."""
        answers = tuple(dict.fromkeys(peer for pair in apart for peer in pair))

        def widest(group: tuple[str, ...]) -> float:
            return max(each for pair, each in apart.items() if set(pair) <= set(group))

        def nearest(peer: str) -> float:
            return min(each for pair, each in apart.items() if peer in pair and set(pair) & set(alike))

        alike = min(combinations(answers, min(LEAST_REPLICAS, len(answers) - 1)), key=widest)
        near = widest(alike)
        far = {peer: nearest(peer) for peer in answers if peer not in alike}
        return cls(alike, near, {peer: each for peer, each in far.items() if each > TIMES * near})


class Verdicts:
    """One sender's judgement on the replicas of its next stage. `deep`: further stages lie behind that one."""

    def __init__(self, *, deep: bool) -> None:
        self._limit, self._passed = (DEEP_LIMIT, DEEP_PASSED) if deep else (LIMIT, PASSED)
        self._distances: dict[str, deque[float]] = {}
        self._known = 0
        self._records: dict[str, _Record] = {}
        self._offsets = Offsets()
        self._doubts_until_s = -math.inf
        self.quarantined: frozenset[str] = frozenset()

    @property
    def usual(self) -> float:
        """Return the distance that honest replicas have; not a number where too little is known."""
        # Each replica has one voice: a liar that stays near is in half of all pairs of four, and could widen them.
        return median(median(each) for each in self._distances.values()) if self._known >= LEAST_KNOWN else math.nan

    def suspects(self, peer: str) -> bool:
        """Say whether a replica has a score."""
        return peer in self._records and self._records[peer].score > 0.0

    def agree(self, one: str, other: str, distance: float) -> bool:
        """Note the distance of a pair; say whether it agrees. If not, a third replica is to be asked."""
        if not distance <= TIMES * self.usual:
            return False
        self._note((one, other), distance)
        self._pass(one)
        self._pass(other)
        return True

    def judge(self, apart: dict[tuple[str, str], float], replicas: Collection[str], now_s: float) -> list[Verdict]:
        """Judge by the distances between three or more answers; return the verdicts on the odd ones.

        `replicas`: all that work for us; those in quarantine may be among them.
        """
        majority = Majority.of(apart)
        if majority.odd:
            for pair, each in apart.items():
                if set(pair) <= set(majority.alike):
                    self._note(pair, each)
        else:
            # Three that are equally far apart are three honest ones; two that agree may just have met.
            self._note(*sorted(apart.items(), key=lambda item: item[1])[1])
        usual, near = self.usual, majority.near
        # Two that are alike may collude, until a usual distance is known.
        wrong = WRONG if len(majority.alike) >= LEAST_REPLICAS else math.inf
        odd = {peer: far for peer, far in majority.odd.items() if near <= TIMES * usual < far or far > wrong}
        if now_s < self._doubts_until_s or not odd:
            return []
        for peer in majority.alike:
            self._pass(peer)
        found: list[Verdict] = []
        for peer, far in odd.items():
            strike = Verdict(peer, CheckFinding.STRUCK, far, 0.0 if math.isnan(usual) else usual)
            found += self._struck(strike, far, majority.alike, replicas, now_s)
        return found

    def watch(self, peer: str, gradient: Tensor, replicas: Collection[str], now_s: float) -> list[Verdict]:
        """Judge a replica by the means of its gradients, of which this is the last; `replicas` as for `judge`."""
        constant = self._offsets.note(peer, gradient, set(replicas) - self.quarantined - {peer})
        if constant is None or now_s < self._doubts_until_s:
            return []
        length, without = constant
        strike = Verdict(peer, CheckFinding.STRUCK, length)
        return self._struck(strike, LIMIT, without, replicas, now_s)

    def _struck(
        self, strike: Verdict, weight: float, accusers: Collection[str], replicas: Collection[str], now_s: float
    ) -> list[Verdict]:
        """Return a strike and what follows from it."""
        odd = strike.peer
        if odd in self.quarantined:
            return [strike]  # this gradient was under way when the quarantine began
        record = self._strike(odd, weight, accusers)
        others = set(replicas) - self.quarantined - {odd}
        accused_by = others.intersection(record.accusers)
        if record.score < self._limit or len(accused_by) < min(MOST_ACCUSERS, len(others) // 2 + 1):
            return [strike]
        self._offsets.forget(odd)
        if len(self.quarantined.intersection(replicas)) + 1 >= len(others):
            freed = [Verdict(peer, CheckFinding.PAROLED) for peer in sorted(self.quarantined)]
            self._records.clear()
            self.quarantined = frozenset()
            self._doubts_until_s = now_s + DOUBT_S
            return [strike, *freed, Verdict("", CheckFinding.DOUBTED, strike.distance, strike.usual, DOUBT_S)]
        for_s = QUARANTINES_S[min(record.quarantines, len(QUARANTINES_S) - 1)]
        self._records[odd] = record._replace(
            score=self._limit - PAROLE, quarantines=record.quarantines + 1, until_s=now_s + for_s
        )
        self.quarantined |= {odd}
        return [strike, Verdict(odd, CheckFinding.QUARANTINED, strike.distance, strike.usual, for_s)]

    def paroled(self, now_s: float) -> list[Verdict]:
        """End the quarantines that are over."""
        over = [peer for peer in self.quarantined if self._records[peer].until_s <= now_s]
        self.quarantined -= set(over)
        return [Verdict(peer, CheckFinding.PAROLED) for peer in sorted(over)]

    def _note(self, pair: tuple[str, str], distance: float) -> None:
        if distance == 0.0:
            return  # of weights that are still the same, or of replicas that collude
        self._known += 1
        for peer in pair:
            self._distances[peer] = seen = self._distances.pop(peer, None) or deque(maxlen=MOST_KNOWN)
            seen.append(distance)
        while len(self._distances) > MOST_COMPARED:
            del self._distances[next(iter(self._distances))]

    def _pass(self, peer: str) -> None:
        record = self._records.get(peer)
        if record is None or peer in self.quarantined:
            return
        score = max(0.0, record.score - self._passed)
        self._records[peer] = record._replace(score=score, accusers=record.accusers if score else ())

    def _strike(self, peer: str, weight: float, accusers: Collection[str]) -> _Record:
        record = self._records.pop(peer, _Record())
        kept = [*(each for each in record.accusers if each not in accusers), *accusers]
        record = record._replace(
            score=min(self._limit, record.score + weight), accusers=tuple(kept[-2 * MOST_ACCUSERS :])
        )
        self._records[peer] = record
        while len(self._records) > MOST_PEERS:
            # The replica with the least score goes first, of these the one with the oldest strike.
            least = min(self._records, key=lambda each: (each in self.quarantined, self._records[each].score))
            self.quarantined -= {least}
            del self._records[least]
        return record


MEANS_WEIGHT, MOST_DISTANCE = 6.0, 2.0
"""The weight of the square between the means of two gradients in their distance, and the most that it adds."""
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
    """Checks gradients of the next stage, between a `NextStage` and the client that calls its replicas.

    `compute`: runs arithmetic. `record`: takes verdicts. `shut_out`: shuts a peer out for so many seconds, or ends that
    with 0.
    """

    def __init__(
        self,
        ways: NextStageClient,
        codec: ActivationCodec,
        settings: CheckSettings,
        compute: Run,
        record: Callable[[Verdict], None],
        shut_out: Callable[[str, float], None],
        rng: Random,
    ) -> None:
        self._ways, self._codec, self._compute, self._rng = ways, codec, compute, rng
        self._record, self._shut_out = record, shut_out
        self._budget = CheckBudget(settings.rate)
        self._verdicts = Verdicts(deep=settings.stage + 2 < settings.stages)
        self._answered: dict[str, bool] = {}
        """Replicas that have returned a gradient to us, the last one last: names alone are no majority. True: the
        last check of its answers found them near others."""
        self._counts: Counter[str] = Counter()

    def hops(self) -> Sequence[Hop]:
        """Return the replicas of the next stage that are not in quarantine."""
        hops = self._ways.hops()
        if not self._verdicts.quarantined:
            return hops
        self._note(self._verdicts.paroled(now_s()))
        return tuple([hop for hop in hops if hop.peer not in self._verdicts.quarantined])

    async def check(self, peer: str, microbatch: Microbatch, reply: Gradient, deadline_s: float) -> Gradient:
        """Now and then call other replicas too; return the gradient to use for a microbatch."""
        count = count_of(self._codec.down, microbatch.hidden)
        if count < LEAST_VALUES or microbatch.learnt_share * count < LEAST_VALUES:
            return reply
        agreed = self._answered[peer] = self._answered.pop(peer, False)
        if len(self._answered) > MOST_ANSWERED:
            del self._answered[next(iter(self._answered))]
        self._budget.earn()
        # At once: behind an outer step each gradient would wait for seconds, and the mean takes milliseconds.
        self._note(self._verdicts.watch(peer, self._mean(reply), self._working(), now_s()))
        suspected, drawn = self._verdicts.suspects(peer), self._rng.random()
        if peer in self._verdicts.quarantined or not self._budget.allows(
            suspected=suspected, is_new=not agreed, drawn=drawn
        ):
            return reply
        others = [hop.peer for hop in self.hops() if hop.peer in self._answered and hop.peer != peer]
        if 1 + len(others) < LEAST_REPLICAS:
            return reply
        calls: list[str] = []
        self._rng.shuffle(others)
        others.sort(key=lambda other: not self._answered[other])
        try:
            # Time is left for the way up, or a check would lose what it was to protect.
            async with asyncio.timeout_at((now_s() + deadline_s) / 2):
                with self._budget.check(is_draw=agreed and not suspected) as calls:
                    return await self._checked(peer, reply, microbatch, others, calls)
        except TimeoutError:
            self._counts["too_late"] += 1
            # One that colludes could answer late on purpose: the next answers of all are checked.
            self._answered |= dict.fromkeys([peer, *calls] if calls else [], False)
            return reply

    def statistics(self) -> dict[str, int | float]:
        """Return totals since the start: calls that were made for checks, pairs that agreed, and findings."""
        names = ("calls", "agreed", "too_late", *CheckFinding)
        return {str(name): self._counts[name] for name in names}

    async def _checked(
        self, peer: str, reply: Gradient, microbatch: Microbatch, others: Sequence[str], calls: list[str]
    ) -> Gradient:
        """Ask other replicas too, and note them in `calls`; return the gradient to use for the microbatch."""
        answers, apart = {peer: reply}, dict[tuple[str, str], float]()
        for other in others[:FULL_CHECK]:
            calls.append(other)
            answer = await self._ask(other, microbatch)
            if answer is None:
                continue
            for known, before in answers.items():
                apart[known, other] = await self._compute(partial(self._distance, before, answer, microbatch))
            answers[other] = answer
            if len(answers) == 2 and self._verdicts.agree(peer, other, apart[peer, other]):
                self._counts["agreed"] += 1
                self._answered |= dict.fromkeys(answers, True)
                return reply
            if len(answers) >= LEAST_REPLICAS:
                majority = Majority.of(apart)
                # Three of which none is odd are honest; an odd one needs three that are alike, if there are so many.
                decided = bool(majority.odd) == (len(answers) > LEAST_REPLICAS)
                # Of four or more without three that are alike, two may collude with each other.
                if decided or len(answers) == LEAST_REPLICAS == 1 + len(others):
                    return self._judged(peer, answers, apart, majority)
        if apart:
            # They disagree, and nobody knows which of them is wrong: their next answers are checked, too.
            self._answered |= dict.fromkeys(answers, False)
        return reply

    def _judged(
        self, peer: str, answers: dict[str, Gradient], apart: dict[tuple[str, str], float], majority: Majority
    ) -> Gradient:
        verdicts = self._verdicts.judge(apart, self._working(), now_s())
        self._note(verdicts)
        reply, struck = answers[peer], {each.peer for each in verdicts if each.finding is CheckFinding.STRUCK}
        if struck:
            self._answered |= dict.fromkeys(struck, False) | dict.fromkeys(majority.alike, True)
        elif majority.near == 0.0 and not majority.odd:
            # At a run's start weights are equal, and no distance is known by which two could agree.
            self._answered |= dict.fromkeys(answers, True)
        if peer not in struck:
            return reply
        believed = answers[majority.alike[0]]
        # The receipt still goes to the peer that computed the loss for the first.
        return replace(reply, hidden=believed.hidden, loss=believed.loss)

    async def _ask(self, peer: str, microbatch: Microbatch) -> Gradient | None:
        self._counts["calls"] += 1
        try:
            reply = await self._ways.call(peer, microbatch)
            if not isinstance(reply, Gradient):
                return None
            check_gradient(reply, microbatch)
        except ConnectionError:
            return None  # the next microbatch that needs this replica finds out more
        return reply

    def _distance(self, one: Gradient, other: Gradient, microbatch: Microbatch) -> float:
        seed = gradient_seed(self._codec, microbatch.hidden)
        first, second = (
            decode(self._codec.back, hidden, seed) for hidden in (one.hidden, other.hidden) if hidden is not None
        )
        apart = mean_of_rows(first.flatten(0, -2)) - mean_of_rows(second.flatten(0, -2))
        return max(
            distance(first, second),
            min(MOST_DISTANCE, MEANS_WEIGHT * float(apart.square().sum())),
            ((one.loss - other.loss) / (abs(one.loss) + abs(other.loss) + TINY)) ** 2,
        )

    def _mean(self, reply: Gradient) -> Tensor:
        """Return the mean of a gradient over some tokens, drawn by chance."""
        assert reply.hidden is not None
        rows = reply.hidden.flatten(0, -2)
        if len(rows) > SAMPLED_TOKENS:
            rows = rows[self._rng.sample(range(len(rows)), SAMPLED_TOKENS)]
        # The dither of single tokens is not known here: its mean is zero.
        return mean_of_rows(decode(self._codec.back, rows))

    def _working(self) -> list[str]:
        """Return the replicas of the next stage that have returned a gradient."""
        return [hop.peer for hop in self._ways.hops() if hop.peer in self._answered]

    def _note(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._counts[verdict.finding] += 1
            if verdict.finding in (CheckFinding.QUARANTINED, CheckFinding.PAROLED):
                self._shut_out(verdict.peer, verdict.for_s)
            self._record(verdict)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the square of the difference of two gradients over the sum of their squares.

    0: the same; 1: nothing in common; 2: opposite.
    """
    both = float(one.square().sum() + other.square().sum())
    return float((one - other).square().sum()) / both if both > 0.0 else 0.0


def mean_of_rows(values: Tensor) -> Tensor:
    """Return the mean of rows [n, width], as a share of their size: the sum of its squares is 1 where all are alike."""
    size = float(values.square().mean().sqrt())
    return values.mean(0).cpu() / ((size or 1.0) * math.sqrt(values.shape[-1]))
