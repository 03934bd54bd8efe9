"""Decides when a replica leaves its stage for another that starves, and which one: no coordinator, no flapping.

Peers come and go, and a swarm that began in balance need not stay so: it runs at the speed of its weakest stage,
however much the others could do. `movers` reads from the records who should go to the weakest stage: whoever leaves
the weaker of it and his own stage strongest, and then his own stage. Of those who are as good within a tenth, a hash of
seed and peer decides, so that all who see the same records name the same peer. A stage's last replica never goes; nor
does the last one that has proved its work, to whoever decides: names at a stage are cheap, and hold no weights.

A move costs a copy of the weights and what is done meanwhile, and readings are noisy and late. Hence:

- **Hysteresis.** It takes a gap: after the move the stage that was left must still be stronger than the starving one
  was by half a replica and by a tenth. The way back would need the same gap in the other direction.
- **Patience.** Several readings in a row must find the same stage starving. A stage without any replica is left for a
  while to those who come back with its weights: who went there at once would begin it anew.
- **A stay.** Whoever came to a stage stays for a time that doubles with each move. That bounds the moves of a peer,
  whatever the others say: to three an hour with a first stay of ten minutes.
- **One at a time.** Who is to go waits for a moment of its own, announces it in its record, waits until all must have
  read it, and reads again. It goes only if it still is one to go and nobody else has announced to leave the same stage
  or to go to the same one; of several the first by the hash stays announced, and the others take theirs back. An
  announcement to which nothing follows is heard for a while, and then no more; and who should go first and does not
  is waited for as long, then the next in order may go too. Whatever is announced, and by whomever, keeps nobody for
  more than twice as long while the starving stage gets no stronger: announcements that come and go cost no more.

Records lag, so that two may go where one would do. That leaves the stages within a gap of each other, and the stay
keeps both from swinging back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from pipeline.placement import StageClaim, capacities, powers

GAP_REPLICAS = 0.5
GAP_SHARE = 0.1
"""What must be left of the difference, in replicas and as a part of the starving stage."""
AS_GOOD = 0.9
"""Of the best move's worth: who reaches it is as good a mover."""
READINGS = 3
"""In a row that find the same stage starving."""
DOUBLINGS = 6
"""Of the stay, at most."""
MOST_READINGS = 12
"""For which an announcement of another is heeded, and the first in order is waited for."""
MOST_KEPT = 2 * MOST_READINGS
"""Readings in which announcements may keep us, all together, as long as nobody helps the starving stage."""
NOT_IN_THE_LAST = 0.05
"""Share of the run at whose end nobody moves any more: the copy would not pay."""


class StagePace(NamedTuple):
    """How slowly decisions are made, in seconds.

    `look_s`: between two readings. `settle_s`: from an announcement until all must have read it. `delay_s`: within
    which each draws a moment of its own. `stay_s`: at a stage before the first move. `empty_s`: for which a stage
    without any replica is left to those who come back.
    """

    look_s: float = 30.0
    settle_s: float = 30.0
    delay_s: float = 30.0
    stay_s: float = 600.0
    empty_s: float = 600.0

    @classmethod
    def of(cls, refresh_s: float) -> StagePace:
        """Return what goes with records that are made and read every `refresh_s`."""
        return cls(3 * refresh_s, 3 * refresh_s, 3 * refresh_s, 60 * refresh_s, 60 * refresh_s)


class Move(NamedTuple):
    """Who goes from where to where; `before` and `after`: microbatches a second of the starving stage.

    To its own stage: whoever begins there again, with other weights.
    """

    peer: str
    origin: int
    target: int
    before: float
    after: float

    def __str__(self) -> str:
        starving = f"stage {self.target} " + ("has nobody" if self.before == 0.0 else f"does {self.before:.3g}")
        return f"{starving}, with us {self.after:.3g} microbatches/s, and stage {self.origin} can spare us"


class OwnPlacement(NamedTuple):
    """Who decides: its peer id, the seed of the run, and since when it serves its stage (seconds, any clock)."""

    peer: str
    seed: int
    came_s: float
    moves: int = 0


class MigrationState(NamedTuple):
    """What a replica remembers from one reading to the next; never changed, only replaced.

    `starving`: the stage that the last `readings` in a row found so, since `since_s`. `ready_s`: the moment of our own.
    `announced_s`: since when our record says that we go. `heard`: for how many readings others have announced.
    `kept`: readings in which they have kept us, since the starving stage did `kept_at` microbatches a second.
    """

    starving: int | None = None
    readings: int = 0
    since_s: float = 0.0
    ready_s: float = 0.0
    announced_s: float | None = None
    heard: Mapping[str, int] = MappingProxyType({})
    kept: int = 0
    kept_at: float = 0.0


class MigrationDecision(NamedTuple):
    """What to do after a reading. `announce`: our record shall name its target. `go`: leave now."""

    state: MigrationState
    move: Move | None = None
    go: bool = False

    @property
    def announce(self) -> int | None:
        """The stage that our record shall say we go to."""
        return self.move.target if self.move is not None and self.state.announced_s is not None else None


def stay_s(moves: int, pace: StagePace) -> float:
    """Return how long a peer stays that has moved so many times."""
    return pace.stay_s * 2.0 ** min(moves, DOUBLINGS)


def may_move(me: OwnPlacement, pace: StagePace, now_s: float, progress: float) -> bool:
    """Say whether we may go at all: we have stayed long enough, and the run is not about to end."""
    return now_s - me.came_s >= stay_s(me.moves, pace) and progress < 1.0 - NOT_IN_THE_LAST


