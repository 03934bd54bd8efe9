"""A foreign module does for a node what a stage does, and its program notices nothing."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import noloco_node
from noloco_node.api.foreign_stage import ForeignStage, StepSignal, check_frozen, check_module, trained_parameters
from noloco_node.api.gossip_optimizer import _check_optimised
from noloco_node.api.training_thread import IterationClock
from noloco_node.errors import UserError
from noloco_node.machine.interface import TrainingFailed
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.runfile import load_run

TARGETS = torch.zeros((2, 3), dtype=torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def stage_of(module: nn.Module) -> ForeignStage:
    return ForeignStage([*trained_parameters(module).values()], IterationClock())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_lie_one_behind_the_other_whatever_the_strides_of_the_program(dtype: torch.dtype) -> None:
    module = nn.Conv2d(2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    module.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
    stage = stage_of(module)
    for copies in (stage.weights(), stage.weights(stage.weights()), stage.current_weights()):
        assert all(each.is_contiguous() for each in copies)
    assert all(torch.equal(each, own.float()) for each, own in zip(stage.weights(), module.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_correction_is_added_and_a_copy_stays_as_it_was(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 2).to(dtype)
    stage = stage_of(module)
    before = stage.weights()
    kept = [each.clone() for each in before]
    stage.correct([torch.ones_like(each) for each in before])
    assert all(each.dtype == torch.float32 for each in before)
    assert all(torch.equal(each, same) for each, same in zip(before, kept, strict=True))
    expected = [(each + 1.0).to(dtype) for each in before]
    assert all(torch.equal(own, each) for own, each in zip(module.parameters(), expected, strict=True))
    difference = stage.weights(kept)
    assert all(
        torch.equal(each, (own - was).bfloat16()) for each, own, was in zip(difference, expected, kept, strict=True)
    )
    stage.set_weights(kept)
    assert all(torch.equal(now, then) for now, then in zip(stage.weights(), kept, strict=True))
    assert not any(each.any() for each in stage.weights(kept))


def test_parameters_that_a_program_has_resized_end_the_training_and_are_saved_nowhere() -> None:
    """As what shards a model does, which leaves it empty ones."""
    module = nn.Linear(3, 2)
    stage = stage_of(module)
    whole = stage.weights()
    module.bias.data = torch.empty(0)
    calls = (stage.current_weights, stage.weights, lambda: stage.set_weights(whole), lambda: stage.correct(whole))
    for call in calls:
        with pytest.raises(TrainingFailed, match="has changed since it joined"):
            call()
    assert torch.equal(module.weight, whole[0]), "nothing is half moved"


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 5),
)
def test_parameters_that_are_no_finite_numbers_end_the_training_and_are_saved_nowhere(
    dtype: torch.dtype, odd: float, place: int
) -> None:
    module = nn.Linear(3, 2).to(dtype)
    stage = stage_of(module)
    kept = stage.weights()
    module.weight.data.view(-1)[place] = odd
    for call in (stage.current_weights, stage.weights, lambda: stage.weights(kept)):
        with pytest.raises(TrainingFailed, match="no finite number"):
            call()


@given(st.none() | st.floats())
def test_a_loss_that_is_unknown_is_one_over_no_token(said: float | None) -> None:
    stage = stage_of(nn.Linear(1, 1))
    stage.loss_said = said
    reply = stage.loss(TARGETS, TARGETS)
    if said is None or not math.isfinite(said):
        assert (reply.loss, reply.tokens) == (0.0, 0)
    else:
        assert (reply.loss, reply.tokens) == (said, 6)


def test_only_a_step_of_the_program_is_taken_and_its_error_is_kept_for_it() -> None:
    stage = stage_of(nn.Linear(1, 1))
    assert not stage.step(0.1, 1.0).applied
    stage.due = lambda: "returned"
    assert stage.step(0.1, 1.0).applied
    assert stage.returned == "returned"
    assert not stage.step(0.1, 1.0).applied, "a gradient is used once"
    stage.due = lambda: 1 // 0
    assert not stage.step(0.1, 1.0).applied
    assert isinstance(stage.error, ZeroDivisionError)


async def test_each_gradient_is_drawn_once_and_again_if_its_microbatch_was_lost() -> None:
    stage = stage_of(nn.Linear(1, 1))
    pipeline = PipelineConfig(stages=1, microbatch_size=2, sequence_length=3)
    signal = StepSignal(RunConfig(model=ModelConfig(), pipeline=pipeline), stage)
    drawing = asyncio.create_task(signal.draw())
    await asyncio.sleep(0)
    assert not drawing.done()
    stage.due = lambda: None
    signal.look()
    assert (await drawing).shape == (2, 4)
    stage.loss(TARGETS, TARGETS)
    drawing = asyncio.create_task(signal.draw())
    await asyncio.sleep(0)
    assert not drawing.done(), "it stands for the same gradient"
    drawing.cancel()
    stage.discard()
    await signal.draw()
    stage.loss(TARGETS, TARGETS)
    assert stage.step(0.1, 1.0).applied
    assert not stage.has_news


def test_what_is_trained_has_the_names_of_the_module_also_where_it_is_compiled() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    assert list(trained_parameters(module)) == ["1.weight", "1.bias"]
    compiled = nn.ModuleDict({"_orig_mod": module})  # so does torch.compile name what it was made of
    assert list(trained_parameters(compiled)) == ["1.weight", "1.bias"]


def test_a_module_without_anything_to_train_or_in_another_format_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        trained_parameters(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(UserError, match="The parameter weight is float16"):
        trained_parameters(nn.Linear(1, 1).half())
    for value, what in ((torch.eye(2).to_sparse(), "sparse"), (torch.ones(0), "empty")):
        with pytest.raises(UserError, match=f"The parameter 0 is {what}"):
            trained_parameters(nn.ParameterList([nn.Parameter(value)]))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)), r"its parameter 0.weight is [3, 2], and the run's is [4, 2]"),
        (nn.Sequential(nn.Linear(2, 4, bias=False)), "it has no trained parameter 0.bias"),
        (nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 1)), "its parameter 2.weight is trained"),
    ],
)
def test_the_first_parameter_that_differs_is_named(other: nn.Module, why: str) -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    shapes = {name: tuple(each.shape) for name, each in trained_parameters(module).items()}
    with pytest.raises(UserError) as refused:
        check_module(shapes, trained_parameters(other))
    assert why in refused.value.why


def frozen(seed: int, *, biases: bool = True) -> nn.Sequential:
    """Return a trained layer over a large frozen one and a small one, which depend on the seed."""
    torch.manual_seed(seed)
    large, small = nn.Linear(300, 300, bias=biases), nn.Linear(300, 2, bias=biases)
    return nn.Sequential(large.requires_grad_(False), small.requires_grad_(False), nn.Linear(2, 2))


def test_the_first_frozen_parameter_that_differs_is_named(tmp_path: Path) -> None:
    module = frozen(0)
    run = load_run(noloco_node.init(tmp_path / "run.toml", module, steps=9))
    check_frozen(run, module)
    check_frozen(run, frozen(0).bfloat16())
    moved = frozen(0)
    with torch.no_grad():
        moved[1].weight.mul_(1.01)
    for other, why in (
        (frozen(1), "frozen parameter 0.weight has other values"),
        (moved, "frozen parameter 1.weight has other values"),
        (frozen(0, biases=False), "it has no frozen parameter 0.bias"),
        (nn.Sequential(*frozen(0), nn.Linear(2, 2).requires_grad_(False)), "its parameter 3.weight is frozen"),
    ):
        with pytest.raises(UserError) as refused:
            check_frozen(run, other)
        assert why in refused.value.why
    codes = frozen(0)
    codes[0].weight = nn.Parameter(torch.zeros(45_000, dtype=torch.uint8), requires_grad=False)
    check_frozen(run, codes)
    codes[0].to("meta")
    check_frozen(run, codes)
    assert not load_run(noloco_node.init(tmp_path / "other.toml", nn.Linear(2, 2), steps=9)).model.foreign_frozen


@pytest.mark.parametrize("checkpoint", FLOATS)
def test_a_frozen_model_is_the_same_in_every_float_format(tmp_path: Path, checkpoint: torch.dtype) -> None:
    """Of a checkpoint in float32 one of two is in float32: in bfloat16 and in float16 it has no value in common."""
    modules = {}
    for dtype in FLOATS:
        module = modules[dtype] = frozen(0)
        with torch.no_grad():
            for each in module[:2].parameters():
                each.mul_(1e-4)  # many of these values have fewer bits in float16 than in bfloat16
        module[:2].to(checkpoint).to(dtype)
    for first in FLOATS:
        run = load_run(noloco_node.init(tmp_path / f"{first}.toml", modules[first], steps=9))
        for other in FLOATS:
            if checkpoint is not torch.float32 or first is other or torch.float32 in (first, other):
                check_frozen(run, modules[other])


def test_a_run_file_lists_the_first_of_very_many_frozen_parameters(tmp_path: Path) -> None:
    """The module of each layer of experts has hundreds."""

    def module(moved: int) -> nn.Module:
        experts = [nn.Linear(1, 1, bias=False).requires_grad_(False) for _ in range(1100)]
        for number, each in enumerate(experts):
            nn.init.constant_(each.weight, number == moved)
        return nn.Sequential(nn.Linear(1, 1), *experts)

    run = load_run(noloco_node.init(tmp_path / "run.toml", module(-1), steps=9))
    check_frozen(run, module(1099))
    with pytest.raises(UserError) as refused:
        check_frozen(run, module(700))
    assert "frozen parameter 701.weight has other values" in refused.value.why


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_no_optimiser_or_no_module_is_refused_in_words(*, swapped: bool) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrong: Any = (module, optimizer) if swapped else (optimizer, list(module.parameters()))
    with pytest.raises(UserError, match="takes an optimiser of torch and a module, in this order") as refused:
        noloco_node.GossipOptimizer(*wrong, "invite")
    assert type(wrong[1]).__name__ in refused.value.why


@pytest.mark.parametrize("name", ["device", "stage", "data", "threads", "max_memory", "max_ram", "sample"])
def test_an_option_that_a_module_of_the_program_overrides_is_refused(name: str) -> None:
    """It would do nothing: the module lies on its device, and is the run's only stage."""
    module = nn.Linear(2, 2)
    options: Any = {name: 0}
    with pytest.raises(UserError, match=f"GossipOptimizer has no option {name}"):
        noloco_node.GossipOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module, "invite", **options)


def test_a_parameter_that_the_optimiser_lacks_is_named() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(UserError, match="The parameter bias requires a gradient, and is not in the optimiser"):
        _check_optimised(trained_parameters(module), torch.optim.SGD([module.weight], lr=0.1))
