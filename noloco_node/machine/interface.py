"""What a node is handed by the machine that it runs on: a device, a slice of the model, text, a disk, a clock.

`noloco_node.cli.host_machine.HostMachine` is made of real hardware, and a simulation's of memory and virtual time
(`noloco_node.sim.hardware.memory_host.MemoryHost`). The node cannot tell the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.weight_store import FilePieceKey, WeightStore
from pipeline import worker

if TYPE_CHECKING:
    from torch import Tensor

    from gossip.exchange.messages import ReplicaState
    from gossip.transfer.assembly import ChunkStore
    from gossip.transfer.chunks import HeldCopy
    from pipeline.inner_step import OptimiserState, StepReport

T = TypeVar("T")


class DeviceLost(UserError):
    """The device has failed for good, as far as this process goes: what lies in its memory cannot be read any more."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(
            f"The device {device} failed while it computed.",
            why=" ".join(why.split())[:300],
            hint="start again: the node goes on from its last checkpoint; if it happens again, look at the driver's"
            " messages (dmesg), its temperature and its power, or use another --device",
            code=Exit.DEVICE_LOST,
        )


def check_device_name(wish: str) -> None:
    """Raise `UserError` unless `wish` is auto, cpu, cuda or cuda:N; whether the device is there, only torch can say."""
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d{1,2})?", wish):
        raise UserError(
            f"The device {wish!r} cannot train here.",
            why="only cpu and cuda are supported",
            hint="--device auto, cpu, cuda or cuda:N",
            code=Exit.DEVICE,
        )


class Runner(Protocol):
    """The device's thread."""

    @property
    def busy_s(self) -> float:
        """Seconds for which the device has worked so far."""

    def clock(self) -> float:
        """Return the time by which jobs measure themselves, in seconds."""

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` there, to its end once it has begun.

        Raises `DeviceLost` where the device has failed for good, and from then on without running anything.
        """

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)`, arithmetic in main memory that touches no weights, without holding the device up."""


class StageModel(worker.WorkerStage, Protocol):
    """The slice of the model that a replica holds, and its inner optimiser. `pipeline.stage.Stage` is the real
    one.

    Weights are float32, one tensor a parameter, in the order of `shapes`; copies lie on the CPU. Everything but
    `shapes` and `statistics` is a job of the device's thread.
    """

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of each parameter."""

    @property
    def fixed(self) -> frozenset[int]:
        """Numbers of the parameters that neither steps nor rounds move."""

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

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, where they lie: they move with the next change."""

    def optimiser_state(self) -> OptimiserState:
        """Return the inner optimiser's memory itself, likewise."""

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        """Continue from another inner optimiser's memory."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start."""


class Dimensions(Protocol):
    """What a node must know of the model as a whole. `noloco_node.planning.model_layout.ModelLayout` is real."""

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

    def news(self) -> list[str]:
        """Return what was left out of the text since the last call, in sentences; the owner has been told."""


class SnapshotStore(Protocol):
    """Where stage snapshots are kept. `noloco_node.storage.checkpoint_store.SnapshotDirectory` is the
    real one."""

    async def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a snapshot, and the last few of its stage; raise `OSError` where there is no room for it."""

    async def newest(self, stage: int) -> Checkpoint | None:
        """Return the last stage snapshot, or None."""


class ArchivedStages(Protocol):
    """Where checkpoints of stages lie that were served before. `noloco_node.storage.checkpoint_store.CheckpointStore`
    is the real one."""

    async def set_aside(self, own: int) -> None:
        """Keep what is there of other stages than `own` from being pushed out by its checkpoints."""

    async def stages(self) -> tuple[int, ...]:
        """Return the stages of which something lies aside."""

    async def slow(self, stage: int) -> Checkpoint | None:
        """Return the slow weights of a stage that lie aside, or None."""


class ComputeHost(Protocol):
    """Where a stage is computed, and the memory that it takes there."""

    @property
    def device(self) -> Runner:
        """The thread for tensor work."""

    @property
    def needs_bytes(self) -> list[int]:
        """Memory that each stage takes on the device, about; corrected where it has been measured; [] is unknown."""

    @property
    def graph_bytes(self) -> list[int]:
        """What of it the graph of a microbatch takes; corrected likewise."""

    @property
    def beside_bytes(self) -> list[int]:
        """Main memory that each stage takes beside a device with a memory of its own; [] is none, or unknown."""

    def free_bytes(self, given_back: int = 0) -> int | None:
        """Return the memory that is free on the device for the run, and no more than its owner allows; None where
        nobody knows it. `given_back`: what will be free besides.
        """

    def free_beside_bytes(self) -> int | None:
        """Return the main memory that is free; None where nobody knows it."""

    def build(self, stage: int, /) -> StageModel:
        """Make a stage; a job of the device's thread."""


