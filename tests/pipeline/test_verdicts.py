"""Verdicts of spot checks: honest replicas are left alone, liars are not, and a minority decides nothing."""

import math
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from itertools import combinations
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.spot_checks import (
    DOUBT_S,
    FIRST_CHECKS,
    FULL_CHECK,
    LEAST_KNOWN,
    MOST_ACCUSERS,
    MOST_COMPARED,
    MOST_KNOWN,
    MOST_PEERS,
    RESERVE,
    CheckBudget,
    CheckFinding,
    Majority,
    Offsets,
    Verdict,
    Verdicts,
)

Lies = Callable[[str, str], bool]
"""Whether a replica lies in a check of which this is the primary."""


class Stage:
    """Replicas as one sender sees them: honest answers differ by noise, lies are opposite, and the same as each other.

    `lies`: whether a replica's answer to a microbatch is a lie, given whose answer is checked by it.
    """

    def __init__(self, count: int, liars: Collection[str], lies: Lies, seed: int, *, deep: bool = False) -> None:
        self.names = [f"r{number}" for number in range(count)]
        self.verdicts = Verdicts(deep=deep)
        self.found: list[Verdict] = []
        self.now_s = 0.0
        self._liars, self._lies, self._rng = set(liars), lies, Random(seed)

    def check(self, primary: str | None = None) -> None:
        """Have one microbatch checked."""
        self.now_s += 1.0
        there = [name for name in self.names if name not in self.verdicts.quarantined]
        if len(there) < 3:
            return
        primary = primary or self._rng.choice(there)
        asked = [primary, *self._rng.sample([name for name in there if name != primary], 2)]
        lying = {name: name in self._liars and self._lies(name, primary) for name in asked}
        noise = {name: 0.02 * self._rng.lognormvariate(0.0, 0.5) for name in asked}
        apart = {
            (one, other): 1.9 if lying[one] != lying[other] else 0.0 if lying[one] else noise[one] + noise[other]
            for one, other in combinations(asked, 2)
        }
        if not self.verdicts.agree(*asked[:2], apart[asked[0], asked[1]]):
            self.found += self.verdicts.judge(apart, self.names, self.now_s)

    def quarantined(self) -> Counter[str]:
        """Return how often each was found guilty."""
        return Counter(verdict.peer for verdict in self.found if verdict.finding is CheckFinding.QUARANTINED)


def always(*_: str) -> bool:
    return True


@pytest.mark.parametrize("deep", [False, True])
def test_honest_replicas_are_never_shut_out(deep: bool) -> None:
    stage = Stage(4, (), always, 0, deep=deep)
    for _ in range(20_000):
        stage.check()
    assert not stage.quarantined()
    assert sum(verdict.finding is CheckFinding.STRUCK for verdict in stage.found) < 100


@given(st.integers(3, 20), st.integers(), st.booleans(), st.data())
@settings(max_examples=50)
def test_who_always_lies_is_always_shut_out_and_nobody_else(
    count: int, seed: int, deep: bool, data: st.DataObject
) -> None:
    liar = data.draw(st.sampled_from([f"r{number}" for number in range(count)]))
    stage = Stage(count, [liar], always, seed, deep=deep)
    for _ in range(8):
        stage.check()
    for _ in range(20 if count <= 5 else 60):
        stage.check(liar)
        if liar in stage.verdicts.quarantined:
            break
    assert liar in stage.verdicts.quarantined
    assert set(stage.quarantined()) == {liar}


