"""Stages that a program builds, as those of a run: a node asks for the module of its stage, and trains it as any other.

A stage maps one tensor to one: token ids [b, s], int64, or what the stage before it returned, [b, s, width], to [b, s,
width]; the last stage to logits [b, s, vocabulary]. b and s may be smaller than the run's. The loss is the node's, and
so are text, optimiser and precision. No code travels: each peer has the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from noloco_node.api.foreign_stage import check_frozen, check_module, trained_parameters
from noloco_node.cli.host_machine import FirstCheckpoint, Machine, MachineRequest, StageHost, first_checkpoint
from noloco_node.errors import Exit, UserError, config_error, one_line
from noloco_node.machine.device import is_loss
from noloco_node.machine.interface import TrainingFailed
from noloco_node.planning.foreign_layout import ForeignLayout, ForeignWeights, foreign_layout
from noloco_node.planning.model_layout import with_optimiser
from noloco_node.run.config import RunConfig
from pipeline.decoder_slice import Cut
from pipeline.forward_pass import Slice, StageSettings
from pipeline.hardware.device_type import is_shortage
from pipeline.stage import Stage

BuildStage: TypeAlias = Callable[[int], nn.Module]
_TOKENS = 2  # of the one sequence on which a stage is tried
MOST_NOT_FINITE = 8
"""A node ends after so many results in a row that are not finite. Others refuse each; one batch alone may be odd."""


def stage_parameters(stage: int, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what a stage trains, by its names in the run; raise `UserError` (CONFIG) if that is not float32."""
    found = {f"{stage}.{name}": each for name, each in trained_parameters(module, f"Stage {stage}").items()}
    for name, each in found.items():
        if each.dtype is not torch.float32:
            raise config_error(
                f"The parameter {name} is {str(each.dtype).removeprefix('torch.')}.",
                "nodes keep what they train in float32, and multiply in what the device is fast in (precision)",
                "module.float()",
            )
    return found


def _failed(what: str, error: Exception, hint: str) -> UserError:
    return config_error(what, f"{type(error).__name__}: {one_line(error)}", hint)


def _check_returned(stage: int, found: object, given: Tensor) -> Tensor:
    """Return what a stage has returned; raise `UserError` (CONFIG) if that is no tensor [b, s, numbers] of floats."""
    if not isinstance(found, Tensor) or found.shape[:-1] != given.shape[:2] or not found.is_floating_point():
        said = f"{found.dtype!s} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise config_error(
            f"Stage {stage} returns no activations.",
            f"of an input of {list(given.shape)} it makes {said}",
            "a stage returns one tensor [b, s, numbers] of floats: activations, the last one logits",
        )
    return found


@torch.enable_grad()
def tried(stage: int, module: nn.Module, given: Tensor) -> Tensor:
    """Return what a stage makes of a short input.

    Raises `UserError` (CONFIG) if that is no tensor [1, s, numbers], or if no gradient comes back through it.
    """
    training, device = [each for each in module.modules() if each.training], next(module.parameters()).device
    module.eval()
    leaf = given.to(device).detach().requires_grad_(given.is_floating_point())
    try:
        found = _check_returned(stage, module(leaf), given)
        passed = found.requires_grad
        if passed and stage:
            passed = torch.autograd.grad(found.sum(), leaf, allow_unused=True)[0] is not None
    except UserError:
        raise
    except Exception as error:  # the program's own
        hint = "a stage takes token ids [b, s], or what the stage before it returns, for any b and s up to the run's"
        raise _failed(f"Stage {stage} cannot compute with an input of {list(given.shape)}.", error, hint) from error
    finally:
        for each in training:  # not those that the program keeps in another mode
            each.training = True
    if not passed:
        raise config_error(
            f"Stage {stage} passes no gradient back.",
            f"what it returns does not depend on its {'input' if stage else 'parameters'} in a way that torch follows",
            "a forward pass without detach(), no_grad() and rounding on the way from input to output",
        )
    return found.detach().cpu().float()


def tokens(last: int = 0) -> Tensor:
    """Return the ids on which a first stage is tried."""
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64)
    ids[0, -1] = last
    return ids


