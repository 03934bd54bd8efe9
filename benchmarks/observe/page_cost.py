"""What page and metrics take from a node: its tokens a second with and without, and the server's share of a core.

    python -m benchmarks.observe.page_cost [--peers 100] [--pairs 20] [--seconds 4]

One process, as a node is: a thread computes forward and backward passes of a small model without a pause, and the event
loop has what a node serves beside them. Two minutes or so are cut into short spans, by turns without a page and
metrics and with them, so that what else the machine does falls on both alike. With them: the swarm is looked at every
second, a stranger reads the page's stream in a process of its own, and metrics are scraped every five seconds. Reported
is the median over pairs of neighbouring spans, with the quarters: by the clock, which needs an idle machine, and by the
processor time of the training's own thread, which does not. What the server takes of the processor comes on top of the
latter where node and server share one core.

Then the server alone, nothing trained: the processor time of this process for a second of frames of so many peers,
their routes and a full course, each looked at, encoded and sent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from statistics import median, quantiles
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from noloco_node.journal import events
from noloco_node.observe.metrics import NodeMetrics
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.presets import demo_run_text
from noloco_node.swarm.roster import HOP_LETTERS, MOST_HOPS, Given, PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background
from noloco_node.web.places import PagePlace, ServedPlace
from noloco_node.web.served_views import ServedViews
from noloco_node.web.server import Page, page_served

STAGES, WIDTH, TOKENS = 5, 128, 64
READER = """
import sys, urllib.request
stream = urllib.request.urlopen(sys.argv[1])
while stream.readline():
    pass
"""
SCRAPE_EVERY_S = 5.0


class Training:
    """A device that is never idle. `tokens`: done so far; `used_s`: processor time of its thread."""

    def __init__(self) -> None:
        self.tokens, self.used_s, self._over = 0, 0.0, Event()
        self._thread = Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        torch.set_num_threads(1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        batch = torch.randn(1, TOKENS, WIDTH)
        while not self._over.is_set():
            layer(batch).square().mean().backward()
            self.tokens += TOKENS
            self.used_s = time.thread_time()

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join()


def membership_of(peers: int) -> Any:
    """What a node knows of a swarm of so many peers; a new roster at each look."""

    def record(number: int, steps: int) -> PeerRecord:
        return PeerRecord(
            peer=f"12D3KooW{number:044d}",
            stage=number % STAGES,
            state=PeerState.TRAINING,
            inner_steps=steps,
            round=steps // 10,
            device_s=0.1,
            tokens_per_s=900.0 + number,
            loss=3.0,
            gap=0.01,
            partner=f"12D3KooW{(number + STAGES) % peers:044d}",
            waiting=(Wait(WaitCause.ROOM, 7.0, "all its 20 replicas refused"),) if number % 7 == 0 else (),
            name=f"volunteer {number}",
            hops=() if number % STAGES == STAGES - 1 else tuple(_hops(number, steps, peers)),
            given=Given(1000 * steps, steps, 10**6 * steps, 10**6 * steps),
        )

    def _hops(number: int, steps: int, peers: int) -> Iterator[tuple[str, int]]:
        for more in range(MOST_HOPS):
            yield f"{(number + 1 + STAGES * (2 * steps + more)) % peers:0{HOP_LETTERS}d}", 30

    class Swarm:
        news_age_s: dict[str, float] = {}  # noqa: RUF012 - nobody is late
        watched = tuple(range(STAGES))
        looks = 0

        @property
        def roster(self) -> Roster:
            self.looks += 1
            records = [record(number, self.looks) for number in range(peers)]
            stages = tuple(tuple(records[stage::STAGES]) for stage in range(STAGES))
            return Roster(stages=stages, run_samples=8 * self.looks)

    return Swarm()


@asynccontextmanager
async def serving(peers: int) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[None]]]:
    """Serve page and metrics as a node does, with a reader; yield a context in which there is something new to see."""
    recipe = RunFileText(demo_run_text(stages=STAGES, replicas=20, steps=10_000, seed=0), "a benchmark's run file")
    metrics = NodeMetrics(recipe.digest)
    async with AsyncExitStack() as stack:
        page = await stack.enter_async_context(page_served(PagePlace(ServedPlace("127.0.0.1", 0), "x" * 32)))
        assert page is not None
        reader = await _reader(page)
        stack.callback(reader.kill)
        views, membership = ServedViews(metrics, page, PeerHistory("", 0)), membership_of(peers)
        views.take(events.Started(peer=f"12D3KooW{0:044d}", stage=0, run="r", version="0"))
        network: Any = SimpleNamespace(statistics=lambda: {})

        @asynccontextmanager
        async def shown() -> AsyncIterator[None]:
            async with background(views.follow(membership, network, recipe)), background(_scraped(metrics)):
                yield

        await asyncio.sleep(2.0)  # the reader starts, as a browser does once an hour
        yield shown


async def _reader(page: Page) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", READER, f"{page.address}events")


async def _scraped(metrics: NodeMetrics) -> None:
    while True:
        metrics.text(time.time())
        await asyncio.sleep(SCRAPE_EVERY_S)


async def compare(peers: int, pairs: int, seconds: float) -> list[tuple[float, float]]:
    """Return tokens with page and metrics over those without, a second and a processor second, for each pair."""
    training, ratios = Training(), []
    try:
        async with serving(peers) as shown:
            for pair in range(pairs):
                speeds = {}
                for on in (pair % 2 == 0, pair % 2 == 1):  # by turns who is first
                    async with shown() if on else nullcontext():
                        before, used_s, begun_s = training.tokens, training.used_s, time.perf_counter()
                        await asyncio.sleep(seconds)
                        done, passed_s = training.tokens - before, time.perf_counter() - begun_s
                        speeds[on] = (done / passed_s, done / (training.used_s - used_s))
                ratios.append((speeds[True][0] / speeds[False][0], speeds[True][1] / speeds[False][1]))
    finally:
        training.stop()
    return ratios


async def server_share(peers: int, seconds: float) -> float:
    """Return the processor time a second that page and metrics take of this process."""
    async with serving(peers) as shown, shown():
        used_s, begun_s = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (time.process_time() - used_s) / (time.perf_counter() - begun_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    share = asyncio.run(server_share(given.peers, 10 * given.seconds))
    print(f"server at {given.peers} peers, a frame a second, one reader: {share:.2%} of a core")
    found = asyncio.run(compare(given.peers, given.pairs, given.seconds))
    for name, ratios in zip(("second", "processor second"), zip(*found, strict=True), strict=True):
        low, _, high = quantiles(ratios, n=4)
        print(f"tokens a {name} with page and metrics over without: {median(ratios):.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
