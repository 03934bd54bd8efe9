"""docs/families.md says what becomes of each family of models, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_model

from docs import generate_families as families
from noloco_node.cli.continue_run import continuing_text
from noloco_node.planning.plan import plan
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_family_fares_as_the_table_says(family: str) -> None:
    assert families.row(family) in families.PAGE.read_text(), "run: python docs/generate_families.py"


def test_the_table_lists_the_families_that_are_tried() -> None:
    listed = [line.split("`")[1] for line in families.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert listed == sorted(families.FAMILIES)


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("llama", []),
        ("mixtral", ["nothing balances the load of its experts"]),
        (
            "deepseek_v3",
            ["e_score_correction_bias stays as it came", "nothing balances the load of its experts"],
        ),
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
