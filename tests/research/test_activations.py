"""The comparison of codecs of activations: its recipes are what their letters say, and its training trains."""

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


@pytest.fixture(scope="module")
def text() -> Text:
    """Return a text of which little is scored."""
    found = Text(0)
    assert len(found.training) > 20 * len(found.held_out) > 0
    found.held_out = found.held_out[:4096]
    return found


def test_a_model_is_trained_through_a_codec(text: Text) -> None:
    loss, parameters = train(Size(32, 4, 32, 2, 2, 16, 1e-3), text, 0, arm_of("int5-int3", 32), 4)
    assert isfinite(loss)
    assert parameters > 0


def test_with_two_windows_in_flight_gradients_are_stale_from_the_second_step_on(text: Text) -> None:
    def loss(name: str, steps: int, stages: int) -> float:
        return train(Size(32, 2, 32, steps, 2, 16, 1e-2), text, 0, arm_of(name, 32), stages)[0]

    assert loss("float32w2", 1, 2) == loss("float32", 1, 2) != loss("float32n0", 1, 2)
    assert loss("float32w2", 2, 2) != loss("float32", 2, 2)
    assert loss("float32w2", 2, 1) == loss("float32", 2, 1), "the last stage has no stale gradient"
    with pytest.raises(SystemExit, match="one window or two"):
        arm_of("float32w3", 32)


def test_a_model_is_trained_with_moments_in_8_bits(text: Text) -> None:
    plain, coded = (
        train(Size(32, 1, 32, 3, 2, 16, 1e-2), text, 0, arm_of(f"float32{how}", 32), 1)[0] for how in ("", "s8")
    )
    assert plain != coded
    assert plain == pytest.approx(coded, rel=1e-3)


def test_a_model_is_trained_with_a_subspace_and_for_longer(text: Text) -> None:
    arm = arm_of("subspace-32/int5-int3x1.5", 64)
    assert (arm.subspace, arm.times, arm.embedding) == (32, 1.5, 1.0)
    assert arm.bits == pytest.approx(arm_of("int5-int3", 32).bits / 2)
    loss, parameters = train(Size(64, 4, 64, 2, 2, 16, 1e-3), text, 0, arm, 4)
    assert isfinite(loss)
    assert parameters < train(Size(64, 4, 64, 1, 2, 16, 1e-3), text, 0, arm_of("float32e2", 64), 4)[1]
