"""Runs under churn: when peers are away, when a group is formed, what is charged, and the methods for a few steps."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from noloco_node.sim import clock
from noloco_node.sim.network.link_model import SILENCE_S
from research.laboratory.experiments.cell import Cell, Conditions, Line, Result
from research.laboratory.experiments.hardware_model import LATENCY_S
from research.laboratory.experiments.task import SharedText, Text, run_of
from research.laboratory.experiments.volunteer_grid import METHODS, map_cell, map_grid
from research.laboratory.experiments.volunteer_model import (
    COPY_BYTES,
    MACHINES,
    SETTLED_S,
    STALLING,
    STEP_S,
    absences,
    line_bytes_per_s,
    stalls,
    volunteer_step_s,
)
from research.laboratory.methods.quorum_mean import closes_s, ring, steps_in_time
from research.laboratory.methods.replicas import now_s
from research.laboratory.methods.volunteer_swarm import VolunteerSwarm
from research.laboratory.running import trial

CALM = Conditions(line="100/20", hours=0.5)
seeds = st.integers(0, 2**20)
times = st.floats(0.0, 1e4)
arrivals = st.dictionaries(st.integers(0, 9), times, max_size=10)
members = st.sets(st.integers(0, 9), max_size=10)


def cell(method: str = "gossip", conditions: Conditions = CALM, replicas: int = 3) -> Cell:
    return replace(map_cell(method, conditions, replicas), learning_rate=1e-2, seed=1)


@cache
def ran(cell: Cell) -> Result:
    return trial.run(cell)


def with_swarm(conditions: Conditions, check: Callable[[VolunteerSwarm], Awaitable[None]]) -> None:
    async def checked() -> None:
        await check(VolunteerSwarm(cell(conditions=conditions), lambda share: None))

    clock.run(checked())


class TestSchedules:
    @given(seeds, st.integers(0, 63), st.floats(0.01, 20.0), st.floats(0.1, 12.0))
    def test_absences_follow_each_other(self, seed: int, number: int, churn: float, hours: float) -> None:
        conditions = Conditions(churn=churn, hours=hours)
        found = absences(conditions, seed, number)
        assert found == absences(conditions, seed, number)
        ends = [0.0, *(absence.end_s for absence in found)]
        for end_s, absence in zip(ends, found, strict=False):
            assert end_s <= absence.begin_s <= absence.end_s
            assert absence.begin_s < hours * 3600.0

    def test_nobody_goes_without_churn(self) -> None:
        assert not absences(Conditions(churn=0.0), 0, 0)

    def test_churn_is_departures_an_hour_of_presence(self) -> None:
        conditions = Conditions(churn=0.6, hours=50.0)
        found = [absences(conditions, 0, number) for number in range(200)]
        away_s = sum(absence.end_s - absence.begin_s for peer in found for absence in peer)
        there_h = 200 * 50.0 - away_s / 3600.0
        assert sum(map(len, found)) / there_h == pytest.approx(0.6, rel=0.05)
        kinds = [absence.kind for peer in found for absence in peer]
        assert kinds.count("crash") / len(kinds) == pytest.approx(0.5, abs=0.05)

    @given(seeds, st.sampled_from(get_args(Line)))
    def test_only_the_slowest_line_stalls(self, seed: int, line: Line) -> None:
        found = stalls(Conditions(line=line), seed, 0)
        assert bool(found) == (line == STALLING)
        for before, after in pairwise(found):
            assert before.begin_s <= before.end_s <= after.begin_s

    @given(st.floats(1.0, 16.0))
    def test_the_slowest_machine_is_so_many_times_slower(self, inequality: float) -> None:
        steps_s = [volunteer_step_s(Conditions(inequality=inequality), number) for number in range(2 * MACHINES)]
        assert steps_s[:MACHINES] == sorted(steps_s[:MACHINES]) == steps_s[MACHINES:]
        assert steps_s[0] == STEP_S
        assert max(steps_s) == pytest.approx(inequality * STEP_S)


class TestQuorum:
    @given(arrivals, members, st.floats(0.0, 1e3))
    def test_a_group_waits_for_half_and_no_longer_than_the_grace(
        self, came_s: dict[int, float], believed: set[int], grace_s: float
    ) -> None:
        closed_s, ordered = closes_s(came_s, believed, grace_s), sorted(came_s.values())
        quorum = max(1, math.ceil(len(believed) / 2))
        if len(ordered) < quorum:
            assert closed_s == math.inf
            return
        assert ordered[quorum - 1] <= closed_s <= ordered[quorum - 1] + grace_s
        if believed <= came_s.keys():
            assert closed_s <= ordered[-1]

    @given(st.dictionaries(st.integers(0, 9), times, min_size=1), st.floats(0.0, 1e5))
    def test_all_that_have_come_are_waited_for_within_the_grace(self, came_s: dict[int, float], spare_s: float) -> None:
        spread_s = max(came_s.values()) - min(came_s.values())
        assert closes_s(came_s, came_s.keys(), spread_s + spare_s) == max(came_s.values())

    def test_a_replica_that_is_not_there_at_the_deadline_is_left_out(self) -> None:
        assert closes_s({0: 10.0, 1: 20.0}, {0, 1, 2}, 30.0) == 50.0
        assert closes_s({0: 10.0}, {0, 1, 2}, 30.0) == math.inf
        assert closes_s({0: 10.0, 1: 20.0}, {0, 1}, 30.0) == 20.0

    @given(st.floats(-1e3, 1e4), st.floats(1.0, 1e3), st.integers(1, 99))
    def test_as_many_steps_as_fit(self, left_s: float, step_s: float, most: int) -> None:
        steps = steps_in_time(left_s, step_s, most)
        assert 1 <= steps <= most
        assert steps == 1 or (steps * step_s <= 1.1 * left_s + step_s * 1e-6)
        assert steps == most or (steps + 1) * step_s > 1.1 * left_s

    @given(st.integers(0, 12))
    def test_each_member_of_a_ring_sends_and_hears_once(self, count: int) -> None:
        found = ring(range(count))
        everybody = list(range(count)) if count > 1 else []
        assert sorted(one for one, _ in found) == sorted(other for _, other in found) == everybody
        assert all(one != other for one, other in found)


class TestCharges:
    def test_what_is_sent_takes_its_time_and_the_senders_bytes(self) -> None:
        down, up = line_bytes_per_s("100/20")
        assert down == 5 * up

        async def check(swarm: VolunteerSwarm) -> None:
            first, second, third = swarm.replicas
            await swarm.send(first, second, 10 * up)
            assert now_s() == pytest.approx(10.0 + LATENCY_S)
            # Two that leave one line share it; two that reach one do not feel each other.
            await asyncio.gather(swarm.send(first, second, up), swarm.send(first, third, up))
            assert now_s() == pytest.approx(12.0 + 2 * LATENCY_S)
            await asyncio.gather(swarm.send(first, third, up), swarm.send(second, third, up))
            assert now_s() == pytest.approx(13.0 + 3 * LATENCY_S)
            assert [swarm.sent(one) for one in swarm.replicas] == pytest.approx([13 * up, up, 0.0])

        with_swarm(CALM, check)

    def test_a_copy_is_charged_to_its_donor(self) -> None:
        async def check(swarm: VolunteerSwarm) -> None:
            newcomer, donor, _ = swarm.replicas
            swarm.enter(donor)
            assert await swarm.copy(newcomer, lambda one: one.number) == 1
            assert now_s() == pytest.approx(COPY_BYTES / line_bytes_per_s("100/20")[1] + LATENCY_S)
            assert [swarm.sent(one) for one in swarm.replicas] == pytest.approx([0.0, COPY_BYTES, 0.0])

        with_swarm(CALM, check)

    def test_where_nobody_is_ready_the_last_that_was_goes_on_and_the_others_wait_for_it(self) -> None:
        async def check(swarm: VolunteerSwarm) -> None:
            last, other, _ = swarm.replicas
            waiting = asyncio.create_task(swarm.copy(other, lambda one: one.number))
            await asyncio.sleep(1000.0)
            assert not waiting.done()
            assert await swarm.copy(last, lambda one: one.number) is None
            swarm.enter(last)
            assert await waiting == last.number

        with_swarm(CALM, check)

    def test_a_replica_that_came_back_just_now_is_not_in_the_model(self) -> None:
        async def check(swarm: VolunteerSwarm) -> None:
            settled, newcomer, _ = swarm.replicas
            swarm.enter(settled)
            await asyncio.sleep(1.0)
            newcomer.load([tuple(map(torch.zeros_like, part)) for part in newcomer.weights()])
            swarm.enter(newcomer)
            assert all(map(torch.equal, swarm.mean()[0], settled.weights()[0]))
            await asyncio.sleep(SETTLED_S)
            assert all(map(torch.equal, swarm.mean()[0], (tensor / 2 for tensor in settled.weights()[0])))

        with_swarm(CALM, check)

    def test_a_peer_that_vanishes_breaks_what_is_under_way(self) -> None:
        churn = replace(CALM, churn=6.0)
        leaver, gone_s = min(
            ((number, found[0].begin_s) for number in range(3) if (found := absences(churn, 1, number))),
            key=lambda each: each[1],
        )

        async def check(swarm: VolunteerSwarm) -> None:
            one = swarm.replicas[leaver]
            broke_s: list[float] = []

            async def life(replica: object) -> None:
                if replica is one and not broke_s:
                    asyncio.get_running_loop().create_task(sending())
                await asyncio.sleep(math.inf)

            async def sending() -> None:
                with pytest.raises(ConnectionError):
                    await swarm.send(swarm.replicas[leaver - 1], one, 1e12)
                broke_s.append(now_s())

            await swarm.live(life, lambda replica: None)
            assert broke_s == pytest.approx([gone_s + SILENCE_S])
            up = line_bytes_per_s("100/20")[1]
            assert swarm.sent(swarm.replicas[leaver - 1]) == pytest.approx(gone_s * up)

        with_swarm(churn, check)

    def test_a_mean_sends_twice_a_set_less_a_share(self) -> None:
        result = ran(cell("quorum_mean"))
        coded = 1e9 / 2 * (1 + 2 * 8 / (128 * 4))
        sent = result.bytes_per_step * sum(result.steps_taken)
        assert result.rounds == result.notes["rounds"] >= 1
        # What is under way at the end counts too.
        assert result.rounds <= sent / (3 * 2 * (2 / 3) * coded) <= result.rounds + 1

    def test_a_meeting_sends_a_set_each(self) -> None:
        result = trial.run(cell("gossip", replicas=2))
        sent = result.bytes_per_step * sum(result.steps_taken)
        # What is under way at the end counts too.
        assert result.notes["met"] * 0.5e9 <= sent <= (result.notes["met"] + 2) * 0.53e9


class TestRuns:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_run_under_churn_ends_by_the_clock_and_is_the_same_again(self, method: str) -> None:
        churn = Conditions(churn=4.0, inequality=2.0, line="1000/1000", hours=0.6)
        result = trial.run(cell(method, churn))
        assert result.virtual_s == pytest.approx(0.6 * 3600.0)
        assert result.curve[0].merged > result.curve[-1].merged
        assert result.merged == pytest.approx(sum(result.held_out) / len(result.held_out))
        assert 0.0 < result.busy < 1.0
        again = trial.run(cell(method, churn))
        assert (again.held_out, again.steps_taken, again.notes) == (result.held_out, result.steps_taken, result.notes)

    def test_nobody_waits_but_before_the_barrier(self) -> None:
        busy = {method: ran(cell(method)).busy for method in METHODS}
        # All but the step that the end cuts off.
        assert busy["gossip"] == busy["late_mean"] == pytest.approx(1.0 - STEP_S / 1800.0)
        assert 0.5 < busy["quorum_mean"] < 0.9

    @settings(max_examples=3, deadline=None)
    @given(st.integers(0, 3))
    def test_a_shared_text_is_the_same_text(self, number: int) -> None:
        run = run_of(cell())
        alone, shared, again = Text(run, number), SharedText(run, number), SharedText(run, number)
        for _ in range(3):
            expected = alone.draw()
            for text in (shared, again):
                assert all(map(lambda one, other: bool((one == other).all()), text.draw(), expected))


def test_all_methods_of_a_place_have_the_same_schedule_and_choices() -> None:
    grid = map_grid(1)
    assert len({recipe.name for recipe in grid.recipes}) == len(grid.recipes)
    for recipe in grid.recipes:
        cell = recipe.cell
        assert (cell.codec, cell.dynamic, cell.weighed, cell.late_inner_steps is not None) == ("int4", True, True, True)
