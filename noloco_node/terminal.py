"""What a node says to the person in front of it: plain lines with the time of day, one a fact."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Print one line to the standard error, where it does not mix with what a command returns."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
