"""What a run of adapters is exported as: PEFT's files, or the model with its adapters added to its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from noloco_node.errors import UserError, config_error, usage_error
from noloco_node.planning.model_layout import ModelLayout, frozen_whole, hub_directory
from noloco_node.run.config import ModelConfig, RunConfig
from noloco_node.storage.home import HomePaths, typed
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.adapters.lora import AdaptedLinear, drawn, ordinary
from pipeline.adapters.settings import ALL_LINEAR, Form
from pipeline.partition import empty_slice


class AdapterExport(NamedTuple):
    """What to make of adapters. `merge`: a whole model. `base`: the checkpoint that they adapt, if it is here."""

    merge: bool = False
    base: Path | None = None


def base_files(recipe: RunFileText, homes: Sequence[Path], given: Path | None) -> list[Path]:
    """Return the files of the model that a run adapts; none where they are not here, or the run trains all weights.

    Raises `UserError` (CONFIG) if the directory that a person has `given` holds others.
    """
    model = recipe.run.model
    if not recipe.run.adapter.is_trained:
        return []
    if (directory := hub_directory(model)) is not None:
        return sorted(directory.glob("*.safetensors"))
    if given is not None:
        frozen = any((typed(given) / each.file).exists() for each in model.frozen_files)
        store = WeightStore.whole(given, model.frozen_files if frozen else model.weights)
        return [store.directory / each.file for each in store.files]
    for place in (place.weights for home in homes for place in HomePaths(home).places_of(recipe.digest)):
        store = WeightStore.filling(place, model.fetched)
        if not store.missing(store.all_pieces()):
            return [store.directory / each.file for each in store.files]
    return []


def are_frozen(model: ModelConfig, base: Sequence[Path]) -> bool:
    """Say whether these files of `base_files` are those that nodes fetch, and not the checkpoint's own."""
    return any(each.file == path.name for each in model.frozen_files for path in base)


def check_wanted(run: RunConfig, wanted: AdapterExport, base: Sequence[Path]) -> None:
    """Raise `UserError` if a run cannot be exported as wanted. `base`: the files of the model that it adapts."""
    if not run.adapter.is_trained and wanted != AdapterExport():
        what = "There are no adapters to merge." if wanted.merge else "There are no adapters that need --weights."
        left_out = "--merge" if wanted.merge else "--weights"
        raise usage_error(what, why="this run trains all weights of its model", hint=f"leave {left_out} out")
    if wanted.merge and not base:
        raise without_base("merge")


def without_base(what: str) -> UserError:
    return config_error(
        f"The model that this run adapts is not here to {what}.",
        why="no home that was given has all of its files; of several stages a node fetches its own stage's part",
        hint="--weights DIR, with the directory that `noloco-node init --from` was given, or the one that it wrote",
    )


def merged_weights(
    layout: ModelLayout, base: Sequence[Path], form: Form, stages: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the weights of the model with the adapters of all stages added to them, float32.

    `form`: of the files in `base`; float32 for those of a checkpoint.
    """
    whole = frozen_whole(layout, base, form)
    for weights in stages:
        whole.load_state_dict(weights, strict=False)
    return dict(ordinary(whole))


def peft_adapter(
    run: RunConfig, layout: ModelLayout, base: Path | None, stages: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return what PEFT's adapter_config.json says, and the adapters of all stages by their names in the model.

    `base`: the directory of the model, to be named.
    """
    assert layout.adapter is not None, "adapters are trained"
    parts = [empty_slice(layout.prepared.config, cut) for cut in layout.cuts]
    layers = {name: layer for part in parts for name, layer in part.named_modules() if isinstance(layer, AdaptedLinear)}
    weights = {name: weight for stage in stages for name, weight in stage.items()}
    for part in parts:
        weights |= drawn(part, run.seed)
    ends = {name.rpartition(".")[2] for name in layers}
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.model.hub or (None if base is None else str(typed(base).absolute())),
        "revision": run.model.commit,
        "r": layout.adapter.rank,
        "lora_alpha": layout.adapter.alpha,
        "lora_dropout": layout.adapter.dropout,
        "target_modules": sorted(set(run.adapter.targets) if ALL_LINEAR not in run.adapter.targets else ends),
        "fan_in_fan_out": any(layer.turned for layer in layers.values()),
        "bias": "none",
        "inference_mode": True,
    }
    return settings, weights
