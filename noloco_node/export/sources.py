"""Where an export comes from and what a checkpoint says of it (noloco.json), checked before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import msgspec

from noloco_node.errors import Exit, UserError, config_error, usage_error
from noloco_node.journal import events
from noloco_node.journal.reader import read
from noloco_node.run.config import RunConfig
from noloco_node.run.fields import short
from noloco_node.run.peer_state import Evaluation
from noloco_node.run.runfile import decode_run, read_run_text
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage.home import HomePaths, typed
from noloco_node.swarm import invite as invites
from noloco_node.swarm.run_distribution import RunFileText

NOTES = "noloco.json"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's name of the file that makes a directory an adapter's


def check_export(out: Path, invite: str | None, homes: Sequence[Path], *, best: bool = False) -> None:
    """Raise `UserError` if there is nothing to export from, `out` is not empty, or the invite is none."""
    check_target(out)
    if best and (invite is not None or not homes):
        raise usage_error(
            "--best exports from homes alone.",
            why="a node keeps the weights of its best evaluation on its own disk, and gives them to no peer",
            hint="noloco-node export --best --from-home HOME --out DIR, with the homes of as many nodes as you have",
        )
    if homes:
        recipe_of(homes)
    elif invite is None:
        raise usage_error(
            "There is nothing to export from.",
            why="neither an invite nor a home was given",
            hint="noloco-node export INVITE --out DIR, or noloco-node export --from-home HOME --out DIR",
        )
    else:
        invites.parse(invite)


def check_target(directory: Path) -> None:
    """Raise `UserError` if the place of a checkpoint is not empty, or is not to be replaced."""
    here = directory.is_dir() and directory.samefile(Path())
    if here or os.path.ismount(directory):
        raise usage_error(
            f"An export cannot take the place of {'the present directory' if here else 'a mount point'}.",
            why="it is written beside its place and renamed at the end: this directory would be gone",
            hint="--out with the name of a new directory" + ("" if here else f", such as {directory / 'model'}"),
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise usage_error(
            f"{directory} is there already, and not empty.",
            why="an export writes a directory of its own and overwrites nothing",
            hint="another --out, or remove the old one yourself",
        )


def recipe_of(homes: Sequence[Path]) -> RunFileText:
    """Return the run of these homes; raise `UserError` if they name none, or several."""
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


class FromSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A stage without replicas, from a snapshot: one replica's weights, kept by another peer.

    `others_round` and `others_progress`: the medians of the other stages, None if there is no other.
    """

    stage: int
    kept_by: str
    round: int
    progress: float
    others_round: int | None
    others_progress: float | None


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint comes from.

    `rounds`: finished, and `replicas`: merged, of each stage. `untied`: embedding and vocabulary head were one tensor
    in the original config, and are two here. `run_file`: as its author wrote it. `taken` and `left_out`: the replicas
    in the mean of each stage, and the others with the reason. `snapshots`: the stages from one; `taken` then names its
    keeper. `evaluations`: those of the run that are known here, in order.
    """

    run_id: str
    rounds: tuple[int, ...]
    replicas: tuple[int, ...]
    untied: bool
    run_file: str
    taken: tuple[tuple[ReplicaSummary, ...], ...] = ()
    left_out: tuple[tuple[LeftOut, ...], ...] = ()
    snapshots: tuple[FromSnapshot, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


def read_provenance(directory: Path) -> Provenance:
    """Read the notes of a checkpoint; raise `UserError` if they are not there."""
    path = directory / NOTES
    try:
        return msgspec.json.decode(path.read_bytes(), type=Provenance)
    except (OSError, RecursionError, ValueError) as error:
        raise config_error(
            f"{directory} is no checkpoint of a swarm.",
            why=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            hint="a directory that `noloco-node export` or the demo wrote; evaluate takes others with a text, --data",
        ) from error


def run_of(directory: Path) -> RunConfig:
    """Return the run of a checkpoint; raise `UserError` if it does not say."""
    return decode_run(read_provenance(directory).run_file, str(directory / NOTES))


class ModelSource(NamedTuple):
    """A model to evaluate: a checkpoint in `directory`, with the `adapter` in another one added to it if there is one.

    `run`: that the checkpoint, or the adapter, comes from; None if no swarm wrote it.
    """

    directory: Path
    run: RunConfig | None
    adapter: Path | None = None

    @property
    def named(self) -> Path:
        """What a person calls the model."""
        return self.adapter or self.directory


def is_adapter(directory: Path) -> bool:
    """Say whether a directory holds an adapter without the model that it adapts."""
    return (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists()


def model_in(directory: Path, weights: Path | None = None) -> ModelSource:
    """Return the model in a directory; raise `UserError` (CONFIG) if there is none.

    `weights`: the model that an adapter is for; None for the one that its settings name, if it is on this machine.
    """
    adapted = is_adapter(directory)
    foreign = not (directory / NOTES).exists() and (adapted or (directory / "config.json").exists())
    run = None if foreign else run_of(directory)
    if run is not None and run.model.is_foreign:
        raise config_error(
            f"{directory} holds the weights of a program's own module.",
            "only the program that builds the module can compute with them",
            "load model.safetensors in that program (docs/python.md)",
        )
    if not adapted:
        return ModelSource(directory, run)
    return ModelSource(_adapted_by(directory) if weights is None else typed(weights), run, directory)


def _adapted_by(directory: Path) -> Path:
    """Return the model that an adapter's settings name; raise `UserError` (CONFIG) if it is not on this machine."""
    try:
        settings = msgspec.json.decode((directory / ADAPTER_CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, RecursionError, ValueError) as error:
        raise config_error(
            f"{directory} holds no adapter that can be read.", f"{ADAPTER_CONFIG}: {error}", "copy or export it again"
        ) from error
    named = settings.get("base_model_name_or_path")
    with suppress(OSError, RuntimeError):  # a name may be of another machine: too long, of no user, or not ours to read
        place = typed(str(named))
        if isinstance(named, str) and named and (place / "config.json").is_file():
            return place
    raise config_error(
        f"{directory} holds an adapter, and no model.",
        why=f"its {ADAPTER_CONFIG} names {short(str(named))}, which is no directory with a model here"
        if named
        else f"its {ADAPTER_CONFIG} does not say which model it adapts",
        hint="--weights DIR, with the model that it adapts; or export --merge, which writes the whole model",
    )


def noted(stages: Sequence[Sequence[ReplicaSummary]], kept_by: Mapping[int, str]) -> tuple[FromSnapshot, ...]:
    """Return the notes on stages from a snapshot; `stages`: the replicas in each.

    They are compared with the other stages, or with each other if there are none.
    """
    notes = []
    for number, keeper in sorted(kept_by.items()):
        (snapshot,) = (each for each in stages[number] if each.peer == keeper)
        beside = [place for place in range(len(stages)) if place != number]
        others = [stages[place] for place in [each for each in beside if each not in kept_by] or beside]
        rounds = [median_low(each.round for each in taken) for taken in others]
        progress = [median_low(each.progress for each in taken) for taken in others]
        note = FromSnapshot(
            stage=number,
            kept_by=keeper,
            round=snapshot.round,
            progress=snapshot.progress,
            others_round=median_low(rounds) if rounds else None,
            others_progress=median_low(progress) if progress else None,
        )
        notes.append(note)
    return tuple(notes)


def evaluations_of(homes: Sequence[Path], run_id: str, told: Iterable[Evaluation] = ()) -> tuple[Evaluation, ...]:
    """Return a run's evaluations by number and round, from journals of homes and then from what others have `told`."""
    found = {(each.number, each.round): each for each in told}
    for journal in (journal for home in homes for journal in HomePaths(home).journals):
        of_run = False
        for event in read(journal):
            if isinstance(event, events.Started):
                of_run = event.run == run_id
            elif of_run and isinstance(event, events.Evaluated):
                found[event.number, event.round] = event.evaluation
    return tuple(found[place] for place in sorted(found))


def told_of(snapshot: FromSnapshot) -> str:
    """Return a sentence on a stage from a snapshot and how far it is behind."""
    told = (
        f"No replica of stage {snapshot.stage} gave its weights; in their place is a snapshot of its round "
        f"{snapshot.round} that {snapshot.kept_by} keeps"
    )
    if snapshot.others_round is None or snapshot.others_progress is None:
        return f"{told}."
    lag = snapshot.others_round - snapshot.round
    rounds = f"{abs(lag)} round{'s' if abs(lag) != 1 else ''}"
    where = f"{rounds} behind" if lag > 0 else f"{rounds} ahead of" if lag < 0 else "in the same round as"
    return (
        f"{told}, {where} the other stages (round {snapshot.others_round}); its progress is {snapshot.progress:.1%},"
        f" theirs {snapshot.others_progress:.1%}."
    )


def check_models(directories: Sequence[Path], homes: Sequence[Path], weights: Path | None) -> list[ModelSource]:
    """Return the models in directories; raise `UserError` if there is none, or directories and homes are both given.

    `weights`: as in `model_in`, for all adapters among them.
    """
    if bool(directories) == bool(homes):
        raise usage_error(
            "Nothing to evaluate." if not homes else "Directories and homes cannot be evaluated together.",
            why="a model is an exported directory, or what homes of nodes hold",
            hint="noloco-node evaluate DIR, or noloco-node evaluate --from-home HOME",
        )
    over_weights = bool(homes) and recipe_of(homes).run.adapter.is_trained
    found = [model_in(directory, weights) for directory in directories]
    if weights is not None and not over_weights and not any(each.adapter for each in found):
        raise usage_error(
            "There is no adapter to put over --weights.",
            why=f"{found[0].directory} is a whole model" if found else "the run of the homes trains whole weights",
            hint="leave --weights out; or name a directory with adapter_config.json",
        )
    return found
