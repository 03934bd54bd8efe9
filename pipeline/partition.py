"""Which layers a stage owns, and that slice of the model, built from config and seed alone.

A pipeline runs at the speed of its slowest stage, so stages are cut by estimated work, not by the number of layers: the
vocabulary head counts, the embedding (a look-up) hardly. All arithmetic here is in integers: every peer that reads the
same run computes the same cut.

A slice takes only its own memory: the whole model is built with weights on the meta device, where they take none. Its
buffers are real, so that rotary frequencies are those of an ordinary build. `pipeline.decoder_slice` finds and removes
the foreign parts. Not every family can be cut (some touch the activations outside their layers): `verify_family` tries
it at small sizes, and compares with the whole model.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.decoder_slice import Cut, Slice, find_decoder_parts, initialise, multiplied_weights, slice_decoder

Config = Any
"""A transformers config; the library has no types."""


class Prepared(NamedTuple):
    """A config ready to be cut. `tied`: embedding and vocabulary head were one tensor before."""

    config: Config
    tied: bool


def _dropout_fields(config: Config) -> list[str]:
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
        raise ValueError(f"transformers knows no model type {architecture!r}") from error
    default = family()
    known = {name for name in vars(default) if not name.startswith("_")} | set(family.attribute_map)
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}
    if unknown := sorted(sizes.keys() - known):
        raise ValueError(f"a {architecture} config has no field {', '.join(unknown)}")
    if fixed := sorted(sizes.keys() & set(_dropout_fields(default))):
        raise ValueError(f"{', '.join(fixed)}: all dropout is set in one place, not in the sizes")
    # The default special tokens of a family mean nothing in a smaller vocabulary.
    vocabulary = sizes.get("vocab_size", default.vocab_size)
    alien = {
        name: None
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(token := getattr(default, name, None), int) and token >= vocabulary and name not in sizes
    }
    try:
        return family(**alien, **sizes)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"transformers refuses these sizes of {architecture}: {error}") from error


def prepare(config: Config, dropout: float = 0.0) -> Prepared:
    """Copy a config with embedding and head untied, no cache, float32 weights and this dropout.

    Attention is left to the library: PyTorch's own (SDPA) wherever the family has it. Raises ValueError if the heads
    of keys and values do not divide those of queries, which the library notices in the first forward pass only.
    """
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}")
    tied = bool(config.tie_word_embeddings)
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    config.use_cache = False
    config.dtype = torch.float32
    config._attn_implementation = None
    for name in _dropout_fields(config):
        setattr(config, name, 0.0 if name == "layerdrop" else dropout)
    return Prepared(config, tied)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Move every weight to the meta device as soon as a module of this thread registers it; buffers stay real."""
    thread = threading.get_ident()

    def move(_module: nn.Module, _name: str, weight: nn.Parameter | None) -> Any:
        if weight is None or threading.get_ident() != thread:
            return None
        moved = nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)
        # Says that it has its initial value already: to draw one that nobody will see would take most of the time.
        moved._is_hf_initialized = True  # type: ignore[attr-defined]
        return moved

    hook = register_module_parameter_registration_hook(move)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        hook.remove()


def skeleton(config: Config) -> Any:
    """Build the whole causal language model with real buffers and weights that take no memory."""
    if config.tie_word_embeddings:
        raise ValueError("this config ties the vocabulary head to the embedding: prepare it first")
    with _weights_on_meta():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


class _Work(NamedTuple):
    """Forward operations a token: of what comes before the layers, of each layer, of what comes after."""

    before: int
    layers: tuple[int, ...]
    after: int


def _matrices(module: nn.Module, config: Config) -> int:
    """Count two operations for each weight of a matrix that a token meets; looking up an embedding is free."""
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for weight in part.parameters(recurse=False):
            if weight.ndim == 3 and chosen:
                total += 2 * weight[0].numel() * min(chosen, weight.shape[0])
            elif weight.ndim >= 2:
                total += 2 * weight.numel()
    return total


