"""Many random schedules, each a whole swarm in virtual time, and what to do with one that breaks an invariant.

A seed means a scenario (`schedule_generator`), and a scenario a run that is the same to the bit each time. So a
violation is its seed: it can be replayed with every event, and shortened (`shrink`) to the few faults that it needs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from noloco_node.errors import leaves
from noloco_node.journal import events
from noloco_node.sim import clock
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import Scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Stuck, Watcher, World
from tests.explorer.attack_kinds import KINDS
from tests.explorer.invariants import InvariantChecker
from tests.explorer.observation import InvariantBroken
from tests.explorer.scenario_file import scenario_text
from tests.explorer.schedule_generator import draw
from tests.explorer.shrink import shrink

Say = Callable[[str], None]


class ExploreResult(NamedTuple):
    """What became of a run. `broken`: the invariant that did not hold. `counts`: of the checker."""

    scenario: Scenario
    broken: InvariantBroken | None
    counts: dict[str, int | float]
    digest: str


class ScheduleTrace(Watcher):
    """Says every journal event and fault, with the virtual time."""

    def __init__(self, world: World, say: Say) -> None:
        self._world, self._say = world, say

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        if not isinstance(event, events.Hops | events.Traffic):
            self._line(peer.name, {key: value for key, value in events.fields_of(event).items() if key != "at"})

    def struck(self, fault: Fault) -> None:
        self._line("*", {name: value for name, value in msgspec.to_builtins(fault).items() if name != "at_s"})

    def _line(self, who: str, told: dict[str, object]) -> None:
        what = told.pop("event", None) or told.pop("kind")
        said = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in told.items()
        ]
        rest = ", ".join(said)
        self._say(f"{self._world.now_s:9.3f}  {who:5} {what}: {rest}")


def examine(scenario: Scenario, say: Say | None = None) -> ExploreResult:
    """Run a scenario under all invariants; `say` is told every event."""
    seen: list[tuple[World, InvariantChecker]] = []
    setting = build_setup(scenario)

    async def main() -> None:
        world = World(setting)
        world.attacks = KINDS
        checker = InvariantChecker(world)
        seen.append((world, checker))
        world.watchers += [ScheduleTrace(world, say), checker] if say is not None else [checker]
        await world.run()
        await checker.end()

    broken = None
    try:
        clock.run(main())
        seen[0][1].compare()
    except (Exception, BaseExceptionGroup) as error:  # whatever ends a run is what we are looking for
        if not seen:
            raise
        broken = _as_broken(error, seen[0][1])
    world, checker = seen[0]
    return ExploreResult(scenario, broken, checker.statistics(), world.digest())


def examine_seed(seed: int) -> ExploreResult:
    return examine(draw(seed))


def _as_broken(error: BaseException, checker: InvariantChecker) -> InvariantBroken:
    found = leaves(error)
    inner = next((each for each in found if isinstance(each, InvariantBroken)), found[0])
    if isinstance(inner, InvariantBroken):
        return inner
    looked_s = float(checker.statistics()["virtual_s"])
    if isinstance(inner, Stuck | clock.Deadlock):
        return InvariantBroken("wait", looked_s, str(inner))
    return InvariantBroken("failure", looked_s, "".join(traceback.format_exception(inner)))


def totals(results: Iterable[ExploreResult]) -> dict[str, float]:
    found: dict[str, float] = {}
    for result in results:
        for name, value in result.counts.items():
            found[name] = found.get(name, 0) + value
    return found


def report(result: ExploreResult, say: Say) -> None:
    """Say what is wrong with a run, and a shorter schedule that shows it."""
    assert result.broken is not None
    kind = result.broken.kind
    say(f"seed {result.scenario.seed} breaks an invariant.\n{result.broken}")
    shorter = shrink(result.scenario, lambda scenario: _breaks(scenario, kind))
    say(f"A shorter schedule that breaks the same one ({len(shorter.fault)} of {len(result.scenario.fault)} faults):")
    say(scenario_text(shorter))
    say(f"Replay: python -m tests.explorer --replay {result.scenario.seed}")


def _breaks(scenario: Scenario, kind: str) -> bool:
    broken = examine(scenario).broken
    return broken is not None and broken.kind == kind


def replay(scenario: Scenario, say: Say) -> int:
    """Run a scenario and say every event; return 0 if all invariants held, 1 otherwise."""
    say(scenario_text(scenario))
    result = examine(scenario, say)
    told = ", ".join(f"{name} {value:g}" for name, value in result.counts.items())
    say(f"{told}\ndigest {result.digest}")
    say("all invariants held" if result.broken is None else str(result.broken))
    return 0 if result.broken is None else 1
