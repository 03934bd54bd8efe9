"""The page in a real browser: it fills, follows, survives a restart of the node, and shows as text what strangers say.

Takes Chromium and `pip install '.[browser]'`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from limits import LAST_RESORT_S
from page_frames import BEGUN, HOSTILE, view_of, with_course

from noloco_node.observe.playback import Playback
from noloco_node.web import server
from noloco_node.web.places import PagePlace, ServedPlace
from noloco_node.web.server import page_served

if TYPE_CHECKING:
    from playwright.async_api import Page as Tab

playwright_api = pytest.importorskip("playwright.async_api", reason="no playwright: pip install '.[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.real_time,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium"),
]
TOKEN = "0123456789abcdef0123456789abcdef"


@asynccontextmanager
async def tab(wrong: list[str], **options: Any) -> AsyncIterator[Tab]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with asyncio.timeout(LAST_RESORT_S), playwright_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        try:
            page = await (await browser.new_context(**options)).new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("dialog", lambda dialog: wrong.append(dialog.message))
            page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
            yield page
        finally:
            await browser.close()


def place() -> PagePlace:
    """A place whose port is free at this moment, and stays the same over a restart."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return PagePlace(ServedPlace("127.0.0.1", taken.getsockname()[1]), TOKEN)


def url(where: PagePlace) -> str:
    return f"{where.place.url(where.place.port)}/{TOKEN}/"


async def shows(tab: Tab, selector: str, text: str) -> None:
    await tab.locator(selector).filter(has_text=text).first.wait_for()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "say", lambda _: None)
    monkeypatch.setattr(server, "LEAST_PAUSE_S", 0.0)


async def test_it_fills_follows_and_survives_a_restart_of_the_node() -> None:
    wrong: list[str] = []
    where = place()

    def view(moment: int) -> Any:
        return with_course(view_of(20, 4, moment), 30, lambda number: view_of(1, 1, number))

    async with tab(wrong) as seen:
        async with page_served(where) as page:
            page.show(view(10))
            await seen.goto(url(where))
            await shows(seen, "#figures", "10K of 1M")
            assert await seen.locator("#rows tr").count() == 20
            assert await seen.locator("#map .peer").count() == 20
            assert await seen.locator("#map .route").count() == 3 * 15
            assert await seen.locator("#map .meeting").count() > 0
            assert await seen.locator("#loss polyline").count() == 1
            await shows(seen, "#given-key", "signed for 40.5K of the 45K tokens")
            await shows(seen, "#rows", "200 Wh")
            page.show(view(20))
            await shows(seen, "#figures", "20K of 1M")
            await shows(seen, "#changes", "came at moment 20")
            await shows(seen, "#connection", "live")
        await shows(seen, "#connection", "no connection")
        noise = list(wrong)  # the browser's own, of the connection that broke
        async with page_served(where) as page:
            page.show(view(30))
            await shows(seen, "#figures", "30K of 1M")
            await shows(seen, "#connection", "live")
        assert not [each for each in noise if "ERR_" not in each and "net::" not in each]


async def test_a_curve_stays_in_its_picture_when_the_clock_is_set_back() -> None:
    wrong: list[str] = []
    where, at = place(), (50.0, 60.0, 10.0, 20.0)
    moments = tuple(msgspec.structs.replace(view_of(1, 1, 1).course[0], at=BEGUN + seconds) for seconds in at)
    async with tab(wrong) as seen, page_served(where) as page:
        page.show(msgspec.structs.replace(view_of(1, 1, 1), course=moments))
        await seen.goto(url(where))
        points = await seen.locator("#loss polyline").get_attribute("points")
        width = await seen.locator("#loss").evaluate("picture => picture.clientWidth")
        assert all(0.0 <= float(point.split(",")[0]) <= width for point in points.split())
    assert wrong == []


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}])
async def test_what_a_stranger_says_is_text_and_fits_a_phone(options: dict[str, Any]) -> None:
    wrong: list[str] = []
    where = place()

    async with tab(wrong, **options) as seen, page_served(where) as page:
        page.show(view_of(30, 3, 1, name=HOSTILE, words=HOSTILE))
        await seen.goto(url(where))
        await shows(seen, "#name", "<img src=x onerror=alert(1)>")
        await shows(seen, "#rows", "<script>alert(2)</script>")
        assert await seen.locator("main img, main script").count() == 0
        assert not re.search("[\x1b\u202e]", await seen.locator("body").inner_text())
        width, seen_width = await seen.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= seen_width
        await seen.locator("#rows button").first.click()
        assert await seen.locator("#rows tr.chosen").count() == 1
    assert wrong == []


async def test_a_recording_is_steered_by_keys_and_by_a_slider() -> None:
    wrong: list[str] = []
    where, playback = place(), Playback(0.0, 100.0)

    phone = {"width": 390, "height": 844}
    async with tab(wrong, reduced_motion="reduce", viewport=phone) as seen, page_served(where, takes_keys=True) as page:
        page.show(view_of(4, 2, 1), playback.state())
        await seen.goto(url(where))
        await shows(seen, "#clock", "0:00 of 1:40")
        for key in (" ", "ArrowRight", "End"):
            await seen.keyboard.press(key)
        await seen.locator("#position").fill("0.5")
        pressed: list[str] = []
        while len(pressed) < 4:
            pressed += page.pressed()
            await asyncio.sleep(0)
        assert sorted(pressed) == ["0.5", "end", "forward", "pause"]
        playback.press("0.5")
        playback.press("pause")
        page.show(view_of(4, 2, 1), playback.state())
        await shows(seen, "#clock", "0:50 of 1:40")
        await shows(seen, "#speed", "paused")
        assert await seen.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")
        width, seen_width = await seen.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= seen_width
    assert wrong == []
