"""Curves of a node's events for TensorBoard, Weights & Biases and Trackio, over its inner steps.

`noloco-node join --log-to` draws them while the node trains; `noloco-node journal export` draws them of whole journals.
The names are those of transformers' Trainer: `train/loss`, `eval/loss`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, copy_context
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import NamedTuple, TypeAlias

from gossip.interface import OuterStepTaken
from noloco_node.errors import one_line, usage_error
from noloco_node.journal import events
from noloco_node.journal.events import stamped
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.observe.swarm_view import short

PROJECT = "noloco"
STEP = "train/global_step"
FIGURES: Mapping[type, Mapping[str, str]] = {
    events.InnerStep: {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "progress": "train/progress",
        "tokens": "train/tokens",
        "seconds": "train/seconds",
        "device_s": "train/device_s",
    },
    OuterStepTaken: {"gap": "round/gap", "staleness": "round/staleness", "seconds": "round/seconds"},
    events.Evaluated: {"loss": "eval/loss"},
}
"""The names of curves by the fields of events."""
MOST_WAITING = 4096  # events that a slow logger may have before it; further ones are lost to it
PATIENCE_S = 10.0  # for how long a node that ends waits for a logger
FLUSH_S = 10


class CurveFormat(StrEnum):
    """What draws curves."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class StepFigures(NamedTuple):
    """Figures by the names of their curves, after so many inner steps, at `at` (unix seconds)."""

    step: int
    at: float
    figures: dict[str, float]


Draw: TypeAlias = Callable[[StepFigures], None]


def step_figures(told: Iterable[events.Event]) -> Iterator[StepFigures]:
    """Yield the figures of each event that has some. A round stands at the inner step before it."""
    step = 0
    for event in told:
        if isinstance(event, events.InnerStep):
            step = event.step
        names = FIGURES.get(type(event), {})
        if figures := {name: value for field, name in names.items() if (value := getattr(event, field)) is not None}:
            yield StepFigures(step, event.at, figures)


def drawing(kind: CurveFormat, name: str, out: Path, *, offline: bool) -> AbstractContextManager[Draw]:
    """Return what draws the curves of one peer.

    `out`: takes the files, except Trackio's, which lie where Trackio keeps them. `offline`: sends nothing to another
    machine. Raises `UserError` if the package is not installed.
    """
    check_installed(kind)
    match kind:
        case CurveFormat.TENSORBOARD:
            return _tensorboard(name, out)
        case CurveFormat.WANDB:
            return _wandb(name, out, offline=offline)
        case CurveFormat.TRACKIO:
            return _trackio(name)


def check_installed(kind: CurveFormat) -> None:
    """Raise `UserError` if the package of a format is not installed."""
    if find_spec(kind) is None:
        raise usage_error(
            f"{kind} is not installed.",
            why="its own package writes its files, and the node does without it otherwise",
            hint=f"pip install {kind}",
        )


def read_formats(names: Sequence[str]) -> tuple[CurveFormat, ...]:
    """Return the formats of `--log-to`; raise `UserError` if one is unknown or not installed."""
    for name in names:
        if name not in list(CurveFormat):
            raise usage_error(
                f"--log-to does not know {name!r}.",
                why="curves are drawn by the packages of others, and by none of this name",
                hint=f"one of {', '.join(CurveFormat)}",
            )
        check_installed(CurveFormat(name))
    return tuple(dict.fromkeys(map(CurveFormat, names)))


@contextmanager
def _tensorboard(name: str, out: Path) -> Iterator[Draw]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(out / name.replace("/", "_")), flush_secs=FLUSH_S) as writer:

        def draw(point: StepFigures) -> None:
            for curve, value in point.figures.items():
                writer.add_scalar(curve, value, point.step, point.at)

        yield draw


@contextmanager
def _wandb(name: str, out: Path, *, offline: bool) -> Iterator[Draw]:
    """Draw a run of Weights & Biases. Without an API key here it stays on the disk, for `wandb sync`."""
    import wandb

    out.mkdir(parents=True, exist_ok=True)
    # By default wandb would draw into a run that this program has open already, its own or another peer's, and end it.
    settings = wandb.Settings(reinit="create_new", silent=True, console="off", disable_git=True, disable_code=True)
    mode = "offline" if offline or not wandb.login(prompt=False) else None
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    with wandb.init(project=project, name=name, dir=str(out), mode=mode, settings=settings) as run:
        run.define_metric("*", step_metric=STEP)
        yield lambda point: run.log({STEP: point.step, **point.figures})


@contextmanager
def _trackio(name: str) -> Iterator[Draw]:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    # In the context of this program Trackio would end the run that the program has open.
    run = Context().run(partial(trackio.init, project=project, name=name, embed=False))
    try:
        yield lambda point: run.log(point.figures, step=point.step)
    finally:
        run.finish()


class LiveCurves:
    """Draws the curves of a node at work, each format in a thread of its own.

    So neither a slow disk nor a distant host holds up the training, and what fails there ends no node.
    """

    def __init__(self, kinds: Sequence[CurveFormat], name: str, out: Path, warn: Callable[[str], None]) -> None:
        """Begin to draw below `out`. `name`: of this peer; where it has none, its short id."""
        self._name, self._out, self._warn = name, out, warn
        self._queues = {kind: Queue[events.Event | None](MOST_WAITING) for kind in kinds}
        self._threads = [
            # The context says where this peer's lines go.
            Thread(target=copy_context().run, args=(self._draw, kind), name=f"curves {kind}", daemon=True)
            for kind in kinds
        ]
        for thread in self._threads:
            thread.start()

    def take(self, event: events.Event) -> None:
        """Let an event that happens now be drawn."""
        self._put(stamped(event, CLOCK.unix_s()))

    def close(self) -> None:
        """Draw what waits and end, or give up after `PATIENCE_S`."""
        self._put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _put(self, event: events.Event | None) -> None:
        for queue in self._queues.values():
            with suppress(Full):
                queue.put_nowait(event)

    def _draw(self, kind: CurveFormat) -> None:
        told: Iterator[events.Event] = iter(self._queues[kind].get, None)
        try:
            started = next((each for each in told if isinstance(each, events.Started)), None)
            if started is None:
                return
            with drawing(kind, self._name or short(started.peer), self._out / kind, offline=False) as draw:
                for point in step_figures(told):
                    draw(point)
        except Exception as error:  # of a package of others: all kinds
            why = one_line(f"{type(error).__name__}: {error}")
            self._warn(f"--log-to {kind} draws nothing more ({why}); the training goes on, the journal has all events")
