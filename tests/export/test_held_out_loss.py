"""Who leaves a stage's mean for its loss on text that no peer trained on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.errors import config_error
from noloco_node.export import held_out_loss
from noloco_node.export.exporter import merge_files
from noloco_node.export.held_out_loss import best_snapshots, without_worse
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, newest
from noloco_node.planning.model_layout import build_stage, model_layout
from noloco_node.run.presets import demo_run_text
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Counters, arrays_of
from noloco_node.swarm.run_distribution import RunFileText

pytestmark = pytest.mark.usefixtures("short_text")
RUN = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "the test's run file")
PLAN = model_layout(RUN.run)


@cache
def honest(stage: int) -> tuple[Tensor, ...]:
    """Return weights that predict the text better than chance: a few steps from the first ones."""
    return _trained()[stage]


@cache
def _trained() -> tuple[tuple[Tensor, ...], ...]:
    parts = [build_stage(RUN.run, PLAN, number, torch.device("cpu")) for number in (0, 1)]
    weights = [weight for part in parts for weight in part.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=1e-2)
    blocks = open_blocks(RUN.run.data, 32, 0, "", "train")
    for _, batch in zip(range(50), blocks.batches(8), strict=False):
        logits = parts[1](parts[0](batch[:, :-1]))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    blocks.close()
    return tuple(tuple(weight.detach() for weight in part.parameters()) for part in parts)


def near(stage: int, seed: int) -> tuple[Tensor, ...]:
    """Return what an honest replica of a stage may have."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(each + 0.002 * torch.randn(each.shape, generator=generator) for each in honest(stage))


def bad(stage: int) -> tuple[Tensor, ...]:
    """Return weights with the norm of a replica's, which predict nothing."""
    return tuple(-each for each in honest(stage))


def lay(folder: Path, stage: int, peer: str, weights: Sequence[Tensor]) -> ReplicaFile:
    counters = Counters(
        run_id=RUN.digest, stage=stage, round=9, inner_steps=9, progress=0.1, samples=0, optimiser_steps=0, peer=peer
    )
    path = folder / f"{stage}-{peer}.safetensors"
    atomic_file.write_tensors(path, arrays_of({"slow": tuple(weights)}), msgspec.json.encode(counters).decode())
    return ReplicaFile(path, peer, counters)


def judged(filed: Sequence[ReplicaFile]) -> list[MergedReplicas]:
    stages = merge_files(filed, RUN, PLAN)
    return without_worse(RUN.run, PLAN, stages, [newest(filed, number) for number in (0, 1)])


@pytest.mark.parametrize("liars", [(), (0,), (1,), (0, 1)])
def test_of_two_replicas_of_a_stage_the_one_that_predicts_nothing_leaves_the_mean(
    tmp_path: Path, liars: tuple[int, ...]
) -> None:
    filed = [
        lay(tmp_path, stage, peer, bad(stage) if peer == "b" and stage in liars else near(stage, 3 * stage + number))
        for stage, (number, peer) in itertools.product((0, 1), enumerate("ab"))
    ]
    for number, stage in enumerate(judged(filed)):
        assert [each.peer for each in stage.taken] == (["a"] if number in liars else ["a", "b"])
        assert [each.peer for each in stage.left_out] == (["b"] if number in liars else [])
        if number in liars:
            assert "the best has" in stage.left_out[0].why
            assert all(map(torch.equal, stage.weights.values(), near(number, 3 * number)))


@pytest.mark.parametrize("newest_is_bad", [False, True])
def test_of_several_snapshots_of_a_stage_the_newest_is_taken_unless_another_predicts_better(
    tmp_path: Path, newest_is_bad: bool
) -> None:
    living = lay(tmp_path, 0, "a", near(0, 1))
    snapshots = [lay(tmp_path, 1, "b", bad(1) if newest_is_bad else near(1, 2)), lay(tmp_path, 1, "c", near(1, 3))]
    first, second = merge_files([living, snapshots[0]], RUN, PLAN)
    stages = [first, second._replace(kept_by="b")]
    found = best_snapshots(RUN.run, PLAN, stages, [[], snapshots])
    assert found[0] is first
    keeper = "c" if newest_is_bad else "b"
    assert (found[1].kept_by, [each.peer for each in found[1].taken]) == (keeper, [keeper])
    assert [each.peer for each in found[1].left_out] == (["b"] if newest_is_bad else [])
    assert all(map(torch.equal, found[1].weights.values(), near(1, 3 if newest_is_bad else 2)))
    assert best_snapshots(RUN.run, PLAN, stages, [[], snapshots[:1]]) == stages
    assert best_snapshots(RUN.run, PLAN, [first, second], [[], snapshots]) == [first, second]


def test_where_nothing_is_to_be_chosen_or_the_text_cannot_be_read_nobody_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(*_: object) -> list[Tensor]:
        raise config_error("There is no text.", why="the hub is away", hint="")

    monkeypatch.setattr(held_out_loss, "validation_text", unreadable)
    alone = [lay(tmp_path, stage, "a", near(stage, stage)) for stage in (0, 1)]
    assert [len(stage.taken) for stage in judged(alone)] == [1, 1]
    assert "not judged" not in capsys.readouterr().err
    found = judged([*alone, lay(tmp_path, 1, "b", bad(1))])
    assert [len(stage.taken) for stage in found] == [1, 2]
    assert "not judged by their loss: There is no text. the hub is away" in capsys.readouterr().err
