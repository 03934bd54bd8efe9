"""The journal: what happened to this peer, one JSON object a line.

A journal serves three readers: a person with `jq`, the live view of the demo, and the summary of a run. So it is flat,
append-only text; every line says when (`at`, unix seconds) and what (`event`), and stands for itself.

Each event is one write to a file opened for appending, so a crash tears one line at most. The reader skips what it
cannot decode, and the writer begins a new line after a torn one. At `max_bytes` the file moves to `journal.1.jsonl`,
over the one before: the two together bound the disk that a journal takes. A disk that is full or gone costs events,
which are counted, and never the training: a journal is worth less than the run that it describes.
"""

from __future__ import annotations

import msgspec

from noloco_node.run.peer_state import PeerState

MAX_BYTES = 64 * 2**20
"""Size at which a journal is rotated, if nobody says otherwise: some 300,000 inner steps."""


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


class StateChanged(_Event, frozen=True, tag="state"):
    """The node does something else now. `state`: what it does. `waiting`: what it waits for, in words."""

    state: PeerState
    waiting: str | None = None


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
    `tokens`: tokens of the window. `seconds`: since the inner step before. `device_s`: of these seconds, those
    for which the device worked. `stale`: microbatches whose forward pass was before the last step, with two windows in
    flight. `learning_rate`: of this step.
    """

    step: int
    progress: float
    loss: float | None
    tokens: int
    seconds: float
    learning_rate: float
    device_s: float = 0.0
    stale: int = 0


class OuterStep(_Event, frozen=True, tag="outer_step"):
    """One outer step.

    `partner`: id of the replica met, None in a solo round. `staleness`: inner steps between snapshot and correction.
    `gap`: norm of own minus mean slow weights over the norm of the mean; None where there was nobody to compare with.
    `staleness_rounds`: rounds since these weights last met anybody's, 1 where in the one before; `partner_staleness`:
    rounds since the partner's did. `adopted`: ours were too stale to count, and the partner's were taken over.
    `seconds`: from the acceptance of the offer to the partner's receipt.
    """

    round: int
    partner: str | None
    gap: float | None
    staleness: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    staleness_rounds: int = 0
    partner_staleness: int = 0
    adopted: bool = False


class TooStale(_Event, frozen=True, tag="too_stale"):
    """A partner had met nobody for too many rounds to count: it took our weights, and our round stays open.

    `partner_staleness`: for how many rounds.
    """

    round: int
    partner: str
    partner_staleness: int
    bytes_sent: int
    bytes_received: int


class Deferred(_Event, frozen=True, tag="deferred"):
    """No partner before the next round was due. `in_a_row`: deferrals since the last outer step, this one included."""

    round: int
    in_a_row: int


class Hops(_Event, frozen=True, tag="hops"):
    """Microbatches by next hop. `counts`: by peer id, those that came back, in all since the start."""

    counts: dict[str, int]


class Traffic(_Event, frozen=True, tag="traffic"):
    """Bytes by purpose. `sent` and `received`: by the conversation's topic, in all since the start."""

    sent: dict[str, int]
    received: dict[str, int]


class Budget(_Event, frozen=True, tag="budget"):
    """The bandwidth budget. `bytes`: by name what is allowed and used of it, a second or of this month."""

    bytes: dict[str, float]


class Noticed(_Event, frozen=True, tag="noticed"):
    """Something around this node: a sleep, a clock that was set, a stage that nobody serves, an old roster.

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
    """A peer sent what no peer may send. `topic`: of the conversation."""

    peer: str
    topic: str
    why: str


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


class Finished(_Event, frozen=True, tag="finished"):
    """The node's training is over. `discarded`: microbatches of a partial window that no inner step used."""

    why: str
    step: int
    round: int
    progress: float
    discarded: int = 0


Event = (
    Started
    | StateChanged
    | Placed
    | Moved
    | InnerStep
    | OuterStep
    | TooStale
    | Deferred
    | Hops
    | Traffic
    | Budget
    | Noticed
    | RefusedMicrobatch
    | Lost
    | PeerViolation
    | CatchUp
    | Finished
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
