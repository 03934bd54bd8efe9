"""What Ctrl-C, SIGTERM and a closed terminal do to a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from noloco_node.errors import COMPLAINT, Exit
from noloco_node.machine.stop_signals import answered
from noloco_node.terminal import complain


@contextmanager
def unwound(lost: str = "") -> Iterator[None]:
    """Let a signal unwind the body and put away what it holds, then say so and leave; `lost`: what came to nothing.

    Before and after, it ends the process on the spot (`noloco_node.__main__`).
    """
    try:
        with answered(_interrupt):
            yield
    except KeyboardInterrupt:  # typer would leave without a word
        complain(f"{COMPLAINT}interrupted{lost and ', '}{lost}")
        raise SystemExit(Exit.INTERRUPTED) from None


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt
