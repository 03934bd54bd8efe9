"""The web server, without a browser: who may ask, what is told, and what a reader or a flood may cost."""

import asyncio
import contextlib
import json
import math
import re
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp.web_protocol import RequestHandler
from command_line import refused
from event_loops import on_both_loops
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from page_frames import view_of
from user_errors import user_error

from noloco_node.cli.options import page_place
from noloco_node.errors import Exit, UserError
from noloco_node.observe.playback import Playback
from noloco_node.swarm.invite import SCHEME
from noloco_node.tasks import background
from noloco_node.web import server
from noloco_node.web.places import PagePlace, ServedPlace, kept_token, metrics_place, parse_place
from noloco_node.web.server import FILES, HEADERS, OF_METRICS, Page, metrics_served, page_in_thread, page_served

pytestmark = pytest.mark.real_time
WHOLE_BYTES = 150_000
OWN = PagePlace(ServedPlace("127.0.0.1", 0), "0123456789abcdef0123456789abcdef")
OPEN = PagePlace(ServedPlace("127.0.0.1", 0), "")
HEAD = f"GET /{OWN.token}/%b HTTP/1.1\r\nHost: localhost\r\n".encode()
WHOLE_LINE_BYTES = 64 * 2**20  # many times what the system keeps of a connection
PATIENCE = 1000  # turns of the loop in which nothing more is taken


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(server, "say", lines.append)
    monkeypatch.setattr(server, "LEAST_PAUSE_S", 0.0)
    return lines


@asynccontextmanager
async def served(
    said: list[str], where: PagePlace = OWN, *, takes_keys: bool = False
) -> AsyncIterator[tuple[Page, str, aiohttp.ClientSession]]:
    async with page_served(where, takes_keys=takes_keys) as page, aiohttp.ClientSession() as session:
        assert page is not None
        found = re.search(r"http://\S+", said[-1])
        yield page, found[0], session


async def frames(response: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = await response.content.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            found.append(json.loads(line.removeprefix(b"data: ")))
    return found


async def test_the_page_is_small_and_its_own_and_says_so(said: list[str]) -> None:
    whole = 0
    async with served(said) as (_, url, session):
        for name in FILES:
            async with session.get(url + name) as response:
                assert response.status == 200
                assert {name: response.headers[name] for name in HEADERS} == HEADERS
                body = await response.read()
                whole += len(body)
                assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", body), "another host"
                assert b"innerHTML" not in body
    assert whole < WHOLE_BYTES


async def test_who_does_not_know_the_token_or_comes_by_a_foreign_name_finds_nothing(said: list[str]) -> None:
    async with served(said) as (_, url, session):
        base = url.removesuffix(f"{OWN.token}/")
        for path in ("", "events", "page.js", OWN.token, f"{OWN.token[:-1]}0/", f"{OWN.token}/../etc", "é/x"):
            async with session.get(base + path, allow_redirects=False) as response:
                assert (response.status, response.headers["X-Content-Type-Options"]) == (404, "nosniff")
        for host, status in (("evil.example", 421), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200)):
            async with session.get(url, headers={"Host": host}) as response:
                assert response.status == status
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            async with session.request(method, url) as response:
                assert response.status == 404


async def test_who_comes_late_sees_the_run_so_far_and_then_what_is_new(said: list[str]) -> None:
    async with served(said) as (page, url, session):
        page.show(view_of(4, 2, 1))
        page.show(view_of(4, 2, 2))
        async with session.get(f"{url}events") as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            [first] = await frames(response, 1)
            page.show(view_of(4, 2, 3))
            [then] = await frames(response, 1)
    assert (first["tokens"], then["tokens"]) == (2000, 3000)
    assert len(first["peers"]) == 4
    assert first["course"]["tokens_per_s"] == [500.0]


