"""The next stage as one microbatch sees it: ask a replica, and another, until one has returned the gradient.

What a replica answers, and what follows:

- a gradient: done, and the replica is above suspicion;
- `Refused` (full, gossiping, leaving): another replica takes it, for the sender still holds the output. It uses up no
  attempt, and all microbatches of this sender leave the one that refused in peace until the time that it named. If all
  refuse, we sleep until the earliest of these times, jittered;
- a loss: another replica, and one attempt less. A peer that could not be reached, or that was given up (silent, or in
  violation), becomes a suspect; a stream that broke accuses nobody who has ever returned a gradient. Suspects are asked
  when there is nobody else, after a pause that doubles with each loss;
- nothing for long, from who has yet to show that it works (`pipeline.trials`): another replica as well;
- `Refused(NO_ROUTE)`: another replica, which may know another way, and one attempt less;
- `Refused(EXPIRED)`: nobody wants the reply any more. Up it goes, and nobody is accused. The budget travels as a
  duration, which a replica counts from when it has it: so its end there is not before ours, and whoever says "expired"
  while much is left is treated as given up.

With no attempt left, or no replica in the roster for long, the answer is `Refused(NO_ROUTE)`.

When it was ourselves who were away (the machine slept, say), everybody seems to have been silent: `forgive` clears all
suspicions, and those that the next seconds would bring.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import NamedTuple, TypeVar

from pipeline.messages import Gradient, Microbatch, Reason, Refused, Reply
from pipeline.routing import Bag, Hop, next_hop
from pipeline.trials import Late, SuspectList, Trials

T = TypeVar("T")

MOST_HOPS_COUNTED = 1024
SHORTEST_REST_S = 0.1
LONGEST_REST_S = 30.0
LEAVING_REST_S = 10.0
"""How long one that leaves is not asked again: rosters take about as long to notice."""
NO_ROUTE_REST_S = 2.0
FIRST_BACKOFF_S = 0.5
SHORTEST_SLEEP_S = 0.001
BUSY = (Reason.FULL, Reason.GOSSIPING)
POLL_S = 0.25
"""How often an empty roster is looked at again."""
PATIENCE_S = 60.0
"""How long to wait for a replica to appear at all."""
ATTEMPTS = 4
"""Calls that one microbatch may lose."""
LARGEST_LOSS = 1e30
EARLY_SHARE = 0.1
"""An "expired" with a larger share of the budget left is untrue: clocks that run apart explain less."""


class Expired(Exception):
    """The travelling budget ended."""


async def within(deadline_s: float, work: Awaitable[T]) -> T:
    """Await `work` until a deadline in loop seconds; raise Expired when it passes."""
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise Expired from error
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class NextStageClient:
    """Who serves the next stage now, and how to call one of them.

    `call` raises a `ConnectionError` for a loss, as `pipeline.messages` says, and for a gradient that is not as the
    run's codec has it.
    """

    hops: Callable[[], Sequence[Hop]]
    call: Callable[[str, Microbatch], Awaitable[Reply]]


class HopTotals(NamedTuple):
    """Calls to one replica of the next stage: begun, and answered with a gradient."""

    attempted: int = 0
    succeeded: int = 0


class Wanted(StrEnum):
    """What a microbatch may wait for of the next stage: a replica that the roster has, room at one, or an answer."""

    REPLICA = "replica"
    ROOM = "room"
    ANSWER = "answer"


class Waiting(NamedTuple):
    """What a microbatch waits for, and since when (loop seconds). `detail`: of how many replicas, in words.

    `will_pass`: a healthy replica is merely busy, and takes it before long.
    """

    wanted: Wanted
    detail: str
    since_s: float
    will_pass: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """One microbatch on its way to a replica that takes it."""

    deadline_s: float
    losses: int = 0
    lost: set[str] = field(default_factory=set)
    forgiving: bool = False
    """Ask suspects and those that were lost, for there is nobody else."""
    waits_since_s: float | None = None
    empty_since_s: float | None = None


class NextStage:
    """Routes the microbatches of one sender to the replicas of the next stage."""

    def __init__(self, ways: NextStageClient, rng: Random) -> None:
        self._ways, self._rng = ways, rng
        self._bag = Bag()
        self._trials = Trials(ways.hops)
        self._forgiving_until_s = -math.inf
        self._resting: dict[str, float] = {}
        self._busy: set[str] = set()
        """Replicas whose last refusal was that they are full or gossiping."""
        self._totals: dict[str, HopTotals] = {}
        self._waits: dict[_Search, Waiting] = {}
        self._empty_since_s: float | None = None
        """Since when microbatches have found nobody in the roster: longer than one of them looks."""
        self._counts: Counter[str] = Counter()

    @property
    def waiting(self) -> Waiting | None:
        """The oldest of the waits that microbatches are in; None while all are being worked on."""
        return min(self._waits.values(), key=lambda wait: wait.since_s) if self._waits else None

    @property
    def stranded(self) -> int:
        """How many microbatches wait, and for something else than room at a replica that is merely busy."""
        return sum(not wait.will_pass for wait in self._waits.values())

    @property
    def hop_totals(self) -> dict[str, HopTotals]:
        """Calls by replica, those of the last 1024 replicas."""
        return dict(self._totals)

    @property
    def suspects(self) -> frozenset[str]:
        """The replicas that are under suspicion now."""
        suspects = self._trials.suspects
        return suspects.active(_now_s()) if suspects.suspicions else frozenset()

    def forgive(self, for_s: float) -> None:
        """Clear all suspicions, and accuse nobody for so long: the silence was ours."""
        self._trials.suspects = SuspectList()
        self._forgiving_until_s = _now_s() + for_s

    async def ask(self, microbatch: Microbatch, deadline_s: float) -> Reply:
        """Return a replica's gradient of a microbatch; Refused when there is no way or a replica found no time left.

        `deadline_s`: loop seconds; what is left of it travels as the budget of each call. To end the search then is for
        the caller, who has other work under the same deadline (`within`).
        """
        search = _Search(deadline_s=deadline_s)
        if self._trials.favoured() and (tried := self._draw_unproved(search)) is not None:
            self._count_call(tried, succeeded=0)
            self._trials.attempt(tried, self._call(tried, microbatch, _Search(deadline_s=deadline_s)), deadline_s)
        while search.losses < ATTEMPTS and not self._given_up(search):
            peer = self._choose(search)
            reply = None if peer is None else await self._ask_one(peer, microbatch, search)
            if reply is not None:
                return reply
            if peer is None:
                await self._pause(search)
        return Refused(reason=Reason.NO_ROUTE, retry_after_s=NO_ROUTE_REST_S)

    async def aclose(self) -> None:
        """End the calls that nobody waits for any more."""
        await self._trials.aclose()

    def statistics(self) -> dict[str, int | float]:
        """Return totals since the start: gradients, refusals and losses met at the next stage."""
        names = ["gradients", "lost_unreachable", "lost_given_up", "lost_broken"]
        names += [f"refused_{reason.name.lower()}" for reason in Reason]
        totals: dict[str, int | float] = {name: self._counts[name] for name in names}
        return totals | {"waiting": len(self._waits), "suspects": len(self.suspects)}

    def _given_up(self, search: _Search) -> bool:
        """Note since when the roster has been empty; say whether that is too long."""
        if self._ways.hops():
            search.empty_since_s = self._empty_since_s = None
            return False
        if search.empty_since_s is None:
            search.empty_since_s = _now_s()
        if self._empty_since_s is None:
            self._empty_since_s = search.empty_since_s
        return _now_s() - search.empty_since_s >= PATIENCE_S

    def _choose(self, search: _Search) -> str | None:
        avoid = self._resting_now()
        if not search.forgiving:
            avoid |= self._out_of_favour(search)
            if not self._trials.favoured() and (tried := self._draw_unproved(search)) is not None:
                return tried
        peer, self._bag = next_hop(self._bag, self._trials.bag_hops(), avoid, self._rng, self._trials.reply_s)
        return peer

    def _draw_unproved(self, search: _Search) -> str | None:
        return self._trials.draw(self._resting_now() | self._out_of_favour(search), self._rng)

    def _out_of_favour(self, search: _Search) -> set[str]:
        return self._trials.occupied(_now_s()) | self.suspects | search.lost

    async def _ask_one(self, peer: str, microbatch: Microbatch, search: _Search) -> Reply | None:
        """Call one replica; return what goes up, None when another is to be asked."""
        search.forgiving = False
        self._count_call(peer, succeeded=0)
        try:
            return await self._trials.answer(peer, self._call(peer, microbatch, search), search.deadline_s)
        except Late:
            search.lost.add(peer)
            return None

    async def _call(self, peer: str, microbatch: Microbatch, search: _Search) -> Reply | None:
        begun_s = _now_s()
        sent = replace(microbatch, budget_s=max(0.0, search.deadline_s - _now_s()))
        try:
            reply = await self._ways.call(peer, sent)
            if isinstance(reply, Gradient):
                _check(reply, microbatch)
        except ConnectionError as error:
            self._lose(peer, error, search, _now_s() - begun_s)
            return None
        if isinstance(reply, Gradient):
            self._counts["gradients"] += 1
            self._count_call(peer, succeeded=1)
            self._trials.succeed(peer, _now_s() - begun_s)
            return reply
        self._counts[f"refused_{reply.reason.name.lower()}"] += 1
        if reply.reason is Reason.EXPIRED:
            left_s = search.deadline_s - _now_s()
            if left_s <= EARLY_SHARE * sent.budget_s:
                return reply
            untrue = ConnectionAbortedError(f'{peer} said "expired" with {left_s:.1f} s of {sent.budget_s:.1f} s left')
            self._lose(peer, untrue, search, _now_s() - begun_s)
            return None
        if reply.reason is Reason.NO_ROUTE:
            search.losses += 1
        self._rest(peer, reply)
        return None

    def _lose(self, peer: str, error: ConnectionError, search: _Search, cost_s: float) -> None:
        search.losses += 1
        search.lost.add(peer)
        unreachable, hung = isinstance(error, ConnectionRefusedError), isinstance(error, ConnectionAbortedError)
        self._counts["lost_unreachable" if unreachable else "lost_given_up" if hung else "lost_broken"] += 1
        if _now_s() >= self._forgiving_until_s:
            self._trials.lose(peer, _now_s(), cost_s, accused=unreachable or hung, hung=hung)

    def _rest(self, peer: str, refusal: Refused) -> None:
        least_s = LEAVING_REST_S if refusal.reason is Reason.LEAVING else SHORTEST_REST_S
        # The estimate is a stranger's: not a number reads as the least.
        rest_s = min(max(least_s, refusal.retry_after_s), LONGEST_REST_S)
        now_s = _now_s()
        self._resting = {other: until_s for other, until_s in self._resting.items() if until_s > now_s}
        self._resting[peer] = now_s + rest_s
        self._busy = (self._busy - {peer}) & self._resting.keys()
        if refusal.reason in BUSY:
            self._busy.add(peer)

    def _resting_now(self) -> set[str]:
        now_s = _now_s()
        return {peer for peer, until_s in self._resting.items() if until_s > now_s}

    async def _pause(self, search: _Search) -> None:
        """Sleep until somebody can be asked, or the first of those that there are may be asked again."""
        peers = [hop.peer for hop in self._trials.bag_hops()]
        out_of_favour = self._out_of_favour(search)
        good = [peer for peer in peers if peer not in out_of_favour]
        resting = [self._resting.get(peer, 0.0) for peer in (good or peers)]
        if not peers:
            wanted, detail, pause_s = Wanted.REPLICA, "", POLL_S
        elif good:
            wanted, detail = Wanted.ROOM, f"{len(good)} of {len(peers)} replicas refused for now, the others were lost"
            if len(good) == len(peers):
                detail = f"all its {len(peers)} replicas refused for now"
            pause_s = min(resting) - _now_s()
        else:
            wanted, detail = Wanted.ANSWER, f"all its {len(peers)} replicas were lost or are on trial"
            pause_s = max(FIRST_BACKOFF_S * 2.0**search.losses, min(resting) - _now_s())
            search.forgiving = True
        if search.waits_since_s is None:
            search.waits_since_s = _now_s()
        since_s = search.waits_since_s
        if self._empty_since_s is not None:
            since_s = min(self._empty_since_s, since_s)
        will_pass = not self._busy.isdisjoint(good)
        self._waits[search] = Waiting(wanted, detail, since_s, will_pass)
        # Jitter, so that all who were refused together do not come back together; never early.
        sleep_s = max(SHORTEST_SLEEP_S, pause_s) * self._rng.uniform(1.0, 1.25)
        try:
            await asyncio.sleep(sleep_s)
        finally:
            del self._waits[search]

    def _count_call(self, peer: str, *, succeeded: int) -> None:
        before = self._totals.pop(peer, HopTotals())
        self._totals[peer] = HopTotals(before.attempted + 1 - succeeded, before.succeeded + succeeded)
        if len(self._totals) > MOST_HOPS_COUNTED:
            forgotten = next(iter(self._totals))
            del self._totals[forgotten]
            self._trials.reply_s.pop(forgotten, None)


def _check(reply: Gradient, microbatch: Microbatch) -> None:
    """Raise ConnectionAbortedError for a gradient that no replica may return."""
    # A gradient's rows may be of another length: its codec may be another one.
    if reply.hidden is None or reply.hidden.shape[:-1] != microbatch.hidden.shape[:-1]:
        shape = None if reply.hidden is None else tuple(reply.hidden.shape)
        raise ConnectionAbortedError(f"gradient of shape {shape} for {tuple(microbatch.hidden.shape)} activations")
    # Neither is believed further than arithmetic with it is safe: the sum of a window's losses must not overflow.
    if not abs(reply.loss) <= LARGEST_LOSS or not 1 <= reply.tokens <= microbatch.targets.numel():
        raise ConnectionAbortedError(f"a loss of {reply.loss} over {reply.tokens} tokens")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
