"""What one peer knows of who may take part: tickets that were shown, the latest list of revocations, and the time.

No I/O: a network asks it before a handler runs, before a record counts, and at every message of a conversation, so that
whoever is shut out or whose ticket expires is out at once.

An invitation is for whoever shows it first. Who that was each peer remembers for itself; where somebody sees two at
once that both hold it, the smaller id stays, and its owner sees both in `members list` and can revoke it.

Also how a peer that has no right to something is told so, and how that is said to a person.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

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

MOST_SHOWN = 8192
"""Tickets of peers that train, which are remembered."""
MOST_LOOKERS = 1024
"""Tickets of peers that only look: in a table of their own, so that they push no member out."""
LISTED = "listed"
NO_TICKET, EXPIRED = "it has shown no ticket", "its ticket has expired"
FOREIGN = "its ticket is not one of this run's owner"
SHUT_OUT = "the owner of the run has shut it out"
_TO_US = (("it has", "you have"), ("its", "your"), ("it", "you"))
"""A refusal as others say it, and as we say it to a person."""


class AdmissionState:
    """The tickets of one run, whose owner is known from its run file on (`pin`)."""

    def __init__(self, run: str, unix_time: Callable[[], float]) -> None:
        self.run, self._unix_time = run, unix_time
        self.revocations: RevocationList | None = None
        self.raw_revocations = b""
        """The same as it travels."""
        self._owner: bytes | None = None
        self._rule = ""
        self._shown: dict[str, tuple[bytes, TicketFacts]] = {}
        """The peer that has shown its ticket last comes last."""
        self._lookers: dict[str, tuple[bytes, TicketFacts]] = {}
        self._holders: dict[bytes, str] = {}
        """Who showed an invitation first."""

    @property
    def is_pinned(self) -> bool:
        """Whether we know the owner; until then nobody is let in."""
        return self._owner is not None

    def pin(self, owner: bytes, rule: str) -> None:
        """Take the owner's public key and the rule from the run file."""
        self._owner, self._rule = owner, rule
        raw, self.raw_revocations = self.raw_revocations, b""
        self.take_revocations(raw)

    def show(self, peer: str, raw: bytes) -> str:
        """Take note of the ticket that a peer shows; say why the peer may do nothing, empty where it may."""
        known = self._shown_by(peer)
        if known is None or known[0] != raw:
            facts = self._facts(peer, raw)
            if facts is None:
                return FOREIGN
            # Records outlive what they were published with: an older ticket replaces no better one.
            if known is None or self.refusal(peer) or _rank(facts) > _rank(known[1]):
                known = raw, facts
        self._remember(peer, known)
        return self.refusal(peer)

    def rights(self, peer: str) -> Right:
        """Return what a peer may do now, by the ticket that it has shown."""
        known = self._shown_by(peer)
        return Right(0) if known is None or self.refusal(peer) else known[1].rights

    def refusal(self, peer: str) -> str:
        """Say why a peer may do nothing; empty where it may."""
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
        now_s = self._unix_time()
        if facts.until <= now_s:
            return EXPIRED
        revoked = {} if self.revocations is None else self.revocations.revoked
        if any(revoked.get(key, 0) > now_s for key in facts.keys):
            return SHUT_OUT
        if facts.invitation is not None and self._holders.setdefault(facts.invitation, peer) != peer:
            return "its invitation is used by somebody else"
        return ""

    def was_member(self, peer: str) -> bool:
        """Say whether a peer has shown a ticket of this run's owner, good by now or not."""
        return self._shown_by(peer) is not None

    def is_revoked(self, peer: str) -> bool:
        """Say whether the owner has shut a peer id out."""
        key, revoked = key_of(peer), {} if self.revocations is None else self.revocations.revoked
        return key is not None and revoked.get(key, 0) > self._unix_time()

    def accepts(self, peer: str, value: bytes) -> bool:
        """Say whether a record is to be kept and believed: a member's, or the owner's list; any until it is known."""
        if self._owner is None or decode_list(value, self._owner, self.run) is not None:
            return True
        ticket, _ = unstamped(value)
        return not self.show(peer, ticket) and Right.TRAIN in self.rights(peer)

    def take_revocations(self, raw: bytes) -> bool:
        """Take a list over if it is a later one than ours; say whether it is."""
        if raw == self.raw_revocations:
            return False
        if self._owner is None:
            self.raw_revocations = raw
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
        if facts is not None and facts.invitation is not None and self._rule == LISTED:
            return None
        return facts


def stamped(ticket: bytes, content: bytes) -> bytes:
    """Return a record's value: its peer's ticket, then the content."""
    return len(ticket).to_bytes(2) + ticket + content


def unstamped(value: bytes) -> tuple[bytes, bytes]:
    """Return ticket and content of a record's value, whatever it is."""
    size = min(int.from_bytes(value[:2]), TICKET_BYTES)
    return value[2 : 2 + size], value[2 + size :]


def _rank(facts: TicketFacts) -> tuple[int, int]:
    return facts.rights, facts.until


def not_for(peer: str) -> str:
    """Return how an answer begins to a peer that has no right to it."""
    return f"not for {peer}: "


def not_admitted(why: str) -> UserError:
    """Return the error of a peer that the run does not let in, or no longer."""
    return UserError(
        "This run does not let us in.",
        why=why,
        hint="ask the owner of the run for an invite of your own; each is for one identity (--home), and expires",
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
