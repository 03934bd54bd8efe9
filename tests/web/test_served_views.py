"""What a node serves: one view of the swarm for metrics and page, with what the node knows of itself."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from page_frames import BEGUN
from sample_events import inner, started, write_journal

from noloco_node import tasks
from noloco_node.cli.status import Shown, replay
from noloco_node.journal import events
from noloco_node.observe.metrics import NodeMetrics
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.swarm_view import MOST_CHANGES, SwarmView
from noloco_node.run.peer_state import PeerState
from noloco_node.run.presets import demo_run_text
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background
from noloco_node.web import server
from noloco_node.web.places import PagePlace, ServedPlace
from noloco_node.web.served_views import ServedViews

pytestmark = pytest.mark.real_time
RECIPE = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "a test's run file")
PEERS = ("12D3KooWaaaaAAAA", "12D3KooWbbbbBBBB")


class _Page:
    def __init__(self) -> None:
        self.views: asyncio.Queue[SwarmView] = asyncio.Queue()

    def show(self, view: SwarmView) -> None:
        self.views.put_nowait(view)


def membership() -> Any:
    records = [
        PeerRecord(peer=peer, stage=number, state=PeerState.TRAINING, tokens_per_s=10.0, device_s=0.1)
        for number, peer in enumerate(PEERS)
    ]
    roster = Roster(stages=tuple((record,) for record in records), run_samples=10)
    return SimpleNamespace(roster=roster, news_age_s={}, watched=(0, 1))


NETWORK: Any = SimpleNamespace(statistics=lambda: {})


async def first_view(views: ServedViews, page: _Page) -> SwarmView:
    async with background(views.follow(membership(), NETWORK, RECIPE)):
        return await page.views.get()


@pytest.mark.parametrize("takes_part", [False, True])
async def test_metrics_and_page_are_shown_one_view(takes_part: bool) -> None:
    page, metrics = _Page(), NodeMetrics("run")
    views = ServedViews(metrics, page, PeerHistory("volunteer", 0))
    if takes_part:
        views.take(started(PEERS[0], 0))
        views.take(events.Hops(counts={PEERS[1]: 1}))
        views.take(events.Hops(counts={PEERS[1]: 3}))
    view = await first_view(views, page)
    assert [(route.origin, route.target) for route in view.routes] == ([PEERS] if takes_part else [])
    assert [change.name for change in view.changes] == (["aaaaAAAA volunteer"] if takes_part else [])
    assert metrics.registry.get_sample_value("noloco_swarm_tokens") == view.tokens


async def test_a_view_that_fails_is_told_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = _Page()
    views = ServedViews(None, page, PeerHistory("", 0))
    broken: Any = SimpleNamespace()
    monkeypatch.setattr(tasks, "AGAIN_S", 0.01)
    async with background(views.follow(broken, NETWORK, RECIPE)):
        await asyncio.sleep(0.1)
        broken.__dict__.update(membership().__dict__)
        assert (await page.views.get()).peers
    assert capsys.readouterr().err.count("the page or the metrics failed") == 1


def test_an_event_that_cannot_be_counted_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    views = ServedViews(NodeMetrics("run"), None, PeerHistory("", 0))
    for _ in range(2):
        views.take(events.Lost(peer="a", what="exchange", why="", count=-1))
    assert capsys.readouterr().err.count("cannot show everything") == 1


async def test_nothing_is_looked_at_where_nothing_is_served() -> None:
    nobody: Any = None
    await ServedViews(None, None, PeerHistory("", 0)).follow(nobody, nobody, RECIPE)


async def test_journals_are_played_on_the_page_forward_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [inner(step, BEGUN + step, tokens=10, seconds=1.0) for step in range(1, 100)]
    write_journal(tmp_path, [started(PEERS[0], 0, BEGUN), *steps])

    async def frame_at(response: aiohttp.ClientResponse, at_s: float) -> dict[str, Any]:
        while True:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                frame: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                if frame["playback"]["paused"] and frame["playback"]["at_s"] == pytest.approx(at_s):
                    return frame

    shown = Shown(False, False, PagePlace(ServedPlace("127.0.0.1", 0), "t" * 32))
    said: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(server, "say", said.put_nowait)
    playing = asyncio.create_task(replay([tmp_path], shown))
    url = (await said.get()).partition(": ")[2]
    async with aiohttp.ClientSession() as session, session.get(f"{url}events") as response:
        tokens = {}
        for key, share in (("pause", None), ("1.0", 1.0), ("0.5", 0.5), ("begin", 0.0)):
            async with session.post(f"{url}key", data=key) as answer:
                assert answer.status == 204
            if share is not None:
                tokens[share] = (await frame_at(response, 99.0 * share))["tokens"]
    assert tokens == {1.0: 990, 0.5: 490, 0.0: 0}
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_ten_thousand_events_a_second_cost_a_page_no_more_than_its_last_hundred() -> None:
    page = _Page()
    views = ServedViews(None, page, PeerHistory("volunteer", 0))
    for number in range(10_000):
        views.take(events.Noticed(what="noise", text=f"noise {number}"))
    view = await first_view(views, page)
    assert len(view.changes) == MOST_CHANGES
    assert view.changes[-1].text == "noise 9999"
