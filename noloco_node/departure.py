"""How a node is asked to go: Ctrl-C or SIGTERM once means politely, twice means now.

Now means: the body is cancelled, and everything in it is put away. What is left after the body is the end of threads
and of the interpreter; a signal that comes even then ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from noloco_node.errors import Exit

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@asynccontextmanager
async def departure(say: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when the node shall leave; a second signal cancels the body.

    For the last thing that a process does: after the body, signals are not what they were.
    """
    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    body = asyncio.current_task()
    assert body is not None

    def asked() -> None:
        if leave.is_set():
            body.cancel()
        else:
            say("leaving politely; once more leaves at once")
            leave.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, asked)
    try:
        yield leave
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(Exit.INTERRUPTED))
