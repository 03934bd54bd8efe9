"""Which relays a swarm tells of: records of strangers, read with care."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from noloco_node.libp2p.endpoint.addresses import parse_peer_address

KEY = "relays"
"""Of the records, after the run's id; each is a MessagePack list of addresses that end in /p2p/ID."""
MOST_PLACES = 4
"""Addresses of one relay."""
_MOST_RELAYS = 16
_ADDRESS_CHARACTERS = 256

_LISTED = msgspec.msgpack.Decoder(list[str])


def record_of(places: Sequence[str]) -> bytes:
    """Return the record that tells of these addresses."""
    return msgspec.msgpack.encode(list(places))


def listed(records: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the addresses of relays that records name; what is malformed counts as not said."""
    found: list[str] = []
    for raw in records.values():
        try:
            found += _LISTED.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return checked_relays(found)


def checked_relays(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return what is good among addresses of relays: of at most 16 relays, at most four of each."""
    found: dict[str, list[str]] = {}
    for text in addresses:
        try:
            address = parse_peer_address(text if len(text) <= _ADDRESS_CHARACTERS else "")
        except ValueError:
            continue
        # A comma would smuggle a second address into the daemon's command line.
        if "," not in text and "p2p-circuit" not in text and (address.peer in found or len(found) < _MOST_RELAYS):
            found.setdefault(address.peer, []).append(str(address))
    return tuple(place for places in found.values() for place in dict.fromkeys(places[:MOST_PLACES]))
