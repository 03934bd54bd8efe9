"""What a swarm is doing: one model, whether records, journals or a simulation feed it, and the text made of it."""

import contextlib
import io
import os
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import sample_events
from command_line import printed
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sample_events import started, write_journal
from typer.testing import CliRunner

from gossip.interface import OuterStepTaken
from noloco_node.cli.main import app
from noloco_node.errors import UserError
from noloco_node.journal import events
from noloco_node.observe.bottleneck import (
    Bottleneck,
    Cause,
    StageView,
    all_waits,
    devices_bottleneck,
    present_bottleneck,
)
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.journal_reports import report
from noloco_node.observe.page_frame import page_frame
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.playback import FASTEST, SILENT, SLOWEST, Playback, Recording, meanings, read_journals
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import LEAST_HEIGHT, LEAST_WIDTH, LiveView, line, lines, picture
from noloco_node.observe.swarm_view import MOST_WORDS, Change, SwarmView, plain
from noloco_node.run.peer_state import Evaluation, PeerState, Wait, WaitCause
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import make_report
from noloco_node.sim.report.text import bottleneck
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.units import LARGEST

RUN = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "a test's run file")
MICROBATCH_TOKENS = RUN.run.pipeline.microbatch_size * RUN.run.pipeline.sequence_length
BEGUN = 1.7e9


def record(stage: int, number: int, **more: Any) -> PeerRecord:
    """A replica whose device works for half of the time, unless something else is said."""
    fields = {
        "peer": f"12D3KooWpeer{stage}{number}abcd",
        "stage": stage,
        "state": PeerState.TRAINING,
        "device_s": 0.1,
        "tokens_per_s": 5 * MICROBATCH_TOKENS,
        "loss": 2.0 + number,
        "gap": 0.01,
    }
    return PeerRecord(**(fields | more))


def roster(*stages: Sequence[PeerRecord], samples: int = 0, **more: Any) -> Roster:
    return Roster(stages=tuple(map(tuple, stages)), run_samples=samples, **more)


def whole(samples: int = 0) -> Roster:
    return roster([record(0, 0), record(0, 1)], [record(1, 0), record(1, 1)], samples=samples)


