"""Which layers a stage owns, and that slice of the model, built from config and seed alone.

Stages are cut by estimated work: the vocabulary head counts, the embedding (a look-up) hardly. All arithmetic is in
integers, so every peer of a run computes the same cut.

A slice takes only its own memory: the whole model is built with weights on the meta device, where they take none, and
with real buffers. A buffer that checkpoints hold (the bias by which DeepSeek-V3 chooses experts) becomes a parameter
without gradient, so that no number of a `state_dict` is lost. Some families cannot be cut, because they touch the
activations outside their layers: `verify_family` tries it at small sizes, and compares with the whole model.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from pipeline.adapters import frozen_weights
from pipeline.adapters.lora import FrozenSize, adapt, begin, frozen_size, targets_of
from pipeline.adapters.settings import AdapterConfig
from pipeline.decoder_slice import (
    Cut,
    DecoderParts,
    NotSliceableError,
    Subspace,
    TokenFeatures,
    alone_in_process,
    constrain,
    find_decoder_parts,
    initialise,
    layers_return_tuples,
    leave_out,
    multiplied_weights,
    widened,
)
from pipeline.forward_pass import Slice
from pipeline.model_config import Config, Prepared, longest_sequence, prepare, tiny_config

_DRAWS = ("normal_", "uniform_", "kaiming_uniform_")  # by which torch's modules draw their first weights


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Move every weight to the meta device as soon as a module of this thread registers it; buffers stay real.

    Meanwhile nothing is drawn for weights there: that would take torch a quarter to two thirds of the time of a model.
    """
    thread = threading.get_ident()

    def move(_module: nn.Module, _name: str, weight: nn.Parameter | None) -> Any:
        if weight is None or threading.get_ident() != thread:
            return None
        moved = nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)
        # The weight counts as initialised: to draw a value that is thrown away would take most of the time.
        moved._is_hf_initialized = True  # type: ignore[attr-defined]
        return moved

    def real_alone(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda weight, *rest, **named: weight if weight.is_meta else draw(weight, *rest, **named)

    with alone_in_process():
        hook, draws = register_module_parameter_registration_hook(move), {name: getattr(init, name) for name in _DRAWS}
        try:
            vars(init).update({name: real_alone(draw) for name, draw in draws.items()})
            yield
        finally:
            vars(init).update(draws)
            hook.remove()


def skeleton(config: Config) -> Any:
    """Build the whole causal language model with real buffers and weights that take no memory."""
    if config.tie_word_embeddings:
        raise ValueError("this config ties the vocabulary head to the embedding: prepare it first")
    with _weights_on_meta():
        whole = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    _keep_buffers(whole)
    return whole


def _keep_buffers(whole: nn.Module) -> None:
    """Make every buffer of the `state_dict` a parameter without gradient; raise NotSliceableError if it is no float."""
    for module in whole.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if not buffer.is_floating_point():
                raise NotSliceableError(f"{type(module).__name__} keeps {name}, numbers that are not floating-point")
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(buffer.float(), requires_grad=False))


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


def _measure(config: Config, sequence_length: int, subspace: Subspace | None = None) -> _Work:
    whole = skeleton(config)
    anatomy = find_decoder_parts(whole, config.num_hidden_layers)
    if subspace is not None:
        constrain(whole, anatomy.embedding, anatomy.spine[-1], config, subspace)
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
        for end in [depth] if last else range(stage + 1, depth):
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
    depth, positions = config.num_hidden_layers, longest_sequence(config)
    if not 1 <= stages <= depth:
        raise ValueError(
            f"{stages} stages need 1 to {depth}: every stage has a layer, and the model has {depth} layers"
        )
    if positions is not None and sequence_length > positions:
        raise ValueError(f"sequences of {sequence_length} tokens do not fit the model's longest, {positions}")
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
    """Name and shape of every parameter of a slice, in its order, and how many numbers of them are multiplied.

    `matrices`: shapes of those that its decoder layers multiply by.
    `frozen`: of the weights that are no parameters, because adapters are trained in their place.
    """

    shapes: dict[str, tuple[int, ...]]
    multiplied: int
    matrices: tuple[tuple[int, ...], ...]
    frozen: FrozenSize


def slice_size(config: Config, cut: Cut) -> SliceSize:
    """Return the parameters of a slice, in the stage's order, without taking memory for them."""
    part = empty_slice(config, cut)
    shapes = {name: tuple(weight.shape) for name, weight in part.named_parameters()}
    multiplied = sum(part.get_parameter(name).numel() for name in multiplied_weights(part))
    matrices = tuple(shapes[name] for name in part.layer_matrices())
    return SliceSize(shapes, multiplied, matrices, frozen_size(part))


def adapter_targets(config: Config) -> list[str]:
    """Return the names of the linear layers of a model that may have adapters."""
    whole = skeleton(config)
    return targets_of(whole, find_decoder_parts(whole, config.num_hidden_layers).spine[-1])


