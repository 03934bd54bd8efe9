"""Decides which replica of the next stage gets a microbatch: by standing first, then by chance.

**Standing.** A replica is proved once it has returned a gradient to this sender: names cost nothing, work does.

- A replica that could not be reached, fell silent or sent what no peer may send is a suspect. It is left alone for four
  seconds, or for ten times what its loss cost; twice as long after each further loss, up to ten minutes, unless it has
  worked in between for as long as it was left alone. Losses while it is a suspect count as one.
- A late refusal is such a loss too, whatever its reason: the replica held the microbatch for longer than a gradient
  usually takes, and has done no work. It is excused after ten times as much work, and while no other replica works.
- A replica that refuses again before it has returned a gradient, while others return some, is left alone for ten times
  what its refusals have taken since then. Otherwise a peer could hold each microbatch for a little less. Refusals that
  take a tenth of what a gradient takes, or less, do not count.
- On trial are suspects whose time is over and, where others are proved, the unproved. Each has one call at a time.
- Once an unproved replica was lost, only the proved are in the bag, because the others may be names alone. One unproved
  at a time, first those that never were tried, gets a microbatch that a proved one gets as well. If no proved replica
  is in favour, all are asked.

**The bag.** A sender draws without replacement from a bag with as many entries as the next stage has replicas, shared
out in proportion to their speeds by largest remainder; the rounding is carried to the next bag. So routes are random,
as NoLoCo (arXiv 2506.10911) wants them for mixing, and the load is even over every few draws. A newcomer gets an entry
at once, and every other draw is one of newcomers alone while there are any: else it would wait for half a bag.

Speeds are what strangers say of themselves. An impossible one counts as the median of the others, and speeds within a
tenth of each other as equal. No share falls below about a ninth of an equal one, so that a replica measured in a bad
moment is asked again. `bounded` says how far a high speed is believed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple

LEAST_SHARE = 1 / 8  # least speed that a replica is believed to have, as a part of the mean
EQUAL_WITHIN = 1.1  # device times whose ratio is at most this count as equal
UNPROVEN = 1.25
"""Times the typical speed that a replica counts as on its word alone: with it, one of four gets 29 % of the routes."""
TIMES_SEEN = 2.0
"""Weight of the lead that a replica's replies show: a reply also contains the time of the line and of later stages."""
MOST_BELIEVED = 8.0
"""Times the typical speed that a replica counts as at most (as in `placement`): to invent an answer is fastest."""

UNSEEN: Mapping[str, float] = MappingProxyType({})


class Hop(NamedTuple):
    """A replica of the next stage. `device_s`: its device seconds a microbatch; 0 when unknown."""

    peer: str
    device_s: float = 0.0


class Bag(NamedTuple):
    """One sender's draws to come; never changed, only replaced.

    `entries`: peers left to draw, each as often as it is still due.
    `credit`: for each peer that the bag knows, the part of an entry that rounding still owes it; -1 to 1.
    `hops`: those that it was drawn for last. Where the next draw is for the very same, there is nothing to compare.
    `new`: peers that came while the bag knew others, and that were not drawn yet.
    """

    entries: tuple[str, ...] = ()
    credit: Mapping[str, float] = MappingProxyType({})
    hops: tuple[Hop, ...] | None = None
    new: frozenset[str] = frozenset()


