"""A home belongs to one running node, and keeps what belongs to a run in a directory of its own."""

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_counters import counters
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.storage import atomic_file
from noloco_node.storage import home as homes
from noloco_node.storage.checkpoint import KEPT, Checkpoint, save
from noloco_node.storage.checkpoint_store import CheckpointStore
from noloco_node.storage.home import Home, holder
from noloco_node.swarm.invite import SCHEME

HOLD = (
    "import sys; from pathlib import Path; from noloco_node.storage.home import Home\n"
    "h = Home.open(Path(sys.argv[1]))\n"
)
WAIT = "print('held', flush=True); sys.stdin.read()"


def test_a_home_is_for_its_owner_alone_also_where_everybody_could_read_it(tmp_path: Path) -> None:
    with Home.open(tmp_path / "home") as home:
        assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    for name in ("lock", "invite", "web-token", "ticket", "identity.key", "relay-1.key", "notes.txt"):
        (tmp_path / name).touch(mode=0o644)
    with Home.open(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
        found = {path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077}
    assert found == {"notes.txt"}


def test_a_directory_with_other_things_stays_open_and_what_is_written_there_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "photos").mkdir()
    with Home.open(tmp_path) as home:
        atomic_file.write(home.invite, b"noloco6:...")
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
        assert stat.S_IMODE(home.invite.stat().st_mode) == 0o600


def test_no_invite_s_secret_is_written_into_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "iAAAAbbbb_-"
    monkeypatch.setattr(
        sys, "argv", ["noloco-node", "join", f"{SCHEME}{'5' * 64}@/dns4/a/tcp/1/p2p/b#{secret}", "--stay"]
    )
    with Home.open(tmp_path):
        signed = holder(tmp_path)
    assert secret not in signed.command
    assert f"{SCHEME}555" in signed.command
    assert "--stay" in signed.command


@given(st.binary(max_size=64), st.binary(max_size=8), st.integers(0, 80))
def test_a_command_line_and_a_lock_may_be_any_bytes(argument: bytes, damage: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["noloco-node", os.fsdecode(argument)])
        with Home.open(path := Path(directory)):
            assert holder(path).command.startswith("noloco-node ")
            raw = (path / "lock").read_bytes()
            (path / "lock").write_bytes(raw[:at] + damage + raw[at + len(damage) :])
            with user_error(Exit.HOME_IN_USE):
                Home.open(path)


