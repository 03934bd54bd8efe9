"""What a record says of the next hops, few at a time and none passed over for ever; a device that becomes slow; why
nothing comes back, and why nobody is met.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter
from noloco_node.node.reporting import (
    STALLS,
    UNDER_WAY,
    DeviceSpeed,
    HopSample,
    MissedMeetings,
    ProgressReporter,
    Stall,
)
from noloco_node.run.peer_state import LONGEST_DETAIL, PeerState
from noloco_node.swarm.roster import HOP_LETTERS, MOST_HOPS
from pipeline.messages import Reason

PEERS = [f"12D3KooW{number:044d}" for number in range(9)]


@given(st.lists(st.lists(st.integers(0, 50), min_size=9, max_size=9), min_size=1, max_size=12))
def test_what_is_told_of_each_adds_up_to_what_it_took(grown: list[list[int]]) -> None:
    sample, counts, told = HopSample(0.0), Counter[str](), Counter[str]()
    told_at = dict.fromkeys(PEERS, 0.0)
    by_end = {peer[-HOP_LETTERS:]: peer for peer in PEERS}
    for number, growth in enumerate((*grown, *5 * [9 * [0]]), 1):
        now_s = 60.0 * number
        counts.update(dict(zip(PEERS, growth, strict=True)))
        hops = sample.take(dict(counts), now_s)
        assert len(hops) <= MOST_HOPS
        for end, per_minute in hops:
            peer = by_end[end]
            told[peer] += round(per_minute * (now_s - told_at[peer]) / 60.0)
            told_at[peer] = now_s
    # Of a rate that is a whole number a little is lost or made up at each telling.
    assert all(abs(told[peer] - counts[peer]) <= len(grown) + 5 for peer in PEERS)
    assert all(told[peer] for peer in PEERS if counts[peer] > len(grown) + 5)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 9)), max_size=40))
def test_a_device_that_becomes_ten_times_as_slow_is_told_of_once(looks: list[tuple[float, int]]) -> None:
    """Each look: seconds a microbatch since the last one, and how many there were."""
    speed, busy_s, microbatches = DeviceSpeed(), 0.0, 0
    assert speed.look(0.0, 0) is None
    least_s, slow, told = float("inf"), 0, list[float]()
    for mean_s, number in looks:
        busy_s, microbatches = busy_s + mean_s * number, microbatches + number
        found = speed.look(busy_s, microbatches)
        if number:
            least_s = min(least_s, mean_s)
            slow = slow + 1 if mean_s > (1 - 1e-6) * DeviceSpeed.TIMES * least_s else 0
        if found is not None:
            assert slow >= DeviceSpeed.LOOKS
            assert found > (1 - 1e-6) * DeviceSpeed.TIMES
            told.append(found)
    assert len(told) <= 1


async def test_a_slow_device_is_said_and_journalled() -> None:
    said, recorded = list[str](), list[Any]()
    device, statistics = SimpleNamespace(busy_s=0.0), {"succeeded": 0}
    context = SimpleNamespace(
        run=None,
        options=SimpleNamespace(refresh_s=60.0),
        membership=None,
        network=None,
        reporter=Reporter(record=recorded.append, say=said.append),
        host=SimpleNamespace(device=device),
    )
    replica: Any = SimpleNamespace(worker=SimpleNamespace(statistics=lambda: statistics))
    reporter = ProgressReporter(cast(Any, context), replica, lambda: PeerState.TRAINING)
    for mean_s in (0.1, 0.1, 2.0, 2.0, 2.0, 2.0):
        device.busy_s += 10 * mean_s
        statistics["succeeded"] += 10
        reporter._look_at_speed()
    assert [text.partition(" times")[0] for text in said] == ["a microbatch takes the device 20"]
    assert recorded == [events.Noticed(what="device", text=said[0])]


def test_a_process_that_was_stopped_once_is_no_slow_device() -> None:
    speed = DeviceSpeed()
    totals = [(10.0 * number, 10 * number) for number in range(5)]
    stopped = [(busy_s + 3600.0, number) for busy_s, number in totals[2:]]
    assert [speed.look(*each) for each in (*totals[:2], *stopped)] == [None] * 5
    paged = [(3640.0 + 200.0 * number, 40 + 10 * number) for number in range(1, 5)]
    assert [speed.look(*each) for each in paged] == [None, None, 20.0, None]


KINDS_OF_ROUND = st.sampled_from(["solo"] * 4 + ["declined", "unanswered", "lost"] * 2 + ["met"])


@given(st.lists(st.tuples(KINDS_OF_ROUND, st.sampled_from([1, 2, 3, 1, 2, 3, 0])), min_size=10))
def test_a_replica_that_trains_alone_beside_others_is_told_why(story: list[tuple[str, int]]) -> None:
    missed, totals, since = MissedMeetings(), Counter[str](), Counter[str]()
    names = ("met", "solo", "declined", "unanswered", "lost")
    missed.look(dict.fromkeys(names, 0), 0, 1, 1, {})
    reasons = {"unanswered": "line is down", "lost": "not finite"}
    for what, others in story:
        totals[what] += 1
        since[what] += 1
        found = missed.look({name: totals[name] for name in names}, 3 * others, others, 1, reasons)
        if what == "met" or not others:
            since.clear()
        assert (found is not None) == (since["solo"] >= MissedMeetings.ALONE)
        if found is not None:
            assert f"{since['solo']} outer steps in a row" in found.text
            assert f"lists {others} more of stage 1" in found.text
            for name, words in (("declined", "declined:"), ("unanswered", "line is down"), ("lost", "not finite")):
                assert (words in found.text) == (since[name] > 0)
            assert f"partners left alone for now: {3 * others}" in found.text


KINDS = sorted(set(STALLS) - {"here", *UNDER_WAY})
LOOKS = st.tuples(
    st.floats(1.0, 100.0),
    st.booleans(),
    st.dictionaries(st.sampled_from(KINDS), st.integers(1, 4) | st.integers(1, 10**9)),
    st.sampled_from(["idle", "busy", "waits", "steps"]),
)


@given(st.lists(LOOKS, max_size=30), st.integers(0, 3), st.floats(10.0, 500.0))
def test_a_stall_is_told_with_all_that_came_since_the_last_gradient_and_nothing_before(
    looks: list[tuple[float, bool, dict[str, int], str]], stage: int, patience_s: float
) -> None:
    """A step, and a source that draws nothing, begin the wait anew."""
    stall, now_s, last_s, anew = Stall(), 0.0, 0.0, stage == 0
    totals, since = Counter[str](), Counter[str]()
    place = {"gate.window": 4.0, "gate.succeeded": 1.0}
    stall.look({"worker.succeeded": 0, "gate.in_flight": 0, **place}, now_s, patience_s, stage)
    for passed_s, came, counts, what in looks:
        now_s, away, waits, steps = now_s + passed_s, what == "busy", what == "waits", what == "steps"
        totals["worker.succeeded"] += came
        totals.update(counts)
        since.update(counts)
        if came or anew:
            last_s, since = now_s, Counter()
        anew = steps or not (away or waits or stage or since)
        now = place | {"gate.succeeded": 4.0 * steps, "gate.in_flight": 3.0 * (away or waits)}
        now |= {"downstream.calls": 1.0 * away, "downstream.waiting": 3.0 * waits}
        found = stall.look({**totals, **now}, now_s, patience_s, stage)
        assert (found is not None) == (now_s - last_s >= patience_s and not anew)
        if found is None:
            continue
        assert len(found.brief) <= LONGEST_DETAIL, "readers of records refuse a longer one"
        told = since + Counter({"downstream.calls": 1 * away, "here": 2 * away, "downstream.waiting": 3 * waits})
        for name, (words, _) in STALLS.items():
            assert (f"{told[name]} {words.format(below=stage + 1)}" in found.text) == (told[name] > 0)
        if told:
            most = next(name for name in STALLS if told[name] == max(told.values()))
            assert found.text.endswith(f"Try: {STALLS[most][1].format(below=stage + 1)}")
        else:
            assert f"from stage {stage - 1}" in found.text
    stall.end()
    assert (
        stall.look({"worker.succeeded": 0, **totals, **place, "gate.in_flight": 1.0}, now_s + 9e9, patience_s, stage)
        is None
    )


def test_a_stall_counts_each_reason_for_which_a_later_stage_refuses_microbatches() -> None:
    of_evaluations = {Reason.QUOTA, Reason.NOT_FINITE}
    told = {name.removeprefix("downstream.refused_") for name in STALLS if "downstream.refused" in name}
    assert told == {reason.name.lower() for reason in set(Reason) - of_evaluations}
