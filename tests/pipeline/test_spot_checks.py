"""Spot checks over scripted replicas: who is called, what is taken for the gradient, and what it may cost."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from statistics import median
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import cuts, drawn_ids, make_stage, prepared

from pipeline.activation_codec import encode, gradient_seed
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch, Reason, Refused, Reply
from pipeline.next_stage import NextStageClient
from pipeline.routing import Hop
from pipeline.spot_checks import (
    FIRST_CHECKS,
    LIMIT,
    SAMPLED_TOKENS,
    TIMES,
    CheckBudget,
    CheckFinding,
    CheckSettings,
    SpotChecks,
    Verdict,
    Verdicts,
    distance,
    mean_of_rows,
)

T = TypeVar("T")
TOKENS, WIDTH = 64, 128
TRUE = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


class Peers:
    """Replicas of the next stage that answer with the true gradient and a little noise, or as `script` says."""

    def __init__(self, names: str, script: Callable[[str, Gradient], Reply] = lambda _, honest: honest) -> None:
        self.hops = tuple(Hop(name) for name in names)
        self.calls: list[str] = []
        self.found: list[Verdict] = []
        self.shut_out: list[str] = []
        self.script = script
        self._random = torch.Generator().manual_seed(1)
        self.checks = SpotChecks(
            NextStageClient(hops=lambda: self.hops, call=self._answer),
            ACTIVATION_CODECS["float32"],
            CheckSettings(share=0.02, stage=0, stages=2),
            _at_once,
            self.found.append,
            lambda peer, for_s: self.shut_out.append(peer) if for_s else self.shut_out.remove(peer),
            Random(2),
        )

    async def _answer(self, peer: str, microbatch: Microbatch) -> Reply:
        self.calls.append(peer)
        await asyncio.sleep(1.0)
        noise = 0.1 * torch.randn(TRUE.shape, generator=self._random)
        return self.script(peer, Gradient(hidden=TRUE + noise, loss=2.0, tokens=TOKENS, computed_by=peer))

    async def ask(self, peer: str, budget_s: float = 100.0, hidden: torch.Tensor = TRUE) -> Reply:
        targets, deadline_s = (
            torch.zeros(hidden.shape[:2], dtype=torch.int64),
            asyncio.get_running_loop().time() + budget_s,
        )
        sent = Microbatch(hidden=hidden, targets=targets, progress=0.0, budget_s=budget_s)
        reply = await self._answer(peer, sent)
        return await self.checks.check(peer, sent, reply, deadline_s) if isinstance(reply, Gradient) else reply

    async def go_round(self, times: int) -> list[Reply]:
        """Ask each of those that may be asked, in turn."""
        return [await self.ask(hop.peer) for _ in range(times) for hop in self.checks.hops()]


async def _at_once(function: Callable[[], T]) -> T:
    return function()


def _flipped(liar: str) -> Callable[[str, Gradient], Reply]:
    def script(peer: str, honest: Gradient) -> Reply:
        assert honest.hidden is not None
        return honest if peer != liar else Gradient(hidden=-honest.hidden, loss=2.0, tokens=TOKENS, computed_by=peer)

    return script


@pytest.mark.parametrize("wrong", [torch.neg, torch.zeros_like, lambda answer: answer.flip(-1)])
async def test_a_liar_is_struck_while_all_weights_are_equal(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """At a run's start, before a usual distance is known."""
    peers = Peers(
        "abcd", lambda peer, honest: replace(honest, hidden=wrong(TRUE) if peer == "b" else TRUE, computed_by=peer)
    )
    replies = await peers.go_round(12)
    assert {verdict.peer for verdict in peers.found} == {"b"}
    assert {verdict.usual for verdict in peers.found} == {0.0}, "a number, which a journal can keep"
    assert peers.shut_out == ["b"]
    bad = [reply for reply in replies if isinstance(reply, Gradient) and not torch.equal(reply.hidden, TRUE)]
    assert len(bad) <= 2, "before three others have answered"


async def test_a_replica_is_checked_again_after_a_check_that_decided_nothing() -> None:
    """Too few of the others answered to say which of two answers is wrong."""
    liar, busy = "", ""

    def script(peer: str, honest: Gradient) -> Reply:
        if peer in busy:
            return Refused(reason=Reason.FULL)
        return replace(honest, hidden=-TRUE) if peer == liar else honest

    peers = Peers("abcdef", script)
    await peers.go_round(250)
    liar, busy, begun = "a", "cde", peers.checks.statistics()["calls"]
    while peers.checks.statistics()["calls"] == begun:
        await peers.ask("a")
    assert peers.found == []
    busy, peers.checks._budget = "", CheckBudget(0.04)
    await peers.ask("a")
    assert {verdict.peer for verdict in peers.found} == {"a"}


