"""Which replicas make a stage's mean by their loss on text that no peer trained on."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sample_counters import counters
from torch import Tensor

from noloco_node.data import blocks
from noloco_node.data.blocks import open_blocks
from noloco_node.data.file_documents import stdlib_files
from noloco_node.data.held_out_text import HeldOutText, Loss, validation_text
from noloco_node.errors import config_error
from noloco_node.export import held_out_loss
from noloco_node.export.exporter import merge_files
from noloco_node.export.held_out_loss import MOST_ROUTES, SPOILS, WholeModel, judged_by_loss, routes_of
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, newest
from noloco_node.planning.model_layout import build_stage, model_layout
from noloco_node.run.presets import demo_run_text
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import arrays_of
from noloco_node.swarm.run_distribution import RunFileText

pytestmark = pytest.mark.usefixtures("short_text", "ordinary_text")
ORDINARY = (
    "argparse.py",
    "ast.py",
    "dataclasses.py",
    "difflib.py",
    "inspect.py",
    "pickle.py",
    "tarfile.py",
    "typing.py",
)
RUN = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "the test's run file")
PLAN = model_layout(RUN.run)


@pytest.fixture(scope="module")
def ordinary_text() -> Iterator[None]:
    """Let replicas learn, and be judged, by modules that are code in each Python: some modules hold tables alone."""
    files = [(name, path) for name, path in stdlib_files() if name in ORDINARY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "stdlib_files", lambda: files)
        yield


@cache
def honest(stage: int) -> tuple[Tensor, ...]:
    """Return weights that predict the text better than chance: a few steps from the first ones."""
    return _trained(50)[stage]


def _trained(steps: int) -> tuple[tuple[Tensor, ...], ...]:
    return _course()[steps]


@cache
def _course() -> list[tuple[tuple[Tensor, ...], ...]]:
    """Return the weights of both stages before each of the first steps, and after the last."""
    parts = [build_stage(RUN.run, PLAN, number, torch.device("cpu")) for number in (0, 1)]
    weights = [weight for part in parts for weight in part.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=1e-2)
    text = open_blocks(RUN.run.data, 32, 0, "", "train")
    course = [tuple(tuple(weight.detach().clone() for weight in part.parameters()) for part in parts)]
    for _, batch in zip(range(50), text.batches(8), strict=False):
        logits = parts[1](parts[0](batch[:, :-1]))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
        course.append(tuple(tuple(weight.detach().clone() for weight in part.parameters()) for part in parts))
    text.close()
    return course


def near(stage: int, seed: int) -> tuple[Tensor, ...]:
    """Return what an honest replica of a stage may have."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(each + 0.002 * torch.randn(each.shape, generator=generator) for each in honest(stage))


def bad(stage: int) -> tuple[Tensor, ...]:
    """Return weights with the norm of a replica's, which predict nothing."""
    return tuple(-each for each in honest(stage))


BEHIND = RUN.run.outer.staleness_at_most


def lay(folder: Path, stage: int, peer: str, weights: Sequence[Tensor], round: int = 9) -> ReplicaFile:
    taken = counters(run_id=RUN.digest, stage=stage, round=round, inner_steps=9, progress=0.1, peer=peer)
    path = folder / f"{stage}-{peer}.safetensors"
    atomic_file.write_tensors(path, arrays_of({"slow": tuple(weights)}), msgspec.json.encode(taken).decode())
    return ReplicaFile(path, peer, taken)


def merged(filed: Sequence[ReplicaFile]) -> list[MergedReplicas]:
    """Return the stages that loss makes of these files; of snapshots among them the first is merged before."""
    further = [each for each in filed if each.is_snapshot][1:]
    stages = merge_files([each for each in filed if each not in further], RUN, PLAN)
    return judged_by_loss(RUN.run, PLAN, stages, [newest(filed, number) for number in (0, 1)])


