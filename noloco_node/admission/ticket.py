"""A ticket: grants in a chain, the first signed by the run's owner, each next by the key that the one before it names.

Each grant says which key may do what, and until when, in which run. The last one is for the key of a peer id. Nobody
passes on more than it has: a delegate (`SIGN`) any of its rights, a single-use invite (`ONCE`) what its one holder is
to have, a peer that trains lets others look, and one that may only look passes on nothing. So anybody who knows the run
file can check a ticket, with no server.

**An invite's credential** (`InviteCredential`) is what a peer gets its ticket by: nothing but the right to ask, an
invitation, or a ticket. As text it begins with a letter that says which:

    open              ask a bootstrap peer for a ticket
    i<base64>         a single-use invite: a key, and the owner's grant for it; its holder signs its own peer id
    t<base64>         the ticket of one peer id

**A list of revocations** (`RevocationList`) says whom the owner has shut out. The owner signs it with a number that
rises, and everybody believes the latest. It names keys: of peers, of single-use invites, of delegates; whatever depends
on one of them is shut out with it, until the time that stands beside it. What has expired is dropped when the next list
is signed, so it stays short.

An Ed25519 peer id is the key itself, wrapped: in base 58 a multihash `identity` of libp2p's protobuf of the key. So a
signature for a peer id needs no authority that says which key belongs to whom.
"""

from __future__ import annotations

import base64
import binascii
import functools
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntFlag
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import base58
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_node.errors import os_errors_as, storage_error
from noloco_node.network.wire import decoded
from noloco_node.units import LATEST_UNIX_S

KEY_BYTES = 32
_LONGEST_ID = 64
ID_HEADER: Final = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Multihash: identity, 36 bytes; protobuf: key type Ed25519, 32 bytes follow."""
KEY_HEADER: Final = bytes((0x08, 0x01, 0x12, 0x40))
"""Protobuf: key type Ed25519, 64 bytes follow: the seed, and the public key."""


def key_of(peer: str) -> bytes | None:
    """Return the public key that a peer id is; None for ids of other kinds, and for what is no id."""
    return _decoded_key(peer) if len(peer) <= _LONGEST_ID and peer.isalnum() else None


@functools.lru_cache(maxsize=4096)
def _decoded_key(peer: str) -> bytes | None:
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    return raw[len(ID_HEADER) :] if raw.startswith(ID_HEADER) and len(raw) == len(ID_HEADER) + KEY_BYTES else None


def peer_of(key: bytes) -> str:
    return base58.b58encode(ID_HEADER + key).decode()


def identity_errors(path: Path) -> AbstractContextManager[None]:
    """Raise an `OSError` of the body as a `UserError` (STORAGE) that names the identity file."""
    what = f"The identity of this peer, {path}, cannot be read or written."
    hint = "repair the disk or its permissions, or give another directory with --home"
    return os_errors_as(storage_error, what, hint)


def read_key(identity: Path) -> Ed25519PrivateKey | None:
    """Return the private key of an identity file; None where there is none, or one that is damaged or of another type.

    Raises `UserError` (STORAGE) if the file cannot be read.
    """
    with identity_errors(identity):
        if not identity.exists():
            return None
        raw = identity.read_bytes()
    if not raw.startswith(KEY_HEADER) or len(raw) != len(KEY_HEADER) + 2 * KEY_BYTES:
        return None
    key = Ed25519PrivateKey.from_private_bytes(raw[len(KEY_HEADER) : -KEY_BYTES])
    return key if key.public_key().public_bytes_raw() == raw[-KEY_BYTES:] else None


def peer_of_file(identity: Path) -> str | None:
    """Return the peer id that an identity file makes; None where `read_key` finds no key."""
    key = read_key(identity)
    return None if key is None else peer_of(key.public_key().public_bytes_raw())


def is_signed_by(key: bytes, signature: bytes, told: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, told)
    except (InvalidSignature, ValueError):
        return False
    return True


MOST_GRANTS = 4
TICKET_BYTES = 512
SIGNATURE_BYTES = 64
LOOK_S = 3600  # a temporary identity may look for so long
MOST_REVOKED = 128
LIST_BYTES = 7 * 1024  # a record of the DHT holds a list of revocations
_CREDENTIAL_CHARACTERS = 2 * TICKET_BYTES
_GRANT_PURPOSE = b"noloco grant 1\x00"
_LIST_PURPOSE = b"noloco revocations 1\x00"


class Right(IntFlag):
    """What a key may do in a run."""

    LOOK = 1  # read: the run file, the roster, weights
    TRAIN = 2  # take part: publish records, and call replicas
    SIGN = 4  # sign grants for others
    ONCE = 8  # sign one grant, for one identity: a single-use invite's key


MEMBER = Right.LOOK | Right.TRAIN


class TicketGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One link of the chain. `subject`: the public key that it is for; `until`: Unix seconds."""

    rights: int
    until: int
    subject: bytes
    signature: bytes


