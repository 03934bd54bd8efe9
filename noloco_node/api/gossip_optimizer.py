"""`GossipOptimizer`: any torch optimiser, whose module gossips with those of other programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, ClassVar, NoReturn, Unpack

from torch import Tensor, nn, optim

from noloco_node.api import foreign_stage
from noloco_node.api.peer import Leaves, NodeThread, OwnModelOptions, PeerOptions, at_exit, parsed
from noloco_node.api.training_thread import IterationClock, TrainingThread
from noloco_node.cli.host_machine import Machine, MachineRequest
from noloco_node.errors import Exit, UserError, config_error, one_line, usage_error
from noloco_node.planning.foreign_layout import foreign_layout
from noloco_node.run.peer_state import PeerState


class GossipOptimizer(Leaves, optim.Optimizer):
    """Wraps an optimiser: `step` also counts the step for the run, and lets rounds with other peers move the weights.

    What requires a gradient in `module` is exchanged; its order in the optimiser is of no matter. Weights change inside
    of `step`, `catch_up` and `leave` alone, in the thread that calls them. `param_groups`, `state`, `zero_grad`,
    `state_dict` and `load_state_dict` are the wrapped optimiser's, so learning-rate schedules work as ever.

    Making one joins the run: the call returns when the module has the run's weights, a living replica's or those that
    this home saved. All errors are `noloco_node.errors.UserError`: what happened, why, what to try.
    """

    _alive: ClassVar[GossipOptimizer | None] = None
    _step_supports_amp_scaling = False
    """`torch.amp.GradScaler` looks for values that are not finite itself, and then leaves the step out."""

    def __init__(
        self, optimizer: optim.Optimizer, module: nn.Module, invite: str | PathLike[str], **options: Unpack[PeerOptions]
    ) -> None:
        """Join the run of an invite (its text, a file that holds it, or a home that keeps one) with a module."""
        self._inner = optimizer  # first: what this class has not, the wrapped optimiser has
        self._refuse_second()
        _check_types(optimizer, module)
        _check_options(options)
        parameters = foreign_stage.trained_parameters(module)
        _check_optimised(parameters, optimizer)
        device = next(iter(parameters.values())).device
        # The journal names the device, with its energy; a kind that a node does not know stands as the CPU.
        named = str(device) if device.type in ("cpu", "cuda", "mps") else "cpu"
        found, read = parsed(invite, {**options, "stage": 0, "device": named})
        self._training, self._clock = TrainingThread(), IterationClock()
        self._turn = threading.RLock()  # a closure of the program may call `catch_up`
        self._signal: foreign_stage.StepSignal | None = None
        self._node = NodeThread(found, read, partial(self._prepare, module, parameters), self._training.wake)
        GossipOptimizer._alive = self
        at_exit(self._end)
        try:
            self._training.work_until(lambda: self._node.state is PeerState.TRAINING or self._node.is_over)
            self._check_node()
        except BaseException:
            self._end()
            raise
        self._clock.begin()

    # What torch's optimisers have.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimiser's groups."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimiser's memory."""
        return self._inner.state

    def step(self, closure: Callable[[], float] | None = None, *, loss: float | Tensor | None = None) -> Any:
        """Take one step of the wrapped optimiser, and return what it returns; raise what it raises.

        `loss`: of this step, which others see in the status of the run. A round that is due may begin here, and the
        correction of one that has ended is added before the step. The step that ends the run is left out: `finished` is
        true after it, and the module has the weights of the last round. A call after that raises `UserError`.
        """
        with self._alone():
            return self._step(closure, loss)

    def _step(self, closure: Callable[[], float] | None, loss: float | Tensor | None) -> Any:
        if self.finished:
            raise usage_error(
                "The run is over.",
                why="its budget of steps is used up; a step now would be in nobody's weights",
                hint="end the loop once optimizer.finished is true, then call optimizer.leave()",
            )
        signal = self._signal
        assert signal is not None, "the node trains"
        stage = signal.stage
        self._clock.end()
        if loss is not None:
            self.note_loss(loss)
        stage.due = self._inner.step if closure is None else partial(self._inner.step, closure)
        self._node.call(signal.look)
        self._training.work_until(lambda: stage.due is None or self._node.has_finished.is_set())
        self._clock.begin()
        error, stage.error = stage.error, None
        if error is not None:
            raise error
        if stage.due is not None:
            stage.due = None
            self._check_node()
            return None
        returned, stage.returned = stage.returned, None
        if closure is not None and isinstance(returned, float | Tensor):
            self.note_loss(returned)  # others see it with the next step
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimiser does."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of the wrapped optimiser: a peer that comes back keeps its moments by it."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the parameters of a run are those of its run file. Raises `UserError`."""
        raise usage_error(
            "A run's parameters cannot grow.",
            why="all peers exchange those that the run file lists",
            hint="add them to the optimiser before noloco_node.init and GossipOptimizer",
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> NoReturn:
        raise usage_error(
            "A GossipOptimizer cannot be copied or saved.",
            why="a copy would take part in no run",
            hint="state_dict(), which is the wrapped optimiser's",
        )

    def __repr__(self) -> str:
        return f"GossipOptimizer({self._inner!r})"

    # What the run has beside.

    @property
    def finished(self) -> bool:
        """Whether the run is over: the module has the weights of its last round, and steps count no more."""
        return self._node.run_is_over

    def note_loss(self, loss: float | Tensor) -> None:
        """Let others see this loss from the next step on; for loops that do not know it at each step."""
        try:
            said = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise usage_error(
                f"The loss is no number: {one_line(loss, 100)}", one_line(error), "loss.mean()"
            ) from error
        if self._signal is not None:
            self._signal.stage.loss_said = said

    def catch_up(self) -> None:
        """Do what waits for this thread: add a correction, begin a round, give a newcomer its copy.

        Each `step` does so too. Call it now and then where steps are minutes apart, such as in a long evaluation.
        """
        with self._alone():
            self._training.work_waiting()
            self._check_node()

    def _end(self) -> None:
        if GossipOptimizer._alive is self:
            GossipOptimizer._alive = None
        super()._end()

    def _await_end(self) -> None:
        """Do the node's last work on the weights until it has ended."""
        self._training.work_until(lambda: self._node.is_over)

    def _prepare(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], request: MachineRequest) -> Machine:
        """Work out what this program gives to a node of the run; raise `UserError` if its module is another one."""
        run, layout = request.recipe.run, foreign_layout(request.recipe.run)
        if run.model.is_in_stages:
            raise config_error(
                "The run trains a module in stages.",
                "its run file is one of a list of modules, of which each peer trains one",
                "noloco_node.join(invite, stages=...), with what builds them",
            )
        (shapes,) = layout.shapes
        foreign_stage.check_module(shapes, parameters)
        foreign_stage.check_frozen(run, module)
        stage = foreign_stage.ForeignStage([parameters[name] for name in shapes], self._clock)
        signal = self._signal = foreign_stage.StepSignal(run, stage)
        return Machine(layout, partial(foreign_stage.ForeignHost, request, signal, self._training, self._clock))

    def _refuse_second(self) -> None:
        if GossipOptimizer._alive is not None and GossipOptimizer._alive._node.is_ours:
            raise usage_error(
                "This process has a GossipOptimizer already.",
                why="one thread trains, and does the work of one peer",
                hint="leave() the first one, which a `with` block does by itself, or another process",
            )

    def _check_here(self) -> None:
        if self._has_left:
            raise usage_error(
                "This optimiser has left its run.",
                why="leave() was called, or its context has ended",
                hint="a new GossipOptimizer with the same home goes on from the weights that were saved",
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out of a call: each of two steps at once would take the other's for its own."""
        self._node.check_process()
        self._check_here()
        self._check_node()
        if not self._turn.acquire(blocking=False):
            raise usage_error(
                "Another thread is in a call of this optimiser.",
                why="the thread that steps does the work on the weights, and they move in its calls alone",
                hint="step() and catch_up() by one thread, or by several in turn",
            )
        try:
            yield
        finally:
            self._turn.release()

    def _check_node(self) -> None:
        """Raise what ended the node, if it has ended; another thread may have called `leave`."""
        if self._node.is_over:
            self._check_here()
            self._node.result()
            raise UserError(
                "The node has ended.",
                why="it left the run without being asked",
                hint="a new GossipOptimizer with the same home; if it happens again, please report it",
                code=Exit.BUG,
            )


def _check_types(optimizer: object, module: object) -> None:
    if not (isinstance(module, nn.Module) and hasattr(optimizer, "param_groups")):
        raise usage_error(
            "GossipOptimizer takes an optimiser of torch and a module, in this order.",
            why=f"it was given objects of the types {type(optimizer).__name__} and {type(module).__name__}",
            hint='GossipOptimizer(torch.optim.AdamW(model.parameters()), model, "invite")',
        )


def _check_options(options: Mapping[str, object]) -> None:
    """Raise `UserError` for an option of a node with a model of its own: here the module and its loop are given."""
    if useless := options.keys() & (OwnModelOptions.__annotations__.keys() - PeerOptions.__annotations__.keys()):
        raise usage_error(
            f"GossipOptimizer has no option {min(useless)}.",
            "the program has made the module, put it on a device and reads the text itself, so it would do nothing",
            "the options that docs/python.md lists for it, and the program's own ways for the rest",
        )


def _check_optimised(parameters: Mapping[str, nn.Parameter], optimizer: optim.Optimizer) -> None:
    """Raise `UserError` that names a parameter which requires a gradient and is in no group of the optimiser."""
    optimised = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, each in parameters.items():
        if id(each) not in optimised:
            raise config_error(
                f"The parameter {name} requires a gradient, and is not in the optimiser.",
                "it would be exchanged and never trained",
                "make the optimiser of all that requires a gradient, or freeze it with requires_grad_(False)",
            )
