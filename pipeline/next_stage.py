"""The next stage as one microbatch sees it: ask a replica, and another, until one has returned the gradient.

- A gradient is checked (`NextStageClient.check`) and returned, and the replica is no suspect any more.
- After `Refused` (full, gossiping, leaving) another replica is asked, for the sender still holds the output. This uses
  up no attempt. All microbatches of this sender leave the replica alone for the time that it named. If all refuse, the
  microbatch sleeps until the earliest of these times, jittered.
- A refusal that comes later than a gradient usually does is a loss, unless the replica's work excuses it.
- After a loss another replica is asked, with one attempt less. The lost replica becomes a suspect; only a broken stream
  accuses no proved replica. If all are suspects they are asked, after a pause that doubles with each loss.
- A replica on trial that takes three times the usual time is not accused: another one is asked, and the call goes on
  without this microbatch.
- `Refused(NO_ROUTE)` costs an attempt. `Refused(EXPIRED)` is returned, unless much of the budget is left: the budget
  starts at the receiver, so it cannot end there before it ends here.

With no attempt left, or no replica in the roster for long, the answer is `Refused(NO_ROUTE)`.

A microbatch without a backward pass goes to one replica by the same draw, with one attempt. Neither its reply nor its
loss changes what is known of the replica, so that evaluations do not steer the training.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple, TypeVar

from pipeline.messages import EvaluationReply, Gradient, Microbatch, Reason, Refused, Reply
from pipeline.routing import Bag, Hop, HopTotals, Standing, next_hop

T = TypeVar("T")

LATE = 3.0  # times the usual reply: a call of a replica on trial is late then
SHORTEST_REST_S = 0.1
LONGEST_REST_S = 30.0
LEAVING_REST_S = 10.0  # for this long a replica that leaves is not asked again: rosters take about as long to notice
NO_ROUTE_REST_S = 2.0
FIRST_BACKOFF_S = 0.5
SHORTEST_SLEEP_S = 0.001
BUSY = (Reason.FULL, Reason.GOSSIPING)
POLL_S = 0.25  # how often an empty roster is looked at again
PATIENCE_S = 60.0  # how long to wait for a replica to appear at all
ATTEMPTS = 4  # calls that one microbatch may lose
LARGEST_LOSS = 1e30
EARLY_SHARE = 0.1  # an "expired" with a larger share of the budget left is untrue: clocks that run apart explain less


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


async def _unchecked(_peer: str, _microbatch: Microbatch, gradient: Gradient, _deadline_s: float) -> Gradient:
    return gradient


async def _no_evaluation(_peer: str, _microbatch: Microbatch) -> EvaluationReply:
    return Refused(reason=Reason.NO_ROUTE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NextStageClient:
    """The replicas that serve the next stage now, how to call one, and how to check a gradient.

    `call` raises a `ConnectionError` for a loss, as `pipeline.messages` says, and for a gradient that does not fit the
    run's codec. `check` takes a replica, what was sent to it, what it returned and a deadline in loop seconds; it
    returns the gradient to use, and takes no part of the time that counts for the replica. `evaluators`: the replicas
    that evaluate, `evaluate` calls one like `call`.
    """

    hops: Callable[[], Sequence[Hop]]
    call: Callable[[str, Microbatch], Awaitable[Reply]]
    check: Callable[[str, Microbatch, Gradient, float], Awaitable[Gradient]] = _unchecked
    evaluators: Callable[[], Sequence[Hop]] = tuple
    evaluate: Callable[[str, Microbatch], Awaitable[EvaluationReply]] = _no_evaluation


class Wanted(StrEnum):
    """The aims of a wait: a replica in the roster, room at one, or an answer."""

    REPLICA = "replica"
    ROOM = "room"
    ANSWER = "answer"


class Waiting(NamedTuple):
    """The wait of a microbatch: for what, for how many replicas in words (`detail`), since when (loop seconds).

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
    forgiving: bool = False  # ask suspects and replicas that this microbatch was lost at, for there is no other
    waits_since_s: float | None = None
    empty_since_s: float | None = None


