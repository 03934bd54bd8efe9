"""What `join` adds to what a node says of itself."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.cli import join
from noloco_node.cli.join import Recorder, without_effect
from noloco_node.cli.options import JoinOptions
from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.journal import events, reader
from noloco_node.journal.writer import Journal
from noloco_node.machine.device import EnergyMeter
from noloco_node.machine.signals import Departure
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.config import DataConfig, ModelConfig, PipelineConfig, RunConfig
from noloco_node.storage.home import Home
from noloco_node.swarm.invite import SCHEME, parse
from noloco_node.web.served_views import ServedViews

ID = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


def test_the_journal_says_which_process_and_which_device(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        views, begun = (
            ServedViews(None, None, PeerHistory("", 0)),
            events.Started(peer="a", stage=0, run="r", version="1"),
        )
        Recorder(journal, journal, views, torch.device("cuda:1"), None).record(begun)
        Recorder(journal, journal, views, torch.device("cpu"), None).record(events.StateChanged(state="training"))
    started, changed = reader.read(path)
    assert (started.pid, started.device) == (os.getpid(), "cuda:1")
    assert isinstance(changed, events.StateChanged)


@asynccontextmanager
async def departs() -> AsyncIterator[Departure]:
    yield Departure(asyncio.Event())


@pytest.mark.real_time
async def test_a_node_whose_home_is_moved_ends_and_makes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"

    @asynccontextmanager
    async def moved(*_: object) -> AsyncIterator[None]:
        home.rename(tmp_path / "elsewhere")
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(join, "connected", moved)
    monkeypatch.setattr(join, "HOME_LOOK_S", 0.0)
    invite = parse(f"{SCHEME}{64 * 'a'}@/ip4/127.0.0.1/tcp/9/p2p/{ID}")
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as caught:
            await join.take_part(invite, JoinOptions(home=home, device="cpu"), departs)
    trouble = user_error_of(caught.value)
    assert trouble is not None
    assert (trouble.code, trouble.what) == (Exit.HOME_IN_USE, f"The home {home} is gone.")
    assert not home.exists()


@given(st.lists(st.booleans(), max_size=30))
def test_a_home_that_is_away_for_a_moment_ends_no_node(missed: list[bool]) -> None:
    class Flickering(Home):
        def check(self) -> None:
            if left.pop(0):
                raise UserError("", why="", hint="", code=Exit.HOME_IN_USE)

    left = [*missed, *[True] * join.HOME_LOOKS]
    lasting = "".join("x" if each else " " for each in left).index("x" * join.HOME_LOOKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "HOME_LOOK_S", 0.0)
        with pytest.raises(UserError):
            asyncio.run(join.home_watched(Flickering(Path(), -1, b"")))
    assert len(left) == len(missed) - lasting, "it ends with the first looks in a row that all miss it"


@pytest.mark.real_time
async def test_a_run_that_nobody_serves_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def closed(*_: object) -> AsyncIterator[None]:
        raise UserError("", why="", hint="", code=Exit.UNREACHABLE)
        yield

    monkeypatch.setattr(join, "connected", closed)
    invite = parse(f"{SCHEME}{64 * 'a'}@/ip4/127.0.0.1/tcp/9/p2p/{ID}")
    with pytest.raises(ExceptionGroup):
        await join.take_part(invite, JoinOptions(home=tmp_path, device="cpu"), departs)
    assert (tmp_path / "journal.jsonl").exists()
    assert not (tmp_path / "runs").exists()


def test_a_device_that_tells_of_its_energy_is_journalled_with_the_traffic(tmp_path: Path) -> None:
    read = iter([5.0, 8.0, 9.5]).__next__
    with Journal(tmp_path / "journal.jsonl") as journal:
        views, meter = ServedViews(None, None, PeerHistory("", 0)), EnergyMeter([(read, 0.0)])
        for event in (
            events.Started(peer="a", stage=0, run="r", version="1"),
            *2 * [events.Traffic(sent={}, received={})],
        ):
            Recorder(journal, journal, views, torch.device("cpu"), meter).record(event)
    told = [event.joules for event in reader.read(tmp_path / "journal.jsonl") if isinstance(event, events.Energy)]
    assert told == [3.0, 4.5]
    given = views.own.ledger.given("r")
    assert given.joules == 4


def test_an_evaluation_is_journalled_and_has_a_line_of_its_own(tmp_path: Path) -> None:
    made = events.Evaluated(number=1, round=4, step=9, progress=0.1, loss=3.0, margin=None, tokens=48, documents=2)
    journal, evaluations = tmp_path / "journal.jsonl", tmp_path / "evals.jsonl"
    views = ServedViews(None, None, PeerHistory("", 0))
    with Journal(journal) as first, Journal(evaluations) as second:
        recorder = Recorder(first, second, views, torch.device("cpu"), None)
        for event in (made, events.Noticed(what="text", text="a file is empty")):
            recorder.record(event)
    assert [type(event) for event in reader.read(journal)] == [events.Evaluated, events.Noticed]
    (line,) = reader.read(evaluations)
    assert isinstance(line, events.Evaluated)
    assert line.evaluation == made.evaluation
    assert views.own.evaluated is not None


@pytest.mark.parametrize(
    ("options", "stages", "evaluations", "said"),
    [
        (JoinOptions(), 1, 0, []),
        (JoinOptions(keep_snapshots=10), 2, 0, []),
        (JoinOptions(keep_snapshots=10), 1, 0, ["--keep-snapshots keeps nothing"]),
        (JoinOptions(sample=["Once"]), 1, 2, []),
        (JoinOptions(sample=["Once"]), 2, 2, ["--sample writes no text"]),
        (JoinOptions(sample=["Once"]), 2, 0, ["--sample writes no text"]),
        (
            JoinOptions(sample=["Once"], keep_snapshots=1),
            1,
            0,
            ["--sample writes no", "--keep-snapshots keeps nothing"],
        ),
    ],
)
def test_an_option_that_does_nothing_in_this_run_is_named(
    options: JoinOptions, stages: int, evaluations: int, said: list[str]
) -> None:
    data, pipeline = DataConfig(evaluate_every_rounds=evaluations), PipelineConfig(stages=stages)
    run = RunConfig(model=ModelConfig(), data=data, pipeline=pipeline)
    lines = list(without_effect(options, run))
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))
