"""The web server: one page about a swarm, and metrics for Prometheus; both are read-only.

A reader of the page gets the newest whole frame (`observe.page_frame`) and misses those that it is too slow for. So the
server's work depends neither on how often a view is shown nor on slow readers. The page's address holds a random token:
other users of the machine, and pages of other hosts in the same browser, cannot guess it. Such pages could make the
browser ask under a name of their host, so a request must name an address, or the name that the owner gave. Connections
are few, and a request and its answer take a few seconds at most. A stranger that only connects keeps nobody out.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from noloco_node.network.swarm_clock import CLOCK
from noloco_node.observe.metrics import NodeMetrics
from noloco_node.observe.page_frame import page_frame
from noloco_node.observe.playback import KEYS, PlaybackState
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.terminal import say
from noloco_node.web.places import PagePlace, ServedPlace

METRICS_PATH = "/metrics"
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
LEAST_PAUSE_S = 0.25  # between two frames to one reader
SIGN_OF_LIFE_S = 10.0
WRITE_S = 30.0  # a reader that takes nothing for so long is let go
REQUEST_S = 5.0  # the longest time for a request to arrive, and for its answer to leave, but for the stream of frames
MOST_READERS = 32  # of the page's frames, at once
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


class _Bounds(NamedTuple):
    """`connections` at once: for one more the oldest without a request is closed; if there is none, the new one is.

    `line_bytes`: of a request's first line and each of its headers.
    """

    connections: int
    line_bytes: int
    headers: int


OF_METRICS = _Bounds(connections=16, line_bytes=512, headers=16)
OF_PAGE = _Bounds(connections=128, line_bytes=8190, headers=64)
"""A browser sends the cookies of everything else on the same host."""


@asynccontextmanager
async def _listening(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], place: ServedPlace, option: str, bounds: _Bounds
) -> AsyncIterator[str]:
    """Answer requests within bounds while the body runs; yield the address."""
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # or strangers could fill the log
    asking: set[asyncio.BaseProtocol] = set()

    async def bounded(request: web.Request) -> web.StreamResponse:
        asking.add(request.protocol)
        if request.transport is not None:  # an answer is sent once the system has all of it: nothing lingers after it
            request.transport.set_write_buffer_limits(high=0)
        try:
            return await answer(request)
        except web.HTTPException as refusal:
            refusal.force_close()
            raise
        except (OSError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            asking.discard(request.protocol)

    def connected(handler: RequestHandler, transport: asyncio.Transport) -> None:
        # Not where the connection is accepted: a hundred are, before the first of them counts.
        begin(handler, transport)
        assert server is not None
        there = [each for each in server.connections if each.transport and not each.transport.is_closing()]
        if len(there) > bounds.connections:
            oldest = next((each.transport for each in there if each not in asking and each is not handler), None)
            (oldest or transport).abort()  # to close it would wait for a stranger that reads nothing

    async def guard(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    application = web.Application(client_max_size=1024)
    application.router.add_route("*", "/{path:.*}", bounded)
    application.on_response_prepare.append(guard)
    runner = web.AppRunner(
        application,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=REQUEST_S,  # which begins with the connection: so a request must arrive within it
        lingering_time=REQUEST_S,  # for the rest of a body that nobody asked for
        auto_decompress=False,  # a few bytes of a stranger could stand for many
        max_line_size=bounds.line_bytes,
        max_field_size=bounds.line_bytes,
        max_headers=bounds.headers,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    try:
        begin, server.connection_made = server.connection_made, connected  # type: ignore[method-assign]
        try:
            listener = await asyncio.get_running_loop().create_server(server, place.host, place.port)
        except OSError as error:
            raise place.refused(option, error) from error
        with closing(listener):
            yield place.url(listener.sockets[0].getsockname()[1])
    finally:
        await runner.cleanup()


async def _send(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Send a response; raise `TimeoutError` where the other side does not take it in time."""
    async with asyncio.timeout(REQUEST_S):
        await response.prepare(request)
        await response.write_eof()
    return response


# Metrics.


