"""Answers to readings of the DHT without what the reader has already, and compressed. No I/O, no clock.

A reader names the versions of records that it has, each by four bytes: a hash of the subkey and the expiry. The hash is
keyed by the nonce of the request, so nobody can make a record that passes for another's. A holder tells by one bit for
each whether it has that version, and adds the records that were not named. Both sides know records as hivemind packs a
dictionary: MessagePack of its capacity, its latest expiry, and for each record the subkey, the value and the expiry.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

NAME_BYTES = 4
MOST_VERSIONS = 2048  # versions that a request names, and that an answer looks at
MOST_BYTES, MOST_GROWTH, SMALL_BYTES = 4 * 1024 * 1024, 128, 64 * 1024
"""Of an answer once it is decompressed: hivemind takes no longer message either. A record of 8 KiB has some 100 bytes
of signature and peer id that cannot be compressed, so no long honest answer grows more than this.
"""
MOST_COMPRESSED = 256 * 1024
"""Of an answer before it is compressed, which takes some 10 ms of a holder's loop. Longer ones travel as they are."""


class Version(NamedTuple):
    """One version of a record. `expiry`: Unix seconds; `packed`: the value as hivemind packs it."""

    expiry: float
    packed: bytes


def names(versions: Mapping[str, Version], nonce: bytes) -> bytes:
    """Return the names of the first `MOST_VERSIONS` versions, `NAME_BYTES` each, for a request with this nonce."""
    return b"".join(_name(subkey, versions[subkey].expiry, nonce) for subkey in _named(versions))


def shortened(packed: bytes, nonce: bytes, named: bytes) -> bytes:
    """Return the answer with these records, packed as by hivemind, to a request with this nonce and these names."""
    kind, capacity, latest, records = _unpacked(packed)
    named = named[: MOST_VERSIONS * NAME_BYTES]
    places = {named[at : at + NAME_BYTES]: at // NAME_BYTES for at in range(0, len(named), NAME_BYTES)}
    held, new = bytearray((len(named) // NAME_BYTES + 7) // 8), []
    for record in records:
        place = places.get(_name(record[0], record[2], nonce))
        if place is None:
            new.append(record)
        else:
            held[place // 8] |= 1 << place % 8
    answer = bytes(held) + _packed(kind, capacity, latest, new)
    return zlib.compress(answer, level=6 if len(answer) <= MOST_COMPRESSED else 0)


def record_count(packed: bytes) -> int:
    """Return how many records a packed dictionary has; raise an error where it is none, or has too many."""
    return len(_unpacked(packed)[-1])


def restored(answer: bytes, versions: Mapping[str, Version]) -> bytes:
    """Return the records of an answer, packed as by hivemind, to a request that named these versions.

    Raises an error where it is none, or is too long once it is decompressed.
    """
    inflating, most = zlib.decompressobj(), min(MOST_BYTES, SMALL_BYTES + MOST_GROWTH * len(answer))
    raw, named = inflating.decompress(answer, most), _named(versions)
    if not inflating.eof or inflating.unused_data:
        raise ValueError("the answer is too long, or cut off")
    bits = (len(named) + 7) // 8
    kind, capacity, latest, records = _unpacked(raw[bits:])
    for place, subkey in enumerate(named):
        if raw[place // 8] >> place % 8 & 1:
            records.append((subkey, versions[subkey].packed, versions[subkey].expiry))
    return _packed(kind, capacity, latest, records)


def _named(versions: Mapping[str, Version]) -> list[str]:
    return list(versions)[:MOST_VERSIONS]


def _name(subkey: str, expiry: float, nonce: bytes) -> bytes:
    return blake2b(msgspec.msgpack.encode((subkey, expiry)), key=nonce, digest_size=NAME_BYTES).digest()


_Records = Annotated[list[tuple[str, bytes, float]], msgspec.Meta(max_length=MOST_VERSIONS)]


def _unpacked(packed: bytes) -> tuple[int, float, float, _Records]:
    """Return the extension type, the capacity, the latest expiry and the records of a packed dictionary.

    Only so many records, of this type alone, are decoded: millions of empty lists take a hundred times the memory of
    their bytes, and a holder keeps no more under one key.
    """
    dictionary = msgspec.msgpack.decode(packed, type=msgspec.msgpack.Ext)
    capacity, latest, records = msgspec.msgpack.decode(dictionary.data, type=tuple[int | float, float, _Records])
    return dictionary.code, capacity, latest, records


def _packed(kind: int, capacity: float, latest: float, records: _Records) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(kind, msgspec.msgpack.encode((capacity, latest, records))))
