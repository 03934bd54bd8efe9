"""One stage's forward and backward passes of a microbatch, and the version of the weights that they compute with.

The masters are float32, or split into bfloat16 and the 8 bits below (`pipeline.hardware.split_weights`). Gradients of
float32 masters add up in float32, those of split ones in bfloat16 (`pipeline.stage`). A pass computes with a
`WeightSet`: one version of the weights as leaves of autograd. A set on which a pass waits is not written to: the
masters move on to a copy. So each backward pass runs on the weights of its forward pass.

At most `graphs` autograd graphs are kept. For other passes backward computes the graph again from the input, the set
and the state of the random numbers, with the same gradient to the bit. Ordinary gradient checkpointing would take the
present weights, which is the gradient of neither version, without an error.

A stage that has no room for the graph of a whole pass (`by_layers`) keeps the input of each layer instead (gradient
checkpointing by layers). Backward computes one layer after the other again, likewise from the set of the pass.

If memory runs out, all graphs are dropped and none is kept at first; every `CALM_WINDOWS` windows without another
shortage, one more may be kept. A forward pass is tried again. A backward pass may have added a part of its gradient:
the step of its window is skipped, and the microbatch gets MemoryError. The step is skipped likewise where torch fails
for another reason.

In float16 a backward pass is multiplied by a factor (`pipeline.hardware.loss_scale`), and so are the gradients of its
window. If the input's gradient overflows, the pass runs again with half the factor, and the step is skipped. A stage
whose activations overflow computes in float32 from then on.

All methods run in the stage's one device thread, so nothing is locked. Inputs and outputs are on the CPU, activations
and gradients in the run's codec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline import activation_codec
from pipeline.adapters import frozen_weights
from pipeline.decoder_slice import Cut, TokenFeatures, layer_list, multiplied_weights
from pipeline.hardware.device_type import DEVICE_TYPES, is_shortage
from pipeline.hardware.loss_scale import LossScale
from pipeline.hardware.split_weights import split
from pipeline.messages import ACTIVATION_CODECS, UNLEARNT, Gradient

T = TypeVar("T")
Masters = Mapping[str, nn.Parameter]
LOGITS = 2**24
"""The loss of a microbatch with more logits is computed in chunks, each in the memory that so many take at once."""
LOGIT_BYTES = 16  # what a logit takes where the loss is computed at once: itself, its softmax and the gradients of both
_PIECE = 2**22  # logits of a chunk that are float32 at a time
CALM_WINDOWS = 8
"""Memory may have been short because of another program for a while, and a shortage costs a window at most."""


class Known(NamedTuple):
    """What the targets of a microbatch say of its input.

    `tokens`: the ids behind activations that come in a subspace. `positions`: of tokens in their rows, where several
    rows share a sequence.
    """

    tokens: Tensor | None = None
    positions: Tensor | None = None


class Slice(nn.Module):
    """One stage's part of a decoder, under the parameter names of the whole. `head`: that of its vocabulary head.

    `fixed`: what it knows of a token whose activations come in a subspace.
    """

    def __init__(self, whole: Any, cut: Cut, head: str) -> None:
        super().__init__()
        for name, child in whole.named_children():
            self.add_module(name, child)
        # In a tuple, so that the model that we call is not registered as a part of us under a second name.
        self._whole = (whole,)
        self.cut = cut
        self.head = head
        subspace = None if cut.embeds else cut.subspace
        self.fixed = None if subspace is None else TokenFeatures(whole.config, subspace)

    def compute_layers_again(self) -> None:
        """Have each layer keep its input alone for the backward pass, and compute itself again there.

        It takes the weights that it was called with, whatever the module holds by then.
        """
        (whole,) = self._whole
        layers = whole.get_submodule(self._layers())
        for layer in list(layers)[self.cut.first_layer : self.cut.end_layer]:
            _compute_again(layer)

    def layer_matrices(self) -> list[str]:
        """Return the names of the matrices that its decoder layers multiply by, in order; those of experts as well."""
        inside, multiplied = f"{self._layers()}.", multiplied_weights(self)
        return [name for name, _ in self.named_parameters() if name.startswith(inside) and name in multiplied]

    def _layers(self) -> str:
        (whole,) = self._whole
        return layer_list(whole, int(whole.config.num_hidden_layers))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The whole model is not a part of us; what it holds itself must come along when we are moved.
        (whole,) = self._whole
        whole._buffers |= {name: fn(buffer) for name, buffer in whole._buffers.items() if buffer is not None}
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def forward(
        self, hidden: Tensor, tokens: Tensor | None = None, positions: Tensor | None = None, *, logits: bool = True
    ) -> Tensor:
        """Map ids [b, s] (int64, an embedding stage) or [b, s, width] to [b, s, width], or to logits at the head.

        `tokens`, `positions`: as in `Known`. Without `logits`: to what the head is given.
        """
        (whole,), logits = self._whole, logits and self.cut.head
        called = whole if logits else whole.base_model
        # Without a mask, attention ends where positions begin anew.
        in_rows = {} if positions is None else {"position_ids": positions}
        if self.cut.embeds:
            result = called(input_ids=hidden, use_cache=False, **in_rows)
        else:
            if self.fixed is not None:
                hidden = torch.cat((hidden, self.fixed(tokens)), -1)
            result = called(inputs_embeds=hidden, use_cache=False, **in_rows)
        output: Tensor = result.logits if logits else result.last_hidden_state
        subspace = None if self.cut.head else self.cut.subspace
        return output if subspace is None else output[..., : subspace.numbers]


def _compute_again(layer: nn.Module) -> None:
    once = layer.forward

    def plain(weights: dict[str, Tensor], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        layer.forward = once
        try:
            return functional_call(layer, weights, args, named)
        finally:
            layer.forward = kept

    def kept(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*args, **named)
        return checkpoint(plain, dict(layer.named_parameters()), args, named, use_reentrant=False)

    layer.forward = kept


class WeightSet:
    """One version of the weights. `leaves`: by name; what a backward pass adds to them goes to the masters' gradients.

    `cast`: names of those that are kept in `dtype` beside their masters.
    """

    def __init__(self, masters: Masters, cast: Collection[str] = (), dtype: torch.dtype = torch.float32) -> None:
        self._masters, self._cast, self._dtype = masters, cast, dtype
        self.leaves = {
            # Not detach(): it would share its count of writes with the master, which moves on to other memory.
            name: _leaf(master.data.to(dtype) if name in cast else master.data, master)
            for name, master in masters.items()
        }
        self._left_at: int | None = None

    @property
    def version(self) -> int:
        """How often the weights have been written to, the masters' memory being this set's; fixed once they left."""
        if self._left_at is not None:
            return self._left_at
        return sum(master._version for master in self._masters.values())

    @torch.no_grad()
    def successor(self) -> WeightSet:
        """Leave this set to the passes that wait on it: move the masters to a copy, and return a set of that.

        Nothing has changed if there is no memory for it.
        """
        version = self.version
        own = {name: master.data.clone() for name, master in self._masters.items() if name not in self._cast}
        before = {name: self._masters[name].data for name in own}
        for name, copy in own.items():
            self._masters[name].data = copy
        try:
            following = WeightSet(self._masters, self._cast, self._dtype)
        except BaseException:
            for name, tensor in before.items():
                self._masters[name].data = tensor
            raise
        self._left_at = version
        return following

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters, which have changed; no pass may wait on this set."""
        for name in self._cast:
            self.leaves[name].copy_(self._masters[name])


