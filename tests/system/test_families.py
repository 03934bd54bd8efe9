"""docs/families.md says what becomes of each family of models, and nothing else does."""

import contextlib
import math
from pathlib import Path
from random import Random

import pytest
from checkpoints import write_model
from user_errors import user_error

from docs import generate_families as families
from noloco_node.errors import Exit, UserError
from noloco_node.export.continue_run import continuing_text
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.plan import plan
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from pipeline.model_config import dropout_fields, family_config


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_family_fares_as_the_table_says(family: str) -> None:
    assert families.row(family) in families.PAGE.read_text(), "run: python docs/generate_families.py"


def test_the_table_lists_the_families_that_are_tried() -> None:
    listed = [line.split("`")[1] for line in families.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert listed == sorted(families.FAMILIES)


def numbers_of(family: str) -> list[str]:
    config = family_config(family, families.FAMILIES[family])
    dropout = dropout_fields(config)
    found = {name: value for name, value in vars(config).items() if name not in dropout and not name.startswith("_")}
    return sorted(name for name, value in found.items() if type(value) in (int, float))


def run_of(family: str, sizes: dict[str, float]) -> RunConfig:
    model = ModelConfig(architecture=family, sizes={**families.FAMILIES[family], **sizes})
    return RunConfig(model=model, pipeline=PipelineConfig(sequence_length=8))


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_number_that_fits_no_model_is_refused_in_a_sentence(family: str) -> None:
    """A family that is not refused has computed finite numbers at a tiny size: `verify_family` compares them."""
    rng = Random(family)
    drawn = [(rng.choice(numbers_of(family)), rng.choice((0, -1, 1e308, math.nan))) for _ in range(3)]
    known = [("num_attention_heads", 0), ("hidden_size", -1), ("pad_token_id", 2**30), ("head_dim", 0.5)]
    for name, value in [*known, *drawn]:
        with contextlib.suppress(UserError):
            model_layout(run_of(family, {name: value}))


@pytest.mark.parametrize("value", [0, -1, 1e308, math.nan])
@pytest.mark.parametrize("name", ["num_key_value_heads", "rope_theta", "vocab_size", "intermediate_size", "head_dim"])
def test_a_number_that_no_model_has_is_named(name: str, value: float) -> None:
    model_layout(run_of("llama", {}))
    with user_error(Exit.CONFIG, "cannot be built") as refused:
        model_layout(run_of("llama", {name: value}))
    assert refused.value.why.startswith(f"{name} = ")


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("llama", []),
        ("mixtral", ["nothing balances the load of its experts"]),
        ("deepseek_v3", ["e_score_correction_bias stays as it came", "nothing balances the load of its experts"]),
    ],
)
def test_check_and_init_say_what_is_not_trained(
    family: str, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [f"Of a {family} model, {note} (docs/families.md)." for note in notes]
    sizes = {**families.FAMILIES[family], "vocab_size": 384}
    run = RunConfig(
        model=ModelConfig(architecture=family, sizes=sizes), pipeline=PipelineConfig(stages=2, sequence_length=32)
    )
    assert [warning for warning in plan(run).warnings if "docs/families.md" in warning] == said
    write_model(tmp_path, family, sizes)
    continuing_text(tmp_path, "tiny")
    told = capsys.readouterr().err
    assert all(sentence in told for sentence in said)
    assert ("docs/families.md" in told) == bool(said)
    assert "text: set [data] in the run file" in told
