"""A ticket: grants in a chain, the first signed by the run's owner, each next by the key that the one before it names.

Each grant says which key may do what, and until when, in which run. The last one is for the key of a peer id. Nobody
passes on more than it has: a delegate (`SIGN`) any of its rights, an invitation (`ONCE`) what its one holder is to
have, and whoever may look lets others look. So a ticket is checked by anybody who knows the run file, with no server.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple, TypeAlias

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.peer_keys import KEY_BYTES, is_signed_by

MOST_GRANTS = 4
TICKET_BYTES = 512
SIGNATURE_BYTES = 64
LATEST_UNIX_S = 2**40
_PURPOSE = b"noloco grant 1\x00"


class Right(IntFlag):
    """What a key may do in a run."""

    LOOK = 1
    """Read: the run file, the roster, weights."""
    TRAIN = 2
    """Take part: publish records, and call replicas."""
    SIGN = 4
    """Sign grants for others."""
    ONCE = 8
    """Sign one grant, for one identity: an invitation's key."""


MEMBER = Right.LOOK | Right.TRAIN


class TicketGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One link of the chain. `subject`: the public key that it is for; `until`: Unix seconds."""

    rights: int
    until: int
    subject: bytes
    signature: bytes


Chain: TypeAlias = tuple[TicketGrant, ...]


class TicketFacts(NamedTuple):
    """What a good ticket says. `keys`: all that it depends on, the peer's own last; `invitation`: among them."""

    rights: Right
    until: int
    keys: tuple[bytes, ...]
    invitation: bytes | None


_decoder = msgspec.msgpack.Decoder(Chain)


def grant(key: Ed25519PrivateKey, run: str, rights: Right, until: int, subject: bytes) -> TicketGrant:
    """Sign a grant; whether the key may is for readers to find out."""
    return TicketGrant(int(rights), until, subject, key.sign(_signable(run, rights, until, subject)))


def encode(chain: Chain) -> bytes:
    """Return a ticket as it travels."""
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
    issuer, may_pass, invitation = owner, _passed_by(Right.SIGN | MEMBER), None
    for link in chain:
        rights = Right(link.rights)
        if rights & ~may_pass or not is_signed_by(
            issuer, link.signature, _signable(run, rights, link.until, link.subject)
        ):
            return None
        issuer, may_pass = link.subject, _passed_by(rights)
        if rights & Right.ONCE:
            invitation = link.subject
    last = Right(chain[-1].rights)
    if last & Right.ONCE:
        return None  # the key of an invitation is no peer
    until = min(link.until for link in chain)
    # To let somebody look uses no invitation up.
    return TicketFacts(last, until, tuple(link.subject for link in chain), invitation if last & Right.TRAIN else None)


def _passed_by(rights: Right) -> Right:
    """Return what a key with these rights may grant."""
    if rights & Right.SIGN:
        return rights | Right.ONCE
    return rights & (MEMBER if rights & Right.ONCE else Right.LOOK)


def _is_possible(link: TicketGrant) -> bool:
    return (
        0 < link.rights < 2 * Right.ONCE
        and 0 <= link.until <= LATEST_UNIX_S
        and len(link.subject) == KEY_BYTES
        and len(link.signature) == SIGNATURE_BYTES
    )


def _signable(run: str, rights: Right, until: int, subject: bytes) -> bytes:
    return _PURPOSE + run.encode() + b"\x00" + struct.pack("!BQ", int(rights), until) + subject


def extended(
    chain: Sequence[TicketGrant], key: Ed25519PrivateKey, run: str, rights: Right, until: int, subject: bytes
) -> Chain:
    """Return a chain with one more grant, signed by the key that its last one is for."""
    return (*chain, grant(key, run, rights, until, subject))
