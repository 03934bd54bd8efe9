"""What a peer announces of itself: its state, what it waits for, and its last evaluation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from noloco_node.units import Amount, Count, Seconds, format_count


class PeerState(StrEnum):
    """The activity of a peer, in one word."""

    JOINING = "joining"
    CATCHING_UP = "catching up"
    TRAINING = "training"
    FINISHED = "finished"
    LEAVING = "leaving"


AT_WORK = (PeerState.TRAINING, PeerState.FINISHED)  # states in which a replica holds weights of the run

LONGEST_DETAIL = 200  # letters of a wait's detail


class WaitCause(StrEnum):
    """The cause of a wait, or of a trouble while a peer trains. Records and journals hold it; views have the words."""

    REPLICA = "replica"  # a replica of the next stage has to appear in the roster
    ANSWER = "answer"  # no replica of the next stage answers
    ROOM = "room"  # the replicas of the next stage refuse for now
    MICROBATCHES = "microbatches"  # the stage before sends none
    STATE = "state"  # a replica of its own stage has to give its state
    WEIGHTS = "weights"  # the weights that the run starts from
    TOKENIZER = "tokenizer"  # the tokenizer that the run starts with
    DISK = "disk"  # its disk refuses checkpoints
    OTHER = "other"  # the cause that the detail names


class Wait(msgspec.Struct, frozen=True):
    """A wait of a peer: its cause, its seconds so far (None where they are not known), and more in words."""

    cause: WaitCause
    seconds: Seconds | None = None
    detail: Annotated[str, Meta(max_length=LONGEST_DETAIL)] = ""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's last evaluation on held-out text, of its replica or of chains of replicas that begin with it.

    `number`: of the evaluation, counted in the run.

    `loss`: nats a token. `margin`: half of its 95 % interval; None over too few documents.
    """

    number: Count
    round: Count
    loss: Amount
    margin: Amount | None
    tokens: Count
    documents: Count

    def __str__(self) -> str:
        margin = "" if self.margin is None else f" ± {self.margin:.4f}"
        return (
            f"held-out loss {self.loss:.4f}{margin} in round {self.round}, over {format_count(self.tokens)} tokens of "
            f"{format_count(self.documents)} document{'s' * (self.documents != 1)}"
        )
