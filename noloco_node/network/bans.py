"""Bans: a peer that violates the protocol is tolerated briefly, then shut out for growing periods.

Violations count against the authenticated identity, and against the public address prefix that it comes from, because
one person may own many identities. docs/design/network.md has the numbers, and why.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import NamedTuple

from noloco_node.network.interface import Conversation, NetworkHook
from noloco_node.network.schema import Violation
from noloco_node.tasks import loop_s

MOST_VIOLATIONS = 5.0  # an identity with so many violations is banned
MOST_OF_PREFIX = 20.0  # an address prefix with so many is banned: a household, or an office, has several peers
HALF_LIFE_S = 600.0
MOMENT_S = 1.0
FIRST_BAN_S, LONGEST_BAN_S = 60.0, 6 * 3600.0
TIMES_LONGER = 4.0  # each ban lasts so many times the one before it, unless a day of good conduct lies between them
FORGIVEN_S = 86_400.0
MOST_KNOWN = 4096
GOOD_S = 1800.0  # a peer is in good standing so long after its first conversation, if it has had no violation since


class _Standing(NamedTuple):
    """The standing of one identity or prefix. `points`: the violations that were not forgotten at `at_s`.

    Each reason to shut it out has an end of its own: `banned_until_s` for violations, `found_until_s` for a quarantine.
    """

    points: float = 0.0
    at_s: float = -FORGIVEN_S
    bans: int = 0
    banned_until_s: float = -FORGIVEN_S
    found_until_s: float = -FORGIVEN_S

    @property
    def until_s(self) -> float:
        return max(self.banned_until_s, self.found_until_s)


class BanList:
    """Which identities and prefixes are shut out until when; it has no clock of its own.

    Of more than `MOST_KNOWN` it forgets the one whose last reason ends first, of equals the one that offended longest
    ago.
    """

    def __init__(self) -> None:
        self._standings: OrderedDict[str, _Standing] = OrderedDict()

    def note(self, who: str, now_s: float, most: float = MOST_VIOLATIONS) -> float:
        """Count a violation; return for how long that bans its sender, 0 if it does not."""
        known = self._standings.get(who, _Standing())
        ban_s = 0.0
        if now_s - known.at_s >= MOMENT_S:
            points = 1.0 + known.points * 0.5 ** ((now_s - known.at_s) / HALF_LIFE_S)
            bans = known.bans if now_s - known.banned_until_s < FORGIVEN_S else 0
            known = known._replace(points=points, at_s=now_s, bans=bans)
            if points > most - 0.5:
                ban_s = min(LONGEST_BAN_S, FIRST_BAN_S * TIMES_LONGER**bans)
                known = known._replace(points=0.0, bans=bans + 1, banned_until_s=now_s + ban_s)
        self._remember(who, known)
        return ban_s

    def shut_out(self, who: str, now_s: float, for_s: float) -> None:
        """Quarantine a peer for so long from now on; 0 ends the quarantine, and no ban."""
        self._remember(who, self._standings.get(who, _Standing())._replace(found_until_s=now_s + for_s))

    def left_s(self, who: str, now_s: float) -> float:
        """Return for how long an identity or prefix is shut out from now on."""
        return max(0.0, self._standings.get(who, _Standing()).until_s - now_s)

    def _remember(self, who: str, standing: _Standing) -> None:
        self._standings[who] = standing
        self._standings.move_to_end(who)
        if len(self._standings) > MOST_KNOWN:
            first = min(islice(self._standings, MOST_KNOWN), key=lambda each: self._standings[each].until_s)
            del self._standings[first]


class BanHook(NetworkHook):
    """Neither serves nor calls peers that are shut out."""

    def __init__(self) -> None:
        self._bans = BanList()
        self._counts: Counter[str] = Counter()
        self._good_since_s: OrderedDict[str, float] = OrderedDict()
        """When a conversation that each peer opened first ended without a violation; the last to talk comes last."""

    async def calling(self, peer: str, dial: Callable[[], Awaitable[Conversation]]) -> Conversation:
        self._refuse_banned(peer)
        return await dial()

    def lost(self, peer: str, error: ConnectionError) -> None:
        if isinstance(error, Violation):
            self._note(peer)

    @contextmanager
    def answering(self, conversation: Conversation, topic: str) -> Iterator[Conversation]:
        prefix = public_prefix(conversation.origin)
        self._refuse_banned(conversation.peer)
        if prefix and not self._is_good(conversation.peer):
            self._refuse_banned(prefix)
        served_well = True
        try:
            yield conversation
        except (Violation, ConnectionRefusedError) as error:  # another hook refuses strangers
            served_well = False
            if isinstance(error, Violation):
                self._note(conversation.peer, prefix)
            raise
        finally:
            if served_well:
                self._note_good(conversation.peer)

    def statistics(self) -> dict[str, int | float]:
        return dict(self._counts)

    def shut_out(self, peer: str, for_s: float) -> None:
        """Quarantine a peer for so long; 0 ends the quarantine."""
        self._bans.shut_out(peer, loop_s(), for_s)

    def _note(self, peer: str, prefix: str = "") -> None:
        """Count a violation against a peer, and the public prefix that it came from."""
        now_s = loop_s()
        self._good_since_s.pop(peer, None)
        banned = self._bans.note(peer, now_s) > 0.0
        if prefix:
            banned |= self._bans.note(prefix, now_s, MOST_OF_PREFIX) > 0.0
        self._counts["bans.begun"] += banned

    def _note_good(self, peer: str) -> None:
        self._good_since_s[peer] = self._good_since_s.pop(peer, loop_s())
        if len(self._good_since_s) > MOST_KNOWN:
            self._good_since_s.popitem(last=False)

    def _is_good(self, peer: str) -> bool:
        return loop_s() - self._good_since_s.get(peer, loop_s()) >= GOOD_S

    def _refuse_banned(self, who: str) -> None:
        left_s = self._bans.left_s(who, loop_s())
        if left_s > 0.0:
            self._counts["bans.refused"] += 1
            raise ConnectionRefusedError(f"{who} sent what no peer may send, and is shut out for {left_s:.0f} s more")


def address_prefix(origin: str) -> IPv4Network | IPv6Network | None:
    """Return the prefix, /24 or /48, of the address that a peer comes from (a multiaddr); None where it shows none."""
    parts = origin.split("/")
    if len(parts) < 3 or "p2p-circuit" in parts:
        return None
    try:
        host = ip_address(parts[2])
    except ValueError:
        return None
    return ip_network(f"{host}/{24 if host.version == 4 else 48}", strict=False)


@lru_cache(maxsize=4096)
def public_prefix(origin: str) -> str:
    """Return `address_prefix` as text; empty where it says nothing of who comes, as within one household."""
    place = address_prefix(origin)
    return str(place) if place is not None and place.is_global else ""


def crowd_of(origin: str) -> str:
    """Return `public_prefix`, or one text for all that come through relays: so many names may be one person's."""
    return "relays" if "/p2p-circuit" in origin else public_prefix(origin)
