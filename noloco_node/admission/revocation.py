"""Whom the owner has shut out: a signed list with a number that rises, of which everybody believes the latest.

It names keys: of peers, of invitations, of delegates; whatever depends on one of them is shut out with it, until the
time that stands beside it. What has expired is dropped when the next list is signed, so it stays short.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.peer_keys import KEY_BYTES, is_signed_by

MOST_REVOKED = 128
LIST_BYTES = 7 * 1024
"""A record of the DHT holds it."""
_PURPOSE = b"noloco revocations 1\x00"


class RevocationList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`revoked`: until when, in Unix seconds, by key."""

    number: int
    revoked: dict[bytes, int]
    signature: bytes


def signed_list(key: Ed25519PrivateKey, run: str, number: int, revoked: Mapping[bytes, int]) -> RevocationList:
    """Return a list that its readers believe; ValueError where it holds more than they take."""
    if len(revoked) > MOST_REVOKED:
        raise ValueError(f"{len(revoked)} keys to shut out, {MOST_REVOKED} at most")
    return RevocationList(number, dict(revoked), key.sign(_signable(run, number, revoked)))


def encode_list(revocations: RevocationList) -> bytes:
    """Return a list as it travels."""
    return msgspec.msgpack.encode(revocations)


def decode_list(raw: bytes, owner: bytes, run: str) -> RevocationList | None:
    """Return the list that somebody sent, if the owner of the run has signed it."""
    if len(raw) > LIST_BYTES:
        return None
    try:
        found = msgspec.msgpack.decode(raw, type=RevocationList)
    except (msgspec.MsgspecError, RecursionError):
        return None
    possible = 0 <= found.number < 2**63 and len(found.revoked) <= MOST_REVOKED
    possible = possible and all(len(key) == KEY_BYTES and 0 <= until < 2**63 for key, until in found.revoked.items())
    signed = possible and is_signed_by(owner, found.signature, _signable(run, found.number, found.revoked))
    return found if signed else None


def _signable(run: str, number: int, revoked: Mapping[bytes, int]) -> bytes:
    told = b"".join(key + struct.pack("!Q", until) for key, until in sorted(revoked.items()))
    return _PURPOSE + run.encode() + b"\x00" + struct.pack("!Q", number) + told
