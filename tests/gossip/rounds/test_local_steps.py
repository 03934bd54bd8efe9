"""How long a round is: for a slow replica, over a run, and for replicas that claim what they like."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import median_low

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_gossip import Toy, ToySettings, World
from user_errors import user_error

from gossip.interface import UNKNOWN, Candidate, OuterStepTaken, RoundProgress, RoundSkipped
from gossip.rounds.matching import (
    LARGEST_MULTIPLE,
    TOLERANCE,
    RoundClaims,
    RoundSchedule,
    dynamic_steps,
    fastest,
    local_step_count,
    steps_per_round,
)
from gossip.rule.outer_step import Outer
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.device import Device, WallClock
from noloco_node.run.peer_state import PeerState
from noloco_node.run.runfile import decode_run
from noloco_node.sim import world as sim
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher
from noloco_node.swarm.roster import PeerRecord, speed
from noloco_node.swarm.run_distribution import RunFileText

REFERENCE = Outer(alpha=0.5, beta=0.7, gamma=0.7)
speeds = st.floats(1e-6, 1e6)
claims = st.lists(st.floats(), max_size=8)
lengths = st.integers(1, 10_000)
MODEL = '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'


# Dynamic local updates.


@given(speeds, st.lists(st.floats(1.0, 1.0 + TOLERANCE - 1e-9), max_size=8), lengths)
def test_measured_speeds_of_equal_machines_cost_nobody_a_step(slowest: float, factors: list[float], steps: int) -> None:
    assert dynamic_steps(slowest, [slowest * factor for factor in factors], steps) == steps


@given(speeds, st.lists(st.floats(1e-6, 1e6), max_size=8), lengths)
def test_the_steps_are_the_papers_up_to_the_tolerance(own: float, others: list[float], steps: int) -> None:
    highest = fastest(own, others)
    found = dynamic_steps(own, others, steps)
    assert max(1, math.floor(own / highest * steps * (1 - 1e-9))) <= found <= steps
    # Nobody comes to its round later than the fastest by more than the tolerance, unless one step alone takes so long.
    assert found == 1 or found / own <= (1 + TOLERANCE) * steps / highest * (1 + 1e-9)


@given(speeds, speeds, st.lists(speeds, max_size=8), lengths)
def test_whoever_is_faster_takes_no_fewer_steps(own: float, other: float, others: list[float], steps: int) -> None:
    slow, fast = sorted((own, other))
    stage = [slow, fast, *others]
    assert dynamic_steps(slow, [fast, *others], steps) <= dynamic_steps(fast, [slow, *others], steps) <= steps
    assert dynamic_steps(max(stage), stage, steps) == steps


@given(speeds, st.lists(speeds, max_size=8), lengths, st.integers(-20, 20))
def test_the_unit_of_speed_does_not_matter(own: float, others: list[float], steps: int, power: int) -> None:
    unit = 2.0**power
    scaled = dynamic_steps(own * unit, [other * unit for other in others], steps)
    assert scaled == dynamic_steps(own, others, steps)


@given(speeds, claims, lengths)
def test_what_is_no_speed_is_passed_over(own: float, others: list[float], steps: int) -> None:
    known = [claim for claim in others if math.isfinite(claim) and claim > 0]
    assert dynamic_steps(own, others, steps) == dynamic_steps(own, known, steps)
    assert 1 <= dynamic_steps(own, others, steps) <= steps


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan, math.inf])
def test_a_replica_that_does_not_know_its_own_speed_takes_all_steps(unknown: float) -> None:
    assert dynamic_steps(unknown, [1.0, 4.0], 50) == 50


@given(st.lists(speeds, min_size=1, max_size=9), claims, lengths)
def test_a_liar_does_not_stop_the_others(honest: list[float], lies: list[float], steps: int) -> None:
    # As long as no more lie than are honest, the lower median of all is at most the honest ones' highest.
    lies = lies[: len(honest)]
    for number, own in enumerate(honest):
        others = [*honest[:number], *honest[number + 1 :], *lies]
        believed = fastest(own, others)
        assert own <= believed <= max(own, LARGEST_MULTIPLE * max(honest))
        least = own / (LARGEST_MULTIPLE * max(honest)) * steps
        assert dynamic_steps(own, others, steps) >= max(1, math.floor(least * (1 - 1e-9)))


@given(st.lists(speeds, min_size=1, max_size=9))
def test_an_honest_stage_is_believed(stage: list[float]) -> None:
    middle = median_low(stage)
    bounded = [min(one, LARGEST_MULTIPLE * middle) for one in stage]
    assert fastest(bounded[0], bounded[1:]) == max(bounded)


# H over the run.


@given(lengths, lengths, st.lists(st.floats(allow_nan=False), min_size=2))
def test_the_length_of_a_round_goes_from_one_end_to_the_other(early: int, late: int, progress: list[float]) -> None:
    course = [steps_per_round(one, early, late) for one in sorted(progress)]
    assert course == sorted(course, reverse=late < early)
    assert all(isinstance(steps, int) and min(early, late) <= steps <= max(early, late) for steps in course)
    assert steps_per_round(0.0, early, late) == early
    assert steps_per_round(1.0, early, late) == late
    assert {steps_per_round(one, early, None) for one in progress} == {early}


def test_the_course_is_geometric() -> None:
    assert [steps_per_round(part / 4, 5, 80) for part in range(5)] == [5, 10, 20, 40, 80]
    assert [steps_per_round(part / 4, 80, 5) for part in range(5)] == [80, 40, 20, 10, 5]
    assert steps_per_round(math.nan, 5, 80) == 5


@given(st.builds(RoundProgress, st.floats(0, 1), speeds), st.lists(speeds, max_size=5), st.booleans(), lengths, lengths)
def test_the_settings_say_what_is_followed(
    going: RoundProgress, others: list[float], dynamic: bool, early: int, late: int
) -> None:
    plain = ToySettings(seed=0, **REFERENCE._asdict(), inner_steps_per_round=early)
    assert local_step_count(plain, going, others) == early
    both = replace(plain, late_inner_steps_per_round=late, dynamic_steps=dynamic)
    planned = steps_per_round(going.progress, early, late)
    assert local_step_count(both, going, others) == (
        dynamic_steps(going.speed, others, planned) if dynamic else planned
    )
    assert local_step_count(both, UNKNOWN, others) == early


# The cadence of rounds that differ in length.


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(0, 100))
def test_each_round_lasts_as_long_as_was_settled_when_it_was_opened(lasting: list[int], begun: int) -> None:
    """The k-th opening settles `lasting[k]`; what is said in between does not move an opening that is settled."""
    round_schedule = RoundSchedule(50, rounds=0, inner_steps=begun, unknown_s=99.0)
    opened_at, step = [begun], begun
    while len(opened_at) < len(lasting):
        step += 1
        opened = len(opened_at) - 1
        # Before the first opening the newest word counts, afterwards only that of the tick before an opening.
        due_at = opened_at[-1] + lasting[opened]
        round_schedule.tick(
            step, 0.5, lasting[opened + 1] if opened and step == due_at else 1 if opened else lasting[0]
        )
        assert round_schedule.steps == lasting[opened]
        assert round_schedule.due == (step >= due_at)
        assert round_schedule.ready_in_s == 0.5 * max(1, due_at - step)
        if round_schedule.due:
            round_schedule.tick(step, 0.5, lasting[opened + 1])
            round_schedule.open(RoundClaims())
            opened_at.append(step)
            assert not round_schedule.due
            assert round_schedule.preference_delay_s(1, 2) == 0.5 * 0.5 * lasting[opened + 1]
    assert [after - before for before, after in pairwise(opened_at)] == lasting[: len(opened_at) - 1]


class Paced(Toy):
    """A toy that says how it gets on."""

    going = UNKNOWN

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            self.inner_steps += 1
            await self.rounds.between_steps(self.inner_steps, 1.0, self.going)


async def test_rounds_are_opened_as_the_settings_the_roster_and_the_progress_say() -> None:
    settings = ToySettings(seed=3, **REFERENCE._asdict(), inner_steps_per_round=20, dynamic_steps=True)

    toy = Paced(World(), "slow", replace(settings, late_inner_steps_per_round=80, skips_before_solo=100))
    toy.stale_list = (Candidate("ghost", 0, 4.0),)
    toy.going = RoundProgress(0.0, 1.0)
    opened = []
    for step in range(1, 60):
        before = len(toy.events)
        toy.going = RoundProgress(0.0 if step < 20 else 1.0, 1.0)
        await toy.train(1)
        if len(toy.events) > before:
            opened.append(step)
    assert all(isinstance(event, RoundSkipped) for event in toy.events)
    # A quarter of the speed: 5 steps, with the tolerance, of 20 while the run is young, and 22 of 80 at its end. A
    # round is skipped when the next is due.
    assert opened == [10, 15, 20, 42]


# In the run file, the roster and a whole swarm.


@pytest.mark.parametrize(
    ("outer", "field", "why", "advice"),
    [
        ("late_inner_steps_per_round = 0", "outer.late_inner_steps_per_round = 0", "outside 1 to", "from 1"),
        (
            "late_inner_steps_per_round = 2.5",
            "outer.late_inner_steps_per_round",
            "whole number or left out",
            "or leave it out",
        ),
        ("late_inner_steps_per_round = 8", "outer.overlap_steps = 8", "every 10 to 8 inner", "below outer.late_inner"),
        (
            "inner_steps_per_round = 8\nlate_inner_steps_per_round = 50",
            "outer.overlap_steps = 8",
            "every 8 to 50 inner",
            "below outer.inner_steps_per_round",
        ),
        ("dynamic_steps = 1", "outer.dynamic_steps", "should be true or false", "true or false"),
    ],
)
def test_contradictory_settings_are_refused_with_the_reason(outer: str, field: str, why: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        decode_run(MODEL + f"[outer]\n{outer}\n", "run.toml")
    assert field in caught.value.what
    assert why in caught.value.why
    assert advice in caught.value.hint


@given(st.floats())
def test_a_record_s_speed_is_its_device_s_or_unknown(device_s: float) -> None:
    record = PeerRecord(peer="p", stage=0, state=PeerState.TRAINING, device_s=device_s)
    assert record.speed == speed(device_s) == (1 / device_s if device_s > 0 else 0.0)


class _Time:
    """Time of a thread that has its core for half of the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.core_s = 7.0
        self.slept: list[float] = []

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.core_s += seconds / 2

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)

    def wall(self) -> WallClock:
        return WallClock(lambda: self.now_s, lambda: self.core_s, self.sleep)


