"""A page beside work that leaves no room in its own loop: a simulation, whose loop has virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

from noloco_node.web.page_server import Page, PagePlace, page_served


@contextmanager
def page_in_thread(where: PagePlace | None) -> Iterator[Page | None]:
    """Serve a page from a thread for as long as the body runs; None where nobody asked for any."""
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
