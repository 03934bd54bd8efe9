"""One page about a swarm over HTTP: three files of ours, and a stream of what there is to see.

Whoever reads it sees the newest frame (`observe.page_frame`), whole, and none that it was too slow for: so it does not
count how often somebody shows something, nor how slowly anybody reads. An address holds a random token: other users of
the machine, and pages of other hosts in the same browser, cannot guess it. As they could make the browser ask under a
name of theirs, the name that is asked for has to be an address, or the one that the owner gave.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import web

from noloco_node.errors import UserError
from noloco_node.observe.page_frame import page_frame
from noloco_node.observe.playback import KEYS, PlaybackState
from noloco_node.observe.served_place import ServedPlace, refused_place
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.storage.atomic_file import write_whole
from noloco_node.terminal import say

FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
LEAST_PAUSE_S = 0.25
"""Between two frames to one reader."""
SIGN_OF_LIFE_S = 10.0
WRITE_S = 30.0
"""For which a reader may take none of what it asked for."""
MOST_READERS = 32
MOST_KEYS = 64
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PagePlace(NamedTuple):
    """Where a page is served. `token`: part of its address; "" for a page that anybody may see."""

    place: ServedPlace
    token: str


def kept_token(path: Path) -> str:
    """Return the token that a home keeps, or keep a new one: so the address outlives the process."""
    with suppress(OSError, UnicodeDecodeError):
        found = path.read_text().strip()
        if found.isascii() and found.isalnum() and len(found) >= 32:
            return found
    token = new_token()
    with suppress(UserError):
        write_whole(path, token.encode())
    return token


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_hex(16)


class Page:
    """What is to be seen at present. Everything may be called from any thread."""

    def __init__(self, *, takes_keys: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._content: tuple[SwarmView, PlaybackState | None] | None = None
        self._number = 0
        self._encoded: tuple[int, bytes] = (0, b"")
        self._changed = asyncio.Event()
        self._keys: deque[str] = deque(maxlen=MOST_KEYS)
        self.takes_keys, self.closed, self.address = takes_keys, False, ""

    def show(self, view: SwarmView, playback: PlaybackState | None = None) -> None:
        """Show this from now on."""
        with suppress(RuntimeError):  # the loop is gone, and so are its readers
            self._loop.call_soon_threadsafe(self._take, view, playback)

    def pressed(self) -> list[str]:
        """Return what was pressed on the page since the last call, each by its meaning."""
        return [self._keys.popleft() for _ in range(len(self._keys))]

    def press(self, key: str) -> bool:
        """Take a key; return whether it means anything: of `playback.KEYS`, or a share of the recording to go to."""
        with suppress(ValueError):
            if 0.0 <= float(key) <= 1.0:
                self._keys.append(key)
                return True
        if key == "quit" or key not in KEYS.values():
            return False
        self._keys.append(key)
        return True

    def close(self) -> None:
        """Let all readers go."""
        self.closed = True
        self._changed.set()

    async def newer(self, seen: int) -> tuple[int, bytes]:
        """Wait for something newer than `seen`; return its number and bytes, no bytes where nothing came for long."""
        if self._number <= seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await self._changed.wait()
        if self._number <= seen or self._content is None:
            return seen, b""
        if self._encoded[0] != self._number:  # once for all readers, and only where there is one
            self._encoded = (self._number, msgspec.json.encode(page_frame(*self._content)))
        return self._encoded

    def _take(self, view: SwarmView, playback: PlaybackState | None) -> None:
        self._content, self._number = (view, playback), self._number + 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@asynccontextmanager
async def page_served(where: PagePlace | None, *, takes_keys: bool = False) -> AsyncIterator[Page | None]:
    """Serve a page for as long as the body runs, and say its address; None where nobody asked for any.

    `takes_keys`: whoever sees it may steer it, unless it is open to all.
    """
    if where is None:
        yield None
        return
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # or strangers could fill the log
    page = Page(takes_keys=takes_keys and bool(where.token))
    runner = web.AppRunner(_application(page, where), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, where.place.host, where.place.port)
        try:
            await site.start()
        except OSError as error:
            raise refused_place(where.place, "--web", error) from error
        path = f"/{where.token}/" if where.token else "/"
        page.address = where.place.url(runner.addresses[0][1]) + path
        say(f"the swarm in a browser: {page.address}")
        yield page
    finally:
        page.close()
        await runner.cleanup()


def _application(page: Page, where: PagePlace) -> web.Application:
    files = {name: ((Path(__file__).parent / file).read_bytes(), kind) for name, (file, kind) in FILES.items()}
    readers = 0

    async def events(request: web.Request) -> web.StreamResponse:
        nonlocal readers
        if readers >= MOST_READERS:
            raise web.HTTPServiceUnavailable(text="Too many read this page already.\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        readers += 1
        try:
            await response.prepare(request)
            await response.write(b"retry: 2000\n\n")
            await _tell(page, response)
        except (OSError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            readers -= 1
        return response

    async def key(request: web.Request) -> web.StreamResponse:
        if not page.takes_keys or not page.press((await request.read())[:32].decode(errors="replace")):
            raise web.HTTPBadRequest(text="That key means nothing here.\n")
        return web.Response(status=204)

    async def answer(request: web.Request) -> web.StreamResponse:
        if not where.place.is_meant(request.host):
            raise web.HTTPMisdirectedRequest(text="Ask by an address.\n")
        name = _behind(request.path, where.token)
        if request.method == "POST" and name == "key":
            return await key(request)
        if request.method != "GET" or name is None or (name != "events" and name not in files):
            raise web.HTTPNotFound(text="There is nothing here.\n")
        if name == "events":
            return await events(request)
        body, kind = files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def guard(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    application = web.Application(client_max_size=1024)
    application.router.add_route("*", "/{path:.*}", answer)
    application.on_response_prepare.append(guard)

    async def close(_: web.Application) -> None:
        page.close()

    application.on_shutdown.append(close)
    return application


async def _tell(page: Page, response: web.StreamResponse) -> None:
    """Write the newest frame again and again, at the pace of the reader."""
    seen = 0
    while not page.closed:
        seen, frame = await page.newer(seen)
        async with asyncio.timeout(WRITE_S):
            await response.write(b"data: %b\n\n" % frame if frame else b":\n\n")
        await asyncio.sleep(LEAST_PAUSE_S)


def _behind(path: str, token: str) -> str | None:
    """Return what of the page a path asks for; None where it does not know the token."""
    if not token:
        return path.removeprefix("/")
    given, slash, name = path.removeprefix("/").partition("/")
    return name if slash and hmac.compare_digest(given.encode(), token.encode()) else None