@pytest.mark.real_time
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=5), st.floats(1, 20))
async def test_a_slowed_device_is_a_slower_one_by_its_own_clock_and_by_the_walls(
    jobs: list[float], slowdown: float
) -> None:
    time = _Time()
    device = Device(torch.device("cpu"), slowdown, time.wall())

    def job(seconds: float) -> float:
        begun_s = device.clock()
        time.work(seconds)
        return device.clock() - begun_s

    measured = [await device.run(job, seconds) for seconds in jobs]
    device.close()
    assert measured == pytest.approx([slowdown * seconds for seconds in jobs])
    assert time.now_s == pytest.approx(100.0 + slowdown * sum(jobs)) == device.clock()
    assert time.slept == pytest.approx([(slowdown - 1) * seconds for seconds in jobs] if slowdown > 1 else [], abs=1e-9)
    # What the thread waited for a core is not its work; on a GPU nobody else is in the way.
    assert device.busy_s == pytest.approx(slowdown * sum(jobs) / 2)


@pytest.mark.real_time
async def test_a_job_that_fails_costs_a_slowed_device_its_time_too() -> None:
    time = _Time()
    device = Device(torch.device("cpu"), 4.0, time.wall())

    def job() -> None:
        time.work(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await device.run(job)
    device.close()
    assert (time.now_s, time.slept) == (104.0, [3.0])


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -1.0, 1001.0, math.inf, math.nan])
def test_a_device_is_slowed_down_within_reason(slowdown: float) -> None:
    with user_error(Exit.USAGE):
        Device(torch.device("cpu"), slowdown)


