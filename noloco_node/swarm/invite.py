"""An invite: the one string by which a newcomer joins.

    noloco6:<digest of the run, 64 hex digits>@<multiaddr>[,<multiaddr>...][#<credential, for a run that has an owner>]

The number is the version of the wire format (`WIRE_VERSION`): peers of two versions never meet, since a run's digest
covers it, and only the invite can tell a newcomer so. A newcomer believes only the run file with this digest, whichever
peer serves it. Each multiaddr ends in /p2p/ and a peer id, so that no other peer can answer in its place.

Every peer keeps an invite in its home, with its own addresses and those of peers that it met (`KeptInvite`): by it the
peer finds a swarm whose bootstrap peers are gone.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NoReturn

import msgspec

from noloco_node.admission.ticket import InviteCredential, parse_credential, peer_of_file
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.libp2p.addresses import PeerAddress, beyond_this_machine, parse_peer_address, present
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import some_addresses

SCHEME = f"noloco{WIRE_VERSION}:"
_MOST_ADDRESSES = 64
LASTING = 4
"""Peers at the head of an invite that keep their places, whoever is met: bootstrap peers, which no roster lists."""
BESIDE = 4
"""Living peers that are added, by which an invite outlives its bootstrap peers."""
MOST_PEERS, MOST_PLACES = 12, 8
"""Peers in an invite beside the one that gives it, and addresses of one peer."""
EVERY_S = 60.0
"""The least seconds between two writes."""


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed invite: the run's digest, and addresses of its bootstrap peers."""

    digest: str
    addresses: tuple[PeerAddress, ...]
    credential: InviteCredential | None = None
    """Admits us to a run with an owner; None in a run without one."""

    @property
    def peers(self) -> list[str]:
        """The bootstrap peers, each once, however many addresses it has."""
        return list(dict.fromkeys(address.peer for address in self.addresses))

    def __str__(self) -> str:
        places = self.digest + "@" + ",".join(map(str, self.addresses))
        return SCHEME + places + ("" if self.credential is None else f"#{self.credential}")


def format(digest: str, addresses: Sequence[str], credential: InviteCredential | None = None) -> str:
    """Return the invite of a run's digest and multiaddrs; `UserError` if a part is wrong."""
    return str(msgspec.structs.replace(parse(f"{SCHEME}{digest}@{','.join(addresses)}"), credential=credential))


def parse(text: str) -> Invite:
    """Parse an invite, with the line breaks and blanks of a chat program; a `UserError` names the wrong part."""
    scheme = re.match(r"noloco([1-9]\d{0,8}):", text := text.strip(), re.ASCII)
    if scheme is None:
        raise _malformed(f"it does not start with {SCHEME!r}: {text[:24]!r}")
    if scheme[0] != SCHEME:
        raise UserError(
            "This invite is for another version of this program.",
            why=f"it begins with {scheme[0]!r}, and this version reads {SCHEME!r}: its swarm uses "
            f"{'a newer' if int(scheme[1]) > WIRE_VERSION else 'an older'} protocol",
            hint="install the version that the swarm uses (its peers see it by `noloco-node --version`), or ask one of "
            "them for an invite of today: a home keeps the one that it came by",
            code=Exit.OTHER_RUN,
        )
    text, is_owned, given = "".join(text[scheme.end() :].split()).partition("#")
    try:
        credential = parse_credential(given) if is_owned else None
    except ValueError as error:
        raise _malformed(str(error)) from None
    digest, separator, places = text.partition("@")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _malformed(
            f"the run's digest must be 64 hex digits in lower case, not {len(digest)} characters: {digest!r}"
        )
    if not separator or not places:
        raise _malformed("no address follows the digest: an @ and at least one multiaddr are missing")
    listed = places.split(",")
    if len(listed) > _MOST_ADDRESSES:
        raise _malformed(f"it lists {len(listed)} addresses, at most {_MOST_ADDRESSES} are allowed")
    addresses: list[PeerAddress] = []
    for number, place in enumerate(listed, 1):
        try:
            addresses.append(parse_peer_address(place))
        except ValueError as error:
            raise _malformed(f"address {number} is wrong: {error}") from None
    return Invite(digest=digest, addresses=tuple(addresses), credential=credential)


def found(given: str | None, home: Path) -> str:
    """Return the given invite, or the one that a home keeps: a given directory, else `home`.

    Raises `UserError` if there is none.
    """
    if given is not None and not given.strip():
        raise _malformed("it is empty")
    directory = home if given is None else Path(os.path.expanduser(given.strip()))
    if given is not None and not os.path.isdir(directory):
        return given
    try:
        return HomePaths(directory).invite.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"{directory} keeps none: {getattr(error, 'strerror', None) or error}"
        raise config_error(
            "There is no invite to this swarm.",
            why=why if given is not None else f"none was given, and {why}",
            hint="paste the line that `noloco-node bootstrap` printed, or name the home of a node that took part",
        ) from error


