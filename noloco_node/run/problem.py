"""What is wrong with a field of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Problem(NamedTuple):
    """One broken rule. `field`: its path in the run file; `value`: as given; `hint`: what would be right."""

    field: str
    value: str
    why: str
    hint: str


def within(field: str, value: float, low: float, high: float) -> Iterator[Problem]:
    """Yield a problem unless low <= value <= high, which neither NaN nor an infinity ever is."""
    if not low <= value <= high:
        bounds = " to ".join(f"{bound:,}" if isinstance(bound, int) else f"{bound:,g}" for bound in (low, high))
        yield Problem(field, repr(value), f"it is outside {bounds}", f"a value from {bounds}")
