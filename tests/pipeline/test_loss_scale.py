"""Passes in float16: small gradients survive, large ones cost a window, and nobody else notices the factor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_stages import cuts, drawn_ids, make_stage, prepared
from torch import Tensor

from pipeline.hardware.loss_scale import CALM_WINDOWS, FIRST, LARGEST, LossScale
from pipeline.stage import Stage

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
SMALL = 1e-7
"""A usual value in the gradient of the mean loss of some thousand tokens: below float16's normal numbers, 6e-5."""


@given(windows=st.lists(st.tuples(st.booleans(), st.integers(1, 3 * CALM_WINDOWS)), max_size=40))
def test_the_factor_is_a_power_of_two_that_halves_at_once_and_doubles_seldom(windows: list[tuple[bool, int]]) -> None:
    scale, calm = LossScale(torch.float16), 0
    for finite, times in windows:
        for _ in range(times):
            before = scale.value
            assert scale.note_window(finite=finite) == (finite or before > 1.0)
            calm = calm + 1 if finite else 0
            doubles = calm == CALM_WINDOWS
            calm = 0 if doubles and before < LARGEST else min(calm, CALM_WINDOWS - (not doubles))
            assert scale.value == (max(1.0, before / 2) if not finite else min(LARGEST, before * (1 + doubles)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_formats_with_the_range_of_float32_have_no_factor(dtype: torch.dtype | None) -> None:
    scale = LossScale(dtype)
    assert (scale.adapts, scale.value) == (False, 1.0)


def staged(number: int, autocast: torch.dtype | None = torch.float16, family: str = "llama", **sizes: Any) -> Stage:
    """Return one of three stages."""
    recipe = prepared(family, **sizes)
    return make_stage(recipe, cuts(recipe, 3)[number], autocast=autocast)


def pair(number: int, **choices: Any) -> tuple[Stage, Stage]:
    return staged(number, **choices), staged(number, None, **choices)


def hidden(seed: int = 1) -> Tensor:
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(seed))


def is_near(ours: Tensor, theirs: Tensor) -> bool:
    return bool(torch.dist(ours, theirs) <= 2e-2 * theirs.norm())


def means(stage: Stage) -> list[Tensor]:
    """Return the gradients of a window of one microbatch, as a step takes them."""
    stage._clip_norm = float("inf")
    stage._clip(1)
    return [weight.grad for weight in stage._weights if weight.grad is not None]


def until_applied(microbatch: Callable[[], object], stage: Stage) -> int:
    """Run windows of one microbatch until a step is applied; return how many were skipped."""
    for skipped in range(24):
        microbatch()
        if stage.step(1e-3, 1).applied:
            return skipped
    raise AssertionError("no factor fits")


@pytest.mark.parametrize(("family", "sizes"), [("llama", {}), ("gpt2", {}), ("mixtral", EXPERTS)])
def test_small_gradients_come_through_as_in_float32(family: str, sizes: dict[str, Any]) -> None:
    ours, theirs = pair(1, family=family, **sizes)
    plain = staged(1, family=family, **sizes)
    plain._scale.value = 1.0
    below, expected, _ = (stage.forward(hidden()).backward(SMALL * hidden(2)) for stage in (ours, theirs, plain))
    assert is_near(below, expected)
    found, wanted, lost = (torch.cat([each.flatten() for each in means(stage)]) for stage in (ours, theirs, plain))
    assert is_near(found, wanted)
    assert not is_near(lost, wanted), "without a factor they do not"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_loss_and_its_gradients_are_those_of_float32(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr("pipeline.forward_pass.LOGITS", 61)
    both = pair(2)
    replies = [stage.loss(hidden(), drawn_ids(3, 2, 9)) for stage in both]
    assert replies[0].loss == pytest.approx(replies[1].loss, rel=1e-3)
    assert is_near(replies[0].hidden, replies[1].hidden)
    assert all(map(is_near, *map(means, both)))


def test_a_gradient_that_overflows_is_computed_again_and_costs_the_window() -> None:
    both, gradient = pair(1), 1e4 * hidden(2)
    before = both[0].weights()
    below = [stage.forward(hidden()).backward(gradient) for stage in both]
    assert is_near(*below)
    counts = both[0].statistics()
    assert counts["overflows"] == counts["recomputed"] > 0
    assert both[0]._scale.value == FIRST / 2 ** counts["overflows"]
    assert not both[0].step(1e-3, 1).applied
    assert all(map(torch.equal, before, both[0].weights()))
    assert both[0]._scale.value == FIRST / 2 ** counts["overflows"], "an overflow counts once"
    both[0].forward(hidden()).backward(gradient)
    assert both[0].step(1e-3, 1).applied, "the next window goes with the smaller factor"
    assert both[0].statistics()["overflows"] == counts["overflows"]


def test_weights_alone_that_overflow_cost_windows_until_the_factor_fits() -> None:
    first = staged(0)
    skipped = until_applied(lambda: first.forward(drawn_ids(1, 2, 9)).backward(1e3 * hidden(2)), first)
    assert 0 < skipped == first.statistics()["skipped_steps"]
    assert first._scale.value == FIRST / 2**skipped


def test_a_loss_whose_gradient_overflows_is_computed_again() -> None:
    last, whole = pair(2)
    last._scale.value = LARGEST
    replies = [stage.loss(hidden(), drawn_ids(3, 2, 9)) for stage in (last, whole)]
    assert last.statistics()["overflows"] > 0
    assert is_near(replies[0].hidden, replies[1].hidden)
    assert not last.step(1e-3, 1).applied
    until_applied(lambda: last.loss(hidden(), drawn_ids(3, 2, 9)), last)


def wide(stage: Stage) -> None:
    """Make what the layers add larger than the largest number of float16."""
    stage.set_weights([
        3e4 * weight if name.endswith(("up_proj.weight", "down_proj.weight", "lm_head.weight")) else weight
        for name, weight in zip(stage.names, stage.weights(), strict=True)
    ])  # fmt: skip


def test_a_stage_whose_activations_overflow_goes_on_in_float32() -> None:
    both = pair(1)
    early = both[0].forward(hidden(5))
    for stage in both:
        wide(stage)
    passes = [stage.forward(hidden()) for stage in both]
    assert torch.equal(*(each.output for each in passes))
    with pytest.raises(MemoryError, match="range"):
        early.backward(SMALL * hidden(2))
    assert torch.equal(*(each.backward(SMALL * hidden(2)) for each in passes))
    assert not both[0].step(1e-3, 1).applied, "gradients of this window may have been multiplied"
    both[1].discard()
    for stage in both:
        stage.forward(hidden()).backward(SMALL * hidden(2))
        assert stage.step(1e-3, 1).applied
    assert all(map(torch.equal, *(stage.weights() for stage in both)))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_last_stage_whose_logits_overflow_goes_on_in_float32(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr("pipeline.forward_pass.LOGITS", 61)
    both = pair(2)
    for stage in both:
        wide(stage)
    replies = [stage.loss(hidden(), drawn_ids(3, 2, 9)) for stage in both]
    assert replies[0].loss == replies[1].loss
    assert torch.equal(replies[0].hidden, replies[1].hidden)
    assert all(stage._plain for stage in both) == (not at_once), "the logits of a few tokens exist at a time"


def test_a_gradient_beyond_any_factor_is_given_up() -> None:
    stage = staged(1)
    waiting = stage.forward(hidden())
    with pytest.raises(MemoryError, match="range of float16"):
        waiting.backward(torch.full((2, 9, 32), torch.nan))
    assert not stage._scale.adapts
    assert not stage.step(1e-3, 1).applied


def test_training_goes_as_in_float32() -> None:
    losses = []
    for stage in pair(2):
        for _ in range(30):
            loss = stage.loss(hidden(), drawn_ids(3, 2, 9)).loss
            assert stage.step(1e-2, 1).applied
        losses.append(loss)
    assert losses[1] < 2.0
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
