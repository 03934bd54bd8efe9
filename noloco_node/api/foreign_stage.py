"""A foreign module as the one stage of its run, and the host that hands it to a node.

The program computes gradients and calls `GossipOptimizer.step`. For the node that is a microbatch whose gradient has
come: its text is drawn when the program steps, its loss is what the program says, and its inner step is that of the
program's optimiser. Rounds, snapshots, catching up and checkpoints are those of every node.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from noloco_node.api.training_thread import IterationClock, TrainingThread
from noloco_node.cli.host_machine import HostDisk, MachineRequest, weight_store
from noloco_node.errors import Exit, config_error
from noloco_node.machine.interface import TrainingFailed
from noloco_node.planning.foreign_layout import ForeignWeights, foreign_layout
from noloco_node.run.config import RunConfig
from pipeline.inner_step import OptimiserState, StepReport
from pipeline.messages import Gradient

EXCHANGED = (torch.float32, torch.bfloat16)
_DIGESTED = 1024
"""Values of a frozen parameter, about, that its digests are of: a model of billions is read in a moment."""
_COMPARED = (torch.bfloat16, torch.float16)
_LISTED = 1024
"""The most frozen parameters that a run file lists: it has room for no more beside those that are trained."""


def trained_parameters(module: nn.Module, subject: str = "The module") -> dict[str, nn.Parameter]:
    """Return what requires a gradient, by name; `UserError` (CONFIG) if that is nothing, empty, or of another format.

    A compiled module has the names of the one that it was made of. `subject`: what messages call the module.
    """
    found = {name.replace("_orig_mod.", ""): each for name, each in module.named_parameters() if each.requires_grad}
    if not found:
        raise config_error(
            f"{subject} has no parameter that requires a gradient.",
            "a run exchanges what is trained, and nothing else",
            "module.requires_grad_(True), or the module that holds what is trained",
        )
    for name, each in found.items():
        if nn.parameter.is_lazy(each) or each.is_meta:
            raise config_error(
                f"The parameter {name} has no values.",
                "its module is lazy and has not computed yet, or it is on the meta device",
                "let the module compute once, or load its weights, before this call",
            )
        if each.layout is not torch.strided or not each.numel():
            raise config_error(
                f"The parameter {name} is {'sparse' if each.numel() else 'empty'}.",
                "a run exchanges parameters that have a value at each place, and one place at least",
                "the dense form of it (to_dense), or requires_grad_(False)",
            )
        if each.dtype not in EXCHANGED:
            raise config_error(
                f"The parameter {name} is {str(each.dtype).removeprefix('torch.')}.",
                "a run exchanges parameters in float32 and bfloat16",
                "keep trained parameters in float32 and compute in float16 with torch.autocast",
            )
    return found


def check_module(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> None:
    """Raise `UserError` (CONFIG) that names the first parameter in which a module is not the run's, by its shapes."""
    for problem in _differences(shapes, parameters):
        raise config_error(
            "The module is not the one that the run trains.",
            problem,
            "build it as the program did that wrote the run file, and freeze the same parameters",
        )


def _differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in found:
            yield f"it has no trained parameter {name}"
        elif tuple(found[name].shape) != shape:
            yield f"its parameter {name} is {list(found[name].shape)}, and the run's is {list(shape)}"
    for name in found:
        if name not in expected:
            yield f"its parameter {name} is trained, and the run has none of this name"


