"""`noloco_node.init` writes a run that every part of the product reads."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from user_errors import user_error

import noloco_node
from noloco_node.api.foreign_stage import ForeignStage, trained_parameters
from noloco_node.api.training_thread import IterationClock
from noloco_node.errors import Exit, UserError
from noloco_node.planning.foreign_layout import ForeignWeights, foreign_layout
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import RunConfig
from noloco_node.run.fields import fields_of
from noloco_node.run.runfile import load_run
from noloco_node.storage.weight_store import WeightStore
from pipeline.inner_step import InnerConfig

IN_ITSELF: list[Any] = []
IN_ITSELF.append(IN_ITSELF)


def test_the_run_of_a_module_begins_with_its_weights(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1).bfloat16())
    module[0].bias.requires_grad_(False)
    path = noloco_node.init(
        tmp_path / "run.toml", module, steps=np.int64(7), batch=5, replicas=3, every=4, codec="int8", seed=1
    )
    run = load_run(path)
    assert run.budget_samples == 7 * 5 * 3
    assert (run.outer.inner_steps_per_round, run.outer.codec, run.seed) == (4, "int8", 1)
    layout = foreign_layout(run)
    assert layout.shapes[0] == {"0.weight": (4, 3), "2.weight": (1, 4), "2.bias": (1,)}
    weights = ForeignWeights(layout.shapes, WeightStore.whole(tmp_path, run.model.weights))
    assert weights.pieces(0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    weights.put(0, ForeignStage([*trained_parameters(other).values()], IterationClock()))
    assert torch.equal(other[0].weight, module[0].weight)
    assert torch.equal(other[2].bias, module[2].bias)
    assert not other[0].bias.any(), "it is not trained"


def test_the_run_of_a_model_that_nodes_build_takes_its_section(tmp_path: Path) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"architecture": "llama", "sizes": sizes}
    path = noloco_node.init(tmp_path / "run.toml", model, steps=9, sections={"inner": {"learning_rate": 0.01}})
    run = load_run(path)
    assert (run.model.architecture, run.inner.steps, run.inner.learning_rate) == ("llama", 9, 0.01)
    assert run.pipeline.stages == 2
    with pytest.raises(UserError, match="trains a model of its own"):
        foreign_layout(run)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already") as refused:
        noloco_node.init(path, nn.Linear(1, 1), steps=1)
    assert "overwrite=True" in refused.value.hint
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]
    assert path.read_text() == "mine"
    weights = tmp_path / "other.safetensors"
    weights.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        noloco_node.init(tmp_path / "other.toml", nn.Linear(1, 1), steps=1)
    assert weights.read_text() == "mine"
    noloco_node.init(path, nn.Linear(1, 1), steps=1, overwrite=True)
    assert load_run(path).model.is_foreign
    with pytest.raises(UserError, match="is a directory"):
        noloco_node.init(tmp_path, nn.Linear(1, 1), steps=1, overwrite=True)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"steps": 0}, "inner.steps"),
        ({"steps": "a"}, "steps"),
        ({"steps": 1, "every": 2.5}, "every"),
        ({"steps": 1, "batch": 5000}, "pipeline.microbatch_size"),
        ({"steps": 1, "codec": "int3"}, "outer.codec"),
        ({"steps": 1, "sections": {"inner": {"orthogonal": True}}}, "inner.orthogonal"),
        ({"steps": 1, "sections": {"pipeline": {"stages": 2}}}, "pipeline.stages"),
        ({"steps": 1, "sections": {"pipeline": {"microbatches_per_step": 2}}}, "pipeline.microbatches_per_step"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path: Path, wrong: dict[str, object], field: str) -> None:
    with user_error(Exit.CONFIG) as refused:
        noloco_node.init(tmp_path / "run.toml", nn.Linear(1, 1), **wrong)
    assert field in refused.value.what
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_weights_of_which_nothing_could_be_learnt_are_refused(tmp_path: Path, number: float) -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.bias, number)
    with pytest.raises(UserError, match="bias holds what is no finite number"):
        noloco_node.init(tmp_path / "run.toml", module, steps=1)
    assert not list(tmp_path.iterdir())


def test_a_node_without_the_program_says_what_trains_the_run(tmp_path: Path) -> None:
    run = load_run(noloco_node.init(tmp_path / "run.toml", nn.Linear(1, 1), steps=1))
    with pytest.raises(UserError, match="only the program that builds it can run") as refused:
        model_layout(run)
    assert "GossipOptimizer" in refused.value.hint


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    run = load_run(noloco_node.init(tmp_path / "run.toml", nn.Linear(2, 1), steps=1))
    store = WeightStore.whole(tmp_path, run.model.weights)
    with pytest.raises(UserError, match="cannot be loaded") as refused:
        ForeignWeights([{"weight": (1, 3)}], store).put(0, ForeignStage([], IterationClock()))
    assert "weight is missing, or of another shape" in refused.value.why


@pytest.mark.parametrize("name", ["run.safetensors", "läuf.toml", "a run.toml", ".toml"])
def test_a_run_file_has_a_name_that_fits_its_weights(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="its own weights"):
        noloco_node.init(tmp_path / name, nn.Linear(2, 1), steps=10, overwrite=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (None, "of the type NoneType"),
        (5, "of the type int"),
        ("llama", "of the type str"),
        ([nn.Embedding(3, 2), nn.ReLU()], "Stage 1 has no parameter"),
        ([nn.Embedding(384, 2), nn.Linear(2, 383)], "vocabulary of 383 is smaller than the tokenizer's"),
        (nn.LazyLinear(3), "weight has no values"),
        (nn.Linear(2, 1, device="meta"), "weight has no values"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, model: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        noloco_node.init(tmp_path / "run.toml", model, steps=10)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sections",
    [
        None,
        {"inner": 5},
        {"name": {"steps": 1}},
        *({"inner": {"clip_norm": each}} for each in (object(), None, 10**5000, IN_ITSELF)),
    ],
)
def test_what_no_run_file_can_hold_is_refused(tmp_path: Path, sections: Any) -> None:
    with pytest.raises(UserError, match=r"sections (has|is)|^inner.clip_norm cannot be written into a run file"):
        noloco_node.init(tmp_path / "run.toml", nn.Linear(2, 1), steps=10, sections=sections)
    assert not list(tmp_path.iterdir())


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_a_misspelt_key_of_any_letters_is_named(key: str) -> None:
    assume(key not in {each.name for each in (*fields_of(RunConfig), *fields_of(InnerConfig))})
    for sections in ({key: {"steps": 1}}, {"inner": {key: 1}}):
        with pytest.raises(UserError, match="there is no field"):
            noloco_node.init("never_written.toml", {"architecture": "llama"}, steps=10, sections=sections)
