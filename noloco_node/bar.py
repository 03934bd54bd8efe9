"""How far a copy is, drawn below the lines of a terminal and gone when it is done.

While it stands there rich takes what others print to the standard error and writes it above. Elsewhere, in a file or a
pipe, nothing is drawn, and whoever asked says a line now and then instead.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

DRAW_EVERY_S = 0.2


class Bar:
    """Implements `machine.Voice.draw`; to be closed, so that the terminal is given back."""

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
