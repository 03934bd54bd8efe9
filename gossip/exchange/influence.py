"""How much of a partner's weights counts: as much as lies within the distance that partners have, and no more.

Weights honestly differ, by what both have learned since they last agreed. So a partner's distance from our weights is
measured in our own pseudo-gradient's norm, and compared with the median of what partners before it showed. Where fast
and slow weights are nearly the same (a snapshot taken soon after a step) our own norm says little, and the ratio would
diverge: the median of our own norms is its floor.

    distance within CLIP medians       counts whole, to the bit as if nobody had looked
    up to REFUSE medians               counts as far as CLIP medians go: the difference is scaled down
    beyond, or not finite              is implausible: the meeting is lost
    beyond CLIP, as mostly             likewise: who is far each time is not far by chance; an only partner may be
                                       faster than we are, and is only scaled down

Replicas of a stage began alike, so their weights have much in common: whoever sends the negative of them, or noise of
the same norm, is not LEAST_ALIKE. In the first rounds, where weights are hardly longer than a step, no distance would
show that.

Whoever walks backwards stays within any distance. What gives it away is the direction: the cosine between what we have
learned and where the partner stands, both seen from our slow weights. One of them is noisy, the mean of a partner's
last few is less so. Who pulls back counts the less the more it does, to LEAST_PULL, unless most others pull back too:
they still come together, only slower. Nobody is refused for it, for an honest partner that lags stands where we come
from, and pulls back as well. The only other replica of a stage counts whole.

Of fewer than LEAST_VALUES weights none of this says anything: they only have to be finite.

Each partner has one voice in the median, its own median of late, and so has our guess, TYPICAL: else the first partner
would be the measure of all, and a liar that came first would count whole. What was refused is heard too: if honest
distances grow for a reason, the median follows them after some meetings. Where nothing but refusals has come for
SELF_DOUBT meetings it may be us who are far, and our guess has no voice. So nobody is shut out for ever. The median is
never less than TYPICAL: a pair that always meets agrees to the last bit, and a third replica would be far from it.
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
"""The least median, in our own pseudo-gradients: who is no farther than one step does no more than one step's harm."""
VOICES, PARTNERS, MOVES = 4, 32, 16
"""How much is remembered: distances of each partner, partners, and norms of our own pseudo-gradients."""
LEAST_PULL, NO_PULL = 0.25, -0.5
"""What counts at least of a partner that pulls back, and the mean cosine at which nothing else would."""
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
    """Where a partner's weights lie.

    `values`: how many they are. `distance`: from ours. `own`: norm of our pseudo-gradient. `alike`: cosine of both
    weights. `direction`: cosine between what we have learned and where the partner's fast weights are, from our slow
    ones; 0 of slow weights. Weights that are all zero are not alike, unless ours are.
    """

    values: int
    distance: float
    own: float
    alike: float = 1.0
    direction: float = 0.0


def measure(theirs: Coded, own: Tensors, owed: Feedback, slow: Tensors, fast: Tensors) -> Deviation:
    """Measure what came beside our weights `own`, `slow` or `fast` themselves, of which `owed` is still to be sent."""
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
    """What one partner has shown."""

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
    """What partners have shown of one set of weights, and how much of the next one counts."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._moves: deque[float] = deque(maxlen=MOVES)
        self._refused = 0
        """Meetings in a row that were refused."""

    def share(self, partner: str, deviation: Deviation, *, only: bool = False) -> float:
        """Return which part of the way to a partner's weights counts, 1 for all; raise Implausible where none does.

        `only`: our stage has no other.
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
        """Whether it may be us."""
        return self._refused >= SELF_DOUBT

    def _pull(self, seen: _Seen) -> float:
        """Return what counts of a partner for its direction; all where most others pull back as well."""
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
    """Raise Implausible where weights that we are to go on from have nothing in common with ours."""
    deviation = measure(theirs, own, Feedback(theirs.form), own, own)
    if deviation.values >= LEAST_VALUES and deviation.alike < LEAST_ALIKE:
        raise Implausible(f"weights to adopt that are not like ours: cosine {deviation.alike:.2f}")
