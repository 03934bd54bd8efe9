"""A home: the directory of one running node. No node removes the directory of another run; its owner may.

    HOME/identity.key journal.jsonl evals.jsonl traffic.json web-token lock     the peer's, whatever the run
    HOME/run.toml invite                                            of the run that was joined last
    HOME/runs/ID/run.toml checkpoint/ best/ snapshots/ catch-up/ weights/ tokenizer/ reached.json ticket

Two nodes in one home would claim one peer id twice. So a running node locks the file `lock` and writes there which
process it is. The lock file is never removed: two processes could each lock their own.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import sys
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from noloco_node.errors import Exit, UserError, os_errors_as, storage_error, usage_error
from noloco_node.storage import atomic_file
from noloco_node.units import UnixSeconds

JOURNAL = "journal.jsonl"
RUNS = "runs"
RUN_ID_SHOWN = 32  # digits of a run's id that name its directory


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a home."""

    pid: int
    since: UnixSeconds
    command: str


class RunPaths:
    """The files of one run in a home, which may be another process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.toml"  # the run file as it was fetched
        self.checkpoint = path / "checkpoint"  # what a restart resumes from
        self.best = path / "best"  # the weights of this peer's best evaluation
        self.snapshots = path / "snapshots"  # slow weights of other stages, kept for others
        self.partial_download = path / "catch-up"  # pieces of a state that is still being copied
        self.run_history = path / "reached.json"  # how far the run had come when its peers were last seen
        self.ticket = path / "ticket"  # the ticket that was given to this peer
        self.weights = path / "weights"  # files of weights that the run starts from
        self.tokenizer = path / "tokenizer"  # the run's tokenizer, if its files travel

    def keep_run_file(self, text: str) -> None:
        """Write the run file as it was fetched, unless it is there; raise `UserError` (STORAGE) if the disk refuses."""
        content = text.encode()
        with disk_errors(self.path):
            if not (self.run_file.is_file() and self.run_file.read_bytes() == content):
                atomic_file.write(self.run_file, content)

    def other_runs(self) -> list[int]:
        """Return the bytes of each other run of which the home keeps files."""
        others = [path for path in self.path.parent.glob("*") if path != self.path]
        # Their owner may remove them at this moment.
        sizes = [
            sum(atomic_file.size_of(Path(directory, name)) for directory, _, names in os.walk(other) for name in names)
            for other in others
        ]
        return [size for size in sizes if size]


def typed(path: str | os.PathLike[str]) -> Path:
    """Return a path that a person typed, or a stranger: `~` is a home directory where the system knows its user.

    Raises `UserError` (USAGE) for an empty text, which would mean the current directory, and for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise usage_error(f"{path!r} is no path.", f"it is of the type {type(path).__name__}", "a text, or a Path")
    if not os.fspath(path):
        raise usage_error(
            "A path is empty.",
            "it would mean the current directory, and a variable may be unset",
            "name it, or a . for it",
        )
    return Path(os.path.expanduser(path))  # `Path.expanduser` raises RuntimeError for a user that nobody knows


