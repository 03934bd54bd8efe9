"""Activations and gradients to what travels between two stages, and back, in the codes of `formats`.

Messages are stateless, for the next microbatch goes to another replica. All that a receiver needs is in the message,
but for the dither, and that follows from what it has sent itself.

**Rotation.** Each block of 32 channels is turned by a Hadamard matrix before it is rounded, and back afterwards. So a
channel that is louder than its neighbours shares its loudness with them, and the rounding errors of a block are alike.

**Scales.** Each block is rounded in steps of its own largest magnitude: a scale is the top of the token times a power
of 2^(-1/8), the least that is not below it. Whatever a stranger writes there decodes to a finite number, once the top
has been found to be finite and no larger than `LARGEST`: that is all there is to check.

**Down, to the nearest.** The levels are the middles of 2^bits equal parts of [-scale, scale].

**Back, without a bias.** A rounding to the nearest is a fixed function of the gradient: its error is the same wrong
gradient in every microbatch, and does not average out. So the gradient is dithered: to value / step a number u, equally
distributed over [0, 1), is added before it is rounded down, and the receiver takes the same u away again. The error is
then equally distributed over a step *whatever the value is*: its mean is zero, and its mean square that of rounding to
the nearest, half of what stochastic rounding has, where the receiver knows no u. Both sides know it: it is a hash of
the value's place under a seed, and the seed (`seed_of`) is taken from the bytes of the activations that the gradient
belongs to. These are another microbatch's, another stage's or another run's if anything is; and the same once more if a
microbatch is sent again, whose reply is then the same to the bit.

Only 2^16 values of u exist, so that the mean of the error is zero to 2^-17 of a step. The hash is of 32-bit integers
alone: it is the same on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from pipeline.activations.formats import BLOCK, TOP_BYTES, ActivationCode

LARGEST = 2.0**50
"""Of what is let in: the sum of the squares of 65,536 such values is finite."""
FRACTIONS_PER_OCTAVE = 8
PIECE = 2**16
"""Values worked on at a time on a CPU: what is made of them on the way stays in the cache."""
PIECE_ON_A_GPU = 2**24
"""Elsewhere it is the memory beside the message that counts."""
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
    """Return what came, [..., row] (`check`ed), as float32 [..., width], on the device where it is."""
    if code.plain:
        return wire.float()
    width, shape = code.width(wire.shape[-1]), wire.shape[:-1]
    rows = wire.reshape(-1, wire.shape[-1])
    values = torch.empty(len(rows), width, device=wire.device)
    for first, last in _pieces(len(rows), width, wire.device):
        _decode_rows(code, rows[first:last], values[first:last], seed, first * width)
    return values.view(*shape, width)


def check(code: ActivationCode, wire: Tensor) -> None:
    """Raise ValueError for what no stage sends, before anything is computed with it.

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
