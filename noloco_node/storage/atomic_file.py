"""Files that are whole or not there, whenever the power fails or the process is killed.

A file is written aside, flushed to the disk and renamed, and its directory is flushed. `locked_aside` is where a whole
directory is written. `write_tensors` writes safetensors files in one pass, with the SHA-256 of everything in their
metadata. Only `bytes_of` loads torch.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from noloco_node.errors import os_errors_as, reason_of, storage_error, usage_error
from noloco_node.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SPARE_BYTES = 16 * 2**20  # a file leaves at least so much of a disk free: other files on it grow too
CHUNK_BYTES = 4 * 2**20
AT_ONCE = 2**20  # values of a tensor in one chunk: as much is copied at once where the tensor does not lie as written
LARGEST_HEADER_BYTES = 100 * 2**20  # what the safetensors format allows
_ABOUT, _SUM = "about", "sha256"
_BLANK = "0" * 64
_LENGTH = struct.Struct("<Q")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty file to write, and put it in place of `path`; the body has flushed it.

    Each writer locks a file of its own, so several may write to one path at once: the last to finish stays. A file
    without a lock is one that a killed process has left.
    """
    _remove_left(path.parent, f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.aside")
    aside, lock = _locked_file(path, mode)
    try:
        yield aside
        os.replace(aside, path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)
        os.close(lock)


def _locked_file(path: Path, mode: int) -> tuple[Path, int]:
    """Return a new file beside `path`, and the descriptor that locks it."""
    while True:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
        lock = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):  # not every file system knows locks; nobody can take the file for a left one there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if aside.exists():
            return aside, lock
        os.close(lock)  # another writer has removed it before it was locked


def _remove_left(directory: Path, pattern: str) -> None:
    """Remove files that killed processes have left aside; what a living one writes is locked."""
    for left in directory.glob(pattern):
        with suppress(OSError):  # it has gone, or it is locked
            descriptor = os.open(left, os.O_WRONLY)  # NFS locks no file that is open for reading alone
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def write(path: Path, content: bytes, *, public: bool = False) -> None:
    """Write a file aside, flush it and rename it; raise `OSError` if the disk refuses.

    Other users of the machine can read it only if it is `public`.
    """
    with replacing(path, 0o666 if public else 0o600) as aside, aside.open("wb", buffering=0) as file:
        write_all(file.fileno(), content)
        sync(file.fileno())


class KeptFile:
    """A small file that is written anew as its content changes; a disk that refuses is said once, until it takes it.

    `what`: its content, in words.
    """

    def __init__(self, path: Path, what: str, say: Callable[[str], None]) -> None:
        self.path, self._what, self._say = path, what, say
        self._refused = False

    def write(self, content: bytes) -> bool:
        """Write the content; return whether the disk took it."""
        before, self._refused = self._refused, False
        try:
            write(self.path, content)
        except OSError as error:
            self._refused = True
            if not before:
                self._say(f"cannot keep {self._what} in {self.path}: {reason_of(error)}")
        return not self._refused


def write_all(descriptor: int, content: bytes | memoryview, at: int | None = None) -> None:
    """Write all of `content` to a descriptor, at byte `at` or its position; raise `OSError` otherwise.

    One system call may write a part and report no error: the cause, such as a full disk, comes with the next call.
    """
    left = memoryview(content)
    while left:
        written = (
            os.write(descriptor, left) if at is None else os.pwrite(descriptor, left, at + len(content) - len(left))
        )
        if written == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes and reports no error")
        left = left[written:]


def require_room(directory: Path, size_bytes: int, path: Path | None = None) -> None:
    """Raise `OSError` if a disk has no room for so many bytes more; `path`: the file that the error names."""
    free_bytes = shutil.disk_usage(directory).free
    if size_bytes + SPARE_BYTES > free_bytes:
        spare, needed, free = map(format_bytes, (SPARE_BYTES, size_bytes + SPARE_BYTES, free_bytes))
        why = f"{needed} are needed ({spare} of them to spare), {free} are free"
        raise OSError(errno.ENOSPC, why, None if path is None else str(path))


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 of one that has gone, or that the system does not show."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextmanager
def locked_aside(directory: Path) -> Iterator[Path]:
    """Yield an empty directory beside `directory`, without what a killed process left there; remove it afterwards.

    The body may have renamed it. Raises `UserError` if another process has it.
    """
    aside = directory.absolute().parent / f".{directory.name}.aside"
    lock = _lock(aside, directory)
    try:
        for left in aside.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield aside
    finally:
        if _is_held(lock, aside):
            shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


