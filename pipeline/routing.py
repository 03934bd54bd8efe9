"""Decides which replica of the next stage gets a microbatch; `pipeline.trials` says who is not to get any.

A sender draws from a bag without replacement. A full bag holds as many entries as the next stage has replicas, shared
out in proportion to their speeds (one over the device seconds of a microbatch, as each says in its record) by largest
remainder; what rounding took from a replica, or gave it, is carried to the next bag. So routes are random, as NoLoCo
(arXiv 2506.10911) wants them for mixing, and the load is even over every few draws, not only in the limit. In a closed
queueing model of two senders with 8 microbatches in flight each and 6 replicas whose speeds differ fourfold, throughput
was 1.00 of capacity against 0.86 with independent draws of the same proportions and 0.40 with uniform ones (with 4 in
flight 0.89, 0.71 and 0.39). Larger bags are lumpier (four entries a replica: 0.97 and 0.79).

Speeds are what strangers say of themselves, so they are read with care: what is not a positive number counts as unknown
and takes the median of the known; speeds within a tenth of each other count as equal, so that noise does not bias
routes; nobody's share falls below about a ninth of an equal one, so that a replica which was measured in a bad moment
is asked again; and on its word alone nobody counts as more than a quarter faster than two thirds of the others. Beyond
that its gradients must have come as much sooner than the others' (`bounded`). Of two replicas neither is the others, so
both are believed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple

LEAST_SHARE = 1 / 8
"""Least speed that a replica is believed to have, as a part of the mean."""
EQUAL_WITHIN = 1.1
"""Device times whose ratio is at most this count as equal."""
UNPROVEN = 1.25
"""Times the typical speed that a replica counts as on its word alone: with it, one of four gets 29 % of the routes."""
TIMES_SEEN = 2.0
"""What a replica has shown counts so many times: a reply is also made of what the line and later stages take."""
MOST_BELIEVED = 8.0
"""Times the typical speed that anybody counts as, however soon it answers (as in `placement`): to invent is fastest."""

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
    """

    entries: tuple[str, ...] = ()
    credit: Mapping[str, float] = MappingProxyType({})
    hops: tuple[Hop, ...] | None = None


def next_hop(
    bag: Bag, hops: Sequence[Hop], avoid: Collection[str], rng: Random, reply_s: Mapping[str, float] = UNSEEN
) -> tuple[str | None, Bag]:
    """Draw a peer that is not to be avoided; None, and the bag as it was, when there is none.

    `reply_s`: seconds in which gradients of a peer come where none has to wait, if any has come.

    Entries of peers to be avoided stay in the bag until nothing else is left in it; then it is filled anew and they are
    forfeited. A peer that is no longer among `hops` is dropped; one that the bag does not know gets an entry at once.
    A draw for the same tuple of hops as the last, with nobody to avoid, does not look at each of them.
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
        return peer, bag._replace(credit={**bag.credit, peer: bag.credit[peer] - 1.0})
    place = rng.choice(places)
    return bag.entries[place], Bag(bag.entries[:place] + bag.entries[place + 1 :], bag.credit, bag.hops)


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
    return Bag(entries, credit | dict.fromkeys(newcomers, 0.0), hops)


def _refill(bag: Bag, hops: tuple[Hop, ...], rng: Random, reply_s: Mapping[str, float]) -> Bag:
    due = {peer: quota + bag.credit[peer] for peer, quota in quotas(hops, reply_s).items()}
    entries = {peer: max(0, math.floor(owed + 1e-9)) for peer, owed in due.items()}
    by_remainder = list(due)
    rng.shuffle(by_remainder)
    by_remainder.sort(key=lambda peer: entries[peer] - due[peer])
    for peer in by_remainder[: max(0, len(due) - sum(entries.values()))]:
        entries[peer] += 1
    credit = {peer: min(1.0, max(-1.0, owed - entries[peer])) for peer, owed in due.items()}
    return Bag(tuple(peer for peer, count in entries.items() for _ in range(count)), credit, hops)


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
