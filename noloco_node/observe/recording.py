"""Playing a recording: how the time of the run passes, and the keys that a person steers it with."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import suppress
from typing import Self

import msgspec

from noloco_node.units import format_clock

KEYS = {
    "\x1b[C": "forward",
    "\x1b[D": "back",
    "\x1b[A": "faster",
    "\x1b[B": "slower",
    "\x1b[H": "begin",
    "\x1b[F": "end",
    "l": "forward",
    "h": "back",
    "+": "faster",
    "-": "slower",
    " ": "pause",
    "q": "quit",
}
"""What a terminal sends, by what it means here."""
WHOLE_S = 60.0
"""In which a recording is played from beginning to end at first."""
STEPS = 50
"""Steps forward or back from one end of a recording to the other."""
FASTEST, SLOWEST = 2.0**16, 2.0**-4


class PlaybackState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a recording is played: seconds since its beginning, of so many; and how fast."""

    at_s: float
    whole_s: float
    speed: float
    paused: bool
    at_end: bool


class Playback:
    """The time of a run while its recording is played: from `begun` to `ended`, unix seconds."""

    def __init__(self, begun: float, ended: float) -> None:
        self._begun, self._ended = begun, ended
        self.now, self.paused, self.over = begun, False, False
        self.speed = 1.0
        while self.speed < FASTEST and (ended - begun) / self.speed > WHOLE_S:
            self.speed *= 2.0

    @property
    def at_end(self) -> bool:
        """Whether there is no more to play."""
        return self.now >= self._ended

    def advance(self, seconds: float) -> None:
        """Let so much real time pass."""
        if not self.paused:
            self._go(self.now + self.speed * seconds)

    def press(self, key: str) -> None:
        """Do what a key means; a number is the share of the recording to go to."""
        step = (self._ended - self._begun) / STEPS
        match key:
            case "forward":
                self._go(self.now + step)
            case "back":
                self._go(self.now - step)
            case "begin":
                self._go(self._begun)
            case "end":
                self._go(self._ended)
            case "faster":
                self.speed = min(FASTEST, 2.0 * self.speed)
            case "slower":
                self.speed = max(SLOWEST, self.speed / 2.0)
            case "pause":
                self.paused = not self.paused
            case "quit":
                self.over = True
            case share:  # of the whole, to go to
                with suppress(ValueError):
                    self._go(self._begun + float(share) * (self._ended - self._begun))

    def state(self) -> PlaybackState:
        """Return what a view shows of it."""
        at_s, whole_s = self.now - self._begun, self._ended - self._begun
        return PlaybackState(at_s=at_s, whole_s=whole_s, speed=self.speed, paused=self.paused, at_end=self.at_end)

    def footer(self) -> str:
        """Return what is played, and the keys."""
        how = "paused" if self.paused else "at its end" if self.at_end else f"x{self.speed:g}"
        at, whole = format_clock(self.now - self._begun), format_clock(self._ended - self._begun)
        return f"{at} of {whole}, {how}   space: pause  ←→: step  ↑↓: speed  q: end"

    def _go(self, now: float) -> None:
        self.now = min(max(now, self._begun), self._ended)


class Keyboard:
    """Keys as they are pressed; none where the standard input is no terminal. A context: the terminal is given back."""

    def __init__(self) -> None:
        self.is_there = sys.stdin.isatty()
        self._before: list[object] | None = None

    def __enter__(self) -> Self:
        if self.is_there:
            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def pressed(self) -> list[str]:
        """Return what was pressed since the last call, by its meaning."""
        if not self.is_there or not select.select([sys.stdin], [], [], 0)[0]:
            return []
        return meanings(os.read(sys.stdin.fileno(), 256).decode(errors="ignore"))


def meanings(typed: str) -> list[str]:
    """Return the meanings of the keys that a terminal has sent; what means nothing is passed over."""
    found = []
    while typed:
        key = next((key for key in KEYS if typed.startswith(key)), None)
        if key is not None:
            found.append(KEYS[key])
        typed = typed[len(key or " ") :]
    return found