def _slice_decoder(whole: Any, anatomy: DecoderParts, cut: Cut) -> Slice:
    """Take the parts of `cut` out of `whole`, which is used up."""
    if not cut.head and whole.base_model is whole:
        raise NotSliceableError(f"{type(whole).__name__} has no model below its head")
    if cut.subspace is not None and not cut.head:
        constrain(whole, anatomy.embedding, anatomy.spine[-1], whole.config, cut.subspace)
    leave_out(whole, anatomy, cut)
    if cut.adapter is not None:
        adapt(whole, anatomy.spine[-1], cut.adapter)
    return Slice(whole, cut, anatomy.head)


def empty_slice(config: Config, cut: Cut) -> Slice:
    """Return a slice of a prepared config whose weights take no memory."""
    whole = skeleton(config)
    anatomy = find_decoder_parts(whole, config.num_hidden_layers)
    return _slice_decoder(whole, anatomy._replace(tuples=_layers_return_tuples(config)), cut)


def forward_flops(config: Config, cuts: Sequence[Cut], sequence_length: int) -> tuple[int, ...]:
    """Estimate each slice's floating-point operations a token, forward, at this sequence length."""
    free, subspace = _measure(config, sequence_length), cuts[0].subspace
    narrow = free if subspace is None else _measure(config, sequence_length, subspace)
    return tuple(
        sum((work := free if cut.head else narrow).layers[cut.first_layer : cut.end_layer])
        + (work.before if cut.embeds else 0)
        + (work.after if cut.head else 0)
        for cut in cuts
    )


def build(prepared: Prepared, cut: Cut, seed: int, device: torch.device | str = "cpu") -> Slice:
    """Build one slice with its initial weights, which depend on (seed, parameter name) and not on the cut.

    Where adapters are trained, the frozen weights are zero (`pipeline.adapters.frozen_weights.load`).
    """
    with alone_in_process():
        whole = skeleton(prepared.config)
        anatomy = find_decoder_parts(whole, prepared.config.num_hidden_layers)
        anatomy = anatomy._replace(tuples=_layers_return_tuples(prepared.config))
        embedding = whole.get_submodule(anatomy.embedding)
        part = _slice_decoder(whole, anatomy, cut)
        if cut.adapter is not None:
            begin(part, seed, device)
            return part.to(device)
        initialise(whole, anatomy, seed, tied_to=embedding if prepared.tied and cut.head else None)
    return part.to(device)