def _leaf(values: Tensor, master: nn.Parameter) -> Tensor:
    leaf = values.requires_grad_(master.requires_grad)

    def hand_over(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.grad_dtype)
        else:
            master.grad.add_(gradient)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return leaf


class Graph(NamedTuple):
    """The graph of a pass. `leaf`: its input in the graph, None for ids."""

    leaf: Tensor | None
    output: Tensor


class PassInput(NamedTuple):
    """The inputs of a pass, from which it can be computed again.

    `hidden`: as it came. `version`: of the weights. `random`: the state of the random numbers before it, None where it
    drew none. `seed`: returns that of the dither of the input's gradient.
    """

    hidden: Tensor
    known: Known
    weights: WeightSet
    version: int
    random: Tensor | None
    seed: Callable[[], int]


class PendingForward:
    """A forward pass that waits for its gradient. `output`: activations [b, s, width] as they travel, on the CPU.

    They are coded before they are copied to the CPU. Backward computes as if the codec were not there.
    """

    def __init__(self, stage: StagePasses, origin: PassInput, graph: Graph) -> None:
        self.output = activation_codec.encode(stage.codec.down, graph.output.detach()).cpu()
        self._seed = activation_codec.gradient_seed_beside(stage.codec, self.output)
        self._stage, self._shape, self._short = stage, graph.output.shape, False
        self._origin: PassInput | None = origin
        self._graph: Graph | None = graph

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def waits_on(self, weights: WeightSet) -> bool:
        """Say whether a backward pass on this set may still come."""
        return self._origin is not None and self._origin.weights is weights

    def drop_graph(self) -> None:
        """Free the graph; backward computes it again."""
        self._graph = None

    def give_up(self, *, short: bool = False) -> None:
        """Free everything, and have no backward pass. `short`: for want of memory, or of float16's range."""
        self._origin = self._graph = None
        self._short = short

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return that of the input, or None if the input was ids.

        Both gradients are as they travel, on the CPU. Raises ValueError if `gradient` has not the output's shape,
        RuntimeError the second time or once given up, and MemoryError where memory is short, or float16's range.
        """
        origin, graph = self._origin, self._graph
        if origin is None:
            if self._short:
                raise MemoryError("this forward pass was given up for want of memory or range")
            raise RuntimeError("this forward pass has had its backward pass, or was given up")
        expected = [*self._shape[:-1], self._stage.codec.back.row(self._shape[-1])]
        if list(gradient.shape) != expected:
            raise ValueError(f"a gradient of {list(gradient.shape)} where {expected} is expected")
        self.give_up()
        return self._stage.backward(origin, graph, gradient, self._seed())


class StageSettings(NamedTuple):
    """How a stage computes. `autocast`: what the matrices are multiplied in; None: float32.

    `graphs`: how many passes that wait for their gradient may keep their graph; None for all. `by_layers`: a graph is
    the inputs of the layers alone. `moments_beside`: bytes of coded moments that lie in main memory.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    graphs: int | None = None
    by_layers: bool = False
    moments_beside: int = 0


