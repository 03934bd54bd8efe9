"""How a command runs its coroutine, and how a signal ends it: a node politely at first, any other command at once.

Ctrl-C (SIGINT), `kill` (SIGTERM) and a closed terminal (SIGHUP) mean the same to every command. A shell starts the
background jobs of a script with SIGINT ignored, and `nohup` ignores SIGHUP: both stay ignored, but a node and a demo
take SIGINT there too. SIGTERM is never ignored, so that it ends every command, also the first process of a container.

Before a node is known to others, the first signal already ends it at once: its body is cancelled and cleans up. After
the body, a signal ends the process on the spot. Any other command unwinds. Only this module sets handlers. It loads
asyncio and the terminal late, so that `noloco_node.__main__` sets the first handler early.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_node.errors import COMPLAINT, Exit, leaves

if TYPE_CHECKING:
    import asyncio

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


def leave_at_once(*_: object) -> None:
    """Say so, and end the process."""
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"{COMPLAINT}interrupted\n".encode())
    os._exit(Exit.INTERRUPTED)


def set_answer(answer: Callable[[int], None], *, hears_interrupts: bool = False) -> Callable[[], None]:
    """Let `answer` take each stop signal from now on, and return what puts the former handlers back.

    `hears_interrupts`: take SIGINT also where it is ignored. A handler that was replaced since then stays.
    """

    def handler(number: int, _: object) -> None:
        answer(number)

    before = {number: signal.getsignal(number) for number in STOPS}
    heard = {signal.SIGTERM, *([signal.SIGINT] if hears_interrupts else [])}
    taken = [number for number in STOPS if before[number] is not signal.SIG_IGN or number in heard]
    for number in taken:
        signal.signal(number, handler)

    def put_back() -> None:
        for number in taken:
            if signal.getsignal(number) is handler:
                signal.signal(number, before[number])

    return put_back


@contextmanager
def answered(answer: Callable[[int], None], *, hears_interrupts: bool) -> Iterator[None]:
    """Let `answer` take the stop signals during the body."""
    put_back = set_answer(answer, hears_interrupts=hears_interrupts)
    try:
        yield
    finally:
        put_back()


@contextmanager
def deferred(note: Callable[[], None]) -> Iterator[None]:
    """Let a stop signal wait for the end of the body, and `note` it at once; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int) -> None:
        came.append(number)
        note()

    put_back = set_answer(keep)
    try:
        yield
    finally:
        put_back()
        if came:
            signal.raise_signal(came[0])


def end_of_service() -> None:
    """Let a signal end the process on the spot from now on; a closed terminal may be told of once more."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_at_once)


def ignore_from_now_on() -> None:
    """Let no signal change the exit code: the interpreter takes its handlers away a moment before it is gone."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


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
    import asyncio

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


@contextmanager
def unwound(lost: str = "", *, hears_interrupts: bool = False) -> Iterator[None]:
    """Let a signal unwind the body, then say so and leave. `lost`: what the command loses by it, in words.

    Before and after the body, a signal ends the process on the spot (`noloco_node.__main__`). `hears_interrupts`: take
    SIGINT also where the shell lets it be ignored.
    """

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    try:
        with answered(interrupt, hears_interrupts=hears_interrupts):
            yield
    except KeyboardInterrupt:  # typer would leave without a word
        from noloco_node.terminal import complain

        complain(f"{COMPLAINT}interrupted{lost and ', '}{lost}")
        raise SystemExit(Exit.INTERRUPTED) from None


def run(main: Coroutine[Any, Any, T], *, hears_interrupts: bool = False) -> T:
    """Run a command's coroutine on uvloop where it exists."""
    with unwound(hears_interrupts=hears_interrupts):
        return _run(main, hears_interrupts=hears_interrupts)


def run_until_interrupted(main: Coroutine[Any, Any, None]) -> None:
    """Run a command that only shows something: an interrupt, or a closed pipe or terminal, is its usual end."""
    with unwound():
        try:
            _run(main)
        except KeyboardInterrupt:
            pass
        except (OSError, BaseExceptionGroup) as error:
            if not is_closed_output(error):
                raise
            drop_output()


def is_closed_output(error: BaseException) -> bool:
    """Say whether an error is that of a pipe or a terminal behind our output which was closed, and nothing else.

    A disk and a connection fail with the same numbers.
    """
    numbers = {each.errno if isinstance(each, OSError) else None for each in leaves(error)}
    return numbers <= {errno.EPIPE, errno.EIO} and _reader_is_gone()


def _reader_is_gone() -> bool:
    watched = select.poll()
    for output in (1, 2):
        watched.register(output, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def drop_output() -> None:
    """Let the interpreter drop the rest of the standard output when it flushes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(main: Coroutine[Any, Any, T], *, hears_interrupts: bool = False) -> T:
    import asyncio

    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(_cancelled_by_signals(main, hears_interrupts=hears_interrupts))
        except asyncio.CancelledError:  # nothing else cancels a whole command
            raise KeyboardInterrupt from None


async def _cancelled_by_signals(main: Coroutine[Any, Any, T], *, hears_interrupts: bool) -> T:
    """Await `main`; the first stop signal cancels it, a second one interrupts its cleaning up."""
    import asyncio

    loop, body = asyncio.get_running_loop(), asyncio.current_task()
    assert body is not None
    asked = False

    def stop(_: int) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _call_soon(loop, body.cancel)

    with answered(stop, hears_interrupts=hears_interrupts):
        return await main


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call it from the loop: a signal interrupts Python code at any point."""
    loop.call_soon_threadsafe(call, *arguments)
