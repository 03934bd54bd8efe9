"""What Ctrl-C does to a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from noloco_node.errors import COMPLAINT, Exit
from noloco_node.terminal import complain


@contextmanager
def unwound(lost: str = "") -> Iterator[None]:
    """Let Ctrl-C unwind the body and put away what it holds, then say so and leave; `lost`: what came to nothing.

    Before and after, it ends the process on the spot (`noloco_node.__main__`).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:  # typer would leave without a word
        complain(f"{COMPLAINT}interrupted{lost and ', '}{lost}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)