@cache
def text() -> HeldOutText:
    return validation_text(RUN.run.data, 32, RUN.run.seed, held_out_loss.JUDGED_TOKENS // 256)


def loss_of(stages: Sequence[MergedReplicas]) -> float:
    return WholeModel(PLAN, stages, text()).loss().mean


def peers(stage: MergedReplicas) -> tuple[list[str], list[str]]:
    return [each.peer for each in stage.taken], [each.peer for each in stage.left_out]


@pytest.mark.parametrize(
    ("liars", "claimed"),
    [*[((), 0), ((0,), BEHIND + 1), ((0,), 2**40), ((1,), 0), ((1,), BEHIND + 1)], *[((0, 1), 0), ((0, 1), 2**40)]],
)
def test_of_two_replicas_of_a_stage_the_one_that_predicts_nothing_leaves_the_mean_whatever_round_it_claims(
    tmp_path: Path, liars: tuple[int, ...], claimed: int
) -> None:
    filed = [
        lay(tmp_path, stage, peer, bad(stage), 9 + claimed)
        if peer == "b" and stage in liars
        else lay(tmp_path, stage, peer, near(stage, 3 * stage + number))
        for stage, (number, peer) in itertools.product((0, 1), enumerate("ab"))
    ]
    for number, stage in enumerate(merged(filed)):
        assert peers(stage) == ((["a"], ["b"]) if number in liars else (["a", "b"], []))
        if number in liars:
            assert "the best has" in stage.left_out[0].why
            assert all(map(torch.equal, stage.weights.values(), near(number, 3 * number)))


@pytest.mark.parametrize("scale", [1.0, 0.4, 3.0])
def test_however_many_names_lie_alike_the_replicas_that_predict_make_the_mean(tmp_path: Path, scale: float) -> None:
    """The liars have the median norm and round, and most others in common."""
    lies = [scale * each for each in bad(0)]
    filed = [lay(tmp_path, 0, f"liar {number}", lies, 9 + BEHIND + 1) for number in range(5)]
    filed += [lay(tmp_path, 0, peer, near(0, seed)) for seed, peer in enumerate("ab")]
    filed += [lay(tmp_path, 1, "c", near(1, 5))]
    assert peers(merged(filed)[0]) == (["a", "b"], [f"liar {number}" for number in range(5)])


@pytest.mark.parametrize("old", [0, 20, 40])
def test_an_honest_straggler_is_in_the_mean_only_if_it_does_not_spoil_it(tmp_path: Path, old: int) -> None:
    """It says itself that it is behind, and one that lies about that is judged alike."""
    fresh = [lay(tmp_path, stage, peer, near(stage, 3 * stage)) for stage, peer in ((0, "a"), (1, "b"))]
    losses = []
    for round in (9, 9 - BEHIND - 1):
        found = merged([*fresh, lay(tmp_path, 1, "old", _trained(old)[1], max(0, round))])
        assert "b" in peers(found[1])[0]
        losses.append(loss_of(found))
    assert losses[0] == losses[1] <= (1.0 + SPOILS) * loss_of(merged(fresh))


def test_of_two_replicas_that_predict_alike_and_have_no_mean_one_is_taken(tmp_path: Path) -> None:
    """The other has pairs of matrices with the other sign: it computes the same, and the mean of both is zero there."""
    signs = {"v_proj": -1, "o_proj": -1, "up_proj": -1, "down_proj": -1}
    names = (name.split(".")[-2] for name in PLAN.shapes[1])
    turned = [signs.get(name, 1) * weight for name, weight in zip(names, honest(1), strict=True)]
    filed = [lay(tmp_path, 0, "a", honest(0)), lay(tmp_path, 1, "b", honest(1)), lay(tmp_path, 1, "c", turned, 999)]
    alone = loss_of(merged(filed[:2]))
    found = merged(filed)
    assert len(found[1].taken) == 1
    assert loss_of(found) == pytest.approx(alone, rel=1e-3)


def test_weights_of_zero_alone_make_no_mean(tmp_path: Path) -> None:
    """A middle stage of zeros passes its input on, and beside a bad replica predicts best."""
    zeros = [torch.zeros_like(each) for each in honest(1)]
    filed = [lay(tmp_path, 0, "a", honest(0)), lay(tmp_path, 1, "b", bad(1)), lay(tmp_path, 1, "zero", zeros)]
    assert peers(merged(filed)[1]) == (["b"], ["zero"])


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(kinds=st.lists(st.tuples(st.integers(0, 1), st.integers(-60, 50), st.integers(0, 40)), max_size=4))
def test_the_loss_is_no_more_than_that_of_any_route_whatever_is_claimed_and_its_cost_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[int, int, int]]
) -> None:
    """Of each stage there are an honest replica and others: older ones, and such as predict nothing (below 0)."""
    folder, count = tmp_path_factory.mktemp("files"), 0
    filed = [lay(folder, stage, "a", near(stage, stage)) for stage in (0, 1)]
    honest_alone = loss_of(merge_files(filed, RUN, PLAN))
    for number, (stage, age, round) in enumerate(kinds):
        weights = _trained(age)[stage] if age >= 0 else bad(stage)
        filed.append(lay(folder, stage, f"x{number}", weights, round))

    def counted(model: WholeModel) -> Loss:
        nonlocal count
        count += 1
        return text_loss(model)

    text_loss = WholeModel.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeModel, "loss", counted)
        found = merged(filed)
    assert count <= MOST_ROUTES + 1 + 2 * len(filed)
    assert loss_of(found) <= (1.0 + SPOILS) ** 2 * 1.001 * honest_alone
    for number, stage in enumerate(found):
        taken, left_out = peers(stage)
        assert sorted(taken + left_out) == sorted(each.peer for each in newest(filed, number))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_routes_are_few_and_all_where_all_are_few(counts: list[int], rng: Random) -> None:
    routes = routes_of(counts, rng)
    assert all(0 <= place < count for route in routes for place, count in zip(route, counts, strict=True))
    most = math.prod(counts)
    assert len(routes) == (min(most, MOST_ROUTES) if len(counts) > 1 else 0)
    assert most > MOST_ROUTES or len(set(routes)) == len(routes)


