"""A home: the one directory of one running node.

Identity, run file, checkpoint and journal of a peer lie together, and two nodes in one home would write over each other
and claim one peer id twice. So a running node holds a lock on the file `lock` (the kernel's: it ends with the process,
however that ends), and writes there who it is, for the one that finds the door shut. The lock file is never removed: a
file that is unlinked while somebody waits for it would be locked twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.storage import atomic_file

JOURNAL = "journal.jsonl"


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a home. `since`: unix seconds."""

    pid: int
    since: float
    command: str


class HomePaths:
    """What lies in a home, and where; it may be another process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity.key"
        """The private key that makes the peer id."""
        self.journal = path / JOURNAL
        """The journal (`noloco_node.journal.writer`)."""
        self.checkpoint = path / "checkpoint"
        """What a restart resumes from."""
        self.snapshots = path / "snapshots"
        """Slow weights of other stages, kept for others."""
        self.invite = path / "invite"
        """An invite by which this peer, and others that it met, are found."""
        self.run_history = path / "reached.json"
        """How far the run had come when its peers were last seen."""
        self.run_file = path / "run.toml"
        """The run file as it was fetched."""
        self.ticket = path / "ticket"
        """The ticket that was given to this peer."""
        self.traffic = path / "traffic.json"
        """Bytes of this month (`noloco_node.limits.traffic_ledger`)."""
        self.partial_download = path / "catch-up"
        """Pieces of a state that is still being copied."""
        self.page_token = path / "web-token"
        """The token of the page in a browser."""

    def relay_key(self, number: int) -> Path:
        """Return where the identity of a bootstrap peer's relay lies."""
        return self.path / f"relay-{number}.key"

    def weights(self, run_id: str) -> Path:
        """Return where files of weights lie that a run starts from."""
        return self.path / "weights" / run_id[:32]

    def tokenizer(self, run_id: str) -> Path:
        """Return where the tokenizer of a run lies, if its files travel."""
        return self.path / "tokenizer" / run_id[:32]


class Home(HomePaths):
    """A directory that is ours alone until `close`. Made by `Home.open`."""

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path)
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory where it is missing (mode 0700) and lock it.

        Raises `UserError`: HOME_IN_USE where another node holds it, STORAGE where it cannot be written.
        """
        path = path.expanduser().absolute()
        lock = -1
        try:
            atomic_file.make_directory(path, mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(lock)
        except OSError as error:
            refusal = _in_use(path, lock) if error.errno == errno.EWOULDBLOCK else _unusable(path, error)
            if lock >= 0:
                os.close(lock)
            raise refusal from error
        return cls(path, lock)

    def keep_run_file(self, text: str) -> None:
        """Have the run file as it was fetched; raise `UserError` (STORAGE) where it is not there and the disk
        refuses."""
        content = text.encode()
        try:
            if not (self.run_file.is_file() and self.run_file.read_bytes() == content):
                atomic_file.write(self.run_file, content)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Give the directory free; closing twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def holder(path: Path) -> LockHolder | None:
    """Return who signed the lock of a home last, running or not; None where nobody legible did."""
    try:
        return msgspec.json.decode((path / "lock").read_bytes(), type=LockHolder)
    except (OSError, msgspec.DecodeError):
        return None


def _sign(lock: int) -> None:
    command = shlex.join(sys.argv)[:1000]
    os.ftruncate(lock, 0)
    holder = LockHolder(pid=os.getpid(), since=time.time(), command=command)
    atomic_file.write_all(lock, msgspec.json.encode(holder), 0)
    os.fsync(lock)  # a disk that is full says so here, before anything depends on it


def _in_use(path: Path, lock: int) -> UserError:
    try:
        found = msgspec.json.decode(os.pread(lock, 4096, 0), type=LockHolder)
    except msgspec.DecodeError:  # the holder is just about to sign
        who = "a process that has not signed yet"
    else:
        since = datetime.fromtimestamp(found.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = f"process {found.pid}, since {since}: {found.command}"
    return UserError(
        f"the home {path} belongs to a running node",
        why=f"its lock is held by {who}",
        hint="stop that node, or give this one a directory of its own with --home",
        code=Exit.HOME_IN_USE,
    )


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot use the home {path}",
        why=reason_of(error),
        hint="free some space, repair its permissions, or give another directory with --home",
        code=Exit.STORAGE,
    )
