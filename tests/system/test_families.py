"""docs/families.md says what becomes of each family of models, and nothing else does."""

from __future__ import annotations

import pytest

from docs import generate_families as families


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_family_fares_as_the_table_says(family: str) -> None:
    assert families.row(family) in families.PAGE.read_text(), "run: python docs/generate_families.py"


def test_the_table_lists_the_families_that_are_tried() -> None:
    listed = [line.split("`")[1] for line in families.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert listed == sorted(families.FAMILIES)
