"""The parts of a decoder, found by walking its module tree, and what of them a stage keeps.

Every decoder of transformers has one list of layers. A side module with weights that is registered before that list
feeds the first layer (embeddings). One registered after it reads the last layer (final norm, vocabulary head), even
without weights. One with buffers alone serves all layers (rotary frequencies). This needs no name of any family, except
that a final norm registered early is called so.

A slice is the whole model with every foreign part replaced by one that passes its input through (or adds nothing, for
position embeddings). Initial weights depend on (seed, module name) alone: the family's own rule initialises each module
under its own generator, on the CPU on any device.

With a subspace, stages send each other only the first k channels of a token. Every layer below the last boundary adds
to these channels alone, and only these channels of the embedding are learnt. All other channels hold fixed features of
the token, which every stage computes from the ids that travel anyway. docs/design/pipeline.md says why nothing is lost.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import shake_256
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.adapters.settings import AdapterConfig

WRITERS = frozenset(
    {"o_proj", "out_proj", "dense", "wo", "down_proj", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "w2"}
)
"""Names of the linear layers that write into the residual stream, in attention and in the feed-forward part."""


class Subspace(NamedTuple):
    """`numbers`: what travels of a token. `seed`: the run's."""

    numbers: int
    seed: int


class TokenFeatures(nn.Module):
    """The channels of the embedding that are not learnt: [..., width - k] of ids [...]."""

    def __init__(self, config: Any, subspace: Subspace) -> None:
        super().__init__()
        self._columns = isqrt(config.vocab_size - 1) + 1
        channels = config.hidden_size - subspace.numbers
        for name in ("_first", "_second"):
            signs = _signs(self._columns, channels, f"{subspace.seed}|fixed features|{name}")
            self.register_buffer(name, signs, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        first: Tensor = self._first[ids // self._columns]  # type: ignore[index]
        return first * self._second[ids % self._columns]  # type: ignore[index]


class NarrowEmbedding(nn.Embedding):
    """An embedding of which the first k channels are learnt, and the others fixed."""

    def __init__(self, whole: nn.Embedding, config: Any, subspace: Subspace) -> None:
        super().__init__(whole.num_embeddings, subspace.numbers, whole.padding_idx, device="meta")
        self.fixed = TokenFeatures(config, subspace)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat((super().forward(ids), self.fixed(ids)), -1)


class NarrowLinear(nn.Linear):
    """A linear layer that writes into the first k channels alone."""

    def __init__(self, whole: nn.Linear, subspace: Subspace) -> None:
        super().__init__(whole.in_features, subspace.numbers, whole.bias is not None, device="meta")
        self._rest = whole.out_features - subspace.numbers

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.pad(super().forward(hidden), (0, self._rest))


def constrain(whole: nn.Module, embedding: str, layers: str, config: Any, subspace: Subspace) -> None:
    """Narrow the embedding of a model without weights, and what writes into the stream in its layers."""
    table = whole.get_submodule(embedding)
    assert isinstance(table, nn.Embedding)
    whole.set_submodule(embedding, NarrowEmbedding(table, config, subspace))
    for name, part in list(whole.get_submodule(layers).named_modules()):
        writes = name.rpartition(".")[2] in WRITERS and isinstance(part, nn.Linear)
        if writes and part.out_features == config.hidden_size:
            whole.set_submodule(f"{layers}.{name}", NarrowLinear(part, subspace))


def widened(weight: Tensor, expected: tuple[int, ...], features: TokenFeatures | None) -> Tensor:
    """Return a parameter in the `expected` shape of an ordinary checkpoint. `features`: of the embedding."""
    if weight.shape == expected:
        return weight
    if features is not None:
        return torch.cat((weight, features(torch.arange(len(weight))).to(weight.dtype)), 1)
    return functional.pad(weight, (0, 0) * (weight.ndim - 1) + (0, expected[0] - len(weight)))


def _signs(rows: int, columns: int, name: str) -> Tensor:
    drawn = bytearray(shake_256(name.encode()).digest(-(-rows * columns // 8)))
    bits = torch.frombuffer(drawn, dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[: rows * columns].view(rows, columns).float().mul_(2.0).sub_(1.0)


class NotSliceableError(ValueError):
    """A model has another shape than a stack of layers that can be run apart; the text is for people."""


class Cut(NamedTuple):
    """The part of one stage: layers `first_layer` to `end_layer` (exclusive), the embeddings, the vocabulary head.

    `subspace`: what travels between this and other stages, where that is not the whole width. `adapter`: what is
    trained, where that is not the whole part.
    """

    first_layer: int
    end_layer: int
    embeds: bool
    head: bool
    subspace: Subspace | None = None
    adapter: AdapterConfig | None = None


class DecoderParts(NamedTuple):
    """Dotted names of the parts of a decoder. `before` and `after`: side modules at its ends, in call order."""

    spine: tuple[str, ...]  # the containers from the whole model ("") down to the list of layers, the last one
    before: tuple[str, ...]
    after: tuple[str, ...]
    dropouts: tuple[str, ...]
    embedding: str
    head: str
    tuples: bool = False  # whether layers return tuples, activations first


class _PassThrough(nn.Module):
    """Stands where a foreign part was, and returns what it is given."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _PassThroughInTuple(nn.Module):
    """Stands where a foreign layer was that returns a tuple: activations first."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        return (hidden_states,)


class _Nothing(nn.Module):
    """Stands where foreign position embeddings were, and adds nothing."""

    def forward(self, *given: Any, **_: Any) -> Tensor:
        # Where the others are: to take it there would stop a GPU in each pass.
        return torch.zeros((), device=next((each.device for each in given if isinstance(each, Tensor)), None))


def layer_list(whole: nn.Module, depth: int) -> str:
    """Return the name of a model's list of `depth` layers; raise NotSliceableError where it has no single one."""
    found: list[tuple[int, str]] = sorted(
        (name.count("."), name)
        for name, module in whole.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    )
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        raise NotSliceableError(
            f"{type(whole).__name__} has no single list of {depth} layers: it cannot be cut into stages"
        )
    return found[0][1]


def _name_of(whole: nn.Module, part: nn.Module | None) -> str:
    for name, module in whole.named_modules():
        if module is part:
            return str(name)
    raise NotSliceableError(f"{type(whole).__name__} has no token embedding or no vocabulary head of its own")


def find_decoder_parts(whole: Any, depth: int) -> DecoderParts:
    """Find the parts of a causal language model with `depth` layers; raise ValueError where it has another shape."""
    embedding = _name_of(whole, whole.get_input_embeddings())
    head = _name_of(whole, whole.get_output_embeddings())
    steps = layer_list(whole, depth).split(".")
    spine = tuple(".".join(steps[:length]) for length in range(len(steps) + 1))
    before: list[str] = [embedding]
    after: list[str] = []
    dropouts: list[str] = []
    for inside, following in pairwise(spine):
        container, passed = whole.get_submodule(inside), False
        if next(container.parameters(recurse=False), None) is not None:
            raise NotSliceableError(
                f"{type(container).__name__} has weights outside its parts: it cannot be cut into stages"
            )
        for child, module in container.named_children():
            name = f"{inside}.{child}".removeprefix(".")
            if name == following:
                passed = True
            elif isinstance(module, nn.Dropout):
                # Such a dropout acts on the embeddings in every family, wherever it is registered.
                dropouts.append(name)
            elif name not in (embedding, head) and _belongs_to_an_end(module, passed):
                (after if passed or child.startswith("final_") else before).append(name)
    return DecoderParts(spine, tuple(before), (*after, head), tuple(dropouts), embedding, head)


def _belongs_to_an_end(module: nn.Module, passed: bool) -> bool:
    """Say whether a side module feeds the first layer or reads the last, rather than serving all. `passed`: its place
    is behind the layers."""
    weights = next(module.parameters(), None) is not None
    return weights or (passed and next(module.buffers(), None) is None)


@torch.no_grad()
def layers_return_tuples(whole: Any, depth: int, ids: Tensor) -> bool:
    """Say whether the layers of a model return tuples, activations first; it is run to see."""
    returned: list[object] = []
    layer = whole.get_submodule(layer_list(whole, depth))[0]
    with layer.register_forward_hook(lambda _module, _inputs, output: returned.append(output)):
        whole(input_ids=ids, use_cache=False)
    return isinstance(returned[0], tuple)


def leave_out(whole: nn.Module, anatomy: DecoderParts, cut: Cut) -> None:
    """Replace every part of a model that is not in `cut`."""
    layers = whole.get_submodule(anatomy.spine[-1])
    foreign = [] if cut.embeds else [*anatomy.before, *anatomy.dropouts]
    foreign += [] if cut.head else anatomy.after
    foreign += [
        f"{anatomy.spine[-1]}.{number}"
        for number, _ in layers.named_children()
        if not cut.first_layer <= int(number) < cut.end_layer
    ]
    for name in foreign:
        gone = whole.get_submodule(name)
        adds = isinstance(gone, nn.Embedding) and name != anatomy.embedding
        in_tuple = anatomy.tuples and name.startswith(f"{anatomy.spine[-1]}.")
        stand_in = _Nothing() if adds else _PassThroughInTuple() if in_tuple else _PassThrough()
        # A family's loop may ask a layer what kind it is.
        for key, value in vars(gone).items():
            if not key.startswith("_") and isinstance(value, str | int | float) and not hasattr(stand_in, key):
                setattr(stand_in, key, value)
        whole.set_submodule(name, stand_in)


def multiplied_weights(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are multiplied and nothing else: matrices, and those of experts.

    Autocast casts matrices by itself. It leaves out the product of all experts with their tokens, which computes in
    the type that the weights have.
    """
    names = set[str]()
    for name, part in module.named_modules():
        # GPT-2's linear layers have a class of their own, which only `pipeline.partition` may import.
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
            names.update(f"{name}.{own}" for own in part._parameters if own == "weight")
        elif hasattr(part, "num_experts"):
            names.update(f"{name}.{own}" for own, weight in part.named_parameters(recurse=False) if weight.ndim == 3)
    return frozenset(names)


_PROCESS_STATE = threading.RLock()


@contextmanager
def alone_in_process() -> Iterator[None]:
    """Build a model while no other thread builds one, and leave the default generator as it was.

    Hooks on registered parameters and the default generator belong to the process, not to a thread: two threads that
    build at the same time would break each other's hooks and draw each other's initial weights.
    """
    with _PROCESS_STATE, torch.random.fork_rng(devices=[]):
        yield


def _materialise(module: nn.Module) -> None:
    """Give every weight memory on the CPU, filled with NaN so that one that no rule fills is found.

    A weight that has memory already was a buffer, and has its initial value.
    """
    for part in module.modules():
        for name, empty in list(part.named_parameters(recurse=False)):
            if not empty.is_meta:
                continue
            full = torch.full_like(empty, torch.nan, device="cpu")
            part.register_parameter(name, nn.Parameter(full, requires_grad=empty.requires_grad))


def _draw(whole: Any, module: nn.Module, name: str, seed: int) -> None:
    digest = hashlib.sha256(f"{seed}|initial weights|{name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
    whole._init_weights(module)


@torch.no_grad()
def initialise(whole: Any, anatomy: DecoderParts, seed: int, tied_to: nn.Module | None) -> None:
    """Give the weights of a carved model memory on the CPU and their initial values.

    `tied_to`: the token embedding (part of the slice or not) of which the vocabulary head starts as a copy, or None.
    """
    _materialise(whole)
    with alone_in_process():
        # A part after what it contains: a family may rescale its parts' weights (GPT-2 does).
        for name, module in reversed(list(whole.named_modules())):
            if name not in anatomy.spine and next(module.parameters(), None) is not None:
                _draw(whole, module, name, seed)
        if tied_to is not None:
            if next(tied_to.parameters()).is_meta:
                _materialise(tied_to)
                _draw(whole, tied_to, anatomy.embedding, seed)
            whole.get_parameter(f"{anatomy.head}.weight").copy_(tied_to.weight)
    unfilled = [name for name, weight in whole.named_parameters() if weight.isnan().any()]
    if unfilled:
        raise ValueError(f"{type(whole).__name__} has no rule for the initial weights of {', '.join(unfilled)}")
