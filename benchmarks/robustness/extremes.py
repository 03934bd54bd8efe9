"""Do extreme numbers of strangers end anybody: records and messages at and beyond the bounds of all their fields.

    python -m benchmarks.robustness.extremes --draws 100000 --lives 20

A draw is one record or message: each of its numbers is the least, the most, next to one of them, zero, minus zero,
subnormal, infinite, none, or usual; and some draws are said under many names alike. Most draws are read as records are,
and then decide: routes, places, moves, rounds, steps, samples, and all that looks on (`--draws`). Fewer are said to a
swarm in virtual time by its own peers, a source and a replica of the last stage, and by names without a node, whose
records it reads (`--lives`: swarms). Anything that raises is a bug: it is shown with the seed that brings it back.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from rich.console import Console

from gossip.rounds.matching import dynamic_steps, heal
from noloco_node.cli import status
from noloco_node.observe.metrics import NodeMetrics
from noloco_node.observe.page_frame import page_frame
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import line, lines, picture
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.run.presets import demo_run_text
from noloco_node.sim.scenario.scenario import Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.swarm.receipts import IssuedReceipts, ReceiptRecord, RunProgress, SourceRecord, met_work, tag_of
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText, RunHistory
from noloco_node.swarm.run_samples import believed_samples, is_over_below
from noloco_node.swarm.stage_records import Published, decode_record
from pipeline.placement import (
    MigrationState,
    OwnPlacement,
    StageClaim,
    StagePace,
    capacities,
    choose_stage,
    decide,
    powers,
    reason,
    should_yield,
)
from pipeline.routing import Bag, Hop, next_hop, quotas
from tests.explorer.attacks import Attack

RECIPE = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "the demo's run file")
WORK = (3.0, 4.0)
ANYTHING = (0.0, -0.0, 5e-324, -5e-324, 2.3e-308, 1e-30, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan)
BEYOND = 0.1
"""Share of numbers that lie outside of their bounds; a record with one of them is refused as a whole."""
HOSTILE = ("s0r0", "s1r0")


class Draws(Random):
    """Where draws come from. `beyond`: share of the numbers that lie outside of their bounds."""

    beyond = BEYOND


def number(least: float, most: float, whole: bool, rng: Draws) -> float:
    """Draw a number at, next to, between, or beyond its bounds."""
    if rng.random() < rng.beyond:
        return rng.choice((least - 1, most + 1, 2**63 - 1)) if whole else rng.choice((*ANYTHING, least - 1, 2 * most))
    if whole:
        return rng.choice((least, most, min(most, least + 1), max(least, most - 1), min(most, max(least, 7))))
    usual = min(most, max(least, 0.5))
    near = (min(most, max(least, 1e-30)), math.nextafter(most, least), min(most, max(least, 1e-9)))
    return rng.choice((least, most, -0.0 if least == 0.0 else least, usual, usual, *near))


def bounds_of(kind: Any) -> tuple[float, float]:
    """Return the least and the most with which a number is declared."""
    said: Any = kind.__metadata__[0]
    if isinstance(said, msgspec.Meta):
        said = said.ge, said.le
    least, most = said
    return least, most


def drawn(kind: Any, rng: Draws) -> Any:
    """Draw a value of a declared type, as it is before it is encoded; numbers may be outside of their bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and arguments[0] in (int, float):
        return number(*bounds_of(kind), arguments[0] is int, rng)
    if origin is Annotated:
        return drawn(arguments[0], rng)
    if origin in (Union, UnionType):
        return drawn(rng.choice(arguments), rng)
    if origin is tuple:
        kinds = arguments if arguments[-1] is not Ellipsis else (arguments[0],) * rng.randrange(4)
        return [drawn(each, rng) for each in kinds]
    if origin is dict:
        return {drawn(arguments[0], rng): drawn(arguments[1], rng) for _ in range(rng.randrange(4))}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found = {field.name: drawn(field.type, rng) for field in msgspec.structs.fields(kind)}
        return list(found.values()) if kind.__struct_config__.array_like else found
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice(list(kind)).value
    plain: Mapping[Any, Callable[[], Any]] = {
        NoneType: lambda: None,
        bool: lambda: rng.random() < 0.5,
        bytes: lambda: tag_of(f"liar-{rng.randrange(9)}"),
        str: lambda: rng.choice(("", "s0r1", "[red]\x1b[2J", "room at the next stage, for 999999999 s", "a" * 64)),
    }
    return plain[kind]()


