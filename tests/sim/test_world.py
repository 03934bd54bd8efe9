"""A world of production nodes: faults strike when they should, and peers come back with what was on their disk."""

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from noloco_node.journal import events
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import make_report
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import LEAST_S, Watcher, World, patience_s, simulate

SWARM = """
[swarm]
stages = 2
replicas = 2
rounds = {rounds}
refresh_s = {refresh_s}
save_every_s = 20.0
"""


class Record:
    """Everything that was seen, with its time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[tuple[float, str, events.Event]] = []
        self.faults: list[tuple[float, Fault]] = []
        self.counts: list[tuple[float, Counter[str]]] = []

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        self.events.append((self.world.now_s, peer.name, event))

    def struck(self, fault: Fault) -> None:
        self.faults.append((self.world.now_s, fault))

    def look(self) -> None:
        counts = Counter(self.world.network.counts)
        counts["held"] = len(self.world.network.held_outboxes)
        self.counts.append((self.world.now_s, counts))

    def of(self, peer: str, kind: type[events.Event]) -> list[tuple[float, events.Event]]:
        return [(at, event) for at, name, event in self.events if name == peer and isinstance(event, kind)]


def seen(text: str, rounds: int = 8, refresh_s: float = 2.0) -> tuple[Record, str]:
    """Simulate a scenario; return what was seen, and the digest of all weights."""
    records: list[Record] = []

    def watch(world: World) -> list[Record]:
        records.append(Record(world))
        return records

    setting = build_setup(
        decode_scenario(SWARM.format(rounds=rounds, refresh_s=refresh_s) + text, "the test's scenario")
    )
    digest = simulate(setting, watch, lambda world: world.digest())
    assert all(session.wrong == [] for peer in records[0].world.peers.values() for session in peer.sessions)
    assert records[0].world.network.failures == []
    return records[0], digest


def finished(record: Record) -> list[events.Finished]:
    return [event for _, _, event in record.events if isinstance(event, events.Finished)]


def fault(kind: str, at_s: float, fields: str = "") -> str:
    return f"[[fault]]\nkind = '{kind}'\nat_s = {at_s}\n{fields}\n"


def test_a_crash_takes_effect_and_a_restart_goes_on_from_the_disk() -> None:
    record, _ = seen(fault("crash", 40.0, "peer = 's1r1'") + fault("restart", 60.0, "peer = 's1r1'"), rounds=20)
    assert [at for at, _ in record.faults] == [40.0, 60.0]
    at = [at for at, _ in record.of("s1r1", events.InnerStep)]
    assert not [moment for moment in at if 40.0 < moment < 60.0]
    assert [moment for moment in at if moment > 60.0]
    peer = record.world.peers["s1r1"]
    assert [session.crashed for session in peer.sessions] == [True, False]
    # It saves every round, so that it is a few rounds behind its stage at most, and goes on with what it has.
    assert any("our own checkpoint" in line and "the stage is in round" in line for line in peer.session.said)


def test_evaluations_of_a_simulated_pipeline_fall_with_its_training() -> None:
    record, _ = seen("evaluate_every_rounds = 2\n", rounds=16)
    made = [event for name in ("s0r0", "s0r1") for _, event in record.of(name, events.Evaluated)]
    losses = [event.loss for event in sorted(made, key=lambda event: event.number)]
    assert len(losses) >= 7
    assert losses[-1] < 0.5 * losses[0]
    trained = [event.loss for _, event in record.of("s0r0", events.InnerStep)]
    assert losses[-1] == pytest.approx(trained[-1], rel=0.3)
    said = [line for name in ("s0r0", "s0r1") for line in record.world.peers[name].session.said]
    assert sum("of the final weights" in line for line in said) == 1


def test_devices_whose_windows_take_longer_than_the_budget_compute_next_to_nothing_in_vain() -> None:
    """A microbatch takes each device 120 s of a budget of 300 s, and a replica has four in its window."""
    collectors: list[EventCollector] = []

    def watch(world: World) -> list[EventCollector]:
        collectors.append(EventCollector(world))
        return collectors

    slow = "inner_steps_per_round = 3\nmicrobatches_per_step = 4\n[devices]\nforward_s = 40.0\n"
    setting = build_setup(decode_scenario(SWARM.format(rounds=2, refresh_s=10.0) + slow, "the test's scenario"))
    report = simulate(setting, watch, lambda world: make_report(world, collectors[0]))
    assert report.microbatches >= 2 * 2 * 3 * 4
    assert report.counted_twice <= report.microbatches // 8
    assert report.training_s <= 2.0 * 120.0 * report.microbatches / 2


def test_a_stage_that_died_out_returns_from_its_disk() -> None:
    both = "".join(
        fault("crash", 50.0, f"peer = 's1r{r}'") + fault("restart", 100.0, f"peer = 's1r{r}'") for r in (0, 1)
    )
    record, _ = seen(both, rounds=30)
    for peer in ("s1r0", "s1r1"):
        said = record.world.peers[peer].session.said
        assert any("our own checkpoint" in line or "copying stage" in line for line in said), said
    assert any("our own checkpoint" in line for p in ("s1r0", "s1r1") for line in record.world.peers[p].session.said)
    assert record.of("s0r0", events.Finished)


def test_a_newcomer_joins_and_a_leaver_saves() -> None:
    record, _ = seen(fault("join", 30.0, "peer = 'late'") + fault("leave", 50.0, "peer = 's0r1'"), rounds=20)
    assert record.of("late", events.Started)
    assert record.of("late", events.InnerStep)
    (left,) = record.of("s0r1", events.Finished)
    assert isinstance(left[1], events.Finished)
    assert left[1].why == "asked to leave"
    assert record.world.peers["s0r1"].disk is not None
    assert not record.world.peers["s0r1"].running


def test_a_slow_device_takes_its_time() -> None:
    text = fault("slow", 30.0, "peer = 's1r0'\nfactor = 3.0") + fault(
        "stutter", 30.0, "peer = 's1r1'\nshare = 0.1\npause_s = 0.5"
    )
    record, _ = seen(text, rounds=20)
    slow, steps = record.world.peers["s1r0"], {p: len(record.of(p, events.InnerStep)) for p in ("s1r0", "s1r1")}
    assert slow.slowness == 3.0
    assert steps["s1r0"] < steps["s1r1"]


def grew(record: Record, name: str, since_s: float, until_s: float) -> int:
    """Return by how much a counter of the hub grew between the last looks before two moments."""
    before, after = (
        [0, *(counts[name] for at, counts in record.counts if at <= moment_s)][-1] for moment_s in (since_s, until_s)
    )
    return int(after - before)


def lost(record: Record) -> None:
    """Who is cut off for 20 s: messages to it are held back, and others give it up; all before it is back."""
    assert max(counts["held"] for at, counts in record.counts if 30.0 < at < 50.0) > 0
    assert grew(record, "conversations.given_up", 30.0, 52.0) > 0
    assert all(counts["held"] == 0 for at, counts in record.counts if at < 30.0 or at > 51.0)


def stormed(record: Record) -> None:
    for name in ("messages.lost", "messages.late", "messages.duplicated"):
        assert grew(record, name, 20.0, 41.0) > 0
        assert grew(record, name, 42.0, 1e9) == grew(record, name, 0.0, 20.0) == 0


def refused(record: Record) -> None:
    assert grew(record, "conversations.refused", 0.0, 20.0) == 0
    assert grew(record, "conversations.refused", 20.0, 1e9) > 0
    line = record.world.network.line("s0r0")
    assert (line.up.rate, line.down.rate) == (1e6, math.inf)


def tampered(record: Record) -> None:
    assert grew(record, "messages.tampered", 0.0, 20.0) == 0
    assert grew(record, "messages.tampered", 20.0, 1e9) == 12


def unsaved(record: Record) -> None:
    said = record.world.peers["s0r0"].session.said
    assert [line for line in said if "could not save" in line]
    assert [line for line in said if line.startswith("saved")]
    assert not [line for line in record.world.peers["s0r1"].session.said if "could not save" in line]


@pytest.mark.parametrize(
    ("text", "felt"),
    [
        (fault("silence", 30.0, "peer = 's1r0'\nfor_s = 20.0"), lost),
        (fault("partition", 30.0, "groups = [['s0r0', 's1r0'], ['s0r1', 's1r1']]\nfor_s = 20.0"), lost),
        (fault("storm", 20.0, "for_s = 20.0\nloss = 0.2\nlate = 0.2\nduplicate = 0.2"), stormed),
        (fault("line", 20.0, "peer = 's0r0'\nup_bytes_per_s = 1e6\ndials_only = true"), refused),
        (
            "".join(
                fault("tamper", 20.0 + number, f"peer = 's1r0'\nhow = '{how}'\ncount = 3")
                for number, how in enumerate(("flip", "shape", "not finite", "garbled values"))
            ),
            tampered,
        ),
        (fault("disk", 10.0, "peer = 's0r0'\nfor_s = 30.0"), unsaved),
    ],
    ids=["silence", "partition", "storm", "line", "tamper", "disk"],
)
def test_every_fault_is_felt_and_survived(text: str, felt: Callable[[Record], None]) -> None:
    record, _ = seen(text, rounds=15)
    assert record.faults
    felt(record)
    assert [event.why for event in finished(record)] == ["the run is over"] * 4


class Moments(Watcher):
    """What a question about the world was answered at each look."""

    def __init__(self, world: World, ask: Callable[[World], object]) -> None:
        self.world, self.ask = world, ask
        self.answers: list[tuple[float, object]] = []

    def look(self) -> None:
        self.answers.append((self.world.now_s, self.ask(self.world)))

    def during(self, since_s: float, until_s: float) -> set[object]:
        return {answer for at, answer in self.answers if since_s < at < until_s}


def asked_at_each_look(text: str, ask: Callable[[World], object]) -> Moments:
    moments: list[Moments] = []

    def watch(world: World) -> list[Moments]:
        moments.append(Moments(world, ask))
        return moments

    simulate(build_setup(decode_scenario(SWARM.format(rounds=100, refresh_s=2.0) + text, "x")), watch, lambda _: None)
    return moments[0]


@pytest.mark.parametrize(
    ("kind", "fields", "ask"),
    [
        ("silence", "peer = 's1r0'\n", lambda world: world.network.is_cut("s1r0", "s1r1")),
        ("disk", "peer = 's1r0'\n", lambda world: world.peers["s1r0"].disk_refuses),
        ("storm", "late = 0.1\n", lambda world: world.network.conditions.late == 0.1),
    ],
)
def test_of_faults_that_overlap_the_last_to_end_ends_them(
    kind: str, fields: str, ask: Callable[[World], object]
) -> None:
    text = "duration_s = 90.0\n" + fault(kind, 5.0, fields + "for_s = 5.0") + fault(kind, 6.0, fields + "for_s = 60.0")
    text += fault(kind, 8.0, fields + "for_s = 20.0")
    moments = asked_at_each_look(text, ask)
    assert moments.during(0.0, 5.0) == moments.during(66.0, 90.0) == {False}
    assert moments.during(5.0, 66.0) == {True}


def test_storms_add_up_and_a_second_partition_takes_the_place_of_the_first() -> None:
    text = "duration_s = 60.0\n" + fault("storm", 5.0, "loss = 0.01\nfor_s = 20.0")
    text += fault("storm", 10.0, "loss = 0.03\nlate = 0.1\nfor_s = 5.0")
    text += fault("partition", 30.0, "groups = [['s0r0'], ['s0r1']]\nfor_s = 10.0")
    text += fault("partition", 35.0, "groups = [['s1r0'], ['s1r1', 's0r0', 's0r1']]\nfor_s = 15.0")

    def ask(world: World) -> object:
        hub = world.network
        return hub.conditions.loss, hub.conditions.late, hub.is_cut("s0r0", "s0r1"), hub.is_cut("s1r0", "s1r1")

    moments = asked_at_each_look(text, ask)
    expected = {
        (5.0, 10.0): (0.01, 0.0, False, False),
        (10.0, 15.0): (0.03, 0.1, False, False),
        (15.0, 25.0): (0.01, 0.0, False, False),
        (25.0, 30.0): (0.0, 0.0, False, False),
        (30.0, 35.0): (0.0, 0.0, True, False),
        (35.0, 50.0): (0.0, 0.0, False, True),
        (50.0, 60.0): (0.0, 0.0, False, False),
    }
    assert {span: moments.during(*span) for span in expected} == {span: {state} for span, state in expected.items()}


def test_a_peer_that_is_restarted_while_it_leaves_comes_back_when_it_has_left() -> None:
    text = fault("leave", 30.0, "peer = 's0r1'") + fault("restart", 30.0, "peer = 's0r1'")
    record, _ = seen(text, rounds=20)
    assert [type(each).__name__ for _, each in record.faults] == ["Leave", "Restart"]
    sessions = record.world.peers["s0r1"].sessions
    assert [session.leave.is_set() for session in sessions] == [True, False]
    assert len(record.of("s0r1", events.Started)) == 2
    (left_s, _), (over_s, over) = record.of("s0r1", events.Finished)
    assert isinstance(over, events.Finished)
    assert over.why == "the run is over"
    assert [at for at, _ in record.of("s0r1", events.InnerStep) if left_s < at < over_s]
    # Also where the leaving ends with a crash.
    record, _ = seen(text + fault("crash", 30.01, "peer = 's0r1'"), rounds=20)
    assert [session.crashed for session in record.world.peers["s0r1"].sessions] == [True, False]
    assert len(record.faults) == 3


def test_what_cannot_happen_is_not_told() -> None:
    text = (
        fault("restart", 10.0, "peer = 's0r1'")
        + fault("crash", 20.0, "peer = 's0r1'")
        + "".join(fault(kind, 21.0, "peer = 's0r1'") for kind in ("crash", "leave", "tamper"))
        + fault("disk", 22.0, "peer = 'late'\nfor_s = 1.0")
        + fault("join", 25.0, "peer = 'late'")
        + fault("leave", 26.0, "peer = 'late'") * 2
    )
    record, _ = seen(text, rounds=20)
    assert [(type(each).__name__, at) for at, each in record.faults] == [
        ("Crash", 20.0),
        ("Join", 25.0),
        ("Leave", 26.0),
    ]


def test_a_device_is_slowed_down_from_what_it_was_at_first() -> None:
    text = "[devices]\nslowness = [4.0, 2.0]\n" + fault("slow", 5.0, "peer = 's1r0'\nfactor = 1.0")
    text += fault("slow", 5.0, "peer = 's1r1'\nfactor = 3.0") + fault("slow", 6.0, "peer = 's1r1'\nfactor = 2.0")
    record, _ = seen(text, rounds=2)
    assert [record.world.peers[name].slowness for name in ("s0r0", "s1r0", "s1r1")] == [4.0, 4.0, 4.0]


IMPATIENT_S = 300.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a world wait for five minutes at least instead of half an hour."""
    monkeypatch.setattr("noloco_node.sim.world.LEAST_S", IMPATIENT_S)


