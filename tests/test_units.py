"""Sizes, rates and durations: what is written is read again as itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.units import (
    LONGEST_S,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_rate,
    format_roughly,
    parse_bytes,
    parse_rate,
)


@given(st.floats(1.0, 1e15))
def test_a_size_is_read_again_as_about_itself(count: float) -> None:
    assert parse_bytes(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=0.006, abs=1)


@given(st.floats(16_000.0, 1e12))
def test_a_rate_is_read_again_as_about_itself(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=0.006)


@given(st.floats(0.0, LONGEST_S))
def test_a_duration_is_short_and_about_right(seconds: float) -> None:
    lengths = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0}
    words = format_duration(seconds).replace(",", "").split()
    if words != ["very", "long"]:
        amount = math.fsum(float(number) * lengths[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
        assert amount == pytest.approx(seconds, abs=max(0.51, 0.21 * seconds))
    assert len(format_duration(seconds)) <= 14


@given(st.floats(1e-4, 1e12))
def test_a_rough_number_has_two_digits_and_no_exponent(number: float) -> None:
    assert "e" not in format_roughly(number)
    assert float(format_roughly(number).replace(",", "")) == pytest.approx(number, rel=0.06)


def test_durations_and_counts_are_said_as_people_say_them() -> None:
    assert [format_duration(seconds) for seconds in (0.2, 9.6, 98.9, 99.5, 5900, 6000, 7200, 2e5, math.inf)] == [
        "0.2 s",
        "10 s",
        "99 s",
        "2 min",
        "98 min",
        "1 h 40 min",
        "2 h",
        "2 days",
        "very long",
    ]
    assert [format_clock(seconds) for seconds in (-1, 5, 75, 3725)] == ["0:00", "0:05", "1:15", "1:02:05"]
    assert [format_count(number) for number in (0, 754_816, 3_280_000)] == ["0", "754,816", "3.28 million"]
    counts = (999_499, 999_500, 999_499_999, 999_500_000, 999_999_999_999, 123_456 * 10**12)
    assert [format_count(number) for number in counts] == [
        "999,499",
        "1 million",
        "999 million",
        "1 billion",
        "1 trillion",
        "123,456 trillion",
    ]
    assert [format_bytes(count) for count in (0, 999, 1536, 120e6, 999.7e6)] == [
        "0 B",
        "999 B",
        "1.54 kB",
        "120 MB",
        "1 GB",
    ]
