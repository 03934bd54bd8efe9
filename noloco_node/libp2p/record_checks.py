"""Which records of the DHT are believed, and which are kept for others: signed ones of our form, within bounds.

Each record is signed with its peer's key, which an Ed25519 peer id contains, so a reader needs nothing but the peer id,
under which the record is filed. The signature covers the record's place (the DHT's hash of its key), its expiry and its
content, behind words that make it good for nothing else.

No stranger can use the bounds against others. When there is too much, hivemind drops what expires first, and a
stranger's records expire when it likes; so we refuse new records instead. We mend two more traits of hivemind's
storage: what is stored once more with an earlier expiry ends the life of what is there, and each such attempt leaves an
entry in a heap until it expires.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.ticket import is_signed_by, key_of, read_key
from noloco_node.libp2p.hivemind_compat import DhtEntries, LocalStorage, forget_ghosts
from noloco_node.network.swarm_clock import CLOCK

RECORD_BYTES = 8 * 1024
RECORD_LIFETIME_S = 3600.0
_CLOCK_ERROR_S = 60.0
_LENGTH_BYTES = 5  # MessagePack adds so much to the bytes of a value
_SUBKEY_BYTES = 128
SIGNATURE_BYTES: Final = 64
_PURPOSE = b"noloco record 1\x00"
VERDICTS = 2**12
_SECRET = os.urandom(32)
_MOST_KEYS = 4096
MOST_SUBKEYS = 2048
MOST_KEYS_OF_ONE = 128  # a peer has one record for each stage that it lately served, and a few besides
_KEY_BYTES = 2 * 1024 * 1024  # of all records under one key: an answer that is twice as large cannot be sent
_ALL_BYTES = 128 * 1024 * 1024  # of all records kept for others, with what Python adds to each
_ENTRY_BYTES = 1024
_SLACK = 1.5  # beyond the bounds, for what is kept already and grows


class Signer:
    """Signs records with the private key of one peer."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def signed(self, place: bytes, expiry: float, content: bytes) -> bytes:
        return self._key.sign(_signable(place, expiry, content)) + content


def read_signer(path: Path) -> Signer | None:
    key = read_key(path)
    return None if key is None else Signer(key)


def place_of(key: str) -> bytes:
    """Return where the DHT files a key: 20 bytes, the SHA-1 of its MessagePack."""
    return hashlib.sha1(msgspec.msgpack.encode(key)).digest()


def content_of(place: bytes, peer: str, expiry: float, value: bytes) -> bytes | None:
    """Return the content of a record if its peer has signed it for this place and expiry, else None."""
    return value[SIGNATURE_BYTES:] if _is_signed(place, peer, expiry, value) else None


def _is_signed(place: bytes, peer: str, expiry: float, value: bytes) -> bool:
    # Lengths first: no other place, peer and value, which strangers choose, may make the same bytes.
    told = f"{len(peer)} {len(place)} {peer}".encode(errors="surrogatepass") + _signable(place, expiry, value)
    digest = hashlib.blake2b(told, key=_SECRET, digest_size=16).digest()
    verdict = _known.pop(digest, None)
    if verdict is None:
        verdict = _verifies(place, peer, expiry, value)
        while len(_known) >= VERDICTS:
            _known.popitem(last=False)
    _known[digest] = verdict
    return verdict


_known: OrderedDict[bytes, bool] = OrderedDict()
"""Verdicts on records, the last used last. By digest: a record itself takes up to 8 KiB."""


def _signable(place: bytes, expiry: float, content: bytes) -> bytes:
    return _PURPOSE + place + struct.pack("!d", expiry) + content


def _verifies(place: bytes, peer: str, expiry: float, value: bytes) -> bool:
    key = key_of(peer)
    signature, content = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
    return key is not None and is_signed_by(key, signature, _signable(place, expiry, content))