@pytest.mark.usefixtures("impatient")
def test_a_swarm_that_can_never_go_on_is_sent_home() -> None:
    dead = "".join(fault("crash", 100.0, f"peer = 's1r{replica}'") for replica in (0, 1))
    record, _ = seen(dead, rounds=100, refresh_s=15.0)
    assert record.world.standstill is not None
    assert "nobody serves stage 1. s0r0, s0r1 waited for ever" in record.world.standstill
    assert re.match(r"Nobody took an inner step after 10\d s", record.world.standstill)
    assert IMPATIENT_S + 90.0 < record.counts[-1][0] < IMPATIENT_S + 200.0
    assert {event.why for event in finished(record)} == {"asked to leave"}
    # While a fault is to come, somebody may come back.
    record, _ = seen(dead + fault("restart", 600.0, "peer = 's1r0'"), rounds=40, refresh_s=15.0)
    assert record.world.standstill is None
    assert {event.why for event in finished(record)} == {"the run is over"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "text",
    [
        "[devices]\nforward_s = 100.0\n",
        "[devices]\nstutter_share = 0.5\nstutter_pause_s = 350.0\n",
        "[devices]\nstep_s = 400.0\n",
        "[network]\nlate = 0.5\nlate_s = 200.0\n",
        "[network]\nlate_s = 400.0\n" + fault("storm", 0.0, "for_s = 5.0\nlate = 0.9"),
        fault("slow", 0.0, "peer = 's1r0'\nfactor = 1500.0") + fault("crash", 0.0, "peer = 's1r1'"),
    ],
)
def test_a_slow_swarm_does_not_stand_still(text: str) -> None:
    record, _ = seen(
        "duration_s = 1e6\ninner_steps_per_round = 2\nimpatient = false\n" + text, rounds=1, refresh_s=15.0
    )
    steps_s = [at for at, _, event in record.events if isinstance(event, events.InnerStep)]
    assert record.world.standstill is None
    assert max(after - before for before, after in pairwise([0.0, *steps_s])) > IMPATIENT_S


