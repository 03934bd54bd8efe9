"""The tensors of a newcomer's state, filled piece by piece, and which pieces are right.

The assembly checks hash and values of a piece before it writes the piece. Checked pieces stay right whatever becomes of
the donor, and another donor's manifest keeps all pieces of equal hash. Of a donor before, complete units may stay
beside those of the next one (`mixes`): whole parameters of two near replicas make a replica near both, a parameter with
halves of two would be neither's.

A `ChunkStore` notes pieces outside of this process. A noted piece counts if a manifest lists its hash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gossip.exchange.messages import Implausible, Manifest, ReplicaState, Section
from gossip.rule.outer_step import ROUND_BOUND, Tensors
from gossip.transfer.chunks import DIGEST_BYTES, Span, StateCut, digest, gather, present, raw, scatter

LEAST_SAVING = 0.1
ROUNDS_APART = ROUND_BOUND


class Key(NamedTuple):
    """One piece of a state."""

    section: Section
    number: int


class ChunkStore(Protocol):
    """Notes pieces outside of this process. Never raises: the newcomer fetches again what a store could not keep."""

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None:
        """Note the manifest of the pieces to come, and which units stay those of earlier donors."""

    def put(self, key: Key, digest: bytes, data: Tensor) -> None:
        """Note one piece."""

    def pieces(self) -> Iterator[tuple[Key, bytes, Tensor]]:
        """Yield the pieces that an earlier process noted, with their hashes."""

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        """Return what an earlier process told `follow` last."""

    def discard(self) -> None:
        """Remove everything: the copy is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorSelected:
    """The newcomer fetches a donor's copy. `held_bytes`: here already; `settled_bytes`: of these, earlier donors'."""

    donor: str
    round: int
    total_bytes: int
    held_bytes: int
    settled_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkArrived:
    """A right piece of so many bytes has come."""

    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorLost:
    """The newcomer gave a donor up. `refused`: because the donor cannot be believed."""

    donor: str
    why: str
    refused: bool = False


News = DonorSelected | ChunkArrived | DonorLost


class _Source(NamedTuple):
    """A manifest to follow, the units that stay from earlier donors, and the round in which the state last met any."""

    manifest: Manifest | None = None
    settled: frozenset[int] = frozenset()
    last_met: int = 0


_NOTHING = _Source()