@lru_cache(maxsize=64)
def _numbers_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the bounded numbers of a message, by name."""
    hints = get_type_hints(kind, localns={"Tensor": object}, include_extras=True)
    return tuple((each.name, hints[each.name]) for each in dataclass_fields(kind) if _is_number(hints[each.name]))


def _is_number(hint: Any) -> bool:
    return get_origin(hint) is Annotated and get_args(hint)[0] in (int, float)


def spoilt(message: Any, rng: Draws) -> Any:
    """Return a message with some of its numbers drawn anew."""
    chosen = {name: drawn(hint, rng) for name, hint in _numbers_of(message.__class__) if rng.random() < 0.5}
    return replace(message, **chosen) if chosen else message


def record_of(stage: int, rng: Draws) -> bytes:
    """Draw the record of a peer at a stage, as it is published."""
    published = drawn(Published, rng)
    told = dict(zip(PeerRecord.__struct_fields__, published[1], strict=True)) | {"peer": "", "stage": stage}
    if rng.random() < 0.5:
        told["state"] = PeerState.TRAINING.value
    published[1] = list(told.values())
    return msgspec.msgpack.encode(published)


# Decisions, and what looks on.


def decide_by_draws(seed: int, observer: RosterObserver, metrics: NodeMetrics) -> int:
    """Draw some records beside honest ones, and let everything decide by them; return how many were drawn."""
    rng = Draws(seed)
    count = rng.randrange(1, 9)
    alike = rng.random() < 0.25
    mark = rng.random()
    stages: list[list[PeerRecord]] = [
        [PeerRecord(peer=f"honest-{stage}", stage=stage, state=PeerState.TRAINING, device_s=0.1, loss=2.0, round=3)]
        for stage in range(2)
    ]
    sources, receipts = {}, {}
    for place in range(count):
        draw = Draws(f"{seed}|{mark}") if alike else rng
        name, stage = f"liar-{place}", place % 2
        found = decode_record(record_of(stage, draw), name, stage)
        if found is not None:
            stages[stage].append(found.record)
        sources[name] = msgspec.msgpack.encode(drawn(SourceRecord, draw))
        receipts[name] = msgspec.msgpack.encode(drawn(ReceiptRecord, draw))
    roster = _counted(stages, sources, receipts)
    _decide(stages, roster, rng)
    _look(roster, observer, metrics, rng)
    return 3 * count


def _counted(stages: list[list[PeerRecord]], sources: dict[str, bytes], receipts: dict[str, bytes]) -> Roster:
    """Return the roster with what sources claim and receipts cover."""
    progress = RunProgress("honest-0")
    progress.begin()
    progress.receipts.prove("liar-1", 16)
    for now_s in (0.0, 1.0):
        progress.receipts.take(receipts)
        progress.see(stages[0], stages[0], now_s)
        progress.take(sources, now_s)
    other_sources = progress.other_sources()
    samples = sum(each.claimed for each in other_sources)
    finished = sum(each.finished for each in other_sources)
    return Roster(
        stages=tuple(map(tuple, stages)),
        run_samples=samples,
        sources=1 + len(other_sources),
        sources_finished=finished,
        other_sources=other_sources,
    )


def _decide(stages: list[list[PeerRecord]], roster: Roster, rng: Draws) -> None:
    run = RECIPE.run
    hops = tuple(Hop(record.peer, record.device_s) for record in stages[1])
    replies = {hop.peer: number(0.0, 1e9, False, Draws(rng.random())) for hop in hops[::2]}
    replies = {peer: reply for peer, reply in replies.items() if 0.0 < reply < math.inf}
    assert math.isclose(sum(quotas(hops, replies).values()), len(hops))
    bag = Bag()
    for _ in range(4):
        peer, bag = next_hop(bag, hops, (), rng, replies)
        assert peer is not None
    speeds = [record.speed for record in stages[0]]
    assert 1 <= dynamic_steps(speeds[0], speeds[1:], 50) <= 50
    rounds = [record.round for record in stages[0]]
    assert heal(3, rounds, rounds, 4) >= 3
    claims = [
        StageClaim(each.peer, each.stage, each.claimed_at, each.round > 0, each.device_s, each.may_serve, each.moves_to)
        for records in stages
        for each in records
    ]
    capacity = capacities(claims, WORK)
    assert all(map(math.isfinite, (*capacity, *powers(claims, WORK).values())))
    reason(choose_stage(capacity, (0, 1), rng), capacity, 0.5)
    should_yield("honest-0", claims, WORK)
    decide(OwnPlacement("honest-0", 0, 0.0), MigrationState(), claims, WORK, StagePace(), 100.0, ())
    issued, signed = IssuedReceipts(1), {tag_of(each.peer): {"liar-1": each.claimed} for each in roster.other_sources}
    issued.add("liar-0", stages[0][-1].samples, 16)
    met = met_work("honest-0", issued, signed)
    assert met is not None
    assert all(map(math.isfinite, met))
    is_over_below(run, roster, {"liar-0": 7}, stages[0][-1].progress, 1.0)
    assert 0 <= believed_samples(run, roster) <= roster.run_samples
    assert believed_samples(_alone(run), roster) >= 0


@lru_cache(maxsize=1)
def _one_stage() -> RunConfig:
    run = RECIPE.run
    return msgspec.structs.replace(run, pipeline=msgspec.structs.replace(run.pipeline, stages=1))


def _alone(_: RunConfig) -> RunConfig:
    """Return the run in one stage, where no receipts are given."""
    return _one_stage()


def _look(roster: Roster, observer: RosterObserver, metrics: NodeMetrics, rng: Draws) -> None:
    """Look on as watch, status, the page and the metrics do."""
    late = {record.peer: 40.0 for stage in roster.stages for record in stage if rng.random() < 0.2}
    view = observer.view(roster, 1.7e9 + rng.random(), late)
    msgspec.json.encode(page_frame(view))
    line(view)
    lines(view)
    metrics.show(view, (0, 1), {})
    if rng.random() < 0.05:  # a picture of a terminal costs as much as all the rest
        Console(file=io.StringIO(), width=100).print(picture(view, 100, 40))
        status.picture(RECIPE, roster, late)
        msgspec.json.encode(status.summary(RECIPE, roster, "invite"))
        metrics.text(1.7e9)


# A live swarm.


class Strangers(Watcher):
    """Names without a node that publish drawn records, and lookers over what honest peers read."""

    def __init__(self, world: World, honest: list[str], rng: Draws, draws: Counter[str]) -> None:
        self._world, self._honest, self._rng, self._draws = world, honest, rng, draws
        self.begun = False
        """Whether all honest peers train. Whom a newcomer finds alone says how far the run is; that is no number's."""
        self._observer = RosterObserver(RECIPE.run, "run")
        self._networks = [world.network.network(f"name-{number}") for number in range(4)]
        self._tasks: set[asyncio.Task[bool]] = set()

    def look(self) -> None:
        """Publish what each name says now, and look at what an honest peer knows."""
        world, rng = self._world, self._rng
        if not self.begun:
            self.begun = all(_steps(world, name) for name in self._honest)
            return
        digest = world.setting.recipe.digest
        alike = rng.random() if rng.random() < 0.3 else None
        for number, network in enumerate(self._networks):
            draw, stage = rng if alike is None else Draws(alike), number % 2
            self._say(network, f"{digest}/stage/{stage}", record_of(stage, draw))
            self._say(network, f"{digest}/sources", msgspec.msgpack.encode(drawn(SourceRecord, draw)))
            self._say(network, f"{digest}/receipts", msgspec.msgpack.encode(drawn(ReceiptRecord, draw)))
        for peer in world.peers.values():
            node = peer.sessions[-1].node if peer.sessions else None
            if node is not None and peer.tampering is None:
                msgspec.json.encode(page_frame(self._observer.view(node.roster, 1.7e9 + world.now_s)))

    def _say(self, network: Any, key: str, raw: bytes) -> None:
        self._draws["records"] += 1
        task = asyncio.create_task(network.publish(key, network.peer_id, raw, 60.0))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def live(seed: int, rounds: int = 12) -> Counter[str]:
    """Let a swarm of two stages train among extreme peers; return how many draws it heard. Raises what a node raises.

    One of three sources, and one of three replicas of the last stage, say what is drawn of all that they send: as a
    partner, as the next stage, as a source, and as a donor.
    """
    rng, draws = Draws(seed), Counter[str]()
    if seed % 2 == 0:  # nobody is shut out for a number, and all are computed with
        rng.beyond = 0.0
    setup = build_setup(
        Scenario(seed=seed, swarm=SwarmConfig(stages=2, replicas=3, rounds=rounds, refresh_s=2.0, duration_s=600.0))
    )

    honest = [name for name in setup.peers if name not in HOSTILE]
    strangers: list[Strangers] = []

    def tell(message: Any) -> Any:
        if not strangers[0].begun:
            return message
        draws["messages"] += 1
        return spoilt(message, rng) if rng.random() < 0.5 else message

    def publish(record: PeerRecord) -> PeerRecord:
        if not strangers[0].begun:
            return record
        draws["records"] += 1
        told = dict(zip(PeerRecord.__struct_fields__, drawn(PeerRecord, rng), strict=True))
        told = {name: told[name] for name in ("device_s", "loss", "gap", "round", "tokens_per_s", "inner_steps")}
        return msgspec.structs.replace(record, **told)

    def watch(world: World) -> list[Watcher]:
        for name in HOSTILE:
            world.peers[name].tampering = Attack(record=publish, tell=tell)
        strangers.append(Strangers(world, honest, rng, draws))
        return list(strangers)

    steps_taken = simulate(setup, watch, lambda world: {name: _steps(world, name) for name in honest})
    draws["steps"] = sum(steps_taken.values())
    return draws


