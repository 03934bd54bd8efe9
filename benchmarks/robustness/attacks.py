"""What hostile peers cost a simulated swarm: one attack a row, beside the same swarm without it.

    python -m benchmarks.robustness.attacks  # all rows of the protocol
    python -m benchmarks.robustness.attacks expired rounds --seeds 0 1 2  # some of them, of three seeds

Production nodes in virtual time, 2 stages x 4 replicas of the cheap model, 20 rounds of 5 inner steps if the row does
not say otherwise. Where one replica is hostile it is one of four of its stage. Each row prints its goal, the figure
without the attack, that where the hostile peer is merely absent, and that with it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from msgspec import structs

from gossip.interface import OuterStepTaken
from noloco_node.journal import events
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Crash, Join
from noloco_node.sim.scenario.scenario import Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.swarm.receipts import tag_of
from noloco_node.swarm.roster import PeerRecord
from tests.explorer.attack_kinds import HUGE, KINDS, claims_rounds, claims_samples
from tests.explorer.attacks import FASTEST_S, Attack, Identities, boast, hold

APPEAR_S = 20.0
"""When identities without a node appear: a run that has begun."""
HOLDS_S, HOLDS_AFTER_S = (0.45, 2, 5, 9), 20.0
"""How long a peer holds each microbatch before it refuses it, and when it begins to: it has worked until then."""
LIAR = "s1r0"
SWARM = SwarmConfig(stages=2, replicas=4, rounds=20, duration_s=36_000.0)


class Seen(Watcher):
    """What an honest observer of the whole world counts; `hostile`: whose events are not looked at."""

    def __init__(self, world: World, hostile: Sequence[str]) -> None:
        self.world, self.hostile = world, hostile
        self.steps = self.adopted = self.meetings = 0
        self.stepped_s = 0.0
        self.tasks: list[asyncio.Task[None]] = []

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Count an event of an honest peer."""
        if peer.name in self.hostile:
            return
        match event:
            case events.InnerStep():
                self.steps += 1
                self.stepped_s = self.world.now_s
            case OuterStepTaken(partner=str()):
                self.meetings += 1
                self.adopted += event.adopted


class Outcome(NamedTuple):
    """How a simulation ended: seconds until the last honest inner step, and what honest peers did."""

    seconds: float
    steps: int
    meetings: int
    adopted: int
    round: int
    """The highest that an honest replica finished."""
    share: float
    """Of stage 0's microbatches, that went through the liar."""
    stages: tuple[int, ...]
    """Honest peers at each stage, at the end."""
    trained: tuple[str, ...]
    """Honest peers that came to train."""


Begin = Callable[[World, Seen], None]


def outcome(scenario: Scenario, hostile: Sequence[str] = (), begin: Begin | None = None) -> Outcome:
    """Run a scenario with what `begin` does to its world."""
    setup = build_setup(scenario)
    seen: list[Seen] = []

    def watch(world: World) -> list[Seen]:
        seen.append(Seen(world, hostile))
        if begin is not None:
            begin(world, seen[0])
        return seen

    return simulate(setup, watch, lambda world: _ended(world, seen[0]))


def _ended(world: World, seen: Seen) -> Outcome:
    for task in seen.tasks:
        task.cancel()
    replicas = {
        name: peer.session.node.replica
        for name, peer in world.peers.items()
        if name not in seen.hostile and peer.sessions and peer.session.node and peer.session.node.replica
    }
    routes = [each.next_stage.hop_totals for each in replicas.values() if each.next_stage is not None]
    through = sum(totals[LIAR].succeeded for totals in routes if LIAR in totals)
    total = sum(hop.succeeded for totals in routes for hop in totals.values())
    places = [replica.stage for replica in replicas.values()]
    return Outcome(
        seconds=seen.stepped_s,
        steps=seen.steps,
        meetings=seen.meetings,
        adopted=seen.adopted,
        round=max(replica.rounds.finished for replica in replicas.values()),
        share=through / max(1, total),
        stages=tuple(places.count(number) for number in range(world.setting.run.pipeline.stages)),
        trained=tuple(name for name, replica in replicas.items() if replica.inner_steps),
    )


def attacked(world: World, seen: Seen, attack: Attack, peer: str = LIAR) -> None:
    """Let one of the planned peers attack."""
    world.peers[peer].tampering = attack


def add_identities(
    world: World, seen: Seen, record: PeerRecord, count: int, samples: int = 0, *, finished: bool = False
) -> None:
    """Let identities appear."""
    setting = world.setting
    names = [f"x{number}" for number in range(count)]
    identities = Identities(world.network, setting.recipe.digest, names, setting.scenario.swarm.refresh_s)

    async def appear() -> None:
        await asyncio.sleep(APPEAR_S)
        await identities.run(record, samples, finished=finished)

    seen.tasks.append(asyncio.create_task(appear()))


def record_without_node(stage: int, **fields: object) -> PeerRecord:
    """Return the record of an identity."""
    return PeerRecord(peer="", stage=stage, state=PeerState.TRAINING, **fields)  # type: ignore[arg-type]


def seconds(made: Outcome) -> str:
    """Return how long it took."""
    return f"{made.seconds:.0f} s, {made.steps} honest steps"


def routes(made: Outcome) -> str:
    """Return the liar's share of the routes."""
    return f"{made.share:.1%} of the routes, {made.seconds:.0f} s"


def rounds(made: Outcome) -> str:
    """Return how far the numbers of rounds came."""
    return f"round {made.round}, {made.adopted} of {made.meetings} meetings adopted"