def test_patience_covers_slow_lines() -> None:
    settings = [build_setup(decode_scenario(f"[network]\nup_mbit_per_s = {rate}\n", "x")) for rate in (100.0, 0.008)]
    # At a kilobyte a second a whole state of 16 megabytes takes hours.
    assert patience_s(settings[0]) == LEAST_S
    assert patience_s(settings[1]) > 4 * 2**22 / 1000.0


def test_nobody_comes_once_everybody_is_sent_home() -> None:
    text = "duration_s = 30.0\n[devices]\nforward_s = 1.0\n" + fault("crash", 10.0, "peer = 's1r1'")
    text += fault("restart", 30.5, "peer = 's1r1'") + fault("join", 30.6, "peer = 'late'")
    record, _ = seen(text, rounds=100)
    assert record.counts[-1][0] > 31.0
    assert [type(each).__name__ for _, each in record.faults] == ["Crash"]
    assert "late" not in record.world.peers
    assert len(record.world.peers["s1r1"].sessions) == 1


def test_whoever_is_at_work_after_the_duration_is_asked_to_leave() -> None:
    record, _ = seen("duration_s = 30.0\n", rounds=100)
    assert {event.why for event in finished(record)} == {"asked to leave"}
    assert record.world.ended_s < 60.0


def test_a_peer_whose_pass_takes_long_has_time_to_leave() -> None:
    record, _ = seen("duration_s = 1000.0\n[devices]\nforward_s = 4000.0\n", rounds=5)
    assert [event.why for event in finished(record)] == ["asked to leave"] * 4


def test_peers_that_only_dial_are_spread_over_the_stages() -> None:
    record, _ = seen("[network]\ndials_only = 0.5\n")
    only = [name for name, peer in record.world.peers.items() if peer.access.dials_only]
    assert len(only) == 2
    assert {name[:2] for name in only} == {"s0", "s1"}
    states = [event for _, _, event in record.events if isinstance(event, events.StateChanged)]
    assert {event.state for event in states} >= {PeerState.JOINING, PeerState.TRAINING}
