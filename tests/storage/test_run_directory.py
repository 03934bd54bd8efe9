"""What a home keeps of a run lies in a directory of its own: no other run touches it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.errors import Exit, UserError
from noloco_node.storage.checkpoint import KEPT, Checkpoint, Counters, files, load_latest, save
from noloco_node.storage.checkpoint_store import CheckpointStore, SnapshotDirectory
from noloco_node.storage.home import Home, HomePaths, RunPaths
from noloco_node.swarm.run_distribution import RunHistory

RUNS = ("a" * 64, "b" * 64)


def checkpoint(run: str, step: int, stage: int = 0, peer: str = "me") -> Checkpoint:
    counters = Counters(
        run_id=run, stage=stage, round=step, inner_steps=step, progress=0.1, samples=0, optimiser_steps=0, peer=peer
    )
    return Checkpoint(counters, {"slow": (torch.zeros(2),), "fast": (torch.zeros(2),), "optimiser": ()})


def steps(paths: RunPaths, run: str) -> list[int]:
    found = load_latest(paths.checkpoint, run)
    return [] if found is None else [found.counters.inner_steps]


@settings(max_examples=20, deadline=None)
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
            assert found is not None
            assert found.counters.inner_steps == step


def test_files_of_two_runs_in_one_directory_are_counted_apart(tmp_path: Path) -> None:
    for run in RUNS:
        for step in range(KEPT + 1):
            save(tmp_path, checkpoint(run, step))
    assert len(files(tmp_path)) == 2 * KEPT
    for run in RUNS:
        assert steps(RunPaths(tmp_path.parent), run) == []
        found = load_latest(tmp_path, run)
        assert found is not None
        assert found.counters.inner_steps == KEPT


def old_home(path: Path) -> None:
    """Write what an earlier version left of two runs, the second one joined last."""
    for run in RUNS:
        for step in (1, 2):
            save(path / "checkpoint", checkpoint(run, step))
        save(path / "snapshots" / "1", checkpoint(run, 7, stage=1, peer="another"))
        (path / "catch-up").mkdir(exist_ok=True)
        (path / "catch-up" / f"{run[:32]}-1.pieces").write_bytes(b"pieces")
        for kind in ("weights", "tokenizer"):
            (path / kind / run[:32]).mkdir(parents=True)
            (path / kind / run[:32] / "file").write_bytes(kind.encode())
    (path / "reached.json").write_text(f'{{"run_id":"{RUNS[1]}","progress":0.5}}')
    (path / "ticket").write_bytes(RUNS[1].encode() + b"\nsigned")
    (path / "checkpoint" / "00000009-0000000009.safetensors").write_bytes(b"damaged")
    (path / "weights" / "a name").mkdir()
    strange = checkpoint("../../elsewhere", 1)
    save(path / "snapshots" / "2", strange)


def test_each_file_of_an_old_home_goes_to_its_run(tmp_path: Path) -> None:
    old_home(tmp_path)
    with Home.open(tmp_path) as home:
        for _ in range(2):
            for run in RUNS:
                paths = home.enter(run)
                assert steps(paths, run) == [2]
                assert len(files(paths.checkpoint)) == 2
                kept = SnapshotDirectory(paths.snapshots, run)._directory / "1"
                assert len(files(kept)) == 1
                assert [path.name for path in paths.partial_download.iterdir()] == [f"{run[:32]}-1.pieces"]
                assert (paths.weights / "file").read_bytes() == b"weights"
                assert (paths.tokenizer / "file").read_bytes() == b"tokenizer"
                assert (
                    HomePaths(tmp_path).tokenizers_of(run)[0]
                    == HomePaths(paths.path).tokenizers_of(run)[2]
                    == paths.tokenizer
                )
            assert RunHistory(home.run(RUNS[1]).run_history, RUNS[1], pytest.fail).progress == 0.5
            assert home.run(RUNS[1]).ticket.read_bytes().endswith(b"signed")
            # What names no run stays: nobody knows whose it is.
            assert [path.name for path in files(tmp_path / "checkpoint")] == ["00000009-0000000009.safetensors"]
            assert len(files(tmp_path / "snapshots" / "2")) == 1
        others = home.run(RUNS[0]).other_runs()
    assert others.number == 1
    assert others.size_bytes > 0
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["a name"]
    assert not (tmp_path / "tokenizer").exists()


def test_a_disk_that_refuses_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_home(tmp_path)
    before = {path.name for path in tmp_path.rglob("*.safetensors")}

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Home.open(tmp_path) as home:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            with pytest.raises(UserError, match="cannot use the home") as caught:
                home.enter(RUNS[0])
        assert caught.value.code is Exit.STORAGE
        assert {path.name for path in tmp_path.rglob("*.safetensors")} == before
        assert steps(home.enter(RUNS[0]), RUNS[0]) == [2]
