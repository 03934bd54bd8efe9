"""How a replica's state is cut into pieces, and how pieces become tensors again.

A state consists of sections (`messages.Section`), each a set of tensors, one a parameter. The weights are cut: a large
tensor into ranges of bytes, small ones bundled whole. No piece holds parts of two tensors. A **unit** is one large
tensor or one bundle; a newcomer tells the pieces of two donors apart unit by unit. A section whose tensors take other
bytes, such as coded moments, has as many pieces, of the same units and the same shares of each tensor.

The cut follows from the shapes, so both ends know it in advance; a manifest adds the SHA-256 of each piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gossip.exchange.messages import Manifest, Parts, ReplicaState, Section

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_BYTES = 32
LEAST_PIECE_BYTES = 4096
MOST_PIECE_BYTES = 2**22
PIECES = 16  # about how many a section has at least, so that several streams share the work evenly


class Part(NamedTuple):
    """Bytes `start` to `stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


class Span(NamedTuple):
    """The parts of a section in one piece: a range of one tensor, or several whole ones. `unit`: its number."""

    unit: int
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


def piece_bytes(section_bytes: int) -> int:
    """Return the most that a piece of such a section holds: a power of two."""
    share = max(1, section_bytes // PIECES)
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, 1 << (share.bit_length() - 1)))


def cut(tensor_bytes: Sequence[int]) -> tuple[Span, ...]:
    """Cut one section, given the size of each of its tensors, into pieces: at least one, which may be empty."""
    limit = piece_bytes(sum(tensor_bytes))
    spans: list[Span] = []
    bundle: list[Part] = []
    unit = 0

    def close() -> None:
        nonlocal unit
        if bundle:
            spans.append(Span(unit, tuple(bundle)))
            bundle.clear()
            unit += 1

    for tensor, size in enumerate(tensor_bytes):
        if size > limit:
            close()
            spans += [Span(unit, (Part(tensor, at, min(at + limit, size)),)) for at in range(0, size, limit)]
            unit += 1
            continue
        if sum(part.stop for part in bundle) + size > limit:
            close()
        bundle.append(Part(tensor, 0, size))
    close()
    return tuple(spans) or (Span(0, ()),)


class StateCut:
    """The cut of every section. `weights`: bytes of each weight; `moments`: of one moment of each, None for as many."""

    def __init__(self, weights: Sequence[int], moments: Sequence[int] | None = None) -> None:
        self.spans = cut(weights)  # of the weights; all sections have their number and units
        self._moments = self.spans
        if moments is not None and tuple(moments) != tuple(weights):
            shares = tuple(zip(moments, weights, strict=True))
            self._moments = tuple(
                span._replace(parts=tuple(_rescaled(part, *shares[part.tensor]) for part in span.parts))
                for span in self.spans
            )

    def of(self, section: Section) -> tuple[Span, ...]:
        return self._moments if section in (Section.FIRST, Section.SECOND) else self.spans

    def size_bytes(self, section: Section) -> int:
        return sum(span.size_bytes for span in self.of(section))


def _rescaled(part: Part, after_bytes: int, before_bytes: int) -> Part:
    """Return the same share of a tensor that takes other bytes."""
    start, stop = (at * after_bytes // before_bytes if before_bytes else 0 for at in (part.start, part.stop))
    return part._replace(start=start, stop=stop)


def sections(parts: Parts, *, momentum: bool, meetings: int, optimiser: bool) -> tuple[Section, ...]:
    """Return the sections of a state that a request for `parts` covers."""
    if parts is not Parts.ALL:
        return (Section.SLOW,) if parts is Parts.SLOW else ()
    found = [Section.SLOW, *([Section.MOMENTUM] if momentum else [])]
    if meetings:
        found.append(Section.GATHERED)
    return (*found, Section.FIRST, Section.SECOND) if optimiser else tuple(found)


def present(manifest: Manifest) -> dict[Section, Tensor]:
    """Return the digests of the sections that a manifest lists."""
    listed = {section: getattr(manifest, section) for section in Section}
    return {section: digests for section, digests in listed.items() if digests is not None}


def tensors_of(state: ReplicaState, section: Section) -> tuple[Tensor, ...]:
    half = len(state.optimiser) // 2
    found: dict[Section, tuple[Tensor, ...]] = {
        Section.SLOW: state.slow,
        Section.MOMENTUM: state.momentum,
        Section.GATHERED: state.gathered,
        Section.FIRST: state.optimiser[:half],
        Section.SECOND: state.optimiser[half:],
    }
    return found[section]


def raw(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous CPU tensor as uint8 [bytes]."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def gather(tensors: Sequence[Tensor], span: Span) -> Tensor:
    """Return a piece as uint8 [bytes]: a view where it is part of one tensor."""
    import torch

    views = [raw(tensors[part.tensor])[part.start : part.stop] for part in span.parts]
    if len(views) == 1:
        return views[0]
    return torch.cat(views) if views else torch.empty(0, dtype=torch.uint8)


def scatter(data: Tensor, tensors: Sequence[Tensor], span: Span) -> None:
    at = 0
    for part in span.parts:
        size = part.stop - part.start
        raw(tensors[part.tensor])[part.start : part.stop] = data[at : at + size]
        at += size


def digest(data: Tensor) -> bytes:
    content: Any = data.numpy()
    return hashlib.sha256(content).digest()  # lets other threads run meanwhile


def listed(digests: Iterable[bytes]) -> Tensor:
    """Return digests as a manifest has them: uint8 [pieces, 32]."""
    import torch

    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, DIGEST_BYTES)


def name_of(counters: Sequence[float], digests: Iterable[bytes]) -> str:
    """Return the name of a copy: it follows from its content."""
    total = hashlib.sha256(repr(tuple(counters)).encode())
    for each in digests:
        total.update(each)
    return total.hexdigest()[:32]


class HeldCopy(Protocol):
    """A copy of a state that does not change while newcomers fetch it. `counters`: the state without tensors."""

    @property
    def counters(self) -> ReplicaState: ...

    @property
    def sections(self) -> tuple[Section, ...]: ...

    def norm(self) -> float:
        """Return the norm of the slow weights."""

    def read(self, section: Section, span: Span) -> Tensor:
        """Return a piece, uint8, of its own memory; raise `OSError` where it cannot be read."""


class CopyInMemory:
    """A state whose tensors are never written into; implements `HeldCopy`."""

    def __init__(self, state: ReplicaState) -> None:
        self.counters, self.sections = state, held_sections(state)

    def norm(self) -> float:
        from gossip.exchange.codec import norm  # which loads torch

        return norm(self.counters.slow)

    def read(self, section: Section, span: Span) -> Tensor:
        # A copy: the replica may write into the tensors once this is let go.
        return gather(tensors_of(self.counters, section), span).clone()


def held_sections(state: ReplicaState) -> tuple[Section, ...]:
    momentum, optimiser = bool(state.momentum), bool(state.optimiser)
    return sections(Parts.ALL, momentum=momentum, meetings=state.meetings, optimiser=optimiser)