def _measure(config: Config, sequence_length: int) -> _Work:
    whole = skeleton(config)
    anatomy = find_decoder_parts(whole, config.num_hidden_layers)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # Scores and weighted sum take 2 x 2 operations for each earlier token: half the sequence on average.
    attention = 2 * width * (sequence_length + 1)
    layers = whole.get_submodule(anatomy.spine[-1])
    return _Work(
        sum(_matrices(whole.get_submodule(name), config) for name in anatomy.before),
        tuple(_matrices(layer, config) + attention for layer in layers.children()),
        sum(_matrices(whole.get_submodule(name), config) for name in anatomy.after),
    )


def _most_even(work: _Work, stages: int) -> list[int]:
    """Return the ends of contiguous stages of at least one layer whose slowest is as fast as can be.

    Dynamic programming over (stages, layers so far); equal maxima are broken by the sum of squares.
    """
    sums = [0]
    for layer in work.layers:
        sums.append(sums[-1] + layer)
    depth = len(work.layers)
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(stages):
        last, following = stage == stages - 1, {}
        for end in [depth] if last else range(stage + 1, depth - (stages - stage - 1) + 1):
            extra = (work.before if stage == 0 else 0) + (work.after if last else 0)
            choices = []
            for start, (slowest, squares, ends) in best.items():
                if start < end:
                    load = sums[end] - sums[start] + extra
                    choices.append((max(slowest, load), squares + load * load, [*ends, end]))
            following[end] = min(choices)
        best = following
    return best[depth][2]


def cut(
    config: Config, stages: int, boundaries: Sequence[int] | None = None, sequence_length: int = 1024
) -> tuple[Cut, ...]:
    """Cut a prepared config into stages: by estimated work, or where `boundaries` say.

    `boundaries`: number of the first layer of every stage but the first. `sequence_length`: tokens, for the work of
    attention. Raises ValueError where the model has too few layers or positions, or the boundaries make no sense.
    """
    depth, positions = config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
    if not 1 <= stages <= depth:
        raise ValueError(
            f"{stages} stages need 1 to {depth}: every stage has a layer, and the model has {depth} layers"
        )
    if positions is not None and sequence_length > positions:
        raise ValueError(f"sequences of {sequence_length} tokens do not fit max_position_embeddings = {positions}")
    if boundaries is None:
        ends = _most_even(_measure(config, sequence_length), stages)
    else:
        ends = [*boundaries, depth]
        if len(ends) != stages or any(a >= b for a, b in pairwise([0, *ends])):
            raise ValueError(
                f"boundaries {list(boundaries)} do not cut {depth} layers into {stages} stages: "
                f"{stages - 1} rising numbers from 1 to {depth - 1} are needed"
            )
    starts = [0, *ends[:-1]]
    return tuple(Cut(start, end, embeds=start == 0, head=end == depth) for start, end in zip(starts, ends, strict=True))


class SliceSize(NamedTuple):
    """Name and shape of every parameter of a slice, in its order, and how many numbers of them autocast casts."""

    shapes: dict[str, tuple[int, ...]]
    multiplied: int


def parameter_shapes(config: Config, cut: Cut) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter of a slice, in the stage's order, without taking memory for them."""
    return slice_size(config, cut).shapes


def slice_size(config: Config, cut: Cut) -> SliceSize:
    """Return the parameters of a slice, without taking memory for them."""
    part = _empty_slice(config, cut)
    shapes = {name: tuple(weight.shape) for name, weight in part.named_parameters()}
    return SliceSize(shapes, sum(part.get_parameter(name).numel() for name in multiplied_weights(part)))


def _empty_slice(config: Config, cut: Cut) -> Slice:
    whole = skeleton(config)
    return slice_decoder(whole, find_decoder_parts(whole, config.num_hidden_layers), cut, tied=False)