def next_hop(
    bag: Bag, hops: Sequence[Hop], avoid: Collection[str], rng: Random, reply_s: Mapping[str, float] = UNSEEN
) -> tuple[str | None, Bag]:
    """Draw a peer that is not to be avoided; None, and the bag as it was, when there is none.

    `reply_s`: seconds in which gradients of a peer come where none has to wait, if any has come.

    Entries of peers to be avoided stay in the bag until nothing else is left in it; then it is filled anew and they are
    forfeited. A peer that is no longer among `hops` is dropped; one that the bag does not know gets an entry at once.
    A draw for the same tuple of hops as the last, with no peer to avoid, does not look at each of them.
    """
    hops = tuple(hops)
    before, bag = bag, _reconcile(bag, hops)
    avoided = bag.credit.keys() & avoid
    if len(avoided) == len(bag.credit):
        return None, before
    places = _places(bag, avoided)
    if not places:
        bag = _refill(bag, hops, rng, reply_s)
        places = _places(bag, avoided)
    if not places:
        # This bag owes none of them anything: the busy or slow ones have to be asked out of turn.
        peer = rng.choice(sorted(bag.credit.keys() - avoided))
        return peer, bag._replace(credit={**bag.credit, peer: bag.credit[peer] - 1.0}, new=bag.new - {peer})
    if bag.new and rng.random() < 0.5:
        places = [place for place in places if bag.entries[place] in bag.new] or places
    place = rng.choice(places)
    peer = bag.entries[place]
    return peer, bag._replace(entries=bag.entries[:place] + bag.entries[place + 1 :], new=bag.new - {peer})


def _places(bag: Bag, avoided: Collection[str]) -> Sequence[int]:
    """Return where in the bag the entries lie that may be drawn."""
    if not avoided:
        return range(len(bag.entries))
    return [place for place, peer in enumerate(bag.entries) if peer not in avoided]


def quotas(hops: Sequence[Hop], reply_s: Mapping[str, float] = UNSEEN) -> dict[str, float]:
    """Return the entries of each peer in a full bag before rounding; they add up to the number of peers."""
    speeds = bounded({peer: 1.0 / device_s for peer, device_s in _device_times(hops).items()}, reply_s)
    least = LEAST_SHARE * fmean(speeds.values())
    believed = {peer: max(speed, least) for peer, speed in speeds.items()}
    total = math.fsum(believed.values())
    return {peer: len(believed) * speed / total for peer, speed in believed.items()}


def bounded(speeds: Mapping[str, float], reply_s: Mapping[str, float]) -> dict[str, float]:
    """Return the speeds as far as they are believed: a high one as far as its replies are as much sooner.

    Speeds honestly differ, so a high one is compared with the highest that a third of liars cannot have lifted.
    """
    liars = len(speeds) // 3
    typical = sorted(speeds.values())[len(speeds) - 1 - liars]
    replies = [reply_s[peer] for peer in speeds if peer in reply_s]
    typical_reply_s = median(replies) if replies else 0.0
    believed = {}
    for peer, speed in speeds.items():
        sooner = typical_reply_s / reply_s[peer] if reply_s.get(peer) else 1.0
        believed[peer] = min(speed, typical * min(MOST_BELIEVED, UNPROVEN + TIMES_SEEN * max(0.0, sooner - 1.0)))
    return believed


def _reconcile(bag: Bag, hops: tuple[Hop, ...]) -> Bag:
    if hops is bag.hops:
        return bag
    peers = {hop.peer for hop in hops}
    newcomers = sorted(peers.difference(bag.credit))
    if not newcomers and len(peers) == len(bag.credit):
        return bag._replace(hops=hops)
    entries = tuple(peer for peer in bag.entries if peer in peers)
    credit = {peer: owed for peer, owed in bag.credit.items() if peer in peers}
    if bag.entries:
        entries += tuple(newcomers)
    new = (bag.new & peers).union(newcomers if bag.credit else ())
    return Bag(entries, credit | dict.fromkeys(newcomers, 0.0), hops, new)


def _refill(bag: Bag, hops: tuple[Hop, ...], rng: Random, reply_s: Mapping[str, float]) -> Bag:
    due = {peer: quota + bag.credit[peer] for peer, quota in quotas(hops, reply_s).items()}
    entries = {peer: max(0, math.floor(owed + 1e-9)) for peer, owed in due.items()}
    by_remainder = list(due)
    rng.shuffle(by_remainder)
    by_remainder.sort(key=lambda peer: entries[peer] - due[peer])
    for peer in by_remainder[: max(0, len(due) - sum(entries.values()))]:
        entries[peer] += 1
    credit = {peer: min(1.0, max(-1.0, owed - entries[peer])) for peer, owed in due.items()}
    return Bag(tuple(peer for peer, count in entries.items() for _ in range(count)), credit, hops, bag.new)