def places(made: Outcome) -> str:
    """Return where the honest are."""
    return f"honest replicas by stage {list(made.stages)}, {made.steps} steps"


def joined(made: Outcome) -> str:
    """Return whether the newcomer came to train."""
    return f"newcomer {'trains' if 'late' in made.trained else 'NEVER joined'}, {made.steps} steps"


class Row(NamedTuple):
    """One attack. `hostile`: whose work is not counted."""

    name: str
    goal: str
    say: Callable[[Outcome], str]
    begin: Begin
    scenario: Scenario = Scenario(swarm=SWARM)
    hostile: tuple[str, ...] = (LIAR,)


def scenario(**swarm: object) -> Scenario:
    """Return the usual scenario with other fields of its swarm."""
    return Scenario(swarm=structs.replace(SWARM, **swarm))


LATE = Scenario(swarm=scenario(rounds=80).swarm, fault=(Join(at_s=250.0, peer="late", stage=1),))
LONG = scenario(rounds=200)
MOVING = scenario(rounds=400, moves=True)


def _claims_rounds(world: World, seen: Seen) -> None:
    record = record_without_node(1, round=HUGE, device_s=0.15)
    attacked(world, seen, claims_rounds())
    add_identities(world, seen, record, 5)


def _collude(world: World, seen: Seen) -> None:
    """Let a source claim what a replica of the last stage signs for it, and both work."""
    attacked(world, seen, KINDS["samples"](), peer="s0r0")
    friend = tag_of("s0r0")
    attacked(world, seen, Attack(receipts=lambda signed: signed | {friend: 1000 * signed.get(friend, 0)}))


def _holds(world: World, seen: Seen, hold_s: float) -> None:
    attacked(world, seen, hold(hold_s, HOLDS_AFTER_S))


def _end_the_run(world: World, seen: Seen) -> None:
    add_identities(world, seen, record_without_node(0), 10, samples=1, finished=True)


def _claims_samples(world: World, seen: Seen, count: int) -> None:
    add_identities(world, seen, record_without_node(0), count, samples=world.setting.run.budget_samples)


ROWS = (
    Row(
        "expired",
        "B2: at most 1.2 times",
        seconds,
        partial(attacked, attack=KINDS["refuses"]()),
    ),
    Row("boast", "B4: at most 30 %", routes, partial(attacked, attack=Attack(record=boast))),
    Row("hang", "B5: at most 1.2 times", seconds, partial(attacked, attack=KINDS["silent"]())),
    *(
        Row(name, "1.1 times absent", seconds, partial(_holds, hold_s=hold_s), played)
        for hold_s in HOLDS_S
        for name, played in ((f"holds-{hold_s}", Scenario(swarm=SWARM)), (f"holds-{hold_s}-long", scenario(rounds=80)))
    ),
    Row("rounds", "B11: +1 an opening", rounds, partial(attacked, attack=claims_rounds())),
    Row("rounds-identities", "B10: 0 adoptions", rounds, _claims_rounds),
    Row("samples", "B3: 95 % of the clean steps", seconds, partial(_claims_samples, count=1), hostile=()),
    Row("samples-long", "B3: 95 % of the clean steps", seconds, partial(_claims_samples, count=1), LONG, ()),
    Row(
        "samples-source",
        "B3: 95 % of the clean steps",
        seconds,
        partial(attacked, attack=Attack(source=claims_samples), peer="s0r0"),
        LONG,
        ("s0r0",),
    ),
    Row("collusion", "B3 by two: 90 % of the clean steps", seconds, _collude, scenario(rounds=40), ("s0r0", LIAR)),
    Row("finished", "B3, says it is over: 95 % of the clean steps", seconds, _end_the_run, hostile=()),
    Row(
        "identities",
        "B7: 95 % of the speed",
        seconds,
        partial(add_identities, record=record_without_node(1, device_s=0.15), count=200),
        scenario(rounds=80),
        (),
    ),
    Row(
        "stage0",
        "B12: somebody stays at stage 0",
        places,
        partial(add_identities, record=record_without_node(0, device_s=FASTEST_S), count=10),
        MOVING,
        (),
    ),
    Row(
        "newcomer",
        "B8: the newcomer trains",
        joined,
        partial(add_identities, record=record_without_node(1, device_s=0.15), count=200),
        LATE,
        (),
    ),
)


def absent(row: Row) -> Scenario:
    """Return the row's scenario with its hostile peer gone from the beginning: what its mere absence costs."""
    gone = tuple(Crash(at_s=0.0, peer=name) for name in row.hostile)
    return structs.replace(row.scenario, fault=row.scenario.fault + gone)


def main() -> None:
    """Print the rows that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    wanted = parser.parse_args()
    known: dict[tuple[Scenario, tuple[str, ...]], Outcome] = {}
    for row, seed in product(ROWS, wanted.seeds):
        if wanted.rows and row.name not in wanted.rows:
            continue
        print(f"{row.name}, seed {seed}: {row.goal}", flush=True)
        cases = {"clean": row.scenario, "absent": absent(row), "attacked": row.scenario}
        for case, played in cases.items():
            place = (structs.replace(played, seed=seed), row.hostile)
            if case == "absent" and not row.hostile:
                continue
            if case != "attacked" and place not in known:
                known[place] = outcome(*place)
            made = outcome(*place, row.begin) if case == "attacked" else known[place]
            print(f"  {case:8}  {row.say(made)}", flush=True)


if __name__ == "__main__":
    main()
