"""The signals that ask a process to stop, and the only place that sets their handlers.

Ctrl-C (SIGINT), `kill` (SIGTERM) and a closed terminal (SIGHUP) mean the same to every command. A shell starts the
background jobs of a script with SIGINT ignored, and `nohup` ignores SIGHUP: both stay ignored. SIGTERM is never
ignored, so that it ends every command, also as the first process of a container.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from noloco_node.errors import COMPLAINT, Exit

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
def answered(answer: Callable[[int], None], *, hears_interrupts: bool = False) -> Iterator[None]:
    """Let `answer` take the stop signals during the body."""
    put_back = set_answer(answer, hears_interrupts=hears_interrupts)
    try:
        yield
    finally:
        put_back()


def end_of_service() -> None:
    """Let a signal end the process on the spot from now on; a closed terminal may be told of once more."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_at_once)
