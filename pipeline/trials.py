"""Who has proved that it works for this sender, and how the others are tried. Names cost nothing, work does.

On trial are suspects whose time is over and, where others have returned a gradient, the unproved, which have not. Each
has one call at a time. Once that takes three times as long as usual another replica gets the microbatch as well, and
the call goes on without it: a peer that hangs holds up nobody for long, and one that is slow is not accused for that.

Once one of the unproved was lost, the others may be names alone, as many as somebody likes. Then only the proved are in
the bag, and one of the unproved at a time, first those that never were, gets a microbatch that a proved one gets as
well: no number of names delays anything, and an honest newcomer has shown that it works after one call. Where no proved
replica is in favour, the unproved are all there is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

FIRST_SUSPICION_S = 4.0
TIMES_COST = 10.0
"""A peer is left alone for so many times what its loss cost: it may take a tenth of a sender's time at most."""
LONGEST_SUSPICION_S = 600.0


class Suspicion(NamedTuple):
    """Until when a peer is left alone (loop seconds), for how long from the start; whether a success has ended it."""

    until_s: float
    length_s: float
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class SuspectList:
    """Who is left alone until when; never changed, only replaced."""

    suspicions: Mapping[str, Suspicion] = field(default_factory=dict)

    def suspect(self, peer: str, now_s: float, cost_s: float = 0.0) -> SuspectList:
        """Suspect a peer from now on; one that is suspected already stays so for as long as was said.

        `cost_s`: what it took to find out. Whoever costs a minute each time is not asked again after four seconds.
        """
        previous = self.suspicions.get(peer)
        if previous is not None and now_s < previous.until_s and not previous.cleared:
            return self
        # Who works for as long as it was left alone is forgiven; a success alone would be cheap.
        counts = previous is not None and (not previous.cleared or now_s < previous.until_s + previous.length_s)
        before_s = previous.length_s if previous is not None and counts else 0.0
        length_s = min(LONGEST_SUSPICION_S, max(FIRST_SUSPICION_S, TIMES_COST * cost_s, 2.0 * before_s))
        # A peer of which nothing was heard for so long is most likely gone, and its entry would stay for ever.
        remembered = {
            other: suspicion
            for other, suspicion in self.suspicions.items()
            if now_s < suspicion.until_s + LONGEST_SUSPICION_S
        }
        return SuspectList(remembered | {peer: Suspicion(now_s + length_s, length_s)})

    def clear(self, peer: str) -> SuspectList:
        """End a suspicion: the peer has just done what it should."""
        suspicion = self.suspicions.get(peer)
        if suspicion is None or suspicion.cleared:
            return self
        return SuspectList({**self.suspicions, peer: suspicion._replace(cleared=True)})

    def active(self, now_s: float) -> frozenset[str]:
        """Return the peers to leave alone now."""
        return frozenset(
            peer for peer, suspicion in self.suspicions.items() if now_s < suspicion.until_s and not suspicion.cleared
        )

    def on_trial(self, now_s: float) -> frozenset[str]:
        """Return the peers whose suspicion is over and who have not succeeded since."""
        return frozenset(
            peer for peer, suspicion in self.suspicions.items() if now_s >= suspicion.until_s and not suspicion.cleared
        )


LATE = 3.0
"""Times what replies usually take: then the one call of who is on trial is late."""
USUAL_WEIGHT = 1 / 8
SOONER_WEIGHT, LATER_WEIGHT = 1 / 2, 1 / 32
"""Of the newest reply in a replica's usual shortest, by whether it came sooner: what a device takes when none waits."""


class Named(Protocol):
    """A replica of the next stage."""

    @property
    def peer(self) -> str:
        """Its peer id."""


T = TypeVar("T")
H = TypeVar("H", bound=Named)


class Late(Exception):
    """The call of one who is on trial takes long; it goes on without us."""


