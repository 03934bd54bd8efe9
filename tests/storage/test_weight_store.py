"""The files of a checkpoint on a disk: nothing is believed that a digest of the run file does not say."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error
from weight_files import write_file

from noloco_node.errors import Exit
from noloco_node.storage import weight_store
from noloco_node.storage.weight_store import (
    LOOKED_AT_ONCE,
    MOST_HEADER_BYTES,
    PIECE_BYTES,
    FilePieceKey,
    WeightFile,
    WeightStore,
    described,
    is_held,
)


def test_a_directory_holds_the_weights_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    files = [write_file(tmp_path / name, seed=seed) for seed, name in enumerate(("a.safetensors", "b.safetensors"))]
    store = WeightStore.whole(tmp_path, files)
    assert store.missing([FilePieceKey(file, number) for file in (0, 1) for number in range(4)]) == []
    content = bytearray((tmp_path / "b.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(content)
    for directory, listed, why in (
        (tmp_path, files, "b.safetensors is another file than the run file lists"),
        (tmp_path / "no", files, "a.safetensors cannot be read: No such file or directory"),
        (tmp_path, [], "the run file lists none"),
    ):
        with user_error(Exit.CONFIG, "are not those that the run starts from") as caught:
            WeightStore.whole(directory, listed)
        assert why in caught.value.why
    assert store.read(FilePieceKey(1, 3)) is None, "a piece that has changed since is not given"
    assert store.read(FilePieceKey(1, 9)) is None


def test_pieces_come_in_any_order_and_are_found_again(tmp_path: Path) -> None:
    file = write_file(tmp_path / "from" / "a.safetensors")
    whole = WeightStore.whole(tmp_path / "from", [file])
    store = WeightStore.filling(tmp_path / "to", [file])
    keys = [FilePieceKey(0, number) for number in (3, 0, 2)]
    assert store.digests(0) is None
    assert store.missing(keys) == keys
    store.learn(0, whole.digests(0) or b"")
    for key in keys[:2]:
        store.write(key, whole.read(key) or b"")
    again = WeightStore.filling(tmp_path / "to", [file])
    assert again.missing(keys) == keys[2:]
    assert (tmp_path / "to" / "a.safetensors").stat().st_size == file.size_bytes
    assert again.header_pieces() == [FilePieceKey(0, 0)]
    assert again.tensors() == {"early": 0, "late": 0}
    assert again.pieces_of(["late"]) == [FilePieceKey(0, 0), FilePieceKey(0, 3)]


def test_a_header_that_would_fill_the_memory_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((2 * MOST_HEADER_BYTES).to_bytes(8, "little") + b" " * 2 * MOST_HEADER_BYTES)
    store = WeightStore.whole(tmp_path, [described(path)])
    assert len(store.header_pieces()) == 1 + MOST_HEADER_BYTES // PIECE_BYTES
    monkeypatch.setattr(json, "loads", pytest.fail)
    with pytest.raises(ValueError, match="bytes is none"):
        store.tensors()


def test_what_its_digest_does_not_say_is_not_written(tmp_path: Path) -> None:
    file = write_file(tmp_path / "from" / "a.safetensors")
    digests = WeightStore.whole(tmp_path / "from", [file]).digests(0) or b""
    store = WeightStore.filling(tmp_path / "to", [file])
    for wrong in (b"", digests[:-32], digests[32:] + digests[:32]):
        with pytest.raises(ValueError, match="not the digests"):
            store.learn(0, wrong)
    store.learn(0, digests)
    with pytest.raises(ValueError, match="not what its digest says"):
        store.write(FilePieceKey(0, 1), b"lies")
    assert not (tmp_path / "to" / "a.safetensors").exists()
    (tmp_path / "to" / "a.safetensors.digests").write_bytes(b"torn")
    assert WeightStore.filling(tmp_path / "to", [file]).digests(0) is None


def test_a_disk_without_room_says_so(tmp_path: Path) -> None:
    store = WeightStore.filling(tmp_path, [write_file(tmp_path / "a.safetensors")])
    store.check_room(1)
    with pytest.raises(OSError, match="are needed"):
        store.check_room(2**40)
    allowed = WeightStore.filling(tmp_path, store.files, most_bytes=2**20)
    allowed.check_room(2)
    with pytest.raises(OSError, match=r"1.57 MB are needed, and --max-disk allows 1.05 MB"):
        allowed.check_room(3)


def test_a_piece_that_the_disk_takes_in_part_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(tmp_path / "from" / "a.safetensors")
    whole = WeightStore.whole(tmp_path / "from", [file])
    store = WeightStore.filling(tmp_path / "to", [file])
    store.learn(0, whole.digests(0) or b"")
    key = FilePieceKey(0, 1)
    true_write, left = os.pwrite, [1000]

    def nearly_full(descriptor: int, content: memoryview, at: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = true_write(descriptor, content[: left[0]], at)
        left[0] -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", nearly_full)
        with pytest.raises(OSError, match="No space left"):
            store.write(key, whole.read(key) or b"")
    assert store.missing([key]) == [key]
    store.write(key, whole.read(key) or b"")
    assert store.missing([key]) == []


PIECES = 150  # of the file of zeros below: more than are looked at in one job
NUMBERS = st.sets(st.integers(0, PIECES - 1), max_size=9)


@given(here=NUMBERS, later=NUMBERS, lacking=st.integers(0, PIECES) | st.integers(0, 10**9))
def test_what_is_here_is_told_also_of_an_earlier_process(here: set[int], later: set[int], lacking: int) -> None:
    digests = hashlib.sha256(bytes(PIECE_BYTES)).digest() * PIECES
    digest = hashlib.sha256(digests).hexdigest()
    file = WeightFile(file="a.safetensors", size_bytes=PIECES * PIECE_BYTES, digest=digest)

    def told(store: WeightStore) -> set[int]:
        while not store.look(0):
            pass
        held = store.others_held(FilePieceKey(0, lacking))
        assert len(held) <= -(-PIECES // 8)
        return {number for number in range(2 * PIECES) if is_held(held, number)}

    def write(store: WeightStore, numbers: Iterable[int]) -> None:
        for number in numbers:
            store.write(FilePieceKey(0, number), bytes(PIECE_BYTES))

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_store, "_is_hole", lambda _, start, __: start // PIECE_BYTES not in written)
        patch.setattr(weight_store, "_of_zeros", lambda _: b"")
        written = set(here)
        first = WeightStore.filling(Path(directory), [file])
        assert told(first) == set()
        first.learn(0, digests)
        write(first, here)
        assert told(first) == here - {lacking}
        again = WeightStore.filling(Path(directory), [file])
        written |= later
        write(again, later)
        assert told(again) == (here | later) - {lacking}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENXIO])
def test_a_file_system_that_knows_no_holes_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.safetensors"
    path.write_bytes(b"1" * PIECE_BYTES)
    store = WeightStore.whole(tmp_path, [described(path)])
    monkeypatch.setattr(os, "lseek", refused)
    assert store.read(FilePieceKey(0, 0)) == (path.read_bytes() if number == errno.EINVAL else None)


def test_a_hole_is_not_hashed_and_what_is_hashed_is_hashed_in_short_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = [0]

    class Counting:
        @staticmethod
        def sha256(data: bytes) -> "hashlib._Hash":
            hashed[0] += 1
            return hashlib.sha256(data)

    path, pieces = tmp_path / "from" / "a.safetensors", 3 * LOOKED_AT_ONCE
    path.parent.mkdir()
    path.write_bytes(b"1" * PIECE_BYTES * 4)
    os.truncate(path, PIECE_BYTES * pieces)
    whole = WeightStore.whole(path.parent, [described(path)])
    store = WeightStore.filling(tmp_path / "to", whole.files)
    store.learn(0, whole.digests(0) or b"")
    for number in range(2):
        store.write(FilePieceKey(0, number), whole.read(FilePieceKey(0, number)) or b"")
    store = WeightStore.filling(tmp_path / "to", whole.files)
    monkeypatch.setattr(weight_store, "hashlib", Counting)
    assert store.missing([FilePieceKey(0, number) for number in range(4)]) == [FilePieceKey(0, 2), FilePieceKey(0, 3)]
    assert hashed[0] <= 2 + 1, "one for a piece of zeros"
    jobs = 1
    while not store.look(0):
        jobs += 1
        assert hashed[0] <= jobs * LOOKED_AT_ONCE + 3
    assert jobs == 3
    assert whole.read(FilePieceKey(0, pieces - 1)) == bytes(PIECE_BYTES), "a hole of its owner's file is zeros"
