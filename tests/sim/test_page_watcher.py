"""A simulation on a page: it is shown with its faults and its routes, and does not notice."""

from typing import Any

import pytest

from noloco_node.observe.swarm_view import SwarmView
from noloco_node.sim.report import watchers
from noloco_node.sim.report.watchers import PageWatcher
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate

SCENARIO = """
[swarm]
stages = 2
replicas = 3
rounds = 4
[[fault]]
kind = "crash"
at_s = 20.0
peer = "s1r2"
[[fault]]
kind = "slow"
at_s = 25.0
peer = "s0r0"
factor = 2.0
[[fault]]
kind = "restart"
at_s = 40.0
peer = "s1r2"
"""


class _Page:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.views: list[SwarmView] = []

    def show(self, view: SwarmView) -> None:
        self.views.append(view)


def run(page: Any) -> str:
    def watch(world: World) -> list[Watcher]:
        return [] if page is None else [PageWatcher(world, page)]

    return simulate(build_setup(decode_scenario(SCENARIO, "a test")), watch, World.digest)


def test_a_page_shows_faults_routes_and_meetings_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "SHOW_EVERY_S", 0.0)
    page = _Page()
    assert run(page) == run(None)
    last = page.views[-1]
    happened = [f"{change.name} {change.text}" for change in last.changes]
    assert "s1r2 crashed" in happened
    assert "fault: slow s0r0 factor 2" in happened
    assert "fault: restart s1r2" in happened
    states = [{peer.name: peer.state for peer in view.peers} for view in page.views]
    assert "gone" in {each.get("s1r2") for each in states}
    assert states[-1]["s1r2"] != "gone"
    routes = {(route.origin, route.target) for view in page.views for route in view.routes}
    assert {origin[:2] for origin, _ in routes} == {"s0"}
    assert {target[:2] for _, target in routes} == {"s1"}
    assert all(peer.tokens > 0 for peer in last.peers)
    meetings = {(peer.peer, peer.met) for view in page.views for peer in view.peers if peer.met is not None}
    assert meetings
    assert all(one[:2] == other[:2] for one, other in meetings), "of one stage"
    assert last.course[-1].at > last.course[0].at
