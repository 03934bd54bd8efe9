"""How much of a partner's weights counts: as much as lies within the usual distance of partners, and no more.

Weights honestly differ, by what both have learned since they last agreed. So a partner's distance from our weights is
measured in our own pseudo-gradient's norm, and compared with the median of what partners showed before. Soon after a
step our own norm is near zero and the ratio would diverge: the median of our own norms is its floor.

    distance within CLIP medians       counts whole, to the bit as without a bound
    up to REFUSE medians               counts as far as CLIP medians go: the difference is scaled down
    beyond, or not finite              is implausible: the meeting is lost
    beyond CLIP, as mostly             likewise, unless it is our only partner, which may be faster than we are

Replicas of a stage began alike, so their weights have a cosine of at least LEAST_ALIKE; the negative of our weights, or
noise of their norm, has less. In the first rounds, where weights are hardly longer than a step, no distance shows that.

A partner that walks backwards stays within any distance. Its direction shows it: the cosine between what we have
learned and where the partner stands, both seen from our slow weights, as a mean over its last meetings. A partner that
pulls back counts less, down to LEAST_PULL, unless most others pull back too. It is never refused for it, since an
honest partner that lags pulls back as well. The only other replica of a stage counts whole.

Fewer than LEAST_VALUES weights only have to be finite.

Each partner has one voice in the median, its own median of late, and so has our guess, TYPICAL: else a liar that came
first would be the measure of all. Refused distances have a voice too: if honest distances grow for a reason, the median
follows after some meetings. After SELF_DOUBT refusals in a row our guess has no voice, for it may be us who are far. So
nobody is shut out for ever. The median is never below TYPICAL: a pair that always meets agrees to the last bit, and any
third replica would seem far.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low
from typing import NamedTuple

import torch

from gossip.exchange.codec import Coded, Feedback, Reader, pieces, scratch
from gossip.exchange.messages import Implausible
from gossip.rule.outer_step import Tensors

CLIP = 4.0
REFUSE = 8.0
"""Medians of the distance that counts whole, and that counts at all."""
TYPICAL = 1.0
"""The least median, in our own pseudo-gradients: within one step a partner does no more than one step's harm."""
VOICES, PARTNERS, MOVES = 4, 32, 16
"""The distances of each partner, the partners, and the norms of our own pseudo-gradients that are kept."""
LEAST_PULL, NO_PULL = 0.25, -0.5
"""The least share of a partner that pulls back, and the mean cosine at which its share would be 0."""
NEWEST = 0.4
"""The least weight of the newest meeting in the mean."""
OFTEN = 3
"""Meetings from which a partner is mostly far."""
LEAST_OTHERS = 2
"""How many others it takes to say what most of them do."""
SELF_DOUBT = 8
LEAST_ALIKE = 0.3
"""Cosine of a partner's weights and ours. Those of honest replicas have more, noise has hardly any."""
LEAST_VALUES = 256


class Deviation(NamedTuple):
    """Where a partner's weights lie, and their number of `values`.

    `distance`: from ours. `own`: norm of our pseudo-gradient. `alike`: cosine of both weights; all zeros are not alike,
    unless ours are zero too. `direction`: cosine between what we have learned and where the partner's fast weights are,
    from our slow ones; 0 for slow weights.
    """

    values: int
    distance: float
    own: float
    alike: float = 1.0
    direction: float = 0.0


def measure(theirs: Coded, own: Tensors, owed: Feedback, slow: Tensors, fast: Tensors) -> Deviation:
    """Measure a partner's weights beside ours, `own`: either `slow` or `fast`, with what is still `owed` of them."""
    apart = learned = along = ours = across = 0.0
    reader, near, memory, moved = Reader(theirs, own), *(scratch(own) for _ in range(3))
    for number, tensor in enumerate(own):
        for at in pieces(theirs.form, tensor.numel()):
            meant = owed.meant(own, number, at, near)
            difference = torch.sub(reader.read(number, at, meant, memory), meant, out=memory[: len(meant)])
            move = torch.sub(slow[number].view(-1)[at], fast[number].view(-1)[at], out=moved[: len(meant)])
            apart += float(torch.dot(difference, difference))
            learned += float(torch.dot(move, move))
            along += float(torch.dot(move, difference))
            ours += float(torch.dot(meant, meant))
            across += float(torch.dot(meant, difference))
    values = sum(tensor.numel() for tensor in own)
    if not math.isfinite(apart):
        return Deviation(values, math.inf, math.sqrt(learned))
    alike = _cosine(ours + across, ours, ours + 2.0 * across + apart) if ours else 1.0
    back = _cosine(learned - along, learned, learned - 2.0 * along + apart) if own is fast else 0.0
    return Deviation(values, math.sqrt(apart), math.sqrt(learned), alike, back)