def movers(claims: Sequence[StageClaim], work: Sequence[float], seed: int) -> list[Move]:
    """Return who could as well go to the weakest stage, the one who should first; nobody where it is not worth it.

    `claims`: all live records; who is willing says so in `may_serve`. `work`: of a microbatch at each stage.
    """
    capacity, power = capacities(claims, work), powers(claims, work)
    target = min(range(len(work)), key=capacity.__getitem__)
    staying = [0] * len(work)
    for claim in claims:
        if claim.training and claim.moves_to is None and 0 <= claim.stage < len(work):
            staying[claim.stage] += 1
    found: list[tuple[float, float, Move]] = []
    for claim in claims:
        origin, willing = claim.stage, claim.training and claim.may_serve is not None and target in claim.may_serve
        if not willing or origin == target or not 0 <= origin < len(work):
            continue
        brought = power[claim.peer] / work[target]
        left, joined = capacity[origin] - power[claim.peer] / work[origin], capacity[target] + brought
        gap = max(GAP_REPLICAS * brought, GAP_SHARE * capacity[target])
        if staying[origin] - (claim.moves_to is None) >= 1 and left >= capacity[target] + gap:
            move = Move(claim.peer, origin, target, capacity[target], joined)
            found.append((min(left, joined), left, move))
    least = AS_GOOD * max((worth for worth, _, _ in found), default=0.0)
    good = [(left, move) for worth, left, move in found if worth >= least]
    spare = AS_GOOD * max((left for left, _ in good), default=0.0)
    return sorted([move for left, move in good if left >= spare], key=lambda move: _order(seed, move.peer))


def decide(
    me: OwnPlacement,
    state: MigrationState,
    claims: Sequence[StageClaim],
    work: Sequence[float],
    pace: StagePace,
    now_s: float,
    proved: Collection[str] | None = None,
) -> MigrationDecision:
    """Judge one reading of all stages: stay, announce to go, or go.

    `proved`: peers of our stage that have brought weights to us; we do not leave it to names alone. None: anybody.
    """
    others = [claim for claim in claims if claim.moves_to is not None and claim.peer != me.peer]
    heard = {claim.peer: state.heard.get(claim.peer, 0) + 1 for claim in others}
    found = movers(claims, work, me.seed)
    if not found:
        return MigrationDecision(MigrationState(heard=heard))
    state = _after_reading(me, state._replace(heard=heard), found[0], pace, now_s)
    stays = state._replace(announced_s=None)
    move = _own_move(me, state, found)
    early = state.readings < READINGS or now_s < state.ready_s
    left_to_returning = found[0].before == 0.0 and now_s - state.since_s < pace.empty_s
    if move is None or early or left_to_returning or not _is_held(move.origin, claims, proved):
        return MigrationDecision(stays)
    if _gives_way(me, state, move, others):
        return MigrationDecision(stays._replace(kept=state.kept + 1))
    if state.announced_s is None:
        return MigrationDecision(state._replace(announced_s=now_s), move)
    return MigrationDecision(state, move, go=now_s - state.announced_s >= pace.settle_s)


def _after_reading(
    me: OwnPlacement, state: MigrationState, first: Move, pace: StagePace, now_s: float
) -> MigrationState:
    """Return what is remembered after one more reading, by which `first` should go."""
    if first.target != state.starving:
        state = MigrationState(first.target, since_s=now_s, heard=state.heard)
    state = state._replace(readings=state.readings + 1)
    if first.before > state.kept_at * (1.0 + GAP_SHARE):
        # Somebody has come, so that announcements are kept.
        state = state._replace(kept=0, kept_at=first.before)
    if state.readings == READINGS:
        rng = Random(f"{me.seed}|moving|{me.peer}|{me.moves}|{state.starving}")
        state = state._replace(ready_s=now_s + rng.uniform(0.0, pace.delay_s))
    return state


def _own_move(me: OwnPlacement, state: MigrationState, found: Sequence[Move]) -> Move | None:
    """Return our move, if it is our turn by the order of `found`.

    Who has announced goes on, also where by now another would be the first of equals. Whoever could have gone for long,
    and has not, keeps nobody.
    """
    candidates = found if state.announced_s is not None else found[: 1 + state.readings // MOST_READINGS]
    return next((each for each in candidates if each.peer == me.peer), None)


def _is_held(stage: int, claims: Sequence[StageClaim], proved: Collection[str] | None) -> bool:
    """Say whether somebody stays at a stage whose work we have seen; None in place of `proved`: anybody will do."""
    return proved is None or any(
        claim.stage == stage and claim.training and claim.moves_to is None and claim.peer in proved for claim in claims
    )


def _gives_way(me: OwnPlacement, state: MigrationState, move: Move, others: Sequence[StageClaim]) -> bool:
    """Say whether another's announcement keeps us: any before we have made one, then one that is earlier by the hash.

    `others`: those who have announced.
    """
    if state.kept >= MOST_KEPT:
        return False
    rivals = [
        claim.peer
        for claim in others
        if (claim.moves_to == move.target or claim.stage == move.origin) and state.heard[claim.peer] <= MOST_READINGS
    ]
    if state.announced_s is None:
        return bool(rivals)
    return any(_order(me.seed, rival) < _order(me.seed, me.peer) for rival in rivals)


def _order(seed: int, peer: str) -> tuple[bytes, str]:
    return blake2b(f"{seed}|moving|{peer}".encode(), digest_size=8).digest(), peer
