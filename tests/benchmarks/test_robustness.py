"""The benchmarks that kill peers and watch memory: how they judge; and a real swarm that loses a peer for a while."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from process_swarm import run_file

from benchmarks.robustness import chaos, fuzz, memory_soak
from benchmarks.robustness.chaos import Case, Chaos, Rhythm
from benchmarks.robustness.process_swarm import Shape, Swarm
from noloco_node.journal.events import Event, Finished, InnerStep, Started

CALM = Case(
    steps=100,
    seconds=600.0,
    tokens=10**6,
    kills=(),
    lives=9,
    ended=(),
    unfinished=(),
    longest_pause_s=4.0,
    merged=2.0,
    single=2.1,
)


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({"merged": 2.09}, [True, True, True, True]),
        ({"merged": 1.5}, [True, True, True, True]),
        ({"merged": 2.11}, [True, True, True, False]),
        ({"merged": math.nan}, [True, True, True, False]),
        ({"longest_pause_s": 121.0}, [True, True, False, True]),
        ({"unfinished": ("1b",)}, [True, False, True, True]),
        ({"ended": ("0a",)}, [False, True, True, True]),
    ],
)
def test_each_claim_fails_by_what_it_is_about(change: dict[str, object], held: list[bool]) -> None:
    other = msgspec.structs.replace(CALM, **change)
    assert list(chaos.claims(CALM, other).values()) == held
    told = "\n".join(chaos.report(CALM, other))
    assert told.count("NO  ") == held.count(False)
    for names in (other.ended, other.unfinished):
        assert all(name in told for name in names)


@st.composite
def lives_of_a_peer(draw: st.DrawFn) -> tuple[list[Event], list[float], float]:
    """A journal, when each life was cut off, and the longest pause, life by life."""
    events: list[Event] = []
    cuts, longest_s, now_s = list[float](), 0.0, 1000.0
    seconds = st.floats(0.0, 500.0)
    for _ in range(draw(st.integers(1, 4))):
        events.append(Started(peer="p", stage=0, run="r", version="v", at=now_s))
        for step in range(draw(st.integers(0, 4))):
            took_s = draw(seconds)
            now_s += took_s
            events.append(stepped(now_s, took_s))
            # The first one of a life waits for its swarm.
            longest_s = max(longest_s, took_s if step else 0.0)
        left_s, last = draw(seconds), events[-1]
        now_s += left_s
        if isinstance(last, InnerStep):
            longest_s = max(longest_s, left_s)
        if draw(st.booleans()):
            finished = Finished(why="over", step=1, round=1, progress=1.0, discarded=0, at=now_s)
            events.append(finished)
            now_s += draw(seconds)  # it lingers
        cuts.append(now_s)
        now_s += draw(seconds) + 1.0
    return events, cuts, longest_s


def stepped(at: float, seconds: float) -> InnerStep:
    return InnerStep(step=1, progress=0.0, loss=None, tokens=1, seconds=seconds, learning_rate=0.1, at=at)


@given(lives_of_a_peer())
def test_the_longest_pause_is_one_of_a_life_and_not_between_two(life: tuple[list[Event], list[float], float]) -> None:
    events, cuts, longest_s = life
    assert chaos.longest_pause_s(events, cuts) == pytest.approx(longest_s, abs=1e-6)


def test_a_peer_that_hangs_for_good_is_seen_though_it_never_says_so() -> None:
    begin = Started(peer="p", stage=0, run="r", version="v", at=1.0)
    assert chaos.longest_pause_s([begin, stepped(10.0, 9.0)], [400.0]) == 390.0
    assert chaos.longest_pause_s([begin, stepped(10.0, 9.0)], [140.0, 400.0]) == 130.0
    assert chaos.longest_pause_s([begin], [400.0]) == 0.0


@given(
    slope=st.floats(-1e3, 1e3),
    level=st.floats(-1e6, 1e6),
    count=st.integers(40, 200),
    blocks=st.integers(3, 12),
)
def test_a_line_has_its_slope_and_no_error(slope: float, level: float, count: int, blocks: int) -> None:
    found = memory_soak.slope([(5.0 * at, level + slope * 5.0 * at) for at in range(count)], blocks)
    assert found.per_s == pytest.approx(slope, abs=1e-6)
    assert found.error_per_s == pytest.approx(0.0, abs=1e-6)


def test_the_error_covers_what_wandering_memory_makes_of_a_flat_line() -> None:
    """Memory wanders from look to look: the error must say so, nineteen times of twenty."""
    inside = 0
    for seed in range(300):
        rng, level, points = Random(seed), 0.0, []
        for at in range(720):
            level = 0.9 * level + rng.gauss(0.0, 1.0)
            points.append((5.0 * at, 1e3 + level))
        found = memory_soak.slope(points)
        inside += abs(found.per_s) <= 2.3 * found.error_per_s
    assert inside / 300 > 0.9


def test_too_few_looks_have_no_slope() -> None:
    assert math.isnan(memory_soak.slope([(0.0, 1.0), (1.0, 2.0)]).per_s)


def look(at: int, memory_bytes: float, descriptors: int = 10) -> memory_soak.Look:
    return memory_soak.Look(
        process="p", at_s=5.0 * at, memory_bytes=round(memory_bytes), descriptors=descriptors, tasks=7
    )


def test_growth_is_told_from_noise_and_from_what_harms_nobody() -> None:
    rng = Random(1)
    wander = [1e6 * rng.gauss(0.0, 1.0) for _ in range(720)]
    flat = memory_soak.course("p", [look(at, 4e8 + wander[at]) for at in range(720)])
    leaks = memory_soak.course("p", [look(at, 4e8 + 1e4 * 5 * at + wander[at]) for at in range(720)])
    little = memory_soak.course("p", [look(at, 4e8 + 500 * 5 * at) for at in range(720)])
    opens = memory_soak.course("p", [look(at, 4e8, descriptors=10 + at // 50) for at in range(720)])
    assert flat.flat
    assert flat.holds
    assert not leaks.flat
    assert leaks.slope_bytes_per_h == pytest.approx(3.6e7, rel=0.1)
    assert little.flat
    assert not opens.holds
    text = memory_soak.report([flat, leaks, opens])
    assert [line.endswith("GROWS") for line in text[1:]] == [False, True, True]


@pytest.mark.network
def test_a_peer_that_is_killed_stops_nobody_and_comes_back_with_its_home(tmp_path: Path) -> None:
    """The short form of the benchmark: two by two, one kill, and as much time as a busy machine may need."""

    async def main() -> Swarm:
        async with Swarm(tmp_path, Shape(2, 2), run_file(tmp_path).read_text()) as swarm:
            await swarm.until(lambda: all(peer.steps >= 2 for peer in swarm.peers), "all take part", LAST_RESORT_S)
            strikes = Chaos(swarm, Rhythm(every_s=0.0, back_s=0.0), seed=0)
            strikes.look(going_on=True)
            (kill,) = strikes.kills
            (victim,) = [peer for peer in swarm.peers if peer.name == kill.peer]
            await swarm.until(lambda: not victim.runs, "it is dead", LAST_RESORT_S)
            others = [peer for peer in swarm.peers if peer is not victim]
            before = {peer: peer.steps for peer in others}
            await swarm.until(lambda: all(p.steps >= before[p] + 3 for p in others), "the others go on", LAST_RESORT_S)
            strikes.look(going_on=False)
            assert len(victim.lives) == 2
            await swarm.until(lambda: victim.steps >= 2, "it is back", LAST_RESORT_S)
            strikes.look(going_on=False)
            assert strikes.ended == []
            assert all(len(peer.lives) == 1 and peer.runs for peer in others)
        return swarm

    swarm = asyncio.run(main())
    assert swarm.children.running() == []
    assert sum(len(peer.lives) for peer in swarm.peers) == 5  # one of the four twice


# Broken messages.


def test_the_decoder_makes_a_message_or_a_violation_of_whatever_comes() -> None:
    tracemalloc.start()
    try:
        fuzz.outcomes(0, 2_000)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        fuzz.outcomes(1, 2_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    declared = max(chosen.cap_bytes for chosen in fuzz.fuzzed_schemas())
    # A long header is there twice for a moment, as bytes and decoded; the rest is a good message's.
    assert peak - before < 3 * declared
    seen = fuzz.outcomes(2, 96_000)
    assert seen.keys() == {"violation", "message", "waits for more"}
    assert min(seen.values()) > 5_000
