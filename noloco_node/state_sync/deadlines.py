"""How long a copy of a stage's state may take."""

from __future__ import annotations

from gossip.exchange.messages import Section


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state may take over the slowest line: five sections, each as large as the weights."""
    return 60.0 + len(Section) * weight_bytes / slowest_bytes_per_s
