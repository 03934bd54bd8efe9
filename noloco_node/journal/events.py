"""The events of a node, each a line of JSON in its journal.

A person reads them with `jq`; views, summaries and exports read them too. So a journal is flat text, and each line says
when (`at`, unix seconds) and what (`event`) without the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from msgspec import structs

from gossip.interface import OuterStepTaken, PartnerTooStale, RoundSkipped
from noloco_node.network.wire import is_usable
from noloco_node.run.peer_state import LONGEST_DETAIL, Evaluation, PeerState, Wait, WaitCause
from noloco_node.units import LATEST_UNIX_S

RUN_OVER = "the run is over"  # why training has ended whose budget is used up (`Finished.why`)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    at: float = 0.0
    """Unix seconds; the journal writes it."""


class Started(_Event, frozen=True, tag="started"):
    """A node is up.

    `run`: id of the run. `version`: of the program that runs. `device`: where it computes. `parameters`: how many its
    stage has. `pid`: id of the process.
    """

    peer: str
    stage: int
    run: str
    version: str
    device: str = "cpu"
    parameters: int = 0
    pid: int = 0


class Continued(Started, frozen=True, tag="continued"):
    """A file of the journal begins while a node is up.

    `peer` and `run` and `version` and `device` and `parameters` and `pid`: as in `started`.
    """


class StateChanged(_Event, frozen=True, tag="state"):
    """The node does something else now. `state`: what it does. `waiting`: what it waits for."""

    state: PeerState
    waiting: Wait | None = None


class Placed(_Event, frozen=True, tag="placed"):
    """A newcomer chose a stage. `device_s`: what a microbatch takes it there, as measured; 0 unknown."""

    stage: int
    why: str
    device_s: float = 0.0


class Moved(_Event, frozen=True, tag="moved"):
    """The replica moves to another stage, in the same process.

    `origin` and `target`: the stages that it leaves and takes. `discarded`: as in `finished`.
    """

    origin: int
    target: int
    why: str
    discarded: int = 0


class InnerStep(_Event, frozen=True, tag="inner_step"):
    """One step of the inner optimiser.

    `loss`: mean nats a token of the window as far as it is known here; None where no reply carried one.
    `tokens`: tokens of the window. `seconds`: since the inner step before. `device_s`: what was computed for it, in
    seconds of CPU time or of a GPU's jobs. `stale`: microbatches whose forward pass was before the last step, with two
    windows in flight. `learning_rate`: of this step.
    """

    step: int
    progress: float
    loss: float | None
    tokens: int
    seconds: float
    learning_rate: float
    device_s: float = 0.0
    stale: int = 0


class Hops(_Event, frozen=True, tag="hops"):
    """Microbatches by next hop. `counts`: by peer id, those that came back, in all since the start, of the peers that
    returned most; `others`: of all other peers together.
    """

    counts: dict[str, int]
    others: int = 0


class Traffic(_Event, frozen=True, tag="traffic"):
    """Bytes by purpose. `sent` and `received`: by the conversation's topic, in all since the start."""

    sent: dict[str, int]
    received: dict[str, int]


class Energy(_Event, frozen=True, tag="energy"):
    """Energy of the device, where it tells. `joules`: since the process began, others' work on it included."""

    joules: float


class Budget(_Event, frozen=True, tag="budget"):
    """The bandwidth budget. `bytes`: by name what is allowed and used of it, a second or of this month."""

    bytes: dict[str, float]


DISK = "disk"  # what is noticed where the disk refuses a checkpoint


class Noticed(_Event, frozen=True, tag="noticed"):
    """Something around this node: a sleep, a clock that was set, a stage that nobody serves, an old roster, a disk that
    refuses checkpoints, a device that became much slower, a training that stands still, a journal that lost lines.

    `what`: which, in a word or two; `text`: as the owner was told; `over`: what lasted has ended.
    """

    what: str
    text: str
    over: bool = False


class RefusedMicrobatch(_Event, frozen=True, tag="refused"):
    """A refusal. `reason`: in a word. `here`: we refused the peer; otherwise it refused us."""

    peer: str
    reason: str
    here: bool = False
    count: int = 1


class Lost(_Event, frozen=True, tag="lost"):
    """A call, an exchange or a reply broke off. `what`: which of them; `why`: the loss in words."""

    peer: str
    what: str
    why: str
    count: int = 1


class PeerViolation(_Event, frozen=True, tag="violation"):
    """A peer sent what no peer may send. `topic`: of the conversation. `count`: so often since it was told last."""

    peer: str
    topic: str
    why: str
    count: int = 1


class SpotCheck(_Event, frozen=True, tag="spot_check"):
    """A replica's answer was compared with two others', or the mean of its answers with that of the others.

    `finding`: struck (it was the odd one), quarantined, paroled; doubted is ourselves, who found
    half of a stage guilty and judge nobody for so long. `distance`: of its answer from theirs, as a share of both
    squares, 2 at most; of a mean the square of the difference. `usual`: between replicas; 0 of a mean, and where it is
    not known yet. `for_s`: how long it holds. `count`: so often since it was told last.
    """

    peer: str
    finding: str
    distance: float = 0.0
    usual: float = 0.0
    for_s: float = 0.0
    count: int = 1


class Receipts(_Event, frozen=True, tag="receipts"):
    """How far sources' work is signed. `claimed`: tokens of the largest others, as they say; `signed`: by receipts.

    `own`: tokens that were drawn here and are signed.
    """

    claimed: dict[str, int]
    signed: dict[str, int]
    own: int = 0


