"""How much of a run of one stage one reader has seen worked on, to hold against what sources claim.

There nobody else has a source's samples pass through its hands, and so nobody can sign for them. But each replica says
how many inner steps it has taken, and all claims together count as far as the growth of these numbers covers them: a
lie about samples alone ends no run, and one about both goes as far as `MOST_TIMES` lets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from noloco_node.swarm.roster import PeerRecord

SLACK = 1.03
"""What goes uncounted of honest work: the last steps of replicas that die between two records."""
READINGS_LATE = 2
"""By which a record may be older than that of the source whose samples it covers."""
MOST_TIMES = 8.0
"""Times the typical growth, or our own, that a replica is believed to have: devices differ (`pipeline.placement`)."""


class ObservedWork:
    """Inner steps that the replicas of one stage were seen to take; `steps` in all."""

    def __init__(self, records: Sequence[PeerRecord], *, from_start: bool) -> None:
        """`records`: of the stage, as we begin. `from_start`: what they have done by then is part of it."""
        self.steps = 0.0
        self._known = {record.peer: 0 if from_start else record.inner_steps for record in records}
        self._latest = 0.0
        self._replicas = 0
        self.take(records, 0.0)

    def take(self, records: Sequence[PeerRecord], own_steps: float) -> None:
        """Take note of another reading of the stage; `own_steps`: worth of samples that we had done since the last."""
        grown = [record.inner_steps - self._known.get(record.peer, record.inner_steps) for record in records]
        known = [max(0, steps) for steps in grown]
        # Names that do nothing have no voice, and our own work is what nobody can talk down.
        most = MOST_TIMES * max(own_steps, median_low([steps for steps in known if steps] or [0]))
        self._latest = sum(min(steps, most) for steps in known)
        self.steps += self._latest
        self._known = {record.peer: record.inner_steps for record in records}
        self._replicas = len(records)

    def covers(self) -> float | None:
        """Return the inner steps up to which claims are covered by now; None while no work has been seen."""
        if not self.steps:
            return None
        return SLACK * self.steps + READINGS_LATE * (self._latest + self._replicas)
