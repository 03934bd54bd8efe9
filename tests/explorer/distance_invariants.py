"""Hostile peers do bounded harm: how far honest weights are from the middle of their quadratic model, on the way and at
the end.

A wide quadratic model's weights begin at a distance of 1 and go to about 0, whatever happens; noise of microbatches
keeps them from it. The distance is the root mean square over a stage's weights, in units of that at the start.

A newcomer can only tell by their loss what a donor's weights are worth (`noloco_node.state_sync.starting_state`). Until
it has, and has taken others where they are worth nothing, they may lie anywhere. How its stage ends counts in any case.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from msgspec import structs
from torch import Tensor

from noloco_node.sim.hardware.quadratic_model import START, WIDE_CENTRE
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.scenario import Scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import World, simulate
from tests.explorer.observation import CheckerContext, InvariantBroken, doubts_weights
from tests.explorer.session_records import fast_of

FARTHEST = 1.25
"""On the way: no honest weights of a clean run come that far."""
MARGIN = 0.5
"""By which the honest replicas of a stage may end farther away than without the hostile peers."""


def distance(weights: Tensor) -> float:
    return float((weights - WIDE_CENTRE).square().mean().sqrt()) / abs(START - WIDE_CENTRE)


def distances(world: World, hostile: Collection[str]) -> dict[int, float]:
    """Return by stage the mean distance of the slow weights that honest peers had in the end."""
    found: dict[int, list[float]] = {}
    for name, peer in world.peers.items():
        if name not in hostile and peer.replica is not None and peer.replica.inner_steps:
            (slow,) = peer.replica.rounds.state.slow
            found.setdefault(peer.replica.stage, []).append(distance(slow))
    return {stage: sum(each) / len(each) for stage, each in sorted(found.items())}


def without_attacks(scenario: Scenario) -> Scenario:
    rest = tuple(fault for fault in scenario.fault if not isinstance(fault, faults.Hostile))
    return structs.replace(scenario, fault=rest)


def clean_distances(clean: Scenario, hostile: Collection[str]) -> dict[int, float]:
    """Return the same of a run in which nobody attacks, of the peers that otherwise would not."""
    return simulate(build_setup(clean), lambda world: (), lambda world: distances(world, hostile))


@dataclass(slots=True, repr=False)
class DistanceInvariants:
    """Checks at every look that nobody's weights have gone astray."""

    context: CheckerContext

    def look(self) -> None:
        if not self.context.hostile:
            return
        for record, replica in self.context.training():
            if doubts_weights(replica):
                continue
            self.context.checked["distance"] += 1
            away = distance(fast_of(record.peer))
            if not away <= FARTHEST:
                self.context.complain("distance", f"{record.name} is {away:.3g} times as far away as at the start")

    def compare(self, at_s: float) -> dict[str, float]:
        """Return the largest distances, with hostile peers and without; raise `InvariantBroken` if one is too large.

        To be called when the run is over, for the one without hostile peers is made for it.
        """
        world, hostile = self.context.world, self.context.hostile
        if not hostile:
            return {}
        ended = distances(world, hostile)
        clean = clean_distances(without_attacks(world.setting.scenario), hostile)
        for stage, away in ended.items():
            if stage in clean and not away <= clean[stage] + MARGIN:
                sentence = f"stage {stage} ended {away:.3f} times as far away as it began, {clean[stage]:.3f} without"
                raise InvariantBroken("distance", at_s, f"{sentence} attacks")
        more = max((away - clean[stage] for stage, away in ended.items() if stage in clean), default=0.0)
        most, clean_most = (max(each.values(), default=0.0) for each in (ended, clean))
        return {"distance": most, "clean_distance": clean_most, "more_distance": more}