async def test_nothing_is_learnt_of_two_against_two_but_that_all_are_to_be_checked_again() -> None:
    """Two that collude could choose the distance which would count as usual from then on."""
    answers = {"a": TRUE, "b": 1.1 * TRUE, "c": -TRUE, "d": -1.5 * TRUE}
    peers = Peers("abcd", lambda peer, honest: replace(honest, hidden=answers[peer], computed_by=peer))
    await peers.go_round(12)
    assert peers.checks.statistics()["calls"] > 6
    assert peers.found == []
    assert math.isnan(peers.checks._verdicts.usual)
    assert peers.checks._verdicts._known <= 1, "of a check before the fourth had answered"
    assert not any(peers.checks._answered.values())


async def test_a_liar_is_quarantined_and_while_it_is_checked_its_answers_do_no_harm() -> None:
    peers = Peers("abcd", _flipped("b"))
    replies = await peers.go_round(40)
    assert [verdict.finding for verdict in peers.found if verdict.peer == "b"][-1] is CheckFinding.QUARANTINED
    assert {verdict.peer for verdict in peers.found} == {"b"}
    assert [hop.peer for hop in peers.checks.hops()] == ["a", "c", "d"]
    assert peers.shut_out == ["b"]
    bad = [reply for reply in replies if isinstance(reply, Gradient) and distance(reply.hidden, TRUE) > 1.0]
    assert len(bad) <= 12
    signed = Counter(reply.computed_by for reply in replies if isinstance(reply, Gradient))
    assert signed["b"] > len(bad), "another gradient, and the receipt of who was called"


async def test_the_lie_by_which_a_sender_comes_to_doubt_itself_does_no_harm_either() -> None:
    peers = Peers("abcd", _flipped("b"))
    await peers.go_round(40)
    assert peers.checks.statistics()[CheckFinding.QUARANTINED] == 1
    peers.script, reply, asked = _flipped("c"), None, 0
    while not peers.checks.statistics()[CheckFinding.DOUBTED] and asked < 1000:
        reply, asked = await peers.ask("c"), asked + 1
    assert peers.found[-1].finding is CheckFinding.DOUBTED
    assert peers.shut_out == []
    assert isinstance(reply, Gradient)
    assert reply.hidden is not None
    assert distance(reply.hidden, TRUE) < 1.0


async def test_a_constant_offset_too_short_for_a_check_is_found_in_all_gradients_together() -> None:
    def script(peer: str, honest: Gradient) -> Reply:
        assert honest.hidden is not None
        return replace(honest, hidden=honest.hidden + 0.3) if peer == "b" else honest

    peers = Peers("abcd", script)
    await peers.go_round(16)
    assert [verdict.peer for verdict in peers.found if verdict.finding is CheckFinding.QUARANTINED] == ["b"]
    assert {verdict.peer for verdict in peers.found} == {"b"}
    assert peers.calls.count("b") < 16


@pytest.mark.parametrize("seed", range(5))
async def test_two_of_eight_with_the_same_offset_do_little_harm_and_replace_no_honest_gradient(seed: int) -> None:
    def script(peer: str, honest: Gradient) -> Reply:
        return replace(honest, hidden=TRUE + 0.7) if peer in "gh" else honest

    names = Random(seed).sample("abcdefgh", 8)
    peers, used = Peers("".join(names), script), []
    for _ in range(8):
        for hop in peers.checks.hops():
            reply = await peers.ask(hop.peer)
            assert isinstance(reply, Gradient)
            assert reply.hidden is not None
            used.append((hop.peer in "gh", distance(reply.hidden, TRUE) > 0.1))
    assert {verdict.peer for verdict in peers.found} == set("gh")
    assert sorted(peers.shut_out) == ["g", "h"]
    assert (False, True) not in used
    assert used.count((True, True)) <= 6, "some come before three others have answered, or where the two meet"


async def test_the_first_answer_of_a_newcomer_is_checked() -> None:
    peers = Peers("abcd")
    await peers.go_round(8)
    for newcomer in "efgh":
        peers.hops, calls = (*peers.hops, Hop(newcomer)), len(peers.calls)
        await peers.ask(newcomer)
        assert len(peers.calls) == calls + 2
    assert peers.found == []


