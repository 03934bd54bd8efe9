"""The roster: which peer serves which stage, as one immutable snapshot that decisions read.

Rosters of different peers differ for a while; every decision tolerates that.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Callable
from hashlib import blake2b
from typing import Annotated, Generic, TypeVar

import msgspec

from noloco_node.errors import usage_error
from noloco_node.run.peer_state import Evaluation, PeerState, Wait, WaitCause
from noloco_node.swarm.shards import StageSize
from noloco_node.units import Amount, Count, Fraction, Seconds, UnixSeconds

T = TypeVar("T")

HOP_LETTERS, MOST_HOPS = 8, 2
"""The letters of a peer's id in a hop, and the most hops in a record."""
MOST_LETTERS = 24
"""Of an owner's name for a peer. It is shown beside the short id, never in its place, and proves nothing."""
EVALUATED_ROUNDS = 8
"""For which a brief record tells its peer's last evaluation."""
NUMBER_BITS = 16
"""Of a fraction in a brief record: it is right to one part in 65,000."""
MOST_WAITS = 4
"""The most waits in a record."""
_SALT = os.urandom(16)


def speed(device_s: float) -> float:
    """Return the microbatches a second of a device that takes so long for one; 0 is unknown.

    A replica's inner steps follow its share of the microbatches, and routes are weighted by device time. So this is
    proportional to its rate of inner steps, with one factor for all replicas of its stage.
    """
    return 1.0 / device_s if device_s > 0.0 else 0.0