class StagePasses:
    """One stage's slice, and the passes of microbatches. `first`: its input is ids; `last`: its output is logits."""

    def __init__(
        self, module: Slice, settings: StageSettings, *, first: bool, last: bool, codec: str, coded: bool = False
    ) -> None:
        """Split the multiplied weights where they are computed with in bfloat16 and the optimiser keeps codes."""
        device, autocast, graphs, self._by_layers, _ = settings
        self._module = module.to(device).train()
        if self._by_layers:
            module.compute_layers_again()
        self._first, self._last, self._device, self._autocast = first, last, device, autocast
        self.codec = ACTIVATION_CODECS[codec]
        self._masters = dict(self._module.named_parameters())  # with the gradients of the window
        self._remainders: dict[nn.Parameter, Tensor] = {}  # of the masters that are split
        cast = frozenset[str]() if autocast is None else multiplied_weights(module)
        if coded and autocast is torch.bfloat16:
            for name in (name for name in self._masters if name in cast):
                master = self._masters[name]
                master.data, self._remainders[master] = split(master.data)
                master.grad_dtype = torch.bfloat16
            cast = frozenset()
        self._set = WeightSet(self._masters, cast, autocast or torch.float32)
        self._waiting: WeakSet[PendingForward] = WeakSet()  # passes that have had no backward pass and were not dropped
        self._type = DEVICE_TYPES[device.type]
        self._graphs = self._most_graphs = math.inf if graphs is None else graphs
        self._calm_windows = 0
        self._plain: bool | None = None
        self._scale = LossScale(autocast)
        self._spoiled = False  # a backward pass of this window has failed half-way, or overflowed
        self._counts: Counter[str] = Counter()

    def load_frozen(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put weights of a checkpoint, by the names of their parameters, where adapters are trained over them."""
        frozen_weights.load(self._module, weights)
        self._plain = None  # with a frozen head of zeros, all logits are alike

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> PendingForward:
        """Run ids [b, s] (int64, the first stage) or activations, as they came, through every stage but the last.

        `targets`: as `loss` has them; they say where rows begin. Where activations come in a subspace they have each
        sequence's first token before them, [b, s + 1].
        """
        if self._last:
            raise ValueError("the last stage has no forward pass without a loss")
        known = self._known(hidden, targets)
        waiting = self._with_room(lambda: self._pass(hidden, known))
        if sum(each.has_graph for each in list(self._waiting)) >= self._graphs:
            waiting.drop_graph()
        self._waiting.add(waiting)
        self._counts["forwards"] += 1
        return waiting

    def _known(self, hidden: Tensor, targets: Tensor | None) -> Known:
        """Return what the targets that came with a microbatch say of it."""
        if targets is None:
            return Known()
        return Known(
            None if self._module.fixed is None else activation_codec.ids_of(targets[:, :-1]),
            activation_codec.positions_in_rows(targets[:, -hidden.shape[1] :]),
        )

    def _pass(self, hidden: Tensor, known: Known) -> PendingForward:
        before, weights, seed = self._type.random_state(self._device), self._set, self._input_seed(hidden)
        graph = self._graph(hidden, weights, known)
        if self._scale.adapts and not _is_finite(graph.output):
            self._compute_in_float32()
            return self._pass(hidden, known)
        drew = not torch.equal(before, self._type.random_state(self._device))
        origin = PassInput(hidden, known, weights, weights.version, before if drew else None, seed)
        return PendingForward(self, origin, graph)

    def _input_seed(self, hidden: Tensor) -> Callable[[], int]:
        return (lambda: 0) if self._first else activation_codec.gradient_seed_beside(self.codec, hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> Gradient:
        """Run the last stage forward and backward: cross-entropy against marked `targets` [b, s], int64.

        Where activations come in a subspace: [b, s + 1], each sequence's first token before them. The gradients are of
        the sum over the tokens that are learnt, divided by b * s. Raises ValueError if `targets` have another shape or
        are not in the vocabulary.
        """
        if not self._last:
            raise ValueError("only the last stage has a loss")
        self._counts["forwards"] += 1
        known, seed = self._known(hidden, targets), self._input_seed(hidden)
        wanted = targets if known.tokens is None else targets[:, 1:]
        graph = self._spoiling(lambda: self._loss(hidden, wanted, known))
        while self._has_overflowed(graph):
            graph = self._spoiling(lambda: self._loss(hidden, wanted, known))
        self._count_backward()
        counted = activation_codec.learnt(wanted)
        mean = self._spoiling(graph.output.item) * wanted.numel() / max(1, counted)
        return Gradient(hidden=self._input_gradient(graph, seed), loss=mean, tokens=counted)

    def _head(self) -> tuple[Callable[[Tensor], Tensor], int]:
        """Return what computes logits of what the head is given, and the size of the vocabulary."""
        name = self._module.head
        head, weights = self._module.get_submodule(name), self._set.leaves
        own = {key.removeprefix(f"{name}."): leaf for key, leaf in weights.items() if key.startswith(f"{name}.")}

        def logits_of(states: Tensor) -> Tensor:
            with self._precision():
                logits: Tensor = functional_call(head, own, (states,))
                return logits

        return logits_of, len(own["weight"] if own else head.get_buffer("weight"))

    def _loss(self, hidden: Tensor, targets: Tensor, known: Known) -> Graph:
        logits_of, vocabulary = self._head()
        targets = self._as_targets(targets, hidden, vocabulary)
        if targets.numel() * vocabulary > LOGITS and self._has_plain_head(hidden, known.tokens, logits_of):
            graph = self._graph(hidden, self._set, known, logits=False)
            row = vocabulary * (self._autocast or torch.float32).itemsize
            tokens_at_once = max(1, LOGIT_BYTES * LOGITS // row)
            loss = _chunked_cross_entropy(graph.output, targets, logits_of, tokens_at_once, self._scale.value)
        else:
            graph = self._graph(hidden, self._set, known)
            logits, wanted = graph.output.float().flatten(0, 1), targets.flatten()
            loss = functional.cross_entropy(logits, wanted, ignore_index=UNLEARNT, reduction="sum") / len(wanted)
            torch.autograd.backward(loss, torch.full_like(loss, self._scale.value))
        return graph._replace(output=loss)

    def _as_targets(self, targets: Tensor, hidden: Tensor, vocabulary: int) -> Tensor:
        """Return marked targets as the loss takes them; raise ValueError for those that `loss` refuses."""
        if targets.shape != hidden.shape[:2]:
            raise ValueError(f"targets of {list(targets.shape)} for logits of {list(hidden.shape[:2])}")
        # On a GPU an id outside the vocabulary would take the whole process down.
        if activation_codec.ids_of(targets).max() >= vocabulary:
            raise ValueError(f"targets outside the vocabulary of {vocabulary}")
        return activation_codec.as_targets(targets.to(self._device))

    @torch.no_grad()
    def _has_plain_head(self, hidden: Tensor, tokens: Tensor | None, logits_of: Callable[[Tensor], Tensor]) -> bool:
        """Say whether the logits are the head's output; some families scale or cap them."""
        if self._plain is None:
            few = Known(None if tokens is None else tokens[:1, :2])
            whole, states = (self._without_graph(hidden[:1, :2], few, logits=each) for each in (True, False))
            if whole.isnan().any():
                return True  # then so is the loss; and it says nothing of the head, which computes in float32 next
            self._plain = torch.equal(whole, logits_of(states))
        return self._plain

    def activations(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the output of `forward` as it travels, without dropout; no backward pass follows, and nothing is kept.

        Raises MemoryError where memory is short, and FloatingPointError for activations that are not finite.
        """
        if self._last:
            raise ValueError("the last stage has no activations for another one")
        known = self._known(hidden, targets)

        def sent() -> Tensor:
            output = self._without_graph(hidden, known)
            if not _is_finite(output):
                raise FloatingPointError("activations that are not finite")
            return activation_codec.encode(self.codec.down, output).cpu()

        return self._with_room(sent)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each of the targets that `loss` takes, without a backward pass: the last stage's work.

        Float32 [b, s] on the CPU, 0 where a token is only given; without dropout, in the precision of the training.
        Raises MemoryError where memory is short.
        """
        if not self._last:
            raise ValueError("only the last stage has a loss")
        known = self._known(hidden, targets)
        wanted = targets if known.tokens is None else targets[:, 1:]
        return self._with_room(lambda: self._token_losses(hidden, wanted, known))

    @torch.no_grad()
    def _token_losses(self, hidden: Tensor, targets: Tensor, known: Known) -> Tensor:
        logits_of, vocabulary = self._head()
        targets = self._as_targets(targets, hidden, vocabulary)
        # In training the same logits have their gradients beside them: here more of them fit at once.
        in_parts = targets.numel() * vocabulary > LOGITS and self._has_plain_head(hidden, known.tokens, logits_of)
        output = self._without_graph(hidden, known, logits=not in_parts).flatten(0, 1)
        parts = zip(
            *(torch.split(each, max(1, LOGITS // vocabulary)) for each in (output, targets.flatten())), strict=True
        )
        losses = [
            functional.cross_entropy(
                (logits_of(part) if in_parts else part).float(), wanted, ignore_index=UNLEARNT, reduction="none"
            )
            for part, wanted in parts
        ]
        return torch.cat(losses).view(targets.shape).cpu()

    @torch.no_grad()
    def _without_graph(self, hidden: Tensor, known: Known, *, logits: bool = True) -> Tensor:
        """Return the output of a pass without dropout that has no backward pass. `hidden`: as it came."""
        self._module.eval()
        try:
            return self._graph(hidden, self._set, known, logits=logits).output
        finally:
            self._module.train()

    @torch.no_grad()
    def infer(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return activations, or logits at the last stage, without dropout, graph and codec (float32, CPU).

        `tokens`: the ids behind activations that come in a subspace. Raises MemoryError where memory is short.
        """
        self._module.eval()
        try:
            return self._with_room(lambda: self._run(hidden, self._set, Known(tokens)).cpu().float())
        finally:
            self._module.train()

    def _graph(self, hidden: Tensor, weights: WeightSet, known: Known, *, logits: bool = True) -> Graph:
        if self._first:
            return Graph(None, self._run(hidden, weights, known, logits=logits))
        leaf = activation_codec.decode(self.codec.down, hidden.to(self._device)).detach().requires_grad_()
        return Graph(leaf, self._run(leaf, weights, known, logits=logits))

    def _run(self, given: Tensor, weights: WeightSet, known: Known, *, logits: bool = True) -> Tensor:
        here = [None if each is None else each.to(self._device) for each in (given, *known)]
        with self._precision():
            output: Tensor = functional_call(self._module, weights.leaves, tuple(here), {"logits": logits})
            return output

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def backward(self, origin: PassInput, graph: Graph | None, gradient: Tensor, seed: int) -> Tensor | None:
        """Run a backward pass; return the input's gradient, None for ids. `seed`: of the dither of `gradient`."""
        if origin.weights.version != origin.version:
            # No other check sees it.
            raise RuntimeError("weights were changed under a forward pass that waits for its gradient")
        decoded = or_memory_error(lambda: activation_codec.decode(self.codec.back, gradient.to(self._device), seed))
        graph = self._scaled_backward(origin, graph, decoded)
        while self._has_overflowed(graph):
            if not self._scale.adapts:
                raise MemoryError("a gradient is beyond the range of float16")
            graph = self._scaled_backward(origin, None, decoded)
        self._count_backward()
        self._counts["stale_backwards"] += origin.weights is not self._set
        return self._input_gradient(graph, origin.seed)

    def _count_backward(self) -> None:
        self._counts["backwards"] += 1
        self._counts["recomputed"] += self._by_layers

    def _scaled_backward(self, origin: PassInput, graph: Graph | None, gradient: Tensor) -> Graph:
        if graph is None:
            graph = self._with_room(lambda: self._again(origin))
            self._counts["recomputed"] += not self._by_layers
        output, scale = graph.output, self._scale

        def backward() -> None:
            scaled = gradient * scale.value if scale.adapts else gradient
            torch.autograd.backward(output, scaled.to(output.dtype))

        self._spoiling(backward)
        return graph

    def _has_overflowed(self, graph: Graph) -> bool:
        """Say whether a backward pass was beyond the range of float16; halve the factor then, or leave float16."""
        if not self._scale.adapts:
            return False
        found = (graph.output, None if graph.leaf is None else graph.leaf.grad)
        output, gradient = self._spoiling(lambda: [each is None or _is_finite(each) for each in found])
        if output and gradient:
            return False
        self._counts["overflows"] += 1
        self._spoiled = True
        if not (output and self._scale.halve()):
            self._compute_in_float32()
        return True

    def _compute_in_float32(self) -> None:
        """Leave float16 for good. Passes that wait, and the step of this window, are given up."""
        for waiting in list(self._waiting):
            waiting.give_up(short=True)
        self._spoiled, self._autocast, self._scale = True, None, LossScale(None)
        self._set = WeightSet(self._masters)

    def _input_gradient(self, graph: Graph, seed: Callable[[], int]) -> Tensor | None:
        """Return the gradient that a backward pass left at its input, as it travels."""
        if graph.leaf is None:
            return None
        gradient, code, factor = graph.leaf.grad, self.codec.back, self._scale.value
        assert gradient is not None
        return self._spoiling(lambda: activation_codec.encode(code, gradient.div_(factor), seed()).cpu())

    def _again(self, origin: PassInput) -> Graph:
        now = self._type.random_state(self._device)
        if origin.random is not None:
            self._type.set_random_state(self._device, origin.random)
        try:
            return self._graph(origin.hidden, origin.weights, origin.known)
        finally:
            if origin.random is not None:
                self._type.set_random_state(self._device, now)

    def _with_room(self, forward: Callable[[], T]) -> T:
        try:
            return or_memory_error(forward)
        except MemoryError:
            self._make_room()
        return or_memory_error(forward)

    def _spoiling(self, backward: Callable[[], T]) -> T:
        """Run a backward pass; where it fails a part of it may have been added, and the window is lost."""
        try:
            return or_memory_error(backward)
        except (MemoryError, RuntimeError) as error:
            self._spoiled = True
            if isinstance(error, MemoryError):
                self._make_room()
            raise

    def _make_room(self) -> None:
        """Drop all graphs, and keep none until memory has sufficed for a while."""
        self._counts["shortages"] += 1
        self._graphs = self._calm_windows = 0
        for waiting in list(self._waiting):
            waiting.drop_graph()
        self._type.empty_cache(self._device)

    def _note_window(self) -> None:
        """Let one more graph be kept after each `CALM_WINDOWS` windows without a shortage."""
        self._calm_windows += 1
        if self._calm_windows == CALM_WINDOWS and self._graphs < self._most_graphs:
            self._graphs, self._calm_windows = self._graphs + 1, 0


def _chunked_cross_entropy(
    states: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor], tokens: int, scale: float
) -> Tensor:
    """Return the sum of the losses over the number of targets, and run its backward pass times `scale`.

    The logits of so many `tokens` exist at a time.
    """
    chunks = zip(*(torch.split(each.flatten(0, 1), tokens) for each in (states.detach(), targets)), strict=True)
    losses, gradients = zip(
        *(_chunk_cross_entropy(part, ids, logits_of, targets.numel(), scale) for part, ids in chunks), strict=True
    )
    torch.autograd.backward(states, torch.cat(gradients).view_as(states))
    return torch.stack(losses).sum()


def _chunk_cross_entropy(
    states: Tensor, ids: Tensor, logits_of: Callable[[Tensor], Tensor], count: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses over `count`, and its gradient at `states`; add those of the head's weights.

    The logits' gradient takes their place. So a chunk is long, and the head's gradient is added to few times: it is
    as large as the head, and a pass over it takes a GPU as long as many tokens do.
    """
    leaf = states.detach().requires_grad_()
    logits = logits_of(leaf)
    memory, loss = logits.detach(), torch.zeros((), device=states.device)
    rows = max(1, _PIECE // memory.shape[1])
    for part, wanted in zip(torch.split(memory, rows), torch.split(ids.unsqueeze(1), rows), strict=True):
        shares = functional.log_softmax(part, 1, dtype=torch.float32)
        counts, found = wanted >= 0, wanted.clamp(min=0)
        loss -= shares.gather(1, found).mul_(counts).sum()
        shares.exp_().scatter_add_(1, found, shares.new_full(wanted.shape, -1.0)).mul_(counts)
        torch.div(shares, count / scale, out=part)
    torch.autograd.backward(logits, memory)
    assert leaf.grad is not None
    return loss / count, leaf.grad


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def or_memory_error(function: Callable[[], T]) -> T:
    """Return what `function` returns, and raise torch's errors of memory as MemoryError."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        said = " ".join(str(error).split())[:300] or "no memory is left"
    # Out here the frames of the failure are gone, and the tensors in them.
    raise MemoryError(said)
