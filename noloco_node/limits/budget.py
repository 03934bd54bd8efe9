"""What a peer may spend of its line, and when: rates, a monthly cap, hours of the day; what it has spent this month.

Amounts are read as people write them, and an amount that can be read in two ways is refused rather than guessed. Rates
are bits with `bit` (20mbit, 20 Mbit/s, 20mbps) and bytes with a capital B and a time (2.5MB/s, 1MiB/s); sizes are bytes
(300GB, 1TiB). k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024.

A rate is kept by a **token bucket**: it fills at the rate up to the burst, and nothing leaves that it does not hold. So
over any stretch of t seconds no more is granted than rate * t + burst.

**Hours** are times of day on this machine's clock, "22-08" from ten in the evening until eight in the morning; equal
ones are the whole day. A day's stretch is two instants, worked out from the dates: so on a day on which the clock is
put forward or back it begins and ends once, an hour longer or shorter, and a time of day that the clock leaves out
counts as the instant that it would have been.

The **ledger** is a small file in a home, written once a minute while anything moves and when a session ends, so a node
that is killed forgets a minute at most. A file that cannot be decoded counts as nothing spent, and a disk that refuses
costs the counting and not the training: both are said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from noloco_node.errors import UserError, os_errors_as, storage_error, usage_error
from noloco_node.storage import atomic_file
from noloco_node.units import parse_bytes, parse_rate

LEAST_RATE = 16_000.0  # 128 kbit/s: with less, records, offers and beats would take most of the budget
BURST_S = 1.0
LEAST_BURST_BYTES = 64 * 1024
SLICE_S = 0.05
LARGEST_SLICE_BYTES = 64 * 1024
SMALL_BYTES = 16 * 1024  # messages up to this size come first
SPENT_AT = 0.99  # share of the monthly cap at which a node goes: leaving takes some bytes as well

_TIME = "([0-9]{1,2})(?::([0-9]{2}))?"
_HOURS = re.compile(rf"\s*{_TIME}\s*-\s*{_TIME}\s*")


class Hours(msgspec.Struct, frozen=True, kw_only=True):
    """Minutes of the day from which and until which a node takes part; equal ones: always."""

    begin_min: int
    end_min: int

    def __str__(self) -> str:
        return "-".join(f"{minutes // 60:02}:{minutes % 60:02}" for minutes in (self.begin_min, self.end_min))


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of a peer allows; None where nothing was said."""

    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    monthly_cap_bytes: int | None = None  # of both directions together
    hours: Hours | None = None

    @property
    def is_limited(self) -> bool:
        """Whether traffic has to be measured or held back."""
        return (self.upload_bytes_per_s, self.download_bytes_per_s, self.monthly_cap_bytes) != (None, None, None)


def read_owner_limits(upload: str | None, download: str | None, cap: str | None, hours: str | None) -> OwnerLimits:
    """Return what the options --max-upload, --max-download, --monthly-cap and --hours say; `UserError` (USAGE) if
    not."""
    return OwnerLimits(
        upload_bytes_per_s=None if upload is None else read_rate(upload, "--max-upload"),
        download_bytes_per_s=None if download is None else read_rate(download, "--max-download"),
        monthly_cap_bytes=None if cap is None else read_size(cap, "--monthly-cap"),
        hours=None if hours is None else read_hours(hours),
    )


def read_rate(text: str, option: str) -> float:
    """Return bytes a second; `UserError` (USAGE) names `option` where `text` is no rate, or one that is too low."""
    rate = parse_rate(text)
    if rate is None:
        why = "it does not say how many bits, or bytes (with a capital B), a second"
        raise _unreadable(option, text, why, "20mbit or 2.5MB/s")
    if not LEAST_RATE <= rate < math.inf:
        raise _unreadable(
            option, text, "with less than 128kbit a node could hardly do more than say that it is there", "1mbit"
        )
    return rate


def read_size(text: str, option: str, example: str = "300GB or 500GiB") -> int:
    """Return bytes; `UserError` (USAGE) names `option`, and an example, where `text` is no size."""
    size = parse_bytes(text)
    if size is None:
        raise _unreadable(option, text, "it is not a size with its unit", example)
    if size < 1:
        raise _unreadable(option, text, "nothing would fit", "300GB, or leave the option out")
    if size == math.inf:
        raise _unreadable(option, text, "no machine has so much", example)
    return round(size)


def read_hours(text: str) -> Hours:
    """Return the hours that `text` names, such as 22-08 or 22:30-6; `UserError` (USAGE) if it names none."""
    found = _HOURS.fullmatch(text)
    if found is None:
        raise _unreadable("--hours", text, "it is not two times of day", "22-08 or 22:30-06:00")
    first, second = ((int(found[place]), int(found[place + 1] or 0)) for place in (1, 3))
    for hour, minute in (first, second):
        if minute > 59 or hour * 60 + minute > 24 * 60:
            raise _unreadable("--hours", text, f"there is no {hour:02}:{minute:02} in a day", "22-08 or 22:30-06:00")
    if first == second:
        raise _unreadable("--hours", text, "it ends when it begins", "22-08; without the option a node works all day")
    begin_min, end_min = ((hour * 60 + minute) % (24 * 60) for hour, minute in (first, second))
    return Hours(begin_min=begin_min, end_min=end_min)


def _unreadable(option: str, text: str, why: str, example: str) -> UserError:
    return usage_error(f"{option} {text!r} cannot be used.", why=why, hint=f"{option} {example}")


# The token bucket.