class Signatures:
    """Decides for hivemind which records are stored here, and which are believed when others return them.

    `accepts`: of those of our form and signed, by place, peer and content. `may_look`: asked before each record.
    """

    def __init__(
        self,
        accepts: Callable[[bytes, str, bytes], bool] = lambda *_: True,
        may_look: Callable[[], bool] = lambda: True,
    ) -> None:
        self._accepts, self._may_look = accepts, may_look

    def validate(self, record: Any) -> bool:
        if not self._may_look() or not has_our_form(record):
            return False
        peer, value = map(msgspec.msgpack.decode, (record.subkey, record.value))
        content = content_of(record.key, peer, record.expiration_time, value)
        return content is not None and self._accepts(record.key, peer, content)

    def sign_value(self, record: Any) -> bytes:
        """Return the value as it is: it was signed before."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        """Return the value as it is: `DhtRecords.read` takes the signature off."""
        return bytes(record.value)


def has_our_form(record: Any) -> bool:
    """Say whether a record, as hivemind shows it to a validator, is one of ours by its form.

    Keys of records and values are MessagePack to hivemind; one that does not decode would make every reading of its key
    fail, so it counts as none. The subkey must be text: a record without one would take the place of all others.
    """
    if (
        len(record.value) > RECORD_BYTES + _LENGTH_BYTES
        or len(record.subkey) > _SUBKEY_BYTES + _LENGTH_BYTES
        or not 0.0 < record.expiration_time <= CLOCK.unix_s() + RECORD_LIFETIME_S + _CLOCK_ERROR_S
    ):
        return False
    try:
        msgspec.msgpack.decode(record.subkey, type=str)
        msgspec.msgpack.decode(record.value, type=bytes)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def chosen(subkeys: Iterable[str], known: Collection[str], salt: bytes, most: int = MOST_SUBKEYS) -> list[str]:
    """Return the subkeys to look at: of too many the known ones first, then by a hash that nobody else can work out."""
    candidates = [subkey for subkey in subkeys if len(subkey) <= _SUBKEY_BYTES]
    if len(candidates) <= most:
        return candidates

    def rank(subkey: str) -> tuple[bool, bytes]:
        return subkey not in known, hashlib.sha256(salt + subkey.encode(errors="replace")).digest()

    return sorted(candidates, key=rank)[:most]


def keep_believed(
    place: bytes, dictionary: DhtEntries, signatures: Signatures, known: Collection[str], salt: bytes
) -> None:
    """Drop from hivemind's dictionary of records what is not to be believed, or too much."""
    with dictionary.freeze():
        entries = dict(dictionary.items())
        texts = [subkey for subkey in entries if isinstance(subkey, str)]
        wanted = {}
        # In an order: of two peers that hold one single-use invite the first stays.
        for subkey in sorted(chosen(texts, known, salt)):
            value, expires = entries[subkey].value, entries[subkey].expiration_time
            if isinstance(value, bytes) and signatures.validate(_Record(place, _packed(subkey), value, expires)):
                wanted[subkey] = expires
        for subkey in entries:
            if subkey not in wanted:
                del dictionary[subkey]
        dictionary.latest_expiration_time = max(wanted.values(), default=float("-inf"))
        dictionary.maxsize = float("inf")


class _Record(msgspec.Struct, frozen=True):
    """A record as hivemind shows it to a validator."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def _packed(subkey: str) -> bytes:
    try:
        return msgspec.msgpack.encode(subkey)
    except UnicodeEncodeError:
        return b""


class BoundedStorage:
    """hivemind's storage with bounds on what is kept: under one key, in keys, and in all.

    Newcomers beyond them are refused: hivemind would rather drop what expires first, which is whom we need. So is what
    expires no later than what is there: by a fault of hivemind's that would end the later one's life as well.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage, self._store = storage, storage.store_subkey
        self._sizes: dict[Any, int] = {}  # by key, in bytes
        self._keys: Any = type(storage)()  # by peer, the keys under which it has a record here

    @property
    def size_bytes(self) -> int:
        """All that is kept, with what Python adds to each record, at most."""
        return sum(size for key, size in self._sizes.items() if key in self._storage)

    def store(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record if there is room for it; says whether it was stored, as hivemind's `store_subkey` does."""
        kept: Any = getattr(self._storage.get(key), "value", {})
        before = kept.get(subkey)
        if before is not None and not expiration_time > before.expiration_time:
            return False
        if before is None or len(value) > len(before.value):
            size = sum(len(entry.value) for other, entry in kept.items() if other != subkey) + len(value)
            count = len(kept) + (before is None)
            if not self._has_room(key, size, count, 1.0 if before is None else _SLACK):
                return False
            if before is None and len(getattr(self._keys.get(subkey), "value", ())) >= MOST_KEYS_OF_ONE:
                return False
            self._sizes[key] = size + count * _ENTRY_BYTES
        if not self._store(key, subkey, value, expiration_time):
            return False
        self._keys.store_subkey(subkey, key, b"", expiration_time)
        for entries in (self._storage, kept, self._keys, self._keys.get(subkey).value):
            forget_ghosts(entries)
        return True

    def _has_room(self, key: Any, size: int, count: int, slack: float) -> bool:
        sizes = self._sizes
        others = sum(sizes.values()) - sizes.get(key, 0)
        if others + size > slack * _ALL_BYTES or (key not in sizes and len(sizes) >= _MOST_KEYS):
            for other in [other for other in sizes if other not in self._storage]:
                del sizes[other]
            others = sum(sizes.values()) - sizes.get(key, 0)
        room = others + size + count * _ENTRY_BYTES <= slack * _ALL_BYTES and size <= slack * _KEY_BYTES
        return room and count <= MOST_SUBKEYS and (key in sizes or len(sizes) < _MOST_KEYS)