class _Logits(nn.Module):
    """Stands where a vocabulary head is; what it is given are logits already."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(vocabulary, 0), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        return states


class StageFailed(TrainingFailed):
    """A stage of the program raised an error while it trained, or returned what no stage returns."""

    def __init__(self, stage: int, error: Exception) -> None:
        super().__init__(
            f"Stage {stage} of the program failed while it trained.",
            why=f"{error.what} {error.why}"
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {one_line(error)}",
            hint="mend the module, for any input [b, s] up to the run's, and join with the same home again:"
            " the node goes on from its last checkpoint",
            code=Exit.CONFIG,
        )


class ProgramSlice(Slice):
    """The module of a stage, under the names of the run; its frozen parameters stay as the program made them."""

    def __init__(self, stage: int, module: nn.Module, layout: ForeignLayout) -> None:
        whole = nn.Module()
        whole.add_module(str(stage), module)
        whole.add_module("logits", _Logits(layout.vocabulary))
        last = stage == len(layout.shapes) - 1
        super().__init__(whole, Cut(stage, stage + 1, embeds=stage == 0, head=last), "logits")
        self._module, self._stage, self._returns = (module,), stage, layout.vocabulary if last else layout.width
        self._last, self._not_finite = last, 0

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in super().named_parameters(*args, **named) if each.requires_grad)

    def forward(
        self, hidden: Tensor, tokens: Tensor | None = None, positions: Tensor | None = None, *, logits: bool = True
    ) -> Tensor:
        (module,) = self._module
        try:
            return self._checked(module(hidden), hidden)
        except Exception as error:  # the program's own, but for what the device lacks
            if is_shortage(error) or (isinstance(error, RuntimeError) and is_loss(error)):
                raise
            raise StageFailed(self._stage, error) from error

    def _checked(self, found: object, given: Tensor) -> Tensor:
        output = _check_returned(self._stage, found, given)
        if output.shape[-1] != self._returns:
            raise ValueError(f"it returns {output.shape[-1]} numbers a token, and the run's {self._returns}")
        # What comes in is finite: the network refuses the rest. Logits may be infinite, where a token is masked.
        least, most = output.detach().aminmax()
        is_good = bool(~least.isnan() if self._last else least.isfinite() & most.isfinite())
        self._not_finite = 0 if is_good else self._not_finite + 1
        if self._not_finite >= MOST_NOT_FINITE:
            raise ValueError(f"it has returned NaN or infinity {MOST_NOT_FINITE} times in a row")
        return output


def program_slice(stage: int, build: BuildStage, layout: ForeignLayout, run: RunConfig) -> ProgramSlice:
    """Return a stage as a program builds it; raise `UserError` (CONFIG) if it cannot, or if it is not the run's."""
    try:
        module = build(stage)
        found = stage_parameters(stage, module)
    except UserError:
        raise
    except Exception as error:  # the program's own
        hint = "stages(number) returns the module of a stage, for each number from 0 on"
        raise _failed(f"The program could not build stage {stage}.", error, hint) from error
    shapes = layout.shapes[stage]
    check_module(shapes, found)
    if list(shapes) != list(found):
        raise config_error(
            f"The program builds stage {stage} in another order than the run has.",
            "its parameters have the run's names and shapes, and are registered in another order",
            "build it as the program did that wrote the run file",
        )
    last = stage == len(layout.shapes) - 1
    given = torch.zeros(1, _TOKENS, layout.width) if stage else tokens()
    returned, expected = tried(stage, module, given).shape[-1], layout.vocabulary if last else layout.width
    if returned != expected:
        raise config_error(
            f"Stage {stage} is not the one that the run trains.",
            f"it returns {returned} numbers a token, and the run's {expected}",
            "build it as the program did that wrote the run file",
        )
    check_frozen(run, module, f"{stage}.")
    return ProgramSlice(stage, module, layout)


class ProgramStages(StageHost):
    """What this machine gives to a node whose stages the program builds; to be closed."""

    def __init__(
        self, build: BuildStage, layout: ForeignLayout, checkpoint: FirstCheckpoint, request: MachineRequest, peer: str
    ) -> None:
        super().__init__(layout, checkpoint, request, peer)
        self._build, self._layout = build, layout

    def build(self, stage: int) -> Stage:
        part = program_slice(stage, self._build, self._layout, self._recipe.run)
        return with_optimiser(self._recipe.run, part, stage, StageSettings(self._torch_device))


def prepared(build: BuildStage, request: MachineRequest) -> Machine:
    """Work out what a program that builds stages gives to a node; raise `UserError` if the run has none such."""
    layout = foreign_layout(request.recipe.run)
    if not request.recipe.run.model.is_in_stages:
        raise config_error(
            "The run trains a module as a whole, and no stages of a program.",
            "noloco_node.init was given one module, and no list of them",
            "noloco_node.GossipOptimizer joins it",
        )
    checkpoint = first_checkpoint(request, partial(ForeignWeights, layout.shapes))
    return Machine(layout, partial(ProgramStages, build, layout, checkpoint, request))
