"""What a run file means for the model: its config, where it is cut, and the shapes that every peer must agree on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from noloco_node.errors import Exit, UserError, config_error
from noloco_node.run.config import ModelConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.activations.formats import check_width
from pipeline.partition import (
    Prepared,
    cut,
    family_config,
    forward_flops,
    prepare,
    slice_size,
    verify_family,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.decoder_slice import Cut, Slice
    from pipeline.stage import Stage

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.txt")


class ModelLayout(NamedTuple):
    """A model as a run cuts it. `shapes`: name and shape of every parameter of every stage, in the stage's order.

    `work`: floating-point operations a token of each stage, forward. `multiplied`: parameters that autocast casts.
    """

    prepared: Prepared
    cuts: tuple[Cut, ...]
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    work: tuple[int, ...]
    multiplied: tuple[int, ...]

    @property
    def width(self) -> int:
        """Activations a token between two stages."""
        return int(self.prepared.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.prepared.config.vocab_size)


def model_layout(run: RunConfig) -> ModelLayout:
    """Work out config, cuts and shapes of a run; raise `UserError` naming what in the run file does not fit."""
    try:
        prepared = prepare(_config(run.model), run.model.dropout)
        verify_family(prepared.config)
        check_width(run.pipeline.codec, int(prepared.config.hidden_size))
        cuts = cut(
            prepared.config, run.pipeline.stages, run.pipeline.boundaries, sequence_length=run.pipeline.sequence_length
        )
        sizes = [slice_size(prepared.config, part) for part in cuts]
        work = forward_flops(prepared.config, cuts, run.pipeline.sequence_length)
    except ValueError as error:
        raise config_error(
            "The run file describes a model that cannot be built.",
            str(error),
            "correct [model] or [pipeline] in the run file",
        ) from error
    return ModelLayout(
        prepared, cuts, tuple(size.shapes for size in sizes), work, tuple(size.multiplied for size in sizes)
    )


def build_stage(run: RunConfig, plan: ModelLayout, number: int, device: torch.device) -> Slice:
    """Build stage `number` with the weights that the run starts from: the seed's, or those of a checkpoint."""
    from pipeline.partition import build, load

    part = build(plan.prepared, plan.cuts[number], run.seed, device)
    directory = model_directory(run.model)
    if directory is not None:
        with ExitStack() as files:
            try:
                load(part, _reader(directory, files))
            except (ValueError, OSError) as error:
                raise config_error(
                    f"The model in {directory} cannot be loaded.",
                    str(error),
                    "give a Hugging Face directory with safetensors files of the same architecture",
                ) from error
    return part


def make_stage(
    run: RunConfig, plan: ModelLayout, number: int, device: torch.device, graphs: int | None = None
) -> Stage:
    """Return stage `number` with its inner optimiser; raise `UserError` as `build_stage` does.

    `graphs`: how many microbatches that wait for their gradient keep their graph; None for all.
    """
    from noloco_node.machine.device import autocast_dtype
    from pipeline.inner_optimiser import Inner
    from pipeline.stage import Stage, StageSettings

    inner = run.inner
    return Stage(
        build_stage(run, plan, number, device),
        Inner(inner.beta1, inner.beta2, inner.epsilon, inner.weight_decay, inner.clip_norm),
        StageSettings(device, autocast_dtype(device, run.precision), graphs),
        first=number == 0,
        last=number == run.pipeline.stages - 1,
        codec=run.pipeline.codec,
    )


def model_directory(model: ModelConfig) -> Path | None:
    """Return the local directory of the checkpoint that a run starts from, fetched from the hub if need be, or None."""
    if model.path is not None:
        return Path(model.path).expanduser()
    if model.hub is not None:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.hub, revision=model.commit, allow_patterns=list(WEIGHT_PATTERNS)))
    return None


def check_download(model: ModelConfig, most_bytes: int | None) -> None:
    """Raise `UserError` (Exit.STORAGE) if the run's model on the hub is more than its owner allows, or than is free."""
    if model.hub is None:
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = HfApi().model_info(model.hub, revision=model.commit, files_metadata=True).siblings or []
    except (HfHubHTTPError, OSError):
        return  # what is there already needs no network; whatever else is wrong, fetching it says better
    size = sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, each) for each in WEIGHT_PATTERNS))
    cache = Path(constants.HF_HUB_CACHE)
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if size > (allowed := min(free, free if most_bytes is None else most_bytes)):
        raise UserError(
            f"The model of this run, {model.hub}, takes {format_bytes(size)} of the disk.",
            why=f"{format_bytes(free)} are free at {place}, and {format_bytes(allowed)} may be used",
            hint="free some space, allow more with --max-disk, or join another run",
            code=Exit.STORAGE,
        )


def _config(model: ModelConfig) -> Any:
    if model.architecture is not None:
        return family_config(model.architecture, model.sizes)
    from transformers import AutoConfig

    if model.path is not None and not Path(model.path).expanduser().is_dir():
        raise ValueError(f"there is no directory {model.path} on this machine")
    where = model.hub if model.path is None else str(Path(model.path).expanduser())
    try:
        return AutoConfig.from_pretrained(where, revision=model.commit, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} holds no model config that transformers knows: {error}") from error


def _reader(directory: Path, files: ExitStack) -> Callable[[str], Tensor | None]:
    """Return a function that reads one tensor by name from the safetensors files of a directory."""
    from safetensors import safe_open

    where: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        where |= dict.fromkeys(file.keys(), file)
    if not where:
        raise ValueError(f"there is no safetensors file in {directory}")
    return lambda name: where[name].get_tensor(name) if name in where else None
