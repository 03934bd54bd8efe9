"""Bytes, rates and durations in words."""

from __future__ import annotations

import math
import re


def _count(number: int) -> str:
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def _bytes(number: int) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"


def readable_bytes(count: float) -> str:
    """Return a count of bytes as a person reads it: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def readable_seconds(seconds: float) -> str:
    """Return a duration as a person reads it: 75 -> '1:15', 3725 -> '1:02:05'."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration_words(seconds: float) -> str:
    """Spell a time for people: 40 s, 12 min, 3 h 20 min, 2 days."""
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours / 24:,.0f} days"


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def rate_words(bytes_per_s: float) -> str:
    """Return a rate as a person writes it, in bits."""
    return f"{_scaled(8 * bytes_per_s)}bit/s"


def size_words(count: float) -> str:
    """Return a size as a person writes it."""
    return f"{_scaled(count)}B"


def _scaled(number: float) -> str:
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * power:
            return f"{number / power:.3g} {prefix}" if number < 999 * power else f"{number / power:.0f} {prefix}"
    return f"{number:.3g} "


def _amount(found: re.Match[str]) -> float:
    return float(found["number"]) * (1024.0 if found["binary"] else 1000.0) ** _POWERS[found["prefix"].lower()]


LONGEST_S = 1e8
"""Three years: nobody waits so long."""
MIB = 2**20


def duration(seconds: float) -> str:
    """Return a time span as a person says it."""
    if seconds >= LONGEST_S:
        return "very long"
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB" if size_bytes >= 10 * MIB else f"{size_bytes / 1024:,.0f} KiB"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def rounded_count(number: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else readable_seconds(seconds)