async def test_a_flood_of_news_is_told_in_few_frames(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    monkeypatch.setattr(server, "page_frame", lambda view, _: encoded.append(view) or {"tokens": view.tokens})
    view = view_of(2, 2)

    async with served(said) as (page, url, session), session.get(f"{url}events") as response:
        for _ in range(10_000):
            page.show(view)
        page.show(view_of(2, 2, 7))
        assert [frame["tokens"] for frame in await frames(response, 1)] == [7000]
        assert len(encoded) <= 2


async def test_readers_are_few(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_READERS", 1)

    async with served(said) as (page, url, session):
        page.show(view_of(2, 2))
        async with session.get(f"{url}events") as first, session.get(f"{url}events") as second:
            assert (first.status, second.status) == (200, 503)


async def test_a_reader_that_takes_nothing_is_let_go(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.01)
    monkeypatch.setattr(server, "MOST_READERS", 1)
    monkeypatch.setattr(server, "page_frame", lambda *_: {"large": "x" * 2_000_000})
    view = view_of(2, 2)

    async def show(page: Page) -> None:
        while True:
            page.show(view)
            await asyncio.sleep(0)

    async with served(said) as (page, url, session), asyncio.timeout(LAST_RESORT_S):
        port = port_of(url)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(f"GET /{OWN.token}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await reader.readline()
        async with background(show(page)):
            status = 503
            while status == 503:  # until there is room for another reader
                async with session.get(f"{url}events") as response:
                    status = response.status
        assert status == 200
        writer.transport.abort()


async def test_keys_steer_a_recording_and_nothing_else(said: list[str]) -> None:
    async def press(where: PagePlace, *, takes_keys: bool) -> tuple[list[int], list[str]]:
        statuses = []
        async with served(said, where, takes_keys=takes_keys) as (page, url, session):
            for key in ("pause", "0.5", "quit", "nan", "2", "x" * 100_000):
                async with session.post(f"{url}key", data=key) as response:
                    statuses.append(response.status)
            return statuses, page.pressed()

    assert await press(OWN, takes_keys=True) == ([204, 204, 400, 400, 400, 413], ["pause", "0.5"])
    assert (await press(OPEN, takes_keys=True))[1] == []  # strangers see that page
    assert (await press(OWN, takes_keys=False))[1] == []


@given(st.floats(0.0, 1.0))
def test_a_share_is_a_place_in_the_recording(share: float) -> None:
    playback = Playback(100.0, 300.0)
    playback.press(str(share))
    assert playback.now == pytest.approx(100.0 + 200.0 * share)
    assert playback.state().at_s == pytest.approx(200.0 * share)


async def test_a_taken_port_is_one_sentence(said: list[str]) -> None:
    async with served(said) as (_, url, _session):
        place = ServedPlace("127.0.0.1", port_of(url))
        elsewhere = ServedPlace("192.0.2.7", 0)  # kept for examples, so no machine has it
        for each, hint in ((place, "give another port "), (elsewhere, "give an address of this machine ")):
            with user_error(Exit.PORT_TAKEN, rf"Cannot serve --web at {re.escape(each.host)}:\d+\.") as caught:
                async with page_served(PagePlace(each, "")):
                    pass
            assert caught.value.hint.startswith(hint)
        with pytest.raises(UserError, match="Cannot serve --web"), page_in_thread(PagePlace(place, "")):
            pass
        with pytest.raises(UserError, match="Cannot serve --metrics"):
            async with metrics_served(place, "run"):
                pass


def test_a_page_in_a_thread_shows_what_another_loop_gives_it(said: list[str]) -> None:
    async def read(url: str) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}events") as response:
            return await frames(response, 1)

    with page_in_thread(OWN) as page:
        page.show(view_of(2, 2, 5))
        assert asyncio.run(read(said[-1].split(": ", 1)[1]))[0]["tokens"] == 5000
    page.show(view_of(2, 2, 6))  # after its end: of no use, and no error


def test_an_address_outlives_its_process_where_a_home_keeps_it(tmp_path: Path) -> None:
    first = kept_token(tmp_path / "token")
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert kept_token(tmp_path / "token") == first
    (tmp_path / "token").write_text("../../short")
    assert kept_token(tmp_path / "token") not in (first, "../../short")
    assert len(kept_token(tmp_path / "nowhere" / "token")) == 32


def test_a_token_is_left_out_only_where_that_is_asked_for() -> None:
    assert page_place(None, is_open=False) is None
    for text in ("8080", "0.0.0.0:8080", "[::]:0"):
        closed, opened = page_place(text, is_open=False), page_place(text, is_open=True)
        assert closed is not None
        assert (len(closed.token), opened.token) == (32, "")
    with pytest.raises(UserError, match="no page to open"):
        page_place(None, is_open=True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9464", ServedPlace("127.0.0.1", 9464)),
        ("localhost:1", ServedPlace("localhost", 1)),
        ("[::1]:9464", ServedPlace("::1", 9464)),
        ("127.0.0.2:0", ServedPlace("127.0.0.2", 0)),
    ],
)
def test_metrics_at_a_place_of_our_own_need_no_permission(text: str, place: ServedPlace) -> None:
    assert metrics_place(None, is_open=False) is None
    assert metrics_place(text, is_open=False) == place


@pytest.mark.parametrize("text", ["0.0.0.0:9464", "[::]:9464", "192.168.1.2:9464", "example.org:9464"])
def test_metrics_in_the_open_are_refused_unless_asked_for(text: str) -> None:
    with pytest.raises(UserError, match="could be read by others"):
        metrics_place(text, is_open=False)
    opened = metrics_place(text, is_open=True)
    assert opened.port == 9464


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1.2.3.4", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:²", "9" * 5000),
        *("::1", "::1:80", "[::1]", "a..b:80", f"{'a' * 64}:80"),
    ],
)
def test_a_place_needs_a_host_and_a_port(text: str) -> None:
    with user_error(Exit.USAGE, "no place"):
        metrics_place(text, is_open=True)


