"""An invite: the one string that a newcomer needs.

    noloco1:<digest of the run, 64 hex digits>@<multiaddr>[,<multiaddr>...]
    noloco2:<the same>#<what gets its holder in, for a run that has an owner>

Every peer keeps one in its home, with itself and others that it met: a swarm whose bootstrap peers are gone is found by
any of its homes.

The digest says which run file to believe, whoever serves it. Each multiaddr ends in /p2p/ and the id of a bootstrap
peer, so that nobody else can answer in its place. 1 and 2 are versions of this format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from noloco_node.admission.ticket import InviteCredential, parse_credential
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.addresses import PeerAddress, parse_peer_address
from noloco_node.storage.home import HomePaths

_SCHEME, _CREDENTIAL_SCHEME = "noloco1:", "noloco2:"
_MOST_ADDRESSES = 64
BESIDE = 4
"""Addresses of ordinary peers that are added to an invite: with them it outlives its bootstrap peers."""


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed invite: the run's digest, and where its bootstrap peers are."""

    digest: str
    addresses: tuple[PeerAddress, ...]
    credential: InviteCredential | None = None
    """What a run with an owner lets us in for; None in a run that everybody may enter who knows it."""

    @property
    def peers(self) -> list[str]:
        """The bootstrap peers, as often as they have addresses."""
        return [address.peer for address in self.addresses]

    def __str__(self) -> str:
        places = self.digest + "@" + ",".join(map(str, self.addresses))
        return _SCHEME + places if self.credential is None else f"{_CREDENTIAL_SCHEME}{places}#{self.credential}"


def format(digest: str, addresses: Sequence[str], credential: InviteCredential | None = None) -> str:
    """Return the invite to the run with this digest by way of these multiaddrs; `UserError` where a part is wrong."""
    return str(msgspec.structs.replace(parse(f"{_SCHEME}{digest}@{','.join(addresses)}"), credential=credential))


def parse(text: str) -> Invite:
    """Parse an invite as it was pasted (surrounding white space is ignored); a `UserError` names the part at fault."""
    text, credential = text.strip(), None
    if text.startswith(_CREDENTIAL_SCHEME):
        text, _, given = text.partition("#")
        text = _SCHEME + text.removeprefix(_CREDENTIAL_SCHEME)
        try:
            credential = parse_credential(given)
        except ValueError as error:
            raise _malformed(str(error)) from None
    if not text.startswith(_SCHEME):
        newer = re.match(r"noloco\d+:", text)
        raise _malformed(
            f"it is of a format that this version does not know: {newer[0]}"
            if newer
            else f"it starts with neither {_SCHEME!r} nor {_CREDENTIAL_SCHEME!r}: {text[:24]!r}"
        )
    digest, separator, places = text.removeprefix(_SCHEME).partition("@")
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
    """Return the invite that a person gave, or the one that a home keeps: `home`, where none was given, or the one
    whose directory stands in its place. Raises `UserError` where there is none.
    """
    if given is not None and not given.strip():
        raise _malformed("it is empty")
    directory = home if given is None else Path(os.path.expanduser(given.strip()))
    if given is not None and not os.path.isdir(directory):
        return given
    try:
        return HomePaths(directory).invite.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "There is no invite to this swarm.",
            why=f"none was given, and {directory} keeps none: {getattr(error, 'strerror', None) or error}"
            if given is None
            else f"{directory} keeps none: {getattr(error, 'strerror', None) or error}",
            hint="paste the line that `noloco-node bootstrap` printed, or name the home of a node that took part",
            code=Exit.CONFIG,
        ) from error


def kept_addresses(invite: Invite, home: Path) -> list[PeerAddress]:
    """Return the addresses that a home keeps of an invite's run, beside those of the invite itself."""
    try:
        kept = parse(found(None, home))
    except UserError:
        return []
    return [each for each in kept.addresses if kept.digest == invite.digest and each not in invite.addresses]


def widened(invite: Invite, addresses: Iterable[str], first: Sequence[str] = ()) -> str:
    """Return an invite with `first` before its addresses, and behind them the first few `addresses` that are new.

    `addresses` are what strangers say: those that are none are left out.
    """
    known = list(dict.fromkeys([*first, *map(str, invite.addresses)]))[: _MOST_ADDRESSES - BESIDE]
    new = (each for each in dict.fromkeys(addresses) if each not in known and _is_address(each))
    return format(invite.digest, [*known, *islice(new, BESIDE)], invite.credential)


def without_secret(text: str) -> str:
    """Return an invite as it may be shown: without a credential that is for one identity."""
    parsed = parse(text)
    credential = parsed.credential
    return text if credential is None or not credential.chain else str(msgspec.structs.replace(parsed, credential=None))


def _is_address(text: str) -> bool:
    try:
        parse_peer_address(text)
    except ValueError:
        return False
    return "," not in text


def _malformed(why: str) -> UserError:
    return UserError(
        "This is not a valid invite.",
        why=why,
        hint="paste the whole line that `noloco-node bootstrap` printed, in quotes",
        code=Exit.CONFIG,
    )
