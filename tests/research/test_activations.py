"""The comparison of codecs of activations: its recipes are what their letters say, and its training trains."""

from __future__ import annotations

from math import isfinite, sqrt

import pytest
import torch
from torch import Tensor

from research.codec.activations import Size, Text, arm_of, train

WIDTH = 128
VALUES = torch.randn(8, 64, WIDTH, generator=torch.Generator().manual_seed(0))


def errors(name: str) -> tuple[float, float]:
    """Return the root mean squares of the errors down and back."""
    arm = arm_of(name, WIDTH)

    def size(rounded: Tensor) -> float:
        return float((rounded - VALUES).square().mean().sqrt())

    return size(arm.down(VALUES)), size(arm.back(VALUES, VALUES))


def test_a_recipe_without_letters_is_the_codec_of_the_run_file() -> None:
    assert errors("5/3") == pytest.approx(errors("int5-int3"), rel=0.03)
    assert arm_of("5/3", WIDTH).bits == pytest.approx(arm_of("int5-int3", WIDTH).bits, abs=16 / WIDTH)
    assert errors("float32") == (0.0, 0.0)


def test_rounding_stochastically_doubles_the_mean_square_of_the_error_back() -> None:
    (down, back), (same, stochastic) = errors("4/4"), errors("4/4s")
    assert same == down
    assert stochastic / back == pytest.approx(sqrt(2), rel=0.03)


def test_an_arm_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit, match="no arm is called"):
        arm_of("5/3z", WIDTH)


def test_a_model_is_trained_through_a_codec() -> None:
    size = Size(32, 4, 32, 2, 2, 16, 1e-3)
    text = Text(0)
    assert len(text.training) > 20 * len(text.held_out) > 0
    loss, parameters = train(size, text, 0, arm_of("int5-int3", 32))
    assert isfinite(loss)
    assert parameters > 0


def test_a_model_is_trained_with_a_subspace_and_for_longer() -> None:
    arm = arm_of("subspace-32/int5-int3x1.5", 64)
    assert (arm.subspace, arm.times, arm.embedding) == (32, 1.5, 1.0)
    assert arm.bits == pytest.approx(arm_of("int5-int3", 32).bits / 2)
    loss, parameters = train(Size(64, 4, 64, 2, 2, 16, 1e-3), Text(0), 0, arm)
    assert isfinite(loss)
    assert parameters < train(Size(64, 4, 64, 1, 2, 16, 1e-3), Text(0), 0, arm_of("float32e2", 64))[1]
