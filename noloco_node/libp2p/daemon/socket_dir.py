"""The private directory of a network's sockets: made, marked as ours, removed; and those of the dead, swept away.

A process that is killed cannot remove its directory. The next one that starts does: every directory of our name, owned
by the same user, whose mark nobody holds. The mark is a file under the kernel's lock, which ends with the process,
however that ends: no process number can be mistaken, not even across containers that share /tmp. It is locked before it
gets its name, so that a directory that is just being made is never taken for a dead one; a directory without a mark is
none of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "noloco-"
_MARK = "owner"
_LONGEST_SOCKET_PATH = 100
"""The kernel's limit for the path of a Unix socket is 108 bytes."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that is ours until the context ends; sweep away what dead processes left beside it."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_SOCKET_PATH - len("/noloco-12345678/12345678/control.sock"):
        parent = "/tmp"
    remove_stale(Path(parent))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        mark = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / "new").rename(directory / _MARK)
            yield directory
        finally:
            os.close(mark)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> list[Path]:
    """Remove the marked directories in `parent` whose owners are dead; return them. What cannot be removed stays."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in sorted(parent.glob(_PREFIX + "*")):
            with contextlib.suppress(OSError):
                if _is_ours(path) and _is_abandoned(path / _MARK):
                    shutil.rmtree(path)
                    removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    """Say whether this is a directory, no link to one, that belongs to our user alone."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_abandoned(mark: Path) -> bool:
    file = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
