"""A machine gives a node a device, a slice of the model, text, a disk and a clock, by the interfaces below.

`noloco_node.cli.host_machine.HostMachine` gives real hardware, `noloco_node.sim.hardware.memory_host.MemoryHost` gives
memory and virtual time. The node cannot tell the difference.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from noloco_node.errors import Exit, UserError, one_line
from noloco_node.journal import events
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.weight_store import FilePieceKey, WeightStore
from pipeline import worker

if TYPE_CHECKING:
    from torch import Tensor

    from gossip.exchange.messages import ReplicaState
    from gossip.transfer.assembly import ChunkStore
    from gossip.transfer.chunks import HeldCopy
    from noloco_node.data.held_out_text import HeldOutText
    from noloco_node.data.token_text import Prompts
    from noloco_node.machine.memory import GraphBytes
    from pipeline.inner_step import OptimiserState, StepReport

T = TypeVar("T")


class TrainingFailed(UserError):
    """What a job on the device raises where no later job can do better: the node ends by it."""


class DeviceLost(TrainingFailed):
    """The device has failed for good as far as this process goes: its memory cannot be read any more."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(
            f"The device {device} failed while it computed.",
            why=one_line(why),
            hint="start again: the node goes on from its last checkpoint; if it happens again, look at the driver's"
            " messages (dmesg), its temperature and its power, or use another --device",
            code=Exit.DEVICE_LOST,
        )