@contextmanager
def held(beside: Path, directory: Path) -> Iterator[None]:
    """Hold a directory, made if it is missing, beside the one that is written of it; remove it if it is left empty.

    Raises `UserError` if another process has it, or the disk refuses.
    """
    with os_errors_as(storage_error, f"The directory {beside} cannot be used.", "another place, or the rights to this"):
        lock = _lock(beside, directory)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty: it is kept
            if _is_held(lock, beside):
                beside.rmdir()
        os.close(lock)


def _lock(aside: Path, directory: Path) -> int:
    """Lock a directory and return the descriptor that holds it; raise `UserError` if another process does."""
    while True:
        aside.mkdir(parents=True, exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise usage_error(
                f"Another process is writing {directory}.", f"it holds {aside}", "wait for it, or choose another path"
            ) from None
        if _is_held(lock, aside):
            return lock
        os.close(lock)  # of a directory that its owner has just removed or renamed


def _is_held(lock: int, aside: Path) -> bool:
    """Say whether a file or a directory is still the one that was locked."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(aside))
    except (FileNotFoundError, NotADirectoryError):
        return False


def sweep(directory: Path) -> None:
    """Remove files that killed processes have left aside, whichever file of a directory they were to replace."""
    _remove_left(directory, ".*.aside")


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents, flushed to the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except FileExistsError as error:  # the system's words, "File exists", do not say what is wrong with that
        in_the_way = "a link to what is not there" if any(each.is_symlink() for each in missing) else "a file"
        raise NotADirectoryError(errno.ENOTDIR, f"this is {in_the_way}, not a directory", str(path)) from error
    for each in missing:
        flush(each.parent)


def sync(descriptor: int) -> None:
    """Wait until the disk has what was written; on macOS `fsync` alone leaves it in the drive's own cache."""
    if (whole := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with suppress(OSError):  # not every file system knows it
            fcntl.fcntl(descriptor, whole)
            return
    os.fsync(descriptor)


def flush(path: Path) -> None:
    """Wait until the disk has a file, or what a directory lists where the file system can be asked for that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES) or not path.is_dir():
            raise


def write_whole(path: Path, content: bytes, *, public: bool = False) -> None:
    """Do as `write` does; raise `UserError` (STORAGE) if the disk refuses."""
    hint = "free some space, or give another directory with --home"
    with os_errors_as(storage_error, f"cannot write {path}", hint):
        write(path, content, public=public)


class TensorBytes(NamedTuple):
    """The values of a tensor in main memory, made a chunk at a time when they are read."""

    size_bytes: int
    read: Callable[[], Iterator[memoryview]]


def array(name: str, tensor: Tensor) -> Array:
    """Return a tensor as it is written: int8, uint8 and bfloat16 as they are, others as float32.

    A weight in two parts, bfloat16 and int8, is known by these formats when it is read (`pipeline.hardware`).
    """
    import torch

    written = {torch.int8: "I8", torch.uint8: "U8", torch.bfloat16: "BF16"}.get(tensor.dtype, "F32")
    dtype = torch.float32 if written == "F32" else tensor.dtype
    return Array(name, written, tuple(tensor.shape), _bytes_in(tensor, dtype))


def bytes_of(tensor: Tensor) -> TensorBytes:
    """Return the bytes of a tensor, int8 or float32: its own memory where that holds them, else copies.

    What another device holds is copied beside its passes.
    """
    import torch

    return _bytes_in(tensor, torch.int8 if tensor.dtype is torch.int8 else torch.float32)


def _bytes_in(tensor: Tensor, dtype: torch.dtype) -> TensorBytes:
    import torch

    from pipeline.hardware.device_type import DEVICE_TYPES

    def chunks() -> Iterator[memoryview]:
        beside = DEVICE_TYPES[tensor.device.type].beside(tensor.device)
        with beside:
            values = tensor.detach().reshape(-1)
        for part in torch.split(values, AT_ONCE):
            with beside:
                here = part.to("cpu", dtype)
            view: Any = here.view(torch.uint8).numpy()
            yield memoryview(view)

    return TensorBytes(dtype.itemsize * tensor.numel(), chunks)


class Array(NamedTuple):
    """One tensor. `dtype`: as safetensors spells it (F32, I64). `data`: little endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | TensorBytes

    @property
    def size_bytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.size_bytes

    def chunks(self) -> Iterator[memoryview]:
        """Yield the data, some MiB at a time."""
        if not isinstance(self.data, bytes):
            return self.data.read()
        view = memoryview(self.data)
        return (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))


def write_tensors(path: Path, arrays: Sequence[Array], about: str, read: Callable[[], None] = lambda: None) -> None:
    """Write `arrays`, with `about` as metadata, in place of `path` or not at all.

    Calls `read` when it needs the arrays no more, before it waits for the disk. Raises `OSError` if the disk refuses,
    also before it is full; the earlier file is then still there.
    """
    head = _header(arrays, about)
    require_room(path.parent, 8 + len(head) + sum(array.size_bytes for array in arrays), path)
    total = hashlib.sha256(_LENGTH.pack(len(head)) + head)
    with replacing(path) as aside, aside.open("wb") as file:
        file.write(_LENGTH.pack(len(head)) + head)
        for array in arrays:
            for chunk in array.chunks():
                total.update(chunk)
                file.write(chunk)
        read()
        file.seek(_LENGTH.size)
        file.write(_with_sum(head, _BLANK, total.hexdigest()))
        file.flush()
        sync(file.fileno())


def about_of(path: Path) -> str | None:
    """Return the metadata that `write_tensors` was given, None if there is none; raise ValueError or `OSError`."""
    with path.open("rb") as file:
        found = _metadata(_head_of(file)[1])
    told = found.get(_ABOUT)
    return told if isinstance(told, str) else None


def check_tensors(path: Path) -> None:
    """Raise ValueError if the bytes are not those that were written, `OSError` if the file cannot be read."""
    with path.open("rb") as file:
        head, table = _head_of(file)
        promised = _metadata(table).get(_SUM)
        if promised is None:
            raise ValueError("it has no checksum")
        total = hashlib.sha256(_LENGTH.pack(len(head)) + _with_sum(head, str(promised), _BLANK))
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
    if total.hexdigest() != promised:
        raise ValueError("its checksum is wrong: the disk has lost or changed some of it")


def _header(arrays: Iterable[Array], told: str) -> bytes:
    """Return the header, padded to eight bytes, with a blank checksum."""
    table: dict[str, object] = {"__metadata__": {_SUM: _BLANK, _ABOUT: told}}
    start = 0
    for array in arrays:
        end = start + array.size_bytes
        table[array.name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    head = json.dumps(table, separators=(",", ":")).encode()
    return head + b" " * (-len(head) % 8)


def _head_of(file: BinaryIO, most_bytes: int = LARGEST_HEADER_BYTES) -> tuple[bytes, dict[str, Any]]:
    """Return the header of a safetensors file, as it lies there and decoded; raise ValueError if it is none."""
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise ValueError("the file is shorter than its first number")
    (length,) = _LENGTH.unpack(prefix)
    if length > most_bytes:
        raise ValueError(f"a header of {length} bytes is none")
    head = file.read(length)
    if len(head) < length:
        raise ValueError("the file ends within its header")
    try:
        table = json.loads(head)
    except RecursionError:  # brackets nested without end
        table = None
    if not isinstance(table, dict):
        raise ValueError("the header is none of a safetensors file")
    return head, table


def _metadata(table: dict[str, Any]) -> dict[str, object]:
    found = table.get("__metadata__", {})
    if not isinstance(found, dict):
        raise ValueError("the header is none of a safetensors file")
    return found


def _with_sum(head: bytes, before: str, after: str) -> bytes:
    return head.replace(f'"{_SUM}":"{before}"'.encode(), f'"{_SUM}":"{after}"'.encode(), 1)


def tensor_ranges(path: Path, most_bytes: int) -> dict[str, tuple[int, int]]:
    """Return each tensor's first byte in a file, and the one behind its last; raise ValueError or `OSError`.

    `most_bytes`: of a header that is decoded.
    """
    with path.open("rb") as file:
        (head, table), size = _head_of(file, most_bytes), os.fstat(file.fileno()).st_size
    table.pop("__metadata__", None)
    found, begin = {}, _LENGTH.size + len(head)
    for name, entry in table.items():
        try:
            start, stop = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            start, stop = 0, -1
        if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= size - begin):
            raise ValueError(f"the header of {path.name} places {name!r} outside the file")
        found[name] = (begin + start, begin + stop)
    return found