class FirstWeights(Protocol):
    """The weights that a run starts from, where they are those of a checkpoint.

    `noloco_node.planning.checkpoint_map.RunWeights` is the real one.
    """

    @property
    def store(self) -> WeightStore:
        """The files, or what has come of them."""

    def pieces(self, stage: int, /) -> list[FilePieceKey]:
        """Return the pieces that a stage needs; the headers of the files are here."""

    def read(self, stage: int, /) -> Sequence[Tensor]:
        """Return a stage's parameters; its pieces are here. Raises `UserError` where the files are of another model."""


class Host(ComputeHost, Protocol):
    """All that a machine gives to a node."""

    # The training text of this peer.

    def prepare_text(self, stage: int, /) -> None:
        """Begin to open the text if this stage needs it: its state is about to be downloaded, which takes a while."""

    async def open_text(self) -> Text:
        """Return the training text."""

    # What lies on its disk.

    @property
    def first_weights(self) -> FirstWeights | None:
        """The weights that the run starts from; None where its seed says them, or its model on the hub."""

    @property
    def tokenizer(self) -> WeightStore | None:
        """The files of the run's tokenizer, or what has come of them; None where they do not travel."""

    @property
    def former(self) -> ArchivedStages:
        """What is kept of the stages that were served before."""

    @property
    def snapshots(self) -> SnapshotStore | None:
        """Stage snapshots; None where nobody asked to keep any."""

    async def last_stage(self) -> int | None:
        """Return the stage that this peer served last, or None."""

    async def load(self, stage: int, /) -> Checkpoint | None:
        """Return this peer's last checkpoint of a stage, or None."""

    async def save(self, checkpoint: Checkpoint, /) -> str:
        """Write a checkpoint and return where it is; raise `OSError` where the disk refuses.

        Its tensors are looked at no more when its `read` has been called, or this returns.
        """

    async def hold(self, state: ReplicaState, /) -> HeldCopy:
        """Copy a state to where it stands still, before this returns; raise `OSError` where the disk refuses."""

    def partial_download(self, stage: int, weight_bytes: int, /) -> ChunkStore | None:
        """Return where the chunks of a stage's state are noted while it is downloaded; None: in memory alone."""

    # The time of day, and what its owner lets us take of the line.

    def unix_time(self) -> float:
        """Return the time of day, in seconds."""

    def asleep_s(self) -> float:
        """Return the seconds for which the machine has slept since its start."""

    def line_s(self, stage: int, /) -> float:
        """Return the seconds of our bandwidth that a microbatch needs at a stage; 0 without a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """How a node tells what it does: `record` to the journal, `say` to a person, a line each; `warn`: what should be
    looked at.

    `draw`: a bar, full to a share from 0 to 1 and with a text behind it, gone at 1; False where none can be drawn.
    """

    record: Callable[[events.Event], None]
    say: Callable[[str], None]
    draw: Callable[[float, str], bool] | None = None
    warn: Callable[[str], None] | None = None
