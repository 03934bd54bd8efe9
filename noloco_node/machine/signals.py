"""How a coroutine is asked to stop: a node politely at first, any other command at once.

As long as there is nothing to be polite about (nobody knows us yet), once means now. Now means: the body is
cancelled, and everything in it is put away. What is left after the body is the end of threads and of the interpreter;
a signal that comes even then ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from noloco_node.machine.stop_signals import answered, end_of_service

T = TypeVar("T")


@dataclass(slots=True)
class Departure:
    """`asked`: set when the node shall leave. `polite`: set by the body once it will heed that."""

    asked: asyncio.Event
    polite: bool = False


@asynccontextmanager
async def departure(say: Callable[[str], None]) -> AsyncIterator[Departure]:
    """Let the first signal set `asked` if the body is `polite` by then; cancel the body otherwise.

    A closed terminal asks once, however often it is told of. For the last thing that a process does: after the body,
    signals are not what they were.
    """
    loop = asyncio.get_running_loop()
    leaving = Departure(asyncio.Event())
    body = asyncio.current_task()
    assert body is not None
    hung_up = False

    def asked(number: int) -> None:
        nonlocal hung_up
        if number == signal.SIGHUP and (hung_up or leaving.asked.is_set()):
            return
        hung_up = hung_up or number == signal.SIGHUP
        if leaving.asked.is_set() or not leaving.polite:
            body.cancel()
        else:
            say("leaving politely; once more leaves at once")
            leaving.asked.set()

    # A node in the background of a script leaves on Ctrl-C too: a node that nobody sees would keep the machine busy.
    with answered(lambda number: _call_soon(loop, asked, number), hears_interrupts=True):
        try:
            yield leaving
        finally:
            end_of_service()


async def cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    """Await `main`; the first stop signal cancels it, a second one interrupts whatever is done at that moment."""
    loop, body = asyncio.get_running_loop(), asyncio.current_task()
    assert body is not None
    asked = False

    def stop(_: int) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _call_soon(loop, body.cancel)

    with answered(stop):
        return await main


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call it from the loop: a signal interrupts Python code at any point."""
    loop.call_soon_threadsafe(call, *arguments)
