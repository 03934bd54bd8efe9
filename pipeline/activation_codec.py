"""The arithmetic of messages: the activation codecs, the marks of tokens, and how much of a received message counts.

- **Rotation.** A Hadamard matrix turns each block of 32 channels before rounding, and back afterwards. So a loud
  channel shares its magnitude with its neighbours, and the rounding errors of a block are alike.
- **Scales.** A block's scale is the token's top times the smallest power of 2^(-1/8) that is not below the block's
  largest magnitude. If the top is finite and at most `LARGEST`, everything else decodes to finite numbers.
- **Activations** are rounded to the nearest of the middles of 2^bits equal parts of [-scale, scale].
- **Gradients** are rounded without a bias. The sender adds u, uniform in [0, 1), to value / step and rounds down; the
  receiver subtracts the same u. So the error is uniform over a step for every value, and its mean square is half that
  of stochastic rounding. Both sides compute u as a hash (32-bit integers only: the same on every device) of the value's
  place and a seed, which `seed_of` takes from the activations' bytes.

`SizeBound` compares the root mean square of a message with the median of its kind; in a code with scales the scales
alone bound it.

    up to SCALE medians     the message counts whole, unchanged to the bit
    beyond                  its loudest tokens, an eighth (LOUDEST), are scaled down to the size of the others
    still beyond            the whole message is scaled down to SCALE medians
    then beyond REFUSE      it is refused, as it is where a value is not finite

The gradient of a token is larger the smaller its activations are, so one token that no replica has learnt yet honestly
makes a message a hundred times as large. Wrong weights, or a factor, make all tokens larger.

The median is over peers, of the median of each peer's last messages: each peer has one voice. Of an even number the
higher middle one counts, so that small messages cannot get honest ones refused. Before LEAST_KNOWN messages only
impossible sizes are refused, and bounds are wider at first. An unusual size is no violation, and messages of fewer than
LEAST_VALUES values need only be finite: a model that knows its text by heart honestly returns gradients 60 times the
usual size for a short new microbatch.

Where only a share of the targets is learnt, a gradient's sum of squares is so much smaller, and the mean is taken over
this share of the values. A long message of which fewer than LEAST_VALUES count is only scaled down, to the norm that
LEAST_VALUES of the greatest usual size have.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from statistics import median, median_high

import torch
from torch import Tensor

from pipeline.messages import BLOCK, FIRST, TOP_BYTES, UNLEARNT, ActivationCode, ActivationCodec, Microbatch

LARGEST = 2.0**50  # the largest top of a message: the sum of the squares of 65,536 such values is finite
FRACTIONS_PER_OCTAVE = 8
PIECE = 2**16  # values worked on at a time on a CPU: what is made of them on the way stays in the cache
PIECE_ON_A_GPU = 2**24  # elsewhere it is the memory beside the message that counts
_ROUNDED_UP = 1.0 + 2.0**-7
_ROTATION_SIGNS = 0x9E3779B9
"""Bit i is the sign of channel i before the rotation: a block of equal values is not one loud value afterwards."""


def encode(code: ActivationCode, values: Tensor, seed: int = 0) -> Tensor:
    """Return values [..., width] as they travel, [..., row], on the device where they are."""
    if code.plain:
        return values.to(getattr(torch, code.dtype))
    width, shape = values.shape[-1], values.shape[:-1]
    rows = values.detach().reshape(-1, width)
    wire = torch.empty(len(rows), code.row(width), dtype=torch.uint8, device=values.device)
    for first, last in _pieces(len(rows), width, values.device):
        _encode_rows(code, rows[first:last].float(), wire[first:last], seed, first * width)
    return wire.view(*shape, -1)


def decode(code: ActivationCode, wire: Tensor, seed: int = 0) -> Tensor:
    """Return a message [..., row] (`check`ed) as float32 [..., width], on the device where it is."""
    if code.plain:
        return wire.float()
    width, shape = width_of(code, wire.shape[-1]), wire.shape[:-1]
    rows = wire.reshape(-1, wire.shape[-1])
    values = torch.empty(len(rows), width, device=wire.device)
    for first, last in _pieces(len(rows), width, wire.device):
        _decode_rows(code, rows[first:last], values[first:last], seed, first * width)
    return values.view(*shape, width)


def width_of(code: ActivationCode, row: int) -> int:
    """Return the values of a token, given the length of its row; ValueError where there is no such row."""
    width = row if code.plain else (row - TOP_BYTES) * 8 * BLOCK // (8 + code.bits * BLOCK)
    if width < 1 or code.row(width) != row:
        raise ValueError(f"no token takes {row} bytes in {code.bits} bits a value")
    return width


def count_of(code: ActivationCode, wire: Tensor) -> int:
    """Return how many values a message [..., row] holds."""
    *tokens, row = wire.shape
    return math.prod(tokens) * width_of(code, row)


def check(code: ActivationCode, wire: Tensor) -> None:
    """Raise ValueError for a message that no stage sends, before any arithmetic with it.

    Shape and dtype are the schema's to check, and of floating-point numbers also that they are finite.
    """
    if code.plain or not wire.numel():
        return
    tops = _tops(wire.reshape(-1, wire.shape[-1]))
    # Not a number is in no range.
    if not bool(((tops >= 0.0) & (tops <= LARGEST)).all()):
        raise ValueError(f"the top of a token's values is not from 0 to {LARGEST:.3g}")


def seed_of(wire: Tensor) -> int:
    """Return the seed of the dither of the gradient of these activations, as they travelled: 64 bits."""
    content = wire.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(blake2b(content.data, digest_size=8).digest(), "big")


def gradient_seed(codec: ActivationCodec, activations: Tensor) -> int:
    """Return the seed of the gradient of activations that travelled; 0 where it needs none."""
    return seed_of(activations) if codec.back.dithered else 0


def gradient_seed_beside(codec: ActivationCodec, activations: Tensor) -> Callable[[], int]:
    """Begin to compute such a seed in a thread of its own; what is returned waits for it.

    The gradient comes much later. A GPU would wait for the hash of every message: a processor takes a millisecond and
    more for a megabyte.
    """
    return _beside.submit(seed_of, activations).result if codec.back.dithered else lambda: 0


_beside = ThreadPoolExecutor(1, "activation hash")


def bounds_of_norms(code: ActivationCode, wire: Tensor) -> Tensor:
    """Return upper bounds of the norms of the tokens of a message [..., row], float32 [tokens].

    Of plain numbers they are the norms themselves. Not finite where a value is not, or where a norm overflows float32.
    """
    rows = wire.reshape(-1, wire.shape[-1])
    largest: Tensor
    if code.plain:
        largest = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        return largest
    scales = rows[:, TOP_BYTES : TOP_BYTES + width_of(code, wire.shape[-1]) // BLOCK]
    largest = torch.linalg.vector_norm(_tops(rows).float() * _fractions(wire.device)[scales.int()], dim=1)
    beyond = 0.5 / _middle(code) if code.dithered else 0.0
    return largest.mul_((1.0 + beyond) * math.sqrt(BLOCK))


def scaled(code: ActivationCode, wire: Tensor, factors: float | Tensor) -> Tensor:
    """Return a message [..., row] whose values are so many times those of another, in new memory.

    `factors`: one, or float32 [tokens].
    """
    rows = wire.reshape(-1, wire.shape[-1])
    each = torch.as_tensor(factors, device=wire.device).view(-1, 1)
    if code.plain:
        return (rows.float() * each).to(wire.dtype).view(wire.shape)
    rows = rows.clone()
    rows[:, :TOP_BYTES] = (_tops(rows).float() * each).bfloat16().view(torch.uint8)
    return rows.view(wire.shape)


def _encode_rows(code: ActivationCode, rows: Tensor, wire: Tensor, seed: int, place: int) -> None:
    """Code float32 [n, width] into uint8 [n, row]. `place`: number of the first value in the message."""
    blocks = rows.view(-1, BLOCK) @ _rotation(rows.device)
    bounds = blocks.abs().amax(1).view(len(rows), -1)
    # Rounded to bfloat16 it is still not below.
    tops = bounds.amax(1, keepdim=True).mul_(_ROUNDED_UP).bfloat16()
    wire[:, :TOP_BYTES] = tops.view(torch.uint8)
    octaves = torch.log2(tops / bounds).nan_to_num_(nan=0.0, posinf=math.inf)
    scales = octaves.mul_(FRACTIONS_PER_OCTAVE).floor_().clamp_(0, 255).to(torch.uint8)
    wire[:, TOP_BYTES : TOP_BYTES + scales.shape[1]] = scales
    blocks.div_(_steps(code, tops, scales).clamp_(min=torch.finfo(torch.float32).tiny))
    if code.dithered:
        blocks.view(-1).add_(_dither(blocks.numel(), seed, place, rows.device))
    codes = blocks.add_(_middle(code)).floor_().clamp_(0, 2**code.bits - 1).to(torch.uint8)
    _pack(code.bits, codes.view(len(rows), -1), wire[:, TOP_BYTES + scales.shape[1] :])


def _decode_rows(code: ActivationCode, wire: Tensor, rows: Tensor, seed: int, place: int) -> None:
    """Write uint8 [n, row] into float32 [n, width]."""
    scales = wire[:, TOP_BYTES : TOP_BYTES + rows.shape[1] // BLOCK]
    codes = _unpack(code.bits, wire[:, TOP_BYTES + scales.shape[1] :])
    blocks = codes.view(-1, BLOCK).float().add_(0.5 - _middle(code))
    if code.dithered:
        blocks.view(-1).sub_(_dither(blocks.numel(), seed, place, wire.device))
    blocks.mul_(_steps(code, _tops(wire), scales))
    torch.mm(blocks, _rotation(wire.device).T, out=rows.view(-1, BLOCK))


def _middle(code: ActivationCode) -> float:
    """Return what is added to value / step before it is rounded down, so that codes begin at 0."""
    levels = 1 << code.bits
    return (levels - 1) / 2 if code.dithered else levels / 2


def _steps(code: ActivationCode, tops: Tensor, scales: Tensor) -> Tensor:
    """Return the distance of two levels in each block, [n * blocks, 1]."""
    bounds = tops.float() * _fractions(scales.device)[scales.int()]
    return bounds.div_(_middle(code)).view(-1, 1)


def _tops(wire: Tensor) -> Tensor:
    """Return the tops of rows of bytes, bfloat16 [n, 1]."""
    # A copy: a single row counts as contiguous with any stride, and not every stride can be viewed.
    return wire[:, :TOP_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def _pack(bits: int, codes: Tensor, wire: Tensor) -> None:
    """Write codes uint8 [n, width] into uint8 [n, width * bits / 8].

    Bits are split into parts of 8, 4, 2 and 1; of a part of b bits, 8 / b equal stretches of a row share bytes.
    """
    done = 0
    for part in (part for part in (8, 4, 2, 1) if bits & part):
        values, count = codes >> (bits - done - part) if done + part < bits else codes, codes.shape[1] * part // 8
        values = values & (2**part - 1)
        out = wire[:, codes.shape[1] * done // 8 :][:, :count]
        out.copy_(values[:, :count])
        for number in range(1, 8 // part):
            out |= values[:, number * count : (number + 1) * count] << (number * part)
        done += part


def _unpack(bits: int, wire: Tensor) -> Tensor:
    """Return the codes uint8 [n, width] of bytes [n, width * bits / 8]."""
    width, done = wire.shape[1] * 8 // bits, 0
    codes = torch.zeros(len(wire), width, dtype=torch.uint8, device=wire.device)
    for part in (part for part in (8, 4, 2, 1) if bits & part):
        count = width * part // 8
        packed = wire[:, width * done // 8 :][:, :count]
        for number in range(8 // part):
            values = (packed >> (number * part)) & (2**part - 1)
            codes[:, number * count : (number + 1) * count] |= values << (bits - done - part)
        done += part
    return codes


def _dither(count: int, seed: int, place: int, device: torch.device) -> Tensor:
    """Return float32 [count] in (0, 1): a hash of each place in the message, from `place` (even) on, under the seed.

    One hash of 32 bits gives two values. The hash is Chris Wellons' lowbias32, keyed before and between its rounds.
    """
    low, high = seed & 0xFFFFFFFF, seed >> 32
    hashed = torch.arange(-(-count // 2), dtype=torch.int32, device=device).add_(_int32(place // 2 + low))
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        hashed.bitwise_xor_((hashed >> shift) & (2 ** (32 - shift) - 1)).bitwise_xor_(_int32(high))
        hashed.mul_(_int32(factor))
    hashed.bitwise_xor_((hashed >> 15) & (2**17 - 1))
    return hashed.view(torch.int16)[:count].float().add_(2**15 + 0.5).mul_(2.0**-16)


def _int32(number: int) -> int:
    """Return the signed number of the same low 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


