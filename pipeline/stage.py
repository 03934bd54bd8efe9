"""One stage of the model: its passes, and all that changes its weights.

Gradients of a window add up in the masters; `step` takes their mean, clips it to a norm *of this stage* (no stage knows
the others' gradients) and steps. With one replica a stage, one window and no dropout this is single-process training of
the whole model, step for step.

With two windows in flight, weights change while passes of the next window wait for their gradients. Then the masters
move on to a copy, and the old weights stay with the passes: each backward adds to the window under way
(`pipeline.admission_window` decides which passes are in it). If nothing waits, nothing is copied. Weights and moments
are never changed in part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.adamw import AdamW
from pipeline.forward_pass import Slice, StagePasses, StageSettings, or_memory_error
from pipeline.hardware.split_weights import Split, join, split, values_of
from pipeline.hardware.upload import PART, Upload
from pipeline.inner_step import InnerConfig, OptimiserState, StepReport

_COUNTED = (
    *("forwards", "backwards", "recomputed", "stale_backwards", "weight_copies", "shortages"),
    *("inner_steps", "skipped_steps", "uncompiled_steps", "overflows"),
)


class Stage(StagePasses):
    """One stage's slice and its optimiser."""

    def __init__(
        self,
        module: Slice,
        inner: InnerConfig,
        settings: StageSettings,
        *,
        first: bool,
        last: bool,
        codec: str = "float32",
    ) -> None:
        coded = inner.state == "int8"
        super().__init__(module, settings, first=first, last=last, codec=codec, coded=coded)
        self._weights = list(self._masters.values())
        self.names = tuple(self._masters)
        self.shapes = tuple(tuple(weight.shape) for weight in self._weights)
        self.fixed = frozenset(n for n, weight in enumerate(self._weights) if not weight.requires_grad)
        self._clip_norm = inner.clip_norm
        beside = settings.moments_beside if coded else 0
        named = module.layer_matrices() if inner.orthogonal else ()
        self._adamw = AdamW(
            self._weights,
            inner,
            settings.device,
            self._remainders,
            beside=beside,
            orthogonal=[self._masters[name] for name in named],
            orthogonal_in=torch.bfloat16 if settings.autocast is torch.bfloat16 else torch.float32,
        )
        self._upload = Upload(settings.device)
        self._spare: tuple[Tensor, ...] = ()
        """Memory for the next copy of the weights. The system takes longer to give it than a GPU to fill it."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start.

        A skipped step had a gradient that was not finite, or not whole. An uncompiled one was slow: torch cannot
        compile for this GPU. Overflows are backward passes that ran again with half the factor of float16.
        """
        return {name: self._counts[name] for name in _COUNTED}

    def step(self, learning_rate: float, microbatches: float) -> StepReport:
        """Take one AdamW step on the mean gradient of a window, and clear the gradients.

        `microbatches`: in the window, each counted by the share of its tokens that are learnt.
        """
        try:
            norm = or_memory_error(lambda: self._clip(microbatches))
        except MemoryError:
            self._make_room()
            norm = math.nan
        applied = math.isfinite(norm) and not self._spoiled
        if applied:
            self._leave_to_waiting()
            self._adamw.step(learning_rate)
            self._set.refresh()
            self._counts["inner_steps"] += 1
            self._counts["uncompiled_steps"] += not self._adamw.compiled
        else:
            self._counts["skipped_steps"] += 1
        if self._scale.adapts and not self._spoiled and not self._scale.note_window(finite=math.isfinite(norm)):
            self._compute_in_float32()
        self._forget_gradients()
        self._note_window()
        return StepReport(norm, applied)

    def _clip(self, microbatches: float) -> float:
        """Turn the sum of a window of so many gradients into its clipped mean; return the norm before clipping."""
        for weight in self._weights:
            if not weight.requires_grad:
                continue  # without a gradient AdamW leaves it as it is
            # A weight that no token used gets a gradient of zero, so that all weights take the same number of steps.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
            weight.grad.div_(microbatches * self._scale.value)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        # A norm in bfloat16 would be wrong by a part in 256.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self._weights, self._clip_norm, norm)
        return float(norm)

    def discard(self) -> None:
        """Forget the gradients so far, and give up the passes that wait for theirs."""
        self._forget_gradients()
        for waiting in list(self._waiting):
            waiting.give_up()

    def _forget_gradients(self) -> None:
        for weight in self._weights:
            weight.grad = None
        self._spoiled = False

    def _leave_to_waiting(self) -> None:
        """Move to a copy of the weights if a pass waits on them; without memory for it, give the passes up."""
        if not any(waiting.waits_on(self._set) for waiting in list(self._waiting)):
            return
        try:
            self._set = or_memory_error(self._set.successor)
            self._counts["weight_copies"] += 1
        except MemoryError:
            self._make_room()
            for waiting in list(self._waiting):
                if waiting.waits_on(self._set):
                    waiting.give_up(short=True)

    def optimiser_state(self) -> OptimiserState:
        """Return AdamW's memory itself, on the device or beside it; the next step changes it."""
        return OptimiserState(self._adamw.steps, self._adamw.moments())

    def load_optimiser_state(self, state: OptimiserState) -> None:
        """Continue from another optimiser's memory; raise ValueError if its form or shapes are not this stage's."""
        self._adamw.load(*state)

    # Fast weights, one tensor a parameter, in the order of `names`.

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, on the device; the next step or correction changes them.

        Behind them come the remainders of those that are split; `values_of` joins them.
        """
        return (*(weight.detach() for weight in self._weights), *self._remainders.values())

    @torch.no_grad()
    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights (float32, CPU); `less` others, the difference from these in bfloat16."""
        form = torch.bfloat16 if less else torch.float32
        spare, self._spare = self._spare, ()
        fits = all(each.dtype is form for each in spare)
        found = spare if spare and fits else tuple([torch.empty(shape, dtype=form) for shape in self.shapes])
        with self._adamw.room():
            for number, (own, copy) in enumerate(zip(self._weights, found, strict=True)):
                for part, values, *others in self._parts(own, copy, *less[number : number + 1]):
                    held = join(*part) if isinstance(part, Split) else part
                    for other in others:
                        there = self._here(other)
                        # Rounded on the device, of which then half the bytes come.
                        held = torch.sub(held, there, out=values if there is other else there).to(form)
                    values.copy_(held)
        return found

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Replace the fast weights; raise ValueError, with nothing changed, if shapes are not this stage's.

        `weights`: float32, or as `current_weights` of any stage has them.
        """
        _check_shapes([each for each in weights if each.dtype is not torch.int8], self.shapes)
        given_values = values_of(weights)
        self._leave_to_waiting()
        with self._adamw.room():
            for own, given in zip(self._weights, given_values, strict=True):
                for part, values in self._parts(own, given):
                    _write(part, self._here(values))
        self._set.refresh()

    @torch.no_grad()
    def correct(self, delta: Sequence[Tensor]) -> None:
        """Add `delta` (float32 or bfloat16) to the fast weights; raise ValueError, with nothing changed, if shapes are
        not ours.

        A stage on a GPU keeps a `delta` in main memory: its next copy of the weights is written there.
        """
        _check_shapes(delta, self.shapes)
        self._leave_to_waiting()
        with self._adamw.room():
            for own, given in zip(self._weights, delta, strict=True):
                for part, values in self._parts(own, given):
                    more = self._here(values)
                    if isinstance(part, Split):
                        _write(part, join(*part).add_(more))
                    else:
                        part.add_(more)
        self._set.refresh()
        if not self._type.shares_memory and all(each.device.type == "cpu" for each in delta):
            self._spare = tuple(delta)

    def _here(self, values: Tensor) -> Tensor:
        return values if values.device == self._device else self._upload(values)

    def _parts(self, own: nn.Parameter, *others: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield views of a weight, a tensor or a `Split`, and of `others` of its shape, flat, piece by piece."""
        remainder, held = self._remainders.get(own), own.detach().view(-1)
        for start in range(0, len(held), PART):
            piece = slice(start, start + PART)
            part = held[piece] if remainder is None else Split(held[piece], remainder.view(-1)[piece])
            yield part, *(other.reshape(-1)[piece] for other in others)


def _write(part: Tensor | Split, values: Tensor) -> None:
    """Put float32 values where a part of a weight is."""
    if isinstance(part, Split):
        for memory, fresh in zip(part, split(values), strict=True):
            memory.copy_(fresh)
    else:
        part.copy_(values)


def _check_shapes(given: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError if tensors have other shapes than expected."""
    for tensor, shape in zip(given, expected, strict=False):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{tuple(tensor.shape)} is not {shape}")
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} tensors for {len(expected)} parameters")
