"""Short ways of rounding give the bits of the long ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.exchange.codec import restore_both_int4, restore_int4, round_int4

steps = st.tuples(st.integers(128, 255), st.integers(-100, 60)).map(lambda each: each[0] * 2.0 ** each[1])
"""As `common_steps` makes them: numbers of 8 significant bits."""


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), steps, st.sampled_from([0.0, 0.5, 3.0, 2.0**10, 2.0**20, 2.0**60]), st.booleans())
def test_what_a_sender_reads_of_its_own_is_what_its_codes_say(seed: int, step: float, far: float, high: bool) -> None:
    """In whole steps, between two of them, and where float32 has none between its numbers any more."""
    source = torch.Generator().manual_seed(seed)
    meant = (torch.randn(2000, generator=source) * far + torch.randint(-9, 10, (2000,), generator=source) / 2) * step
    codes = torch.zeros(2000, dtype=torch.uint8)
    round_int4(meant.clone(), codes, step, high=high)
    short = torch.zeros_like(codes)
    round_int4(meant.clone(), short, step, high=high, norm=float(torch.linalg.vector_norm(meant)))
    assert torch.equal(short, codes)
    sent, own, theirs, heard = (torch.empty(2000) for _ in range(4))
    restore_int4(codes, meant, step, sent, high=high)
    came = torch.randint(0, 256, (2000,), generator=source, dtype=torch.uint8)
    restore_both_int4(came, meant, step, own, theirs, high=high)
    restore_int4(came, meant, step, heard, high=high)
    assert torch.equal(own, sent)
    assert torch.equal(theirs, heard)