@lru_cache(maxsize=8)
def _fractions(device: torch.device) -> Tensor:
    """Return the scales that a byte stands for, as fractions of the top."""
    return torch.tensor([2.0 ** (-code / FRACTIONS_PER_OCTAVE) for code in range(256)], device=device)


@lru_cache(maxsize=8)
def _rotation(device: torch.device) -> Tensor:
    """Return the orthonormal matrix by which a block is turned: signs, then a Hadamard matrix."""
    places = range(BLOCK)
    signs = [1 - 2 * (_ROTATION_SIGNS >> channel & 1) for channel in places]
    rows = [[signs[channel] * (1 - 2 * ((channel & place).bit_count() & 1)) for place in places] for channel in places]
    return torch.tensor(rows, dtype=torch.float32, device=device).div_(math.sqrt(BLOCK))


def _pieces(rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield first and last row of the pieces of a message."""
    step = max(1, (PIECE if device.type == "cpu" else PIECE_ON_A_GPU) // width)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


SCALE = 3.0
REFUSE = 10.0
LARGEST_SIZE = 2.0**16  # the largest size while none is known; the values of trained models are smaller by far
LEAST_KNOWN = 4
CERTAIN = 32  # messages after which bounds are still twice as wide as they will be
LEAST_VALUES = 8192
LOUDEST = 1 / 8
"""Of the tokens that are learnt: as many, the loudest, are no reason to refuse a message, and count less."""
MESSAGES, PEERS = 3, 16
"""How much is remembered: the last messages of each peer, for sizes change with the weights, and the last peers."""


class UnusualSizeError(ValueError):
    """A message is well formed and finite, and much larger than others of its kind."""


def given(ids: Tensor) -> Tensor:
    """Return tokens that are given and not learnt, as they travel."""
    return ~ids


def first(ids: Tensor) -> Tensor:
    """Return tokens that are given, and first of their rows, as they travel."""
    return ~(ids + FIRST)


def ids_of(marked: Tensor) -> Tensor:
    """Return the ids of tokens, learnt or given."""
    return marked.where(marked >= 0, ~marked & (FIRST - 1))


def positions_in_rows(targets: Tensor) -> Tensor | None:
    """Return the place in its row of each token before these targets; None where each sequence is one row."""
    begins = targets[:, :-1] < -FIRST
    if not begins.any():
        return None
    places = begins.new_ones(targets.shape, dtype=targets.dtype).cumsum(1) - 1
    started = places.clone()
    started[:, 1:] *= begins
    return places - started.cummax(1).values


def as_targets(marked: Tensor) -> Tensor:
    """Return the ids of the tokens that are learnt, and UNLEARNT in place of the others."""
    return marked.clamp(min=UNLEARNT)


def learnt(marked: Tensor) -> int:
    return int((marked >= 0).sum())


def as_microbatch(tokens: Tensor, *, told: bool, progress: float, budget_s: float) -> Microbatch:
    """Return marked tokens [b, s + 1] as a source sends them. `told`: later stages have to know all ids."""
    return Microbatch(
        hidden=ids_of(tokens[:, :-1]), targets=tokens if told else tokens[:, 1:], progress=progress, budget_s=budget_s
    )


def check_marked(microbatch: Microbatch, vocabulary: int, *, some_given: bool) -> None:
    """Raise ValueError for targets that no peer sends. `some_given`: whether tokens of this run may be only given."""
    least, most = map(int, microbatch.targets.aminmax())
    if least < 0:
        most = int(ids_of(microbatch.targets).max())
    if least < (-FIRST - vocabulary if some_given else 0) or most >= vocabulary:
        raise ValueError(f"targets outside the vocabulary of {vocabulary}")
    if least < 0 and not microbatch.learnt:
        raise ValueError("targets of which none is learnt")


class SizeBound:
    """The sizes of messages of one kind, by peer, and how much of the next message counts."""

    def __init__(self, code: ActivationCode) -> None:
        self._code = code
        self._seen: dict[str, deque[float]] = {}
        self._known = 0
        self._counts: Counter[str] = Counter()

    def bounded(self, peer: str, wire: Tensor, counted: float = 1.0) -> Tensor:
        """Return what counts of a message: itself, or a copy scaled down.

        `counted`: for a gradient, the share of the targets that are learnt.
        Raises `UnusualSizeError` for an unusual size, and another ValueError for a message that no honest peer sends.
        """
        check(self._code, wire)
        count = count_of(self._code, wire)
        few = counted * count < LEAST_VALUES
        norms, root = bounds_of_norms(self._code, wire), math.sqrt(max(1, count if few else counted * count))
        size = float(torch.linalg.vector_norm(norms)) / root
        if not math.isfinite(size) or (size > LARGEST_SIZE and not few):
            self._counts["refused"] += 1
            raise ValueError(f"values of the size {size:.3g}")
        if count < LEAST_VALUES:
            return wire
        usual = self._usual()
        most = SCALE * (1.0 + CERTAIN / max(1, self._known)) * usual
        if few:
            most *= math.sqrt(LEAST_VALUES / count)
            return wire if size <= most else self._scaled(wire, most / size)
        self._note(peer, min(size, most))
        if size <= most:
            return wire
        learnt = counted * len(norms)
        loudest = int(LOUDEST * learnt)
        others = norms.sort().values[: len(norms) - loudest]
        bounded = norms.where(norms <= others[-1], torch.linalg.vector_norm(others) / math.sqrt(learnt - loudest))
        size = float(torch.linalg.vector_norm(bounded)) / root
        if size > most * REFUSE / SCALE:
            self._counts["refused"] += 1
            raise UnusualSizeError(f"values of the size {size:.3g}, where {usual:.3g} is usual")
        return self._scaled(wire, bounded / norms.clamp(min=torch.finfo(norms.dtype).tiny) * (most / max(most, size)))

    def _scaled(self, wire: Tensor, factors: float | Tensor) -> Tensor:
        self._counts["scaled"] += 1
        return scaled(self._code, wire, factors)

    def statistics(self) -> dict[str, int | float]:
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
