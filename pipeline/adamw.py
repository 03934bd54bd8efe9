"""AdamW of one stage, with its moments as float32 or as 8-bit codes.

The float32 form is torch's own. In the other (`InnerConfig.state` is "int8") the moments of matrices are codes; those
of vectors stay float32. A block of 256 values has one float32 scale, the largest magnitude in it. A value's share of
the scale is companded, so that small shares keep more digits: a first moment's by the root, with its sign, a
second moment's by the root of the root. Codes are rounded to the nearest, so the same bits give the same step.

A second moment far below its block's largest has the code 0. A step takes it for at least what its first moment shows:
without rounding that bound always holds (`moment_ratio`), and with it no step explodes.

With Nesterov's momentum (`InnerConfig.nesterov`) a step takes the first moment as it would be after the same gradient
once more: NAdam (Dozat 2016), with the same beta1 in each step and decoupled decay. It needs memory for a piece of a
matrix.

A step goes through a matrix in pieces of whole blocks, since a block has one scale. One piece at a time becomes
float32, is computed and is put back, so the result does not depend on where a piece ends. A weight may be split into
its upper half and a correction (`pipeline.hardware.split_weights`). On a GPU the arithmetic is compiled, where torch
can. Some of the coded moments, or all, may lie in main memory (`pipeline.hardware.moments_beside`).

The steps of some matrices may be made orthogonal: AdamW's step of the whole matrix is computed, and the orthogonal
matrix that is nearest to it is taken in its place (`pipeline.inner_step`), as Muon takes that of a mean gradient. Its
values have the root mean square `ORTHOGONAL_SIZE`, about that of AdamW's steps, so one learning rate suits both (Liu
and others, arXiv 2502.16982). The moments are AdamW's own, in the same forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.hardware.device_type import is_shortage
from pipeline.hardware.moments_beside import Codes, MomentsBeside, main_memory
from pipeline.hardware.split_weights import join, split
from pipeline.inner_step import (
    BLOCK,
    SCALE_BYTES,
    InnerConfig,
    is_coded,
    moment_bytes,
    moment_ratio,
    orthogonal_bytes,
    orthogonalise,
)

PIECE = 2**20  # values that a step computes at once; whole blocks
_COMPILED_PIECE = 16 * PIECE  # the same of a compiled step: with smaller pieces a GPU waits for the host
_COMPILED_ROOM = 2.125  # numbers that a compiled step takes on a GPU for a moment, for each value of its largest piece
LARGEST_RATIO = 1e3  # of a first moment to the root of its second, where nothing bounds it
_ROOM = 16 * PIECE
"""Numbers that a step which is not compiled takes on a GPU for a moment, and more; so does a copy of weights."""
ORTHOGONAL_SIZE = 0.2
_FIRST, _SECOND = 127.0, 255.0  # the largest codes of a first and of a second moment
_NORMAL = torch.finfo(torch.float32).tiny
_NAMES = ("exp_avg", "exp_avg_sq")  # torch's names of the first and the second moment


class MatrixPiece(NamedTuple):
    """A piece of a matrix: `values` in blocks, all of equal length. `moments`: the first and the second."""

    values: slice
    moments: tuple[Codes, Codes]


def encode_first(moments: Tensor) -> Codes:
    """Return the codes of first moments, float32 [blocks, values]; of a block so small as to be subnormal, zeros."""
    scales, shares = _shares(moments)
    return Codes(scales, torch.copysign((shares.abs().sqrt() * _FIRST).round(), shares).to(torch.int8))


def decode_first(scales: Tensor, codes: Tensor) -> Tensor:
    """Return first moments, float32; none is larger than its scale by more than rounding."""
    shares = codes.clamp(min=-int(_FIRST)) / _FIRST
    return shares * shares.abs() * scales


def encode_second(moments: Tensor) -> Codes:
    """Return the codes of second moments, float32 [blocks, values], 0 or more; as `encode_first` does."""
    scales, shares = _shares(moments)
    return Codes(scales, (shares.sqrt().sqrt() * _SECOND).round().to(torch.uint8))


def decode_second(scales: Tensor, codes: Tensor) -> Tensor:
    """Return second moments, float32."""
    return (codes / _SECOND).square().square() * scales


def _shares(moments: Tensor) -> tuple[Tensor, Tensor]:
    largest = moments.abs().amax(-1, keepdim=True)
    scales = torch.where(largest < _NORMAL, 0.0, largest)
    return scales, moments / torch.where(scales == 0.0, math.inf, scales)


def advance(weight: Tensor, gradient: Tensor, moments: tuple[Codes, Codes], numbers: Tensor) -> tuple[Tensor, ...]:
    """Return the weight after a step, and its moments' scales and codes: of the first, of the second.

    `weight`, `gradient`: float32 [blocks, values]. `numbers`: as `step_numbers` has them.
    """
    keep, own, given, unbiased, fresh, beta2, fresh_square, ratio, epsilon = numbers.unbind()
    first = torch.lerp(decode_first(*moments[0]), gradient, fresh)
    second = decode_second(*moments[1]) * beta2 + gradient.square() * fresh_square
    root = torch.maximum(second.sqrt(), first.abs() / ratio)
    weight = weight * keep - (own * first + given * gradient) / (root * unbiased + epsilon)
    return (weight, *encode_first(first), *encode_second(root.square()))


def move(parts: Sequence[Tensor], gradient: Tensor, moments: tuple[Codes, Codes], numbers: Tensor) -> None:
    """Take a step as `advance` does, where the memory is. `parts`: the weight, or both parts of a split one."""
    weight, *codes = advance(join(*parts) if len(parts) > 1 else parts[0], gradient.float(), moments, numbers)
    fresh = (*(split(weight) if len(parts) > 1 else [weight]), *codes)
    for memory, value in zip((*parts, *moments[0], *moments[1]), fresh, strict=True):
        memory.copy_(value)


Move = Callable[[Sequence[Tensor], Tensor, tuple[Codes, Codes], Tensor], None]


class Form(NamedTuple):
    """The dtypes of what a step changes, a weight or both parts of one, and of its gradient."""

    parts: tuple[torch.dtype, ...]
    gradient: torch.dtype


@cache
@torch.no_grad()
def compiled(device: torch.device, form: Form) -> Move | None:
    """Return `move` of what has this form, compiled for a GPU; None if torch cannot.

    It has worked once, as a step calls it: torch compiles anew for another kind of sequence or with gradients on.
    """
    faster = torch.compile(move)
    try:
        for blocks in (PIECE // BLOCK, 3):  # the second time the number of blocks becomes a variable
            first, second = (
                Codes(torch.zeros(blocks, 1, device=device), torch.zeros(blocks, BLOCK, dtype=dtype, device=device))
                for dtype in (torch.int8, torch.uint8)
            )
            *parts, gradient = (
                torch.zeros(blocks, BLOCK, dtype=kind, device=device) for kind in (*form.parts, form.gradient)
            )
            faster(parts, gradient, (first, second), torch.ones(9, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        if is_shortage(error):
            raise
        return None
    return faster


class AdamW:
    """The inner optimiser of a stage. `compiled`: whether its steps are as fast as torch can make them."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        inner: InnerConfig,
        device: torch.device,
        remainders: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
        *,
        beside: int = 0,
        orthogonal: Collection[nn.Parameter] = (),
        orthogonal_in: torch.dtype = torch.float32,
    ) -> None:
        """Take all memory: a step must not fail half-way.

        `remainders`: of the weights that are split. `beside`: bytes of coded moments that lie in main memory, at
        least; those of whole matrices. `orthogonal`: the weights whose steps are made so, in what dtype.
        """
        self.steps = 0
        self._orthogonal, self._orthogonal_in = frozenset(orthogonal), orthogonal_in
        self._weights, self._inner, self._device, self._remainders = weights, inner, device, remainders
        coded = [weight for weight in weights if is_coded(weight.shape, inner.state)]
        sizes = [moment_bytes(weight.shape, inner.state) for weight in coded for _ in _NAMES]
        # The first moments of a matrix and the second go together.
        far = next((number for number in range(0, len(sizes), 2) if sum(sizes[:number]) >= beside), len(sizes))
        memory = main_memory(sizes[:far], pinned=device.type == "cuda")
        memory += [torch.zeros(size, dtype=torch.int8, device=device) for size in sizes[far:]]
        self._coded = dict(zip(coded, zip(memory[::2], memory[1::2], strict=True), strict=True))
        self._far = frozenset(coded[: far // 2])
        self._plain = self._optimiser([weight for weight in weights if weight not in self._coded])
        forms = set(map(self._form, self._coded)) if device.type == "cuda" else set()
        faster = {form: compiled(device, form) for form in forms}
        self.compiled = None not in faster.values()
        self._faster = {form: each for form, each in faster.items() if each is not None}
        self._pieces = {
            weight: list(
                pieces(weight.numel(), moments, _COMPILED_PIECE if self._form(weight) in self._faster else PIECE)
            )
            for weight, moments in self._coded.items()
        }
        longest = max((piece.moments[0].codes.numel() for each in self._far for piece in self._pieces[each]), default=0)
        self._beside = MomentsBeside(device, -(-longest // BLOCK), longest) if self._far else None
        self._room = self._reserve()

    def _optimiser(self, weights: list[nn.Parameter]) -> torch.optim.AdamW | None:
        """Return torch's AdamW of some weights, None for none."""
        inner = self._inner
        matrices, vectors = ([w for w in weights if (w.ndim >= 2) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return None
        # On a CPU the plain loop: bit for bit what a whole model's default AdamW computes, and cheap beside a window.
        fused = self._device.type != "cpu"
        betas = (inner.beta1, inner.beta2)
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=inner.epsilon, fused=fused)
        for weight in weights:
            # As AdamW itself would in its first step, but before there is anything that it could leave half done.
            adamw.state[weight] = {
                "step": torch.zeros((), device=self._device if fused else None),
                **{name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in _NAMES},
            }
        return adamw

    def _reserve(self) -> Tensor:
        """Return memory that a step gives back while it needs some: on a GPU it may be all that is left."""
        if self._device.type != "cuda":
            return torch.empty(0)
        whole = max(
            (orthogonal_bytes(each.shape, self._orthogonal_in.itemsize) for each in self._orthogonal), default=0
        )
        if self._coded:
            largest = min(_COMPILED_PIECE, max(map(torch.numel, self._coded))) if self._faster else 0
            numbers = max(_ROOM, int(_COMPILED_ROOM * largest))
        else:
            numbers = 2 * PIECE if self._inner.nesterov else 0
        return torch.empty(numbers + -(-whole // 4), device=self._device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Step on the gradients that the weights have; a weight without one stays as it is."""
        self.steps += 1
        numbers = step_numbers(self._inner, learning_rate, self.steps).to(self._device)
        with self.room():
            for weight in self._weights:
                if weight in self._orthogonal and weight.grad is not None:
                    self._step_orthogonal(weight, learning_rate, numbers)
                    weight.grad = None
            if self._plain is not None:
                for group in self._plain.param_groups:
                    group["lr"] = learning_rate
                self._plain.step()
                if self._inner.nesterov:
                    self._look_ahead(learning_rate)
            for weight in self._pieces:
                if weight.grad is not None:
                    self._step_coded(weight, self._parts(weight), numbers)
        if self._beside is not None:
            self._beside.settle()

    def _look_ahead(self, learning_rate: float) -> None:
        """Turn the step that torch has taken into one by Nesterov's momentum; the gradients are changed.

        In small pieces: on a GPU there may be no memory for the root of a large matrix.
        """
        assert self._plain is not None
        (own, given), taken = _momentum(self._inner, self.steps), 1.0 / (1.0 - self._inner.beta1**self.steps)
        unbiased = 1.0 / math.sqrt(1.0 - self._inner.beta2**self.steps)
        for weight, state in self._plain.state.items():
            if weight.grad is None:
                continue
            values = (weight.detach(), weight.grad, *(state[name] for name in _NAMES))
            for part, gradient, first, second in zip(*(each.view(-1).split(PIECE) for each in values), strict=True):
                more = gradient.mul_(given).add_(first, alpha=own - taken)
                part.addcdiv_(more, second.sqrt().mul_(unbiased).add_(self._inner.epsilon), value=-learning_rate)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Leave to the caller memory for `_ROOM` numbers, which must suffice, and take it again."""
        self._room = torch.empty(0)
        try:
            yield
        finally:
            with suppress(torch.OutOfMemoryError):  # what the caller did stands; what it raised says more
                self._room = self._reserve()

    def _form(self, weight: nn.Parameter) -> Form:
        halves = weight in self._remainders
        parts = (torch.bfloat16, torch.int8) if halves else (torch.float32,)
        gradient = torch.bfloat16 if halves else torch.float32
        return Form((self._orthogonal_in,) if weight in self._orthogonal else parts, gradient)

    def _parts(self, weight: nn.Parameter) -> list[Tensor]:
        """Return a weight, or both parts of a split one."""
        return [weight.detach(), *([self._remainders[weight]] if weight in self._remainders else [])]

    def _step_orthogonal(self, weight: nn.Parameter, learning_rate: float, numbers: Tensor) -> None:
        step = torch.zeros_like(weight, dtype=self._orthogonal_in, memory_format=torch.contiguous_format)
        if weight in self._coded:
            self._step_coded(weight, [step], numbers)
        else:
            self._step_plain(weight, step, numbers)
        orthogonalise(step)
        keep, size = 1.0 - learning_rate * self._inner.weight_decay, ORTHOGONAL_SIZE * math.sqrt(max(weight.shape[-2:]))
        values: tuple[Any, ...] = (step, *self._parts(weight))
        for more, *own in zip(*(each.view(-1).split(PIECE) for each in values), strict=True):
            moved = (join(*own) if len(own) > 1 else own[0]) * keep + more.float() * (learning_rate * size)
            for memory, value in zip(own, split(moved) if len(own) > 1 else [moved], strict=True):
                memory.copy_(value)

    def _step_plain(self, weight: nn.Parameter, step: Tensor, numbers: Tensor) -> None:
        """Do with float32 moments, and a weight of zeros `step`, what `advance` does with codes."""
        assert self._plain is not None
        assert weight.grad is not None
        _, own, given, unbiased, fresh, beta2, fresh_square, _, epsilon = numbers.unbind()
        state = self._plain.state[weight]
        values = (step, weight.grad, *(state[name] for name in _NAMES))
        for part, gradient, first, second in zip(*(each.view(-1).split(PIECE) for each in values), strict=True):
            first.lerp_(gradient, fresh)
            second.mul_(beta2).add_(gradient.square() * fresh_square)
            part.copy_(-(own * first + given * gradient) / (second.sqrt() * unbiased + epsilon))

    def _step_coded(self, weight: nn.Parameter, parts: Sequence[Tensor], numbers: Tensor) -> None:
        """Step `parts`, a weight or both parts of one, by the gradient and the moments of `weight`."""
        assert weight.grad is not None
        gradient, far = weight.grad.reshape(-1), self._beside if weight in self._far else None
        faster = self._faster.get(self._form(weight))
        for piece in self._pieces[weight]:
            shape = piece.moments[0].codes.shape
            # The last blocks of matrices have lengths of their own, and are few.
            compute = faster if faster is not None and shape[1] == BLOCK and shape[0] > 1 else move
            held = [part.view(-1)[piece.values].view(shape) for part in parts]
            beside = nullcontext(piece.moments) if far is None else far.on_device(piece.moments)
            with beside as moments:
                compute(held, gradient[piece.values].view(shape), moments, numbers)

    def moments(self) -> tuple[Tensor, ...]:
        """Return the memory itself: the first moments of all weights in order, then the second."""
        return tuple(self._moment(weight, number) for number in range(len(_NAMES)) for weight in self._weights)

    def _moment(self, weight: nn.Parameter, number: int) -> Tensor:
        if weight in self._coded:
            return self._coded[weight][number]
        assert self._plain is not None
        found: Tensor = self._plain.state[weight][_NAMES[number]]
        return found

    def load(self, steps: int, moments: Sequence[Tensor]) -> None:
        """Continue after so many steps; raise ValueError, with nothing changed, if these are not such moments."""
        own = self.moments()
        for mine, given in zip(own, moments, strict=False):
            if (mine.dtype, mine.shape) != (given.dtype, given.shape):
                found, wanted = (f"{each.dtype} of {tuple(each.shape)}" for each in (given, mine))
                raise ValueError(f"a moment that is {found} is not {wanted}".replace("torch.", ""))
        if len(own) != len(moments):
            raise ValueError(f"{len(moments)} tensors for {len(own)} moments")
        self.steps = steps
        for mine, given in zip(own, moments, strict=True):
            mine.copy_(given)
        for state in self._plain.state.values() if self._plain is not None else ():
            state["step"].fill_(float(steps))


def step_numbers(inner: InnerConfig, learning_rate: float, steps: int) -> Tensor:
    """Return what a step multiplies by, in float32; the first four follow from how many steps were taken."""
    own, given = (learning_rate * share for share in _momentum(inner, steps))
    keep, unbiased = 1.0 - learning_rate * inner.weight_decay, 1.0 / math.sqrt(1.0 - inner.beta2**steps)
    ratio = min(moment_ratio(inner.beta1, inner.beta2), LARGEST_RATIO)
    fresh, fresh_square = 1.0 - inner.beta1, 1.0 - inner.beta2
    return torch.tensor([keep, own, given, unbiased, fresh, inner.beta2, fresh_square, ratio, inner.epsilon])


def _momentum(inner: InnerConfig, steps: int) -> tuple[float, float]:
    """Return by what a step multiplies the first moment, and by what the gradient: 0 without Nesterov's momentum."""
    unbiased = 1.0 / (1.0 - inner.beta1**steps)
    if not inner.nesterov:
        return unbiased, 0.0
    return inner.beta1 / (1.0 - inner.beta1 ** (steps + 1)), (1.0 - inner.beta1) * unbiased


def pieces(values: int, moments: Sequence[Tensor], longest: int) -> Iterator[MatrixPiece]:
    """Yield the pieces of a matrix of so many values, with views of its two moments; an odd last block by itself.

    `longest`: values of a piece, a whole number of blocks.
    """
    whole = values - values % BLOCK
    ends = [*range(longest, whole, longest), whole] if whole else []
    starts = range(0, whole, longest)
    for start, end in (*zip(starts, ends, strict=True), *([(whole, values)] if whole < values else [])):
        length = min(BLOCK, end - start)
        first, second = (_views(memory, values, slice(start, end), length) for memory in moments)
        yield MatrixPiece(slice(start, end), (first, second._replace(codes=second.codes.view(torch.uint8))))


def _views(memory: Tensor, values: int, span: slice, length: int) -> Codes:
    """Return views of one moment: its scales come first, where they are aligned."""
    scales = scales_of(memory)[span.start // BLOCK : -(-span.stop // BLOCK)]
    return Codes(scales.view(-1, 1), memory[len(memory) - values :][span].view(-1, length))


def scales_of(memory: Tensor) -> Tensor:
    """Return the scales of one moment, float32 [blocks]: a view."""
    blocks = -(-len(memory) // (BLOCK + SCALE_BYTES))
    return memory[: SCALE_BYTES * blocks].view(torch.float32)


def magnitudes(moments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors whose values no moment exceeds: the scales of coded ones, others as they are."""
    return tuple(scales_of(moment) if moment.dtype is torch.int8 else moment for moment in moments)
