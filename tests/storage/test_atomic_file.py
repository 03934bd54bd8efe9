"""A file is whole or not there, a writer hears if the disk takes a part, and the bytes of a tensor are its values."""

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from user_errors import user_error

import noloco_node
from noloco_node.errors import Exit
from noloco_node.storage import atomic_file
from noloco_node.storage.atomic_file import Array, bytes_of
from pipeline.hardware.device_type import DEVICE_TYPES


class NearlyFull:
    """Writes as Linux does on a disk with so many bytes left: a part first, ENOSPC with the next call."""

    def __init__(self, left_bytes: int, true_write: Callable[..., int], at_most: int = 2**20) -> None:
        self._left_bytes, self._true_write, self._at_most = left_bytes, true_write, at_most

    def __call__(self, descriptor: int, content: memoryview, *at: int) -> int:
        if not self._left_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._true_write(descriptor, content[: min(self._left_bytes, self._at_most)], *at)
        self._left_bytes -= taken
        return taken


@given(st.binary(max_size=64), st.integers(1, 80), st.integers(1, 16), st.sampled_from([None, 0, 5]))
def test_all_is_written_or_an_error_is_raised(content: bytes, room: int, at_most: int, at: int | None) -> None:
    descriptor = os.memfd_create("file")
    name = "write" if at is None else "pwrite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, NearlyFull(room, getattr(os, name), at_most))
        try:
            if room < len(content):
                with pytest.raises(OSError, match="No space left"):
                    atomic_file.write_all(descriptor, content, at)
            else:
                atomic_file.write_all(descriptor, content, at)
                assert os.pread(descriptor, 100, at or 0) == content
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("knows", [True, False], ids=["a disk", "a share that knows only fsync"])
def test_on_macos_the_drive_itself_is_to_have_the_bytes(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def control(descriptor: int, command: int) -> None:
        asked.append(f"fcntl {descriptor} {command}")
        if not knows:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(atomic_file.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(atomic_file.fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append(f"fsync {descriptor}"))
    atomic_file.sync(7)
    assert asked == ["fcntl 7 51", *([] if knows else ["fsync 7"])]


def test_a_disk_that_takes_nothing_and_reports_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="takes no more bytes"):
        atomic_file.write_all(-1, b"content", 0)


def test_a_file_stays_as_it_was_where_a_disk_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_file.write(path, b"before")
    (tmp_path / ".file.0123abcd.aside").write_bytes(b"left by a process that was killed")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", NearlyFull(3, os.write))
        with pytest.raises(OSError, match="No space left"):
            atomic_file.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@given(st.permutations(range(4)))
def test_whatever_writes_to_one_path_at_once_no_writer_fails_and_the_last_to_finish_stays(order: list[int]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        writers = {number: atomic_file.replacing(path) for number in order}
        for number, writer in writers.items():
            writer.__enter__().write_bytes(b"%d" % number)
        for number in sorted(order):
            writers[number].__exit__(None, None, None)
            assert path.read_bytes() == b"%d" % number
        assert os.listdir(directory) == ["file"]


KILLED = "import sys; from pathlib import Path; from noloco_node.storage.atomic_file import replacing\n"
KILLED += "with replacing(Path(sys.argv[1])): print('open', flush=True); sys.stdin.read()"


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / "file[1]"
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"open\n"
            (aside,) = tmp_path.iterdir()
            atomic_file.write(path, b"any")
            atomic_file.sweep(tmp_path)
            assert set(tmp_path.iterdir()) == {path, aside}
        finally:
            child.kill()
    assert aside.exists()
    atomic_file.write(path, b"any")
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_where_only_a_descriptor_for_writing_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does NFS."""
    true_lock = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        true_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    (tmp_path / ".file.0123abcd.aside").touch()
    atomic_file.write(tmp_path / "file", b"any")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_directories_beside_are_no_files_that_a_writer_left(tmp_path: Path) -> None:
    (beside := tmp_path / ".file.0123abcd.aside").mkdir()
    atomic_file.write(tmp_path / "file", b"any")
    atomic_file.sweep(tmp_path)
    assert beside.is_dir()


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_lock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        true_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    atomic_file.write(tmp_path / "file", b"any")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert len(removed) == 1


def test_a_file_system_whose_numbers_of_files_change_lets_a_writer_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False])
    monkeypatch.setattr(os.path, "samestat", lambda *_: next(looks))
    atomic_file.write(tmp_path / "file", b"any")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_only_two_modules_write_to_descriptors_themselves() -> None:
    """The journal counts the part of a line that the disk took; a command writes to a terminal as it is ended."""
    root = Path(noloco_node.__file__).parent
    raw = re.compile(r"\bos\.(write|pwrite|writev|pwritev|sendfile|copy_file_range)\(|buffering=0")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if raw.search(path.read_text())}
    assert found == {"storage/atomic_file.py", "journal/writer.py", "machine/signals.py"}


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "a parameter": torch.nn.Parameter,
    "transposed": lambda tensor: tensor.T,
    "spread": lambda tensor: tensor[0].expand(3, 9),
    "float64": lambda tensor: tensor.double(),
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "one value": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
}


def safetensors(head: bytes, length: int | None = None, data: bytes = b"1234") -> bytes:
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(["data_offsets", "a"]), some),
    max_leaves=6,
)
NO_FILES = {
    "empty": b"",
    "half a number": b"1234",
    "a header of exabytes": safetensors(b"{}", 2**63),
    "an end within the header": safetensors(b"{}", 99, b""),
    "no JSON": safetensors(b"{"),
    "no text": safetensors(b"\xff\xff"),
    "a list": safetensors(b"[]"),
    "metadata that is a list": safetensors(b'{"__metadata__": []}'),
}


@pytest.mark.parametrize("content", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_of_tensors_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    path.write_bytes(content)
    readers: list[Callable[[Path], object]] = [atomic_file.about_of, atomic_file.check_tensors]
    if b"metadata" not in content:
        readers.append(partial(atomic_file.tensor_ranges, most_bytes=10**9))
    for read in readers:
        with pytest.raises(ValueError, match=r"."):
            read(path)


@given(table=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), JSON), data=st.binary(max_size=9))
def test_a_tensor_lies_within_its_file_or_the_header_is_refused(
    table: dict[str, Any], data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    head = json.dumps(table).encode()
    path = tmp_path_factory.mktemp("files") / "any.safetensors"
    path.write_bytes(safetensors(head, data=data))
    with suppress(ValueError):
        for begin, end in atomic_file.tensor_ranges(path, 10**6).values():
            assert 8 + len(head) <= begin <= end <= path.stat().st_size
    with suppress(ValueError):
        assert isinstance(atomic_file.about_of(path), str | None)
    with suppress(ValueError):
        atomic_file.check_tensors(path)


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "any.safetensors").write_bytes(safetensors(b"{}"))
    with pytest.raises(ValueError, match="no checksum"):
        atomic_file.check_tensors(tmp_path / "any.safetensors")


def test_a_disk_that_refuses_a_small_file_is_named_to_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "file"
    with user_error(Exit.STORAGE, "cannot write"):
        atomic_file.write_whole(path, b"any")
    atomic_file.write_whole(tmp_path / "file", b"any")
    assert (tmp_path / "file").read_bytes() == b"any"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_what_a_device_holds_is_copied_beside_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_file, "AT_ONCE", 7)
    beside = MagicMock()
    monkeypatch.setitem(DEVICE_TYPES, "cpu", DEVICE_TYPES["cpu"]._replace(beside=lambda _: beside))
    for number, _ in enumerate(bytes_of(torch.randn(4, 7)).read(), 1):
        # What makes one row of the values comes before the chunks; the writer's own work is in no such context.
        assert beside.__enter__.call_count == beside.__exit__.call_count == number + 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("at_once", [1, 7, 2**20])
def test_bytes_are_those_of_the_values(
    form: Callable[[Tensor], Tensor], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_file, "AT_ONCE", at_once)
    tensor = form(torch.randn(5, 9, generator=torch.Generator().manual_seed(1)))
    array = Array("any", "F32", tuple(tensor.shape), bytes_of(tensor))
    chunks = list(array.chunks())
    assert b"".join(chunks) == tensor.detach().float().contiguous().numpy().tobytes()
    assert array.size_bytes == sum(map(len, chunks))
    assert all(len(chunk) <= 4 * at_once for chunk in chunks)


def test_a_disk_that_refuses_a_small_file_is_said_once_until_it_takes_it(tmp_path: Path) -> None:
    said: list[str] = []
    kept = atomic_file.KeptFile(tmp_path / "later" / "notes", "notes", said.append)
    assert [kept.write(b"1"), kept.write(b"2")] == [False, False]
    assert len(said) == 1
    kept.path.parent.mkdir()
    assert kept.write(b"3")
    assert kept.path.read_bytes() == b"3"
    kept.path.unlink()
    kept.path.parent.rmdir()
    assert not kept.write(b"4")
    assert len(said) == 2


def test_a_directory_aside_is_emptied_and_what_its_links_name_stays(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a file").touch()
    aside = tmp_path / ".model.aside"
    for left in ("directory", "own"):
        (aside / left).mkdir(parents=True)
    (aside / "a link").symlink_to(tmp_path / "own")
    (aside / "a dead link").symlink_to(tmp_path / "nothing")
    with atomic_file.locked_aside(tmp_path / "model") as empty:
        assert list(empty.iterdir()) == []
    assert (tmp_path / "own" / "a file").exists()


@pytest.mark.parametrize("left", [False, True])
def test_a_directory_is_held_by_one_process_at_once_and_kept_if_something_is_left_in_it(
    tmp_path: Path, left: bool
) -> None:
    beside = tmp_path / "new" / ".model.parts"
    for _ in range(2):
        with atomic_file.held(beside, tmp_path / "model"):
            with user_error(Exit.USAGE, "Another process is writing"), atomic_file.held(beside, tmp_path):
                pass
            if left:
                (beside / "a part").touch()
        assert beside.exists() is left
