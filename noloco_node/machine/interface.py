"""What a node is handed by the machine that it runs on: a device, a slice of the model, text, a disk, a voice.

`noloco_node.cli.join` makes these of real hardware; whoever has others (a simulation, say) hands in others, and the
node cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from noloco_node.journal import events
from noloco_node.storage.checkpoint import Checkpoint
from pipeline import worker

if TYPE_CHECKING:
    from torch import Tensor

    from gossip.transfer.assembly import ChunkStore
    from pipeline.stage import OptimiserState, StepReport

T = TypeVar("T")


class Runner(Protocol):
    """The device's thread."""

    @property
    def busy_s(self) -> float:
        """Seconds for which the device has worked so far."""

    def clock(self) -> float:
        """Return the time by which jobs measure themselves, in seconds."""

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` there, to its end once it has begun."""

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)`, arithmetic in main memory that touches no weights, without holding the device up."""


class StageModel(worker.WorkerStage, Protocol):
    """The slice of the model that a replica holds, and its inner optimiser. `pipeline.stage.WorkerStage` is the real
    one.

    Weights are float32 on the CPU, one tensor a parameter, in the order of `shapes`. Everything but `shapes` and
    `statistics` is a job of the device's thread.
    """

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of each parameter."""

    def step(self, learning_rate: float, microbatches: int, /) -> StepReport:
        """Take one inner step on the mean gradient of a window."""

    def discard(self) -> None:
        """Forget the gradients collected so far."""

    def weights(self) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights."""

    def set_weights(self, weights: Sequence[Tensor], /) -> None:
        """Replace the fast weights."""

    def correct(self, delta: Sequence[Tensor], /) -> None:
        """Add to the fast weights."""

    def optimiser_state(self) -> OptimiserState:
        """Return a copy of the inner optimiser's memory."""

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        """Continue from another inner optimiser's memory."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start."""


class Dimensions(Protocol):
    """What a node must know of the model as a whole. `noloco_node.planning.model_layout.Blueprint` is the real one."""

    @property
    def width(self) -> int:
        """Activations a token between two stages."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""

    @property
    def shapes(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Name and shape of every parameter of every stage, in the stage's order."""

    @property
    def work(self) -> Sequence[float]:
        """What a microbatch costs at each stage, in any unit; the same numbers on all peers."""


class Text(Protocol):
    """Where a source's tokens come from. `position` and `restore`: to resume exactly."""

    async def draw(self) -> Tensor:
        """Return the next tokens [batch, sequence + 1], int64."""

    def position(self) -> dict[str, Any]:
        """Return where the next draw begins."""

    async def restore(self, position: Mapping[str, Any]) -> bool:
        """Go back to a position; False where it is of another text."""


def unknown() -> None:
    """Return the free memory where nobody knows it."""


def awake() -> float:
    """Return the seconds of sleep of a machine that never sleeps."""
    return 0.0


def unlimited(_: int) -> float:
    """Return the seconds of line a microbatch where the line has no limit."""
    return 0.0


class SnapshotStore(Protocol):
    """Where snapshots of other stages are kept. `noloco_node.state_sync.snapshot_keeper.DirectoryStore` is the real
    one."""

    async def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a snapshot, and the last few of its stage; raise `OSError` where there is no room for it."""

    async def newest(self, stage: int) -> Checkpoint | None:
        """Return the last snapshot of a stage, or None."""


class ArchivedStages(Protocol):
    """Where checkpoints of stages lie that were served before. `noloco_node.storage.checkpoint_store.OwnCheckpoints` is
    the real one."""

    async def set_aside(self, own: int) -> None:
        """Keep what is there of other stages than `own` from being pushed out by its checkpoints."""

    async def stages(self) -> tuple[int, ...]:
        """Return the stages of which something lies aside."""

    async def slow(self, stage: int) -> Checkpoint | None:
        """Return the slow weights of a stage that lie aside, or None."""


async def nothing_served() -> None:
    """Return the stage that was served last where nothing is known of it."""


def nothing_besides(_: int) -> None:
    """Make nothing ready beside a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What this machine gives.

    `device`: the thread for tensor work. `build`: makes a stage, on that thread. `open_text`: the training text. `load`
    and `save`: this peer's own checkpoints, the last of a stage. `unix_time`: the time of day, in seconds. `served`:
    the stage that this peer served last. `former`: what is kept of those before; None keeps nothing. `asleep_s`:
    seconds for which the machine has slept since its start. `line_s`: seconds that the owner's budget of bandwidth
    needs for a microbatch at a stage. `needs_bytes`: memory that each stage takes on the device, about;
    `in_flight_bytes`: what of it microbatches in flight keep (both are corrected where that has been measured);
    `free_bytes`: memory that is free there. `keep`: where pieces of a stage's state are noted while it is copied, given
    its number and the bytes of its weights; None keeps them in memory alone. `copies`: is told of which stage the state
    is about to be copied, so that what it takes besides is made ready meanwhile. `snapshots`: of other stages, None
    where nobody asked to keep any.
    """

    device: Runner
    build: Callable[[int], StageModel]
    open_text: Callable[[], Awaitable[Text]]
    load: Callable[[int], Awaitable[Checkpoint | None]]
    save: Callable[[Checkpoint], Awaitable[str]]
    unix_time: Callable[[], float]
    served: Callable[[], Awaitable[int | None]] = nothing_served
    former: ArchivedStages | None = None
    asleep_s: Callable[[], float] = awake
    line_s: Callable[[int], float] = unlimited
    needs_bytes: list[int] = field(default_factory=list)
    in_flight_bytes: list[int] = field(default_factory=list)
    free_bytes: Callable[[], int | None] = unknown
    keep: Callable[[int, int], ChunkStore] | None = None
    copies: Callable[[int], None] = nothing_besides
    snapshots: SnapshotStore | None = None


def nowhere_to_draw(_: float, __: str) -> bool:
    """Draw nothing, and say so."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """How a node tells what it does: `record` to the journal, `say` to a person, a line each.

    `draw`: a bar, full to a share from 0 to 1 and with a text behind it, gone at 1; False where none can be drawn.
    """

    record: Callable[[events.Event], None]
    say: Callable[[str], None]
    draw: Callable[[float, str], bool] = nowhere_to_draw