class Trials(Generic[H]):
    """Who of a stage has returned a gradient, and what becomes of calls of those who have not."""

    def __init__(self, hops: Callable[[], Sequence[H]]) -> None:
        self._hops = hops
        self.suspects = SuspectList()
        self.reply_s: dict[str, float] = {}
        """Seconds in which a replica's gradients come where none of them has to wait; of the proved."""
        self._usual_s = 0.0
        self._first: asyncio.Future[None] | None = None
        """Done once anybody has replied."""
        self._in_hand: Counter[str] = Counter()
        self._late: set[asyncio.Task[Any]] = set()
        self._parted: tuple[Sequence[H], int, tuple[H, ...], tuple[str, ...]] = ((), 0, (), ())
        """The proved and the unproved of these hops, when so many had been proved; the newest names come last."""

    async def answer(self, peer: str, call: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Return what a call of a peer returns; raise Late where it is that and another can be asked."""
        task = self._begin(peer, call)
        try:
            if not self._proved(peer):
                await self._wait(task)
            if not task.done() and not self._proved(peer) and self.favoured(peer):
                self._leave(task, deadline_s)
                raise Late
            return await task
        finally:
            if task not in self._late and not task.done():
                task.cancel()
                await asyncio.wait([task])

    def attempt(self, peer: str, call: Coroutine[Any, Any, object], deadline_s: float) -> None:
        """Call a peer for what it shows of it: nobody waits for the reply."""
        self._leave(self._begin(peer, call), deadline_s)

    async def aclose(self) -> None:
        """End the calls that nobody waits for."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)

    def succeed(self, peer: str, took_s: float) -> None:
        """Note a gradient."""
        self.suspects = self.suspects.clear(peer)
        before_s = self.reply_s.setdefault(peer, took_s)
        weight = SOONER_WEIGHT if took_s < before_s else LATER_WEIGHT
        self.reply_s[peer] = before_s + weight * (took_s - before_s)
        self._usual_s += USUAL_WEIGHT * (took_s - self._usual_s) if self._usual_s else took_s
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def lose(self, peer: str, now_s: float, cost_s: float, *, accused: bool, hung: bool) -> None:
        """Note a loss. Who breaks a stream is not accused of it, if it has proved itself or nobody has."""
        unproved = peer not in self.reply_s and bool(self._part()[0])
        if accused or unproved:
            self.suspects = self.suspects.suspect(peer, now_s, cost_s if hung else 0.0)

    def occupied(self, now_s: float) -> set[str]:
        """Return those on trial that have their one call in hand."""
        one_call = set(self.suspects.on_trial(now_s))
        proved, unproved = self._part()
        if proved:
            one_call.update(unproved)
        return one_call & self._in_hand.keys()

    def bag_hops(self) -> Sequence[H]:
        """Return those that the bag is for: the proved, where names may be many."""
        proved, unproved = self._part()
        wary = proved and not self.suspects.suspicions.keys().isdisjoint(unproved)
        return proved if wary else self._hops()

    def draw(self, avoid: Collection[str], rng: Random) -> str | None:
        """Return an unproved replica that is to be tried out of the bag's turn, if there is one."""
        proved, unproved = self._part()
        if not unproved or self.bag_hops() is not proved:
            return None
        if self.favoured() and not self._in_hand.keys().isdisjoint(unproved):
            return None
        free = [peer for peer in unproved if peer not in avoid]
        fresh = [peer for peer in free if peer not in self.suspects.suspicions]
        # By turns the newest: many old names do not keep it waiting, nor many new ones an old one.
        return rng.choice([fresh[-1], rng.choice(fresh)]) if fresh else rng.choice(free) if free else None

    def favoured(self, but: str = "") -> bool:
        """Say whether anybody but this one has proved itself and is not under suspicion."""
        return any(hop.peer != but and self._proved(hop.peer) for hop in self._part()[0])

    def _begin(self, peer: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        self._in_hand[peer] += 1
        task = asyncio.create_task(call)
        task.add_done_callback(lambda _: self._ended(peer))
        return task

    def _leave(self, task: asyncio.Task[Any], deadline_s: float) -> None:
        end = asyncio.get_running_loop().call_at(deadline_s, task.cancel)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        task.add_done_callback(lambda _: end.cancel())

    async def _wait(self, task: asyncio.Task[T]) -> None:
        """Wait until a call is done or late."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if not self._usual_s:
            if self._first is None:
                self._first = loop.create_future()
            either: list[asyncio.Future[Any]] = [task, self._first]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait([task], timeout=max(0.0, begun_s + LATE * self._usual_s - loop.time()))

    def _ended(self, peer: str) -> None:
        self._in_hand[peer] -= 1
        if not self._in_hand[peer]:
            del self._in_hand[peer]

    def _proved(self, peer: str) -> bool:
        suspicion = self.suspects.suspicions.get(peer)
        return peer in self.reply_s and (suspicion is None or suspicion.cleared)

    def _part(self) -> tuple[tuple[H, ...], tuple[str, ...]]:
        hops, (known, count, proved, unproved) = self._hops(), self._parted
        if hops is not known or count != len(self.reply_s):
            proved = tuple([hop for hop in hops if hop.peer in self.reply_s])
            names = {hop.peer: None for hop in hops if hop.peer not in self.reply_s}
            unproved = tuple(dict.fromkeys([peer for peer in unproved if peer in names]) | names)
            self._parted = (hops, len(self.reply_s), proved, unproved)
        return proved, unproved
