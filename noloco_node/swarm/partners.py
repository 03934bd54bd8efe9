"""The replicas of our stage that we may ask for a meeting.

A stage of which nobody knows all is read seldom, so a part of its listed replicas is dead (`noloco_node.swarm.shards`).
There a replica that could not be reached is left out until the roster has a newer record of it. If most could not be
reached, the trouble is ours, and nobody is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from gossip.interface import Candidate
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import PeerRecord, Roster


class Partners:
    """The candidates for a meeting with `me` at a stage: the same tuple until the roster or what we know changes."""

    def __init__(self, me: str, stage: int, roster: Callable[[], Roster]) -> None:
        self._me, self._stage, self._roster = me, stage, roster
        self._of: Roster | None = None
        self._listed: dict[str, PeerRecord] = {}
        self._lost: dict[str, PeerRecord] = {}  # the replicas that could not be reached, each with its record of then
        self._candidates: tuple[Candidate, ...] = ()

    def __call__(self) -> tuple[Candidate, ...]:
        roster = self._roster()
        if roster is not self._of:
            self._of = roster
            others = [each for each in roster.stage(self._stage) if each.peer != self._me]
            self._listed = {each.peer: each for each in others if each.state is PeerState.TRAINING}
            self._lost = {peer: last for peer, last in self._lost.items() if self._listed.get(peer) == last}
            self._choose()
        return self._candidates

    def lose(self, peer: str) -> None:
        """Note that a replica could not be reached."""
        if self._of is not None and self._of.is_sample and peer in self._listed:
            self._lost[peer] = self._listed[peer]
            self._choose()

    def _choose(self) -> None:
        left_out = self._lost if 2 * len(self._lost) <= len(self._listed) else {}
        there = [each for peer, each in self._listed.items() if peer not in left_out]
        self._candidates = tuple([Candidate(each.peer, each.round, each.speed) for each in there])
