"""What one peer knows of who may take part, and the ticket that it holds itself.

**Others** (`AdmissionState`, no I/O): tickets that were shown, the latest list of revocations, and the time. A network
asks it before a handler runs, before a record counts, and at every message of a conversation, so a peer that is revoked
or whose ticket expires is out at once. A single-use invite is for the peer that shows it first, as each peer remembers
for itself; where a peer sees two at once that hold it, the smaller id stays. The owner sees both in `members list` and
can revoke it.

**Our own** (`HeldTicket`): a node's, a visitor's, or a bootstrap peer's; nothing else replaces it. It comes from what
its holder has (an invite, a home, a key) or from a peer that signs tickets. A good one is renewed before it expires
(`renew`). A refused one is given up at once (`another`): it expired in a sleep, or the owner revoked it or the delegate
that had signed it. What the holder has is tried first, then a signing peer is asked. The hook that shows the ticket
calls `another` whenever a use of it finds the ticket refused, so no command has to remember that.

Also how a peer that has no right to something is told so, and how that is said to a person.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn, Self

from noloco_node.admission.ticket import (
    TICKET_BYTES,
    RevocationList,
    Right,
    TicketFacts,
    decode,
    decode_list,
    facts_of,
    key_of,
)
from noloco_node.errors import Exit, UserError
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration, format_utc

MOST_SHOWN = 8192  # tickets of peers that train, which are remembered
MOST_LOOKERS = 1024  # tickets of peers that only look: in a table of their own, so that they push no member out
MOST_TRIED = 8
"""Tickets that a peer may show in calls in a minute and that are new to us: we verify up to four signatures of each."""
LISTED = "listed"
NO_TICKET, EXPIRED = "it has shown no ticket", "its ticket has expired"
FOREIGN = "its ticket is not one of this run's owner"
SHUT_OUT = "the owner of the run has shut it out"
CAME_BY = "the owner of the run has shut out all that came by its invite or its signing peer"
WHEN_SHUT_OUT = (
    "ask the owner of the run to let you back in (noloco-node members lift); another --home has another identity, and "
    "needs an invite of its own"
)
_TO_US = (("it has", "you have"), ("its", "your"), ("it", "you"))
"""Words of a refusal: as another peer says them of us, and as we say them to our owner."""
RENEW_S = 7 * 86400.0
"""A ticket is renewed when it has no longer to live: signing peers may be away for a week, and the tickets that a
delegate signs end with its own."""
MOST_PAUSE_S, LEAST_PAUSE_S = 3600.0, 30.0
"""Between two looks at how long ours still lives, or two requests for another: a quarter of what is left of it."""
SILENCE_S = 10.0  # no signing peer is asked again for so long after none has answered
SAID_AGAIN = 0.5  # a warning is repeated when only this share is left of the time that the last one named


class AdmissionState:
    """The tickets of one run, whose owner is known from its run file on (`pin`)."""

    def __init__(self, run: str, unix_time: Callable[[], float]) -> None:
        self.run, self._unix_time = run, unix_time
        self.revocations: RevocationList | None = None
        self.raw_revocations = b""  # the list as it travels
        self.own: HeldTicket | None = None  # the ticket that we hold ourselves; None before we have one
        self._owner: bytes | None = None
        self._rule = ""
        self._shown: dict[str, tuple[bytes, TicketFacts]] = {}  # the peer that has shown its ticket last comes last
        self._lookers: dict[str, tuple[bytes, TicketFacts]] = {}
        self._holders: dict[bytes, str] = {}  # the peer that showed each single-use invite first
        self._minute, self._tried = 0, Counter[str]()
        """The minute of the clock, and how many tickets each peer has shown in it that we did not know."""

    @property
    def is_pinned(self) -> bool:
        """Whether we know the owner; until then nobody is let in."""
        return self._owner is not None

    def pin(self, owner: bytes, rule: str) -> None:
        """Take the owner's public key and the rule from the run file."""
        self._owner, self._rule = owner, rule

    def show(self, peer: str, raw: bytes) -> str:
        """Take note of the ticket that a peer shows; say why the peer may do nothing, empty where it may."""
        known = self._shown_by(peer)
        if known is None or known[0] != raw:
            facts = self._facts(peer, raw)
            if facts is None:
                return FOREIGN
            # Records outlive what they were published with: what an old one carries takes no good ticket's place.
            if (
                known is None
                or self.refusal(peer)
                or (_rank(facts) > _rank(known[1]) and not self._objection(peer, facts))
            ):
                known = raw, facts
        self._remember(peer, known)
        return self.refusal(peer)

    def rights_by(self, peer: str, raw: bytes) -> Right:
        """Return what a peer may do that shows a ticket with each call; of its new ones few are verified a minute."""
        if self._owner is None:
            return Right(0)
        known, minute = self._shown_by(peer), int(self._unix_time() // 60)
        if known is None or known[0] != raw:
            if known is not None and not self.refusal(peer) and (rights_of(raw), until_of(raw)) <= _rank(known[1]):
                return known[1].rights  # `show` would keep the better ticket, and it would be verified at each call
            if minute != self._minute:
                self._minute, self._tried = minute, Counter()
            self._tried[peer] += 1
            if self._tried[peer] > MOST_TRIED:
                return self.rights(peer)
        self.show(peer, raw)
        return self.rights(peer)

    def rights(self, peer: str) -> Right:
        known = self._shown_by(peer)
        return Right(0) if known is None or self.refusal(peer) else known[1].rights

    def refusal(self, peer: str) -> str:
        known = self._shown_by(peer)
        return NO_TICKET if known is None else self._objection(peer, known[1])

    def number_of(self, raw: bytes) -> int:
        """Return the number of a list of revocations; -1 where the owner has not signed it."""
        found = None if self._owner is None else decode_list(raw, self._owner, self.run)
        return -1 if found is None else found.number

    def objection(self, peer: str, raw: bytes) -> str:
        """Say why a ticket would be refused that a peer has not shown yet; empty where it is good."""
        facts = self._facts(peer, raw)
        return FOREIGN if facts is None else self._objection(peer, facts)

    def _objection(self, peer: str, facts: TicketFacts) -> str:
        if facts.until <= self._unix_time():
            return EXPIRED
        if out := self._shut_out(SHUT_OUT, facts.keys[-1:]) or self._shut_out(CAME_BY, facts.keys):
            return out
        if facts.invite_key is not None and self._holders.setdefault(facts.invite_key, peer) != peer:
            return "its invite is used by somebody else"
        return ""

    def known_refusal(self, peer: str) -> str:
        """Say why we do not talk with a peer; empty where we do, also with one whose ticket we have not seen."""
        if self.was_member(peer):
            return self.refusal(peer)
        return self.shut_out(peer)

    def was_member(self, peer: str) -> bool:
        """Say whether a peer has shown a ticket of this run's owner, good by now or not."""
        return self._shown_by(peer) is not None

    def shut_out(self, peer: str) -> str:
        """Say that the owner has shut a peer out, and until when; empty where it has not."""
        key = key_of(peer)
        return "" if key is None else self._shut_out(SHUT_OUT, (key,))

    def _shut_out(self, why: str, keys: Iterable[bytes]) -> str:
        revoked = {} if self.revocations is None else self.revocations.revoked
        until = max(revoked.get(key, 0) for key in keys)
        return f"{why} until {format_utc(until)}" if until > self._unix_time() else ""

    def accepts(self, peer: str, value: bytes) -> bool:
        """Say whether a record is to be kept and believed: only one that carries its peer's ticket to train.

        The owner's list is no exception: everybody has it, so it could stand in front of anybody's records.
        """
        ticket, _ = unstamped(value)
        return not self.show(peer, ticket) and Right.TRAIN in self.rights(peer)

    def take_revocations(self, raw: bytes) -> bool:
        """Take a list over if it is a later one than ours; say whether it is. Until the owner is known, none is."""
        if self._owner is None or raw == self.raw_revocations:
            return False
        found = decode_list(raw, self._owner, self.run)
        if found is None or (self.revocations is not None and found.number <= self.revocations.number):
            return False
        self.revocations, self.raw_revocations = found, raw
        return True

    def _shown_by(self, peer: str) -> tuple[bytes, TicketFacts] | None:
        return self._shown.get(peer) or self._lookers.get(peer)

    def _remember(self, peer: str, shown: tuple[bytes, TicketFacts]) -> None:
        """Take note of a ticket; of each table the one that was shown longest ago goes first."""
        self._shown.pop(peer, None)
        self._lookers.pop(peer, None)
        trains = Right.TRAIN in shown[1].rights
        table, most = (self._shown, MOST_SHOWN) if trains else (self._lookers, MOST_LOOKERS)
        table[peer] = shown
        if len(table) > most:
            del table[next(iter(table))]

    def _facts(self, peer: str, raw: bytes) -> TicketFacts | None:
        chain = decode(raw)
        if chain is None or self._owner is None or chain[-1].subject != key_of(peer):
            return None
        facts = facts_of(chain, self._owner, self.run)
        if facts is not None and facts.invite_key is not None and self._rule == LISTED:
            return None
        return facts


def stamped(ticket: bytes, content: bytes) -> bytes:
    return len(ticket).to_bytes(2) + ticket + content


def unstamped(value: bytes) -> tuple[bytes, bytes]:
    """Return ticket and content of a record's value, whatever it is."""
    size = min(int.from_bytes(value[:2]), TICKET_BYTES)
    return value[2 : 2 + size], value[2 + size :]


def _rank(facts: TicketFacts) -> tuple[int, int]:
    return facts.rights, facts.until


def not_for(peer: str) -> str:
    return f"not for {peer}: "


def not_admitted(why: str) -> UserError:
    """Return the error of a peer that the run does not let in, or no longer."""
    invite = (
        "give the whole invite, with the part from its # on, if it has one; or ask the owner of the run for an "
        "invite of your own: each is for one identity (--home), and expires"
    )
    return UserError(
        "This run does not let us in.",
        why=why,
        hint=WHEN_SHUT_OUT if addressed(SHUT_OUT) in why else invite,
        code=Exit.NOT_ADMITTED,
    )


def no_ticket(why: str) -> UserError:
    """Return the error of a peer that no signing peer answers."""
    return UserError(
        "Nobody gives us a ticket for this run.",
        why=why,
        hint="ask whether a bootstrap peer runs that signs tickets, or ask the owner of the run for an invite",
        code=Exit.UNREACHABLE,
    )


def addressed(refusal: str) -> str:
    """Return what a peer says about us, such as `it has shown no ticket`, as it is said to us: in printable letters."""
    text = "".join(letter for letter in refusal[:200] if letter.isprintable())
    for third, second in _TO_US:
        text = re.sub(rf"\b{third}\b", second, text)
    return text


def told(refusals: Iterable[str]) -> str:
    """Return in one line what bootstrap peers say about us, each sentence once."""
    return "; ".join(f"the bootstrap peer says: {each}" for each in dict.fromkeys(map(addressed, refusals)))


class HeldTicket:
    """`until`: when it expires (Unix seconds); `rights`: what it lets us do.

    `own` returns the tickets that need no network; `ask` returns one that a signing peer gives.

    `keep` takes note of a ticket that was given to us.
    """

    def __init__(
        self,
        unix_time: Callable[[], float],
        own: Callable[[], Sequence[bytes]],
        ask: Callable[[], Awaitable[bytes]],
        keep: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._unix_time, self._own, self._ask, self._keep = unix_time, own, ask, keep
        self._turn = asyncio.Lock()
        self._refused: set[bytes] = set()  # tickets that were refused since we last renewed ours
        self._silent_s = float("-inf")  # when a request was answered by nobody (loop seconds)
        self.raw = b""

    @classmethod
    def fixed(cls, raw: bytes) -> Self:
        async def ask() -> bytes:
            raise not_admitted("")  # the reason is why the ticket was refused

        held = cls(lambda: 0.0, lambda: (), ask)
        held.raw = raw
        return held

    @property
    def raw(self) -> bytes:
        return self._raw

    @raw.setter
    def raw(self, raw: bytes) -> None:
        self._raw, self.until, self.rights = raw, until_of(raw), rights_of(raw)

    @property
    def is_expired(self) -> bool:
        return self.until <= self._unix_time()

    async def begin(self) -> None:
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
                    # Whatever a signing peer says of a peer that the owner has shut out, it is not the reason.
                    also = "" if addressed(SHUT_OUT) in why else error.why
                    raise not_admitted("; ".join(filter(None, dict.fromkeys((why, also))))) from error
                if found in self._refused:
                    raise not_admitted(why)
                self._keep(found)
            self.raw = found

    async def renew(self, say: Callable[[str], None]) -> NoReturn:
        """Get another ticket whenever ours expires soon, and say what becomes of it."""
        said_s, held = float("inf"), self.raw
        while True:
            left_s = self.until - self._unix_time()
            await asyncio.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, left_s - RENEW_S, left_s / 4)))
            trouble = "" if self.until - self._unix_time() > RENEW_S else await self._prolong()
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
    return min((link.until for link in decode(raw) or ()), default=0)


def rights_of(raw: bytes) -> Right:
    chain = decode(raw)
    return Right(chain[-1].rights) if chain else Right(0)
