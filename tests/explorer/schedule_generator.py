"""Random schedules: a swarm of three replicas of each stage, its network, and what happens to it, all from one seed.

One swarm of five has one stage, the others three. In one of four peers evaluate.

Every kind of fault is drawn, at any time: while peers join, in the middle, while they leave, in the last round. Most
schedules leave the swarm in peace for its second half, so that what must come right after the last fault can be seen
to; the others strike until the end. Half of the swarms of honest peers have no deadlines, so that no timeout hides a
wait.

One replica a stage is its **anchor**: it may crash but comes back, is never asked to leave, and can be reached. So the
run can always be finished, and a run that does not end is a bug. Without an anchor that would be a matter of luck.

In one swarm of four there are hostile peers: a fourth replica in one stage or more, each with an attack of its own from
a moment on, mostly from the beginning. What happens besides happens to the others.

In one of four of the others replicas move to where they are needed. Everything is then slower but for the refreshes,
from which it follows how soon somebody moves, and some stage is left to its anchor: otherwise nobody would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal, get_args

from msgspec import structs

from gossip.settings import Format
from noloco_node.sim.network.link_model import Latency
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import (
    DevicesConfig,
    NetworkConfig,
    Scenario,
    SwarmConfig,
    peer_name,
    planned,
    unreachable,
)

STAGES = REPLICAS = 3
ONE_STAGE_SHARE = 0.2
"""Of all swarms."""
EVALUATING_SHARE = 0.25
"""Of all swarms."""
SAMPLES = 48
"""Microbatches that a source draws in a run in which nothing happens, about."""
SLACK_S = 400.0
"""Beyond the work itself, before a run counts as one that does not end."""
NEWCOMERS = ("n0", "n1", "n2")
MOVING_SHARE = 0.25
"""Of the swarms in which replicas move."""
SLOWER = 2.0
"""Times as long as others, their run is."""
HOSTILE_SHARE = 0.25
"""Of the swarms in which there are hostile peers."""
HOSTILE_LEARNING_RATE = 0.3
"""In these: so that a short run goes a good part of the way."""


def draw(seed: int) -> Scenario:
    rng = Random(f"{seed}|explore")
    work_s = rng.uniform(65.0, 95.0)
    kind = Random(f"{seed}|explore|kind")
    stages = 1 if kind.random() < ONE_STAGE_SHARE else STAGES
    every = kind.choice((1, 2)) if kind.random() < EVALUATING_SHARE else None
    swarm = structs.replace(_swarm(rng), **_outer(Random(f"{seed}|explore|outer")))
    swarm = structs.replace(swarm, stages=stages, evaluate_every_rounds=every)
    moving = Random(f"{seed}|explore|moves")
    hostile = Random(f"{seed}|explore|hostile")
    attacks = tuple(_attacks(hostile, work_s, stages)) if hostile.random() < HOSTILE_SHARE else ()
    if attacks:
        # Others wait for a peer that is silent on purpose until a deadline passes: without any, for ever.
        swarm = structs.replace(swarm, replicas=REPLICAS + 1, model="wide quadratic", impatient=True)
        swarm = structs.replace(swarm, learning_rate=HOSTILE_LEARNING_RATE)
    if moves := not attacks and moving.random() < MOVING_SHARE and stages > 1:
        work_s *= SLOWER
        swarm = structs.replace(swarm, moves=True, refresh_s=round(moving.uniform(0.4, 0.7), 2))
    network = _network(rng)
    # A microbatch takes a device 3 forward_s; devices are idle for some of the time.
    devices = DevicesConfig(
        forward_s=round(work_s / (SAMPLES * 5.0), 3),
        step_s=rng.choice((0.0, 0.05)),
        slowness=rng.choice(((1.0,), (1.0, 1.0, 2.0), (1.0, 1.5, 2.5))),
        stutter_share=rng.choice((0.0, 0.0, 0.02)),
        stutter_pause_s=1.0,
    )
    anchors = _anchors(rng, stages, REPLICAS + bool(attacks), network.dials_only)
    fault = _Schedule(rng, work_s, anchors).draw()
    more = (*attacks, *(_starvation(moving, work_s, anchors) if moves else ()))
    fault = tuple(sorted((*fault, *more), key=lambda each: each.at_s))
    last_s = max((faults.ends_s(each) for each in fault), default=0.0)
    swarm = structs.replace(swarm, duration_s=round(last_s + 10.0 * work_s + SLACK_S, 1))
    return Scenario(name=f"explored {seed}", seed=seed, swarm=swarm, network=network, devices=devices, fault=fault)


def _swarm(rng: Random) -> SwarmConfig:
    per_round, window = rng.choice((2, 3, 4)), rng.choice((2, 3, 4))
    return SwarmConfig(
        replicas=REPLICAS,
        rounds=max(4, round(SAMPLES / (per_round * window))),
        inner_steps_per_round=per_round,
        microbatches_per_step=window,
        overlap_steps=rng.randrange(1, per_round),
        blocking=rng.random() < 0.3,
        refresh_s=round(rng.uniform(2.0, 4.0), 2),
        save_every_s=round(rng.uniform(5.0, 40.0), 1),
        impatient=rng.random() < 0.5,
    )


def _outer(rng: Random) -> dict[str, Any]:
    return {
        "codec": rng.choice((Format.FLOAT32, *Format)),
        "alpha": rng.choice((None, 0.5, 0.5)),
        "gamma": rng.choice((None, None, 0.5)),
        "momentum_period": rng.choice((1, 1, 2, 3)),
        "staleness_at_most": rng.choice((1, 2, 16)),
    }


def _network(rng: Random) -> NetworkConfig:
    mean_s = round(rng.choice((0.002, 0.02, 0.05, 0.2)), 3)
    shapes: tuple[Literal["constant", "uniform", "lognormal"], ...] = ("constant", "uniform", "lognormal")
    shape = rng.choice(shapes)
    return NetworkConfig(
        latency=Latency(
            shape=shape, mean_s=mean_s, std_s=0.0 if shape == "constant" else mean_s * rng.choice((0.3, 1.0))
        ),
        loss=rng.choice((0.0, 0.0, 0.005, 0.02, 0.05)),
        late=rng.choice((0.0, 0.0, 0.02, 0.1)),
        late_s=rng.choice((0.5, 2.0)),
        duplicate=rng.choice((0.0, 0.0, 0.01, 0.05)),
        roster_lag_s=rng.choice((0.0, 0.0, 2.0, 5.0)),
        dials_only=rng.choice((0.0, 0.0, 0.12, 0.23)),
        microbatch_bytes=20_000,
        weights_bytes=200_000,
    )


def _attacks(rng: Random, work_s: float, stages: int) -> Iterator[Fault]:
    """Yield who attacks from when on: one stage's fourth replica or more."""
    for stage in rng.sample(range(stages), min(stages, rng.choice((1, 1, 2, STAGES)))):
        at_s = rng.choice((0.0, 0.0, round(rng.uniform(0.0, work_s / 2), 2)))
        yield faults.Hostile(at_s=at_s, peer=peer_name(stage, REPLICAS), how=rng.choice(get_args(faults.Attacks)))


