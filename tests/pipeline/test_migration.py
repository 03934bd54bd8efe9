"""Moving: a swarm out of balance comes to balance by itself, with few moves, and nobody goes to and fro.

Most of it is a model of many peers who decide from what they read of each other, late and each at moments of its own:
the decisions are the production's, the rest is a few lines of bookkeeping.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.placement import (
    DOUBLINGS,
    MOST_KEPT,
    MOST_READINGS,
    READINGS,
    MigrationDecision,
    MigrationState,
    OwnPlacement,
    StageClaim,
    StagePace,
    capacities,
    decide,
    may_move,
    movers,
    stay_s,
)

EVEN = (1.0, 1.0)
PACE = StagePace.of(10.0)
DRAIN_S, COPY_S = 10.0, 60.0


def replica(peer: str, stage: int, device_s: float = 1.0, moves_to: int | None = None) -> StageClaim:
    return StageClaim(peer, stage, device_s=device_s, may_serve=range(8), moves_to=moves_to)


def swarm(*counts: int) -> list[StageClaim]:
    return [replica(f"s{stage}r{number}", stage) for stage, count in enumerate(counts) for number in range(count)]


def test_the_usual_pace_is_that_of_records_every_ten_seconds() -> None:
    assert StagePace.of(10.0) == StagePace()


# Who should go.


@given(st.integers(20, 90), st.integers(1, 90), st.integers(2, 400))
def test_of_a_sample_nobody_moves_for_what_may_be_chance(crowded: int, weak: int, each: int) -> None:
    whole, listed = swarm(crowded, weak), [claim._replace(stands_for=float(each)) for claim in swarm(crowded, weak)]
    assert capacities(listed, EVEN) == pytest.approx([each * one for one in capacities(whole, EVEN)])
    found, error = movers(listed, EVEN, 0), (crowded + weak) ** 0.5
    if abs(crowded - weak) <= 2.0 * error:
        assert found == []
    elif crowded - 1 - weak > 3.0 * error and crowded - 1 > 1.1 * weak:
        assert {move.origin for move in found} == {0}


def test_who_can_be_spared_goes_where_it_is_needed() -> None:
    (first, *rest) = movers(swarm(3, 1), EVEN, 0)
    assert {move.peer for move in (first, *rest)} == {"s0r0", "s0r1", "s0r2"}
    assert (first.origin, first.target, first.before, first.after) == (0, 1, 1.0, 2.0)
    assert str(first) == "stage 1 does 1, with us 2 microbatches/s, and stage 0 can spare us"
    assert movers(list(reversed(swarm(3, 1))), EVEN, 0) == [first, *rest], "all name the same peer"
    assert len({movers(swarm(9, 1), EVEN, seed)[0].peer for seed in range(40)}) > 4, "not always the same one"


@pytest.mark.parametrize("counts", [(2, 1), (1, 0), (1, 1), (2, 2), (3, 2), (100, 93)])
def test_nobody_goes_where_it_is_not_worth_it(counts: tuple[int, int]) -> None:
    assert movers(swarm(*counts), EVEN, 0) == []


def test_the_last_replica_stays_however_much_the_other_stage_starves() -> None:
    strong = replica("strong", 0, device_s=0.1)
    assert movers([strong, replica("weak", 1, device_s=10.0)], EVEN, 0) == []
    leaving = replica("other", 0, device_s=0.1, moves_to=1)
    assert [move.peer for move in movers([strong, leaving], EVEN, 0)] == ["other"]


def test_only_who_is_willing_and_at_work_goes() -> None:
    claims = [claim._replace(may_serve=()) for claim in swarm(4, 1)]
    assert movers(claims, EVEN, 0) == []
    claims[2] = claims[2]._replace(may_serve=(0, 1))
    assert [move.peer for move in movers(claims, EVEN, 0)] == ["s0r2"]
    claims[2] = claims[2]._replace(training=False)
    assert movers(claims, EVEN, 0) == []


def test_the_better_mover_goes() -> None:
    """A slow replica fills the gap as well as a fast one where that would only turn it round."""
    claims = [replica("a", 0, 1.0), replica("b", 0, 1.0), replica("fast", 0, 0.25), replica("c", 1, 1.0)]
    assert {move.peer for move in movers(claims, EVEN, 3)} == {"a", "b"}


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 10.0)), max_size=15), st.integers(0, 5))
def test_a_move_leaves_the_weakest_stage_stronger_and_is_not_taken_back(
    rows: list[tuple[int, float]], seed: int
) -> None:
    claims, work = [replica(f"p{n:02}", *row) for n, row in enumerate(rows)], (1.0, 2.0, 3.0)
    for move in movers(claims, work, seed):
        moved = [
            claim._replace(stage=move.target, device_s=claim.device_s * work[move.target] / work[claim.stage])
            if claim.peer == move.peer
            else claim
            for claim in claims
        ]
        assert sorted(capacities(moved, work)) > sorted(capacities(claims, work))
        assert all(back.peer != move.peer or back.target != move.origin for back in movers(moved, work, seed))


# One peer's judgement.


def judged(
    me: OwnPlacement,
    state: MigrationState,
    claims: Sequence[StageClaim],
    work: Sequence[float],
    pace: StagePace,
    now_s: float,
) -> MigrationDecision:
    """Judge one reading, where all others have brought weights to us."""
    return decide(me, state, claims, work, pace, now_s, {claim.peer for claim in claims} - {me.peer})


def first_of(claims: list[StageClaim]) -> OwnPlacement:
    return OwnPlacement(movers(claims, EVEN, 0)[0].peer, 0, 0.0)


def announced(claims: list[StageClaim], me: OwnPlacement) -> tuple[MigrationState, float]:
    """Read until we announce; return when."""
    state, now_s = MigrationState(), 0.0
    for _ in range(10):
        verdict = judged(me, state, claims, EVEN, PACE, now_s)
        state = verdict.state
        assert not verdict.go
        if verdict.announce is not None:
            return state, now_s
        now_s += PACE.look_s
    raise AssertionError("it never announced")


def test_it_takes_several_readings_in_a_row_and_a_moment_of_ones_own() -> None:
    claims = swarm(3, 1)
    me = first_of(claims)
    state, now_s = announced(claims, me)
    assert state.readings >= READINGS
    assert (READINGS - 1) * PACE.look_s <= now_s <= (READINGS - 1) * PACE.look_s + PACE.delay_s + PACE.look_s
    assert not judged(me, state, claims, EVEN, PACE, now_s + PACE.settle_s - 1.0).go
    assert judged(me, state, claims, EVEN, PACE, now_s + PACE.settle_s).go
    assert judged(me, state, swarm(2, 2), EVEN, PACE, now_s + PACE.settle_s).state == MigrationState(), (
        "somebody else came"
    )
    other = next(claim.peer for claim in claims if claim.stage == 0 and claim.peer != me.peer)
    verdict = judged(OwnPlacement(other, 0, 0.0), MigrationState(1, READINGS), claims, EVEN, PACE, 1e6)
    assert verdict.announce is None, "not who should go first"


def announcements(me: OwnPlacement, said: Callable[[int], list[StageClaim]]) -> list[bool]:
    """Read until we go; return for each reading whether our record says that we go."""
    state, found = MigrationState(), list[bool]()
    for reading in range(4 * MOST_KEPT):
        verdict = judged(me, state, said(reading), EVEN, PACE, reading * PACE.look_s)
        state = verdict.state
        found.append(verdict.announce is not None)
        if verdict.go:
            return found
    raise AssertionError("it never went")


def test_a_stage_without_any_replica_is_left_to_those_who_come_back() -> None:
    claims = swarm(3, 0)
    assert announcements(first_of(claims), lambda _: claims).index(True) * PACE.look_s >= PACE.empty_s


def test_of_two_who_announced_the_first_goes_and_the_other_takes_it_back() -> None:
    claims = swarm(4, 1)
    order = [move.peer for move in movers(claims, EVEN, 0)]
    both = [claim._replace(moves_to=1) if claim.peer in order[:2] else claim for claim in claims]
    state = MigrationState(1, READINGS, announced_s=0.0)
    first, second = (judged(OwnPlacement(peer, 0, 0.0), state, both, EVEN, PACE, 100.0) for peer in order[:2])
    assert first.go
    assert second == (second.state, None, False)
    assert second.state.announced_s is None


@pytest.mark.parametrize("announces", [True, False])
def test_who_should_go_first_and_does_not_keeps_the_next_for_a_while_only(announces: bool) -> None:
    claims = swarm(4, 1)
    first, second = [move.peer for move in movers(claims, EVEN, 0)][:2]
    stuck = [claim._replace(moves_to=1, may_serve=()) if claim.peer == first else claim for claim in claims]
    found = announcements(OwnPlacement(second, 0, 0.0), lambda _: stuck if announces else claims)
    kept = MOST_READINGS if announces else MOST_READINGS - 1
    assert found == [False] * kept + [True] * (len(found) - kept)
    assert len(found) <= 2 * MOST_READINGS


@pytest.mark.parametrize(("names", "every"), [(1, 2), (100, 1)], ids=["to and fro", "ever new names"])
def test_announcements_that_come_and_go_keep_nobody_for_good(names: int, every: int) -> None:
    """All of them would be first, and none ever goes."""
    claims = swarm(4, 1)
    me = first_of(claims)
    order = [move.peer for move in movers([*claims, *[replica(f"z{n}", 0) for n in range(2000)]], EVEN, 0)]
    strangers = order[: order.index(me.peer)][:names]
    assert len(strangers) == names

    def said(reading: int) -> list[StageClaim]:
        stranger = replica(strangers[reading % names], 0, moves_to=1)._replace(may_serve=())
        return [*claims, stranger] if reading % every == 0 else claims

    assert announcements(me, said)[-1]


def test_announcements_keep_us_again_once_somebody_has_come() -> None:
    claims = swarm(8, 1)
    me = first_of(claims)
    state = MigrationState(1, READINGS, kept=MOST_KEPT, kept_at=1.0)
    rival = replica("another", 0, moves_to=1)._replace(may_serve=())
    assert judged(me, state, [*claims, rival], EVEN, PACE, 1e3).announce is not None
    helped = [*claims, replica("helper", 1), rival]
    me = OwnPlacement(movers(helped, EVEN, 0)[0].peer, 0, 0.0)
    verdict = judged(me, state, helped, EVEN, PACE, 1e3)
    assert (verdict.announce, verdict.state.kept) == (None, 1)


def test_the_stay_doubles_and_the_end_of_a_run_keeps_everybody() -> None:
    assert [stay_s(moves, PACE) for moves in range(3)] == [600.0, 1200.0, 2400.0]
    assert stay_s(10**6, PACE) == stay_s(DOUBLINGS, PACE)
    me = OwnPlacement("a", 0, 1000.0, moves=1)
    assert not may_move(me, PACE, 2199.0, 0.5)
    assert may_move(me, PACE, 2200.0, 0.5)
    assert not may_move(me, PACE, 2200.0, 0.96)


# Whole swarms.


class Weather(NamedTuple):
    """How badly the swarm reads: records are up to `lag_s` old, each for itself; measured times are `noise` off."""

    lag_s: float = 10.0
    noise: float = 0.0


class Swarm:
    """Peers with speeds, what each said and when, and who moved when. Times are seconds."""

    def __init__(self, powers: list[float], stages: list[int], work: tuple[float, ...], weather: Weather, seed: int):
        self.work, self.weather, self.seed = work, weather, seed
        self.names = [f"p{number:02}" for number in range(len(powers))]
        self.powers = dict(zip(self.names, powers, strict=True))
        self.rng = Random(f"{seed}|swarm")
        self.moves: dict[str, list[float]] = {name: [] for name in self.names}
        self.me = {name: OwnPlacement(name, seed, 0.0) for name in self.names}
        self.state = {name: MigrationState() for name in self.names}
        self.history: dict[str, list[tuple[float, StageClaim | None]]] = {name: [] for name in self.names}
        for name, stage in zip(self.names, stages, strict=True):
            self._say(name, 0.0, stage)

    def _say(self, name: str, at_s: float, stage: int, moves_to: int | None = None, training: bool = True) -> None:
        noise = self.rng.uniform(1 - self.weather.noise, 1 + self.weather.noise)
        may_serve = range(len(self.work)) if may_move(self.me[name], PACE, at_s, 0.5) else ()
        device_s = noise * self.work[stage] / self.powers[name]
        claim = StageClaim(name, stage, at_s, True, device_s, may_serve, moves_to, training)
        self.history[name].append((at_s, claim))

    def truth(self, name: str, at_s: float) -> StageClaim | None:
        return next((claim for since_s, claim in reversed(self.history[name]) if since_s <= at_s), None)

    def read(self, reader: str, now_s: float) -> list[StageClaim]:
        seen = (
            self.truth(name, now_s if name == reader else now_s - self.rng.uniform(0.0, self.weather.lag_s))
            for name in self.names
        )
        return [claim for claim in seen if claim is not None]

    def run(self, until_s: float) -> None:
        looks = [(self.rng.uniform(0.0, PACE.look_s), name) for name in self.names]
        heapq.heapify(looks)
        while looks[0][0] < until_s:
            now_s, name = heapq.heappop(looks)
            again_s = now_s + PACE.look_s * self.rng.uniform(0.9, 1.1)
            own = self.truth(name, now_s)
            if own is not None and own.training:
                # Published a little later than it was known.
                verdict = judged(self.me[name], self.state[name], self.read(name, now_s), self.work, PACE, now_s)
                self.state[name] = verdict.state
                if verdict.go and verdict.move is not None:
                    again_s = self._move(name, now_s, verdict.move.target) + PACE.look_s
                else:
                    self._say(name, now_s, own.stage, verdict.announce)
            heapq.heappush(looks, (again_s, name))

    def _move(self, name: str, now_s: float, target: int) -> float:
        self.moves[name].append(now_s)
        self.history[name].append((now_s, None))
        self.me[name] = OwnPlacement(name, self.seed, now_s + DRAIN_S + COPY_S, len(self.moves[name]))
        self.state[name] = MigrationState()
        self._say(name, now_s + DRAIN_S, target, training=False)
        self._say(name, now_s + DRAIN_S + COPY_S, target)
        return now_s + DRAIN_S + COPY_S

    def final(self) -> list[StageClaim]:
        claims = [self.truth(name, 1e9) for name in self.names]
        return [claim._replace(may_serve=range(len(self.work))) for claim in claims if claim is not None]

    def counts(self) -> list[int]:
        return [sum(claim.stage == stage for claim in self.final()) for stage in range(len(self.work))]

    @property
    def total(self) -> int:
        return sum(map(len, self.moves.values()))


def calm(swarm: Swarm) -> None:
    """Nobody moved more often than the stay allows."""
    for times in swarm.moves.values():
        for moves, (before, now) in enumerate(pairwise([0.0, *times])):
            assert now - before >= stay_s(moves, PACE)
        assert all(sum(begin <= each < begin + 3600.0 for each in times) <= 3 for begin in times)


placements = st.integers(2, 4).flatmap(
    lambda stages: st.tuples(
        st.just(stages),
        st.lists(st.integers(0, stages - 1), min_size=stages, max_size=14).filter(lambda at: len(set(at)) == stages),
    )
)


@settings(max_examples=8)
@given(placements, st.integers(0, 10**6))
def test_equal_replicas_come_to_balance_with_no_move_too_many(placement: tuple[int, list[int]], seed: int) -> None:
    stages, at = placement
    swarm = Swarm([1.0] * len(at), at, (1.0,) * stages, Weather(lag_s=10.0, noise=0.02), seed)
    before = swarm.counts()
    swarm.run(4 * 3600.0)
    counts = swarm.counts()
    # (2, 2, 1) to (3, 1, 1): a stage may have one replica more than it needs, and a difference of one is no gap.
    assert max(counts) - min(counts) <= 1
    assert swarm.total == sum(max(0, was - now) for was, now in zip(before, counts, strict=True))
    calm(swarm)


@settings(max_examples=8)
@given(
    placements,
    st.data(),
    st.sampled_from([Weather(20.0, 0.05), Weather(60.0, 0.05), Weather(240.0, 0.1)]),
    st.integers(0, 10**6),
)
def test_unequal_replicas_come_to_balance_although_their_rosters_disagree(
    placement: tuple[int, list[int]], data: st.DataObject, weather: Weather, seed: int
) -> None:
    stages, at = placement
    size = len(at)
    powers = data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=size, max_size=size))
    work = tuple(data.draw(st.lists(st.sampled_from([1.0, 1.0, 1.6]), min_size=stages, max_size=stages)))
    swarm = Swarm(powers, at, work, weather, seed)
    before = min(capacities(swarm.final(), work))
    swarm.run(6 * 3600.0)
    calm(swarm)
    assert swarm.total <= 2 * size
    final = swarm.final()
    capacity = capacities(final, work)
    assert min(capacity) >= (1 - 2 * weather.noise) * before
    weakest = capacity.index(min(capacity))
    for claim in final:
        # Without this one the stage that it serves would be the weakest, or within a gap of it.
        spare = capacity[claim.stage] - swarm.powers[claim.peer] / work[claim.stage]
        brought = swarm.powers[claim.peer] / work[weakest]
        alone = sum(other.stage == claim.stage for other in final) == 1
        gap = max(0.5 * brought, 0.1 * capacity[weakest])
        assert alone or claim.stage == weakest or spare <= (1 + 4 * weather.noise) * (capacity[weakest] + gap) + 0.05