class StateAssembly:
    """The pieces of one stage's state. Every method but `put` is called once at a time, in a worker thread."""

    def __init__(
        self,
        like: Tensors,
        keep: ChunkStore | None = None,
        tell: Callable[[News], None] = lambda _: None,
        moments: Tensors | None = None,
    ) -> None:
        """`like`: tensors (the meta device will do) of the shapes of the weights, float32.

        `moments`: tensors like one moment of each weight, float32 or int8; as the weights by default.
        """
        self.tell = tell
        moments = like if moments is None else moments
        self._like = {each: moments if each in (Section.FIRST, Section.SECOND) else like for each in Section}
        self._cut = StateCut([tensor.nbytes for tensor in like], [tensor.nbytes for tensor in moments])
        self.spans = self._cut.spans
        self._keep = keep
        self._tensors: dict[Section, Tensors] = {}
        self._right: dict[Key, bytes] = {}
        self._source = self._before = _NOTHING
        self._fresh: set[Key] = set()
        self._loaded = False

    @property
    def snapshot(self) -> str:
        """Return the name of the copy that was followed last."""
        return self._source.manifest.snapshot if self._source.manifest is not None else ""

    @property
    def mixed(self) -> bool:
        return bool(self._source.settled)

    def load(self) -> None:
        """Take over what the store kept from an earlier process, the first time."""
        if self._keep is None or self._loaded:
            return
        self._loaded = True
        manifest, settled = self._keep.last()
        # Of an earlier cut or model: its hashes will not fit either.
        if manifest is not None and all(digests.shape[0] == len(self.spans) for digests in present(manifest).values()):
            self._source = _Source(manifest, settled, manifest.last_met)
        for key, expected, data in self._keep.pieces():
            if key.number < len(self.spans) and self._fits(key, data) and digest(data) == expected:
                self._write(key, expected, data)

    def seed(self, found: Mapping[Section, Tensors]) -> None:
        """Copy tensors of our own: pieces of them whose hashes fit need not be fetched."""
        for section, tensors in found.items():
            if [(each.dtype, each.shape) for each in tensors] != [(e.dtype, e.shape) for e in self._like[section]]:
                continue
            for number, span in enumerate(self._cut.of(section)):
                data = gather(tensors, span)
                if Key(section, number) not in self._right:
                    self._write(Key(section, number), digest(data), data)

    def follow(self, manifest: Manifest, donor: str) -> tuple[list[Key], DonorSelected]:
        """Turn to a copy whose manifest is checked; return the pieces to fetch, in order, and the news of it."""
        if self.snapshot != manifest.snapshot:
            self._before, self._fresh = self._source, set()
        there = present(manifest)
        wanted = [Key(section, number) for number in range(len(self.spans)) for section in there]
        lacking = self._lacking(manifest, wanted)
        self._turn_to(self._source_of(manifest, lacking))
        needed = [key for key in lacking if self.spans[key.number].unit not in self._source.settled]
        for section in there:
            self._room(section)
        total_bytes, needed_bytes = self._bytes(wanted), self._bytes(needed)
        return needed, DonorSelected(
            donor=donor,
            round=manifest.round,
            total_bytes=total_bytes,
            held_bytes=total_bytes - needed_bytes,
            settled_bytes=self._bytes(lacking) - needed_bytes,
        )

    def _lacking(self, manifest: Manifest, wanted: list[Key]) -> list[Key]:
        """Return the pieces of a copy that are not here as its hashes say."""
        hashes = {section: bytes(raw(digests).numpy()) for section, digests in present(manifest).items()}

        def expected(key: Key) -> bytes:
            return hashes[key.section][DIGEST_BYTES * key.number : DIGEST_BYTES * (key.number + 1)]

        return [key for key in wanted if self._right.get(key) != expected(key)]

    def _source_of(self, manifest: Manifest, lacking: list[Key]) -> _Source:
        """Decide whether units of donors before stay beside those of this copy."""
        before = self._source.manifest
        if before is not None and lacking:
            complete = self._complete(before)
            rest = [key for key in lacking if self.spans[key.number].unit not in complete]
            if mixes(before, manifest, afresh_bytes=self._bytes(lacking), mixed_bytes=self._bytes(rest)):
                return _Source(manifest, complete, min(self._source.last_met, manifest.last_met))
        return _Source(manifest, last_met=manifest.last_met)

    def put(self, key: Key, data: Tensor) -> None:
        assert self._source.manifest is not None
        expected = bytes(present(self._source.manifest)[key.section][key.number].numpy())
        if not self._fits(key, data):
            size_bytes = self._span(key).size_bytes
            raise Implausible(
                f"piece {key.number} of {key.section} has {data.nbytes} bytes, not {size_bytes}: it is of another form"
            )
        if digest(data) != expected:
            raise Implausible(f"piece {key.number} of {key.section} is not what its hash says")
        if not self._is_finite(key, data):
            raise Implausible(f"piece {key.number} of {key.section}: not finite")
        self._write(key, expected, data)
        self._fresh.add(key)
        if self._keep is not None:
            self._keep.put(key, expected, data)

    def forget(self) -> None:
        """Drop the pieces of the current donor, which has lied; units that it wrote over are not settled any more."""
        for key in self._fresh:
            self._right.pop(key, None)
        spoilt = {self.spans[key.number].unit for key in self._fresh}
        self._fresh = set()
        self._turn_to(self._before._replace(settled=self._before.settled - spoilt))
        self._before = _NOTHING

    def clear(self) -> None:
        """Drop everything: one of several donors has lied."""
        self._right.clear()
        self._fresh, self._before = set(), _NOTHING
        self._turn_to(_NOTHING)

    def _turn_to(self, source: _Source) -> None:
        self._source, manifest = source, source.manifest
        if self._keep is not None:
            # Another process has to know the last meeting of earlier donors too.
            noted = None if manifest is None else replace(manifest, last_met=source.last_met)
            self._keep.follow(noted, source.settled)

    def state(self) -> ReplicaState:
        """Return the state, once all pieces are here."""
        manifest = self._source.manifest
        assert manifest is not None
        there = present(manifest)
        parts = {section: self._tensors[section] if section in there else () for section in Section}
        return ReplicaState(
            slow=parts[Section.SLOW],
            momentum=parts[Section.MOMENTUM],
            optimiser=(*parts[Section.FIRST], *parts[Section.SECOND]),
            round=manifest.round,
            inner_steps=manifest.inner_steps,
            progress=manifest.progress,
            optimiser_steps=manifest.optimiser_steps,
            gathered=parts[Section.GATHERED],
            meetings=manifest.meetings if Section.GATHERED in there else 0,
            last_met=self._source.last_met,
        )

    def _complete(self, manifest: Manifest) -> frozenset[int]:
        """Return the units that are complete: of this copy, or settled before and not lost since."""
        lacking: set[int] = set()
        lost: set[int] = set()
        for section, digests in present(manifest).items():
            for number, span in enumerate(self.spans):
                found = self._right.get(Key(section, number))
                if found is None:
                    lost.add(span.unit)  # the disk has not kept it, for one
                if found != bytes(digests[number].numpy()):
                    lacking.add(span.unit)
        return frozenset({span.unit for span in self.spans} - lacking) | (self._source.settled - lost)

    def _bytes(self, keys: list[Key]) -> int:
        return sum(self._span(key).size_bytes for key in keys)

    def _span(self, key: Key) -> Span:
        return self._cut.of(key.section)[key.number]

    def _fits(self, key: Key, data: Tensor) -> bool:
        return data.dtype is torch.uint8 and tuple(data.shape) == (self._span(key).size_bytes,)

    def _is_finite(self, key: Key, data: Tensor) -> bool:
        """Say whether a piece's float32 values are finite; a code always is."""
        parts = self._span(key).parts
        sizes = [part.stop - part.start for part in parts]
        for part, values in zip(parts, torch.split(data, sizes), strict=True):
            if values.numel() and self._like[key.section][part.tensor].dtype is torch.float32:
                # Behind an odd number of codes a view would not be aligned.
                whole = values if values.storage_offset() % 4 == 0 else values.clone()
                low, high = torch.aminmax(whole.view(torch.float32))
                if not math.isfinite(low) or not math.isfinite(high):
                    return False
        return True

    def _room(self, section: Section) -> Tensors:
        if section not in self._tensors:
            self._tensors[section] = tuple(torch.zeros(like.shape, dtype=like.dtype) for like in self._like[section])
        return self._tensors[section]

    def _write(self, key: Key, expected: bytes, data: Tensor) -> None:
        # While it is written the piece is neither the old one nor the new one.
        self._right.pop(key, None)
        scatter(data, self._room(key.section), self._span(key))
        self._right[key] = expected


def mixes(before: Manifest, after: Manifest, *, afresh_bytes: int, mixed_bytes: int) -> bool:
    """Say whether complete units of the copy before stay beside the copy after.

    They stay if that saves at least `LEAST_SAVING` of the bytes still to be fetched and the two copies belong together:
    the same sections, the same place in the momentum period, and rounds at most `ROUNDS_APART` apart.
    """
    return (
        present(before).keys() == present(after).keys()
        and before.meetings == after.meetings
        and abs(before.round - after.round) <= ROUNDS_APART
        and mixed_bytes <= (1.0 - LEAST_SAVING) * afresh_bytes
    )
