"""An exchange of messages with one partner, what of it can be right, and how much of the partner's weights counts.

**Probes.** Both sides first send `PROBE` coordinates of their slow weights, which both draw from the run's seed. The
probes show how far the two are apart. `common_steps` derives the step of int4 from them, the same on both sides:

    radius = the largest distance that the probes show in this parameter, times log(all moved) / log(moved here),
             and at most the largest in all
    step   = MARGIN * radius / 8

- The *largest* distance, not the root mean square: of n draws from any distribution the next exceeds the largest with
  probability 1 / (n + 1), while a bound by root mean squares wraps far more of a heavy tail.
- Each parameter has its own step where at least `FEW` of its probed coordinates moved: distances of a model's
  parameters differ by a factor of four. Other parameters (norms, biases, rare rows) take the largest distance in all.
- *Moved* coordinates have a distance other than zero: unseen rows of an embedding say nothing of the others. The
  logarithm lengthens the largest of a few to that of many, exactly for an exponential tail.

A wrapped value is within 8 steps of the receiver's own weight. The same 8 steps bound a liar, and `FAR` the steps.

**Influence.** A partner's distance from our weights is measured in the norm that our own pseudo-gradient would have
after a whole round: its norm over the square root of `round_fraction`, and at least the median of these. Otherwise a
machine that takes few steps would refuse the fast ones. The distance is compared with the median of what partners
showed before, to which each partner has one voice:

    distance within CLIP medians       counts whole, to the bit as without a bound
    up to REFUSE medians               counts as far as CLIP medians go: the difference is scaled down
    beyond, or not finite              is implausible: the meeting is lost
    beyond CLIP, as mostly             likewise, unless it is our only partner, which may be faster than we are

- How far a partner's weights lie from ours *along* ours is compared with its own median likewise, but only scaled down
  and never refused. Not where all began at zero, nor of our only partner. Weights times 1.5 pass the bound of the
  distance once others have taken a part of them over, and cost by many small meetings.
- A cosine of both weights below LEAST_ALIKE is implausible: replicas of a stage began alike. Not where all began at
  zero, as the second matrices of adapters do whose first ones are frozen.
- A partner that pulls back, as a mean over its last meetings, counts less, down to LEAST_PULL, unless most others pull
  back too, or there is no other. It is never refused for it: an honest partner that lags pulls back as well.
- After SELF_DOUBT refusals in a row our guess of the median, TYPICAL, has no voice, for it may be us who are far. A
  replica that returns with a checkpoint of some rounds ago is far from everybody, and so is a slow machine whose first
  round ends after several rounds of others. So a distance blames nobody until a partner's weights have counted here.
- Fewer than LEAST_VALUES weights only have to be finite.
- Weights that we adopt may be at any distance, since it is we who are late. If they lie back from where ours have come,
  their partner is later still, or lies, and we stay where we are.

**Handshake.** The asker acknowledges the weights; the asked takes its step and acknowledges; then the asker steps. The
asked speaks last because the asker's leaving cancels what the asked still does. The caller sets one deadline over the
whole conversation. docs/design/gossip.md has the reasons.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median, median_low
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossip.exchange import kernels
from gossip.exchange.codec import (
    NORM_RATIO,
    NOT_FINITE,
    Coded,
    OwnWeights,
    Reader,
    check_finite,
    largest_of,
    norm,
    pieces,
    scratch,
)
from gossip.exchange.messages import Acknowledge, Implausible, Probe, Weights
from gossip.interface import Conversation
from gossip.rule.outer_step import Tensors

PROBE = 4096
"""Coordinates of the slow weights, and with int4 of the snapshot too, that travel ahead of the rest (16 KiB each)."""
MARGIN = 1.5
"""How much farther than the probes show a value may lie before int4 wraps."""
FEW = 32
"""With fewer probed coordinates that moved, a parameter takes the step of all."""
FAR = 10.0
"""A probe that differs from ours by more than this times our size is implausible.

