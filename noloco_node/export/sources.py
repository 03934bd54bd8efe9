"""What an export reads from and writes to, checked before torch is loaded: a refusal comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noloco_node.errors import Exit, UserError, config_error
from noloco_node.run.runfile import read_run_text
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.run_distribution import RunFileText


def check_export(out: Path, invite: str | None, homes: Sequence[Path]) -> None:
    """Raise `UserError` where there is nothing to export from, or something at `out` already."""
    check_target(out)
    if homes:
        recipe_of(homes)
    elif invite is None:
        raise UserError(
            "There is nothing to export from.",
            why="neither an invite nor a home was given",
            hint="noloco-node export INVITE --out DIR, or noloco-node export --from-home HOME --out DIR",
            code=Exit.USAGE,
        )


def check_target(directory: Path) -> None:
    """Raise `UserError` if there is anything at the place where a checkpoint is to be written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"{directory} is there already, and not empty.",
            why="an export writes a directory of its own and overwrites nothing",
            hint="another --out, or remove the old one yourself",
            code=Exit.USAGE,
        )


def recipe_of(homes: Sequence[Path]) -> RunFileText:
    """Return the run that these homes took part in; raise `UserError` where they name none, or several."""
    for home in homes:
        if not HomePaths(home).run_file.is_file():
            raise config_error(
                f"{home} is not the home of a node.",
                why="it holds no run.toml, which a node keeps there when it joins",
                hint="the directory that `noloco-node join --home` was given, ~/.noloco/node by default",
            )
    places = {home: HomePaths(home).run_file for home in homes}
    recipes = {home: RunFileText(read_run_text(place), str(place)) for home, place in places.items()}
    first = recipes[homes[0]]
    for home, recipe in recipes.items():
        if recipe.digest != first.digest:
            raise UserError(
                f"{home} is the home of another run.",
                why=f"it took part in {recipe.digest[:12]}, {homes[0]} in {first.digest[:12]}",
                hint="homes of one run only",
                code=Exit.OTHER_RUN,
            )
    return first
