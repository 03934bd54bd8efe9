"""An invite: the one string that a newcomer needs.

    noloco1:<digest of the run, 64 hex digits>@<multiaddr>[,<multiaddr>...]
    noloco2:<the same>#<what gets its holder in, for a run that has an owner>

The digest says which run file to believe, whoever serves it. Each multiaddr ends in /p2p/ and the id of a bootstrap
peer, so that nobody else can answer in its place. 1 and 2 are versions of this format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from noloco_node.admission.entry_pass import EntryPass, parse_pass
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.endpoint.addresses import PeerAddress, parse_peer_address

_SCHEME, _PASS_SCHEME = "noloco1:", "noloco2:"
_MOST_ADDRESSES = 64


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed invite: the run's digest, and where its bootstrap peers are."""

    digest: str
    addresses: tuple[PeerAddress, ...]
    entry: EntryPass | None = None
    """What a run with an owner lets us in for; None in a run that everybody may enter who knows it."""

    @property
    def peers(self) -> list[str]:
        """The bootstrap peers, as often as they have addresses."""
        return [address.peer for address in self.addresses]

    def __str__(self) -> str:
        places = self.digest + "@" + ",".join(map(str, self.addresses))
        return _SCHEME + places if self.entry is None else f"{_PASS_SCHEME}{places}#{self.entry}"


def format(digest: str, addresses: Sequence[str], entry: EntryPass | None = None) -> str:
    """Return the invite to the run with this digest by way of these multiaddrs; `UserError` where a part is wrong."""
    return str(msgspec.structs.replace(parse(f"{_SCHEME}{digest}@{','.join(addresses)}"), entry=entry))


def parse(text: str) -> Invite:
    """Parse an invite as it was pasted (surrounding white space is ignored); a `UserError` names the part at fault."""
    text, entry = text.strip(), None
    if text.startswith(_PASS_SCHEME):
        text, _, given = text.partition("#")
        text = _SCHEME + text.removeprefix(_PASS_SCHEME)
        try:
            entry = parse_pass(given)
        except ValueError as error:
            raise _malformed(str(error)) from None
    if not text.startswith(_SCHEME):
        newer = re.match(r"noloco\d+:", text)
        raise _malformed(
            f"it is of a format that this version does not know: {newer[0]}"
            if newer
            else f"it does not start with {_SCHEME!r}: {text[:24]!r}"
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
    return Invite(digest=digest, addresses=tuple(addresses), entry=entry)


def _malformed(why: str) -> UserError:
    return UserError(
        "This is not a valid invite.",
        why=why,
        hint="paste the whole line that `noloco-node bootstrap` printed, in quotes",
        code=Exit.CONFIG,
    )