Our size is our largest probed weight, or `NORM_RATIO` times their root mean square, whichever is more: fresh weights
have no large ones yet, and must not take a trained partner's for a lie.
"""
FINEST = 2.0**-18
"""The smallest step over the largest probed weight: beneath it float32 could not tell the multiples apart."""
STEP_OF_NOTHING = 2.0**-24
"""The step where all probed weights are zero."""

CLIP = 4.0
REFUSE = 8.0
"""Medians of the distance, and of the difference in length, that counts whole; medians of the distance that counts at
all."""
TYPICAL, TYPICAL_LENGTH = 1.0, 0.005
"""The least medians: of the distance, in our own pseudo-gradients, since within one step a partner does no more than
one step's harm; and of how much longer or shorter a partner's weights are, in lengths of ours."""
VOICES, PARTNERS, MOVES = 4, 32, 16
"""The distances of each partner, the partners, and the norms of our own pseudo-gradients that are kept."""
LEAST_PULL, NO_PULL = 0.25, -0.5
"""The least share of a partner that pulls back, and the mean cosine at which its share would be 0. No weights that lie
back farther are adopted."""
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

Message = TypeVar("Message", Probe, Weights)


async def swap(conversation: Conversation, mine: Message) -> Message:
    """Send a message and receive the partner's of the same kind at the same time.

    Raises ConnectionAbortedError where another kind comes, another `ConnectionError` where nothing comes.
    """
    sending = asyncio.create_task(conversation.send(mine))
    receiving = asyncio.create_task(conversation.receive())
    await all_or_failure((sending, receiving))
    theirs = receiving.result()
    if not isinstance(theirs, type(mine)):
        raise ConnectionAbortedError(f"expected {type(mine).__name__}, got {type(theirs).__name__}")
    return theirs


async def all_or_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks; cancel all with the first that fails, and raise the failure: a bug first, a lie, then a loss.

    A task group that fails while it is cancelled forgets the cancellation (Python 3.11, 3.12), so this is none.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        failures = [failure for task in tasks if not task.cancelled() and (failure := task.exception()) is not None]
    if failures:
        raise min(failures, key=lambda each: (isinstance(each, ConnectionError), not isinstance(each, Implausible)))


async def conclude(conversation: Conversation, commit: Callable[[], Awaitable[None]], *, asked: bool) -> None:
    """Exchange acknowledgements and commit: first the asked, which speaks last, then the asker."""
    if not asked:
        await conversation.send(Acknowledge())
    reply = await conversation.receive()
    if not isinstance(reply, Acknowledge):
        raise ConnectionAbortedError(f"expected an acknowledgement, got {type(reply).__name__}")
    await commit()
    if asked:
        await conversation.send(Acknowledge())


def check_probe(theirs: Probe, mine: Probe) -> None:
    """Raise Implausible unless the partner's probe is like ours, finite, and of a round not before its last meeting."""
    came, right = ([(tensor.dtype, list(tensor.shape)) for tensor in _tensors(probe)] for probe in (theirs, mine))
    if came != right:
        raise Implausible(f"probe: {came} where ours is {right}")
    check_finite(_tensors(theirs), "probe")
    if theirs.last_met > theirs.round:
        raise Implausible(f"probe: last met anybody in round {theirs.last_met}, and is in round {theirs.round}")


def check_own(mine: Probe) -> None:
    """Raise ConnectionAbortedError unless our probe is finite."""
    if not math.isfinite(norm(_tensors(mine))):
        raise ConnectionAbortedError(NOT_FINITE)


def size_bytes(*messages: Probe | Weights) -> int:
    """Return the bytes of all tensors of these messages."""
    return sum(tensor.nbytes for message in messages for tensor in _tensors(message))


