"""What all peers of a simulation share: lines, latencies, losses, wrong messages, who is cut off, and the DHT.

`SimNetwork` adds the peers. Every draw comes from a generator of its purpose, in the order of events.

A message that is to arrive wrong goes through the production wire: it is encoded as its sender would, spoilt, and
decoded by `wire.FrameDecoder` against the schema of the receiver. The receiver gets what a real peer would get:
another message or a `Violation`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from noloco_node.network.schema import MessageSpec, Schema, TensorSpec, Violation
from noloco_node.network.wire import FrameDecoder, beat, encode
from noloco_node.sim.network.dht import SimDht
from noloco_node.sim.network.link_model import Access, AccessLine, Link, LinkUse, NetworkConditions


class Corruption(StrEnum):
    """A way to spoil a message."""

    FLIP = "flip"
    """Some bytes of the frame are others."""
    SHAPE = "shape"
    """Its tensors have one element more in their last dimension, and its header says so."""
    NOT_FINITE = "not finite"
    """A tensor contains a NaN."""
    GARBLED_VALUES = "garbled values"
    """All floats are a million times what they were: finite, and absurd."""


GARBLING = 1e6
_MOST_FLIPS = 4


@cache
def tensor_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields whose annotations mention `Tensor`, as the schema reads them."""
    return tuple(field.name for field in dataclasses.fields(kind) if "Tensor" in str(field.type))


def tensors_of(message: Any) -> list[Tensor]:
    values = [getattr(message, name) for name in tensor_fields(message.__class__)]
    several = [value if isinstance(value, tuple) else (value,) for value in values if value is not None]
    return [tensor for group in several for tensor in group]


def spoil(message: Any, how: Corruption, said: Schema, heard: Schema, rng: Random) -> Any:
    """Return what a receiver with the schema `heard` decodes of a message that a sender with the schema `said` spoilt.

    Raises Violation where the receiver does. A message without floats cannot be `NOT_FINITE` or `GARBLED_VALUES`: bytes
    are flipped instead.
    """
    floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors_of(message))
    if how is Corruption.FLIP or (how is not Corruption.SHAPE and not floats):
        return _decode(_flip(_frame(message, said), len(encode(message, said)[0]), rng), heard)
    if how is Corruption.SHAPE:
        wrong = dataclasses.replace(message, **_mapped(message, _grown))
        # By this schema, of this name, it is as it should be.
        spec = MessageSpec(said.names[message.__class__], _mapped(wrong, _spec))
        return _decode(_frame(wrong, Schema({message.__class__: spec})), heard)
    change = _with_nan if how is Corruption.NOT_FINITE else _garbled
    spoilt = dataclasses.replace(message, **_mapped(message, change))
    return _decode(_frame(spoilt, said), heard)


def _frame(message: Any, schema: Schema) -> bytearray:
    return bytearray().join(encode(message, schema))


def _flip(frame: bytearray, head_bytes: int, rng: Random) -> bytearray:
    """Change one to four bytes: of prefix and header in half of all cases, for the tensors are mostly far longer."""
    reach = head_bytes if rng.random() < 0.5 else len(frame)
    for _ in range(rng.randint(1, _MOST_FLIPS)):
        frame[rng.randrange(reach)] ^= rng.randint(1, 255)
    return frame


def _decode(frame: bytearray, schema: Schema) -> Any:
    """Return the message that a receiver reads.

    Lengths that grew make it wait for bytes that the sender's beats bring in time. Here they come at once.
    """
    intake, rest = FrameDecoder(schema), memoryview(frame)
    while True:
        space = intake.wants()
        if not rest:
            rest = memoryview(beat())
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        found = intake.got(count)
        if found is not None:
            if rest:
                raise Violation(f"{len(rest)} bytes follow a frame of the kind {found.kind.name}")
            return found.content


