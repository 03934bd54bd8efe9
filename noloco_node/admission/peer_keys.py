"""Peer ids and public keys: an Ed25519 peer id is the key itself, wrapped.

In base 58: a multihash `identity` of libp2p's protobuf of the key. So a signature for a peer id needs no authority that
says whose key is which.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_BYTES = 32
_LONGEST_ID = 64
ID_HEADER: Final = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Multihash: identity, 36 bytes; protobuf: key type Ed25519, 32 bytes follow."""
KEY_HEADER: Final = bytes((0x08, 0x01, 0x12, 0x40))
"""Protobuf: key type Ed25519, 64 bytes follow: the seed, and the public key."""
_LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {letter: value for value, letter in enumerate(_LETTERS)}


@functools.lru_cache(maxsize=4096)
def key_of(peer: str) -> bytes | None:
    """Return the public key that a peer id is; None for ids of other kinds, and for what is no id."""
    raw = _decoded(peer)
    if raw is None or not raw.startswith(ID_HEADER) or len(raw) != len(ID_HEADER) + KEY_BYTES:
        return None
    return raw[len(ID_HEADER) :]


def peer_of(key: bytes) -> str:
    """Return the peer id of a public key."""
    raw = ID_HEADER + key
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _LETTERS[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


def read_key(identity: Path) -> Ed25519PrivateKey | None:
    """Return the private key of an identity file; None for keys of other types than our own."""
    raw = identity.read_bytes()
    if not raw.startswith(KEY_HEADER) or len(raw) != len(KEY_HEADER) + 2 * KEY_BYTES:
        return None
    return Ed25519PrivateKey.from_private_bytes(raw[len(KEY_HEADER) : -KEY_BYTES])


def peer_of_file(identity: Path) -> str | None:
    """Return the peer id that an identity file makes; None where there is none, or one of another type than our own."""
    key = read_key(identity) if identity.exists() else None
    return None if key is None else peer_of(key.public_key().public_bytes_raw())


def is_signed_by(key: bytes, signature: bytes, told: bytes) -> bool:
    """Say whether `signature` is that of a public key under what is `told`."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, told)
    except (InvalidSignature, ValueError):
        return False
    return True


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
