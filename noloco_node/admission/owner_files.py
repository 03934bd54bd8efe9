"""What the owner of a run keeps beside its run file: its key, and the list of whom it let in and shut out.

run.toml       the run file, for everybody
run.owner      the private key, for nobody else (mode 600)
run.members    tickets and single-use invites that were signed, and the signed list of revocations; no secret
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.ticket import MOST_REVOKED, encode_list, signed_list
from noloco_node.errors import config_error, os_errors_as, reason_of, storage_error, usage_error
from noloco_node.storage import atomic_file
from noloco_node.units import LATEST_UNIX_S, Count

TICKET = "ticket"  # the kind of an entry for a peer; other entries are for the key of a single-use invite
HexKey: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Until: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LATEST_UNIX_S)]


class IssuedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket or a single-use invite that was signed; `key`: whom it is for, in hexadecimal digits."""

    key: HexKey
    kind: str
    until: Until
    note: str = ""
    may_sign: bool = False


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner remembers. `revoked`: until when, by key; `number` and `signed`: of the last list of these."""

    issued: tuple[IssuedEntry, ...] = ()
    revoked: dict[HexKey, Until] = {}
    number: Count = 0
    signed: bytes = b""


def key_file(run: Path) -> Path:
    return run.with_suffix(".owner")


def members_file(run: Path) -> Path:
    return run.with_suffix(".members")


def public_half(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def make_key(run: Path) -> Ed25519PrivateKey:
    """Return the key that lies beside a run file, or a new one, which nobody has yet."""
    return load_key(run) if key_file(run).exists() else Ed25519PrivateKey.generate()


def save_key(run: Path, key: Ed25519PrivateKey) -> None:
    """Write the owner's key beside a run file, readable by its owner alone, unless one is there."""
    path = key_file(run)
    if path.exists():
        return
    with _unusable(path):
        atomic_file.write(path, key.private_bytes_raw().hex().encode() + b"\n")


def load_key(run: Path) -> Ed25519PrivateKey:
    """Return the owner's key; `UserError` (CONFIG) where there is none."""
    path = key_file(run)
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError) as error:
        raise config_error(
            f"The owner's key {path} cannot be read.",
            why=reason_of(error) if isinstance(error, OSError) else "it is no key",
            hint="`init --admission` wrote it beside the run file; only who has it lets others in and shuts them out",
        ) from error


def load_members(run: Path) -> MemberList:
    """Return the owner's list, empty where there is none yet; `UserError` where it is damaged."""
    return decode_members(run, read_members(run))


def read_members(run: Path) -> bytes:
    """Return the bytes of the owner's list, none where there is no list yet; `UserError` where it cannot be read."""
    with _unusable(members_file(run)), suppress(FileNotFoundError):
        return members_file(run).read_bytes()
    return b""


def decode_members(run: Path, raw: bytes) -> MemberList:
    """Return the owner's list that these bytes hold; `UserError` where they are damaged."""
    try:
        return msgspec.json.decode(raw, type=MemberList) if raw else MemberList()
    except ValueError as error:
        raise config_error(
            f"The owner's list {members_file(run)} is damaged.",
            why=str(error),
            hint="restore it from a backup: it says who was let in, and without it who was shut out comes back",
        ) from error


@contextmanager
def alone_with_members(run: Path) -> Iterator[None]:
    """Keep other processes from changing the owner's list until the body is done: they read it, change it, write it.

    The lock is on the key, for the list itself is replaced by each change.
    """
    key = key_file(run)
    with _unusable(key):
        file = os.open(key, os.O_RDWR if os.access(key, os.W_OK) else os.O_RDONLY)
    try:
        with _unusable(key):  # NFS locks no file that is open for reading alone
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def save_members(run: Path, members: MemberList) -> None:
    with _unusable(members_file(run)):
        atomic_file.write(members_file(run), msgspec.json.format(msgspec.json.encode(members)), public=True)


def with_revoked(
    members: MemberList, key: Ed25519PrivateKey, run_id: str, revoked: dict[str, int], unix_s: float
) -> MemberList:
    """Return the list with more that are shut out, signed anew; what has expired is dropped."""
    kept = {subject: until for subject, until in (members.revoked | revoked).items() if until > unix_s}
    if len(kept) > MOST_REVOKED:
        raise usage_error(
            f"{len(kept)} tickets would be revoked at once.",
            why=f"the list that travels has room for {MOST_REVOKED}, each until its last ticket has expired",
            hint="give tickets that expire sooner (--days)",
        )
    number = members.number + 1
    found = signed_list(key, run_id, number, {bytes.fromhex(subject): until for subject, until in kept.items()})
    return msgspec.structs.replace(members, revoked=kept, number=number, signed=encode_list(found))


def _unusable(path: Path) -> AbstractContextManager[None]:
    what = f"{path} cannot be read or written."
    return os_errors_as(storage_error, what, "a run file in a directory that is yours")
