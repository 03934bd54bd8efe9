"""What a machine gives to a node."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_counters import evaluated_counters

from noloco_node.cli.host_machine import EvaluationMachine, StageHost
from noloco_node.cli.options import JoinOptions
from noloco_node.machine import memory
from noloco_node.run.presets import demo_run_text, with_fields
from noloco_node.run.runfile import decode_run
from noloco_node.storage.checkpoint import Checkpoint, save

FIELDS = {"data": {"evaluate_every_rounds": 4, "validation_percent": 50.0}}
TEXT = with_fields(demo_run_text(stages=1, replicas=2, steps=100, seed=0), FIELDS)


def evaluated(loss: float, step: int) -> Checkpoint:
    return Checkpoint(evaluated_counters(loss, inner_steps=step), {"fast": (torch.zeros(2),)})


async def evaluate(machine: EvaluationMachine, before: float | None, found: Checkpoint) -> None:
    await machine.text()
    assert await machine.best_loss() == before
    await machine.keep(found)


def test_the_best_is_the_best_on_one_text(tmp_path: Path) -> None:
    """Another --data begins anew, and its first evaluation takes the place of the weights that are kept."""
    run, best = decode_run(TEXT, "the test's"), tmp_path / "best"
    save(best, evaluated(1.0, 1), 1)  # it names no text
    for name, before, kept in (("one", None, 2.0), ("two", None, 3.0), ("two", 3.0, 2.5), ("one", None, 4.0)):
        (tmp_path / name).mkdir(exist_ok=True)
        text = "".join(f"{name} or {number} is the question, and the answer\n" for number in range(2000))
        (tmp_path / name / "text.txt").write_text(text)
        machine = EvaluationMachine(run, JoinOptions(data=str(tmp_path / name)), best)
        asyncio.run(evaluate(machine, before, evaluated(kept, round(100 * kept))))
        machine.close()


@pytest.mark.parametrize(("most", "free"), [(None, 50), ("48B", 48), ("60B", 50)])
def test_a_stage_takes_what_is_free_beside_a_gpu_and_no_more_than_its_owner_allows(
    most: str | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_free_bytes", lambda: 40)
    host: Any = SimpleNamespace(_options=JoinOptions(max_ram=most))
    assert StageHost.free_beside_bytes(host, 10) == free
    for device, bound in (("cpu", free), ("mps", free), ("cuda", 50)):
        monkeypatch.setattr(memory, "free_bytes", lambda _: 40)
        host._torch_device = torch.device(device)
        assert StageHost.free_bytes(host, 10) == bound