@pytest.mark.parametrize("option", [("--metrics", "0.0.0.0:9464"), ("--web", "nowhere")])
def test_a_wrong_place_is_refused_before_anything_is_begun(tmp_path: Path, option: tuple[str, str]) -> None:
    refused("join", f"{SCHEME}x", "--home", tmp_path / "h", *option, code=Exit.USAGE)
    assert not (tmp_path / "h").exists()


@given(st.sampled_from(["MyHost.local", "bücher.example", "LOCALHOST", "127.0.0.1", "[::1]"]), st.randoms())
def test_a_name_that_the_owner_gave_is_known_as_a_browser_writes_it(host: str, random: Random) -> None:
    place = parse_place(f"{host}:80", "--web")
    asked = "".join(random.choice((each.lower(), each.upper())) for each in place.host.encode("idna").decode())
    bare = f"[{asked}]" if ":" in asked else asked
    assert all(map(place.is_meant, (bare, f"{bare}:80")))
    assert not place.is_meant(f"{bare}.example:80")


@asynccontextmanager
async def scraped(said: list[str]) -> AsyncIterator[int]:
    async with metrics_served(ServedPlace("127.0.0.1", 0), "run") as metrics:
        assert metrics is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", said[-1])
        yield int(found[1])


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LAST_RESORT_S):
            writer.write(request)
            return await reader.read()
    except ConnectionError:  # closed before all of the request was read
        return b""
    finally:
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_metrics_are_there_and_nothing_else(said: list[str]) -> None:
    async with scraped(said) as port:
        told = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
        head, _, body = told.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"version=0.0.4" in head
        assert b'noloco_run_info{digest="run"} 1.0' in body
        for request, status in (
            (b"GET /metrics HTTP/1.1\r\nhost: elsewhere.example\r\n\r\n", b"421"),
            (b"GET /etc/passwd HTTP/1.0\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.0\r\n\r\n", b"405"),
            (b"x" * 100_000, b"400"),
            (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 20 + b"\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 600 + b"\r\n\r\n", b"400"),
        ):
            assert (await ask(port, request)).partition(b" ")[2].startswith(status)


@on_both_loops
async def test_connections_that_ask_for_nothing_are_few_and_keep_nobody_out(
    said: list[str], monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    errors: list[dict[str, Any]] = []
    begin, there = aiohttp.web.Server.connection_made, list[int]()

    def begun(self: aiohttp.web.Server, handler: Any, line: asyncio.Transport) -> None:
        begin(self, handler, line)
        there.append(sum(each.transport is not None and not each.transport.is_closing() for each in self.connections))

    monkeypatch.setattr(aiohttp.web.Server, "connection_made", begun)
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    async with scraped(said) as port:
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4 * OF_METRICS.connections)]
        held = [await asyncio.open_connection(sock=each) for each in strangers]  # all came before the loop saw any
        assert await ask(port, b"GET /metrics HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(LAST_RESORT_S):
            for reader, _ in held[: 1 - OF_METRICS.connections]:  # the oldest made room
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        for _, writer in held:
            await closed(writer)
    assert not errors, "strangers could fill the log"
    assert max(there) <= OF_METRICS.connections + 1, "each newcomer ends one"


@on_both_loops
async def test_a_stranger_that_takes_no_answer_keeps_no_connection(
    said: list[str], monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    lines: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
    ends: asyncio.Queue[None] = asyncio.Queue()
    begin, end = aiohttp.web.Server.connection_made, aiohttp.web.Server.connection_lost

    def begun(self: aiohttp.web.Server, handler: Any, line: asyncio.Transport) -> None:
        lines.put_nowait(line)
        begin(self, handler, line)

    def ended(self: aiohttp.web.Server, *args: Any) -> None:
        ends.put_nowait(None)
        end(self, *args)

    monkeypatch.setattr(aiohttp.web.Server, "connection_made", begun)
    monkeypatch.setattr(aiohttp.web.Server, "connection_lost", ended)
    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    async with served(said) as (_, url, _session), asyncio.timeout(LAST_RESORT_S):
        is_jammed = False
        while not is_jammed:  # where the machine halts, the connection is let go before
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                stranger.connect(("127.0.0.1", port_of(url)))
                line = await lines.get()
                with contextlib.suppress(ConnectionError):
                    while ends.empty() and not line.get_write_buffer_size():
                        stranger.send(HEAD % b"" + b"\r\n")
                        await asyncio.sleep(0.001)
                is_jammed = ends.empty()
                await ends.get()


@on_both_loops
async def test_where_all_connections_are_at_work_one_more_is_refused(
    said: list[str], monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    monkeypatch.setattr(server, "OF_PAGE", server.OF_PAGE._replace(connections=2))
    async with served(said) as (page, url, session):
        page.show(view_of(2, 2))
        async with session.get(f"{url}events") as first, session.get(f"{url}events") as second:
            assert await ask(port_of(url), HEAD % b"" + b"\r\n") == b""
            page.show(view_of(2, 2))
            assert [len(await frames(each, 2)) for each in (first, second)] == [2, 2]


async def test_a_request_that_does_not_come_is_not_waited_for(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)

    async with scraped(said) as port, served(said) as (_, url, _session):
        page_port = port_of(url)
        for each in (port, page_port):
            assert await ask(each, b"GET /metrics HTTP/1.1\r\nHost: loc") == b""
        body = f"POST /{OWN.token}/key HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"
        assert await ask(page_port, body.encode()) == b""


async def test_a_body_that_nobody_asked_for_is_hardly_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    assert RequestHandler.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(RequestHandler.__init__.__kwdefaults__, "lingering_time", math.inf)

    async with served(said) as (_, url, _session), asyncio.timeout(LAST_RESORT_S):
        answer = await ask(port_of(url), HEAD % b"" + b"Content-Length: 9\r\n\r\nx")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_is_not_unpacked(said: list[str]) -> None:
    async with served(said, takes_keys=True) as (page, url, session):
        packed = zlib.compress(b"pause")
        async with session.post(f"{url}key", data=packed, headers={"Content-Encoding": "deflate"}) as response:
            assert (response.status, page.pressed()) == (400, [])


@pytest.mark.parametrize(
    ("ends", "more"), [(b"", HEAD % b"x" + b"\r\n"), (b"Upgrade: x\r\nConnection: upgrade\r\n", b"x")]
)
async def test_what_comes_behind_a_request_is_not_kept(said: list[str], ends: bytes, more: bytes) -> None:
    """A reader of the frames could fill the memory of the node otherwise."""
    async with served(said) as (_, url, _session):
        with socket.create_connection(("127.0.0.1", port_of(url))) as line:
            line.setblocking(False)
            line.send(HEAD % b"events" + ends + b"\r\n")
            sent = waited = 0
            while waited < PATIENCE and sent < WHOLE_LINE_BYTES:
                try:
                    sent, waited = sent + line.send(more * 1000), 0
                except BlockingIOError:
                    waited += 1
                    await asyncio.sleep(0)
    assert sent < WHOLE_LINE_BYTES


def port_of(url: str) -> int:
    return int(url.split(":")[2].partition("/")[0])