def kept_addresses(invite: Invite, home: Path) -> list[PeerAddress]:
    """Return the addresses of an invite's run that a home keeps beyond those of the invite."""
    try:
        kept = parse(found(None, home))
    except UserError:
        return []
    return [each for each in kept.addresses if kept.digest == invite.digest and each not in invite.addresses]


def widened(invite: Invite, addresses: Iterable[str], first: Sequence[str] = ()) -> str:
    """Return an invite with `first` before its addresses, and the peers of the first few `addresses` among its own.

    Its first peers stay; the others follow, those met last first, until they are too many. Strangers wrote `addresses`:
    malformed ones are left out.
    """
    known: dict[str, list[PeerAddress]] = {}
    for each in invite.addresses:
        known.setdefault(each.peer, []).append(each)
    met = {each.peer: each for each in islice(_legible(addresses), BESIDE)}
    lasting, earlier = list(known)[:LASTING], list(known)[LASTING:]
    peers = list(dict.fromkeys((*lasting, *met, *earlier)))[:MOST_PEERS]
    for peer, now in met.items():
        # By default each start takes another port. Of each host the first known one stays, for it may last.
        lasts: dict[str, PeerAddress] = {}
        for each in known.get(peer, ()):
            lasts.setdefault(_host(each), each)
        known[peer] = [now, *(each for each in lasts.values() if each != now)]
    listed = dict.fromkeys((*first, *(str(each) for peer in peers for each in known[peer][:MOST_PLACES])))
    return format(invite.digest, list(listed)[:_MOST_ADDRESSES], invite.credential)


def without_secret(text: str) -> str:
    """Return an invite without a credential that is for one identity, to be shown."""
    parsed = parse(text)
    credential = parsed.credential
    return text if credential is None or not credential.chain else str(msgspec.structs.replace(parsed, credential=None))


def _host(address: PeerAddress) -> str:
    return "/".join(address.transport.split("/")[:3])


def _legible(addresses: Iterable[str]) -> Iterator[PeerAddress]:
    for text in addresses:
        with suppress(ValueError):
            if not set(text) & {",", "#"}:
                yield parse_peer_address(text)


def _malformed(why: str) -> UserError:
    return config_error(
        "This is not a valid invite.",
        why=why,
        hint="paste the whole line that `noloco-node bootstrap` printed, in quotes",
    )


class KeptInvite:
    """Keeps an invite in a home: our `own` addresses, those of the invite that we used, and some of living peers.

    Peers met before stay in it behind the living ones, so that a peer that is alone can return by them.
    """

    def __init__(self, home: HomePaths, came_by: Invite, own: Sequence[str], say: Callable[[str], None]) -> None:
        self._file, self._own, self._say = atomic_file.KeptFile(home.invite, "an invite", say), own, say
        self._told = set(own)  # places of ours that were told, so that one to which we return is not told again
        self._me = peer_of_file(home.identity)
        # The invite that we used may be our own, with the addresses of earlier starts.
        used = not_ours(came_by.addresses, home) if own else came_by.addresses
        self._known = msgspec.structs.replace(came_by, addresses=(*used, *met_before(came_by, home)))
        self._others: list[str] = []
        self._written = ""

    def keep(self, others: Sequence[str] = ()) -> str:
        """Write the invite if it has changed, and return it; say once if the disk refuses."""
        living = (str(each) for each in _legible(others) if each.peer != self._me)
        self._others = list(islice(living, BESIDE)) or self._others
        text = widened(self._known, self._others, self._own)
        if text != self._written and self._file.write(f"{text}\n".encode()):
            self._written = text
        return text

    def move(self, own: Sequence[str]) -> None:
        """Note our addresses of now; say so where we have been at none of them before."""
        self._own = present(self._own, own)
        is_new = bool(self._told) and self._told.isdisjoint(self._own)
        self._told.update(self._own)
        if is_new:
            text = without_secret(self.keep())
            self._say(f"our addresses have changed, and earlier invites may lead to us no more; this one does: {text}")

    async def follow(self, membership: Membership, addresses: Callable[[], Awaitable[Sequence[str]]]) -> NoReturn:
        """Note our `addresses` and add living peers from the roster until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await membership.changed()
            with suppress(ConnectionError):
                self.move(await addresses())
            self.keep(some_addresses(membership.roster))
            await asyncio.sleep(EVERY_S)


def met_before(invite: Invite, home: HomePaths) -> list[PeerAddress]:
    """Return the peers that this home met before, by which it returns if no peer of the invite is left."""
    return not_ours(kept_addresses(invite, home.path), home)


def not_ours(addresses: Sequence[PeerAddress], home: HomePaths) -> list[PeerAddress]:
    """Return the addresses of others: a kept invite also names its own peer."""
    ours = peer_of_file(home.identity)
    return [each for each in addresses if each.peer != ours]


def from_where(addresses: Sequence[str]) -> str:
    """Say from where an invite with these addresses can be used."""
    if beyond_this_machine(addresses):
        return "from another machine"
    return "on this machine (others cannot dial 127.0.0.1: --listen and --announce give an address that they can)"