def forward_flops(config: Config, cuts: Sequence[Cut], sequence_length: int) -> tuple[int, ...]:
    """Estimate each slice's floating-point operations a token, forward, at this sequence length."""
    work = _measure(config, sequence_length)
    return tuple(
        sum(work.layers[cut.first_layer : cut.end_layer])
        + (work.before if cut.embeds else 0)
        + (work.after if cut.head else 0)
        for cut in cuts
    )


def build(prepared: Prepared, cut: Cut, seed: int, device: torch.device | str = "cpu") -> Slice:
    """Build one slice with its initial weights, which depend on (seed, parameter name) and not on the cut."""
    whole = skeleton(prepared.config)
    anatomy = find_decoder_parts(whole, prepared.config.num_hidden_layers)
    embedding = whole.get_submodule(anatomy.embedding)
    part = slice_decoder(whole, anatomy, cut, prepared.tied)
    initialise(whole, anatomy, seed, tied_to=embedding if prepared.tied and cut.head else None)
    return part.to(device)


@torch.no_grad()
def load(part: Slice, read: Callable[[str], Tensor | None]) -> None:
    """Fill a slice from a checkpoint.

    `read` returns the tensor of a name, or None if the checkpoint has none. It is asked for the slice's own parameters
    only, each under all the names that it may have there. Raises ValueError naming what is missing or of another shape.
    """
    wrong = []
    for name, weight in part.named_parameters():
        found = next((tensor for known in part.known_as[name] if (tensor := read(known)) is not None), None)
        if found is None:
            wrong.append(f"{name} is missing")
        elif found.shape != weight.shape:
            wrong.append(f"{name} is {list(found.shape)}, not {list(weight.shape)}")
        else:
            weight.copy_(found)
    if wrong:
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(wrong)}")


def _tiny(config: Config) -> Config:
    """Shrink a config to three layers of two heads and a vocabulary of 32, all its other choices kept."""
    tiny = copy.deepcopy(config)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shrunk: dict[str, Any] = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
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
            shrunk[name] = value[:3]
    for name, value in shrunk.items():
        if getattr(config, name, None) is not None:
            setattr(tiny, name, value)
    return tiny


_verified: set[str] = set()
"""Tiny configs, in JSON, whose families are known to run in slices."""


@torch.no_grad()
def verify_family(config: Config) -> None:
    """Check, at tiny sizes, that the stages one after the other compute what the whole model does, and causally.

    Raises ValueError naming the family where they do not: it touches activations outside its layers (rescales
    `inputs_embeds`, say), or hands them on in a form that slices cannot.
    """
    family = config.model_type
    ids = torch.arange(16).remainder(7).view(2, 8)
    changed = ids.clone()
    changed[:, -1] = 9
    try:
        tiny = _tiny(config)
        described = tiny.to_json_string(use_diff=False)
        if described in _verified:
            return
        prepared = prepare(tiny)
        parts = [build(prepared, piece, seed=0).eval() for piece in cut(prepared.config, 3, (1, 2), sequence_length=8)]
        weights = {name: weight for part in parts for name, weight in part.named_parameters()}
        with torch.random.fork_rng(devices=[]):
            whole = AutoModelForCausalLM.from_config(copy.deepcopy(prepared.config)).eval()
        whole.load_state_dict(weights, strict=False)
        expected, otherwise = (whole(input_ids=batch, use_cache=False).logits for batch in (ids, changed))
        hidden = ids
        for part in parts:
            hidden = part(hidden)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A family without a decoder would be followed by the names of two hundred that have one.
        why = str(error).partition("\nModel type should be one of")[0]
        raise ValueError(f"a {family} model does not run in slices: {why}") from error
    if list(weights) != [name for name, _ in whole.named_parameters()]:
        raise ValueError(f"the slices of a {family} model do not hold each of its weights once")
    if not torch.dist(hidden, expected) <= 1e-5 * expected.norm():
        raise ValueError(f"a {family} model computes something outside its layers that slices do not")
    if not torch.dist(otherwise[:, :-1], expected[:, :-1]) <= 1e-5 * expected.norm():
        raise ValueError(f"a {family} model looks at the tokens that it has to predict")
    _verified.add(described)