def drawn(view: SwarmView, width: int, height: int, footer: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(picture(view, width, height, footer))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def crowd(peers: int, stages: int, waits: Wait | None = None) -> SwarmView:
    run = RunFileText(demo_run_text(stages=4, replicas=2, steps=100, seed=0), "a test's run file")
    waiting = () if waits is None else (waits,)
    each = [[record(stage, number, waiting=waiting) for number in range(peers // stages)] for stage in range(stages)]
    return RosterObserver(run.run, run.digest).view(roster(*each, samples=10), BEGUN)


def test_a_roster_says_how_far_how_fast_and_what_holds_it_back() -> None:
    observer = RosterObserver(RUN.run, RUN.digest)
    view = observer.view(whole(samples=RUN.run.budget_samples // 4), BEGUN)
    assert view.progress == pytest.approx(0.25, abs=0.01)
    assert view.tokens_per_s == pytest.approx(2 * 5 * MICROBATCH_TOKENS)  # of the sources alone
    assert view.budget_tokens is not None
    assert view.left_s == pytest.approx((view.budget_tokens - view.tokens) / view.tokens_per_s)
    assert view.loss == pytest.approx(2.5)
    assert [stage.busy for stage in view.stages] == [pytest.approx(0.5)] * 2
    assert view.bottleneck.startswith("No stage's devices are busy for more than 50% of the time")


def test_a_source_that_cannot_save_trains_all_the_same() -> None:
    """A first look has no speed but what sources say; one that waits for the next stage does nothing."""
    for waits, share in ((Wait(WaitCause.DISK, 40.0, "No space left on device"), 1), (Wait(WaitCause.ROOM), 0)):
        assert crowd(8, 4, waits).tokens_per_s == pytest.approx(share * 2 * 5 * MICROBATCH_TOKENS)


def test_the_speed_of_a_swarm_is_measured_by_what_it_has_done() -> None:
    observer, samples = RosterObserver(RUN.run, RUN.digest), 0
    for number in range(6):
        view = observer.view(whole(samples), BEGUN + 10.0 * number)
        samples += 20
    assert view.tokens_per_s == pytest.approx(2 * RUN.run.pipeline.sequence_length)
    for number in range(6, 14):
        view = observer.view(whole(samples), BEGUN + 10.0 * number)
    assert view.tokens_per_s == 0.0
    assert view.left_s is None


def test_the_newest_evaluation_is_the_swarms_and_each_is_told_as_its_peers_claim() -> None:
    def evaluated(number: int, loss: float) -> Evaluation:
        return Evaluation(number=number, round=4 * number, loss=loss, margin=None, tokens=4096, documents=1)

    observer = RosterObserver(RUN.run, RUN.digest)
    assert observer.view(whole(), BEGUN).held_out is None
    first, second = record(0, 0, evaluation=evaluated(1, 5.5)), record(0, 1)
    observer.view(roster([first, second], [record(1, 0)]), BEGUN + 5)
    second = record(0, 1, evaluation=evaluated(2, 5.0))
    for _ in range(2):
        view = observer.view(roster([first, second], [record(1, 0)]), BEGUN + 10)
    told = [(change.name, change.text) for change in view.changes if "held-out" in change.text]
    assert told == [
        ("peer00abcd"[-8:], "held-out loss 5.5000 in round 4, over 4,096 tokens of 1 document"),
        ("peer01abcd"[-8:], "held-out loss 5.0000 in round 8, over 4,096 tokens of 1 document"),
    ]
    assert view.held_out == 5.0
    assert [peer.held_out for peer in view.peers] == [5.5, 5.0, None]
    assert [moment.held_out for moment in view.course] == [None, 5.5, 5.0, 5.0]
    assert page_frame(view).course["held_out"] == [None, 5.5, 5.0, 5.0]
    assert any("held-out 5.000" in row for row in drawn(view, 100, 30))
    assert "held-out loss 5.000" in line(view)
    # A record that was missing for a while has no news.
    observer.view(roster([second], [record(1, 0)]), BEGUN + 15)
    view = observer.view(roster([first, second], [record(1, 0)]), BEGUN + 20)
    assert view.held_out == 5.0
    assert len([change for change in view.changes if "held-out" in change.text]) == 2
    # A reader that comes late shows the newest, and does not tell as news what it is not.
    late = RosterObserver(RUN.run, RUN.digest).view(roster([first, second], [record(1, 0)]), BEGUN + 10)
    assert (late.held_out, late.changes) == (5.0, ())


def test_an_evaluation_in_a_journal_is_that_of_a_record() -> None:
    observer = JournalObserver("run", [PeerHistory("a", 0), PeerHistory("b", 0)], None)
    for history, at, loss in ((observer.histories[0], 20.0, 4.0), (observer.histories[1], 10.0, 3.0)):
        event = events.Evaluated(
            at=at, number=1, round=4, step=9, progress=0.1, loss=loss, margin=0.25, tokens=48, documents=6
        )
        observer.take(history, event)
    view = observer.view(30.0)
    assert view.held_out == 4.0
    assert [peer.held_out for peer in view.peers] == [4.0, 3.0]
    words = "in round 4, over 48 tokens of 6 documents"
    told = [change.text for change in view.changes]
    assert told == [f"held-out loss 3.0000 ± 0.2500 {words}", f"held-out loss 4.0000 ± 0.2500 {words}"]


def test_arrivals_and_departures_are_told_and_silence_of_our_own_is_none() -> None:
    observer = RosterObserver(RUN.run, RUN.digest)
    assert observer.view(whole(), BEGUN).changes == ()
    gone = roster([record(0, 0), record(0, 1)], [record(1, 0)])
    blind = msgspec.structs.replace(roster([], []), old_since_s=1.0, read_at=50.0)
    view = observer.view(blind, BEGUN + 5)
    assert view.changes == ()
    assert view.trouble == "no news of anybody for 49 s: what is shown is old"
    assert [change.text for change in observer.view(gone, BEGUN + 10).changes] == ["is gone from stage 1"]
    moved = roster([record(0, 0)], [record(1, 0), record(1, 9, peer=record(0, 1).peer)])
    assert observer.view(moved, BEGUN + 20).changes[-1].text == "moved from stage 0 to stage 1, training"
    back = roster([record(0, 0)], [record(1, 0), record(1, 9, state=PeerState.CATCHING_UP)])
    texts = [change.text for change in observer.view(back, BEGUN + 30).changes[-2:]]
    assert sorted(texts) == ["came to stage 1, catching up", "is gone from stage 1"]


@pytest.mark.parametrize(
    ("waiting", "first", "since", "line"),
    [
        ((), None, None, ""),
        ((Wait(WaitCause.MICROBATCHES, 7.2),), "microbatches from stage 0", 7.2, "microbatches from stage 0, for 7 s"),
        (
            (Wait(WaitCause.ANSWER, 9.0, "all 2"), Wait(WaitCause.DISK, 3.0, "full")),
            "an answer of the next stage: all 2",
            9.0,
            "an answer of the next stage: all 2, for 9 s; its disk, nothing saved: full, for 3 s",
        ),
        (
            (Wait(WaitCause.STATE),),
            "a replica of stage 1 that gives its state",
            None,
            "a replica of stage 1 that gives its state",
        ),
        ((Wait(WaitCause.OTHER, detail="x, for 99 s"),), "x, for 99 s", None, "x, for 99 s"),
    ],
)
def test_what_a_peer_waits_for_is_told_in_words_and_since_when(
    waiting: tuple[Wait, ...], first: str | None, since: float | None, line: str
) -> None:
    view = RosterObserver(RUN.run, RUN.digest).view(roster([record(0, 0)], [record(1, 0, waiting=waiting)]), BEGUN)
    peer = view.peers[-1]
    assert (peer.waits, peer.cause) == (first, waiting[0].cause if waiting else None)
    assert peer.since == (None if since is None else BEGUN - since)
    assert all_waits(waiting, 1) == line


def test_peers_that_wait_for_the_same_are_counted_together_whatever_the_detail() -> None:
    waits = [Wait(WaitCause.REPLICA), Wait(WaitCause.ANSWER, detail="all its 2"), Wait(WaitCause.ROOM, detail="1 of 2")]
    above = [record(0, number, waiting=(wait,)) for number, wait in enumerate(waits)]
    stage = RosterObserver(RUN.run, RUN.digest).view(roster(above, [record(1, 0)]), BEGUN).stages[0]
    assert (stage.cause, stage.waiting) == (Cause.ROUTE, 2)
    assert stage.waits == "a replica of the next stage to appear in the roster"


@pytest.mark.parametrize(
    ("seen", "speed", "sentence", "limit"),
    [
        ([(0, 0), (0, 0)], 0.0, "Nothing is trained: nobody is there.", None),
        ([(1, 1), (0, 0)], 9.0, "Nobody serves stage 1: no microbatch", 1),
        ([(1, 1), (0, 0), (0, 0)], 9.0, "Nobody serves stages 1, 2: no", 1),
        ([(1, 1), (2, 0)], 9.0, "Stage 1 is the bottleneck: none of its 2 replicas trains.", 1),
        (
            [(2, 2, 0.1, "room at the next stage", 1, Cause.ROOM), (2, 2, 0.2)],
            0.0,
            "Nothing is trained: stage 0 waits for room",
            0,
        ),
        (
            [(2, 2, 0.1, "room at the next stage", 1, Cause.ROOM), (2, 2, 0.1)],
            9.0,
            "Stage 1 is the bottleneck: its replicas r",
            1,
        ),
        ([(2, 2, 0.1, "an answer", 2, Cause.ROUTE), (2, 2)], 0.0, "Stage 1 is out of reach: 2 of 2", 1),
        ([(2, 2, 0.3), (2, 2, 0.9)], 9.0, "Stage 1 is the bottleneck: its devices are busy fo", 1),
        (
            [(2, 2, 0.9), (2, 2, 0.9)],
            9.0,
            "The devices are the limit, of all stages alike: busy for 90% of the time",
            None,
        ),
        (
            [(2, 2, 1.0), (2, 2, 1.0)],
            9.0,
            "The devices are the limit, of all stages alike: busy for all of the time.",
            None,
        ),
        ([(2, 2, 0.3), (2, 2, 0.3)], 9.0, "No stage's devices are busy for more than 30%", None),
        ([(2, 2), (2, 2)], 9.0, "Nobody has said yet", None),
        ([(2, 2, 0.3)], 9.0, "The devices are busy for 30% of the time, and there is no other stage", None),
    ],
)
def test_the_bottleneck_of_this_moment(seen: list[Any], speed: float, sentence: str, limit: int | None) -> None:
    fields = ("replicas", "training", "busy", "waits", "waiting", "cause")
    stages = [StageView(stage=number, **dict(zip(fields, given, strict=False))) for number, given in enumerate(seen)]
    found = present_bottleneck(stages, speed, is_over=False)
    assert (found.sentence.startswith(sentence), found.stage) == (True, limit), found
    over = present_bottleneck(stages, speed, is_over=True)
    assert over == Bottleneck("The run is over: its tokens are used up.")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_a_run_that_is_over_and_one_under_way_are_judged_alike(work: list[float]) -> None:
    shares = dict(enumerate(work))
    past, present = (devices_bottleneck(shares, is_over=over) for over in (True, False))
    assert (past is None) == (present is None)
    if past is not None and present is not None:
        assert past.sentence.replace("were", "are").replace("the training", "the time") == present.sentence
        assert past.stage == present.stage


class _Witness(Watcher):
    """What watches a simulation as a person would: by records, and by journals."""

    def __init__(self, world: World) -> None:
        self._world, self._observer = world, RosterObserver(world.setting.run, "")
        self.journals: dict[str, list[events.Event]] = defaultdict(list)
        self.views: list[SwarmView] = []

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        at = BEGUN + self._world.now_s
        self.journals[peer.name].append(events.stamped(event, at))

    def look(self) -> None:
        replicas = [peer.replica for peer in self._world.peers.values() if peer.running and peer.replica is not None]
        records = [replica.describe(PeerState.TRAINING) for replica in replicas]
        stages = [[record for record in records if record.stage == number] for number in range(3)]
        done = sum(record.inner_steps for record in stages[0])
        self.views.append(self._observer.view(roster(*stages, samples=done), BEGUN + self._world.now_s))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_records_journals_and_the_simulator_name_the_same_bottleneck(slow: int) -> None:
    text = "[swarm]\nstages = 3\nreplicas = 3\nrounds = 3\n" + "".join(
        f"[[fault]]\nkind = 'slow'\nat_s = 0.0\npeer = 's{slow}r{replica}'\nfactor = 4.0\n" for replica in range(3)
    )
    setting = build_setup(decode_scenario(text, "a test"))
    seen: list[Any] = []

    def watch(world: World) -> list[Watcher]:
        seen.extend([EventCollector(world), _Witness(world)])
        return list(seen)

    report = simulate(setting, watch, lambda world: make_report(world, seen[0]))
    sentence = f"Stage {slow} is the bottleneck"
    assert bottleneck(report).startswith(sentence)
    recording = Recording(seen[1].journals, "simulated", None)
    middle = recording.at((recording.begun + recording.ended) / 2)
    assert middle.bottleneck.startswith(sentence)
    assert middle.progress > 0.0
    views = seen[1].views
    assert views[len(views) // 2].bottleneck.startswith(sentence)


inner = partial(sample_events.inner, seconds=1.0, device_s=0.5)


def begun(peer: str, stage: int, at: float = BEGUN) -> list[events.Event]:
    return [started(peer, stage, at), events.StateChanged(at=at, state=PeerState.TRAINING)]


def journals() -> dict[str, list[events.Event]]:
    """Two peers; the second dies half way."""
    return {
        f"home{stage}": [*begun(f"12D3peer{stage}", stage), *(inner(step, BEGUN + step) for step in range(1, steps))]
        for stage, steps in ((0, 100), (1, 50))
    }


def test_a_recording_goes_forward_and_back_and_is_the_same_again() -> None:
    recording = Recording(journals(), "a run", None)
    first = recording.at(BEGUN + 30)
    assert (first.tokens, len(first.peers)) == (30 * 4096, 2)
    end = recording.at(recording.ended + 1000)
    assert [peer.state for peer in end.peers] == ["training", "gone"]
    assert [peer.waits for peer in end.peers] == [None, SILENT]
    assert end.bottleneck.startswith("Nobody serves stage 1")
    assert any(change.text == SILENT and change.at == BEGUN + 49 for change in end.changes)
    assert recording.at(BEGUN + 30) == first
    assert recording.at(0.0).at == BEGUN


def test_a_peer_that_is_started_again_is_not_at_work_before_its_journal_says_so() -> None:
    history = PeerHistory("1a", 1)
    observer = JournalObserver("a demo", [history], None)
    for event in journals()["home1"]:
        observer.take(history, event)

    def state() -> str:
        (peer,) = observer.view(BEGUN + 60.0).peers
        return peer.state

    assert state() == "training"
    observer.note(history, "was killed", BEGUN + 51.0)
    assert state() == "gone"
    observer.note_restart(history, "is started again", BEGUN + 56.0)
    assert state() == "joining"
    for event in begun("12D3peer1", 1, BEGUN + 59.0):
        observer.take(history, event)
    assert state() == "training"


def test_of_a_stage_whose_journals_are_elsewhere_nobody_says_that_it_was_empty() -> None:
    recording = Recording({"home0": journals()["home0"]}, "a run", decode_run(RUN.text, "a test"))
    view = recording.at(BEGUN + 30)
    assert view.bottleneck.startswith("No journal of stage 1 is here")
    assert view.limit is None


def test_who_comes_back_after_a_silence_is_there_again() -> None:
    found = journals()
    again = BEGUN + 90
    found["home1"] += [*begun("12D3peer1", 1, again), inner(50, again + 1)]
    recording = Recording(found, "a run", None)
    assert [peer.state for peer in recording.at(again - 1).peers] == ["training", "gone"]
    end = recording.at(recording.ended)
    assert [peer.state for peer in end.peers] == ["training", "training"]
    told = [change.text for change in end.changes if change.name == "home1"]
    assert told == ["began at stage 1", SILENT, "began at stage 1"]
    assert Recording(found, "a run", None).at(recording.ended).changes == end.changes  # however far one jumps


def test_a_peer_that_was_asked_to_leave_is_gone_and_the_run_is_not_over() -> None:
    found = journals()
    for why, state, words in (("asked to leave", "gone", "asked to leave"), (events.RUN_OVER, "finished", None)):
        ended = events.Finished(at=BEGUN + 100, why=why, step=99, round=0, progress=0.5)
        view = Recording({"home0": [*found["home0"], ended]}, "a run", None).at(BEGUN + 101)
        assert [(peer.state, peer.waits) for peer in view.peers] == [(state, words)]
        assert ("is over" in view.bottleneck) == (state == "finished")


LOSSES = (3.8, 3.6, 3.1, 3.1, 3.2, 2.9)
"""A source that starts again from its checkpoint, three inner steps apart, where the other one has 2.7 (simulated)."""


def test_a_source_that_comes_back_makes_no_spike_in_the_loss_of_records() -> None:
    observer = RosterObserver(RUN.run, RUN.digest)

    def loss(*records: PeerRecord) -> float | None:
        return observer.view(roster(records, [record(1, 0)]), BEGUN).loss

    stays = record(0, 0, loss=2.7, inner_steps=100)
    assert loss(stays, record(0, 1, loss=3.8, inner_steps=28)) == pytest.approx(3.25)  # nobody knows who is new
    assert loss(stays, record(0, 1, state=PeerState.JOINING, loss=None)) == 2.7
    for number, old in enumerate(LOSSES):
        assert loss(stays, record(0, 1, loss=old, inner_steps=20 + 3 * number)) == 2.7
    assert loss(stays, record(0, 1, loss=2.8, inner_steps=36)) == pytest.approx(2.75)
    assert loss(record(0, 2, loss=9.0, inner_steps=5)) == 9.0  # there is no other


def test_a_source_that_comes_back_makes_no_spike_in_the_loss_of_journals() -> None:
    def steps(first: int, at: float, *losses: float) -> list[events.Event]:
        return [inner(first + number, at + number, loss=loss) for number, loss in enumerate(losses)]

    stays = [*begun("12D3stays", 0), *steps(1, BEGUN, *(max(2.7, 6.0 - 0.1 * step) for step in range(120)))]
    leaves = [*begun("12D3leaves", 0), *steps(1, BEGUN, *(6.0 - 0.1 * step for step in range(20)))]
    back = [*begun("12D3leaves", 0, BEGUN + 80), *steps(20, BEGUN + 80, *(loss for loss in LOSSES for _ in range(3)))]
    recording = Recording({"stays": stays, "leaves": [*leaves, *back]}, "a run", None)
    seen = [recording.at(BEGUN + second).loss for second in range(60, 120)]
    assert max(loss or 0.0 for loss in seen) <= 2.95
    returned = next(peer for peer in recording.at(BEGUN + 80.5).peers if peer.name == "leaves")
    assert returned.loss == 3.8  # of this session alone


def test_records_and_journals_name_what_they_count_as_busy() -> None:
    journalled = Recording(journals(), "a run", None).at(BEGUN + 30)
    assert (crowd(4, 4).busy_name, journalled.busy_name) == ("at work", "computing")
    for view in (crowd(4, 4), journalled):
        assert any(view.busy_name in text for text in drawn(view, 120, 40))


def test_only_the_last_run_of_a_home_is_played(tmp_path: Path) -> None:
    first = journals()["home0"]
    write_journal(tmp_path, [*first, started("12D3peer1", 0, BEGUN + 500, run="s"), inner(1, BEGUN + 501)])
    recording = read_journals([tmp_path])
    assert (recording.begun, recording.ended) == (BEGUN + 500, BEGUN + 501)
    assert recording.at(recording.ended).tokens == 4096
    told = printed("watch", "--journal", tmp_path, "--once", "--json")
    assert msgspec.json.decode(told)["run_id"] == recording.at(recording.ended).run_id == "s"


def test_a_journal_that_was_cut_in_the_middle_is_played_to_there(tmp_path: Path) -> None:
    for name, taken in journals().items():
        write_journal(tmp_path / name, taken)
    torn = tmp_path / "home1" / "journal.jsonl"
    torn.write_bytes(torn.read_bytes()[:-40] + b"\x00\xff\n{}\n")
    recording = read_journals([tmp_path])
    assert recording.at(recording.ended).tokens == 99 * 4096
    assert "home1 at stage 1, waiting: its journal falls silent" in printed("watch", "--journal", tmp_path, "--once")
    told = printed("watch", "--journal", tmp_path / "home0", "--json").splitlines()
    assert [msgspec.json.decode(each)["tokens"] for each in told][-1] == 99 * 4096
    with pytest.raises(UserError, match="no journal"):
        read_journals([tmp_path / "home0" / "none"])
    (tmp_path / "empty.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match="nothing to play"):
        read_journals([tmp_path / "empty.jsonl"])
    assert CliRunner().invoke(app, ["watch", "one", "two"]).exit_code == 2


def test_the_events_of_a_simulation_are_played_with_its_faults(tmp_path: Path) -> None:
    halves = [["s0r0", "s1r0"], ["s0r1", "s1r1"]]
    (tmp_path / "cut.toml").write_text(
        "[swarm]\nstages = 2\nreplicas = 2\nrounds = 8\nrefresh_s = 2.0\n[devices]\nforward_s = 0.1\n"
        f"[[fault]]\nkind = 'partition'\nat_s = 20.0\nfor_s = 30.0\ngroups = {halves}\n"
    )
    out = tmp_path / "simulated"
    printed("simulate", tmp_path / "cut.toml", "--trace", "--out", out)
    with (out / "events.jsonl").open("ab") as torn:
        torn.write(b'{"node":"s0r0","event":"inner_st')
    recording = read_journals([out])
    sides = {peer: number for number, half in enumerate(halves) for peer in half}
    seen = {at: {route.origin: set[int]() for route in recording.at(at).routes} for at in (19.0, 49.0)}
    for at, reached in seen.items():
        names = {peer.peer: peer.name for peer in recording.at(at).peers}
        for route in recording.at(at).routes:
            reached[route.origin].add(sides[names.get(route.target, route.target)])
    assert [sorted(map(len, reached.values())) for reached in seen.values()] == [[2, 2], [1, 1]]
    assert [change.name for change in recording.at(30.0).changes if "partition" in change.text] == ["fault:"]
    assert recording.at(10.0).changes[-1].name != "fault:"
    said = printed("watch", "--journal", out / "events.jsonl")
    assert any(line.startswith("0:20  fault: partition") for line in said.splitlines())


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 10), (200, 70)])
@pytest.mark.parametrize("view", [crowd(4, 4), crowd(100, 4), crowd(400, 4, Wait(WaitCause.ROOM, 9.0, "all"))])
def test_a_picture_fits_and_says_first_what_counts(view: SwarmView, size: tuple[int, int]) -> None:
    text = drawn(view, *size)
    assert len(text) <= size[1]
    assert max(map(len, text)) <= size[0]
    assert "tokens/s" in text[1]
    assert view.bottleneck.split()[0] in text[3]


@given(width=st.integers(LEAST_WIDTH, 140), peers=st.sampled_from([1, 2, 16]))
def test_no_figure_of_a_narrow_picture_is_cut(width: int, peers: int) -> None:
    text = drawn(crowd(peers * 4, 4), width, 60)
    headings = [number for number, line in enumerate(text) if "stage" in line and "tokens/s" in line]
    assert len(headings) == 2
    for number in headings:
        assert "…" not in text[number]
        titles, figures = text[number].split(), text[number + 1].replace(",", "").split()
        assert "…" not in figures[-1]
        assert float(figures[-1]) > 0.0
        assert {"stage", "tokens/s"} < set(titles)


@settings(max_examples=60)
@given(
    stages=st.integers(1, 6),
    peers=st.integers(0, 30),
    losses=st.lists(st.floats(0.0, LARGEST), min_size=2, max_size=4),
    size=st.tuples(st.integers(LEAST_WIDTH, 140), st.integers(LEAST_HEIGHT, 50)),
    footer=st.sampled_from(["", "a footer"]),
)
def test_a_picture_fits_whatever_peers_claim(
    stages: int, peers: int, losses: list[float], size: tuple[int, int], footer: str
) -> None:
    run = RunFileText(demo_run_text(stages=stages, replicas=2, steps=100, seed=0), "a test's run file").run
    observer = RosterObserver(run, "")
    for number, loss in enumerate(losses):
        each = [[record(0, peer, loss=loss, gap=loss) for peer in range(peers)], *([[]] * (stages - 1))]
        view = observer.view(roster(*each, samples=10 * number), BEGUN + number)
    text = drawn(view, *size, footer)
    assert len(text) <= size[1]
    assert max(map(len, text)) <= size[0]
    assert text[-1].startswith(footer)


@settings(max_examples=30)
@given(st.text(max_size=400), st.text(max_size=400))
def test_what_strangers_say_is_neither_markup_nor_control(name: str, waits: str) -> None:
    marked = Wait(WaitCause.OTHER, 1.0, f"room at the next stage[red]\x1b[2J\u202e{waits}")
    for below in ([], [record(1, 0)]):
        view = RosterObserver(RUN.run, RUN.digest).view(
            roster([record(0, 0, waiting=(marked,), peer=f"x[/]{name}")], below), BEGUN
        )
        for text in [*drawn(view, 100, 30), *lines(view), line(view)]:
            assert text.isprintable()
        assert "[red]" in "".join(lines(view))
    assert len(plain(waits)) <= MOST_WORDS


@settings(max_examples=60)
@given(data=st.data())
def test_a_journal_of_any_numbers_can_be_shown(data: st.DataObject) -> None:
    """It may be a stranger's, or damaged."""
    told: list[events.Event] = [
        started("a", 0, at=BEGUN),
        *(inner(step, BEGUN + step) for step in range(4)),
        events.Energy(at=BEGUN + 4, joules=1.0),
        OuterStepTaken(round=1, gap=0.1, seconds=1.0, at=BEGUN + 5),
        events.Moved(origin=0, target=1, why="", at=BEGUN + 6),
        events.Finished(at=BEGUN + 7, why="", step=2, round=1, progress=0.5),
    ]
    written = [events.fields_of(event) for event in told]
    number = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.just(1e-320)
    for fields in data.draw(st.lists(st.sampled_from(written), max_size=3)):
        name = data.draw(st.sampled_from([name for name, each in fields.items() if isinstance(each, int | float)]))
        fields[name] = data.draw(number)
    with TemporaryDirectory() as home:
        (Path(home) / "journal.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, written)))
        recording = read_journals([Path(home)])
        with contextlib.suppress(UserError):  # of a beginning that cannot be used
            report(Path(home), as_json=False)
    for at in (recording.begun, recording.ended):
        view = recording.at(at)
        msgspec.json.encode(page_frame(view))
        assert len(drawn(view, 80, 40)) <= 40


@given(st.lists(st.sampled_from(["forward", "back", "faster", "slower", "pause", "begin", "end"])), st.floats(0, 100))
def test_a_playback_never_leaves_its_recording(keys: list[str], seconds: float) -> None:
    playback = Playback(BEGUN, BEGUN + 3600.0)
    assert playback.speed == 64.0
    for key in keys:
        playback.press(key)
        playback.advance(seconds)
        assert BEGUN <= playback.now <= BEGUN + 3600.0
        assert SLOWEST <= playback.speed <= FASTEST
        assert playback.footer().isprintable()


def test_keys_are_told_apart_in_what_a_terminal_sends() -> None:
    assert meanings("\x1b[C\x1b[D q+") == ["forward", "back", "pause", "quit", "faster"]
    assert meanings("\x1b[99~\x1bxyz") == []


def test_a_view_without_a_terminal_prints_changes_once_and_lines_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=300)
    observer = JournalObserver("a run", [PeerHistory("0a", 0)], decode_run(RUN.text, "a test"))
    with LiveView(console, whole_screen=True) as live:
        for number in range(8):
            observer.take(observer.histories[0], inner(number, BEGUN + number))
            if number == 3:
                observer.note(observer.histories[0], "killed by SIGKILL", BEGUN + 1.5)
            live.show(observer.view(BEGUN + number))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue().splitlines()
    assert sum("killed by SIGKILL" in text for text in printed) == 1
    assert len(printed) == 3


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True)
    with LiveView(console, whole_screen=True) as live:
        live.show(msgspec.structs.replace(crowd(4, 4), changes=(Change(at=BEGUN, name="a :smile:", text="b"),)))
    assert isinstance(console.file, io.StringIO)
    change, line = console.file.getvalue().splitlines()
    assert change.endswith("  a :smile: b")  # as its peer calls itself
    assert "tokens/s" in line


def test_a_reader_that_has_read_enough_is_told_so_by_the_pipe() -> None:
    """What ends the command is no error then (`noloco_node.cli.main`)."""
    read, write = os.pipe()
    os.close(read)
    console = Console(file=os.fdopen(write, "w"))
    with pytest.raises(BrokenPipeError), LiveView(console, whole_screen=True) as live:
        live.show(crowd(4, 4))
    with contextlib.suppress(BrokenPipeError):
        console.file.close()


@pytest.mark.parametrize("whole_screen", [False, True])
def test_a_live_view_restores_no_terminal_that_was_closed(whole_screen: bool) -> None:
    terminal, screen = os.openpty()
    console = Console(file=os.fdopen(screen, "w"), force_terminal=True)
    with LiveView(console, whole_screen=whole_screen) as live:
        live.show(crowd(1, 1))
        os.close(terminal)
    with contextlib.suppress(OSError):
        console.file.close()


@pytest.mark.parametrize("whole_screen", [False, True])
def test_a_live_view_gives_the_terminal_back(whole_screen: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    live = LiveView(console, whole_screen=whole_screen, address="http://127.0.0.1:1/")
    with contextlib.suppress(KeyboardInterrupt), live:
        live.show(crowd(4, 2), "keys")
        raise KeyboardInterrupt
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.index("in a browser: http://127.0.0.1:1/") < shown.index("keys")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is visible again
    if whole_screen:
        assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")  # and the other screen is left
