"""Who wrote a record: each is signed with its peer's key, which an Ed25519 peer id contains.

A peer id of ours is the public key itself, wrapped: in base 58, a multihash `identity` of libp2p's protobuf of it. So a
reader needs nothing but the peer id, under which the record is filed, and no authority. What is signed is the place of
the record (the DHT's hash of its key), its expiry and its content, behind words that make the signature good for
nothing else. So whoever repeats an old record cannot have it outlive a later one, which expires later.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_node.libp2p.endpoint.identity import ID_HEADER, KEY_HEADER

SIGNATURE_BYTES: Final = 64
_KEY_BYTES = 32
_LONGEST_ID = 64
_PURPOSE = b"noloco record 1\x00"
_DIGITS = {letter: value for value, letter in enumerate("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")}
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
    raw = path.read_bytes()
    if not raw.startswith(KEY_HEADER) or len(raw) != len(KEY_HEADER) + 2 * _KEY_BYTES:
        return None
    return Signer(Ed25519PrivateKey.from_private_bytes(raw[len(KEY_HEADER) : -_KEY_BYTES]))


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
    key = _public_key(peer)
    if key is None or len(value) < SIGNATURE_BYTES:
        return False
    try:
        key.verify(value[:SIGNATURE_BYTES], _signable(place, expiry, value[SIGNATURE_BYTES:]))
    except InvalidSignature:
        return False
    return True


def _public_key(peer: str) -> Ed25519PublicKey | None:
    raw = _decoded(peer)
    if raw is None or not raw.startswith(ID_HEADER) or len(raw) != len(ID_HEADER) + _KEY_BYTES:
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(raw[len(ID_HEADER) :])
    except ValueError:
        return None


def _decoded(text: str) -> bytes | None:
    """Decode base 58; None if it is no such text, or too long to be a peer id."""
    if not 0 < len(text) <= _LONGEST_ID:
        return None
    number = 0
    for letter in text:
        value = _DIGITS.get(letter)
        if value is None:
            return None
        number = 58 * number + value
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
