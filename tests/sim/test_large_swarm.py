"""A run of two stages whose rosters are samples, from its beginning to its end."""

from collections import Counter

import pytest

from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import World, simulate
from noloco_node.swarm import shards, stage_division

REPLICAS, STEPS = 34, 12
SWARM = f"""
[swarm]
stages = 2
replicas = {REPLICAS}
rounds = 2
inner_steps_per_round = {STEPS // 2}
refresh_s = 10.0
[devices]
forward_s = 2.0
"""


class Watch:
    """Counts inner steps, the ends of peers, and looks at rosters."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: Counter[str] = Counter()
        self.ended_s: dict[str, float] = {}
        self.sampled = self.looks = 0

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        self.steps[peer.name] += isinstance(event, events.InnerStep)
        if isinstance(event, events.Finished):
            self.ended_s[peer.name] = self.world.now_s

    def struck(self, fault: Fault) -> None:
        raise AssertionError(f"no fault was planned: {fault}")

    def look(self) -> None:
        if self.world.now_s > 120.0 and not self.ended_s:
            rosters = [each.session.node.roster for each in self.world.peers.values() if each.session.node is not None]
            self.sampled += sum(roster.is_sample for roster in rosters)
            self.looks += len(rosters)


def test_a_run_whose_rosters_are_samples_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller shards than in production, else 520 nodes would be needed. Nobody knows all of a stage."""
    for module in (shards, stage_division):
        monkeypatch.setattr(module, "MOST_IN_SHARD", 16)
        monkeypatch.setattr(module, "LEAST_IN_SHARD", 4)
    seen: list[Watch] = []

    def watch(world: World) -> list[Watch]:
        seen.append(Watch(world))
        return seen

    simulate(build_setup(decode_scenario(SWARM, "a test")), watch, lambda world: world.digest())
    found = seen[0]
    assert found.sampled > 0.9 * found.looks
    assert len(found.ended_s) == 2 * REPLICAS, "all come to an end"
    done = sum(steps for name, steps in found.steps.items() if name.startswith("s0"))
    assert REPLICAS * STEPS <= done <= 1.4 * REPLICAS * STEPS
    assert max(found.ended_s.values()) < 2 * min(found.ended_s.values())
