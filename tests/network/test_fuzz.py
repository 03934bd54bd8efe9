"""Broken messages: whatever comes, the decoder makes a message or a violation of it, in bounded memory."""

from __future__ import annotations

import tracemalloc

from benchmarks.robustness import fuzz


def test_the_decoder_makes_a_message_or_a_violation_of_whatever_comes() -> None:
    tracemalloc.start()
    try:
        fuzz.outcomes(0, 2_000)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        fuzz.outcomes(1, 2_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    declared = max(chosen.cap_bytes for chosen in fuzz.fuzzed_schemas())
    # A long header is there twice for a moment, as bytes and decoded; the rest is a good message's.
    assert peak - before < 3 * declared
    seen = fuzz.outcomes(2, 96_000)
    assert seen.keys() == {"violation", "message", "waits for more"}
    assert min(seen.values()) > 5_000
