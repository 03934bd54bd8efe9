"""`export --best`: the weights of the best evaluation that homes have kept."""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from sample_counters import evaluated_counters
from transformers import AutoModelForCausalLM
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.export import replica_files
from noloco_node.export.exporter import export
from noloco_node.export.replica_files import best_evaluated
from noloco_node.export.sources import check_export
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.run.presets import demo_run_text, with_fields
from noloco_node.storage.checkpoint import Checkpoint, EvaluatedCounters, save
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.invite import SCHEME
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.hardware.split_weights import split

PLAIN = demo_run_text(stages=1, replicas=2, steps=100, seed=0)
RUN = RunFileText(with_fields(PLAIN, {"data": {"evaluate_every_rounds": 4}}), "the test's run file")
PLAN = model_layout(RUN.run)


def keep(home: Path, loss: float, *, halves: bool = False) -> tuple[torch.Tensor, ...]:
    """Keep weights of an evaluation in a home, as a node of this name does; return them. `halves`: split in two."""
    paths = HomePaths(home)
    stage = make_stage(RUN.run, PLAN, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(int(100 * loss))
    weights = tuple([torch.randn(shape, generator=generator) for shape in stage.shapes])
    fast = weights
    if halves:
        upper, lower = zip(*(split(each) for each in weights), strict=True)
        fast = (*upper, *lower)
    taken = evaluated_counters(loss, run_id=RUN.digest, peer=home.name, round=8)
    save(paths.run(RUN.digest).best, Checkpoint(taken, {"fast": fast}), 1)
    paths.run_file.write_text(RUN.text)
    return weights


def test_the_least_loss_is_exported_and_the_others_are_named(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("worse", "best", "worst")]
    weights = {home.name: keep(home, loss) for home, loss in zip(homes, (2.5, 2.0, 3.0), strict=True)}
    done = asyncio.run(export(tmp_path / "out", None, homes, best=True))
    assert "out: one replica a stage (stage 0: 1, round" in done
    assert "These are the weights of best alone; their loss on held-out text was 2.0000." in done
    assert "Left out of stage 0: worst (loss 3.0000 at its best, the least is 2.0000)." in done
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = PLAN.ordinary(0, dict(zip(PLAN.shapes[0], weights["best"], strict=True)))
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())


def test_an_export_goes_where_a_link_leads_and_never_into_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "home", 2.0)
    for place in ("empty", "new"):
        link = tmp_path / f"to {place}"
        link.symlink_to(tmp_path / place)
        if place == "empty":
            (tmp_path / place).mkdir()
            monkeypatch.chdir(tmp_path / place)
            for here in (Path(), link):
                with pytest.raises(UserError, match="present directory"):
                    asyncio.run(export(here, None, [tmp_path / "home"], best=True))
            monkeypatch.chdir(tmp_path)
        asyncio.run(export(link, None, [tmp_path / "home"], best=True))
        assert link.is_symlink()
        assert (tmp_path / place / "config.json").exists()


def test_an_export_does_not_begin_where_it_could_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be renamed to a volume of a container."""
    keep(tmp_path / "home", 2.0)
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    with user_error(Exit.USAGE, "mount point") as caught:
        check_export(tmp_path / "volume", None, [tmp_path / "home"], best=True)
    check_export(tmp_path / "volume" / "model", None, [tmp_path / "home"], best=True)
    assert str(tmp_path / "volume" / "model") in caught.value.hint


def test_weights_that_are_kept_in_two_parts_are_joined(tmp_path: Path) -> None:
    weights = keep(tmp_path / "home", 2.0, halves=True)
    found, loss = best_evaluated([tmp_path / "home"], RUN.digest, PLAN.shapes[0])
    assert loss == 2.0
    for own, kept in zip(weights, found.weights.values(), strict=True):
        torch.testing.assert_close(kept, own, rtol=2**-14, atol=0.0)


def test_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("damaged", "whole")]
    for home, loss in zip(homes, (1.0, 2.0), strict=True):
        keep(home, loss)
    (path,) = HomePaths(homes[0]).run(RUN.digest).best.glob("*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found, loss = best_evaluated(homes, RUN.digest, PLAN.shapes[0])
    assert (loss, found.left_out) == (2.0, ())  # of a loss that nobody can use nothing is told
    with user_error(Exit.UNREACHABLE, "no weights of an evaluation"):
        best_evaluated(homes[:1], RUN.digest, PLAN.shapes[0])


def test_a_node_that_keeps_better_weights_meanwhile_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older file goes at the same moment."""
    keep(tmp_path, 2.0)
    found_before = replica_files.evaluated_among

    def found(paths: Iterable[Path]) -> dict[Path, EvaluatedCounters]:
        told = found_before(paths)
        keep(tmp_path, 1.5)
        return told

    monkeypatch.setattr(replica_files, "evaluated_among", found)
    for loss in (2.0, 1.5):
        assert best_evaluated([tmp_path], RUN.digest, PLAN.shapes[0])[1] == loss


def test_the_directory_of_a_run_stands_for_its_home(tmp_path: Path) -> None:
    keep(tmp_path / "home", 2.0)
    place = HomePaths(tmp_path / "home").run(RUN.digest)
    place.keep_run_file(RUN.text)
    assert "was 2.0000" in asyncio.run(export(tmp_path / "out", None, [place.path], best=True))


def test_a_living_swarm_is_not_asked_for_its_best(tmp_path: Path) -> None:
    for homes in ((), (tmp_path,)):
        with pytest.raises(UserError, match="from homes alone"):
            asyncio.run(export(tmp_path / "out", f"{SCHEME}...", homes, best=True))


def test_a_run_without_evaluations_has_no_best(tmp_path: Path) -> None:
    HomePaths(tmp_path / "home").run_file.parent.mkdir()
    HomePaths(tmp_path / "home").run_file.write_text(PLAIN)
    with pytest.raises(UserError, match="no evaluations"):
        asyncio.run(export(tmp_path / "out", None, [tmp_path / "home"], best=True))


def test_a_pipeline_has_no_best(tmp_path: Path) -> None:
    HomePaths(tmp_path / "home").run_file.parent.mkdir()
    text = demo_run_text(stages=2, replicas=2, steps=100, seed=0)
    HomePaths(tmp_path / "home").run_file.write_text(with_fields(text, {"data": {"evaluate_every_rounds": 4}}))
    with user_error(Exit.USAGE, "run of several stages"):
        asyncio.run(export(tmp_path / "out", None, [tmp_path / "home"], best=True))
