"""How a command runs its coroutine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from noloco_node.cli.interrupt import unwound
from noloco_node.errors import leaves
from noloco_node.machine.signals import cancelled_by_signals

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on uvloop where it exists."""
    with unwound():
        return _run(main)


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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(cancelled_by_signals(main))
        except asyncio.CancelledError:  # nothing else cancels a whole command
            raise KeyboardInterrupt from None
