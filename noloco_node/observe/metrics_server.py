"""Metrics over HTTP, in the node's own loop: one page, and nothing that anybody could ask for beside it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.network.interface import PeerNetwork
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.run.config import RunConfig
from noloco_node.swarm.membership import Membership

if TYPE_CHECKING:
    from noloco_node.observe.metrics import NodeMetrics

PATH = "/metrics"
USUAL_HOST = "127.0.0.1"
REQUEST_BYTES = 8192
REQUEST_S = 5.0
"""For which a request may take to arrive, and its answer to leave."""
MOST_REQUESTS = 16
"""At once; one more is let go of unanswered."""
LOOK_EVERY_S = 5.0


class MetricsPlace(NamedTuple):
    """Where metrics are served."""

    host: str
    port: int


def parse_place(text: str, *, is_open: bool) -> MetricsPlace:
    """Return the place that HOST:PORT, or PORT alone, names; raise `UserError` for none, and for one in the open."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or USUAL_HOST
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(
            f"{text!r} is no place to serve metrics at.",
            why="it has no port between 0 and 65535",
            hint="give a port, such as --metrics 9464, or an address and a port",
            code=Exit.USAGE,
        )
    if not is_open and not _is_own(host):
        raise UserError(
            f"Metrics at {host} could be read by others.",
            why="they are served without a password, and say what this machine does and when",
            hint="leave the address out, or add --metrics-open where a firewall or a container keeps others away",
            code=Exit.USAGE,
        )
    return MetricsPlace(host, int(port))


@asynccontextmanager
async def metrics_served(place: MetricsPlace | None, run_id: str) -> AsyncIterator[NodeMetrics | None]:
    """Serve metrics for as long as the body runs; None where nobody asked for any."""
    if place is None:
        yield None
        return
    from noloco_node.observe.metrics import NodeMetrics

    metrics = NodeMetrics(run_id)
    page = _Page(metrics)
    try:
        server = await asyncio.start_server(page.answer, place.host, place.port, limit=REQUEST_BYTES)
    except OSError as error:
        raise UserError(
            f"Cannot serve metrics at {place.host}:{place.port}.",
            why="another program listens there" if error.errno == errno.EADDRINUSE else reason_of(error),
            hint="give another port with --metrics, or 0 for any that is free",
            code=Exit.PORT_TAKEN,
        ) from error
    async with server:
        port = server.sockets[0].getsockname()[1]
        from noloco_node.terminal import say

        say(f"metrics for Prometheus: http://{place.host}:{port}{PATH}")
        yield metrics


async def follow(metrics: NodeMetrics, membership: Membership, network: PeerNetwork, run: RunConfig) -> NoReturn:
    """Keep what metrics say of the swarm up to date."""
    observer = RosterObserver(run, "")
    while True:
        view = observer.view(membership.roster, time.time())
        metrics.show(view, membership.watched, network.statistics())
        await asyncio.sleep(LOOK_EVERY_S)


class _Page:
    """Answers requests, few at a time."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics, self._at_once = metrics, 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        self._at_once += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                if self._at_once <= MOST_REQUESTS:
                    writer.write(self._reply(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # whoever asks badly gets nothing
        finally:
            self._at_once -= 1
            writer.close()

    def _reply(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode(errors="replace")
        if path != PATH or method != b"GET":
            status = "404 Not Found" if path != PATH else "405 Method Not Allowed"
            return _response(status, "text/plain; charset=utf-8", f"There is {PATH} here.\n".encode())
        return _response("200 OK", "text/plain; version=0.0.4; charset=utf-8", self._metrics.text())


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _is_own(host: str) -> bool:
    """Say whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
