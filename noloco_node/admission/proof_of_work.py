"""What a ticket costs where a run is open: a number that is hard to find and easy to check.

Hard by a second or so of a core, for this run and this peer id alone: nothing to one peer, a nuisance to thousands. The
bounds per address prefix (`ticket_service`) hold back more than this does.
"""

from __future__ import annotations

import hashlib
import itertools

WORK_BITS = 20
LOOK_BITS = 14
"""For a ticket that only lets a peer look: some hundredths of a second."""


def is_work(run: str, peer: str, nonce: int, bits: int = WORK_BITS) -> bool:
    """Say whether a number is good for a run and a peer id."""
    return 0 <= nonce < 2**64 and _value(_begun(run, peer), nonce) < 2 ** (64 - bits)


def work(run: str, peer: str, bits: int = WORK_BITS) -> int:
    """Find a good number; takes 2 ** bits attempts on average."""
    begun, bound = _begun(run, peer), 2 ** (64 - bits)
    return next(nonce for nonce in itertools.count() if _value(begun, nonce) < bound)


def _begun(run: str, peer: str) -> bytes:
    return hashlib.sha256(f"noloco work\0{run}\0{peer}".encode()).digest()


def _value(begun: bytes, nonce: int) -> int:
    return int.from_bytes(hashlib.sha256(begun + nonce.to_bytes(8)).digest()[:8])