@torch.no_grad()
def frozen_digests(module: nn.Module, prefix: str) -> dict[str, str]:
    """Return, by name, digests of what a module has and does not train; names begin with `prefix`.

    The first 8 hexadecimal digits are of the SHA-256 over the shape and some thousand values at equal distances, taken
    in bfloat16; 8 more are of the same values in float16. A checkpoint in one of these formats keeps that half of its
    digest when it is loaded in a wider format. Codes, and parameters on the meta device, have the empty digest.
    """
    found = {}
    for name, each in module.named_parameters():
        if each.requires_grad:
            continue
        values, digest = each.data, ""
        if type(values) is Tensor and values.is_floating_point() and not values.is_meta:
            few, shape = values.reshape(-1)[:: max(1, values.numel() // _DIGESTED)].cpu(), repr(tuple(values.shape))
            kept = [few.to(dtype).view(torch.int16).numpy().tobytes() for dtype in _COMPARED]
            digest = "".join(hashlib.sha256(shape.encode() + each).hexdigest()[:8] for each in kept)
        found[prefix + name.replace("_orig_mod.", "")] = digest
    return found


def listed_frozen(stages: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return what a run file lists of modules, each with the beginning of its names: the first `_LISTED` digests."""
    found = (each for prefix, module in stages.items() for each in frozen_digests(module, prefix).items())
    return dict(islice(found, _LISTED))


def check_frozen(run: RunConfig, module: nn.Module, prefix: str = "") -> None:
    """Raise `UserError` (CONFIG) that names the first parameter in which a module is frozen otherwise than the run's.

    Codes are not compared, nor what a long list has left out. A run file of an earlier version has no list.
    """
    listed = run.model.foreign_frozen
    if not listed:
        return
    expected = {name: each for name, each in listed.items() if name.startswith(prefix)}
    found = frozen_digests(module, prefix)
    for name in expected if len(listed) >= _LISTED else (*expected, *found):
        own, runs = found.get(name), expected.get(name)
        if own is None or runs is None or (own and runs and own[:8] != runs[:8] and own[8:] != runs[8:]):
            raise config_error(
                "The module is not the one that the run trains.",
                f"it has no frozen parameter {name}"
                if own is None
                else f"its parameter {name} is frozen, and the run has none of this name"
                if runs is None
                else f"its frozen parameter {name} has other values than the run's",
                "load the model and the revision that the program loaded when it wrote the run file",
            )


class ForeignStage:
    """The parameters of a foreign module; implements `noloco_node.machine.interface.StageModel`.

    `due`: the inner step for which the program has computed its gradients, None once it is taken. `loss_said`: of that
    step, if the program says one. The inner optimiser's memory stays with the program.
    """

    fixed: frozenset[int] = frozenset()

    def __init__(self, parameters: Sequence[nn.Parameter], clock: IterationClock) -> None:
        self._parameters, self._clock = tuple(parameters), clock
        self.shapes = tuple(tuple(each.shape) for each in self._parameters)
        self.due: Callable[[], object] | None = None
        self.loss_said: float | None = None
        self._is_counted = False
        self.returned: object = None  # what the last inner step returned
        self.error: BaseException | None = None  # what the last inner step raised

    @property
    def has_news(self) -> bool:
        """Whether the program has gradients that no microbatch stands for yet."""
        return self.due is not None and not self._is_counted

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> NoReturn:
        raise RuntimeError("a foreign module is the first stage and the last")

    def loss(self, hidden: Tensor, targets: Tensor) -> Gradient:
        """Return what the program says of its gradient; a loss that it does not say is one over no token."""
        self._clock.charge()
        self._is_counted = True
        said = self.loss_said
        known = said is not None and math.isfinite(said)
        return Gradient(hidden=None, loss=said if said is not None and known else 0.0, tokens=targets.numel() * known)

    def step(self, learning_rate: float, microbatches: float) -> StepReport:
        """Let the program's optimiser step; its learning rate is its own."""
        due, self.due, self._is_counted = self.due, None, False
        if due is None:
            return StepReport(0.0, False)
        self.returned = self.error = None
        try:
            self.returned = due()
        except BaseException as error:  # the program's, and raised there
            self.error = error
        return StepReport(0.0, self.error is None)

    def discard(self) -> None:
        """Leave the gradients to the program; another microbatch will stand for them."""
        self._is_counted = False

    def activations(self, hidden: Tensor, targets: Tensor | None = None) -> NoReturn:
        raise RuntimeError("only the program can compute with its module")

    infer = token_losses = activations

    @torch.no_grad()
    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        # Those of gossip lie one value behind the other, whatever strides the program's have.
        rows = torch.contiguous_format
        copies = (
            _finite(each.detach().to("cpu", torch.float32, copy=True, memory_format=rows)) for each in self._own()
        )
        return tuple([own.sub_(other).bfloat16() for own, other in zip(copies, less, strict=True)] if less else copies)

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        for own, given in zip(self._own(), weights, strict=True):
            own.copy_(given)

    @torch.no_grad()
    def correct(self, delta: Sequence[Tensor]) -> None:
        for own, given in zip(self._own(), delta, strict=True):
            own.add_(given.to(own.device))

    def current_weights(self) -> tuple[Tensor, ...]:
        return tuple([_finite(each.detach().to("cpu").contiguous()) for each in self._own()])

    def _own(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters; raise `TrainingFailed` where the program has given one another shape meanwhile."""
        for each, shape in zip(self._parameters, self.shapes, strict=True):
            if each.shape != shape:
                raise TrainingFailed(
                    "The module has changed since it joined.",
                    why=f"a parameter of the shape {list(shape)} has the shape {list(each.shape)} now",
                    hint="resize parameters before GossipOptimizer is made, and let nothing shard them",
                    code=Exit.CONFIG,
                )
        return self._parameters

    def optimiser_state(self) -> OptimiserState:
        return OptimiserState(0, ())

    def load_optimiser_state(self, state: OptimiserState) -> None:
        """Take nothing: the program keeps the memory of its optimiser."""

    def statistics(self) -> dict[str, int | float]:
        return {}


def _finite(values: Tensor) -> Tensor:
    """Return a parameter's values; raise `TrainingFailed` where one is no finite number, before it is saved or sent."""
    if not all(each.isfinite() for each in values.aminmax()):
        raise TrainingFailed(
            "The module holds what is no finite number.",
            why=f"a step of the program's optimiser has made a parameter of the shape {list(values.shape)} so",
            hint="leave out steps by a loss that is no finite number, and join with the same home again: it has the"
            " weights of before",
            code=Exit.CONFIG,
        )
    return values


class StepSignal:
    """Stands for the text of a run: the next sequences are drawn once the program has gradients of them.

    Implements `noloco_node.machine.interface.Text`.
    """

    def __init__(self, run: RunConfig, stage: ForeignStage) -> None:
        batch, length = run.pipeline.ids_shape
        self._sequences, self.stage = torch.zeros((batch, length + 1), dtype=torch.int64), stage
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Look at the stage again; called in the loop."""
        self._changed.set()

    async def draw(self) -> Tensor:
        # What counts is the stage: a microbatch may be lost, where a node joins its stage again.
        while not self.stage.has_news:
            self._changed.clear()
            await self._changed.wait()
        return self._sequences

    def position(self) -> dict[str, Any]:
        return {}

    async def restore(self, position: Mapping[str, Any]) -> bool:
        return not position

    def news(self) -> list[str]:
        return []


class ForeignHost(HostDisk):
    """What the program gives to a node: its thread, its module, the home on the disk; to be closed."""

    def __init__(
        self, request: MachineRequest, signal: StepSignal, thread: TrainingThread, clock: IterationClock, peer: str
    ) -> None:
        super().__init__(request, peer)
        self._signal = signal
        signal.stage.discard()  # a microbatch of the node before us is lost
        self.device = clock.device(thread)
        store = weight_store(request)
        assert store is not None, "the run file of a foreign module lists its first weights"
        self.first_weights = ForeignWeights(foreign_layout(request.recipe.run).shapes, store)

    def close(self) -> None:
        self.device.close()

    def build(self, stage: int) -> ForeignStage:
        return self._signal.stage

    async def open_text(self) -> StepSignal:
        return self._signal