def _mapped(message: Any, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in tensor_fields(message.__class__):
        value = getattr(message, name)
        several = isinstance(value, tuple)
        found[name] = tuple(map(change, value)) if several else None if value is None else change(value)
    return found


def _grown(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1) if tensor.dim() else tensor.reshape(1).repeat(2)


def _with_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.detach().clone()
    if spoilt.is_floating_point() and spoilt.numel():
        spoilt.view(-1)[0] = float("nan")
    return spoilt


def _garbled(tensor: Tensor) -> Tensor:
    return tensor.detach() * GARBLING if tensor.is_floating_point() else tensor


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


HEAD_BYTES = 100
"""About what a message takes on the line beside its tensors."""
_UNNAMED_SIDE = -1
"""The side of the peers that no group of a partition names."""


def message_bytes(message: object, topic: str) -> int:
    """Return the bytes of a message's tensors as they are in memory, and of a header."""
    return HEAD_BYTES + sum(tensor.nbytes for tensor in tensors_of(message))


@dataclass(frozen=True, slots=True)
class MediumState:
    """The state that every message needs; the medium makes it anew when conditions, lines or faults change."""

    has_cuts: bool
    """Whether nothing passes between some peers."""
    is_free: bool
    """Whether nothing keeps any message from being put in flight at once."""
    affected_share: float
    """Share of messages that are lost, late or doubled."""


class Medium:
    """Lines and faults; `size_bytes(message, topic)` says what a message takes on the line."""

    state: MediumState

    def __init__(self, conditions: NetworkConditions, seed: int, size_bytes: Callable[[Any, str], int]) -> None:
        self.size_bytes, self.dht = size_bytes, SimDht()
        self.failures: list[tuple[str, Exception]] = []
        """Errors of handlers beside a `ConnectionError`, with the peer of the handler: bugs, as a rule."""
        self.counts: Counter[str] = Counter()
        self.message_counts: Counter[str] = Counter()
        self.fate_rng, self.corruption_rng = Random(f"{seed}|network|fate"), Random(f"{seed}|network|tamper")
        self.lag_rng, self._latency_rng = Random(f"{seed}|network|lag"), Random(f"{seed}|network|latency")
        self.held_outboxes: dict[Callable[[], None], None] = {}
        """How each outbox that holds messages back now lets them go, where its two peers reach each other again."""
        self._round_kind: str | None = None
        self._round_share: float | None = None
        self._lines: dict[str, AccessLine] = {}
        self._accesses: dict[str, Access] = {}
        self._limited: set[str] = set()
        self._silent: set[str] = set()
        self._sides: dict[str, int] | None = None
        self._corruptions: dict[str, deque[Corruption]] = {}
        self.conditions = conditions

    # How long a message takes.

    @property
    def conditions(self) -> NetworkConditions:
        """The conditions of all lines; a caller may set others at any moment."""
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: NetworkConditions) -> None:
        self._conditions = conditions
        self.draw_latency = conditions.latency.sampler(self._latency_rng)
        self._update_state()

    def round_trip_s(self) -> float:
        """Draw the time of a dial, or of a question to the DHT, and its answer."""
        conditions, late_s = self._conditions, 0.0
        if conditions.late and self.fate_rng.random() < conditions.late:
            self.counts["dials.late"] += 1
            late_s = conditions.late_s
        return self.draw_latency() + late_s + self.draw_latency()

    # The lines of the peers.

    def share_with_rounds(self, kind: str, share: float) -> None:
        """Let conversations about a topic of this kind have this share of every line, before there is any."""
        self._round_kind, self._round_share = kind, share

    def is_rounds(self, topic: str) -> bool:
        return topic.partition("/")[0] == self._round_kind

    def set_access(self, peer: str, access: Access) -> None:
        """Give a peer another line; transfers under way take the new rates at once."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        self._accesses[peer] = access
        line.up.change(access.up_bytes_per_s, now_s)
        line.down.change(access.down_bytes_per_s, now_s)
        if min(line.up.rate, line.down.rate) < math.inf:
            self._limited.add(peer)
        else:
            self._limited.discard(peer)
        self._update_state()

    def dials_only(self, peer: str) -> bool:
        access = self._accesses.get(peer)
        return access is not None and access.dials_only

    def line(self, peer: str) -> AccessLine:
        """Return a peer's line; it outlives the peer's restarts."""
        line = self._lines.get(peer)
        if line is None:
            now_s = asyncio.get_running_loop().time()
            share = self._round_share
            line = self._lines[peer] = AccessLine(Link(math.inf, now_s, share), Link(math.inf, now_s, share))
        return line

    def link_use(self, peer: str) -> tuple[LinkUse, LinkUse]:
        """Return the use of a peer's uplink and of its downlink since it came."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        return line.up.use(now_s), line.down.use(now_s)

    # Who cannot be reached.

    def is_cut(self, one: str, other: str) -> bool:
        return one in self._silent or other in self._silent or self.side(one) != self.side(other)

    def side(self, peer: str) -> int | None:
        """Return on which side of the partition a peer is; None when there is no partition."""
        return None if self._sides is None else self._sides.get(peer, _UNNAMED_SIDE)

    # Wrong messages, and those that broke.

    def corrupt(self, peer: str, how: Corruption, count: int = 1) -> None:
        """Let the next `count` messages with tensors that a peer sends arrive wrong."""
        self._corruptions.setdefault(peer, deque()).extend([how] * count)
        self._update_state()

    def is_corrupting(self, peer: str) -> bool:
        return peer in self._corruptions

    def next_corruption(self, peer: str, message: Any) -> Corruption | None:
        """Take what is to be wrong with this message that a peer sends, if anything."""
        waiting = self._corruptions.get(peer)
        if waiting is None or not any(tensor.numel() for tensor in tensors_of(message)):
            return None
        how = waiting.popleft()
        if not waiting:
            del self._corruptions[peer]
            self._update_state()
        return how

    def count_break(self, kind: type[ConnectionError]) -> None:
        given_up = kind is ConnectionAbortedError
        self.counts["conversations.given_up" if given_up else "conversations.broken"] += 1
        self.counts[f"lost.{kind.__name__}"] += 1

    def _update_state(self) -> None:
        conditions, has_cuts = self._conditions, bool(self._silent) or self._sides is not None
        self.state = MediumState(
            has_cuts=has_cuts,
            is_free=not (has_cuts or self._limited or self._corruptions),
            affected_share=1 - (1 - conditions.loss) * (1 - conditions.late) * (1 - conditions.duplicate),
        )