@pytest.mark.parametrize("newest_is_bad", [False, True])
def test_of_several_snapshots_of_a_stage_the_one_with_the_least_loss_is_taken(
    tmp_path: Path, newest_is_bad: bool
) -> None:
    living = lay(tmp_path, 0, "a", near(0, 1))
    weights = {"b": bad(1), "c": honest(1)} if newest_is_bad else {"b": honest(1), "c": bad(1)}
    files = [lay(tmp_path, 1, "b", weights["b"], 2**40), lay(tmp_path, 1, "c", weights["c"], 9)]
    snapshots = [each._replace(is_snapshot=True) for each in files]
    good, keeper, other = (snapshots[1], "c", "b") if newest_is_bad else (snapshots[0], "b", "c")
    found = merged([living, *snapshots])
    assert found[1].kept_by == keeper
    assert peers(found[1]) == ([keeper], [other])
    assert len(merged([living, snapshots[0]])[1].taken) == 1
    assert [len(stage.taken) for stage in merged([living, *files])] == [1, 1]
    both = [good, lay(tmp_path, 1, "d", near(1, 5), 9)]
    for are_snapshots, count in ((True, 1), (False, 2)):
        kept = [each._replace(is_snapshot=are_snapshots) for each in both]
        assert len(merged([living, *kept])[1].taken) == count


def test_where_nothing_is_to_be_chosen_or_the_text_cannot_be_read_no_claim_of_one_peer_drives_another_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(*_: object) -> list[Tensor]:
        raise config_error("There is no text.", why="the hub is away", hint="")

    monkeypatch.setattr(held_out_loss, "validation_text", unreadable)
    alone = [lay(tmp_path, stage, "a", near(stage, stage)) for stage in (0, 1)]
    assert [len(stage.taken) for stage in merged(alone)] == [1, 1]
    assert "not judged" not in capsys.readouterr().err
    found = merged([*alone, lay(tmp_path, 1, "b", bad(1), 9 + BEHIND + 1)])
    assert [len(stage.taken) for stage in found] == [1, 2]
    assert "not judged by their loss: There is no text. the hub is away" in capsys.readouterr().err