class _Watcher(Watcher):
    """Counts what each peer of a simulated world does."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.device_s, self.worked_s = defaultdict[str, float](float), defaultdict[str, float](float)
        self.met, self.missed = Counter[str](), Counter[str]()

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        match event:
            case events.InnerStep():
                self.steps[peer.name] = event.step
                if event.step > 10:  # the speeds are known by then
                    self.device_s[peer.name] += event.device_s
                    self.worked_s[peer.name] += event.seconds
            case OuterStepTaken(partner=str()):
                self.met[peer.name] += 1
            case OuterStepTaken() | RoundSkipped():
                self.missed[peer.name] += 1

    def busy(self, name: str) -> float:
        return self.device_s[name] / self.worked_s[name]


def _swarm(factor: float, *, dynamic: bool, stages: int = 1) -> _Watcher:
    """Simulate stages of two production nodes each, of which the very last is `factor` times slower."""
    text = (
        f"[swarm]\nstages = {stages}\nreplicas = 2\nrounds = 6\ninner_steps_per_round = 20\nrefresh_s = 2.0\n"
        "microbatches_per_step = 4\n[network]\nlatency = {mean_s = 0.001}\n"
        f"[[fault]]\nkind = 'slow'\nat_s = 0.0\npeer = 's{stages - 1}r1'\nfactor = {factor}\n"
    )
    setting = build_setup(decode_scenario(text, "the test's scenario"))
    outer = replace(setting.run.outer, dynamic_steps=dynamic)
    recipe = RunFileText.made(msgspec.structs.replace(setting.run, outer=outer))
    watcher = _Watcher()
    sim.simulate(setting._replace(recipe=recipe), lambda world: [watcher], lambda world: None)
    return watcher


def test_a_slow_node_reaches_its_rounds_together_with_a_fast_one() -> None:
    paced, even = _swarm(4.0, dynamic=True), _swarm(1.0, dynamic=True)
    fast, slow = paced.steps["s0r0"], paced.steps["s0r1"]
    assert 3.0 < fast / slow < 5.0
    assert abs(paced.met["s0r0"] - paced.met["s0r1"]) <= 1
    assert paced.met["s0r0"] > 2 * sum(paced.missed.values())
    # With the same number of steps a round the fast one finds nobody three times out of four.
    constant = _swarm(4.0, dynamic=False)
    assert constant.missed["s0r0"] > constant.met["s0r0"]
    # And it works as much as among equals.
    assert paced.busy("s0r0") > 0.95 * even.busy("s0r0")


def test_a_slow_node_costs_its_own_stage_nothing_and_the_others_what_they_cannot_pass_on() -> None:
    uneven, even = _swarm(4.0, dynamic=True, stages=2), _swarm(1.0, dynamic=True, stages=2)
    # A little is lost until its replies have shown that it is the faster one.
    assert uneven.busy("s1r0") > 0.9 * even.busy("s1r0")
    # A stage at 1 + 1/4 of its 2 replicas takes no more than that from the one before.
    capacity = 1.25 / 2
    for source in ("s0r0", "s0r1"):
        assert 0.9 * capacity < uneven.busy(source) / even.busy(source) < 1.05 * capacity
    assert abs(uneven.met["s1r0"] - uneven.met["s1r1"]) <= 1
    assert sum(uneven.missed.values()) <= 0.2 * sum(uneven.met.values())
