"""A forward pass that waits for its gradient, and the version of the weights that it was computed with.

The masters (float32, with gradients and optimiser) are the stage's. A pass computes with a `WeightSet`: one version of
the weights as leaves of autograd. Matrices that autocast would cast anyway are there in its dtype, once for all passes
on that version; all others are the masters' own memory. A set on which a pass waits is not written to: the masters move
on to a copy.

So a backward pass can run on its forward's graph, or on one that is computed again from the input, the set and the
state of the random numbers, with the same gradient to the bit. Ordinary gradient checkpointing would take the present
weights, which is the gradient of neither version, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.activation_codec import decode, encode, gradient_seed
from pipeline.messages import ActivationCodec

T = TypeVar("T")
Masters = Mapping[str, nn.Parameter]


class WeightSet:
    """One version of the weights. `leaves`: by name; what a backward pass adds to them goes to the masters' gradients.

    `cast`: names of those that are kept in `dtype`.
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
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return leaf


class Graph(NamedTuple):
    """The graph of a pass. `leaf`: its input in the graph, None for ids; `seed`: of the input gradient's dither."""

    leaf: Tensor | None
    output: Tensor
    seed: int = 0


class PassInput(NamedTuple):
    """What a pass was computed from, so that it can be computed again.

    `hidden`: as it came. `tokens`: the ids behind it, where the slice wants them. `version`: of the weights. `random`:
    the state of the random numbers before it, None where it drew none.
    """

    hidden: Tensor
    tokens: Tensor | None
    weights: WeightSet
    version: int
    random: Tensor | None

    def check(self) -> None:
        """Raise RuntimeError if the weights are not those of the forward pass any more; no other check sees that."""
        if self.weights.version != self.version:
            raise RuntimeError("weights were changed under a forward pass that waits for its gradient")


Backward: TypeAlias = Callable[[PassInput, Graph | None, Tensor], Tensor | None]
"""Runs autograd on a graph, or first computes it again where it is None; returns the input's gradient."""


class PendingForward:
    """A forward pass that waits for its gradient. `output`: activations [b, s, width] as they travel, on the CPU.

    They are coded before they are copied to the CPU. Backward computes as if the codec were not there.
    """

    def __init__(self, codec: ActivationCodec, origin: PassInput, graph: Graph, run: Backward) -> None:
        self.output = encode(codec.down, graph.output.detach()).cpu()
        self._codec, self._shape, self._device = codec, graph.output.shape, graph.output.device
        self._origin: PassInput | None = origin
        self._graph: Graph | None = graph
        self._run, self._short = run, False

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
        """Free everything, and have no backward pass. `short`: for want of memory."""
        self._origin = self._graph = None
        self._short = short

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return that of the input, or None if the input was ids.

        Both gradients are as they travel, on the CPU. Raises ValueError if `gradient` has not the output's shape,
        RuntimeError the second time or once given up, and MemoryError where memory is short.
        """
        origin, graph, code = self._origin, self._graph, self._codec.back
        if origin is None:
            if self._short:
                raise MemoryError("this forward pass was given up for want of memory")
            raise RuntimeError("this forward pass has had its backward pass, or was given up")
        expected = [*self._shape[:-1], code.row(self._shape[-1])]
        if list(gradient.shape) != expected:
            raise ValueError(f"a gradient of {list(gradient.shape)} where {expected} is expected")
        self.give_up()
        seed = gradient_seed(self._codec, self.output)
        return self._run(origin, graph, or_memory_error(lambda: decode(code, gradient.to(self._device), seed)))


def input_gradient(codec: ActivationCodec, graph: Graph) -> Tensor | None:
    """Return the gradient that backward left at a pass's input, as it travels, None where the input was ids."""
    if graph.leaf is None:
        return None
    assert graph.leaf.grad is not None
    return encode(codec.back, graph.leaf.grad, graph.seed).cpu()


def check_targets(targets: Tensor, hidden: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless there is a token of the vocabulary for each position."""
    if targets.shape != hidden.shape[:2]:
        raise ValueError(f"targets of {list(targets.shape)} for logits of {list(hidden.shape[:2])}")
    # On a GPU an id outside the vocabulary would take the whole process down.
    if targets.min() < 0 or targets.max() >= vocabulary:
        raise ValueError(f"targets outside the vocabulary of {vocabulary}")


def chunked_cross_entropy(
    states: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor], tokens: int
) -> Tensor:
    """Return the mean loss of so many tokens at a time, and run its backward pass.

    The logits of one chunk exist at once, where all of them, their softmax and their gradients take many times the
    memory of the states.
    """
    head = states.detach().requires_grad_()
    losses = []
    for part, ids in zip(*(torch.split(each.flatten(0, 1), tokens) for each in (head, targets)), strict=True):
        loss = functional.cross_entropy(logits_of(part).float(), ids, reduction="sum") / targets.numel()
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    torch.autograd.backward(states, head.grad)
    return torch.stack(losses).sum()


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def replayed(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Draw random numbers from `state` on, if there is one, and restore the present state afterwards."""
    if state is None:
        yield
        return
    before = random_state(device)
    _set_random_state(device, state)
    try:
        yield
    finally:
        _set_random_state(device, before)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def is_shortage(error: BaseException) -> bool:
    """Say whether an error means that memory ran out: torch raises a RuntimeError for it."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said


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