@given(st.integers(3, 16), st.integers(), st.data())
@settings(max_examples=50)
def test_colluders_that_are_fewer_than_half_shut_out_nobody_honest(count: int, seed: int, data: st.DataObject) -> None:
    names = [f"r{number}" for number in range(count)]
    liars = data.draw(st.sets(st.sampled_from(names), max_size=(count - 1) // 2))
    victim = data.draw(st.sampled_from([name for name in names if name not in liars]))
    # They know whose answer is checked, and lie together about the victim alone.
    stage = Stage(count, liars, lambda _, primary: primary == victim, seed)
    for _ in range(300):
        stage.check(victim)
    assert set(stage.quarantined()) <= liars


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_who_lies_now_and_then_is_shut_out(share: float) -> None:
    chance = Random(1)
    stage = Stage(4, ["r0"], lambda *_: chance.random() < share, 1)
    for _ in range(200):
        if "r0" not in stage.verdicts.quarantined:
            stage.check("r0")
    assert set(stage.quarantined()) == {"r0"}


def test_who_passes_on_what_a_liar_behind_it_returned_is_let_be() -> None:
    names, chance = [f"r{number}" for number in range(4)], Random(2)
    stage = Stage(4, names, lambda *_: chance.random() < 0.25, 2, deep=True)
    for _ in range(2000):
        stage.check()
    assert not stage.quarantined()


def test_quarantines_grow_and_one_strike_ends_a_parole() -> None:
    stage = Stage(4, ["r0"], always, 3)
    lengths = []
    for _ in range(4):
        begun = len(stage.found)
        for _ in range(10):
            if "r0" not in stage.verdicts.quarantined:
                stage.check("r0")
        lengths.append(stage.found[-1].for_s)
        strikes = [verdict.finding for verdict in stage.found[begun:]].count(CheckFinding.STRUCK)
        assert strikes == (1 if begun else 2)
        assert stage.found[-1].finding is CheckFinding.QUARANTINED
        stage.now_s += lengths[-1]
        assert stage.verdicts.paroled(stage.now_s - 1e-3) == []
        assert stage.verdicts.paroled(stage.now_s) == [Verdict("r0", CheckFinding.PAROLED)]
    assert lengths == [600.0, 3600.0, 6 * 3600.0, 6 * 3600.0]
    apart = {("r0", "r1"): 1.9, ("r0", "r2"): 1.9, ("r1", "r2"): 0.03}
    stage.verdicts.judge(apart, stage.names, stage.now_s)
    late = stage.verdicts.judge(apart, stage.names, stage.now_s)
    assert [verdict.finding for verdict in late] == [CheckFinding.STRUCK], "it was under way"


def test_who_finds_half_of_a_stage_guilty_judges_nobody() -> None:
    stage = Stage(4, ["r0"], always, 4)
    _until(stage, lambda: bool(stage.verdicts.quarantined))
    stage._liars = {"r1"}  # of the three that are left, so that r0 was perhaps none
    _until(stage, lambda: stage.found[-1].finding is CheckFinding.DOUBTED)
    assert [verdict.finding for verdict in stage.found[-2:]] == [CheckFinding.PAROLED, CheckFinding.DOUBTED]
    assert stage.found[-1].for_s == DOUBT_S
    assert not stage.verdicts.quarantined
    found = len(stage.found)
    for _ in range(round(DOUBT_S) - 1):
        stage.check()
    assert len(stage.found) == found
    _until(stage, lambda: bool(stage.verdicts.quarantined))


def _until(stage: Stage, over: Callable[[], bool]) -> None:
    for _ in range(500):
        if over():
            return
        stage.check()
    raise AssertionError("it did not come to that")


def test_tolerance_is_learned_whatever_the_noise() -> None:
    for scale in (1e-4, 1.0, 3.0):
        verdicts = Verdicts(deep=False)
        assert math.isnan(verdicts.usual)
        apart = {("a", "b"): 0.02 * scale, ("a", "c"): 0.03 * scale, ("b", "c"): 0.025 * scale}
        for _ in range(LEAST_KNOWN):
            assert not verdicts.agree("a", "b", 0.02 * scale)
            assert verdicts.judge(apart, "abc", 0.0) == []
        assert verdicts.usual == pytest.approx(0.025 * scale)
        assert verdicts.agree("a", "b", 0.1 * scale)
        assert not verdicts.agree("a", "b", 0.2 * scale)


def test_two_that_have_just_met_make_no_odd_one_of_the_third() -> None:
    verdicts = Verdicts(deep=False)
    for _ in range(8):
        verdicts.judge({("a", "b"): 0.02, ("a", "c"): 0.03, ("b", "c"): 0.025}, "abc", 0.0)
    assert not verdicts.judge({("a", "b"): 0.0, ("a", "c"): 0.06, ("b", "c"): 0.06}, "abc", 0.0)


def test_one_that_stays_near_does_not_widen_what_is_usual() -> None:
    verdicts, rng = Verdicts(deep=False), Random(6)
    for _ in range(2000):
        apart = {("a", "b"): 0.02, ("a", "c"): 0.021, ("b", "c"): 0.022}
        near = 5.9 * verdicts.usual if verdicts.usual > 0.0 else 0.02
        apart |= {(name, "liar"): near for name in "abc"}
        pair = rng.choice(list(apart))
        if not verdicts.agree(*pair, apart[pair]):
            names = {*pair, *"abc"} if "liar" in pair else {*"abc"}
            three = sorted(names - {next(iter(set("abc") - set(pair)))}) if len(names) > 3 else sorted(names)
            verdicts.judge({each: apart[each] for each in combinations(three, 2)}, [*"abc", "liar"], 0.0)
    assert verdicts.usual < 0.1


def test_memory_is_bounded() -> None:
    verdicts = Verdicts(deep=False)
    crowd = [f"crowd {number}" for number in range(1000)]
    for number in range(600):
        names = [f"{number}-{each}" for each in "abc"]
        apart = dict(zip(combinations(names, 2), (0.02, 1.9, 1.9), strict=True))
        verdicts.judge(apart, [*names, *crowd], 0.0)
    for number in range(100):
        pair = [f"{number}-{each}" for each in "xy"]
        verdicts.judge(dict(zip(combinations([*pair, "z"], 2), (0.02, 1.9, 1.9), strict=True)), crowd, 0.0)
    assert len(verdicts._records) == MOST_PEERS
    assert len(verdicts._distances) <= MOST_COMPARED
    assert max(len(each) for each in verdicts._distances.values()) <= MOST_KNOWN
    assert max(len(standing.accusers) for standing in verdicts._records.values()) <= 2 * MOST_ACCUSERS


def _checked(budget: CheckBudget, calls: int, drawn: float, *, suspected: bool = False, is_new: bool = False) -> int:
    """Return the calls of a check of one microbatch: as many as it would make, or none where it is not checked."""
    if not budget.allows(suspected=suspected, is_new=is_new, drawn=drawn):
        return 0
    with budget.check(is_draw=not suspected and not is_new) as made:
        made += calls * ["other"]
    return calls


def test_a_budget_is_kept_and_some_of_it_is_for_suspects() -> None:
    for rate in (0.0, 0.02, 0.3):
        budget, rng, spent = CheckBudget(rate), Random(5), 0
        for _ in range(10_000):
            budget.earn()
            kind = {"suspected": rng.random() < 0.5, "is_new": rng.random() < 0.1}
            spent += _checked(budget, rng.choice((1, 2)), rng.random(), **kind)
        assert spent <= (FIRST_CHECKS + 10_000 * rate if rate else 0)
        assert spent >= 0.9 * 10_000 * rate
    budget = CheckBudget(0.001)
    while _checked(budget, 1, 0.0):
        pass
    assert budget.allows(suspected=True, is_new=False, drawn=1.0)


@given(st.sampled_from([0.01, 0.04, 0.2]), st.sampled_from([0.1, 0.25, 0.45]), st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=30, deadline=None)
def test_replicas_that_never_agree_leave_to_draws_nearly_half_of_what_is_earned(
    rate: float, share: float, calls: int, data: st.DataObject
) -> None:
    """Their answers are just beyond what agrees, and never far enough to shut them out."""
    suspected = data.draw(st.booleans())
    budget, rng, made = CheckBudget(rate), Random(data.draw(st.integers(0, 2**32))), Counter[bool]()
    microbatches = round(400 / rate)
    for _ in range(microbatches):
        budget.earn()
        odd = rng.random() < share
        made[odd] += _checked(budget, calls if odd else 1, rng.random(), suspected=odd and suspected, is_new=odd)
    assert made[False] >= 0.4 * microbatches * rate
    assert made.total() <= FIRST_CHECKS + microbatches * rate


@given(st.sampled_from([0.01, 0.04]), st.lists(st.tuples(st.sampled_from("sndx"), st.integers(1, 4)), max_size=400))
def test_checks_of_any_kind_that_overlap_in_any_order_never_overdraw(rate: float, steps: list[tuple[str, int]]) -> None:
    budget, earned, made = CheckBudget(rate), FIRST_CHECKS, 0
    under_way: list[tuple[AbstractContextManager[list[str]], list[str]]] = []
    for kind, calls in steps:
        for _ in range(30):
            budget.earn()
            earned += rate
        if kind == "x" and under_way:
            check, asked = under_way.pop(calls % len(under_way))
            asked += calls * ["other"]
            made += calls
            check.__exit__(None, None, None)
        elif kind != "x" and budget.allows(suspected=kind == "s", is_new=kind == "n", drawn=0.0):
            check = budget.check(is_draw=kind == "d")
            under_way.append((check, check.__enter__()))
        assert made + FULL_CHECK * len(under_way) <= earned + 1e-6


@given(st.sampled_from([0.001, 0.04]), st.lists(st.tuples(st.booleans(), st.integers(1, FULL_CHECK)), max_size=60))
def test_whatever_newcomers_and_draws_take_three_checks_are_left_to_suspects(
    rate: float, before: list[tuple[bool, int]]
) -> None:
    """Newcomers took all first calls, and a replica that began to lie soon after was struck and went on."""
    budget = CheckBudget(rate)
    for is_new, calls in before:
        budget.earn()
        _checked(budget, calls, 0.0, is_new=is_new)
    for _ in range(3):
        assert _checked(budget, FULL_CHECK, 1.0, suspected=True)


@pytest.mark.parametrize("under_way", [1, 5, 64])
def test_checks_that_run_at_the_same_time_spend_no_more_than_there_is(under_way: int) -> None:
    with ExitStack() as checks:
        budget, begun = CheckBudget(0.04), 0
        for _ in range(under_way):
            if budget.allows(suspected=True, is_new=False, drawn=1.0):
                checks.enter_context(budget.check(is_draw=False))
                begun += 1
    assert begun == min(under_way, FIRST_CHECKS // FULL_CHECK)
    assert budget.allows(suspected=False, is_new=False, drawn=0.0), "what was not spent is there again"


@given(st.integers(0, int(FIRST_CHECKS - RESERVE)))
def test_a_full_check_never_overdraws_and_three_are_kept_for_suspects(spent: int) -> None:
    budget, made = CheckBudget(0.001), Counter[bool]()
    spent = sum(_checked(budget, 1, 0.0) for _ in range(spent))
    for suspected in (False, True):
        while _checked(budget, FULL_CHECK, 0.0, suspected=suspected):
            made[suspected] += 1
    assert made[False] == (FIRST_CHECKS - RESERVE - spent) // FULL_CHECK
    assert made[True] >= RESERVE // FULL_CHECK
    assert spent + FULL_CHECK * made.total() <= FIRST_CHECKS + 1


def test_checks_that_are_passed_take_a_strike_away_part_by_part() -> None:
    verdicts = Verdicts(deep=False)
    for _ in range(4):
        assert not verdicts.judge({("a", "b"): 0.02, ("a", "c"): 0.02, ("b", "c"): 0.02}, "abc", 0.0)
    (strike,) = verdicts.judge({("a", "b"): 1.9, ("a", "c"): 1.9, ("b", "c"): 0.02}, "abc", 0.0)
    assert strike.finding is CheckFinding.STRUCK
    passed = 0
    while verdicts.suspects("a"):
        assert verdicts.agree("a", "b", 0.02)
        passed += 1
    assert passed == 8, "1.9 in quarters"


@given(st.lists(st.sampled_from([0.0, 0.02]), max_size=40))
def test_equal_answers_agree_and_do_not_change_what_is_usual(distances: list[float]) -> None:
    verdicts = Verdicts(deep=False)
    for each in distances:
        verdicts.judge(dict.fromkeys(combinations("abc", 2), each), "abc", 0.0)
    if sum(each > 0.0 for each in distances) < LEAST_KNOWN:
        assert math.isnan(verdicts.usual)
    else:
        assert verdicts.usual == 0.02
        assert verdicts.agree("a", "b", 0.0)


@given(st.permutations("abcde"), st.integers(0, 2), st.sampled_from([0.0, 0.02]), st.data())
def test_three_that_are_alike_are_told_from_two_that_collude(
    names: list[str], liars: int, between_liars: float, data: st.DataObject
) -> None:
    asked = names[: data.draw(st.integers(max(3, 3 + liars), 5))]
    lying = set(data.draw(st.permutations(asked))[:liars])
    near = st.floats(0.02, 0.1)
    apart = {
        pair: data.draw(near) if not lying & set(pair) else between_liars if lying >= set(pair) else 1.9
        for pair in combinations(asked, 2)
    }
    majority = Majority.of(apart)
    assert set(majority.odd) == lying
    assert not lying & set(majority.alike)


@given(st.integers(0, 2**32), st.integers(3, 5), st.data())
def test_one_check_shuts_nobody_out_and_a_newcomer_that_agrees_afterwards_is_no_suspect(
    seed: int, answers: int, data: st.DataObject
) -> None:
    rng, names = Random(seed), "abcde"[:answers]
    verdicts = Verdicts(deep=False)
    for _ in range(data.draw(st.integers(0, 8))):
        verdicts.judge({pair: rng.uniform(0.02, 0.1) for pair in combinations("abc", 2)}, "abcde", 0.0)
    apart = {pair: 2.0 if "a" in pair else rng.uniform(0.02, 0.1) for pair in combinations(names, 2)}
    found = verdicts.judge(apart, names, 0.0)
    assert {(each.peer, each.finding) for each in found} <= {("a", CheckFinding.STRUCK)}
    assert not verdicts.quarantined
    for _ in range(8):
        verdicts.judge(dict.fromkeys(combinations("bcd", 2), 0.02), names, 0.0)
        verdicts.agree("a", "b", 0.02)
    assert not verdicts.suspects("a")


def test_quarantined_replicas_are_forgotten_last() -> None:
    stage = Stage(5, ["r0"], always, seed=3)
    _until(stage, lambda: bool(stage.verdicts.quarantined))
    for number in range(MOST_PEERS):
        names = [f"{number}-{each}" for each in "abc"]
        stage.verdicts.judge(dict(zip(combinations(names, 2), (0.02, 1.9, 1.9), strict=True)), stage.names, 0.0)
    assert stage.verdicts.quarantined == {"r0"}


# Offsets: what all gradients of a replica have in common.


WIDTH = 32


class Gradients:
    """Means of gradients as one sender gets them from replicas in a random order.

    All have a part in common that moves, as a model learns; each has its own noise, whose size differs a hundredfold.
    `offsets`: what a replica adds, as a share of a gradient. `slow`: replicas that answer a tenth as often.
    """

    def __init__(self, count: int, offsets: dict[str, float], seed: int, slow: Collection[str] = ()) -> None:
        self.names = [f"r{number}" for number in range(count)]
        self.verdicts = Verdicts(deep=False)
        self.found: list[Verdict] = []
        self._rng, self._generator = Random(seed), torch.Generator().manual_seed(seed)
        direction = torch.randn(WIDTH, generator=self._generator)
        self._offsets = {peer: size * direction / direction.norm() for peer, size in offsets.items()}
        self._weights = [0.1 if name in slow else 1.0 for name in self.names]
        self._common, self._asked = torch.zeros(WIDTH), 0

    def answer(self, times: int, noise: float = 1.0) -> None:
        """Have so many microbatches answered; `noise`: times what honest gradients of a small run have."""
        # Half of a gradient's mean lies in few directions.
        scales = torch.where(torch.arange(WIDTH) < 4, (1.0 / 8) ** 0.5, (1.0 / 2 / (WIDTH - 4)) ** 0.5)
        for values in torch.randn(times, WIDTH, generator=self._generator):
            self._asked += 1
            if self._asked % 16 == 1:
                self._common = 0.5 * self._common + 0.1 * torch.randn(WIDTH, generator=self._generator) * scales
            there = [name not in self.verdicts.quarantined for name in self.names]
            weights = [weight * here for weight, here in zip(self._weights, there, strict=True)]
            (peer,) = self._rng.choices(self.names, weights)
            length = min(0.5, noise * 0.17 * self._rng.lognormvariate(0.0, 0.5))
            gradient = self._common + length * values * scales + self._offsets.get(peer, 0.0)
            self.found += self.verdicts.watch(peer, gradient, self.names, float(self._asked))

    def quarantined(self) -> set[str]:
        """Return the replicas that were found guilty."""
        return {verdict.peer for verdict in self.found if verdict.finding is CheckFinding.QUARANTINED}


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize(
    ("kind", "offset", "slow"), [("bfloat16", 0.0, False), ("float16", 0.01, False), ("slow", 0.05, True)]
)
def test_honest_replicas_of_odd_kinds_are_never_shut_out_for_an_offset(
    count: int, kind: str, offset: float, slow: bool
) -> None:
    """A replica whose arithmetic or weights differ has a short offset, and one that is slow answers late and seldom."""
    stage = Gradients(count, {"r0": offset}, count, ["r0"] if slow else ())
    stage.answer(12_000)
    assert stage.found == [], kind


@given(st.integers(3, 16), st.sampled_from([0.3, 0.7]), st.integers(0, 2**32), st.data())
@settings(max_examples=25, deadline=None)
def test_replicas_with_the_same_offset_are_shut_out_and_nobody_else(
    count: int, size: float, seed: int, data: st.DataObject
) -> None:
    liars = data.draw(st.integers(1, max(1, count // 4)))
    stage = Gradients(count, {f"r{number}": size for number in range(liars)}, seed)
    for _ in range(30):
        stage.answer(2 * count, noise=0.5)
        if len(stage.quarantined()) == liars:
            break
    assert stage.quarantined() == {f"r{number}" for number in range(liars)}


@given(st.integers(3, 12), st.integers(0, 2**32), st.data())
@settings(max_examples=25, deadline=None)
def test_fewer_than_half_of_a_stage_shut_out_nobody_honest_by_their_offsets(
    count: int, seed: int, data: st.DataObject
) -> None:
    liars = data.draw(st.integers(1, (count - 1) // 2))
    sizes = data.draw(st.lists(st.sampled_from([-0.9, -0.5, 0.2, 0.5, 0.9]), min_size=liars, max_size=liars))
    stage = Gradients(count, {f"r{number}": size for number, size in enumerate(sizes)}, seed)
    stage.answer(40 * count)
    assert stage.quarantined() <= {f"r{number}" for number in range(liars)}


def test_a_lasting_offset_counts_and_a_single_one_does_not() -> None:
    offsets, length = Offsets(), torch.ones(WIDTH) / WIDTH**0.5

    def answer(size: float) -> tuple[float, list[str]] | None:
        for peer in "bcd":
            assert offsets.note(peer, 0.0 * length, set("abcd") - {peer}) is None
        return offsets.note("a", size * length, "bcd")

    assert not any(answer(1.0 if number % 8 == 0 else 0.0) for number in range(64))
    found = [answer(0.6) for _ in range(24)]
    assert sorted(found[-1][1]) == ["b", "c", "d"]
    offsets.forget("a")
    assert answer(0.6) is None


def test_the_memory_of_offsets_is_bounded() -> None:
    offsets, names = Offsets(), [f"r{number}" for number in range(2 * MOST_PEERS)]
    for name in names:
        offsets.note(name, torch.zeros(WIDTH), names)
    assert len(offsets._offsets) == MOST_PEERS