@pytest.mark.parametrize("how", ["moved", "removed", "replaced", "a file"])
def test_a_home_that_is_gone_is_told(tmp_path: Path, how: str) -> None:
    with Home.open(path := tmp_path / "home") as home:
        home.check()
        path.rename(tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        elif how == "replaced":
            Home.open(path).close()
        elif how == "a file":
            path.touch()
        for _ in range(2):
            with user_error(Exit.HOME_IN_USE, "is gone[^$]*moved, removed or replaced"):
                home.check()


def test_a_disk_that_does_not_answer_is_no_home_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with Home.open(tmp_path) as home, monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", away)
        home.check()


def test_a_holder_that_has_not_signed_yet_is_no_riddle(tmp_path: Path) -> None:
    with Home.open(tmp_path):
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(UserError) as caught:
            Home.open(tmp_path)
    assert "not signed" in caught.value.why
    assert holder(tmp_path) is None


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD + WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        with user_error(Exit.HOME_IN_USE) as caught:
            Home.open(tmp_path)
        assert f"process {child.pid}" in caught.value.why
        assert f": -c {tmp_path}" in caught.value.why
        child.kill()
    signed = holder(tmp_path)
    assert signed.pid == child.pid
    Home.open(tmp_path).close()


def test_a_child_of_the_holder_does_not_inherit_the_lock(tmp_path: Path) -> None:
    spawn = "import subprocess; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0, stdout=2)\n"
    command = [sys.executable, "-c", HOLD + spawn + "print(p.pid, flush=True); import os; os._exit(0)", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        grandchild = int(child.stdout.readline())
        child.wait()
        os.kill(grandchild, 0)  # it lives, and yet the home is free
        Home.open(tmp_path).close()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        with user_error(Exit.STORAGE) as caught:
            Home.open(home)
        assert str(tmp_path / "file") in str(caught.value)


def test_a_full_disk_is_storage_trouble_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(homes.os, "pwrite", full)
        with pytest.raises(UserError) as caught:
            Home.open(tmp_path)
    assert caught.value.code is Exit.STORAGE
    assert "No space left" in caught.value.why
    Home.open(tmp_path).close()


def test_a_run_file_that_cannot_be_written_is_trouble(tmp_path: Path) -> None:
    with Home.open(tmp_path / "home") as home:
        home.keep_run_file("first")
        assert home.run_file.read_text() == "first"
        home.keep_run_file("first, fetched again")
        assert home.run_file.read_text() == "first, fetched again"
        written = home.run_file.stat().st_ino
        home.keep_run_file("first, fetched again")
        assert home.run_file.stat().st_ino == written, "what is there is not written again"
        home.run_file.unlink()
        home.run_file.mkdir()
        with pytest.raises(UserError) as caught:
            home.keep_run_file("second")
    assert caught.value.code is Exit.STORAGE


RUNS = ("a" * 64, "b" * 64)


def checkpoint(run: str, step: int, stage: int = 0, peer: str = "me") -> Checkpoint:
    taken = counters(run_id=run, stage=stage, round=step, inner_steps=step, peer=peer)
    return Checkpoint(taken, {"slow": (torch.zeros(2),), "fast": (torch.zeros(2),), "optimiser": ()})


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(RUNS), st.integers(0, 2)), min_size=1, max_size=8))
def test_the_newest_weights_of_each_run_and_stage_stay(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[str, int]]
) -> None:
    """A home takes part in one run after the other, at one stage after the other."""
    last: dict[tuple[str, int], int] = {}
    with Home.open(tmp_path_factory.mktemp("home")) as home:
        for number, (run, stage) in enumerate(lives):
            paths = home.enter(run)
            store = CheckpointStore(paths.checkpoint, paths.snapshots, run, "me", pytest.fail)
            asyncio.run(store.set_aside(stage))
            for step in range(10 * number, 10 * number + KEPT + 1):
                save(paths.checkpoint, checkpoint(run, step, stage))
            last[run, stage] = 10 * number + KEPT
        for (run, stage), step in last.items():
            paths = home.run(run)
            found = asyncio.run(CheckpointStore(paths.checkpoint, paths.snapshots, run, "me", pytest.fail).load(stage))
            assert found.counters.inner_steps == step
            assert len(paths.other_runs()) == len({each for each, _ in last} - {run})


def test_other_runs_may_be_removed_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Path.stat

    def looked_at_once(self: Path, **others: bool) -> os.stat_result:
        found = look(self, **others)
        if self.suffix == ".old":
            self.unlink()
        return found

    with Home.open(tmp_path) as home:
        for name in ("a.old", "b.old"):
            (home.enter(RUNS[1]).path / name).write_text("weights")
        paths = home.enter(RUNS[0])
        monkeypatch.setattr(Path, "stat", looked_at_once)
        assert paths.other_runs() == [14]
        monkeypatch.undo()
        assert paths.other_runs() == []


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_home_at_the_place_of_a_file_is_refused_in_words(tmp_path: Path, below: str) -> None:
    place = tmp_path / "run.toml"
    place.touch()
    with user_error(Exit.STORAGE, "cannot use the home") as caught:
        Home.open(place / below)
    assert "ot a directory" in caught.value.why
    assert "File exists" not in caught.value.why


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_home_behind_a_link_to_what_is_not_there_is_refused_in_words(tmp_path: Path, below: str) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path / "a-disk-that-is-not-mounted" / "home")
    with user_error(Exit.STORAGE, "cannot use the home") as caught:
        Home.open(link / below)
    assert "a link to what is not there" in caught.value.why


def test_a_disk_that_refuses_the_directory_of_a_run_is_trouble(tmp_path: Path) -> None:
    with Home.open(tmp_path) as home:
        (home.path / "runs").touch()
        with pytest.raises(UserError, match="cannot use the home") as caught:
            home.enter(RUNS[0])
    assert caught.value.code is Exit.STORAGE