def _anchors(rng: Random, stages: int, replicas: int, dials_only: float) -> tuple[str, ...]:
    """Choose a replica of each stage that the world lets others dial."""
    hidden = unreachable(planned(stages, replicas), dials_only)
    names = [[peer_name(stage, replica) for replica in range(REPLICAS)] for stage in range(stages)]
    reachable = [[name for name in of_stage if name not in hidden] for of_stage in names]
    return tuple(rng.choice(found) for found in reachable)


def _starvation(rng: Random, work_s: float, anchors: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the deaths that leave a stage to its anchor; some of the dead come back much later."""
    stage, at_s = rng.randrange(STAGES), rng.uniform(2.0, work_s / 4)
    for replica in range(REPLICAS):
        peer = peer_name(stage, replica)
        if peer not in anchors:
            yield faults.Crash(at_s=round(at_s + rng.uniform(0.0, 3.0), 2), peer=peer)
            if rng.random() < 0.3:
                yield faults.Restart(at_s=round(at_s + rng.uniform(10.0, work_s), 2), peer=peer)


class _Schedule:
    """Draws the faults of one run."""

    def __init__(self, rng: Random, work_s: float, anchors: tuple[str, ...]) -> None:
        self._rng, self._anchors, self._stages = rng, anchors, len(anchors)
        self._last_s = work_s * (0.7 if rng.random() < 0.7 else 2.0)
        self._peers = [peer_name(stage, replica) for stage in range(self._stages) for replica in range(REPLICAS)]
        self._together_s = rng.uniform(0.0, self._last_s)
        self._newcomers = list(NEWCOMERS)
        self._kinds: tuple[Callable[[float], list[Fault]], ...] = (
            *(
                self._crash,
                self._crash,
                self._crash,
                self._leave,
                self._silence,
                self._silence,
                self._partition,
                self._partition,
            ),
            *(self._storm, self._slow, self._stutter, self._line, self._tamper, self._disk, self._join),
        )

    def draw(self) -> tuple[Fault, ...]:
        """Return one to nine faults with what belongs to them, in order."""
        found: list[Fault] = []
        for _ in range(self._rng.randint(1, 9)):
            found += self._rng.choice(self._kinds)(self._when())
        return tuple(sorted(found, key=lambda fault: fault.at_s))

    def _when(self) -> float:
        way = self._rng.random()
        if way < 0.15:
            return round(self._rng.uniform(0.0, 6.0), 2)
        if way < 0.35:
            return round(self._together_s + self._rng.uniform(0.0, 3.0), 2)
        return round(self._rng.uniform(0.0, self._last_s), 2)

    def _lasting(self) -> float:
        return round(self._rng.choice((self._rng.uniform(0.5, 8.0), self._rng.uniform(5.0, 50.0))), 2)

    def _who(self) -> str:
        return self._rng.choice(self._peers)

    def _passing(self) -> str:
        return self._rng.choice([peer for peer in self._peers if peer not in self._anchors])

    def _back(self, peer: str, at_s: float) -> list[Fault]:
        away_s = self._rng.choice((0.0, self._rng.uniform(0.5, 5.0), self._rng.uniform(5.0, 45.0)))
        return [faults.Restart(at_s=round(at_s + 0.01 + away_s, 2), peer=peer)]

    def _crash(self, at_s: float) -> list[Fault]:
        peer = self._who()
        stays_away = peer not in self._anchors and self._rng.random() < 0.5
        return [faults.Crash(at_s=at_s, peer=peer), *([] if stays_away else self._back(peer, at_s))]

    def _leave(self, at_s: float) -> list[Fault]:
        peer = self._passing()
        back = self._back(peer, at_s + self._rng.uniform(1.0, 15.0)) if self._rng.random() < 0.6 else []
        return [faults.Leave(at_s=at_s, peer=peer), *back]

    def _silence(self, at_s: float) -> list[Fault]:
        return [faults.Silence(at_s=at_s, peer=self._who(), for_s=self._lasting())]

    def _partition(self, at_s: float) -> list[Fault]:
        mixed = self._rng.sample(self._peers, len(self._peers))
        cuts = sorted(self._rng.sample(range(1, len(mixed)), self._rng.choice((1, 1, 2))))
        groups = tuple(
            tuple(sorted(mixed[begin:end])) for begin, end in zip([0, *cuts], [*cuts, len(mixed)], strict=True)
        )
        return [faults.Partition(at_s=at_s, groups=groups[1:], for_s=self._lasting())]

    def _storm(self, at_s: float) -> list[Fault]:
        loss, late, duplicate = (round(self._rng.uniform(0.0, most), 3) for most in (0.2, 0.3, 0.2))
        return [faults.Storm(at_s=at_s, for_s=self._lasting(), loss=loss, late=late, duplicate=duplicate)]

    def _slow(self, at_s: float) -> list[Fault]:
        return [faults.Slow(at_s=at_s, peer=self._who(), factor=round(self._rng.uniform(0.5, 4.0), 2))]

    def _stutter(self, at_s: float) -> list[Fault]:
        share, pause_s = round(self._rng.uniform(0.02, 0.2), 2), round(self._rng.uniform(0.5, 6.0), 1)
        return [faults.StutterFault(at_s=at_s, peer=self._who(), share=share, pause_s=pause_s)]

    def _line(self, at_s: float) -> list[Fault]:
        peer = self._who()
        up, down = (self._rng.choice((None, self._rng.choice((50_000.0, 200_000.0, 1e6)))) for _ in range(2))
        hides = peer not in self._anchors and self._rng.random() < 0.4
        return [faults.LinkFault(at_s=at_s, peer=peer, up_bytes_per_s=up, down_bytes_per_s=down, dials_only=hides)]

    def _tamper(self, at_s: float) -> list[Fault]:
        kinds: tuple[Literal["flip", "shape", "not finite", "garbled values"], ...]
        kinds = ("flip", "shape", "not finite", "garbled values")
        how = self._rng.choice(kinds)
        return [faults.Tamper(at_s=at_s, peer=self._who(), how=how, count=self._rng.randint(1, 5))]

    def _disk(self, at_s: float) -> list[Fault]:
        return [faults.Disk(at_s=at_s, peer=self._who(), for_s=self._lasting())]

    def _join(self, at_s: float) -> list[Fault]:
        if not self._newcomers:
            return []
        peer = self._newcomers.pop(0)
        self._peers.append(peer)
        return [faults.Join(at_s=at_s, peer=peer, stage=self._rng.choice((None, None, *range(self._stages))))]