class Given(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says that it has given to the run in all its sessions. `joules`: 0 is unknown."""

    tokens: Count
    seconds: Count
    sent_bytes: Count
    received_bytes: Count
    joules: Count = 0


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A peer's record of itself. No other peer vouches for it, so readers bound what they believe.

    The order of the fields is that in which they travel: a new field comes last.
    """

    peer: str
    stage: Count
    state: PeerState
    claimed_at: UnixSeconds = 0.0
    """Unix time of the claim of this stage."""
    round: Count = 0
    """Rounds finished, met or solo."""
    inner_steps: Count = 0
    progress: Fraction = 0.0
    samples: Count = 0
    """At stage 0: sequences drawn here whose gradient came back."""
    device_s: Seconds = 0.0
    """Measured device seconds a microbatch, or the seconds of a budgeted line where those are more; 0 until known."""
    tokens_per_s: Amount = 0.0
    loss: Amount | None = None
    gap: Amount | None = None
    partner: str | None = None
    waiting: Annotated[tuple[Wait, ...], msgspec.Meta(max_length=MOST_WAITS)] = ()
    """What the peer waits for, and what else is wrong; empty while it works."""
    budget: str | None = None
    """The used part of its bandwidth budget, in words; None without one."""
    addresses: tuple[str, ...] = ()
    may_serve: tuple[Count, ...] = ()
    """Stages to which the peer would move if needed (`pipeline.placement`)."""
    moves_to: Count | None = None
    """The stage to which the peer is about to move."""
    version: str = ""
    name: str = ""
    hops: tuple[tuple[str, Count], ...] = ()
    """Some of the next hops of its microbatches, by turns: the end of each one's id, and how many it takes a minute."""
    given: Given | None = None
    evaluation: Evaluation | None = None

    @property
    def speed(self) -> float:
        """Microbatches a second of the device alone, as the peer says; 0 is unknown."""
        return speed(self.device_s)


def brief(record: PeerRecord) -> PeerRecord:
    """Return what decisions read of a record, some 110 bytes instead of 330; views read more.

    The loss is among it: newcomers judge weights by the median of others' losses, and liars among them would count
    `WHOLE_OF` times if few honest peers told theirs. An evaluation stays for some rounds, since few peers make each.
    Numbers are rounded, so that the records of many compress better.
    """
    made = record.evaluation
    is_news = made is not None and (record.state is PeerState.FINISHED or record.round - made.round <= EVALUATED_ROUNDS)
    return PeerRecord(
        peer=record.peer,
        stage=record.stage,
        state=record.state,
        claimed_at=round(record.claimed_at),
        round=record.round,
        inner_steps=record.inner_steps,
        progress=_rounded(record.progress),
        samples=record.samples,
        device_s=_rounded(record.device_s),
        tokens_per_s=_rounded(record.tokens_per_s),
        loss=None if record.loss is None else _rounded(record.loss),
        waiting=tuple(Wait(w.cause, w.seconds) for w in record.waiting if w.cause is not WaitCause.OTHER),
        may_serve=record.may_serve,
        moves_to=record.moves_to,
        evaluation=made if is_news else None,
    )


def _rounded(value: float) -> float:
    """Return a number to `NUMBER_BITS` significant bits."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, NUMBER_BITS)), exponent - NUMBER_BITS)


class SourceProgress(msgspec.Struct, frozen=True):
    """A source's samples: as it claims them, as receipts cover them, and as we have verified them since we began.

    `finished`: the source says that its part is done.
    """

    peer: str
    claimed: int
    signed: int
    verified: int
    finished: bool


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """The live records by stage, as of `read_at` (loop seconds): all, or of a large stage a sample."""

    stages: tuple[tuple[PeerRecord, ...], ...]
    sizes: tuple[StageSize | None, ...] = ()
    """The estimated replicas of each stage whose records are a sample; None, and for missing ones: all are listed."""
    read_at: float = 0.0
    stages_read_at: tuple[float, ...] = ()
    """When each stage was read (loop seconds); empty: all at `read_at`."""
    old_since_s: float | None = None
    """Since when we have heard no peer (loop seconds): the trouble is ours, and the others may be there."""
    run_samples: int = 0
    """Sequences done in the whole run as sources claim them, records of departed ones included."""
    own_samples: int = 0
    """How many of them are ours, those of earlier sessions included."""
    first_samples: int = 0
    """How many of them the other sources had done, each when we first heard of it."""
    sources: int = 0
    """Sources at work or finished. A source that left early or died is neither, and affects no run's end."""
    sources_finished: int = 0
    other_sources: tuple[SourceProgress, ...] = ()
    """The other sources, at work or not, with their receipts."""

    @property
    def others_samples(self) -> int:
        return self.run_samples - self.own_samples

    @property
    def signed_samples(self) -> int:
        """Our own sequences, and the others' that receipts cover."""
        return self.own_samples + sum(source.signed for source in self.other_sources)

    @property
    def unserved(self) -> list[int]:
        return [number for number, records in enumerate(self.stages) if not records]

    @property
    def is_sample(self) -> bool:
        """Whether a stage has more replicas than are listed, so that sums are estimates."""
        return any(self.sizes)

    def stage(self, number: int) -> tuple[PeerRecord, ...]:
        return self.stages[number]

    @property
    def sources_read_at(self) -> float:
        """When the records of stage 0 were read (loop seconds)."""
        return self.stages_read_at[0] if self.stages_read_at else self.read_at

    def size(self, number: int) -> StageSize:
        """Return how many replicas a stage has."""
        return (self.sizes[number] if self.sizes else None) or StageSize(len(self.stages[number]))

    def scale(self, number: int) -> float:
        """Return for how many replicas of a stage each listed one stands."""
        return self.size(number).peers / max(1, len(self.stages[number]))

    def census(self) -> str:
        return ", ".join(f"{number}: {self.size(number)}" for number in range(len(self.stages)))


def some_addresses(roster: Roster) -> list[str]:
    """Return one address of each living peer, unless it leads to another peer.

    They come in an order that nobody outside can work out: an invite has the first few, and ids are easily chosen.
    """
    living = [record for stage in roster.stages for record in stage if record.addresses]
    found = [record.addresses[0] for record in living if record.addresses[0].endswith(f"/p2p/{record.peer}")]
    return sorted(found, key=lambda place: blake2b(place.encode(), key=_SALT).digest())


class Derived(Generic[T]):
    """A value computed from the last roster, once for each roster.

    A roster never changes, so comparing identities is enough: a caller at every microbatch costs little.
    """

    def __init__(self, roster: Callable[[], Roster], make: Callable[[Roster], T]) -> None:
        self._roster, self._make = roster, make
        self._of = roster()
        self._value = make(self._of)

    def __call__(self) -> T:
        roster = self._roster()
        if roster is not self._of:
            self._of, self._value = roster, self._make(roster)
        return self._value


def checked_name(text: str | None) -> str:
    """Return the name that a person asks for, "" for none; raise `UserError` if others would see it changed."""
    name = "" if text is None else unicodedata.normalize("NFC", text)
    if shown_name(name) != name:
        raise usage_error(
            f"{text!r} is no name for a peer.",
            why=f"a name has at most {MOST_LETTERS} letters, digits, signs or single spaces, and none beside them",
            hint="give --name something shorter and plainer",
        )
    return name


def shown_name(name: str) -> str:
    """Return a stranger's name bounded and printable, without combining or direction marks."""
    letters = [each for each in name[: 4 * MOST_LETTERS] if each.isprintable() and unicodedata.category(each)[0] != "M"]
    return " ".join("".join(letters).split())[:MOST_LETTERS].strip()