def folded(config: Config, cut: Cut, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a slice's weights in the shapes of an ordinary checkpoint; all but the folded ones are no copies."""
    if cut.subspace is None or cut.head:
        return dict(weights)
    whole = skeleton(config)
    embedding = f"{find_decoder_parts(whole, config.num_hidden_layers).embedding}.weight"
    features = TokenFeatures(config, cut.subspace)
    return {
        name: widened(weight, tuple(whole.get_parameter(name).shape), features if name == embedding else None)
        for name, weight in weights.items()
    }


def family_notes(config: Config) -> list[str]:
    """Say in phrases what training here leaves out of a family: weights that it does not move, balanced experts."""
    weights = skeleton(config).named_parameters()
    fixed = sorted({name.rpartition(".")[2] for name, weight in weights if not weight.requires_grad})
    notes = [f"{name} stays as it came" for name in fixed]
    if getattr(config, "num_experts_per_tok", None):
        notes.append("nothing balances the load of its experts")
    return notes


_tuples: dict[type, bool] = {}  # of which families the layers return tuples


def _layers_return_tuples(config: Config) -> bool:
    if type(config) not in _tuples:
        tiny = prepare(tiny_config(config)).config
        with alone_in_process():
            whole = AutoModelForCausalLM.from_config(tiny).eval()
        _tuples[type(config)] = layers_return_tuples(
            whole, tiny.num_hidden_layers, torch.zeros(1, 2, dtype=torch.int64)
        )
    return _tuples[type(config)]


@contextmanager
def _whole(prepared: Prepared) -> Iterator[Any]:
    """Build an ordinary model; in the body random numbers are the same each time."""
    with alone_in_process():
        whole = AutoModelForCausalLM.from_config(copy.deepcopy(prepared.config)).eval()
        torch.default_generator.manual_seed(0)
        yield whole


_verified: set[str] = set()  # tiny configs, in JSON, whose families are known to run in slices


@torch.no_grad()
def verify_family(config: Config) -> None:
    """Check, at tiny sizes, that the stages one after the other compute what the whole model does, and causally.

    Raises NotSliceableError naming the family where they do not: it touches activations outside its layers (rescales
    `inputs_embeds`, say), or hands them on in a form that slices cannot. What a model raises that cannot be built as a
    whole either, such as KeyError of an activation that nobody knows, is raised as it is.
    """
    family = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotSliceableError(f"a {family} model is no causal language model: it predicts no next token")
    ids = torch.arange(16).remainder(7).view(2, 8)
    changed = ids.clone()
    changed[:, -1] = 9
    try:
        tiny = tiny_config(config)
        described = tiny.to_json_string(use_diff=False)
        if described in _verified:
            return
        prepared = prepare(tiny)
        parts = [build(prepared, piece, seed=0).eval() for piece in cut(prepared.config, 3, (1, 2), sequence_length=8)]
        weights = {name: weight for part in parts for name, weight in part.named_parameters()}
        with _whole(prepared) as whole:
            for fixed in (weight for weight in weights.values() if not weight.requires_grad):
                fixed.normal_()  # zeros would not show that one is missing
        whole.load_state_dict(weights, strict=False)
        expected, otherwise = (whole(input_ids=batch, use_cache=False).logits for batch in (ids, changed))
        hidden = ids
        for part in parts:
            hidden = part(hidden)
    except NotSliceableError as error:
        raise NotSliceableError(f"a {family} model cannot be cut into stages: {error}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        with _whole(prepare(tiny_config(config))):  # which raises where it is not the cut that fails
            pass
        why = "its parts do not run apart from each other, one after the other"
        raise NotSliceableError(f"a {family} model cannot be cut into stages: {why}") from error
    if sorted(weights) != sorted(whole.state_dict()):
        raise NotSliceableError(f"the slices of a {family} model do not hold each of its weights once")
    if not torch.dist(hidden, expected) <= 1e-5 * expected.norm():
        raise NotSliceableError(f"a {family} model computes something outside its layers that slices do not")
    if not torch.dist(otherwise[:, :-1], expected[:, :-1]) <= 1e-5 * expected.norm():
        raise NotSliceableError(f"a {family} model looks at the tokens that it has to predict")
    _verified.add(described)


@torch.no_grad()
def verify_rows(config: Config) -> None:
    """Check, at tiny sizes, that rows which share a sequence do not see each other; raise ValueError naming the family.

    Attention has to end where positions begin anew, in every stage.
    """
    prepared = prepare(tiny_config(config))
    pieces = cut(prepared.config, 3, (1, 2), sequence_length=8)
    with alone_in_process():
        torch.default_generator.manual_seed(0)
        parts = [build(prepared, piece, seed=0).eval() for piece in pieces]
        for weight in [weight for part in parts for weight in part.parameters()]:
            weight.add_(0.1 * torch.randn_like(weight))  # what is small at first may see other rows too
    ids = torch.arange(16).remainder(7).view(2, 8)
    lengths = ([3, 5], [6, 2])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])

    def logits(ids: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = ids
        for part in parts:
            hidden = part(hidden, positions=positions)
        return hidden

    apart = [
        torch.cat([logits(row) for row in torch.split(sequence[None], rows, 1)], 1)
        for sequence, rows in zip(ids, lengths, strict=True)
    ]
    expected = torch.cat(apart)
    try:
        alike = torch.dist(logits(ids, positions), expected) <= 1e-5 * expected.norm()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        alike = torch.tensor(False)
    if not alike:
        raise ValueError(f"a {config.model_type} model does not end attention where positions begin anew")


@torch.no_grad()
def verify_subspace(config: Config) -> None:
    """Check, at tiny sizes, that a family's layers write where a subspace lets them; raise ValueError naming it.

    Stages hand on the whole stream in a subspace: folded into one model, they compute the same.
    """
    prepared = prepare(tiny_config(config))
    subspace = Subspace(prepared.config.hidden_size // 2, 0)
    cuts = [piece._replace(subspace=subspace) for piece in cut(prepared.config, 3, (1, 2), sequence_length=8)]
    parts = [build(prepared, piece, seed=0).eval() for piece in cuts]
    with _whole(prepared) as whole:
        for weight in [weight for part in parts for weight in part.parameters()]:
            weight.add_(0.1 * torch.randn_like(weight))  # what begins at zero may write elsewhere too
    for part in parts:
        whole.load_state_dict(folded(prepared.config, part.cut, dict(part.named_parameters())), strict=False)
    hidden = ids = torch.arange(16).remainder(7).view(2, 8)
    for part in parts:
        hidden = part(hidden, ids)
    expected = whole(input_ids=ids, use_cache=False).logits
    if not torch.dist(hidden, expected) <= 1e-5 * expected.norm():
        raise ValueError(
            f"a {config.model_type} model cannot be trained with a subspace: something else than the linear layers "
            "that are known writes into its activations, or rescales them"
        )


@torch.no_grad()
def verify_adapters(config: Config, adapter: AdapterConfig) -> None:
    """Check, at tiny sizes, that a family computes the same with frozen weights; raise ValueError naming it.

    Adapters that have not been trained add nothing.
    """
    prepared = prepare(tiny_config(config))
    (piece,) = cut(prepared.config, 1, sequence_length=8)
    whole = build(prepared, piece, seed=0).eval()
    part = build(prepared, piece._replace(adapter=replace(adapter, base="float32")), seed=0).eval()
    frozen_weights.load(part, whole.named_parameters())
    ids = torch.arange(16).remainder(7).view(2, 8)
    expected = whole(ids)
    if not torch.dist(part(ids), expected) <= 1e-5 * expected.norm():
        raise ValueError(f"a {config.model_type} model cannot be trained by adapters: its linear layers do more")
