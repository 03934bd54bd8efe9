"""A small file that is whole, as it was before or as it is after, whenever the power fails or its process is killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noloco_node.errors import Exit, UserError
from noloco_node.units import format_bytes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file aside, and put it in place of `path` if the body has flushed it to the disk."""
    aside = path.with_name(f".{path.name}.aside")
    try:
        yield aside
        os.replace(aside, path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write(path: Path, content: bytes, *, public: bool = False) -> None:
    """Write a file aside, flush it to the disk and rename it; raise `OSError` where the disk refuses.

    Other users of the machine can read it only where it is `public`: most files of a home are nobody else's business.
    """
    with replacing(path) as aside:
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if public else 0o600)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview, at: int | None = None) -> None:
    """Write all of `content` to a descriptor, at byte `at` or where its file stands; raise `OSError` otherwise.

    One system call may write a part and report no error: the cause, a full disk for one, comes with the next call.
    """
    left = memoryview(content)
    while left:
        written = (
            os.write(descriptor, left) if at is None else os.pwrite(descriptor, left, at + len(content) - len(left))
        )
        if written == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes and reports no error")
        left = left[written:]


SPARE_BYTES = 16 * 2**20
"""What a file may leave free of a disk: other files on it grow too."""


def require_room(directory: Path, size_bytes: int, path: Path | None = None) -> None:
    """Raise `OSError` where a disk has no room for so much more; `path`: the file that it names."""
    free_bytes = shutil.disk_usage(directory).free
    if size_bytes + SPARE_BYTES > free_bytes:
        spare, needed, free = map(format_bytes, (SPARE_BYTES, size_bytes + SPARE_BYTES, free_bytes))
        why = f"{needed} are needed ({spare} of them to spare), {free} are free"
        raise OSError(errno.ENOSPC, why, None if path is None else str(path))


def sweep(directory: Path) -> None:
    """Remove what a process that was killed while it wrote has left in a directory that is ours alone."""
    for left in directory.glob(".*.aside"):
        left.unlink(missing_ok=True)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory, and those above it that are missing; after a loss of power they are there still."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for each in missing:
        flush(each.parent)


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, public: bool = False) -> None:
    """Write a file aside and rename it: nobody ever sees half of it. Raises `UserError` where the disk will not."""
    try:
        write(path, content, public=public)
    except OSError as error:
        raise UserError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            hint="free some space, or give another directory with --home",
            code=Exit.STORAGE,
        ) from error
