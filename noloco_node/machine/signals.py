"""How a node is asked to go: Ctrl-C or SIGTERM once means politely, twice means now; a closed terminal means politely.

As long as there is nothing to be polite about (nobody knows us yet), once means now. Now means: the body is
cancelled, and everything in it is put away. What is left after the body is the end of threads and of the interpreter;
a signal that comes even then ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from noloco_node.errors import Exit

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Departure:
    """`asked`: set when the node shall leave. `polite`: set by the body once it will heed that."""

    asked: asyncio.Event
    polite: bool = False


@asynccontextmanager
async def departure(say: Callable[[str], None]) -> AsyncIterator[Departure]:
    """Let the first signal set `asked` if the body is `polite` by then; cancel the body otherwise.

    For the last thing that a process does: after the body, signals are not what they were.
    """
    loop = asyncio.get_running_loop()
    leaving = Departure(asyncio.Event())
    body = asyncio.current_task()
    assert body is not None

    def asked() -> None:
        if leaving.asked.is_set() or not leaving.polite:
            body.cancel()
        else:
            say("leaving politely; once more leaves at once")
            leaving.asked.set()

    def hung_up() -> None:
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the kernel and the shell both tell of it
        if not leaving.asked.is_set():
            asked()

    for number in SIGNALS:
        loop.add_signal_handler(number, asked)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # by nohup
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        yield leaving
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(Exit.INTERRUPTED))


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let a termination or a closed terminal do what Ctrl-C does: unwind, and put everything away on the way."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, signal.raise_signal, signal.SIGINT)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