Chain: TypeAlias = tuple[TicketGrant, ...]


class TicketFacts(NamedTuple):
    """What a good ticket says. `keys`: all that it depends on, the peer's own last; `invite_key`: among them."""

    rights: Right
    until: int
    keys: tuple[bytes, ...]
    invite_key: bytes | None


_decoder = msgspec.msgpack.Decoder(Chain)


def grant(key: Ed25519PrivateKey, run: str, rights: Right, until: int, subject: bytes) -> TicketGrant:
    """Sign a grant; whether the key may is for readers to find out."""
    return TicketGrant(int(rights), until, subject, key.sign(_signable_grant(run, rights, until, subject)))


def encode(chain: Chain) -> bytes:
    return msgspec.msgpack.encode(chain)


def decode(raw: bytes) -> Chain | None:
    """Return the chain that a stranger sent, unchecked but for its form; None where it is none."""
    if len(raw) > TICKET_BYTES:
        return None
    try:
        chain = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return chain if 1 <= len(chain) <= MOST_GRANTS and all(map(_is_possible, chain)) else None


def facts_of(chain: Chain, owner: bytes, run: str) -> TicketFacts | None:
    """Return what a chain says that goes from the run's owner to its last key; None where a link is not good."""
    issuer, may_pass, invite_key = owner, _passed_by(Right.SIGN | MEMBER), None
    for link in chain:
        rights = Right(link.rights)
        if rights & ~may_pass or not is_signed_by(
            issuer, link.signature, _signable_grant(run, rights, link.until, link.subject)
        ):
            return None
        issuer, may_pass = link.subject, _passed_by(rights)
        if rights & Right.ONCE:
            invite_key = link.subject
    last = Right(chain[-1].rights)
    if last & Right.ONCE:
        return None  # the key of a single-use invite is no peer
    until = min(link.until for link in chain)
    # To let somebody look uses no single-use invite up.
    return TicketFacts(last, until, tuple(link.subject for link in chain), invite_key if last & Right.TRAIN else None)


def _passed_by(rights: Right) -> Right:
    """Return what a key with these rights may grant."""
    if rights & Right.SIGN:
        return rights | Right.ONCE
    if rights & Right.ONCE:
        return rights & MEMBER
    # A member lets a passing identity of its own look, which lets nobody else.
    return rights & Right.LOOK if rights & Right.TRAIN else Right(0)


def _is_possible(link: TicketGrant) -> bool:
    return (
        0 < link.rights < 2 * Right.ONCE
        and 0 <= link.until <= LATEST_UNIX_S
        and len(link.subject) == KEY_BYTES
        and len(link.signature) == SIGNATURE_BYTES
    )


def _signable_grant(run: str, rights: Right, until: int, subject: bytes) -> bytes:
    return _GRANT_PURPOSE + run.encode() + b"\x00" + struct.pack("!BQ", int(rights), until) + subject


def extended(
    chain: Sequence[TicketGrant], key: Ed25519PrivateKey, run: str, rights: Right, until: int, subject: bytes
) -> Chain:
    return (*chain, grant(key, run, rights, until, subject))


