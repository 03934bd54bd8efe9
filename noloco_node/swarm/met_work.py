"""The work of the others in a run of one stage, as replicas saw it at their meetings.

No samples pass through other hands there. But in a meeting each side says how many inner steps it brings that it has
not brought to anybody before, and has to be at hand with weights that fit. So each replica gives receipts
(`noloco_node.swarm.receipts`) for what its partners brought, and the receipts of all replicas together are all work but
that since each one's last meeting. They add up however long a replica was out of the roster.

A receipt costs nothing, nor does a name. What costs is a meeting: a replica has one a round. So one reader believes all
receipts together up to `MOST_TIMES` what its own meetings make likely, whoever gave them: the number of replicas that
take part, times what one of them sees. Both are medians over itself and its partners, each weighted by how much of our
own work it met. The number follows from whom two partners have met in common, as wild animals are counted by catching
them twice, and names that nobody meets are in no such sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from noloco_node.swarm.receipts import Tally, weighted_median

MOST_TIMES = 2.0
MOST_BROUGHT = 8
"""Times our own steps, or a round's, that a partner is believed to bring to a meeting: devices differ."""


class MetWork(NamedTuple):
    """What the meetings show: samples of the others that are believed, and how many replicas take part."""

    samples: float
    replicas: float


def met_work(me: str, tally: Tally, signed: Mapping[str, Mapping[str, int]]) -> MetWork | None:
    """Return what we believe, None before our first meeting. `signed`: samples by source and signer."""
    if not tally.brought:
        return None
    seen: dict[str, Mapping[str, int]] = {me: tally.samples}
    others: dict[str, dict[str, int]] = {}
    for source, by in signed.items():
        for signer, samples in by.items():
            if signer not in (me, source):
                others.setdefault(signer, {})[source] = samples
    seen |= others
    voices = {peer: float(brought) for peer, brought in tally.brought.items() if peer in others}
    voices[me] = sum(voices.values()) / len(voices) if voices else 1.0
    weights = {peer: voice / sum(voices.values()) for peer, voice in voices.items()}
    typical = weighted_median({peer: float(sum(seen[peer].values())) for peer in voices}, weights)
    replicas = weighted_median({peer: _replicas(me, seen[me], peer, seen[peer]) for peer in voices}, weights)
    said = sum(samples for by in seen.values() for source, samples in by.items() if source != me)
    return MetWork(min(said, MOST_TIMES * replicas * typical), replicas)


def _replicas(me: str, met: Mapping[str, int], peer: str, met_by_it: Mapping[str, int]) -> float:
    """Return how many replicas two of them make likely, by whom both have met."""
    ours, theirs = met.keys() - {me, peer}, met_by_it.keys() - {me, peer}
    if peer == me or not ours or not theirs:
        return float(len(met.keys() | met_by_it.keys() | {me, peer}))
    return 2.0 + len(ours) * len(theirs) / max(1, len(ours & theirs))
