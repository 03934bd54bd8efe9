"""What a node says to the person in front of it: plain lines with the time of day, one a fact."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from contextlib import suppress
from textwrap import fill

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


def say(text: str) -> None:
    """Print one line to the standard error, where it does not mix with what a command returns.

    On a terminal a long one goes on below its own beginning, and no word is broken: an invite can be copied whole.
    """
    line = f"{time.strftime('%H:%M:%S')}  {text}"
    if sys.stderr.isatty():
        width, below = shutil.get_terminal_size().columns, " " * 10
        line = fill(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)


class Forecast:
    """How long the run still takes, from the progress of the last half minute."""

    SPAN_S = 30.0

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=1000)

    def left_s(self, progress: float, now: float) -> float | None:
        """Note the progress as of `now` and return the seconds left; None until there is a rate."""
        self._seen.append((now, progress))
        while len(self._seen) > 2 and now - self._seen[0][0] > self.SPAN_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if progress >= 1:
            return 0.0
        if progress <= before or now <= then:
            return None
        return (1 - progress) * (now - then) / (progress - before)


DRAW_EVERY_S = 0.2


class Bar:
    """Implements `machine.interface.Reporter.draw`; to be closed, so that the terminal is given back."""

    def __init__(self, console: Console | None = None) -> None:
        # Whatever the environment says of colours: a file or a pipe is no terminal.
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._progress: Progress | None = None
        self._drawn_s = 0.0

    def __repr__(self) -> str:
        return f"Bar({'away' if self._progress is None else 'drawn'})"

    def draw(self, share: float, text: str) -> bool:
        """Draw it full to `share`, from 0 to 1, a text behind it; return whether there is a terminal to draw on."""
        if not self._console.is_interactive:
            return False
        now_s = time.monotonic()
        if share >= 1.0:
            self.close()
        elif now_s - self._drawn_s >= DRAW_EVERY_S:
            self._drawn_s = now_s
            try:
                self._draw(share, text)
            except OSError:  # the terminal is gone
                self.close()
                return False
        return True

    def _draw(self, share: float, text: str) -> None:
        if self._progress is None:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self._progress = Progress(
                *columns, console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._progress.add_task("", total=1.0)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=share, description=text, refresh=True)

    def close(self) -> None:
        """Take it away."""
        progress, self._progress = self._progress, None
        if progress is not None:
            with suppress(OSError):
                progress.stop()