class HomePaths(RunPaths):
    """The files of a home, which may be another process's.

    Its `run_file` is the one of the run that was joined last. A person may give the directory of one run in place of a
    home, so a home is a `RunPaths` too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.identity = path / "identity.key"  # the private key that makes the peer id
        self.journal = path / JOURNAL  # the journal (`noloco_node.journal.writer`)
        self.evaluations = path / "evals.jsonl"  # the evaluations of this peer, which are in its journal too
        self.curves = path / "curves"  # the files of `join --log-to`, by format
        self.invite = path / "invite"  # to the run that was joined last: it leads to this peer and others that it met
        self.traffic = path / "traffic.json"  # bytes of this month (`noloco_node.limits.budget`)
        self.page_token = path / "web-token"  # the token of the page in a browser

    def relay_key(self, number: int) -> Path:
        return self.path / f"relay-{number}.key"

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(self.path / RUNS / run_id[:RUN_ID_SHOWN])

    def places_of(self, run_id: str) -> tuple[RunPaths, ...]:
        """Return where files of a run may lie: here, if this is the directory of a run itself, or in its directory."""
        return self, self.run(run_id)

    @property
    def journals(self) -> tuple[Path, ...]:
        """Where events of a run may be told: here or, if this is the directory of a run itself, in its home."""
        runs = self.path.absolute().parent
        return self.journal, *([runs.parent / JOURNAL] if runs.name == RUNS else [])

    def enter(self, run_id: str) -> RunPaths:
        """Return the directory of a run, made if it is missing; raise `UserError` (STORAGE) if the disk refuses."""
        paths = self.run(run_id)
        with disk_errors(self.path):
            atomic_file.make_directory(paths.path, mode=0o700)
        return paths


class Home(HomePaths, AbstractContextManager["Home"]):
    """A directory that is ours alone until `close`. Made by `Home.open`."""

    def __init__(self, path: Path, lock: int, signature: bytes) -> None:
        super().__init__(path)
        self._lock, self._signature = lock, signature

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory if it is missing, for its owner alone (mode 0700), and lock it.

        Raises `UserError`: HOME_IN_USE if another node holds it, STORAGE if it cannot be written.
        """
        path = typed(path).absolute()
        with disk_errors(path):
            atomic_file.make_directory(path, mode=0o700)
            _close_to_others(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                signature = _sign(lock)
            except OSError as error:
                os.close(lock)
                if isinstance(error, BlockingIOError):
                    raise _in_use(path) from error
                raise
        return cls(path, lock, signature)

    def check(self) -> None:
        """Raise `UserError` (HOME_IN_USE) where the directory is no longer there: it was moved, removed or replaced."""
        try:
            # Not by its number, which some file systems change: what we have signed.
            is_ours = (self.path / "lock").read_bytes() == self._signature
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        except OSError:  # a disk that is away for a while
            return
        if not is_ours:
            raise UserError(
                f"The home {self.path} is gone.",
                why="its file `lock` is not the one that this node has locked: it was moved, removed or replaced",
                hint="start the node again with --home and the directory's new path",
                code=Exit.HOME_IN_USE,
            )

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def holder(path: Path) -> LockHolder | None:
    """Return the process that last signed the lock of a home, running or not; None if it cannot be read."""
    try:
        return msgspec.json.decode((path / "lock").read_bytes(), type=LockHolder)
    except (OSError, ValueError):
        return None


def _close_to_others(path: Path) -> None:
    """Let no other user read a home, also if a person made it readable.

    A directory that holds other things than a home stays as it is; its secrets are closed all the same.
    """
    is_home = (path / "lock").exists() or not any(path.iterdir())
    home = HomePaths(path)
    secrets = [path / "lock", home.identity, home.ticket, home.invite, home.page_token, *path.glob("relay-*.key")]
    secrets += path.glob(f"{RUNS}/*/ticket")
    for each, mode in [*([(path, 0o700)] if is_home else []), *((secret, 0o600) for secret in secrets)]:
        if each.exists() and each.stat().st_mode & 0o077:
            with suppress(PermissionError):  # another user owns it, and lets us write there
                each.chmod(mode)


def without_secrets(command: str) -> str:
    """Return a command line without the part of an invite behind #, which lets its holder in."""
    return re.sub(r"(noloco\d+:[^\s#]*)#[^\s'\"]+", r"\1#...", command)


def _sign(lock: int) -> bytes:
    # Bytes of the command line that are not UTF-8 come as halves of surrogate pairs, which JSON cannot hold.
    command = without_secrets(shlex.join(sys.argv))[:1000].encode(errors="replace").decode()
    signature = msgspec.json.encode(LockHolder(pid=os.getpid(), since=time.time(), command=command))
    # In this order the file never gives back its block of the disk, which may be full by now.
    atomic_file.write_all(lock, signature, 0)
    os.ftruncate(lock, len(signature))
    atomic_file.sync(lock)  # a disk that is full says so here, before anything depends on it
    return signature


def _in_use(path: Path) -> UserError:
    found, who = holder(path), "a process that has not signed yet"
    if found is not None:
        since = datetime.fromtimestamp(found.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = f"process {found.pid}, since {since}: {found.command}"
    return UserError(
        f"the home {path} belongs to a running node",
        why=f"its lock is held by {who}",
        hint="stop that node, or give this one a directory of its own with --home",
        code=Exit.HOME_IN_USE,
    )


def disk_errors(path: Path) -> AbstractContextManager[None]:
    """Raise an `OSError` of the body as a `UserError` (STORAGE) that names the home."""
    hint = "free some space, repair its permissions, or give another directory with --home"
    return os_errors_as(storage_error, f"cannot use the home {path}", hint)