def _tensors(message: Probe | Weights) -> Tensors:
    if isinstance(message, Probe):
        return (message.slow,) if message.fast is None else (message.slow, message.fast)
    return (*message.fast, *message.slow)


def probe_coordinates(seed: int, sizes: Sequence[int], k: int = PROBE) -> Tensors:
    """Draw `k` coordinates uniformly over tensors of these sizes (elements); all of them where there are fewer.

    Returns one int64 tensor of flat indices per tensor, ascending. Python's generator rather than torch's: its floats
    are the same in every version.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    if total <= k:
        return tuple(torch.arange(size) for size in sizes)
    rng = random.Random(f"{seed}|probe")
    inside: list[list[int]] = [[] for _ in sizes]
    for flat in sorted(int(rng.random() * total) for _ in range(k)):
        number = bisect_right(ends, flat)
        inside[number].append(flat - ends[number] + sizes[number])
    return tuple(torch.tensor(indices, dtype=torch.int64) for indices in inside)


def gap(own_probe: Tensor, partner_probe: Tensor) -> float:
    """Return the norm of own minus mean slow weights over the norm of the mean, as the probes show it."""
    middle = (own_probe + partner_probe) / 2
    apart, size = float(torch.linalg.vector_norm(own_probe - middle)), float(torch.linalg.vector_norm(middle))
    if size == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / size


def common_steps(own_probe: Tensor, their_probe: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """Return the step of int4 for each parameter, the same on both sides to the bit, never zero.

    `counts`: how many of the probed coordinates lie in each parameter. The probes, float32 [sum of counts], are of
    what either side means to send. Raises Implausible where theirs is of another shape, not finite, or far from ours;
    ValueError where ours is not finite or of another number of coordinates.
    """
    if own_probe.shape != (sum(counts),):
        raise ValueError(f"a probe of {list(own_probe.shape)} for {sum(counts)} coordinates")
    if their_probe.shape != own_probe.shape or their_probe.dtype != own_probe.dtype:
        raise Implausible(f"probe: {their_probe.dtype} {list(their_probe.shape)} where ours is {list(own_probe.shape)}")
    distances = torch.sub(own_probe, their_probe).abs_()
    own_size, their_size = largest_of(own_probe), largest_of(their_probe)
    if not math.isfinite(own_size):
        raise ValueError("our own probe is not finite")
    farthest, plausible = largest_of(distances), FAR * max(own_size, NORM_RATIO * _root_mean_square(own_probe))
    if not farthest <= plausible:
        raise Implausible(f"probe: {farthest:.3g} from ours, where {plausible:.3g} is plausible")
    size = max(own_size, their_size)
    finest = max(FINEST * size, torch.finfo(torch.float32).tiny) if size else STEP_OF_NOTHING
    moved = int(torch.count_nonzero(distances))
    radii = (_radius(part, moved, farthest) for part in torch.split(distances, list(counts)))
    return tuple(_rounded_up(max(MARGIN * radius / 8, finest)) for radius in radii)


def _radius(distances: Tensor, moved: int, farthest: float) -> float:
    """Return how far this parameter's values may be expected to lie from the partner's, before the margin.

    `moved`: coordinates that differ in the whole probe; `farthest`: the largest distance among them.
    """
    here = int(torch.count_nonzero(distances))
    if here < FEW:
        return farthest
    return min(farthest, largest_of(distances) * math.log(moved) / math.log(here))


def _rounded_up(step: float) -> float:
    """Return the next number of 8 significant bits.

    Both sides agree whatever the last bit of their logarithm is, and products with integers up to 2^16 are exact.
    """
    fraction, exponent = math.frexp(step)
    return math.ldexp(math.ceil(fraction * 256) / 256, exponent)


def _root_mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(1, tensor.numel()))


class Deviation(NamedTuple):
    """Where a partner's weights lie, and their number of `values`.

    `distance`: from ours. `own`: norm of our pseudo-gradient. `alike`: cosine of both weights; all zeros are not alike,
    unless ours are zero too. `direction`: cosine between what we have learned and where the partner's fast weights are,
    from our slow ones; 0 for slow weights. `longer`: how far the partner's weights lie from ours along ours, in lengths
    of ours; 0 where ours are zero.
    """

    values: int
    distance: float
    own: float
    alike: float = 1.0
    direction: float = 0.0
    longer: float = 0.0


def measure(theirs: Coded, own: OwnWeights, slow: Tensors, fast: OwnWeights) -> Deviation:
    """Measure a partner's weights beside ours: `own` is `fast`, or holds the `slow` ones."""
    reader, near, memory, moved = Reader(theirs, slow), *(scratch(slow) for _ in range(3))
    sums = torch.zeros(5, dtype=torch.float64)
    for number, tensor in enumerate(slow):
        if theirs.form.is_modular and kernels.COMPILED and fast.difference:
            places = *own.addresses(number), fast.difference[number].data_ptr()
            kernels.COMPILED.kernels_measure(*places, *reader.arguments(number), sums.data_ptr())
            continue
        for at in pieces(theirs.form, tensor.numel()):
            ours = own.read(number, at, near)
            way = torch.sub(reader.read(number, at, ours, memory), ours, out=memory[: len(ours)])
            if fast.difference:
                learned = moved[: len(ours)].copy_(fast.difference[number].view(-1)[at])
            else:
                learned = torch.sub(fast.base[number].view(-1)[at], slow[number].view(-1)[at], out=moved[: len(ours)])
            pairs = (way, way), (learned, learned), (learned, way), (ours, ours), (ours, way)
            sums += torch.stack([torch.dot(*pair) for pair in pairs])
    apart, learned_square, along, square, across = sums.tolist()
    values = sum(tensor.numel() for tensor in slow)
    if not math.isfinite(apart):
        return Deviation(values, math.inf, math.sqrt(learned_square))
    alike = _cosine(square + across, square, square + 2.0 * across + apart) if square else 1.0
    towards = learned_square + along, learned_square, learned_square + 2.0 * along + apart
    back = _cosine(*towards) if own is fast else 0.0
    longer = across / square if square else 0.0
    return Deviation(values, math.sqrt(apart), math.sqrt(learned_square), alike, back, longer)