def _device_times(hops: Sequence[Hop]) -> dict[str, float]:
    """Return believable device seconds: the unknown are given the median, near ones their common mean."""
    known = sorted((hop.device_s, hop.peer) for hop in hops if 0.0 < hop.device_s < math.inf)
    typical = median(device_s for device_s, _ in known) if known else 1.0
    times = {hop.peer: typical for hop in hops}
    group: list[tuple[float, str]] = []
    for device_s, peer in [*known, (math.inf, "")]:
        if group and device_s > EQUAL_WITHIN * group[0][0]:
            mean = fmean(member_s for member_s, _ in group)
            times.update((member, mean) for _, member in group)
            group = []
        group.append((device_s, peer))
    return times


MOST_KNOWN = 1024  # replicas whose calls are remembered
FIRST_SUSPICION_S = 4.0
TIMES_COST = 10.0
"""A suspect is left alone for so many times what its loss cost: it may take a tenth of a sender's time at most."""
LONGEST_SUSPICION_S = 600.0
SHORTEST_LATE_S = 0.5  # a refusal that comes sooner is not late: an event loop may have been busy for so long
USUAL_WEIGHT = 1 / 8
SOONER_WEIGHT, LATER_WEIGHT = 1 / 2, 1 / 32
"""Of the newest reply in a replica's usual shortest, by whether it came sooner: what a device takes when none waits."""


class HopTotals(NamedTuple):
    """Calls to one replica of the next stage: begun, and answered with a gradient."""

    attempted: int = 0
    succeeded: int = 0


class Suspicion(NamedTuple):
    """Until when a lost replica is left alone (loop seconds), for how long in all; `cleared`: by a success.

    `backoff_s`: for how long its losses alone would do so, whatever they cost.
    """

    until_s: float
    length_s: float
    backoff_s: float
    cleared: bool = False