class CatchUp(_Event, frozen=True, tag="catch_up"):
    """A newcomer copies the state of its stage.

    `what`: began; resumed (pieces were here already); mixed (whole parameters of the donor before stay); lost or
    refused (the donor); done. `donor`: id of the peer that gives. `total_bytes`: of the state.
    `held_bytes`: those of them that are here. `fetched_bytes` and
    `seconds`: since the first request, over all donors.
    """

    what: str
    stage: int
    donor: str | None
    round: int
    total_bytes: int
    held_bytes: int
    fetched_bytes: int
    seconds: float
    why: str | None = None


class Disowned(_Event, frozen=True, tag="disowned"):
    """The weights that a newcomer was given are far worse than others': it goes on from the next partner's.

    Where they were a stage snapshot that had died, it asks for another one.

    `loss`: median of its first microbatches, nats a token. `usual`: what most replicas of the run say of theirs.
    """

    stage: int
    round: int
    loss: float
    usual: float


class TextSample(msgspec.Struct, frozen=True, kw_only=True):
    """The text with which a replica went on from a prompt of its owner."""

    prompt: str
    text: str


class Evaluated(_Event, frozen=True, tag="evaluated"):
    """This node evaluated its replica on held-out text, in a pipeline through replicas of the later stages.

    Such lines also lie in `evals.jsonl`.

    `number`: of the evaluation, counted in the run. `loss`: nats a token. `margin`: half of its 95 % interval over
    other documents; None over too few. `tokens`: learnt ones that were predicted. `documents`: that they come from.
    `seconds`: that it took; training pauses for it, but not in a pipeline. `device_s`: computed meanwhile, as in
    `inner_step`. `best`: no evaluation of this peer had less loss; never said in a pipeline. `samples`: how the replica
    went on from the prompts of `join --sample`.
    """

    number: int
    round: int
    step: int
    progress: float
    loss: float
    margin: float | None
    tokens: int
    documents: int
    seconds: float = 0.0
    device_s: float = 0.0
    best: bool = False
    samples: tuple[TextSample, ...] = ()

    @property
    def evaluation(self) -> Evaluation:
        """The part of it that the node's record tells."""
        return msgspec.convert(self, Evaluation, from_attributes=True)


class Finished(_Event, frozen=True, tag="finished"):
    """The node's training is over. `discarded`: microbatches of a partial window that no inner step used."""

    why: str
    step: int
    round: int
    progress: float
    discarded: int = 0


NodeEvent = (
    Started
    | Continued
    | StateChanged
    | Placed
    | Moved
    | InnerStep
    | Hops
    | Traffic
    | Energy
    | Budget
    | Noticed
    | RefusedMicrobatch
    | Lost
    | PeerViolation
    | SpotCheck
    | Receipts
    | CatchUp
    | Disowned
    | Evaluated
    | Finished
)
RoundEvent = OuterStepTaken | PartnerTooStale | RoundSkipped
Event = NodeEvent | RoundEvent

ROUND_EVENTS: Mapping[str, type[RoundEvent]] = {
    "outer_step": OuterStepTaken,
    "too_stale": PartnerTooStale,
    "round_skipped": RoundSkipped,
}
"""What gossip declares, by the name under which it is written: gossip knows no journal."""
_NAMES = {kind: name for name, kind in ROUND_EVENTS.items()}


class _Named(msgspec.Struct):
    event: str


class _TextWait(_Event, frozen=True, tag="state"):
    """`StateChanged` as it was before `Wait`: what the node waited for is text."""

    state: PeerState
    waiting: str


_MOST = {"at": LATEST_UNIX_S, "progress": 1.0, "stage": 255, "origin": 255, "target": 255}
"""The largest numbers with such names in an event, of which none is below zero."""
_UNREADABLE = (ValueError, RecursionError)  # the second: brackets nested without end
_NAME: msgspec.json.Decoder[_Named] = msgspec.json.Decoder(_Named)
_NODE_EVENT: msgspec.json.Decoder[NodeEvent] = msgspec.json.Decoder(NodeEvent)
_TEXT_WAIT: msgspec.json.Decoder[_TextWait] = msgspec.json.Decoder(_TextWait)
_ROUND_EVENT = {name: msgspec.json.Decoder(kind) for name, kind in ROUND_EVENTS.items()}


def stamped(event: Event, at: float) -> Event:
    """Return an event with its time, for code that keeps it without a journal."""
    return structs.replace(event, at=at) if isinstance(event, msgspec.Struct) else replace(event, at=at)


def fields_of(event: Event) -> dict[str, object]:
    """Return what is written of an event, in order, its name first."""
    fields = msgspec.to_builtins(event)
    return fields if isinstance(event, msgspec.Struct) else {"event": _NAMES[type(event)], **fields}


def decode(line: bytes) -> Event | None:
    """Return the event of a line; None where it is none that we know, or no arithmetic can use its numbers."""
    event: Event | None
    try:
        kind = _ROUND_EVENT.get(_NAME.decode(line).event)
        event = _NODE_EVENT.decode(line) if kind is None else kind.decode(line)
    except _UNREADABLE:
        event = _decode_text_wait(line)
    return None if event is None or not _has_usable_numbers(event) else event


def _has_usable_numbers(event: Event) -> bool:
    """Say whether the numbers of an event lie within bounds: a journal may be a stranger's, or damaged."""
    for name, value in msgspec.to_builtins(event).items():
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, int | float) and not (
                is_usable(each) and (name not in _MOST or 0 <= each <= _MOST[name])
            ):
                return False
    return True


def _decode_text_wait(line: bytes) -> StateChanged | None:
    try:
        old = _TEXT_WAIT.decode(line)
    except _UNREADABLE:
        return None
    return StateChanged(at=old.at, state=old.state, waiting=Wait(WaitCause.OTHER, detail=old.waiting[:LONGEST_DETAIL]))
