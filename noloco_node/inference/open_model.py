"""A checkpoint in plain transformers; for an adapter the model that it adapts, with the adapter added to its weights.

An adapter is a directory of PEFT's files, from an export or from any other program. Its settings may be a stranger's:
what changes the arithmetic in a way that is not computed here is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from noloco_node.errors import UserError, config_error, one_line
from noloco_node.export.huggingface import ADAPTER_WEIGHTS, quiet_unless_watched
from noloco_node.export.sources import ADAPTER_CONFIG, ModelSource
from noloco_node.planning.model_layout import published_config
from noloco_node.storage.weight_store import WeightStore
from pipeline.adapters.frozen_weights import is_linear

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ORDINARY_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of PEFT's init_lora_weights those that leave the weights of the model as they are."""
T = TypeVar("T")
_Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Rank = Annotated[int, Meta(ge=1, le=2**16)]


class PeftSettings(msgspec.Struct, frozen=True):
    """The settings that are read of an adapter_config.json; its patterns are read as ends of names."""

    peft_type: str
    r: _Rank = 8
    lora_alpha: _Alpha = 8.0
    target_modules: list[str] | str | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    use_qalora: bool | None = None
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[Any] | None = None
    init_lora_weights: bool | str | None = None

    def refusal(self) -> str | None:
        """Say what of these settings is not computed here; None if nothing."""
        if self.peft_type != "LORA":
            return f"it is of the type {self.peft_type[:40]!r}, not LORA"
        for name in ("use_dora", "use_qalora", "alora_invocation_tokens", "layer_replication"):
            if getattr(self, name):
                return f"{name} is set: another arithmetic than W + alpha / r * B A"
        if self.init_lora_weights not in _ORDINARY_STARTS:
            return f"init_lora_weights, {str(self.init_lora_weights)[:40]!r}, may have changed the model's own weights"
        patterns = (*(self.rank_pattern or ()), *(self.alpha_pattern or ()))
        if (odd := next((each for each in patterns if not re.fullmatch(r"[\w.]+", each)), None)) is not None:
            return f"its patterns have an expression, {odd[:40]!r}, and only ends of names are read"
        return None

    def rank_of(self, name: str) -> int:
        return _by_end(self.rank_pattern, name, self.r)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return _by_end(self.alpha_pattern, name, self.lora_alpha) / (sqrt(rank) if self.use_rslora else rank)


def _by_end(pattern: Mapping[str, T] | None, name: str, otherwise: T) -> T:
    return next((value for end, value in (pattern or {}).items() if f".{name}".endswith(f".{end}")), otherwise)


def open_model(source: ModelSource) -> Any:
    """Load a checkpoint in plain transformers, float32, for evaluation; raise `UserError` (CONFIG) if there is none.

    The model of an adapter of a run must have the files that the run lists.
    """
    if source.adapter is None:
        return _whole(source.directory)
    if source.run is not None and source.run.model.weights:
        WeightStore.whole(source.directory, source.run.model.weights)
    model = _whole(source.directory)
    try:
        _add(model, *_read(source.adapter))
    except (ValueError, OSError, RecursionError, SafetensorError) as error:
        raise config_error(
            f"The adapter in {source.adapter} cannot be put over the model in {source.directory}.",
            why=one_line(error),
            hint="--weights with the model that the adapter was trained over; or copy or export the adapter again",
        ) from error
    return model


