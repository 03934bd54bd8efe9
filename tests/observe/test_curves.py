"""Curves of a node at work: drawn by step, in threads that hold up nothing and end nothing."""

import sys
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path
from threading import Event

import pytest

from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.observe import curves
from noloco_node.observe.curves import CurveFormat, LiveCurves, read_formats, step_figures
from tests.support.fake_loggers import FakeLoggers

STARTED = events.Started(peer="12D3KooWabcdefgh", stage=0, run="r", version="1")
STEP = events.InnerStep(step=7, progress=0.1, loss=2.0, tokens=64, seconds=1.0, learning_rate=1e-3)
EVALUATED = events.Evaluated(number=1, round=3, step=7, progress=0.1, loss=1.5, margin=0.1, tokens=64, documents=2)
ROUND = OuterStepTaken(round=3, partner="p", gap=0.5, seconds=2.0)


def test_rounds_and_evaluations_stand_at_the_inner_step_before_them() -> None:
    found = list(step_figures([ROUND, STEP, STARTED, ROUND, EVALUATED]))
    assert [each.step for each in found] == [0, 7, 7, 7]
    assert found[1].figures["train/loss"] == 2.0
    assert found[2].figures["round/gap"] == 0.5
    assert found[3].figures == {"eval/loss": 1.5}


def test_a_step_of_unknown_loss_has_no_loss_in_its_curve() -> None:
    [found] = step_figures(
        [events.InnerStep(step=1, progress=0.0, loss=None, tokens=1, seconds=1.0, learning_rate=0.1)]
    )
    assert "train/loss" not in found.figures
    assert found.figures["train/learning_rate"] == 0.1


@pytest.mark.parametrize("kind", CurveFormat)
def test_a_node_at_work_is_drawn_from_its_start_on(kind: CurveFormat, tmp_path: Path, loggers: FakeLoggers) -> None:
    warned: list[str] = []
    with closing(LiveCurves([kind], "", tmp_path, warned.append)) as live:
        for event in (STEP, STARTED, STEP, EVALUATED):
            live.take(event)
    assert not warned
    assert str(loggers.told).count("train/loss") == 1
    assert str(loggers.told).count("eval/loss") == 1
    assert loggers.told[-1] == "closed"
    assert "abcdefgh" in str(loggers.opened)


def test_weights_and_biases_stays_offline_without_a_key(tmp_path: Path, loggers: FakeLoggers) -> None:
    for loggers.has_key in (False, True):
        with closing(LiveCurves([CurveFormat.WANDB], "mine", tmp_path, pytest.fail)) as live:
            live.take(STARTED)
    assert [(each["mode"], each["name"]) for each in loggers.opened] == [("offline", "mine"), (None, "mine")]


def test_a_run_that_the_program_has_open_stays_its_own(tmp_path: Path, loggers: FakeLoggers) -> None:
    open_run, found = ContextVar("open_run", default="none"), []

    def init(**_: object) -> FakeLoggers:
        found.append(open_run.get())
        return loggers

    sys.modules["trackio"].__dict__["init"] = init
    token = open_run.set("the program's")
    with closing(LiveCurves([CurveFormat.WANDB, CurveFormat.TRACKIO], "mine", tmp_path, pytest.fail)) as live:
        live.take(STARTED)
    open_run.reset(token)
    assert found == ["none"]
    assert [each["settings"]["reinit"] for each in loggers.opened] == ["create_new"]


def test_a_logger_that_fails_is_told_of_and_ends_no_other(tmp_path: Path, loggers: FakeLoggers) -> None:
    warned: list[str] = []
    sys.modules["wandb"].__dict__["init"] = lambda **_: 1 / 0
    with closing(LiveCurves([CurveFormat.WANDB, CurveFormat.TRACKIO], "mine", tmp_path, warned.append)) as live:
        live.take(STARTED)
        live.take(STEP)
    assert [line.split(" (")[0] for line in warned] == ["--log-to wandb draws nothing more"]
    assert any("train/loss" in str(each) for each in loggers.told)


def test_a_logger_that_hangs_holds_up_nothing(
    tmp_path: Path, loggers: FakeLoggers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "MOST_WAITING", 2)
    monkeypatch.setattr(curves, "PATIENCE_S", 0.01)
    hangs = Event()
    sys.modules["trackio"].__dict__["init"] = lambda **_: hangs.wait(60)
    with closing(LiveCurves([CurveFormat.TRACKIO], "mine", tmp_path, lambda _: None)) as live:
        for event in (STARTED, STEP, STEP, STEP, STEP):
            live.take(event)
    assert not hangs.is_set()
    hangs.set()


def test_what_log_to_names_is_checked_before_anything_begins(
    loggers: FakeLoggers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_formats(["wandb", "tensorboard", "wandb"]) == (CurveFormat.WANDB, CurveFormat.TENSORBOARD)
    with pytest.raises(UserError, match="does not know") as unknown:
        read_formats(["mlflow"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="not installed") as missing:
        read_formats(["trackio"])
    assert unknown.value.code == missing.value.code == Exit.USAGE
