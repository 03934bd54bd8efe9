"""Checkpoints: one whole file or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noloco_node.checkpoint import KEPT, Checkpoint, Counters, load_latest, save


def checkpoint(steps: int, run_id: str = "run") -> Checkpoint:
    counters = Counters(
        run_id=run_id,
        stage=1,
        round=3,
        inner_steps=steps,
        progress=0.5,
        samples=64,
        optimiser_steps=steps,
        data_position={"dealt": steps},
    )
    slow = (torch.full((2, 3), float(steps)), torch.arange(4.0))
    return Checkpoint(counters, {"slow": slow, "momentum": tuple(-tensor for tensor in slow), "optimiser": ()})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint(7)
    save(tmp_path / "new" / "directory", saved)
    loaded = load_latest(tmp_path / "new" / "directory", "run")
    assert loaded is not None
    assert loaded.counters == saved.counters
    for group in ("slow", "momentum"):
        assert all(torch.equal(a, b) for a, b in zip(loaded.tensors[group], saved.tensors[group], strict=True))


def test_the_last_few_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for steps in (5, 1000, 70):
        save(tmp_path, checkpoint(steps))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == KEPT
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    assert loaded.counters.inner_steps == 70


def test_another_run_with_fewer_steps_keeps_its_checkpoint(tmp_path: Path) -> None:
    for steps in (500, 600):
        save(tmp_path, checkpoint(steps, run_id="before"))
    assert save(tmp_path, checkpoint(10)).exists()
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    assert loaded.counters.inner_steps == 10


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".0000000001.safetensors.aside").write_bytes(b"half")
    save(tmp_path, checkpoint(2))
    assert [path.name for path in tmp_path.iterdir()] == ["0000000002.safetensors"]


def test_a_torn_file_costs_nothing_but_itself(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(1))
    newer = save(tmp_path, checkpoint(2))
    newer.write_bytes(newer.read_bytes()[:-9])
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    assert loaded.counters.inner_steps == 1


def test_another_run_has_no_checkpoint_here(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(1, run_id="other"))
    assert load_latest(tmp_path, "run") is None
    assert load_latest(tmp_path / "nowhere", "run") is None


def test_a_disk_that_refuses_leaves_the_earlier_ones(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(1))
    (tmp_path / ".0000000002.safetensors.aside").mkdir()
    with pytest.raises(OSError, match="aside"):
        save(tmp_path, checkpoint(2))
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    assert loaded.counters.inner_steps == 1