def _whole(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    quiet_unless_watched()
    try:
        config = published_config(directory, local_files_only=True)
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # what a wrong file makes transformers raise has no common type
        raise no_model(directory, one_line(error)) from error
    if missing := sorted(found["missing_keys"]):
        # transformers would fill them with random numbers.
        raise no_model(directory, f"its files lack {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))
    return model.eval()


def check_known(model: Any, token: int) -> None:
    """Raise `UserError` (CONFIG) if a model has no embedding of a token: torch would raise a bare error."""
    known = len(model.get_input_embeddings().weight)
    if token >= known:
        raise config_error(
            "The tokenizer is not that of the model.",
            why=f"it makes of this text the token {token}, and the model knows {known} from 0 on",
            hint="the tokenizer's files with which the model was trained, in its directory",
        )


def no_model(directory: Path, why: str) -> UserError:
    return config_error(
        f"{directory} holds no model that transformers can load.",
        why=why,
        hint="a directory that `noloco-node export` or the demo wrote; copy or export it again if a file was cut short",
    )


def _read(directory: Path) -> tuple[PeftSettings, dict[str, Tensor]]:
    """Return what PEFT's files hold, by the names of the model; raise ValueError or OSError for others."""
    settings = msgspec.json.decode((directory / ADAPTER_CONFIG).read_bytes(), type=PeftSettings)
    if (why := settings.refusal()) is not None:
        raise ValueError(why)
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"it has no {ADAPTER_WEIGHTS}, the form in which PEFT saves weights by itself")
    weights = load_file(directory / ADAPTER_WEIGHTS)
    if strange := next((name for name in weights if not name.startswith(_PREFIX)), None):
        raise ValueError(f"{strange} in {ADAPTER_WEIGHTS} is no name of PEFT's")
    if odd := next((name for name, each in weights.items() if not each.is_floating_point()), None):
        raise ValueError(f"{odd} has {str(weights[odd].dtype).removeprefix('torch.')} numbers, not floating-point ones")
    if odd := next((name for name, each in weights.items() if not each.float().isfinite().all()), None):
        raise ValueError(f"{odd} has numbers that are not finite")
    return settings, {name.removeprefix(_PREFIX).replace(".base_layer.", "."): each for name, each in weights.items()}


@torch.no_grad()
def _add(model: nn.Module, settings: PeftSettings, weights: dict[str, Tensor]) -> None:
    """Add an adapter to a model's weights; raise ValueError where it is not for this model.

    A weight that the model has itself, which PEFT has trained whole, takes the place of its own.
    """
    layers = [name.removesuffix(_A) for name in weights if name.endswith(_A)]
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    if not layers:
        raise ValueError("it adapts no layer")
    targets = settings.target_modules if isinstance(settings.target_modules, list) else []
    if idle := next((each for each in targets if not any(f".{name}".endswith(f".{each}") for name in layers)), None):
        raise ValueError(f"its settings name {idle}, and its weights have no such layer")
    for name in layers:
        if (b := weights.pop(f"{name}{_B}", None)) is None:
            raise ValueError(f"{name} has a matrix A and no B")
        matrices[name] = weights.pop(f"{name}{_A}"), b
    for name, weight in weights.items():
        owner, _, own = name.rpartition(".")
        before = getattr(_layer(model, owner, of_any_kind=True), own, None)
        if not isinstance(before, nn.Parameter) or before.shape != weight.shape:
            raise ValueError(f"{name}, {list(weight.shape)}, is no weight of this model")
        setattr(model.get_submodule(owner), own, nn.Parameter(weight.float()))
    # Last: of an adapted head PEFT writes the whole weight as well, without the product.
    for name, (a, b) in matrices.items():
        _add_to(_layer(model, name), name, settings, a.float(), b.float())


def _add_to(layer: nn.Module, name: str, settings: PeftSettings, a: Tensor, b: Tensor) -> None:
    rank, weight = settings.rank_of(name), layer.weight
    assert isinstance(weight, Tensor)
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
        raise ValueError(
            f"{name} has matrices of {list(a.shape)} and {list(b.shape)}, and its settings say rank {rank}"
        )
    turned = not isinstance(layer, nn.Linear)  # GPT-2 has its weights as [inputs, outputs]
    shape = (weight.shape[1], weight.shape[0]) if turned else tuple(weight.shape)
    if (b.shape[0], a.shape[1]) != shape:
        raise ValueError(f"{name} of the model is {list(shape)}, the adapter is for {[b.shape[0], a.shape[1]]}")
    delta = settings.scale_of(name) * (b @ a)
    # A new parameter, and not the old one changed: a head that shares its weight with the embedding has its own now.
    layer.weight = nn.Parameter(weight + (delta.t() if turned else delta))


def _layer(model: nn.Module, name: str, *, of_any_kind: bool = False) -> nn.Module:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = None
    if found is None or not (of_any_kind or is_linear(found)):
        raise ValueError(f"{name} is no {'part' if of_any_kind else 'linear layer'} of this model")
    return found