def check_device_name(wish: str) -> None:
    """Raise `UserError` unless `wish` names a device of a known type; whether it is there, only torch can say."""
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d{1,2})?|mps(:0)?", wish):
        raise UserError(
            f"The device {wish!r} cannot train here.",
            why="only cpu, cuda and mps are supported",
            hint="--device auto, cpu, cuda, cuda:N or mps",
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
        """Run `job(*args)` in that thread, to its end once it has begun.

        Raises `DeviceLost` if the device fails for good, and at once in all later calls.
        """

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)`, arithmetic in main memory that touches no weights, without holding the device up."""


class StageModel(worker.WorkerStage, Protocol):
    """A replica's slice of the model with its inner optimiser. `pipeline.stage.Stage` is the real one.

    Weights are float32, one tensor a parameter, in the order of `shapes`; copies lie on the CPU. The device's thread
    runs all of it but `shapes`, `fixed` and `statistics`.
    """

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of each parameter."""

    @property
    def fixed(self) -> frozenset[int]:
        """Numbers of the parameters that neither steps nor rounds move."""

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        """Take one inner step on the mean gradient of a window.

        `microbatches`: in the window, each counted by the share of its tokens that are learnt.
        """

    def infer(self, hidden: Tensor, /) -> Tensor:
        """Return activations, or at the last stage logits, without dropout: float32, on the CPU."""

    def discard(self) -> None:
        """Forget the gradients collected so far."""

    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights; `less` others, the difference from these in bfloat16."""

    def set_weights(self, weights: Sequence[Tensor], /) -> None:
        """Replace the fast weights: float32, or as `current_weights` of any stage has them."""

    def correct(self, delta: Sequence[Tensor], /) -> None:
        """Add to the fast weights."""

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, as the stage holds them: the next change moves them."""

    def optimiser_state(self) -> OptimiserState:
        """Return the inner optimiser's memory itself, not a copy."""

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        """Continue from another inner optimiser's memory."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start."""


class Dimensions(Protocol):
    """Sizes of the whole model. `noloco_node.planning.model_layout.ModelLayout` has the real ones."""

    @property
    def width(self) -> int:
        """How many activations a token has between two stages."""

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""

    @property
    def shapes(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Name and shape of every parameter of every stage, in the stage's order."""

    @property
    def work(self) -> Sequence[float]:
        """The cost of a microbatch at each stage, in any unit; all peers have the same numbers."""


class Text(Protocol):
    """A source's training text. `position` and `restore` resume it exactly."""

    async def draw(self) -> Tensor:
        """Return the next tokens [batch, sequence + 1], int64."""

    def position(self) -> dict[str, Any]:
        """Return where the next draw begins."""

    async def restore(self, position: Mapping[str, Any]) -> bool:
        """Go back to a position; False where it is of another text."""

    def news(self) -> list[str]:
        """Return sentences about what was left out of the text since the last call; the owner has been told."""


class EvaluationHost(Protocol):
    """What an evaluation takes of a machine. `noloco_node.cli.host_machine.EvaluationMachine` is the real one."""

    async def text(self) -> HeldOutText:
        """Read the sample of held-out text, beside the training; raise `UserError` if there is none."""

    async def prompts(self) -> Prompts:
        """Open the owner's prompts, beside the training; raise `UserError` if there is no tokenizer."""

    async def best_loss(self) -> float | None:
        """Return the loss of the weights that are kept here, if there are any."""

    async def keep(self, evaluated: Checkpoint, /) -> None:
        """Keep weights that were evaluated in place of those kept before; raise `OSError` if the disk refuses."""


class CheckpointArchive(Protocol):
    """Checkpoints of stages that this peer served, and snapshots of others.

    `noloco_node.storage.checkpoint_store.CheckpointStore` is the real one.
    """

    async def served(self) -> int | None:
        """Return the stage that this peer served last, or None."""

    async def load(self, stage: int) -> Checkpoint | None:
        """Return this peer's last checkpoint of a stage, or None."""

    async def set_aside(self, own: int) -> None:
        """Put checkpoints of other stages than `own` where those of `own` do not replace them."""

    async def require_room(self, size_bytes: int) -> None:
        """Raise `OSError` if there is no room for a snapshot of so many bytes, which need not be fetched then."""

    async def keep(self, snapshot: Checkpoint) -> None:
        """Keep this and the last few snapshots of its stage; raise `OSError` if the disk refuses."""

    async def stages(self) -> tuple[int, ...]:
        """Return the stages of which a snapshot or a checkpoint was set aside here."""

    async def slow(self, stage: int) -> Checkpoint | None:
        """Return the newest slow weights of a stage that were set aside here, or None."""


class FirstWeights(Protocol):
    """The checkpoint that a run starts from. `noloco_node.planning.checkpoint_map.RunWeights` is the real one."""

    @property
    def store(self) -> WeightStore:
        """The files, as far as they are here."""

    def pieces(self, stage: int, /) -> list[FilePieceKey]:
        """Return the pieces that a stage needs; the headers of all files must be here."""

    @property
    def frozen(self) -> bool:
        """Whether adapters are trained over them: then a stage needs them whatever state it starts from."""

    def put(self, stage: int, part: StageModel, /) -> None:
        """Put a stage's parameters into it; their pieces must be here. The device's thread runs this.

        Raises `UserError` for files of another model.
        """


class Host(ABC):
    """All that a machine gives to a node. What a machine does not have or know is None or empty, as here."""

    device: Runner  # the thread for tensor work
    checkpoints: CheckpointArchive  # checkpoints of the stages that this peer served, and snapshots of others
    first_weights: FirstWeights | None = None
    """The checkpoint that the run starts from; None for weights drawn from its seed or a model of the hub."""
    tokenizer: WeightStore | None = None
    """The files of the run's tokenizer, as far as they are here; None if peers do not send them."""
    evaluation: EvaluationHost | None = None  # what an evaluation takes; None where the run has none

    def __init__(self) -> None:
        self.needs_bytes: list[int] = []
        """About the memory that each stage takes on the device, as far as measured; [] is unknown."""
        self.graph_bytes: list[GraphBytes] = []  # the graph of one microbatch; by layers it is a part of that memory
        self.passes: list[float] = []
        """Forward passes that a microbatch takes as long as at each stage, with what is computed again; [] is alike."""
        self.passes_alone: list[float] = []
        """The same for a microbatch beside which no other is in flight, whose graph is kept where one is."""
        self.beside_bytes: list[int] = []  # main memory that each stage takes beside a GPU; [] is none, or unknown

    @abstractmethod
    def build(self, stage: int, /) -> StageModel:
        """Make a stage; the device's thread runs this."""

    @abstractmethod
    async def open_text(self) -> Text:
        """Return the training text."""

    @abstractmethod
    async def save(self, checkpoint: Checkpoint, /) -> str:
        """Write a checkpoint and return where it is; raise `OSError` if the disk refuses.

        Its tensors may change once its `read` has been called, or this returns.
        """

    @abstractmethod
    async def hold(self, state: ReplicaState, /) -> HeldCopy:
        """Copy a state, so that it may change afterwards; raise `OSError` if the disk refuses."""

    @abstractmethod
    def unix_time(self) -> float:
        """Return the time of day by which the peers of the run go, in seconds."""

    def clock_ahead_s(self) -> float:
        """Return by how much this machine's own time of day is ahead of that; negative if behind."""
        return 0.0

    def asleep_s(self) -> float:
        """Return the seconds for which the machine has slept since its start."""
        return 0.0

    def free_bytes(self, given_back: int = 0) -> int | None:
        """Return the device's free memory, at most what its owner allows. `given_back`: bytes that are free besides."""
        return None

    def free_beside_bytes(self, given_back: int = 0) -> int | None:
        """Return the free main memory, as `free_bytes` does that of the device."""
        return None

    def prepare_text(self, stage: int, /) -> None:  # noqa: B027
        """Begin to open the text if this stage needs it, while its state is downloaded."""

    def partial_download(self, stage: int, /) -> ChunkStore | None:
        """Return the store of a stage's downloaded chunks; None: they stay in memory alone."""
        return None

    def line_s(self, stage: int, /) -> float:
        """Return how long a microbatch of a stage takes of the bandwidth that the owner allows; 0 without a limit."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """End the threads of the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """A node calls `record` for the journal; `say` prints a line for a person.

    `warns`: prints one that needs attention, `say` by default. `draw`: draws a bar, full to a share from 0 to 1, with a
    text behind it, and removes it at 1; False if it cannot.
    """

    record: Callable[[events.Event], None]
    say: Callable[[str], None]
    draw: Callable[[float, str], bool] | None = None
    warns: Callable[[str], None] | None = None

    def warn(self, text: str) -> None:
        """Tell the owner what needs attention."""
        (self.warns or self.say)(text)

    def notice(self, what: str, text: str, *, over: bool = False) -> None:
        """Tell the owner what needs attention, or that it is over, and journal it."""
        (self.say if over else self.warn)(text)
        self.record(events.Noticed(what=what, text=one_line(text), over=over))  # it may name a path that is no text
