"""Who wrote a record: each is signed with its peer's key, which an Ed25519 peer id contains.

So a reader needs nothing but the peer id, under which the record is filed, and no authority. What is signed is the
place of the record (the DHT's hash of its key), its expiry and its content, behind words that make the signature good
for nothing else. So whoever repeats an old record cannot have it outlive a later one, which expires later.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.peer_keys import is_signed_by, key_of, read_key

SIGNATURE_BYTES: Final = 64
_PURPOSE = b"noloco record 1\x00"
VERDICTS = 2**12
_SECRET = os.urandom(32)


class Signer:
    """Signs records with the private key of one peer."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def signed(self, place: bytes, expiry: float, content: bytes) -> bytes:
        """Return a record's value: the signature, then the content. `expiry`: Unix seconds."""
        return self._key.sign(_signable(place, expiry, content)) + content


def read_signer(path: Path) -> Signer | None:
    """Return the signer of an identity file; None for keys of other types than our own."""
    key = read_key(path)
    return None if key is None else Signer(key)


def place_of(key: str) -> bytes:
    """Return where the DHT files a key: 20 bytes, the SHA-1 of its MessagePack."""
    return hashlib.sha1(msgspec.msgpack.encode(key)).digest()


def content_of(place: bytes, peer: str, expiry: float, value: bytes) -> bytes | None:
    """Return the content of a record if its peer has signed it for this place and expiry, else None."""
    return value[SIGNATURE_BYTES:] if _is_signed(place, peer, expiry, value) else None


def _is_signed(place: bytes, peer: str, expiry: float, value: bytes) -> bool:
    """Look a verdict up, or find and keep it."""
    # Lengths first: no other place, peer and value, which strangers choose, may make the same bytes.
    told = f"{len(peer)} {len(place)} {peer}".encode(errors="surrogatepass") + _signable(place, expiry, value)
    digest = hashlib.blake2b(told, key=_SECRET, digest_size=16).digest()
    verdict = _known_verdict(digest)
    if not verdict:
        verdict.append(_verifies(place, peer, expiry, value))
    return verdict[0]


@functools.lru_cache(maxsize=VERDICTS)
def _known_verdict(digest: bytes) -> list[bool]:
    """Return the place for the verdict on a record, empty at first. By digest: the record itself takes up to 8 KiB."""
    return []


def _signable(place: bytes, expiry: float, content: bytes) -> bytes:
    return _PURPOSE + place + struct.pack("!d", expiry) + content


def _verifies(place: bytes, peer: str, expiry: float, value: bytes) -> bool:
    key = key_of(peer)
    signature, content = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
    return key is not None and is_signed_by(key, signature, _signable(place, expiry, content))
