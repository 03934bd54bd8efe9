"""Whole nodes check what they are returned: a liar is found by each that calls it, and shut out."""

from collections.abc import Sequence

import pytest
import torch

from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate
from pipeline import spot_checks
from tests.explorer.attacks import Attack, TamperedStage


class Seen(Watcher):
    """What callers found."""

    def __init__(self) -> None:
        self.found: list[tuple[str, events.SpotCheck]] = []

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        if isinstance(event, events.SpotCheck):
            self.found.append((peer.name, event))


@pytest.mark.parametrize(("liar", "stages"), [("s1r0", 2), ("s2r0", 3)])
def test_each_caller_shuts_a_liar_out_and_nobody_else(liar: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_checks, "LEAST_VALUES", 0)  # the cheap model sends few
    seen, swarm = Seen(), SwarmConfig(stages=stages, replicas=4, rounds=12, duration_s=3600.0)

    def watch(world: World) -> Sequence[Watcher]:
        world.peers[liar].tampering = Attack(arithmetic=lambda stage: TamperedStage(stage, gradient=torch.ones_like))
        return [seen]

    def ended(world: World) -> dict[str, float]:
        replicas = [world.peers[f"s{stages - 2}r{number}"].replica for number in range(4)]
        return {f"{number}": replica.statistics()["checks.calls"] for number, replica in enumerate(replicas) if replica}

    calls = simulate(build_setup(Scenario(seed=0, swarm=swarm)), watch, ended)
    quarantined = [(caller, event.peer) for caller, event in seen.found if event.finding == "quarantined"]
    assert sorted(quarantined) == [(f"s{stages - 2}r{number}", liar) for number in range(4)]
    assert len(calls) == 4
    assert min(calls.values()) > 0