@asynccontextmanager
async def metrics_served(place: ServedPlace | None, run_id: str) -> AsyncIterator[NodeMetrics | None]:
    """Serve metrics while the body runs, and say their address; None without a place."""
    if place is None:
        yield None
        return
    metrics = NodeMetrics(run_id)

    async def answer(request: web.Request) -> web.StreamResponse:
        # Metrics that are open to others have a name that others gave them, and nothing to hide.
        if place.is_own and not all(map(place.is_meant, request.headers.getall("Host", ()))):
            raise web.HTTPMisdirectedRequest(text="Ask by an address.\n")
        if request.path != METRICS_PATH:
            raise web.HTTPNotFound(text=f"There is {METRICS_PATH} here.\n")
        if request.method != "GET":
            raise web.HTTPMethodNotAllowed(request.method, ["GET"])
        response = web.Response(
            body=metrics.text(CLOCK.unix_s()), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )
        response.force_close()
        return await _send(request, response)

    async with _listening(answer, place, "--metrics", OF_METRICS) as address:
        say(f"metrics for Prometheus: {address}{METRICS_PATH}")
        yield metrics


# The page.


class Page:
    """The present content of the page. Any thread may call its methods."""

    def __init__(self, *, takes_keys: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._content: tuple[SwarmView, PlaybackState | None] | None = None
        self._number = 0
        self._encoded: tuple[int, bytes] = (0, b"")
        self._changed = asyncio.Event()
        self._keys: deque[str] = deque(maxlen=MOST_KEYS)
        self.takes_keys, self.closed, self.address = takes_keys, False, ""

    def show(self, view: SwarmView, playback: PlaybackState | None = None) -> None:
        with suppress(RuntimeError):  # the loop is gone, and so are its readers
            self._loop.call_soon_threadsafe(self._take, view, playback)

    def pressed(self) -> list[str]:
        """Return the meanings of the keys pressed on the page since the last call."""
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
        self.closed = True
        self._changed.set()

    async def newer(self, seen: int) -> tuple[int, bytes]:
        """Wait for a frame newer than `seen`; return its number and bytes, or no bytes if none came for long."""
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
    """Serve a page while the body runs, and say its address; None without a place.

    `takes_keys`: a reader may steer the recording, unless the page is open to all.
    """
    if where is None:
        yield None
        return
    page = Page(takes_keys=takes_keys and bool(where.token))
    async with _listening(_page_answers(page, where), where.place, "--web", OF_PAGE) as address:
        page.address = f"{address}/{where.token}/" if where.token else f"{address}/"
        say(f"the swarm in a browser: {page.address}")
        try:
            yield page
        finally:
            page.close()


def _page_answers(page: Page, where: PagePlace) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
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
            await _stream(page, response)
        finally:
            readers -= 1
        return response

    async def key(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(REQUEST_S):
            pressed = await request.read()
        if not page.takes_keys or not page.press(pressed[:32].decode(errors="replace")):
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
        return await _send(request, web.Response(body=body, content_type=kind, charset="utf-8"))

    return answer


async def _stream(page: Page, response: web.StreamResponse) -> None:
    """Write the newest frame, again and again, as fast as the reader takes it."""
    seen = 0
    while not page.closed:
        seen, frame = await page.newer(seen)
        async with asyncio.timeout(WRITE_S):
            await response.write(b"data: %b\n\n" % frame if frame else b":\n\n")
        await asyncio.sleep(LEAST_PAUSE_S)


def _behind(path: str, token: str) -> str | None:
    """Return the name behind the token in a path; None for a wrong token."""
    if not token:
        return path.removeprefix("/")
    given, slash, name = path.removeprefix("/").partition("/")
    return name if slash and hmac.compare_digest(given.encode(), token.encode()) else None


@contextmanager
def page_in_thread(where: PagePlace | None) -> Iterator[Page | None]:
    """Serve a page from a thread, for a simulation, whose own loop has virtual time; None without a place."""
    if where is None:
        yield None
        return
    started: Future[tuple[Page, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        async with page_served(where) as page:
            assert page is not None
            started.set_result((page, asyncio.get_running_loop(), over))
            await over.wait()

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = Thread(target=main, name="page", daemon=True)
    thread.start()
    page, loop, over = started.result()
    try:
        yield page
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
