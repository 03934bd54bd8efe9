"""A model's config, as transformers has it: made from sizes, prepared to be cut, and shrunk to be tried."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from pipeline.decoder_slice import NotSliceableError

Config = Any  # a transformers config; the library has no types

LARGEST_NUMBER = 2.0**31  # of a config: no size or scale of a model is larger
POSITIVE = re.compile(
    r"(.*_)?(size|heads|head|head_dim|hidden_layers|n_layer|embd|d_model|d_ff|dim|dims|theta|base|base_freq|eps|epsilon"
    r"|max_position_embeddings|n_positions|max_seq_len|factor)"
)
"""Names of fields that have to be above zero: a model divides by them, or has none of what they count."""
UNSET = "null"  # stands in a run file for a field that is None


class Prepared(NamedTuple):
    """A config ready to be cut. `tied`: embedding and vocabulary head were one tensor before. `text`: its JSON."""

    config: Config
    tied: bool
    text: str


def dropout_fields(config: Config) -> list[str]:
    """Return the names of the fields of a config that set some dropout."""
    return [
        name
        for name, value in vars(config).items()
        if ("dropout" in name or name.endswith("pdrop") or name == "layerdrop") and isinstance(value, int | float)
    ]


def family_config(architecture: str, sizes: Mapping[str, Any]) -> Config:
    """Return the config of a transformers model type with `sizes` in it; raise ValueError naming what is unknown."""
    try:
        family = type(AutoConfig.for_model(architecture))
    except ValueError as error:
        near = get_close_matches(architecture, CONFIG_MAPPING.keys(), n=1)
        asks = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"transformers knows no model type {architecture!r}{asks}") from error
    default = family()
    known = {name for name in vars(default) if not name.startswith("_")} | set(family.attribute_map)
    if "rope_parameters" in known:
        # Some families read a width of heads that their configs do not declare.
        known |= {"rope_theta", "rope_scaling", "head_dim"}
    if unknown := sorted(sizes.keys() - known):
        raise ValueError(f"a {architecture} config has no field {', '.join(unknown)}")
    if fixed := sorted(sizes.keys() & set(dropout_fields(default))):
        raise ValueError(f"{', '.join(fixed)}: all dropout is set in one place, not in the sizes")
    if wrong := next(_impossible(sizes), None):
        raise ValueError(wrong)
    # The default special tokens of a family mean nothing in a smaller vocabulary.
    vocabulary = sizes.get("vocab_size", default.vocab_size)
    alien = {
        name: None
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(token := getattr(default, name, None), int) and token >= vocabulary and name not in sizes
    }
    try:
        return family(**alien, **_with_none(sizes))
    except (TypeError, ValueError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"transformers refuses these sizes of {architecture}: {said}") from error


def _impossible(sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no number of a config can be, tables within it included."""
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            yield from _impossible(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value) or abs(value) > LARGEST_NUMBER:
                yield f"{name} = {value} is no number from {-LARGEST_NUMBER:.0f} to {LARGEST_NUMBER:.0f}"
            elif value <= 0 and POSITIVE.fullmatch(name):
                yield f"{name} = {value} has to be above zero"


def _with_none(value: Any) -> Any:
    """Return sizes as transformers wants them: a run file has no other way to unset a field."""
    if isinstance(value, dict):
        return {name: _with_none(each) for name, each in value.items()}
    return None if value == UNSET else value


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Under which name a family's config has its longest sequence; `attribute_map` leads others to the first."""


def longest_sequence(config: Config | Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that a model can read, of its config or the JSON of one; None for any
    length."""
    named = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    given = (named(name) for name in _POSITIONS)
    return next((int(each) for each in given if isinstance(each, int | float) and 1 <= each <= LARGEST_NUMBER), None)


def prepare(config: Config, dropout: float = 0.0) -> Prepared:
    """Copy a config with embedding and head untied, no cache, float32 weights and this dropout.

    Attention is left to the library: PyTorch's own (SDPA) wherever the family has it. Raises ValueError if the heads
    of keys and values do not divide those of queries, which the library notices in the first forward pass only.
    """
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if not heads:
        raise NotSliceableError(
            f"a {config.model_type} model has no attention heads: only stacks of such layers are cut"
        )
    if groups is not None and (groups < 1 or heads % groups):
        raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}")
    chosen, experts = getattr(config, "num_experts_per_tok", None), getattr(config, "num_experts", None)
    if chosen and experts and chosen > experts:
        raise ValueError(f"num_experts_per_tok = {chosen} is more than num_experts = {experts}")
    tied = bool(config.tie_word_embeddings)
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    config.use_cache = False
    config.dtype = torch.float32
    config._attn_implementation = None
    for name in dropout_fields(config):
        setattr(config, name, 0.0 if name == "layerdrop" else dropout)
    return Prepared(config, tied, config.to_json_string(use_diff=False))


WIDEST_HEAD = 512  # twice as wide as those of the families that are known


def tiny_config(config: Config) -> Config:
    """Shrink a config to three layers of two heads and a vocabulary of 32, all its other choices kept.

    A stranger's heads may be of any width: wider ones than `WIDEST_HEAD` are narrowed.
    """
    tiny = copy.deepcopy(config)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shrunk: dict[str, Any] = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if head_width > WIDEST_HEAD:
        head_width = shrunk["head_dim"] = WIDEST_HEAD
    shrunk |= {"num_attention_heads": 2, "hidden_size": 2 * head_width, "num_hidden_layers": 3}
    for name in ("num_key_value_heads", "num_kv_heads"):
        if groups := getattr(config, name, None):
            shrunk[name] = 2 if groups == config.num_attention_heads else 1
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        shrunk["word_embed_proj_dim"] = 2 * head_width
    for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim"):
        shrunk[name] = 4 * head_width
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            shrunk[name] = (3 * value)[:3]
    for name, value in shrunk.items():
        if getattr(config, name, None) is not None:
            setattr(tiny, name, value)
    return tiny
