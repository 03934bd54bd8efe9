"""A world of production nodes: faults strike when they should, and peers come back with what was on their disk."""

from __future__ import annotations

import pytest

from noloco_node import journal
from noloco_node.roster import State
from noloco_node.sim.faults import Fault
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario import decode_scenario
from noloco_node.sim.setting import work_out
from noloco_node.sim.world import World, simulate

SWARM = """
[swarm]
stages = 2
replicas = 2
rounds = {rounds}
refresh_s = 2.0
save_every_s = 20.0
"""


class Record:
    """Everything that was seen, with its time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[tuple[float, str, journal.Event]] = []
        self.faults: list[tuple[float, Fault]] = []
        self.running: list[int] = []

    def hear(self, peer: SimulatedPeer, event: journal.Event) -> None:
        self.events.append((self.world.now_s, peer.name, event))

    def struck(self, fault: Fault) -> None:
        self.faults.append((self.world.now_s, fault))

    def look(self) -> None:
        self.running.append(sum(peer.running for peer in self.world.peers.values()))

    def of(self, peer: str, kind: type[journal.Event]) -> list[tuple[float, journal.Event]]:
        return [(at, event) for at, name, event in self.events if name == peer and isinstance(event, kind)]


def seen(text: str, rounds: int = 8) -> tuple[Record, str]:
    """Simulate a scenario; return what was seen, and the digest of all weights."""
    records: list[Record] = []

    def watch(world: World) -> list[Record]:
        records.append(Record(world))
        return records

    setting = work_out(decode_scenario(SWARM.format(rounds=rounds) + text, "the test's scenario"))
    digest = simulate(setting, watch, lambda world: world.digest())
    assert all(life.wrong == [] for peer in records[0].world.peers.values() for life in peer.lives)
    assert records[0].world.hub.failures == []
    return records[0], digest


def fault(kind: str, at_s: float, fields: str = "") -> str:
    return f"[[fault]]\nkind = '{kind}'\nat_s = {at_s}\n{fields}\n"


def test_a_quiet_world_trains_to_the_end_and_is_the_same_twice() -> None:
    first, digest = seen("")
    again, same = seen("")
    assert digest == same
    assert [(at, name) for at, name, _ in first.events] == [(at, name) for at, name, _ in again.events]
    assert {e.why for _, _, e in first.events if isinstance(e, journal.Finished)} == {"the run is over"}
    assert seen("[network]\nloss = 0.02\n")[1] != digest


def test_a_crash_takes_effect_and_a_restart_goes_on_from_the_disk() -> None:
    record, _ = seen(
        fault("crash", 40.0, "peer = 's1r1'") + fault("restart", 60.0, "peer = 's1r1'"),
        rounds=20,
    )
    assert [at for at, _ in record.faults] == [40.0, 60.0]
    at = [at for at, _ in record.of("s1r1", journal.InnerStep)]
    assert not [moment for moment in at if 40.0 < moment < 60.0]
    assert [moment for moment in at if moment > 60.0]
    peer = record.world.peers["s1r1"]
    assert [life.crashed for life in peer.lives] == [True, False]
    # It had saved at 20 s; its stage lives, so it copies the state of the other replica.
    assert any("copying stage 1" in line for line in peer.life.said)


def test_a_stage_that_died_out_returns_from_its_disk() -> None:
    both = "".join(
        fault("crash", 50.0, f"peer = 's1r{r}'") + fault("restart", 100.0, f"peer = 's1r{r}'") for r in (0, 1)
    )
    record, _ = seen(both, rounds=30)
    for peer in ("s1r0", "s1r1"):
        said = record.world.peers[peer].life.said
        assert any("our own checkpoint" in line or "copying stage" in line for line in said), said
    assert any("our own checkpoint" in line for p in ("s1r0", "s1r1") for line in record.world.peers[p].life.said)
    assert record.of("s0r0", journal.Finished)


def test_a_newcomer_joins_and_a_leaver_saves() -> None:
    record, _ = seen(fault("join", 30.0, "peer = 'late'") + fault("leave", 50.0, "peer = 's0r1'"), rounds=20)
    assert record.of("late", journal.Started)
    assert record.of("late", journal.InnerStep)
    (left,) = record.of("s0r1", journal.Finished)
    assert left[1].why == "asked to leave"
    assert record.world.peers["s0r1"].disk is not None
    assert not record.world.peers["s0r1"].running


def test_a_slow_device_takes_its_time() -> None:
    text = fault("slow", 30.0, "peer = 's1r0'\nfactor = 3.0") + fault(
        "stutter", 30.0, "peer = 's1r1'\nshare = 0.1\npause_s = 0.5"
    )
    record, _ = seen(text, rounds=20)
    slow, steps = record.world.peers["s1r0"], {p: len(record.of(p, journal.InnerStep)) for p in ("s1r0", "s1r1")}
    assert slow.slowness == 3.0
    assert steps["s1r0"] < steps["s1r1"]


@pytest.mark.parametrize(
    "text",
    [
        fault("silence", 30.0, "peer = 's1r0'\nfor_s = 20.0"),
        fault("partition", 30.0, "groups = [['s0r0', 's1r0'], ['s0r1', 's1r1']]\nfor_s = 20.0"),
        fault("storm", 20.0, "for_s = 20.0\nloss = 0.2\nlate = 0.2\nduplicate = 0.2"),
        fault("line", 20.0, "peer = 's0r0'\nup_bytes_per_s = 1e6\ndials_only = true"),
        "".join(
            fault("tamper", 20.0 + number, f"peer = 's1r0'\nhow = '{how}'\ncount = 3")
            for number, how in enumerate(("flip", "shape", "not finite", "garbled values"))
        ),
        fault("disk", 10.0, "peer = 's0r0'\nfor_s = 30.0"),
    ],
    ids=["silence", "partition", "storm", "line", "tamper", "disk"],
)
def test_every_fault_is_survived(text: str) -> None:
    record, _ = seen(text, rounds=15)
    assert record.faults
    finished = [event for _, _, event in record.events if isinstance(event, journal.Finished)]
    assert {event.why for event in finished} == {"the run is over"}
    assert len(finished) == 4


def test_whoever_is_at_work_after_the_duration_is_asked_to_leave() -> None:
    record, _ = seen("duration_s = 30.0\n", rounds=100)
    assert {event.why for _, _, event in record.events if isinstance(event, journal.Finished)} == {"asked to leave"}
    assert record.world.ended_s < 60.0


def test_peers_that_only_dial_are_spread_over_the_stages() -> None:
    record, _ = seen("[network]\ndials_only = 0.5\n")
    only = [name for name, peer in record.world.peers.items() if peer.access.dials_only]
    assert len(only) == 2
    assert {name[:2] for name in only} == {"s0", "s1"}
    states = [event for _, _, event in record.events if isinstance(event, journal.StateChanged)]
    assert {event.state for event in states} >= {State.JOINING, State.TRAINING}