def _steps(world: World, name: str) -> int:
    replica = world.peers[name].replica
    return 0 if replica is None else replica.inner_steps


def history_of_draws(history: RunHistory, seed: int) -> None:
    """Let what a home remembers of a run follow drawn records."""
    raw = record_of(0, Draws(seed))
    found = decode_record(raw, "liar", 0)
    if found is not None:
        history.note(Roster(stages=((found.record,), ())))
        assert 0.0 <= history.progress <= 1.0


def main() -> None:
    """Draw, say how fast, and end with an error where anything raised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=10_000, help="records for decisions and views")
    parser.add_argument("--lives", type=int, default=2, help="swarms that live among extreme peers")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    begun_s, told_s, done, seed = time.monotonic(), time.monotonic(), 0, wanted.seed
    observer, metrics = RosterObserver(RECIPE.run, "run"), NodeMetrics("run")
    while done < wanted.draws:
        try:
            done += decide_by_draws(seed, observer, metrics)
        except Exception as error:
            raise SystemExit(f"decide_by_draws({seed}): {type(error).__name__}: {error}") from error
        seed += 1
        if time.monotonic() - told_s > 10.0:
            told_s, per_s = time.monotonic(), done / (time.monotonic() - begun_s)
            left_s = (wanted.draws - done) / per_s
            print(f"{done:,} of {wanted.draws:,}, {per_s:,.0f}/s, {left_s:.0f} s left", flush=True)
    print(f"{done:,} records in {seed - wanted.seed:,} rosters, {time.monotonic() - begun_s:.0f} s: nothing raised")
    heard: Counter[str] = Counter()
    for number in range(wanted.lives):
        begun_s = time.monotonic()
        heard += live(wanted.seed + number)
        print(f"swarm {number + 1} of {wanted.lives}, {time.monotonic() - begun_s:.0f} s: {dict(heard)}", flush=True)


if __name__ == "__main__":
    main()
