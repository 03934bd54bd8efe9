"""How much of an activation, or of a returned gradient, counts: what its size is beside what others of its kind have.

The size of a message is the root mean square of its values, of all tokens together: single tokens honestly lie far
apart (the first of a sequence may be a hundred times as loud as the others), microbatches do not. In a code with scales
it is what the scales alone say, which no value can exceed: nothing is decoded for it.

    up to SCALE medians of what was seen    counts whole, to the bit as if nobody had looked
    up to REFUSE medians                    is scaled down to SCALE medians
    beyond, or not finite                   is refused: no backward pass adds it up

A model that knows much of its text by heart honestly returns a gradient up to 60 times as large as usual, for a short
microbatch that it does not know. So who is refused for a size alone is no liar by that, and messages of fewer than
LEAST_VALUES are only asked to be finite.

The median is over peers, of the median of each one's last messages: who sends much has no more voices than others. Of
an even number the higher one in the middle counts, so that nobody can have honest messages refused by sending small
ones. What is remembered of a message is what of it counted, so that no single one moves a median far.

Until LEAST_KNOWN messages have come only what no model computes is refused. Bounds are wider at first, for nothing
changes sizes like the first steps of a run.

The direction of a gradient is not looked at: beside the noise of a microbatch it says nothing. To scale activations
changes the bytes from which the dither of their gradient follows: who sent them reads it with twice the rounding noise.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median, median_high
from typing import TYPE_CHECKING

from pipeline.activations.formats import ActivationCode

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 3.0
REFUSE = 10.0
LARGEST_SIZE = 2.0**16
"""Of what is let in where nothing is known: the values of trained models are smaller by far."""
LEAST_KNOWN = 4
CERTAIN = 32
"""Messages after which bounds are still twice as wide as they will be."""
LEAST_VALUES = 8192
MESSAGES, PEERS = 3, 16
"""How much is remembered: the last messages of each peer, for sizes change with the weights, and the last peers."""


class UnusualSizeError(ValueError):
    """A message is well formed and finite, and much larger than others of its kind."""


class SizeBound:
    """What peers have sent of one kind, and how much of the next message counts."""

    def __init__(self, code: ActivationCode) -> None:
        self._code = code
        self._seen: dict[str, deque[float]] = {}
        self._known = 0
        self._counts: Counter[str] = Counter()

    def bounded(self, peer: str, wire: Tensor) -> Tensor:
        """Return what counts of a message, itself where all does.

        Raises `UnusualSizeError` where none does, and another ValueError for what no honest peer sends.
        """
        from pipeline.activations.codec import bound_of_norm, check, scaled

        check(self._code, wire)
        count = self._code.values(wire.shape)
        size = bound_of_norm(self._code, wire) / math.sqrt(max(1, count))
        few = count < LEAST_VALUES
        if not math.isfinite(size) or (size > LARGEST_SIZE and not few):
            self._counts["refused"] += 1
            raise ValueError(f"values of the size {size:.3g}")
        if few:
            return wire
        usual = self._usual()
        most = SCALE * (1.0 + CERTAIN / max(1, self._known)) * usual
        self._note(peer, min(size, most))
        if size > most * REFUSE / SCALE:
            self._counts["refused"] += 1
            raise UnusualSizeError(f"values of the size {size:.3g}, where {usual:.3g} is usual")
        if size <= most:
            return wire
        self._counts["scaled"] += 1
        return scaled(self._code, wire, most / size)

    def statistics(self) -> dict[str, int | float]:
        """Return how many messages were scaled down and refused."""
        return {name: self._counts[name] for name in ("scaled", "refused")}

    def _usual(self) -> float:
        """Return the median size; infinite while too little is known, and where all was zero."""
        if self._known < LEAST_KNOWN:
            return math.inf
        return median_high(median(sizes) for sizes in self._seen.values()) or math.inf

    def _note(self, peer: str, size: float) -> None:
        self._known += 1
        sizes = self._seen.pop(peer, None)
        self._seen[peer] = sizes = deque(maxlen=MESSAGES) if sizes is None else sizes
        sizes.append(size)
        if len(self._seen) > PEERS:
            del self._seen[next(iter(self._seen))]
