"""Which replicas of a stage belong in its mean, and the mean.

Replicas of one stage differ a little, by the nature of gossip, and their mean is better than any of them. Three kinds
must stay out of it, and whoever is left out is named with the reason:

- A gross outlier: weights that are not finite, or whose norm is more than twice, or less than half, the median norm of
  the stage's replicas (of an even number the lower of the two in the middle: what diverges grows). Honest replicas
  differ by a few per cent.
- A straggler: more than `staleness_at_most` rounds behind the median round of the stage (of an even number the higher
  one in the middle), as a round itself would judge it. A copy of a home that was at rest for a week would pull the mean
  back by a week.
- A stranger to the others: of three or more, one whose cosine with the median of them is next to nothing. Replicas
  began alike; the negative of honest weights, or noise, has their norm and nothing else of them.

The median, and never the largest or the newest, is the measure: one liar moves nobody else out of the mean. Two
replicas of which one lies are beyond any rule.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import prod
from random import Random
from statistics import median_high, median_low
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from gossip.exchange.messages import Manifest, Parts, Section, StateRequest
from gossip.rule.staleness import ROUND_BOUND
from gossip.transfer.chunks import cut
from gossip.transfer.download import OUTLYING_PROGRESS, Converse, StateWanted, manifest_of
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.run.protocols import state_schema, topic
from noloco_node.swarm.roster import Roster

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 2.0
"""By which a norm may differ from the median."""
LEAST_ALIKE = 0.1
"""Cosine of two replicas. Those of honest ones have more."""
LEAST_REPLICAS = 3
"""Of which one can be told from the others."""


class ReplicaSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: whose it is, where it stood, and the norm of its slow weights."""

    peer: str
    round: int
    inner_steps: int
    progress: float
    norm: float


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is not in the mean, and why."""

    peer: str
    why: str


def drop_outliers(standings: Sequence[ReplicaSummary], rounds_behind: int) -> tuple[list[int], list[LeftOut]]:
    """Return the places of those that belong in the mean, at least one where any is finite, and who is left out."""
    left_out = [
        LeftOut(peer=each.peer, why="its weights are not finite") for each in standings if not math.isfinite(each.norm)
    ]
    finite = [place for place, each in enumerate(standings) if math.isfinite(each.norm)]
    if not finite:
        return [], left_out
    norm = median_low(standings[place].norm for place in finite)
    near = [place for place in finite if norm / FACTOR <= standings[place].norm <= norm * FACTOR]
    left_out += [
        LeftOut(peer=standings[place].peer, why=f"norm {standings[place].norm:.4g}, the median is {norm:.4g}")
        for place in finite
        if place not in near
    ]
    round = median_high(standings[place].round for place in near)
    kept = [place for place in near if standings[place].round >= round - rounds_behind]
    left_out += [
        LeftOut(peer=standings[place].peer, why=f"round {standings[place].round}, the median is {round}")
        for place in near
        if place not in kept
    ]
    return kept, left_out


def drop_strangers(products: Tensor, places: Sequence[int]) -> tuple[list[int], dict[int, float]]:
    """Return who of these places belongs in the mean; of the others, the cosine that most of them have with it at most.

    `products`: of the weights of all, each with each. Where no half agrees, all belong in it.
    """
    if len(places) < LEAST_REPLICAS:
        return list(places), {}
    norms = products.diagonal().sqrt()
    cosines = (products / norms / norms[:, None]).nan_to_num().tolist()
    usual = {i: median_high(cosines[i][j] for j in places if j != i) for i in places}
    kept = [place for place in places if usual[place] >= LEAST_ALIKE]
    if not kept:
        return list(places), {}
    return kept, {place: usual[place] for place in places if place not in kept}


def products_of(tensors: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return the products of replicas, each with each, given each tensor of all of them in turn."""
    import torch

    total = torch.zeros(())
    for replicas in tensors:
        rows = torch.stack([replica.to("cpu", torch.float32).flatten() for replica in replicas])
        total = total + (rows @ rows.T).double()
    return total


def norm_of(read: Callable[[int], Tensor], count: int) -> float:
    """Return the norm of `count` tensors together, read one at a time; not finite where they are not."""
    return math.sqrt(sum(float(read(number).double().square().sum()) for number in range(count)))


def mean_of(replicas: Sequence[Tensor]) -> Tensor:
    """Return the exact mean, rounded once to float32."""
    import torch

    total = replicas[0].to("cpu", torch.float64, copy=True)
    for other in replicas[1:]:
        total += other.to("cpu")
    return (total / len(replicas)).float()


SNAPSHOT = "snapshot"
"""The topic of those who keep snapshots of a stage."""
PATIENCE_S = 10.0
ASKED_AT_ONCE = 8


