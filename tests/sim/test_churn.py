"""Peers come and go all day: what a churn stands for, and that a swarm lives through it without anybody's help."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from repository import ROOT

from gossip.interface import OuterStepTaken
from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.command import complete
from noloco_node.sim.scenario.faults import Churn, Crash, Fault, Leave, Restart, unfold
from noloco_node.sim.scenario.scenario import decode_scenario, load_scenario
from noloco_node.sim.scenario.setup import SimSetup
from noloco_node.sim.world import World, simulate
from tests.explorer.scenario_file import scenario_text

SCENARIO = ROOT / "docs" / "scenarios" / "churn.toml"
MOST_TASKS = 40
"""Of a node at work: its own, and a few for each microbatch in its hands and each that queues."""

churns = st.builds(
    Churn,
    at_s=st.floats(0.0, 1e4),
    for_s=st.floats(0.0, 1e5),
    per_hour=st.floats(0.01, 10.0),
    away_s=st.floats(1.0, 5e3),
    polite=st.floats(0.0, 1.0),
)


@given(churn=churns, seed=st.integers(0, 2**31))
def test_everybody_who_goes_comes_back_in_turn(churn: Churn, seed: int) -> None:
    found = unfold([churn], ["one", "other"], seed)
    assert found == unfold([churn], ["one", "other"], seed)
    for name in ("one", "other"):
        own = [fault for fault in found if not isinstance(fault, Churn) and getattr(fault, "peer", "") == name]
        assert own == list(unfold([churn], [name], seed))  # whoever else is there
        assert [isinstance(fault, Restart) for fault in own] == [False, True] * (len(own) // 2)
        for gone, back in zip(own[::2], own[1::2], strict=True):
            assert isinstance(gone, Crash | Leave)
            assert churn.at_s <= gone.at_s < churn.at_s + churn.for_s
            assert back.at_s == pytest.approx(gone.at_s + churn.away_s)
        assert all(later.at_s >= earlier.at_s for earlier, later in pairwise(own))


def test_as_many_go_as_the_scenario_says() -> None:
    names = [str(number) for number in range(200)]
    churn = Churn(at_s=0.0, for_s=86_400.0, per_hour=0.3, away_s=600.0, polite=0.25)
    kinds = Counter(type(fault) for fault in unfold([churn], names, 1))
    # A peer goes 0.3 times in an hour for which it is there: 24 h, of which it is away a twentieth.
    expected = 200 * 24 * 0.3 / (1 + 0.3 / 6)
    assert kinds[Restart] == pytest.approx(expected, rel=0.1)
    assert kinds[Leave] / kinds[Restart] == pytest.approx(0.25, abs=0.05)


def test_the_scenario_of_the_documentation_is_a_day_of_a_hundred_peers() -> None:
    setting = complete(load_scenario(SCENARIO), None)
    assert len(setting.peers) == 100
    departures = [fault for fault in setting.faults if isinstance(fault, Crash | Leave)]
    assert len(departures) / 100 / 24 == pytest.approx(0.3, rel=0.1)
    assert decode_scenario(scenario_text(setting.scenario), "its own text").fault == setting.scenario.fault


class Seen:
    """What became of everybody."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gone: Counter[str] = Counter()
        self.last_step_s: dict[tuple[str, int], float] = {}
        self.losses: list[float] = []
        self.gaps: list[float] = []
        self.longest_s = 0.0
        self.tasks: list[float] = []
        self.ended: dict[tuple[str, int], str] = {}

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        match event:
            case events.InnerStep():
                session = (peer.name, peer.session.number)
                self.longest_s = max(self.longest_s, self.world.now_s - self.last_step_s.get(session, self.world.now_s))
                self.last_step_s[session] = self.world.now_s
                self.losses += [] if event.loss is None else [event.loss]
            case OuterStepTaken(gap=gap) if gap is not None:
                self.gaps.append(gap)
            case events.Finished():
                self.ended[peer.name, peer.session.number] = event.why

    def struck(self, fault: Fault) -> None:
        if isinstance(fault, Crash | Leave):
            self.gone[fault.peer] += 1

    def look(self) -> None:
        running = sum(peer.running for peer in self.world.peers.values())
        self.tasks.append(len(asyncio.all_tasks()) / max(1, running))


def short_day() -> SimSetup:
    """One hour of the documentation's scenario, with 12 peers, of whom so many go that each is likely to."""
    scenario = load_scenario(SCENARIO)
    (churn,) = scenario.fault
    swarm = structs.replace(scenario.swarm, stages=3, replicas=4, rounds=9, refresh_s=20.0, save_every_s=60.0)
    devices = structs.replace(scenario.devices, forward_s=4.0)
    churn = structs.replace(churn, at_s=120.0, for_s=3000.0, per_hour=2.4, away_s=120.0)
    return complete(structs.replace(scenario, swarm=swarm, devices=devices, fault=(churn,)), None)


def test_an_hour_of_comings_and_goings_stops_nobody() -> None:
    torch.set_num_threads(1)
    seen: list[Seen] = []

    def watch(world: World) -> list[Seen]:
        seen.append(Seen(world))
        return seen

    world = simulate(short_day(), watch, lambda world: world)
    (found,) = seen
    assert world.standstill is None
    assert 3000.0 < world.ended_s < 4500.0
    assert sum(found.gone.values()) >= 20
    assert world.network.failures == []
    for name, peer in world.peers.items():
        assert [session.wrong for session in peer.sessions if session.wrong] == []
        assert len(peer.sessions) == 1 + found.gone[name]
        node = peer.session.node
        replica = node.replica
        assert replica is not None
        assert found.ended[name, peer.session.number] == "the run is over"
        assert all(bool(tensor.isfinite().all()) for tensor in replica.rounds.state.slow)
    assert found.longest_s < 600.0
    early, late = found.losses[: len(found.losses) // 8], found.losses[-(len(found.losses) // 8) :]
    assert sum(late) / len(late) < 0.7 * sum(early) / len(early)
    assert found.gaps[-1] < 0.1
    assert max(found.tasks) < MOST_TASKS
