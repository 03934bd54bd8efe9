"""Lines that a node prints for a person or a log, one a fact, each with its time and its level.

A line is plain text with the time of day; for a program, a JSON object; for the systemd journal, which notes the time
itself, text behind the journal's mark of the level.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum
from textwrap import fill

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        return logging.getLevelNamesMapping()[self.upper()]


PRIORITIES = {LogLevel.DEBUG: 7, LogLevel.INFO: 6, LogLevel.WARNING: 4, LogLevel.ERROR: 3}
"""Of syslog, which the systemd journal takes."""

DEVICE_VARIABLE = "NOLOCO_DEVICE"
"""Of the environment: the device that each line names, where the nodes of several devices print to one screen."""

_LOGGER: ContextVar[logging.Logger | None] = ContextVar("logger", default=None)
"""Takes the lines of a context instead of the terminal: of a thread of ours in a program that is not."""


class _Log:
    """Writes lines. `peer`: our short id, once we have one. `device`: ours, if others print beside us."""

    def __init__(self) -> None:
        self.least, self.as_json, self.peer, self.device = LogLevel.INFO, False, "", ""

    def write(self, level: LogLevel, text: str) -> None:
        logger = _LOGGER.get()
        if logger is None:
            self.print(level, text)
        else:
            logger.log(level.number, text)

    def print(self, level: LogLevel, text: str, source: str = "") -> None:
        if level.number < self.least.number:
            return
        if self.as_json:
            known = {"peer": self.peer, "device": self.device, "source": source}
            line = {"at": round(time.time(), 3), "level": level, **{k: v for k, v in known.items() if v}, "text": text}
            _print(json.dumps(line))
        elif _reaches_systemd():
            begin = f"<{PRIORITIES[level]}>{self.mark}" + (f"{self.peer}: " if self.peer else "")
            _print("\n".join(begin + line for line in text.split("\n")))  # each line is an entry of its own
        else:
            _print_plain(self.mark + (f"{level}: {text}" if level in (LogLevel.WARNING, LogLevel.ERROR) else text))

    @property
    def mark(self) -> str:
        return f"{self.device}  " if self.device else ""


_LOG = _Log()


class _Handler(logging.Handler):
    """Writes the log lines of libraries like our own, each once: some libraries print their lines themselves too."""

    def emit(self, record: logging.LogRecord) -> None:
        if _taken_over(record):
            return
        known = [level for level in LogLevel if level.number <= record.levelno]
        _LOG.print(known[-1] if known else LogLevel.DEBUG, record.getMessage(), record.name)


def _taken_over(record: logging.LogRecord) -> bool:
    """Remove the handlers by which a library prints its lines itself; return whether one has printed this line."""
    logger, printed = logging.getLogger(record.name), False
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    while logger.parent is not None:
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler and handler.stream in screens:
                logger.removeHandler(handler)
                printed |= record.levelno >= handler.level
        logger = logger.parent
    return printed


_HANDLER = _Handler()


def configure(least: LogLevel, *, as_json: bool) -> None:
    """Print from now on lines of at least this level, also those that libraries log."""
    _LOG.least, _LOG.as_json, _LOG.device = least, as_json, os.environ.get(DEVICE_VARIABLE, "")
    root = logging.getLogger()
    root.addHandler(_HANDLER)  # once, however often
    if least is LogLevel.DEBUG:
        root.setLevel(logging.DEBUG)


def hand_to(logger: logging.Logger) -> None:
    """Hand the lines of this context, and of those that follow from it, to a logger from now on, and print none."""
    _LOGGER.set(logger)


def terminal_options() -> tuple[str, ...]:
    """Return the options by which another process prints as this one does."""
    return ("--log-level", str(_LOG.least), *(["--log-json"] if _LOG.as_json else []))


def sign(peer: str) -> None:
    """Add our peer's short id to later lines of a log that several peers may share."""
    if _LOGGER.get() is None:
        _LOG.peer = peer


def say(text: str) -> None:
    """Print one line to standard error, apart from a command's result."""
    _LOG.write(LogLevel.INFO, text)


def warn(text: str) -> None:
    _LOG.write(LogLevel.WARNING, text)


def complain(text: str) -> None:
    """Print why a command has ended, in one or several lines; on a terminal they are as narrow as it is."""
    if _LOG.as_json or _reaches_systemd():
        _LOG.write(LogLevel.ERROR, text)
    else:
        _print("\n".join(_as_narrow_as_terminal(line, below=7) for line in (_LOG.mark + text).split("\n")))


def _reaches_systemd() -> bool:
    """Say whether standard error goes to the systemd journal."""
    try:
        end = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{end.st_dev}:{end.st_ino}"


def _print_plain(text: str) -> None:
    """Print a line with the time of day."""
    _print(_as_narrow_as_terminal(f"{time.strftime('%H:%M:%S')}  {text}", below=10))


def _as_narrow_as_terminal(line: str, below: int) -> str:
    """Return a line as it is or, where standard error is a terminal, broken at the terminal's width.

    A long line goes on `below` columns from the left, and no word is broken: an invite can be copied whole.
    """
    if not sys.stderr.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return fill(line, width, subsequent_indent=" " * below, break_long_words=False, break_on_hyphens=False)


def _print(line: str) -> None:
    with suppress(OSError):  # the terminal is closed, or nobody reads the pipe: no reason to end
        print(line, file=sys.stderr, flush=True)


DRAW_EVERY_S = 0.2


class Bar:
    """Implements `machine.interface.Reporter.draw`; to be closed, so that the terminal is given back."""

    def __init__(self, console: Console | None = None) -> None:
        # Whatever the environment says of colours: a file or a pipe is no terminal.
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._progress: Progress | None = None
        self._drawn_s = 0.0

    def draw(self, share: float, text: str) -> bool:
        """Draw the bar, full to `share` from 0 to 1, with a text; return whether there is a terminal of our own."""
        if not self._console.is_interactive or _LOG.device:
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
        progress, self._progress = self._progress, None
        if progress is not None:
            with suppress(OSError):
                progress.stop()
