"""Which models are to be measured, checked before torch is loaded: a refusal comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noloco_node.errors import Exit, UserError
from noloco_node.export.provenance import known_run
from noloco_node.export.sources import recipe_of


def check_models(directories: Sequence[Path], homes: Sequence[Path]) -> None:
    """Raise `UserError` where there is no model, or where directories and homes are both given."""
    if bool(directories) == bool(homes):
        raise UserError(
            "Nothing to evaluate." if not homes else "Directories and homes cannot be evaluated together.",
            why="a model is an exported directory, or what homes of nodes hold",
            hint="noloco-node evaluate DIR, or noloco-node evaluate --from-home HOME",
            code=Exit.USAGE,
        )
    for directory in directories:
        known_run(directory)
    if homes:
        recipe_of(homes)