async def test_a_gradient_that_is_not_checked_waits_for_no_outer_step() -> None:
    """The arithmetic of checks takes its turn behind that of outer steps."""

    async def in_its_turn(function: Callable[[], T]) -> T:
        await asyncio.sleep(10.0)
        return function()

    peers, loop, waited = Peers("abcd"), asyncio.get_running_loop(), 0
    peers.checks._compute = in_its_turn
    for peer in 50 * "abcd":
        begun_s = loop.time()
        await peers.ask(peer)
        waited += loop.time() - begun_s >= 10.0
    assert 0 < waited <= peers.checks.statistics()["calls"]


async def test_honest_replicas_are_checked_within_the_budget() -> None:
    peers = Peers("abcd")
    await peers.go_round(250)
    assert peers.found == []
    statistics = peers.checks.statistics()
    assert len(peers.calls) == 1000 + statistics["calls"]
    assert 0.8 * 40 <= statistics["calls"] <= FIRST_CHECKS + 40


@pytest.mark.parametrize(
    ("names", "shape"), [("a", (1, TOKENS, WIDTH)), ("ab", (1, TOKENS, WIDTH)), ("abcd", (1, 2, 3))]
)
async def test_where_two_or_fewer_serve_or_messages_are_small_nothing_is_checked(
    names: str, shape: tuple[int, ...]
) -> None:
    peers = Peers(names, lambda peer, honest: Gradient(hidden=torch.zeros(shape), loss=1.0, tokens=1))
    for _ in range(100):
        for name in names:
            await peers.ask(name, hidden=torch.zeros(shape))
    assert len(peers.calls) == 100 * len(names)


@pytest.mark.parametrize(
    "answer", [Refused(reason=Reason.FULL), ConnectionResetError(), Gradient(hidden=TRUE[:, :1], loss=1.0, tokens=1)]
)
async def test_who_does_not_answer_a_check_costs_nobody_the_gradient(answer: Reply | ConnectionError) -> None:
    silent = False

    def script(peer: str, honest: Gradient) -> Reply:
        if not silent or peer == "a":
            return honest
        if isinstance(answer, ConnectionError):
            raise answer
        return answer

    peers = Peers("abc", script)
    await peers.go_round(1)
    silent = True
    assert all([isinstance(await peers.ask("a"), Gradient) for _ in range(50)])
    assert peers.found == []


async def test_a_check_leaves_time_for_the_way_up() -> None:
    loop, slow = asyncio.get_running_loop(), False
    peers = Peers("abc")
    inner = peers._answer

    async def answer(peer: str, microbatch: Microbatch) -> Reply:
        if slow and peer != "a":
            await asyncio.sleep(1000.0)
        return await inner(peer, microbatch)

    peers.checks._ways = NextStageClient(hops=lambda: peers.hops, call=answer)
    await peers.go_round(1)
    slow, late = True, 0
    for _ in range(50):
        begun_s = loop.time()
        assert isinstance(await peers.ask("a", budget_s=101.0), Gradient)
        assert loop.time() - begun_s <= 51.0
        late += loop.time() - begun_s > 49.0
    assert peers.checks.statistics()["too_late"] == late > 0
    assert not peers.checks._answered["a"], "an answer that came too late clears nobody"