class WeightsOf(NamedTuple):
    """A stage whose weights are asked for. `kind`: STATE of its replicas, SNAPSHOT of peers that keep one."""

    number: int
    shapes: tuple[tuple[int, ...], ...]
    kind: str

    @property
    def weight_bytes(self) -> int:
        """Of the slow weights."""
        return 4 * sum(map(prod, self.shapes))

    @property
    def schema(self) -> Schema:
        """What is said about them."""
        return state_schema(self.shapes)

    def converse(self, network: PeerNetwork) -> Converse:
        """Return how to talk about them with a peer."""
        return lambda peer: network.talk(peer, topic(self.kind, self.number), self.schema)

    def wanted(self, deadline_s: float) -> StateWanted:
        """Return what to ask for: the slow weights alone."""
        like = tuple(torch.empty(shape, device="meta") for shape in self.shapes)
        return StateWanted(parts=Parts.SLOW, like=like, deadline_s=deadline_s)


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state may take over the slowest line: five sections, each as large as the weights."""
    return 60.0 + len(Section) * weight_bytes / slowest_bytes_per_s


class ManifestReplies(NamedTuple):
    """What was said: by those who answered, and by how many that they are busy with others just now."""

    manifests: dict[str, Manifest]
    busy: int


async def ask_manifests(network: PeerNetwork, peers: Iterable[str], subject: WeightsOf) -> ManifestReplies:
    """Return what each peer says of its weights, round and norm, as far as they answer soon."""
    turns, pieces = asyncio.Semaphore(ASKED_AT_ONCE), len(cut([4 * prod(shape) for shape in subject.shapes]))
    converse, told, busy = subject.converse(network), dict[str, Manifest](), list[str]()

    async def ask(peer: str) -> None:
        async with turns:
            try:
                async with asyncio.timeout(PATIENCE_S), converse(peer) as conversation:
                    reply = await manifest_of(conversation, StateRequest(parts=Parts.OUTLINE), pieces)
            except (ConnectionError, TimeoutError):
                return
            if isinstance(reply, Manifest):
                told[peer] = reply
            else:
                busy.append(peer)

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(ask(peer))
    return ManifestReplies({peer: told[peer] for peer in sorted(told)}, len(busy))


def standings(told: Mapping[str, Manifest]) -> list[ReplicaSummary]:
    """Return what peers said, for a comparison."""
    return [
        ReplicaSummary(
            peer=peer, round=each.round, inner_steps=each.inner_steps, progress=each.progress, norm=each.norm
        )
        for peer, each in told.items()
    ]


MOST_ASKED = 256
"""Of those at work, and a quarter as many of those who are on their way to it."""
AGAIN_S = 10.0
"""Before everybody is asked again."""
ATTEMPTS = 30
"""Where somebody has a snapshot, or may have."""
ATTEMPTS_IN_VAIN = 2
NORM_FACTOR = 4.0
"""By which the norm of a snapshot may differ from the median of three or more: they are of different rounds."""
LEAST_FOR_MEDIAN = 3
"""Offers from which a norm is compared with their median."""
MOST_TIMES = 64
"""As many rounds as the furthest of the other stages may a stage have made: it had the fewer replicas."""


class RunReach(NamedTuple):
    """How far the run is, by its stages at work."""

    round: int
    progress: float

    def allows(self, of: ReplicaSummary | Manifest) -> bool:
        """Say whether a snapshot of another stage may be so far."""
        most = MOST_TIMES * (self.round + ROUND_BOUND)
        return 0 <= of.round <= most and of.progress <= self.progress + OUTLYING_PROGRESS


def donors(own_round: int | None, offers: Sequence[ReplicaSummary], run: RunReach) -> tuple[str, ...]:
    """Return the peers whose snapshot to ask for, the newest first; none where our own checkpoint is as good.

    `own_round`: of our checkpoint of the stage, None without one.
    """
    believed = [offer for offer in offers if run.allows(offer)]
    if len(believed) >= LEAST_FOR_MEDIAN:
        norm = median_low(offer.norm for offer in believed)
        believed = [offer for offer in believed if norm / NORM_FACTOR <= offer.norm <= norm * NORM_FACTOR]
    if own_round is not None:
        believed = [offer for offer in believed if offer.round > own_round + ROUND_BOUND]
    return tuple(offer.peer for offer in sorted(believed, key=lambda offer: -offer.round))


def verify_snapshot(
    offers: Sequence[ReplicaSummary], run: RunReach
) -> Callable[[str, Manifest], Awaitable[str | None]]:
    """Return what refuses whoever gives another snapshot than the one for which `donors` chose it."""
    norms = {offer.peer: offer.norm for offer in offers}

    async def objection(peer: str, manifest: Manifest) -> str | None:
        if not run.allows(manifest):
            return f"its snapshot is of round {manifest.round} and progress {manifest.progress:.2f}, the run at {run}"
        if not norms[peer] / NORM_FACTOR <= manifest.norm <= norms[peer] * NORM_FACTOR:
            return f"its snapshot has the norm {manifest.norm:.4g}, and had {norms[peer]:.4g} a moment ago"
        return None

    return objection


def reached(roster: Roster) -> RunReach:
    """Return how far the stage is that is furthest, by the medians of its replicas at work.

    Newcomers say round 0, and there may be many of them: they count where nobody else is left.
    """
    at_work = [[record for record in records if record.state in AT_WORK] for records in roster.stages]
    stages = [records for records in (at_work if any(at_work) else roster.stages) if records]
    return RunReach(
        max((median_high([record.round for record in records]) for records in stages), default=0),
        max((median_high([record.progress for record in records]) for records in stages), default=0.0),
    )


def asked_of(roster: Roster, me: str, rng: Random) -> list[str]:
    """Return the peers that are asked for a snapshot: whoever works, or has left a stage and not yet arrived."""
    found: list[str] = []
    for states, most in ((AT_WORK, MOST_ASKED), ((PeerState.CATCHING_UP,), MOST_ASKED // 4)):
        records = [record for records in roster.stages for record in records if record.state in states]
        peers = sorted({record.peer for record in records} - {me, *found})
        found += rng.sample(peers, min(most, len(peers)))
    return found


def asks_again(promised: bool, saved: bool, attempt: int) -> bool:
    """Say whether to ask everybody again after this attempt, from 0.

    Where somebody has a snapshot, or is busy giving another one, for some minutes: a stage is at stake. Where nobody
    has, once more if the run's first weights are all that is left, for an answer may have been lost.
    """
    if promised:
        return attempt + 1 < ATTEMPTS
    return not saved and attempt + 1 < ATTEMPTS_IN_VAIN