def _cosine(product: float, square: float, other: float) -> float:
    """Return the cosine of two vectors, given their product and the squares of their norms; 0 where one is zero."""
    return product / math.sqrt(square * other) if square > 0.0 and other > 0.0 else 0.0


class _Seen:
    """The history of one partner."""

    def __init__(self) -> None:
        self.ratios: deque[float] = deque(maxlen=VOICES)
        self.cosine = 0.0
        self.directions = 0

    @property
    def voice(self) -> float:
        """Its usual distance."""
        return median(self.ratios)

    def add(self, ratio: float, cosine: float | None) -> None:
        self.ratios.append(ratio)
        if cosine is not None:
            self.directions += 1
            self.cosine += max(NEWEST, 1.0 / self.directions) * (cosine - self.cosine)


class InfluenceBound:
    """The history of partners for one set of weights, and the share of the next one that counts."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._moves: deque[float] = deque(maxlen=MOVES)
        self._refused = 0
        """Meetings in a row that were refused."""

    def share(self, partner: str, deviation: Deviation, *, only: bool = False) -> float:
        """Return the share of the way to a partner's weights that counts; raise Implausible where none does.

        `only`: our stage has no other partner.
        """
        if not math.isfinite(deviation.distance):
            raise Implausible("weights too far to measure")
        if deviation.values < LEAST_VALUES:
            return 1.0
        if deviation.alike < LEAST_ALIKE:
            raise Implausible(f"weights that are not like ours: cosine {deviation.alike:.2f}")
        self._moves.append(deviation.own)
        unit = max(deviation.own, median(self._moves))
        if not unit:
            return 1.0  # we have learned nothing yet, and know no distance
        ratio = deviation.distance / unit
        most = self._typical()
        self._seen[partner] = seen = self._seen.pop(partner, None) or _Seen()
        if len(self._seen) > PARTNERS:
            del self._seen[next(iter(self._seen))]
        # A move that has hardly begun has no direction yet.
        seen.add(ratio, deviation.direction if deviation.own >= unit / 2 else None)
        often = len(self._seen) > 1 and len(seen.ratios) >= OFTEN and seen.voice > CLIP * most
        if ratio > (CLIP if often else REFUSE) * most:
            self._refused += 1
            raise Implausible(f"weights {ratio:.3g} of our own steps from ours, where {most:.3g} is usual")
        if len(self._seen) > 1 or not self._in_doubt:
            self._refused = 0
        pull = 1.0 if only else self._pull(seen)
        return min(1.0, CLIP * most / ratio) * pull if ratio else 1.0

    @property
    def _in_doubt(self) -> bool:
        """Whether our own weights may be the far ones."""
        return self._refused >= SELF_DOUBT

    def _pull(self, seen: _Seen) -> float:
        """Return the share that a partner's direction leaves; 1 where most others pull back as well."""
        others = [other.cosine for other in self._seen.values() if other is not seen and other.directions]
        if seen.cosine >= 0.0 or (len(others) >= LEAST_OTHERS and median_low(others) < 0.0):
            return 1.0
        return max(LEAST_PULL, 1.0 - seen.cosine / NO_PULL)

    def _typical(self) -> float:
        voices = [seen.voice for seen in self._seen.values()]
        if not self._in_doubt:
            voices.append(TYPICAL)
        return max(TYPICAL, median_low(voices))


def check_alike(theirs: Coded, own: Tensors) -> None:
    """Raise Implausible where weights that we are to adopt have nothing in common with ours."""
    deviation = measure(theirs, own, Feedback(theirs.form), own, own)
    if deviation.values >= LEAST_VALUES and deviation.alike < LEAST_ALIKE:
        raise Implausible(f"weights to adopt that are not like ours: cosine {deviation.alike:.2f}")
