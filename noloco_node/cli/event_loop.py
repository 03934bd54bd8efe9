"""How a command runs its coroutine, and what Ctrl-C, SIGTERM, a closed terminal and a closed pipe do to it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from noloco_node.errors import COMPLAINT, Exit, leaves
from noloco_node.machine.signals import answered, cancelled_by_signals
from noloco_node.terminal import complain

T = TypeVar("T")


@contextmanager
def unwound(lost: str = "", *, hears_interrupts: bool = False) -> Iterator[None]:
    """Let a signal unwind the body and put away what it holds, then say so and leave; `lost`: what came to nothing.

    Before and after, it ends the process on the spot (`noloco_node.__main__`). `hears_interrupts`: take SIGINT also
    where the shell has set it to be ignored.
    """
    try:
        with answered(_interrupt, hears_interrupts=hears_interrupts):
            yield
    except KeyboardInterrupt:  # typer would leave without a word
        complain(f"{COMPLAINT}interrupted{lost and ', '}{lost}")
        raise SystemExit(Exit.INTERRUPTED) from None


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


def run(main: Coroutine[Any, Any, T], *, hears_interrupts: bool = False) -> T:
    """Run a command's coroutine on uvloop where it exists."""
    with unwound(hears_interrupts=hears_interrupts):
        return _run(main, hears_interrupts=hears_interrupts)


def run_until_interrupted(main: Coroutine[Any, Any, None]) -> None:
    """Run what only shows something: to interrupt it, or to close the pipe that it writes to, is its usual end."""
    with unwound():
        try:
            _run(main)
        except KeyboardInterrupt:
            pass
        except (OSError, BaseExceptionGroup) as error:
            if not all(isinstance(each, BrokenPipeError) for each in leaves(error)):
                raise
            drop_output()


def drop_output() -> None:
    """Let the interpreter flush what is left of the standard output without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(main: Coroutine[Any, Any, T], *, hears_interrupts: bool = False) -> T:
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(cancelled_by_signals(main, hears_interrupts=hears_interrupts))
        except asyncio.CancelledError:  # nothing else cancels a whole command
            raise KeyboardInterrupt from None