class Standing:
    """A sender's knowledge of the replicas of its next stage, by which it says which of them may get a microbatch.

    Each reason to leave a replica alone has its own end: a refusal, and a loss. `hops`: the replicas in the roster.
    """

    def __init__(self, hops: Callable[[], Sequence[Hop]]) -> None:
        self._hops = hops
        self.reply_s: dict[str, float] = {}
        """Of each proved replica: the seconds in which its gradients come while none of them waits."""
        self.usual_s = 0.0  # seconds that a reply usually takes; 0 before the first
        self.totals: dict[str, HopTotals] = {}
        self.suspicions: dict[str, Suspicion] = {}
        self._refusals: dict[str, float] = {}  # when each replica that refused may be asked again (loop seconds)
        self._busy: set[str] = set()
        self._gradients = 0
        self._work: dict[str, tuple[float, int | None]] = {}
        """Of each replica since its last late refusal: seconds of calls with a gradient, and `by_others` then."""
        self._held: dict[str, tuple[float, int]] = {}
        """Of each replica since its last gradient: seconds that its refusals took, and `by_others` at the first."""
        self._in_hand: Counter[str] = Counter()
        self._parted: tuple[Sequence[Hop], int, tuple[Hop, ...], dict[str, None]] = ((), 0, (), {})
        """The proved and the unproved of these hops, when so many had been proved; the newest names come last."""

    # What happens to calls.

    def begin(self, peer: str) -> None:
        """Count a call that begins."""
        self._in_hand[peer] += 1
        self._count(peer, attempted=1)

    def end(self, peer: str) -> None:
        """Count a call that has ended in any way."""
        self._in_hand[peer] -= 1
        if not self._in_hand[peer]:
            del self._in_hand[peer]

    def succeed(self, peer: str, took_s: float) -> None:
        """Note a gradient."""
        self._count(peer, succeeded=1)
        self._gradients += 1
        self._held.pop(peer, None)
        worked_s, since = self._work.get(peer, (0.0, None))
        self._work[peer] = (worked_s + took_s, since)
        if (suspicion := self.suspicions.get(peer)) is not None:
            self.suspicions[peer] = suspicion._replace(cleared=True)
        before_s = self.reply_s.setdefault(peer, took_s)
        self.reply_s[peer] += (SOONER_WEIGHT if took_s < before_s else LATER_WEIGHT) * (took_s - before_s)
        self.usual_s += USUAL_WEIGHT * (took_s - self.usual_s) if self.usual_s else took_s

    def lose(self, peer: str, now_s: float, cost_s: float, *, accused: bool, hung: bool) -> None:
        """Note a loss. A broken stream accuses no proved replica, and none while none is proved."""
        unproved = peer not in self.reply_s and bool(self._part()[0])
        if accused or unproved:
            self._suspect(peer, now_s, cost_s if hung else 0.0)

    def least_rest_s(self, peer: str, took_s: float) -> float:
        """Note what a refusal took; return for how long its replica is left alone at least, if it repeats itself."""
        if took_s * TIMES_COST <= self.usual_s:
            return 0.0
        known, now = peer in self._held, self.by_others(peer)
        held_s, since = self._held.get(peer, (0.0, now))
        self._held[peer] = (held_s + took_s, since)
        return TIMES_COST * (held_s + took_s) if known and now > since else 0.0

    def refuse(self, peer: str, now_s: float, rest_s: float, *, busy: bool) -> None:
        """Note a refusal for so long. `busy`: the replica is healthy, and takes a microbatch before long."""
        self._refusals = {other: until_s for other, until_s in self._refusals.items() if until_s > now_s}
        self._refusals[peer] = now_s + rest_s
        self._busy = (self._busy - {peer}) & self._refusals.keys()
        if busy:
            self._busy.add(peer)

    @property
    def calls(self) -> int:
        """How many calls have no answer yet."""
        return self._in_hand.total()

    def by_others(self, peer: str) -> int:
        """Return how many gradients other replicas have returned."""
        return self._gradients - self.totals.get(peer, HopTotals()).succeeded

    def excuses(self, peer: str, took_s: float, by_others: int) -> bool:
        """Note a refusal; say whether it is no loss. `by_others`: as it was when the call began.

        A refusal is late if it takes longer than a gradient usually does. It is excused by ten times as much work since
        the last late one, so a tenth of a replica's time may be lost, or if no other replica has worked since then.
        """
        if not self.usual_s or took_s <= max(SHORTEST_LATE_S, self.usual_s):
            return True
        worked_s, since = self._work.get(peer, (0.0, None))
        now = self.by_others(peer)
        self._work[peer] = (0.0, now)
        return worked_s >= TIMES_COST * took_s or now == (by_others if since is None else since)

    def forgive(self) -> None:
        """Forget all losses."""
        self.suspicions = {}

    # Which replicas may be asked.

    def suspects(self, now_s: float) -> frozenset[str]:
        """Return the replicas that are left alone for a loss."""
        return frozenset(p for p, each in self.suspicions.items() if now_s < each.until_s and not each.cleared)

    def resting(self, now_s: float) -> set[str]:
        """Return the replicas that are left alone for a refusal."""
        return {peer for peer, until_s in self._refusals.items() if until_s > now_s}

    def refused_until_s(self, peer: str) -> float:
        """Return when a replica that refused may be asked again; 0 if it has not refused."""
        return self._refusals.get(peer, 0.0)

    def any_busy(self, peers: Collection[str]) -> bool:
        """Say whether one of these is merely full or gossiping."""
        return not self._busy.isdisjoint(peers)

    def occupied(self, now_s: float) -> set[str]:
        """Return the replicas on trial that have their one call in hand."""
        proved, unproved = self._part()
        on_trial = {peer for peer, each in self.suspicions.items() if now_s >= each.until_s and not each.cleared}
        return {peer for peer in self._in_hand if peer in on_trial or (proved and peer in unproved)}

    def bag_hops(self) -> Sequence[Hop]:
        """Return the replicas that the bag is for: only the proved once an unproved one was lost."""
        proved, unproved = self._part()
        wary = proved and any(peer in unproved for peer in self.suspicions)
        return proved if wary else self._hops()

    def tries_unproved(self) -> bool:
        """Say whether an unproved replica is to be tried out of the bag's turn, one at a time."""
        proved, unproved = self._part()
        if not unproved or self.bag_hops() is not proved:
            return False
        return not (self.favoured() and any(peer in unproved for peer in self._in_hand))

    def draw_unproved(self, avoid: Collection[str], rng: Random) -> str | None:
        """Return the unproved replica to try, none of those to avoid, if there is one."""
        _, unproved = self._part()
        free = [peer for peer in unproved if peer not in avoid]
        fresh = [peer for peer in free if peer not in self.suspicions]
        # The newest every other time: neither many old names nor many new ones keep a replica waiting.
        return rng.choice([fresh[-1], rng.choice(fresh)]) if fresh else rng.choice(free) if free else None

    def favoured(self, but: str = "") -> bool:
        """Say whether a replica other than `but` is proved and not under suspicion."""
        return any(hop.peer != but and self.proved(hop.peer) for hop in self._part()[0])

    def proved(self, peer: str) -> bool:
        """Say whether a replica has returned a gradient, and was not lost since."""
        suspicion = self.suspicions.get(peer)
        return peer in self.reply_s and (suspicion is None or suspicion.cleared)

    def _count(self, peer: str, attempted: int = 0, succeeded: int = 0) -> None:
        before = self.totals.pop(peer, HopTotals())
        self.totals[peer] = HopTotals(before.attempted + attempted, before.succeeded + succeeded)
        if len(self.totals) > MOST_KNOWN:
            forgotten = next(iter(self.totals))
            del self.totals[forgotten]
            self.reply_s.pop(forgotten, None)
            self._work.pop(forgotten, None)
            self._held.pop(forgotten, None)

    def _suspect(self, peer: str, now_s: float, cost_s: float) -> None:
        """Leave a replica alone from now on; a suspect stays one for as long as was said."""
        previous = self.suspicions.get(peer)
        if previous is not None and now_s < previous.until_s and not previous.cleared:
            return
        # A replica that works for as long as it was left alone is forgiven; a success alone would be cheap.
        counts = previous is not None and (not previous.cleared or now_s < previous.until_s + previous.length_s)
        before = previous if previous is not None and counts else Suspicion(0.0, 0.0, 0.0)
        backoff_s = min(LONGEST_SUSPICION_S, max(FIRST_SUSPICION_S, 2.0 * before.backoff_s))
        # A failed dial costs next to nothing: it does not double what a silence has earned.
        earned_s = max(TIMES_COST * cost_s, 2.0 * before.length_s) if cost_s else 0.0
        length_s = min(LONGEST_SUSPICION_S, max(backoff_s, earned_s))
        # A replica of which nothing was heard for so long is most likely gone.
        self.suspicions = {
            other: each for other, each in self.suspicions.items() if now_s < each.until_s + LONGEST_SUSPICION_S
        }
        self.suspicions[peer] = Suspicion(now_s + length_s, length_s, backoff_s)

    def _part(self) -> tuple[tuple[Hop, ...], dict[str, None]]:
        hops, (known, count, proved, unproved) = self._hops(), self._parted
        if hops is not known or count != len(self.reply_s):
            proved = tuple([hop for hop in hops if hop.peer in self.reply_s])
            names = {hop.peer: None for hop in hops if hop.peer not in self.reply_s}
            unproved = dict.fromkeys([peer for peer in unproved if peer in names]) | names
            self._parted = (hops, len(self.reply_s), proved, unproved)
        return proved, unproved
