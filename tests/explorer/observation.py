"""What all parts of the checker know: who is there, since when nothing has happened, and what was found broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from noloco_node.node.replica import Replica
from noloco_node.run.config import OuterConfig
from noloco_node.sim.world import World
from tests.explorer.invariant_error import InvariantBroken
from tests.explorer.life_records import Delays, LifeRecord, Lives


@dataclass(slots=True, repr=False)
class CheckerContext:
    """The world as the checker has seen it so far. `quiet_s`: since when nothing has happened to it."""

    world: World
    delays: Delays
    quiet_s: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    """The number of the life of each peer that was there at the last look."""
    present: dict[str, LifeRecord] = field(default_factory=dict)
    """The present life of each peer that has ever trained, or its last."""
    lives: Lives = field(default_factory=dict)
    checked: Counter[str] = field(default_factory=Counter)
    """How often each invariant was really evaluated."""
    broken: InvariantBroken | None = None
    hostile: frozenset[str] = frozenset()
    """Peers that will attack or have: nothing is expected of them."""
    _spoilt_s: dict[str, float] = field(default_factory=dict)
    """Until when messages of a peer may have arrived wrong."""

    def statistics(self) -> dict[str, int | float]:
        """Return how often each invariant was evaluated."""
        return {f"checked.{kind}": count for kind, count in sorted(self.checked.items())}

    @property
    def outer(self) -> OuterConfig:
        """The rule of the outer steps."""
        return self.world.setting.run.outer

    @property
    def idle_s(self) -> float:
        """For how long nothing has happened to the world; negative while something lasts."""
        return self.world.now_s - self.quiet_s

    @property
    def sent_home(self) -> bool:
        """Whether everybody has been asked to go."""
        late = self.world.now_s >= self.world.setting.scenario.swarm.duration_s
        return late or self.world.standstill is not None

    def complain(self, kind: str, sentence: str) -> None:
        """Take note of an invariant that does not hold, if it is the first."""
        if self.broken is None:
            self.broken = InvariantBroken(kind, self.world.now_s, sentence)

    def disturb(self, until_s: float = 0.0) -> None:
        """Note that something happens to the world now, and lasts until `until_s`."""
        self.quiet_s = max(self.quiet_s, until_s, self.world.now_s)

    @property
    def honest_running(self) -> list[str]:
        """The peers of whom something is expected, that were there at the last look."""
        return [name for name in self.running if name not in self.hostile]

    def training(self, *, hostile: bool = False) -> list[tuple[LifeRecord, Replica]]:
        """Return the lives that train, each with its replica. `hostile`: those of hostile peers too."""
        found: list[tuple[LifeRecord, Replica]] = []
        for record in self.present.values():
            expected = hostile or record.name not in self.hostile
            if expected and record.training and self.running.get(record.name) == record.life:
                assert record.peer.replica is not None
                found.append((record, record.peer.replica))
        return found

    def look(self) -> None:
        """See who is there, and whose messages are still to arrive wrong."""
        now_s = self.world.now_s
        running = {name: peer.life.number for name, peer in self.world.peers.items() if peer.running}
        if running != self.running:
            self.running = running
            self.disturb()
        for (name, life), record in self.lives.items():
            if record.ended_s is None and running.get(name) != life:
                record.end(now_s)
        for name, until_s in self._spoilt_s.items():
            if until_s == float("inf") and not self.world.network.is_corrupting(name):
                # The last of them was sent since the last look.
                self._spoilt_s[name] = now_s

    def spoil(self, peer: str) -> None:
        """Note that messages of a peer will arrive wrong: what is plausible in them is believed."""
        if self.world.network.is_corrupting(peer):
            self._spoilt_s[peer] = float("inf")

    def is_spoilt(self, peer: str, since_s: float) -> bool:
        """Say whether messages of a peer may have arrived other than it sent them since then."""
        if peer in self.hostile:
            return True
        until_s = self._spoilt_s.get(peer)
        return until_s is not None and until_s + self.delays.news_s >= since_s
