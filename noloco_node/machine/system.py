"""What an operating system allows a process, and whether it has slept; each system says so in its own way."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from contextlib import suppress

WANTED_FILES = 4096
"""A conversation takes one file, and a node has hundreds. macOS allows 256 where nobody asks for more."""


def allowed_files() -> int:
    """Return how many files and connections this process may have open; `sys.maxsize` without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def allow_files() -> None:
    """Raise this process's own limit of open files to `WANTED_FILES`, as far as the system lets it."""
    if allowed_files() >= WANTED_FILES:
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = WANTED_FILES if most == resource.RLIM_INFINITY else min(WANTED_FILES, most)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def asleep_s() -> float:
    """Return for how long this machine has slept since it was started; 0 if the system does not tell."""
    through, awake = getattr(time, "CLOCK_BOOTTIME", None), time.CLOCK_MONOTONIC
    if through is None:  # on macOS the monotonic clock runs through a sleep, and another one does not
        through, awake = time.CLOCK_MONOTONIC, getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)
    return max(0.0, time.clock_gettime(through) - time.clock_gettime(awake))


def counts_sleep(loop: asyncio.AbstractEventLoop) -> bool:
    """Say whether the clock of an event loop runs through a sleep: uvloop's does on macOS."""
    return sys.platform == "darwin" and type(loop).__module__.startswith("uvloop")