class NextStage:
    """Routes the microbatches of one sender to the replicas of the next stage."""

    def __init__(self, ways: NextStageClient, rng: Random) -> None:
        self._ways, self._rng = ways, rng
        self._bag = self._evaluation_bag = Bag()
        self._standing = Standing(ways.hops)
        self._first: asyncio.Future[None] | None = None  # done once any replica has returned a gradient
        self._late: set[asyncio.Task[Reply | None]] = set()  # calls that no microbatch waits for any more
        self._forgiving_until_s = -math.inf
        self._waits: dict[_Search, Waiting] = {}
        self._empty_since_s: float | None = None
        """Since when microbatches have found no replica in the roster; one of them gives up sooner."""
        self._counts: Counter[str] = Counter()

    @property
    def waiting(self) -> Waiting | None:
        """The oldest wait of a microbatch; None while no microbatch waits."""
        return min(self._waits.values(), key=lambda wait: wait.since_s) if self._waits else None

    @property
    def stranded(self) -> int:
        """How many microbatches wait for something else than room at a busy replica."""
        return sum(not wait.will_pass for wait in self._waits.values())

    @property
    def hop_totals(self) -> dict[str, HopTotals]:
        """Calls by replica, those of the last 1024 replicas."""
        return dict(self._standing.totals)

    @property
    def suspects(self) -> frozenset[str]:
        return self._standing.suspects(now_s()) if self._standing.suspicions else frozenset()

    def forgive(self, for_s: float) -> None:
        """Clear all suspicions, and accuse no replica for so long: the silence was ours."""
        self._standing.forgive()
        self._forgiving_until_s = now_s() + for_s

    async def ask(self, microbatch: Microbatch, deadline_s: float) -> Reply:
        """Return a replica's gradient of a microbatch; Refused if no replica takes it, or its budget ends at one.

        `deadline_s`: loop seconds; the time left until then travels as the budget of each call. The caller ends the
        search at the deadline (`within`).
        """
        search = _Search(deadline_s=deadline_s)
        if self._standing.favoured() and (tried := self._draw_unproved(search)) is not None:
            # The call shows whether the replica works; no microbatch waits for the reply.
            self._leave(self._begin(tried, microbatch, _Search(deadline_s=deadline_s)), deadline_s)
        while search.losses < ATTEMPTS and not self._given_up(search):
            peer = self._choose(search)
            reply = None if peer is None else await self._ask_one(peer, microbatch, search)
            if reply is not None:
                return reply
            if peer is None:
                await self._pause(search)
        return Refused(reason=Reason.NO_ROUTE, retry_after_s=NO_ROUTE_REST_S)

    async def evaluate(self, microbatch: Microbatch, deadline_s: float) -> EvaluationReply:
        """Return a replica's losses of a microbatch, or why there are none; the caller watches the deadline."""
        peer, self._evaluation_bag = next_hop(
            self._evaluation_bag, self._ways.evaluators(), self.suspects, self._rng, self._standing.reply_s
        )
        try:
            if peer is not None:
                return await self._ways.evaluate(peer, replace(microbatch, budget_s=max(0.0, deadline_s - now_s())))
        except ConnectionError:
            pass
        return Refused(reason=Reason.NO_ROUTE)

    async def aclose(self) -> None:
        """End the calls for which no microbatch waits any more."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)

    def statistics(self) -> dict[str, int | float]:
        names = ["gradients", "lost_unreachable", "lost_given_up", "lost_broken"]
        names += [f"refused_{reason.name.lower()}" for reason in Reason]
        totals: dict[str, int | float] = {name: self._counts[name] for name in names}
        return totals | {"waiting": len(self._waits), "calls": self._standing.calls, "suspects": len(self.suspects)}

    def _given_up(self, search: _Search) -> bool:
        """Note since when the roster has been empty; say whether that is too long."""
        if self._ways.hops():
            search.empty_since_s = self._empty_since_s = None
            return False
        if search.empty_since_s is None:
            search.empty_since_s = now_s()
        if self._empty_since_s is None:
            self._empty_since_s = search.empty_since_s
        return now_s() - search.empty_since_s >= PATIENCE_S

    def _choose(self, search: _Search) -> str | None:
        avoid = self._standing.resting(now_s())
        if not search.forgiving:
            avoid |= self._out_of_favour(search)
            if not self._standing.favoured() and (tried := self._draw_unproved(search)) is not None:
                return tried
        peer, self._bag = next_hop(self._bag, self._standing.bag_hops(), avoid, self._rng, self._standing.reply_s)
        return peer

    def _draw_unproved(self, search: _Search) -> str | None:
        if not self._standing.tries_unproved():  # as nearly always
            return None
        avoid = self._standing.resting(now_s()) | self._out_of_favour(search)
        return self._standing.draw_unproved(avoid, self._rng)

    def _out_of_favour(self, search: _Search) -> set[str]:
        return self._standing.occupied(now_s()) | self.suspects | search.lost

    async def _ask_one(self, peer: str, microbatch: Microbatch, search: _Search) -> Reply | None:
        """Call one replica; return its answer, None when another is to be asked."""
        search.forgiving = False
        task, standing = self._begin(peer, microbatch, search), self._standing
        try:
            if not standing.proved(peer):
                await self._wait(task)
            if not task.done() and not standing.proved(peer) and standing.favoured(but=peer):
                self._leave(task, search.deadline_s)
                search.lost.add(peer)
                return None
            return await task
        finally:
            if task not in self._late and not task.done():
                task.cancel()
                await asyncio.wait([task])

    def _begin(self, peer: str, microbatch: Microbatch, search: _Search) -> asyncio.Task[Reply | None]:
        self._standing.begin(peer)
        task = asyncio.create_task(self._call(peer, microbatch, search))
        task.add_done_callback(lambda _: self._standing.end(peer))
        return task

    def _leave(self, task: asyncio.Task[Reply | None], deadline_s: float) -> None:
        """Let a call go on until a deadline without the microbatch that began it."""
        end = asyncio.get_running_loop().call_at(deadline_s, task.cancel)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        task.add_done_callback(lambda _: end.cancel())

    async def _wait(self, task: asyncio.Task[Reply | None]) -> None:
        """Wait until a call is done or late."""
        begun_s = now_s()
        if not self._standing.usual_s:
            if self._first is None:
                self._first = asyncio.get_running_loop().create_future()
            either: list[asyncio.Future[Any]] = [task, self._first]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait([task], timeout=max(0.0, begun_s + LATE * self._standing.usual_s - now_s()))

    async def _call(self, peer: str, microbatch: Microbatch, search: _Search) -> Reply | None:
        begun_s, by_others = now_s(), self._standing.by_others(peer)
        sent = replace(microbatch, budget_s=max(0.0, search.deadline_s - now_s()))
        try:
            reply = await self._ways.call(peer, sent)
            if isinstance(reply, Gradient):
                check_gradient(reply, microbatch)
        except ConnectionError as error:
            self._lose(peer, error, search, now_s() - begun_s)
            return None
        if isinstance(reply, Gradient):
            self._counts["gradients"] += 1
            self._standing.succeed(peer, now_s() - begun_s)
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            return await self._ways.check(peer, sent, reply, search.deadline_s)
        self._counts[f"refused_{reply.reason.name.lower()}"] += 1
        if reply.reason is Reason.EXPIRED:
            left_s = search.deadline_s - now_s()
            if left_s <= EARLY_SHARE * sent.budget_s:
                return reply
            untrue = ConnectionAbortedError(f'{peer} said "expired" with {left_s:.1f} s of {sent.budget_s:.1f} s left')
            self._lose(peer, untrue, search, now_s() - begun_s)
            return None
        took_s = now_s() - begun_s
        if not self._standing.excuses(peer, took_s, by_others):
            late = ConnectionAbortedError(f'{peer} said "{reply.reason}" only after {took_s:.1f} s')
            self._lose(peer, late, search, took_s)
            return None
        if reply.reason is Reason.NO_ROUTE:
            search.losses += 1
        self._rest(peer, reply, took_s)
        return None

    def _lose(self, peer: str, error: ConnectionError, search: _Search, cost_s: float) -> None:
        search.losses += 1
        search.lost.add(peer)
        unreachable, hung = isinstance(error, ConnectionRefusedError), isinstance(error, ConnectionAbortedError)
        self._counts["lost_unreachable" if unreachable else "lost_given_up" if hung else "lost_broken"] += 1
        if now_s() >= self._forgiving_until_s:
            self._standing.lose(peer, now_s(), cost_s, accused=unreachable or hung, hung=hung)

    def _rest(self, peer: str, refusal: Refused, took_s: float) -> None:
        least_s = LEAVING_REST_S if refusal.reason is Reason.LEAVING else SHORTEST_REST_S
        least_s = max(least_s, self._standing.least_rest_s(peer, took_s))
        # The estimate is a stranger's: if it is not a number, the pause is the least.
        rest_s = min(max(least_s, refusal.retry_after_s), LONGEST_REST_S)
        self._standing.refuse(peer, now_s(), rest_s, busy=refusal.reason in BUSY)

    async def _pause(self, search: _Search) -> None:
        """Sleep until a replica may be there, or the first of those that are there may be asked again."""
        peers = [hop.peer for hop in self._standing.bag_hops()]
        out_of_favour = self._out_of_favour(search)
        good = [peer for peer in peers if peer not in out_of_favour]
        resting = [self._standing.refused_until_s(peer) for peer in (good or peers)]
        if not peers:
            wanted, detail, pause_s = Wanted.REPLICA, "", POLL_S
        elif good:
            wanted, detail = Wanted.ROOM, f"{len(good)} of {len(peers)} replicas refused for now, the others were lost"
            if len(good) == len(peers):
                detail = f"all its replicas ({len(peers)}) refused for now"
            pause_s = min(resting) - now_s()
        else:
            wanted, detail = Wanted.ANSWER, f"all its replicas ({len(peers)}) were lost or are on trial"
            pause_s = max(FIRST_BACKOFF_S * 2.0**search.losses, min(resting) - now_s())
            search.forgiving = True
        if search.waits_since_s is None:
            search.waits_since_s = now_s()
        since_s = search.waits_since_s
        if self._empty_since_s is not None:
            since_s = min(self._empty_since_s, since_s)
        self._waits[search] = Waiting(wanted, detail, since_s, self._standing.any_busy(good))
        # Jitter, so that microbatches that were refused together do not come back together; never early.
        sleep_s = max(SHORTEST_SLEEP_S, pause_s) * self._rng.uniform(1.0, 1.25)
        try:
            await asyncio.sleep(sleep_s)
        finally:
            del self._waits[search]


def check_gradient(reply: Gradient, microbatch: Microbatch) -> None:
    """Raise ConnectionAbortedError for a gradient that no replica may return."""
    # A gradient's rows may have another length than the activations', because its code may be another one.
    if reply.hidden is None or reply.hidden.shape[:-1] != microbatch.hidden.shape[:-1]:
        shape = None if reply.hidden is None else tuple(reply.hidden.shape)
        raise ConnectionAbortedError(f"gradient of shape {shape} for {tuple(microbatch.hidden.shape)} activations")
    # The sum of a window's losses must not overflow, and the step divides by the sum of the tokens.
    if not abs(reply.loss) <= LARGEST_LOSS or reply.tokens != microbatch.learnt:
        raise ConnectionAbortedError(f"a loss of {reply.loss} over {reply.tokens} tokens")


def now_s() -> float:
    """Return the event loop's time in seconds."""
    return asyncio.get_running_loop().time()
