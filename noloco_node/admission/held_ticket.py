"""The ticket that one peer holds: a node, a visitor, or a bootstrap peer. It is the only place that replaces one.

A ticket comes from what its holder has (its invite, its home, a key) or from a peer that signs tickets. A good one is
renewed before it expires (`renew`). A refused one is given up at once (`another`): because it expired in a sleep, or
because the owner revoked it or the delegate that had signed it. What the holder has is tried first, then a signing peer
is asked. The network that shows the ticket (`noloco_node.admission.admission_hook`) calls `another` whenever a use of
it finds the ticket refused, so no command has to remember that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, Self

from noloco_node.admission.admission_state import no_ticket, not_admitted
from noloco_node.admission.ticket import Right, decode
from noloco_node.errors import Exit, UserError
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration

RENEW_S = 86400.0
"""A ticket is renewed when it has no longer to live."""
MOST_PAUSE_S, LEAST_PAUSE_S = 3600.0, 30.0
"""Between two looks at how long ours still lives, or two requests for another: a quarter of what is left of it."""
SILENCE_S = 10.0
"""For which no signing peer is asked again after none has answered."""
SAID_AGAIN = 0.5
"""A warning is repeated when only this share is left of the time that the last one named."""


class HeldTicket:
    """`until`: when it expires (Unix seconds); `rights`: what it lets us do.

    `own` returns the tickets that need no network; `ask` returns one that a signing peer gives.

    `keep` takes note of a ticket that was given to us. `early_s`: so long before its end a ticket is renewed.
    """

    def __init__(
        self,
        unix_time: Callable[[], float],
        own: Callable[[], Sequence[bytes]],
        ask: Callable[[], Awaitable[bytes]],
        keep: Callable[[bytes], None] = lambda _: None,
        early_s: float = RENEW_S,
    ) -> None:
        self._unix_time, self._own, self._ask, self._keep, self._early_s = unix_time, own, ask, keep, early_s
        self._turn = asyncio.Lock()
        self._refused: set[bytes] = set()
        """Tickets that were refused since we last renewed ours."""
        self._silent_s = float("-inf")
        """When a request was answered by nobody (loop seconds)."""
        self.raw = b""

    @classmethod
    def fixed(cls, raw: bytes) -> Self:
        """Return a ticket that is never replaced."""

        async def ask() -> bytes:
            raise not_admitted("")  # the reason is why the ticket was refused

        held = cls(lambda: 0.0, lambda: (), ask)
        held.raw = raw
        return held

    @property
    def raw(self) -> bytes:
        """The ticket, encoded."""
        return self._raw

    @raw.setter
    def raw(self, raw: bytes) -> None:
        self._raw, self.until, self.rights = raw, until_of(raw), rights_of(raw)

    @property
    def is_expired(self) -> bool:
        """Whether it lets us do nothing any more."""
        return self.until <= self._unix_time()

    async def begin(self) -> None:
        """Hold the best ticket that there is; `UserError` where there is none."""
        best = self._best()
        if until_of(best) - self._unix_time() < 2 * LEAST_PAUSE_S:
            try:
                best = await self._ask()
                self._keep(best)
            except UserError:
                if not best:
                    raise
        self.raw = best

    async def another(self, why: str) -> None:
        """Hold another ticket, for ours is refused. `UserError`: NOT_ADMITTED where there is none, UNREACHABLE where no
        signing peer answers.
        """
        refused = self.raw
        async with self._turn:
            if self.raw != refused:
                return  # another use has replaced it meanwhile
            self._refused.add(refused)
            found = self._best()
            if not found:
                if loop_s() - self._silent_s < SILENCE_S:
                    raise no_ticket(f"{why}; no signing peer answers")
                try:
                    found = await self._ask()
                except UserError as error:
                    if error.code is Exit.UNREACHABLE:
                        self._silent_s = loop_s()
                        raise no_ticket(f"{why}; {error.why}") from error
                    raise not_admitted("; ".join(filter(None, dict.fromkeys((why, error.why))))) from error
                if found in self._refused:
                    raise not_admitted(why)
                self._keep(found)
            self.raw = found

    async def renew(self, say: Callable[[str], None]) -> NoReturn:
        """Get another ticket whenever ours expires soon, and say what becomes of it."""
        said_s, held = float("inf"), self.raw
        while True:
            left_s = self.until - self._unix_time()
            await asyncio.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, left_s - self._early_s, left_s / 4)))
            trouble = "" if self.until - self._unix_time() > self._early_s else await self._prolong()
            if self.raw != held:
                said_s, held = float("inf"), self.raw
                if self.rights != Right.LOOK:
                    say(f"we have a new ticket, for {format_duration(self.until - self._unix_time())}")
            left_s = max(0.0, self.until - self._unix_time())
            if trouble and left_s < SAID_AGAIN * said_s:
                said_s = left_s
                say(f"our ticket expires in {format_duration(left_s)}, and nobody gives us another: {trouble}")

    async def _prolong(self) -> str:
        """Hold a ticket that lasts longer and lets us do no less; say why not, empty where there is one."""
        async with self._turn:
            best = self._best()
            if self._is_better(best):
                self.raw = best
                return ""
            try:
                asked = await self._ask()
            except UserError as error:
                return error.why
            if until_of(asked) > self.until:
                self._keep(asked)
            if self._is_better(asked):
                self.raw = asked
                self._refused.clear()
                return ""
            if until_of(asked) > self.until:
                return "what we are offered lets us sign no tickets; the owner of the run gives that"
            return "the owner of the run has not named us for longer"

    def _is_better(self, raw: bytes) -> bool:
        return until_of(raw) > self.until and rights_of(raw) & self.rights == self.rights

    def _best(self) -> bytes:
        """Return the ticket of what we have that lets us do most, and then the one that lasts longest; empty: none."""
        good = [raw for raw in self._own() if raw not in self._refused and until_of(raw) > self._unix_time()]
        return max(good, key=lambda raw: (rights_of(raw), until_of(raw)), default=b"")


def until_of(raw: bytes) -> int:
    """Return when a ticket of our own expires (Unix seconds)."""
    return min((link.until for link in decode(raw) or ()), default=0)


def rights_of(raw: bytes) -> Right:
    """Return what a ticket of our own lets us do."""
    chain = decode(raw)
    return Right(chain[-1].rights) if chain else Right(0)
