"""What a node says to the person in front of it: plain lines with the time of day, one a fact."""

from __future__ import annotations

import sys
import time
from collections import deque


def say(text: str) -> None:
    """Print one line to the standard error, where it does not mix with what a command returns."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


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
