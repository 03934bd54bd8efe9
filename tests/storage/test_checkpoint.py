"""Checkpoints: one whole file or none, and one whole file always."""

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from safetensors.torch import load_file
from sample_counters import counters
from small_stages import INNER, cuts, make_stage, prepared

from benchmarks.robustness.kill_checkpoint import kill_many
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import KEPT, Checkpoint, files, load, load_latest, save
from noloco_node.storage.checkpoint_store import CheckpointStore


def checkpoint(steps: int, run_id: str = "run") -> Checkpoint:
    place = {"dealt": steps}
    taken = counters(run_id=run_id, stage=1, inner_steps=steps, samples=64, optimiser_steps=steps, data_position=place)
    slow = (torch.full((2, 3), float(steps)), torch.arange(4.0), torch.tensor(7.0), torch.empty(0, 3))
    return Checkpoint(taken, {"slow": slow, "momentum": tuple(-tensor for tensor in slow), "optimiser": ()})


def steps_found(directory: Path) -> int | None:
    loaded = load_latest(directory, "run")
    return None if loaded is None else loaded.counters.inner_steps


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint(7)
    path = save(tmp_path / "new" / "directory", saved)
    loaded = load_latest(tmp_path / "new" / "directory", "run")
    assert loaded.counters == saved.counters
    for group in ("slow", "momentum"):
        assert all(torch.equal(a, b) for a, b in zip(loaded.tensors[group], saved.tensors[group], strict=True))
    assert load(path, "slow").tensors.keys() == {"slow"}
    # Any other reader of the format finds the same.
    assert torch.equal(load_file(path)["slow.0"], saved.tensors["slow"][0])


def test_a_stage_with_weights_in_two_parts_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe = prepared("llama")
    stages = [
        make_stage(recipe, cuts(recipe, 1)[0], seed=seed, inner=replace(INNER, state="int8"), autocast=torch.bfloat16)
        for seed in (3, 4)
    ]
    held = stages[0].current_weights()
    assert {each.dtype for each in held} == {torch.float32, torch.bfloat16, torch.int8}
    path = save(tmp_path, Checkpoint(checkpoint(7).counters, {"fast": held}))
    stages[1].set_weights(load(path, "fast").tensors["fast"])
    assert all(map(torch.equal, held, stages[1].current_weights()))


@settings(max_examples=30)
@given(steps=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), keep=st.integers(1, 4))
def test_the_last_few_written_are_kept_whatever_they_count(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    for number, count in enumerate(steps):
        path = save(directory, checkpoint(count), keep)
        os.utime(path, (10**9 - number, 10**9 - number))  # the clock goes backwards meanwhile
        assert steps_found(directory) == count
        assert len(list(directory.iterdir())) == min(number + 1, keep)


@given(st.from_regex(r"[0-9 a-z.-]{1,17}\.safetensors", fullmatch=True))
def test_a_file_of_its_owner_beside_them_stays_as_it_is(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        own = Path(place) / name
        own.write_bytes(b"a copy of the best one")
        for step in range(3):
            save(Path(place), checkpoint(step), keep=1)
        assert own.read_bytes() == b"a copy of the best one"
        assert [load(path).counters.inner_steps for path in files(Path(place))] == [2]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".00000001-0000000001.safetensors.aside").write_bytes(b"half")
    assert load_latest(tmp_path, "run") is None
    save(tmp_path, checkpoint(2))
    assert [path.name for path in tmp_path.iterdir()] == ["00000001-0000000002.safetensors"]


@settings(max_examples=50)
@given(data=st.data())
def test_a_damaged_file_costs_nothing_but_itself(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One byte changed, or some lost at the end: the one before it is found, and the damage is said."""
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, checkpoint(1))
    newer = save(directory, checkpoint(2))
    raw = bytearray(newer.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[place] ^= data.draw(st.integers(1, 255))
    else:
        del raw[place:]
    newer.write_bytes(raw)
    complaints: list[str] = []
    loaded = load_latest(directory, "run", complaints.append)
    assert loaded.counters.inner_steps == 1
    # Where the damage made it another run's checkpoint, it is passed over without a word.
    assert len(complaints) <= 1
    assert all(newer.name in complaint for complaint in complaints)
    told: list[str] = []
    store = CheckpointStore(directory, directory / "former", "run", "me", told.append)
    assert asyncio.run(store.load(loaded.counters.stage)).counters.inner_steps == 1
    # Where the damage made it another stage's, of that stage nothing is told.
    assert told == complaints or (len(raw) > place and rb"\"stage\":%d," % loaded.counters.stage not in raw)


@pytest.mark.parametrize("refuses", ["space", "write", "rename"])
def test_a_disk_that_refuses_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    for steps in range(KEPT):
        save(tmp_path, checkpoint(steps))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        if refuses == "space":
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=atomic_file.SPARE_BYTES))
        else:
            patch.setattr(os, {"write": "fsync", "rename": "replace"}[refuses], refuse)
        with pytest.raises(OSError, match="the 3 kept before it are untouched") as caught:
            save(tmp_path, checkpoint(9))
    assert caught.value.errno == (errno.ENOSPC if refuses == "space" else errno.EROFS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save(tmp_path, checkpoint(9))
    assert steps_found(tmp_path) == 9


def test_a_process_killed_at_random_instants_leaves_a_whole_checkpoint_every_time(tmp_path: Path) -> None:
    told = kill_many(tmp_path, kills=10, megabytes=4, seed=1)
    assert told.whole == 10
    assert told.saved >= 10


def test_checkpoints_are_written_without_torch() -> None:
    program = "import sys, noloco_node.storage.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=LAST_RESORT_S).returncode == 0


def test_directories_that_are_new_are_flushed_into_those_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(atomic_file, "flush", flushed.append)
    atomic_file.make_directory(tmp_path / "home" / "checkpoint")
    assert {tmp_path, tmp_path / "home"} <= set(flushed)
    flushed.clear()
    atomic_file.make_directory(tmp_path / "home" / "checkpoint")
    assert flushed == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EIO])
def test_a_file_system_that_flushes_no_directory_takes_checkpoints_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some network and user-space file systems; on a disk that fails nothing is taken for saved."""
    true_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in range(6):
        with nullcontext() if number != errno.EIO else pytest.raises(OSError, match="Input/output"):
            save(tmp_path / "new" / "run", checkpoint(step))
    assert number == errno.EIO or len(files(tmp_path / "new" / "run")) == KEPT


def test_a_checkpoint_of_more_steps_than_its_name_has_digits_is_the_newest(tmp_path: Path) -> None:
    for steps in (100, 10**10, 2**48, 200):
        save(tmp_path, checkpoint(steps), keep=3)
        assert steps_found(tmp_path) == steps
    assert len(files(tmp_path)) == 3


def test_a_checkpoint_of_more_steps_than_anybody_takes_is_of_no_use(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(5))
    save(tmp_path, checkpoint(2**54))
    assert steps_found(tmp_path) == 5
