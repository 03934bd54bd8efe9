"""What a run file means for the model: its config, where it is cut, and the shapes that every peer must agree on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from noloco_node.errors import Exit, UserError, config_error, is_full_disk, one_line, reason_of, storage_error
from noloco_node.planning.windows import BACKWARD, FROZEN_BACKWARD
from noloco_node.run.config import ModelConfig, RunConfig
from noloco_node.run.validation import oversized
from noloco_node.units import format_bytes
from pipeline import partition
from pipeline.adapters import frozen_weights
from pipeline.adapters.settings import AdapterConfig, Form
from pipeline.decoder_slice import Cut, NotSliceableError, Subspace
from pipeline.forward_pass import Slice, StageSettings
from pipeline.messages import check_width
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.stage import Stage

_REFUSALS = (
    ValueError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
)
"""Errors of transformers and torch where the sizes of a run file, perhaps a stranger's, fit no model."""
_MOST_LAYOUTS = 64
_layouts: dict[bytes, ModelLayout] = {}
"""By the fields of a run that they follow from: a command asks for one layout many times."""
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.txt")


class ModelLayout(NamedTuple):
    """A model as a run cuts it. `sizes`: of the parameters that each stage trains.

    `work`: floating-point operations a token of each stage, forward. `checkpoint`: name and shape of what each stage
    has of a checkpoint; `shapes`, but where adapters are trained.
    """

    prepared: Prepared
    seed: int
    cuts: tuple[Cut, ...]
    sizes: tuple[partition.SliceSize, ...]
    work: tuple[int, ...]
    checkpoint: tuple[dict[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Name and shape of every trained parameter of every stage, in its order."""
        return tuple(size.shapes for size in self.sizes)

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapters over the frozen model; None where all weights are trained."""
        return self.cuts[0].adapter

    @property
    def backward(self) -> float:
        """What a backward pass takes, in forward passes: planner, `check` and simulator count by it."""
        return BACKWARD if self.adapter is None else FROZEN_BACKWARD

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about parts of this family that training leaves out."""
        family = self.prepared.config.model_type
        return tuple(
            f"Of a {family} model, {note} (docs/families.md)." for note in partition.family_notes(self.prepared.config)
        )

    @property
    def width(self) -> int:
        """Activations a token between two stages."""
        subspace = self.cuts[0].subspace
        return int(self.prepared.config.hidden_size) if subspace is None else subspace.numbers

    @property
    def vocabulary(self) -> int:
        return int(self.prepared.config.vocab_size)

    def whole(self, form: Form) -> Cut:
        """Return the cut that is the whole model with its adapters, frozen in this form."""
        assert self.adapter is not None, "adapters are trained"
        return self.cuts[0]._replace(
            end_layer=self.cuts[-1].end_layer, head=True, adapter=replace(self.adapter, base=form)
        )

    @property
    def whole_checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of all parameters that the stages have of a checkpoint."""
        return {name: shape for stage in self.checkpoint for name, shape in stage.items()}

    def ordinary(self, number: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of stage `number` in the shapes of an ordinary checkpoint."""
        return partition.folded(self.prepared.config, self.cuts[number], weights)


def model_layout(run: RunConfig) -> ModelLayout:
    """Return config, cuts and shapes of a run, worked out once for all runs that differ in other fields.

    Raises `UserError` naming what in the run file does not fit.
    """
    pipeline = run.pipeline
    where = (pipeline.stages, pipeline.boundaries, pipeline.sequence_length, pipeline.subspace, pipeline.codec)
    key = msgspec.json.encode((run.seed, run.model, run.adapter, run.data.packs, where))
    if (layout := _layouts.get(key)) is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[key] = _model_layout(run)
    return layout


def _model_layout(run: RunConfig) -> ModelLayout:
    if run.model.is_foreign:
        raise config_error(
            "The run trains a foreign module, which only the program that builds it can run.",
            "its run file names parameters and no architecture",
            "noloco_node.GossipOptimizer in that program, or noloco_node.join with its stages (docs/python.md)",
        )
    try:
        prepared = prepare(_config(run.model), run.model.dropout)
        partition.verify_family(prepared.config)
        if run.data.packs:
            _check_rows(prepared)
        pipeline, width = run.pipeline, int(prepared.config.hidden_size)
        check_width(pipeline.codec, width, pipeline.subspace)
        cuts = partition.cut(
            prepared.config, pipeline.stages, pipeline.boundaries, sequence_length=pipeline.sequence_length
        )
        if pipeline.subspace is not None:
            partition.verify_subspace(prepared.config)
            cuts = tuple(each._replace(subspace=Subspace(pipeline.subspace, run.seed)) for each in cuts)
        checkpoint = sizes = [partition.slice_size(prepared.config, part) for part in cuts]
        if (adapter := _adapter(run, prepared)) is not None:
            cuts = tuple(each._replace(adapter=adapter) for each in cuts)
            sizes = [partition.slice_size(prepared.config, part) for part in cuts]
            if (idle := next((number for number, size in enumerate(sizes) if not size.shapes), None)) is not None:
                raise ValueError(f"stage {idle} has none of the layers in adapter.targets: it would train nothing")
        work = partition.forward_flops(prepared.config, cuts, pipeline.sequence_length)
    except NotSliceableError as error:
        raise config_error(
            "The run's model cannot be trained in stages.",
            str(error),
            "a model of another family, such as llama or qwen3; docs/families.md lists them",
        ) from error
    except _REFUSALS as error:
        raise config_error(
            "The run file describes a model that cannot be built.",
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            "correct [model], [pipeline] or [adapter] in the run file",
        ) from error
    return ModelLayout(prepared, run.seed, cuts, tuple(sizes), work, tuple(size.shapes for size in checkpoint))


def _adapter(run: RunConfig, prepared: Prepared) -> AdapterConfig | None:
    """Return what a run trains over a frozen model; raise ValueError where the model does not allow it."""
    wanted = run.adapter
    if not wanted.is_trained:
        return None
    names = partition.adapter_targets(prepared.config)
    for target in wanted.targets:
        if not any(replace(wanted, targets=(target,)).is_for(name) for name in names):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(f"adapter.targets names {target}, and the linear layers of this model are {there}")
    partition.verify_adapters(prepared.config, wanted)
    return wanted


def _check_rows(prepared: Prepared) -> None:
    try:
        partition.verify_rows(prepared.config)
    except ValueError as error:
        raise config_error(
            "Rows of this run cannot share a sequence.",
            f"{error}: a row would see the one before it",
            "data.packed = false: each row is a sequence of its own",
        ) from error


def build_stage(run: RunConfig, plan: ModelLayout, number: int, device: torch.device) -> Slice:
    """Build stage `number` with the weights of the run's seed, or of its model on the hub.

    Those that travel through the swarm take their place when a stage is to begin with them.
    """
    part = partition.build(plan.prepared, plan.cuts[number], run.seed, device)
    directory = hub_directory(run.model)
    if directory is not None:
        from noloco_node.planning.checkpoint_map import load_frozen, read_parameters

        paths, shapes = sorted(directory.glob("*.safetensors")), plan.checkpoint[number]
        if plan.adapter is not None:
            load_frozen(plan.prepared, shapes, paths, partial(frozen_weights.load, part))
        else:
            for name, tensor in read_parameters(plan.prepared, shapes, paths):
                part.get_parameter(name).data.copy_(tensor)
    return part


def frozen_whole(layout: ModelLayout, paths: Sequence[Path], form: Form) -> Slice:
    """Return the whole model of a run that trains adapters, in this form, from the files that it starts from."""
    assert layout.adapter is not None, "adapters are trained"
    part = partition.build(layout.prepared, layout.whole(form), layout.seed)
    from noloco_node.planning.checkpoint_map import load_frozen

    load_frozen(layout.prepared, layout.whole_checkpoint, paths, partial(frozen_weights.load, part))
    return part.eval()


def make_stage(
    run: RunConfig,
    plan: ModelLayout,
    number: int,
    device: torch.device,
    graphs: int | None = None,
    *,
    by_layers: bool = False,
    moments_beside: int = 0,
) -> Stage:
    """Return stage `number` with its inner optimiser; raise `UserError` as `build_stage` does.

    `graphs`, `by_layers` and `moments_beside`: as `pipeline.forward_pass.StageSettings` has them.
    """
    settings = StageSettings(device, None, graphs, by_layers, moments_beside)
    return with_optimiser(run, build_stage(run, plan, number, device), number, settings)


def with_optimiser(run: RunConfig, part: Slice, number: int, settings: StageSettings) -> Stage:
    """Return the slice of stage `number` with the run's inner optimiser, in the run's precision."""
    from noloco_node.machine.device import autocast_dtype

    return Stage(
        part,
        run.inner,
        settings._replace(autocast=autocast_dtype(settings.device, run.precision)),
        first=number == 0,
        last=run.pipeline.is_last(number),
        codec=run.pipeline.codec,
    )


def hub_directory(model: ModelConfig) -> Path | None:
    """Return the directory of a run's model on the hub, fetched if need be; None where it is not from there."""
    if model.hub is None:
        return None
    from huggingface_hub import snapshot_download

    patterns = list(WEIGHT_PATTERNS)
    found = _answer_of(partial(snapshot_download, model.hub, revision=model.commit, allow_patterns=patterns))
    if not isinstance(found, Exception):
        return Path(found)
    if is_full_disk(found):
        raise storage_error(
            f"The model {model.hub} cannot be kept on this disk.",
            why=reason_of(found),
            hint="free some space, or set HF_HOME to a directory with more of it; what has come is kept",
        ) from found
    raise UserError(
        f"The model {model.hub} cannot be fetched from the hub.",
        why=one_line(found),
        hint="check the network and the rights to this model; what has come is kept",
        code=Exit.UNREACHABLE,
    ) from found


def _answer_of(ask: Callable[[], Any]) -> Any:
    """Return what the hub answers, or the error that one of the packages behind its library raised; no MemoryError."""
    try:
        return ask()
    except MemoryError:
        raise
    except Exception as error:
        return error


def check_hub_weights(model: ModelConfig, layout: ModelLayout) -> None:
    """Raise `UserError` (CONFIG) if the headers of a model on the hub are of another one; nothing if no hub answers."""
    if model.hub is None:
        return
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    from noloco_node.planning.checkpoint_map import check_tensors, unfit

    told = _answer_of(partial(get_safetensors_metadata, model.hub, revision=model.commit))
    if isinstance(told, (NotASafetensorsRepoError, SafetensorsParsingError, ValueError)):
        raise unfit(model.hub, told) from told
    if isinstance(told, Exception):
        return  # what is there already needs no network
    files = told.files_metadata.values()
    found = {name: (tensor.dtype, tensor.shape) for file in files for name, tensor in file.tensors.items()}
    try:
        check_tensors(layout.prepared, layout.checkpoint, found)
    except (ValueError, RuntimeError, TypeError) as error:  # torch has the last two for shapes that no tensor can have
        raise unfit(model.hub, error) from error


def check_download(model: ModelConfig, most_bytes: int | None) -> None:
    """Raise `UserError` (Exit.STORAGE) if the run's model on the hub is more than its owner allows, or than is free."""
    if model.hub is None:
        return
    from huggingface_hub import HfApi, constants

    told = _answer_of(partial(HfApi().model_info, model.hub, revision=model.commit, files_metadata=True))
    if isinstance(told, Exception):
        return  # what is there already needs no network; whatever else is wrong, fetching it says better
    files = told.siblings or []
    size = sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, each) for each in WEIGHT_PATTERNS))
    cache = Path(constants.HF_HUB_CACHE)
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if size > (allowed := min(free, free if most_bytes is None else most_bytes)):
        raise storage_error(
            f"The model of this run, {model.hub}, takes {format_bytes(size)} of the disk.",
            why=f"{format_bytes(free)} are free at {place}, and {format_bytes(allowed)} may be used",
            hint="free some space, allow more with --max-disk, or join another run",
        )


def _config(model: ModelConfig) -> Any:
    if model.architecture is not None:
        return family_config(model.architecture, model.sizes)
    try:
        return published_config(model.hub, revision=model.commit)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model.hub} holds no model config that transformers knows: {one_line(error)}") from error


def published_config(place: str | Path | None, **options: Any) -> Any:
    """Return the config of a checkpoint, a stranger's perhaps; raise ValueError if a size of it is too large."""
    from transformers import AutoConfig, PretrainedConfig

    given, _ = PretrainedConfig.get_config_dict(place, **options)
    for name, value, why, _ in oversized(given):
        raise ValueError(f"{name} = {value}: {why}")
    return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