async def test_a_lie_about_the_loss_is_a_disagreement() -> None:
    def script(peer: str, honest: Gradient) -> Reply:
        return honest if peer != "c" else Gradient(hidden=honest.hidden, loss=9.0, tokens=TOKENS)

    peers = Peers("abcd", script)
    await peers.go_round(40)
    assert {verdict.peer for verdict in peers.found} == {"c"}


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_checks_of_all_stages_together_take_their_share_of_compute(stages: int) -> None:
    rates = [CheckSettings(share=0.02, stage=stage, stages=stages).rate for stage in range(stages)]
    costs = [rate * (stages - 1 - stage) / stages for stage, rate in enumerate(rates)]
    assert sum(costs) == pytest.approx(0.02 if stages > 1 else 0.0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_mean_of_rows_is_what_they_have_in_common_as_a_share_of_their_size(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    constant, noise = torch.randn(40, generator=generator), torch.randn(SAMPLED_TOKENS, 40, generator=generator)
    alike = mean_of_rows(scale * constant.expand(SAMPLED_TOKENS, 40))
    assert float(alike.square().sum()) == pytest.approx(1.0)
    assert float(mean_of_rows(scale * noise).square().sum()) == pytest.approx(1.0 / SAMPLED_TOKENS, rel=0.5)
    assert mean_of_rows(torch.zeros(3, 7)).tolist() == [0.0] * 7


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
async def test_an_offset_shows_in_a_few_tokens_of_a_gradient_in_any_codec(codec: str) -> None:
    """Of more tokens than are sampled, and without the dither."""
    peers, back = Peers("abcd"), ACTIVATION_CODECS[codec].back
    peers.checks._codec = ACTIVATION_CODECS[codec]
    values = torch.randn(4, SAMPLED_TOKENS, 64, generator=torch.Generator().manual_seed(4))
    means = [
        peers.checks._mean(Gradient(hidden=encode(back, values + offset, 7), loss=1.0, tokens=1)) for offset in (0, 0.3)
    ]
    assert float(means[0].square().sum()) == pytest.approx(1.0 / SAMPLED_TOKENS, rel=0.6)
    assert float((means[1] - means[0]).square().sum()) == pytest.approx(0.083 + 2.0 / SAMPLED_TOKENS, rel=0.4)


def test_distance() -> None:
    zero = torch.zeros_like(TRUE)
    assert distance(TRUE, TRUE) == distance(zero, zero) == 0.0
    assert distance(TRUE, zero) == pytest.approx(1.0)
    assert distance(TRUE, -TRUE) == pytest.approx(2.0)


@cache
def _reply(gap: float, number: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the gradient of a replica that computes in this format, None being float32.

    `gap`: how far its weights are from the replicas' mean, as a share of their norm.
    """
    recipe = prepared("llama")
    *_, last = cuts(recipe, 2)
    hidden = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    stage, generator = make_stage(recipe, last, autocast=dtype), torch.Generator().manual_seed(number)
    noise = [torch.randn(weight.shape, generator=generator) for weight in stage.weights()]
    stage.set_weights([w + gap * w.norm() / n.norm() * n for w, n in zip(stage.weights(), noise, strict=True)])
    gradient = stage.loss(hidden, drawn_ids(1, 2, 32)).hidden
    assert gradient is not None
    return gradient


def _replies(gap: float, other: torch.dtype | None) -> list[torch.Tensor]:
    """Return gradients of four replicas in bfloat16, and of a last one in another format."""
    return [_reply(gap, number, torch.bfloat16 if number < 4 else other) for number in range(5)]


@pytest.mark.parametrize("other", [None, torch.float16])
@pytest.mark.parametrize("gap", [1e-3, 1e-2])
def test_a_replica_of_another_format_among_those_in_bfloat16_is_as_near_as_they_are(
    gap: float, other: torch.dtype | None
) -> None:
    *halves, whole = _replies(gap, other)
    usual = median(distance(*pair) for pair in itertools.combinations(halves, 2))
    assert max(distance(whole, half) for half in halves) < TIMES * usual


@pytest.mark.parametrize("other", [None, torch.float16])
def test_where_weights_are_alike_a_replica_of_another_format_is_struck_and_never_reaches_the_limit(
    other: torch.dtype | None,
) -> None:
    """A strike adds its distance, which is that of two number formats."""
    *halves, whole = _replies(0.0, other)
    assert LIMIT / max(distance(whole, half) for half in halves) > 10_000


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([torch.bfloat16, torch.float16, None]), min_size=4, max_size=5),
    st.sampled_from(list(ACTIVATION_CODECS)),
    st.sampled_from([0.0, 1e-3, 1e-2]),
    st.sampled_from([torch.neg, torch.zeros_like, lambda answer: answer.flip(0)]),
)
def test_of_answers_in_any_number_formats_only_the_wrong_one_is_struck_by_a_first_check(
    formats: list[torch.dtype | None], codec: str, gap: float, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    peers, names = Peers("abcde"), "abcde"[: len(formats)]
    peers.checks._codec = ACTIVATION_CODECS[codec]
    hidden = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    sent = Microbatch(hidden=hidden, targets=torch.zeros(2, 32, dtype=torch.int64), progress=0.0, budget_s=1.0)
    seed = gradient_seed(peers.checks._codec, hidden)
    true = [_reply(gap, number, dtype) for number, dtype in enumerate(formats)]
    for answers, struck in ((true, set()), ([wrong(true[0]), *true[1:]], {"a"})):
        packed = [
            Gradient(hidden=encode(peers.checks._codec.back, each, seed), loss=1.0, tokens=64) for each in answers
        ]
        apart = {
            (one, other): peers.checks._distance(packed[names.index(one)], packed[names.index(other)], sent)
            for one, other in itertools.combinations(names, 2)
        }
        found = {verdict.peer for verdict in Verdicts(deep=False).judge(apart, names, 0.0) if verdict.distance > 0.1}
        assert found == struck
