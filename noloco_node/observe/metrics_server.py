"""Metrics over HTTP, in the node's own loop: one page, and nothing that anybody could ask for beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from noloco_node.errors import Exit, UserError
from noloco_node.observe.served_place import ServedPlace, parse_place, refused_place

if TYPE_CHECKING:
    from noloco_node.observe.metrics import NodeMetrics

PATH = "/metrics"
REQUEST_BYTES = 8192
REQUEST_S = 5.0
"""For which a request may take to arrive, and its answer to leave."""
MOST_REQUESTS = 16
"""At once; one more is let go of unanswered."""


def metrics_place(text: str | None, *, is_open: bool) -> ServedPlace | None:
    """Return where metrics are to be served (HOST:PORT, or PORT alone), if at all; raise `UserError` for what is no
    place, and for one in the open.
    """
    if text is None:
        return None
    place = parse_place(text, "--metrics")
    if not is_open and not place.is_own:
        raise UserError(
            f"Metrics at {place.host} could be read by others.",
            why="they are served without a password, and say what this machine does and when",
            hint="leave the address out, or add --metrics-open where a firewall or a container keeps others away",
            code=Exit.USAGE,
        )
    return place


@asynccontextmanager
async def metrics_served(place: ServedPlace | None, run_id: str) -> AsyncIterator[NodeMetrics | None]:
    """Serve metrics for as long as the body runs; None where nobody asked for any."""
    if place is None:
        yield None
        return
    from noloco_node.observe.metrics import NodeMetrics

    metrics = NodeMetrics(run_id)
    page = _Page(metrics, place)
    try:
        server = await asyncio.start_server(page.answer, place.host, place.port, limit=REQUEST_BYTES)
    except OSError as error:
        raise refused_place(place, "--metrics", error) from error
    async with server:
        port = server.sockets[0].getsockname()[1]
        from noloco_node.terminal import say

        say(f"metrics for Prometheus: {place.url(port)}{PATH}")
        yield metrics


class _Page:
    """Answers requests, few at a time."""

    def __init__(self, metrics: NodeMetrics, place: ServedPlace) -> None:
        self._metrics, self._place, self._at_once = metrics, place, 0

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
        hosts = [line[5:].strip() for line in request.split(b"\r\n")[1:] if line[:5].lower() == b"host:"]
        # What is open to others has a name that they gave it, and nothing to hide.
        if self._place.is_own and not all(self._place.is_meant(host.decode(errors="replace")) for host in hosts):
            return _response("421 Misdirected Request", "text/plain; charset=utf-8", b"Ask by an address.\n")
        if path != PATH or method != b"GET":
            status = "404 Not Found" if path != PATH else "405 Method Not Allowed"
            return _response(status, "text/plain; charset=utf-8", f"There is {PATH} here.\n".encode())
        return _response("200 OK", "text/plain; version=0.0.4; charset=utf-8", self._metrics.text())


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
