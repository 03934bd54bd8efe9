"""A day of comings and goings: lives that are over are added up once and let go of, and no figure changes by it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from msgspec import json

from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report import collector
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate

HOURLY = """
seed = 3
[swarm]
stages = 2
replicas = 3
rounds = 8
refresh_s = 5.0
[network]
loss = 0.002
[devices]
forward_s = 0.5
[[fault]]
kind = "churn"
at_s = 30.0
for_s = 400.0
per_hour = 30.0
away_s = 20.0
polite = 0.5
"""


class SessionRecords(Watcher):
    """Remembers the nodes of all sessions without keeping them."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, int], weakref.ref[Any]] = {}

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        if isinstance(event, events.Started):
            self.nodes[peer.name, peer.session.number] = weakref.ref(peer.session.node)


class Seen:
    """What one simulation left: its report, its collector, and how many nodes of earlier sessions are still there."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.sessions = SessionRecords()
        self.report: Report = simulate(build_setup(decode_scenario(HOURLY, "x")), self._watch, self._finish)

    def _watch(self, world: World) -> list[Any]:
        self.collector = EventCollector(world)
        return [self.collector, self.sessions]

    def _finish(self, world: World) -> Report:
        report = make_report(world, self.collector)
        gc.collect()
        last = {(name, peer.session.number) for name, peer in world.peers.items()}
        self.earlier = [node for session, node in self.sessions.nodes.items() if session not in last]
        self.still_there = sum(node() is not None for node in self.earlier)
        return report


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def kept() -> Seen:
    """The same simulation where nothing is added up before its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "SETTLED_S", float("inf"))
        return Seen()


def test_no_figure_depends_on_when_lives_are_added_up(seen: Seen, kept: Seen) -> None:
    assert (
        len(kept.collector.stage_times.open)
        == len(kept.collector.stage_times.all)
        == len(seen.collector.stage_times.all)
    )
    assert len(seen.collector.stage_times.open) < len(seen.collector.stage_times.all) / 2
    assert seen.report.digest == kept.report.digest
    alike(json.decode(json.encode(seen.report)), json.decode(json.encode(kept.report)))


def alike(one: Any, other: Any) -> None:
    """Assert equality but for the last digits of sums that were added up in another order."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            alike(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            alike(left, right)
    else:
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(one, float) else other)


def test_the_nodes_of_lives_that_are_over_are_let_go_of(seen: Seen, kept: Seen) -> None:
    assert len(seen.earlier) >= 10
    unsettled = sum(each.session is not each.peer.session for each in seen.collector.stage_times.open)
    assert seen.still_there <= unsettled
    assert kept.still_there == len(kept.earlier)


def test_a_few_looks_that_count_for_more_divide_the_time_alike(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_ROWS", 150)
    fewer = Seen()
    assert len(fewer.collector.rows) <= 151 < len(seen.collector.rows)
    assert fewer.report.digest == seen.report.digest
    # A suspicion is soon over: none is overlooked.
    assert fewer.report.true_suspects == seen.report.true_suspects
    assert fewer.report.false_suspects == seen.report.false_suspects
    for few, many in zip(fewer.report.stages, seen.report.stages, strict=True):
        assert few.inner_steps == many.inner_steps
        assert sum(few.time.values()) == pytest.approx(1.0)
        for cause in few.time.keys() | many.time.keys():
            assert few.time.get(cause, 0.0) == pytest.approx(many.time.get(cause, 0.0), abs=0.05)
