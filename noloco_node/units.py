"""Numbers: between which bounds those of a stranger are taken, and how people write and read them.

A number that a stranger wrote is declared as one of the types here. Between their bounds, and after
`noloco_node.network.wire.is_usable`, sums, products and ratios of many such numbers stay finite: the decoder refuses
a number that arithmetic cannot use, so no code that uses numbers has to check them.

Prefixes are decimal, as on disks and in the caps that an owner writes; rates are in bits, as lines are sold.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, TypeAlias

from msgspec import Meta

LONGEST_S = 1e8  # three years: nobody waits so long
LARGEST_COUNT = 2**53  # the largest whole number up to which a float holds them all
LARGEST = 1e30
LEAST = 1e-30  # the least number that is not zero: its reciprocal is no larger than `LARGEST`
LATEST_UNIX_S = 2**40

Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
UnixSeconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=LATEST_UNIX_S)]
Amount: TypeAlias = Annotated[float, Meta(ge=0.0, le=LARGEST)]  # a rate, a ratio, or a loss in nats

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*"
_BITS_A_SECOND = re.compile(_NUMBER + r"(?P<prefix>[kmgt]?)(?P<binary>)(?:bits?(?:/s|ps)?|bps)\s*", re.IGNORECASE)
_BYTES_A_SECOND = re.compile(_NUMBER + r"(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)B(?:/s|ps)\s*")
_SIZE = re.compile(_NUMBER + r"(?P<prefix>[kmgt]?)(?P<binary>i?)b(?:ytes?)?\s*", re.IGNORECASE)


def format_count(number: int) -> str:
    """Return a number of things: 754,816 or 3.28 million."""
    for power, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * power:
            return f"{number / power:.3g} {word}" if number < 999 * power else f"{number / power:,.0f} {word}"
    return f"{number:,}"


def format_roughly(number: float) -> str:
    """Return a number by two digits, or its whole part: 0.034, 1.7, 110."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def format_bytes(count: float) -> str:
    """Return a size: 120 MB."""
    return f"{_scaled(count)}B"


def format_energy(joules: float) -> str:
    """Return an amount of energy: 1.2 kWh."""
    return f"{_scaled(joules / 3600)}Wh"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate: 20 Mbit/s."""
    return f"{_scaled(8 * bytes_per_s)}bit/s"


def format_utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(unix_s, LATEST_UNIX_S)))


def format_duration(seconds: float) -> str:
    """Return a time span in words: 0.4 s, 40 s, 12 min, 3 h 20 min, 12 days."""
    if seconds >= LONGEST_S:
        return "very long"
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 0.95 else f"{round(seconds, 1):g} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_clock(seconds: float) -> str:
    """Return a time span as a stop watch shows it, where it changes while it is looked at: 1:15, 1:02:05."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parse_bytes(text: str) -> float | None:
    """Return the bytes of a size such as 300GB or 1.5 TiB, None if it is none."""
    return _amount(_SIZE.fullmatch(text))


def parse_rate(text: str) -> float | None:
    """Return the bytes a second of a rate in bits (20mbit) or bytes with a capital B (2.5MB/s), None if it is none."""
    bits = _amount(_BITS_A_SECOND.fullmatch(text))
    return _amount(_BYTES_A_SECOND.fullmatch(text)) if bits is None else bits / 8


def _scaled(number: float) -> str:
    for power, prefix in _PREFIXES:
        if number >= 0.9995 * power:
            return f"{number / power:.3g} {prefix}" if number < 999 * power else f"{number / power:,.0f} {prefix}"
    return f"{round(number, 2):.3g} "


def _amount(found: re.Match[str] | None) -> float | None:
    if found is None:
        return None
    return float(found["number"]) * (1024.0 if found["binary"] else 1000.0) ** _POWERS[found["prefix"].lower()]