class InviteCredential(msgspec.Struct, frozen=True):
    """`seed`: of a single-use invite's private key, for which the chain's last grant is; else it is for a peer."""

    chain: Chain = ()
    seed: bytes = b""

    def __str__(self) -> str:
        if not self.chain:
            return "open"
        raw = base64.urlsafe_b64encode(self.seed + encode(self.chain)).decode().rstrip("=")
        return ("i" if self.seed else "t") + raw

    def __repr__(self) -> str:
        return f"InviteCredential({'open' if not self.chain else 'single-use' if self.seed else 'ticket'})"

    def ticket(
        self, run: str, peer: str, rights: Right, unix_s: float, own_key: Ed25519PrivateKey | None
    ) -> bytes | None:
        """Return the ticket of a peer, as far as this credential makes one; None where one must be asked for.

        `own_key`: of the identity at home, which lets a temporary one look. Raises ValueError where the credential is
        somebody else's.
        """
        subject = key_of(peer)
        if subject is None:
            raise ValueError("the identity of this peer is not an Ed25519 key")
        if not self.chain:
            return None
        last = self.chain[-1]
        if self.seed:
            key = Ed25519PrivateKey.from_private_bytes(self.seed)
            until = last.until if Right.TRAIN in rights else min(last.until, int(unix_s) + LOOK_S)
            return encode(extended(self.chain, key, run, rights, until, subject))
        if last.subject == subject:
            return encode(self.chain)
        if own_key is not None and last.subject == own_key.public_key().public_bytes_raw() and rights == Right.LOOK:
            until = min(last.until, int(unix_s) + LOOK_S)
            return encode(extended(self.chain, own_key, run, rights, until, subject))
        raise ValueError("the invite is for another identity than that of this home")


def parse_credential(text: str) -> InviteCredential:
    """Return the credential that a text is; ValueError says what is wrong with it."""
    if text == "open":
        return InviteCredential()
    if len(text) > _CREDENTIAL_CHARACTERS or text[:1] not in ("i", "t"):
        raise ValueError("what stands behind the # is no credential")
    try:
        raw = base64.urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
    except (binascii.Error, ValueError):
        raise ValueError("what stands behind the # is damaged") from None
    seed, raw = (raw[:KEY_BYTES], raw[KEY_BYTES:]) if text[0] == "i" else (b"", raw)
    chain = decode(raw)
    if chain is None or len(seed) not in (0, KEY_BYTES):
        raise ValueError("what stands behind the # is damaged")
    return InviteCredential(chain, seed)


class RevocationList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`revoked`: until when, in Unix seconds, by key."""

    number: int
    revoked: dict[bytes, int]
    signature: bytes


def signed_list(key: Ed25519PrivateKey, run: str, number: int, revoked: Mapping[bytes, int]) -> RevocationList:
    """Return a list that its readers believe; ValueError where it holds more than they take."""
    if len(revoked) > MOST_REVOKED:
        raise ValueError(f"{len(revoked)} keys to shut out, {MOST_REVOKED} at most")
    return RevocationList(number, dict(revoked), key.sign(_signable_list(run, number, revoked)))


def encode_list(revocations: RevocationList) -> bytes:
    return msgspec.msgpack.encode(revocations)


def decode_list(raw: bytes, owner: bytes, run: str) -> RevocationList | None:
    """Return the list that a stranger sent, if the owner of the run has signed it."""
    found = decoded(raw, RevocationList, LIST_BYTES)
    if found is None:
        return None
    possible = 0 <= found.number < 2**63 and len(found.revoked) <= MOST_REVOKED
    possible = possible and all(len(key) == KEY_BYTES and 0 <= until < 2**63 for key, until in found.revoked.items())
    signed = possible and is_signed_by(owner, found.signature, _signable_list(run, found.number, found.revoked))
    return found if signed else None


def _signable_list(run: str, number: int, revoked: Mapping[bytes, int]) -> bytes:
    told = b"".join(key + struct.pack("!Q", until) for key, until in sorted(revoked.items()))
    return _LIST_PURPOSE + run.encode() + b"\x00" + struct.pack("!Q", number) + told
