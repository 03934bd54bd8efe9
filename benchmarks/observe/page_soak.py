"""A browser that stays on the page: its memory and work, and ours, over so many frames of a swarm.

    python -m benchmarks.observe.page_soak [--peers 100] [--frames 3600] [--pause 0.06]

An hour of frames, one a second, is shown faster: each has moved peers, new figures, three routes a peer, and a full
course. Takes Chromium and playwright (`pip install '.[browser]'`). Memory is taken after the page has collected its
garbage. The work of the page is the processor time of its main thread, that of the node of the whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from itertools import pairwise

import psutil
from msgspec import structs

from benchmarks.observe.page_cost import STAGES, membership_of
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.swarm_view import Route, SwarmView
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.web import server
from noloco_node.web.places import PagePlace, ServedPlace
from noloco_node.web.server import page_served

LOOKS = 6


def _with_routes(view: SwarmView) -> SwarmView:
    stages = [[peer.peer for peer in view.peers if peer.stage == stage] for stage in range(STAGES)]
    found = [
        Route(origin=origin, target=below[(number + 7 * more) % len(below)], per_s=0.5 + more)
        for here, below in pairwise(stages)
        for number, origin in enumerate(here)
        for more in range(3)
    ]
    return structs.replace(view, routes=tuple(found))


async def soak(peers: int, frames: int, pause_s: float) -> None:
    """Show so many frames; print a line now and then."""
    # Of the extra `browser`, which a check of types and a collection of tests do without.
    from playwright.async_api import async_playwright

    server.LEAST_PAUSE_S = 0.0
    run = decode_run(demo_run_text(stages=STAGES, replicas=20, steps=10_000, seed=0), "a benchmark's run file")
    observer, membership, ours = RosterObserver(run, "0" * 64), membership_of(peers), psutil.Process()
    place = PagePlace(ServedPlace("127.0.0.1", 0), "x" * 32)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright, page_served(place) as page:
        assert page is not None
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        tab = await browser.new_page(viewport={"width": 1440, "height": 1000})
        tools = await tab.context.new_cdp_session(tab)
        await tools.send("Performance.enable", {"timeDomain": "threadTicks"})
        await tab.goto(page.address)
        begun_at = time.time()
        for number in range(frames + 1):
            page.show(_with_routes(observer.view(membership.roster, begun_at + number)))
            await asyncio.sleep(pause_s)
            if number % max(1, frames // LOOKS) == 0:
                await tools.send("HeapProfiler.collectGarbage")
                told = (await tools.send("Performance.getMetrics"))["metrics"]
                now = {each["name"]: each["value"] for each in told}
                print(
                    f"frame {number:>6}: page {now['JSHeapUsedSize'] / 1e6:.2f} MB, {now['Nodes']:.0f} elements, "
                    f"{now['TaskDuration']:.1f} s of work; node {ours.memory_info().rss / 1e6:.0f} MB, "
                    f"{sum(ours.cpu_times()[:2]):.1f} s",
                    flush=True,
                )
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--frames", type=int, default=3600)
    parser.add_argument("--pause", type=float, default=0.06)
    given = parser.parse_args()
    asyncio.run(soak(given.peers, given.frames, given.pause))


if __name__ == "__main__":
    main()
