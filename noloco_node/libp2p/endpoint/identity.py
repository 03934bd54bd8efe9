"""A peer's identity: an Ed25519 key in a file of its own, from which libp2p derives the peer id.

The file holds libp2p's `PrivateKey` protobuf (key type, then seed and public key), which is what the daemon reads;
files of other key types, such as the RSA ones that hivemind writes, work as well. It is created once, readable by its
owner alone, whole or not at all; the peer id therefore survives restarts.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.peer_keys import ID_HEADER, KEY_HEADER
from noloco_node.errors import Exit, UserError
from noloco_node.storage import atomic_file


def ensure_identity(path: Path) -> bool:
    """Create the key file unless it is there, and say whether it was; `UserError` when it cannot be used."""
    try:
        if path.exists():
            _check(path)
            return True
        _create(path)
        return False
    except OSError as error:
        raise UserError(
            "The identity of this peer cannot be read or written.",
            why=f"{path}: {error.strerror}",
            hint="choose a home directory on a disk that you may write to",
            code=Exit.STORAGE,
        ) from None


def peer_bytes(path: Path) -> bytes | None:
    """Return the peer id that a key file makes, in bytes; None for keys of other types than our own.

    An Ed25519 id is the multihash `identity` of the public key in libp2p's protobuf: the key itself.
    """
    key = path.read_bytes()
    return ID_HEADER + key[-32:] if key.startswith(KEY_HEADER) else None


def _check(path: Path) -> None:
    key = path.read_bytes()
    if len(key) < 36 or key[:1] != b"\x08" or (key.startswith(KEY_HEADER) and len(key) != 68):
        raise UserError(
            "The identity of this peer is damaged.",
            why=f"{path} holds {len(key)} bytes that are no libp2p private key",
            hint="restore it from a backup, or delete it to become a new peer",
            code=Exit.STORAGE,
        )


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    content = KEY_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    atomic_file.write(path, content)
