"""A state that stands still while newcomers fetch it, in memory or elsewhere."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gossip.exchange.messages import Parts, ReplicaState, Section
from gossip.exchange.swap import norm
from gossip.transfer.chunks import Span, gather, sections, tensors_of


class HeldCopy(Protocol):
    """What a donor reads the pieces of. `counters`: the state, whose tensors are not looked at."""

    @property
    def counters(self) -> ReplicaState:
        """The state without its tensors."""

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections that it has."""

    def norm(self) -> float:
        """Return the norm of the slow weights."""

    def read(self, section: Section, span: Span) -> Tensor:
        """Return a piece, uint8, of its own memory; raise `OSError` where it cannot be read."""


class CopyInMemory:
    """A state whose tensors are never written into; implements `HeldCopy`."""

    def __init__(self, state: ReplicaState) -> None:
        self.counters, self.sections = state, held_sections(state)

    def norm(self) -> float:
        """Return the norm of the slow weights."""
        return norm(self.counters.slow)

    def read(self, section: Section, span: Span) -> Tensor:
        """Return a copy of a piece: the tensors may be written into by others once this is let go."""
        return gather(tensors_of(self.counters, section), span).clone()


def held_sections(state: ReplicaState) -> tuple[Section, ...]:
    """Return the sections of which a state has tensors."""
    momentum, optimiser = bool(state.momentum), bool(state.optimiser)
    return sections(Parts.ALL, momentum=momentum, meetings=state.meetings, optimiser=optimiser)