def _cosine(product: float, square: float, other: float) -> float:
    """Return the cosine of two vectors, given their product and the squares of their norms; 0 where one is zero."""
    return product / math.sqrt(square * other) if square > 0.0 and other > 0.0 else 0.0


class _Seen:
    """The history of one partner."""

    def __init__(self) -> None:
        self.ratios, self.lengths = deque[float](maxlen=VOICES), deque[float](maxlen=VOICES)
        self.cosine = 0.0
        self.directions = 0

    @property
    def voice(self) -> float:
        """Its usual distance."""
        return median(self.ratios)

    @property
    def length(self) -> float:
        """How much longer or shorter than ours its weights usually are."""
        return median(self.lengths)

    def add(self, ratio: float, length: float, cosine: float | None) -> None:
        self.ratios.append(ratio)
        self.lengths.append(length)
        if cosine is not None:
            self.directions += 1
            self.cosine += max(NEWEST, 1.0 / self.directions) * (cosine - self.cosine)


class InfluenceBound:
    """The history of partners for one set of weights, and the share of the next one that counts.

    `from_zero`: all weights were zero at first.
    """

    def __init__(self, *, from_zero: bool = False) -> None:
        self._from_zero = from_zero
        self._seen: dict[str, _Seen] = {}
        self._moves: deque[float] = deque(maxlen=MOVES)
        self._whole_rounds: deque[float] = deque(maxlen=MOVES)
        """What our moves would be after a whole round of the fastest replica's inner steps."""
        self._refused = 0
        """Meetings in a row that were refused."""
        self._has_counted = False
        """Whether any partner's weights have counted here."""

    def share(self, partner: str, deviation: Deviation, *, round_fraction: float = 1.0, only: bool = False) -> float:
        """Return the share of the way to a partner's weights that counts; raise Implausible where none does.

        `round_fraction`: our inner steps since the last outer step over those of the fastest replica in a round, above
        0 and at most 1. `only`: our stage has no other partner. Raises another ConnectionAbortedError for a distance
        before any partner has counted: then either side may honestly be behind.
        """
        if not math.isfinite(deviation.distance):
            raise Implausible("weights too far to measure")
        if deviation.values < LEAST_VALUES:
            return 1.0
        self._check_alike(deviation)
        whole = deviation.own / math.sqrt(round_fraction)
        self._moves.append(deviation.own)
        self._whole_rounds.append(whole)
        unit = max(whole, median(self._whole_rounds))
        if not unit:
            return 1.0  # we have learned nothing yet, and know no distance
        ratio = deviation.distance / unit
        length = abs(deviation.longer)
        most = self._typical(TYPICAL, (seen.voice for seen in self._seen.values()))
        longest = self._typical(TYPICAL_LENGTH, (seen.length for seen in self._seen.values()))
        self._seen[partner] = seen = self._seen.pop(partner, None) or _Seen()
        if len(self._seen) > PARTNERS:
            del self._seen[next(iter(self._seen))]
        # A move that has hardly begun has no direction yet.
        seen.add(ratio, length, deviation.direction if deviation.own >= median(self._moves) / 2 else None)
        often = len(self._seen) > 1 and len(seen.ratios) >= OFTEN and seen.voice > CLIP * most
        if ratio > (CLIP if often else REFUSE) * most:
            self._refused += 1
            far = f"weights {ratio:.3g} of a round's steps from ours, where {most:.3g} is usual"
            if not self._has_counted:
                raise ConnectionAbortedError(f"{far}: either may be behind")
            raise Implausible(far)
        self._has_counted = True
        if len(self._seen) > 1 or not self._in_doubt:
            self._refused = 0
        share = min(1.0, CLIP * most / ratio) if ratio else 1.0
        if only:
            return share
        if length and not self._from_zero:
            share *= min(1.0, CLIP * longest / length)
        return share * self._pull(seen)

    def check_adopted(self, deviation: Deviation, *, only: bool = False) -> None:
        """Raise Implausible where weights that are to replace ours have nothing in common with them.

        Raises another ConnectionAbortedError where they lie back from where ours have come: then the partner is behind
        us, or lies. But it may be us who went astray, so not for ever, and not where our stage has no other partner.
        """
        if deviation.values < LEAST_VALUES:
            return
        self._check_alike(deviation)
        if deviation.direction < NO_PULL and not only and not self._in_doubt:
            self._refused += 1
            raise ConnectionAbortedError(f"weights to adopt that go back: direction {deviation.direction:.2f}")
        self._refused = 0

    def _check_alike(self, deviation: Deviation) -> None:
        if deviation.alike < LEAST_ALIKE and not self._from_zero:
            raise Implausible(f"weights that are not like ours: cosine {deviation.alike:.2f}")

    @property
    def _in_doubt(self) -> bool:
        return self._refused >= SELF_DOUBT

    def _pull(self, seen: _Seen) -> float:
        """Return the share that a partner's direction leaves; 1 where most others pull back as well."""
        others = [other.cosine for other in self._seen.values() if other is not seen and other.directions]
        if seen.cosine >= 0.0 or (len(others) >= LEAST_OTHERS and median_low(others) < 0.0):
            return 1.0
        return max(LEAST_PULL, 1.0 - seen.cosine / NO_PULL)

    def _typical(self, least: float, voices: Iterable[float]) -> float:
        """Return the median of what is usual with each partner and of the initial guess; never less than the guess."""
        known = list(voices)
        return max(least, median_low(known if known and self._in_doubt else [*known, least]))