class Bucket(NamedTuple):
    """A rate in bytes a second, how much of it may be saved up, and what was there at `at_s`."""

    rate: float
    burst_bytes: float
    tokens: float
    at_s: float

    @property
    def slice_bytes(self) -> int:
        return int(min(LARGEST_SLICE_BYTES, max(1024.0, self.rate * SLICE_S)))


def full_bucket(rate: float, now_s: float) -> Bucket:
    """Return the bucket of a rate at its fullest: one second of it, and a slice of any rate at least."""
    burst = max(rate * BURST_S, float(LEAST_BURST_BYTES))
    return Bucket(rate, burst, burst, now_s)


def filled(bucket: Bucket, now_s: float) -> Bucket:
    tokens = min(bucket.burst_bytes, bucket.tokens + bucket.rate * max(0.0, now_s - bucket.at_s))
    return bucket._replace(tokens=tokens, at_s=max(now_s, bucket.at_s))


def take(bucket: Bucket, count: float, now_s: float) -> tuple[Bucket, float]:
    """Take `count` tokens, which the burst holds; return the bucket and 0, or how long to wait for them, in seconds."""
    bucket = filled(bucket, now_s)
    # Rounding must not make anybody wait for a millionth of a byte.
    if bucket.tokens >= count - 1e-6:
        return bucket._replace(tokens=max(0.0, bucket.tokens - count)), 0.0
    return bucket, (count - bucket.tokens) / bucket.rate


def give_back(bucket: Bucket, count: float) -> Bucket:
    return bucket._replace(tokens=min(bucket.burst_bytes, bucket.tokens + count))


# The hours of the day.


def stretches(hours: Hours, today: date, like: datetime) -> Iterator[tuple[float, float]]:
    """Yield begin and end (Unix seconds) of the stretches that begin from two days before a date until three after it.

    Times of day are those of `like`'s time zone; the machine's own where it has none.
    """
    for days in range(-2, 4):
        day = today + timedelta(days=days)
        until = day if hours.end_min > hours.begin_min else day + timedelta(days=1)
        begin_s, end_s = _instant(day, hours.begin_min, like), _instant(until, hours.end_min, like)
        if begin_s < end_s:
            yield begin_s, end_s


def in_hours(hours: Hours, now: datetime) -> tuple[bool, float]:
    """Say whether `now` is within the hours, and for how many seconds that stays so (infinity: always)."""
    if hours.begin_min == hours.end_min:
        return True, math.inf
    now_s, found = now.timestamp(), list(stretches(hours, now.date(), now))
    for begin_s, end_s in found:
        if begin_s <= now_s < end_s:
            return True, end_s - now_s
    return False, min(begin_s for begin_s, _ in found if begin_s > now_s) - now_s


def _instant(day: date, minutes: int, like: datetime) -> float:
    return datetime.combine(day, time(minutes // 60, minutes % 60), tzinfo=like.tzinfo).timestamp()


# The calendar month.


class MonthUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes of one calendar month, such as 2026-11. `before`: of the month that was counted before it."""

    month: str
    sent_bytes: int = 0
    received_bytes: int = 0
    before: MonthUsage | None = None

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.received_bytes


def month_of(now: datetime) -> str:
    return f"{now.year:04}-{now.month:02}"


def spend(spent: MonthUsage, now: datetime, sent_bytes: int, received_bytes: int) -> MonthUsage:
    """Add to what was spent; another month begins with nothing, except the one before, which a clock set back means."""
    month = month_of(now)
    if month != spent.month:
        known, before = spent.before, msgspec.structs.replace(spent, before=None)
        again = known if known is not None and known.month == month else MonthUsage(month=month)
        spent = msgspec.structs.replace(again, before=before)
    return msgspec.structs.replace(
        spent, sent_bytes=spent.sent_bytes + sent_bytes, received_bytes=spent.received_bytes + received_bytes
    )


def is_spent(spent: MonthUsage, cap_bytes: int | None, now: datetime) -> bool:
    """Say whether the cap of this month is used up, but for what leaving takes."""
    return cap_bytes is not None and month_of(now) == spent.month and spent.total_bytes >= SPENT_AT * cap_bytes


def next_month_s(now: datetime) -> float:
    year, month = divmod(now.year * 12 + now.month, 12)
    return datetime(year, month + 1, 1, tzinfo=now.tzinfo).timestamp() - now.timestamp()


class TrafficLedger:
    """The count of one home. `now`: the time of day here, as the calendar has it."""

    def __init__(self, path: Path, now: Callable[[], datetime], say: Callable[[str], None]) -> None:
        self._path, self._now, self._say = path, now, say
        self._file = atomic_file.KeptFile(path, "this month's traffic, which a restart forgets,", say)
        self._spent = self._written = self._read()

    @property
    def spent(self) -> MonthUsage:
        return spend(self._spent, self._now(), 0, 0)

    def add(self, sent_bytes: int, received_bytes: int) -> None:
        self._spent = spend(self._spent, self._now(), sent_bytes, received_bytes)

    def keep(self) -> None:
        """Write the file if anything is new; a disk that refuses is said once."""
        if self._spent != self._written and self._file.write(msgspec.json.encode(self._spent)):
            self._written = self._spent

    def _read(self) -> MonthUsage:
        nothing = MonthUsage(month=month_of(self._now()))
        hint = "repair its permissions, or give another directory with --home"
        try:
            with os_errors_as(storage_error, f"cannot read {self._path}", hint), suppress(FileNotFoundError):
                found = msgspec.json.decode(self._path.read_bytes(), type=MonthUsage)
                return found if min(found.sent_bytes, found.received_bytes) >= 0 else nothing
        except ValueError:
            self._say(f"{self._path} is garbled: counting this month's traffic from zero")
        return nothing
