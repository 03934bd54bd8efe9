"""The demo: what it counts, what it shows, where it writes, and that its children never outlive it."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import msgspec
import pytest
from command_line import refused
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from rich.console import Console
from sample_events import history, inner, started
from typer.testing import CliRunner
from user_errors import user_error

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.charts import spread
from noloco_node.cli import local_swarm
from noloco_node.cli.main import app
from noloco_node.demo import run
from noloco_node.demo.child_processes import Child, Children, KillPolicy, bound_sockets, tied_command
from noloco_node.demo.loss_plot import picture
from noloco_node.demo.run import SLOWDOWN, DemoConfig, claim_output_dir, demonstrate, fitting_replicas, mark
from noloco_node.demo.summary import ModelScores, Outage, busy, lines, summarise
from noloco_node.demo.swarm_processes import EFFICIENCY, PROMPT, affordable_steps, evaluation
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine import memory
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.swarm.invite import SCHEME

pytestmark = pytest.mark.real_time
SCORES = ModelScores(
    merged=2.0, replicas={"0a": 2.2, "0b": 2.4}, unigram=3.2, tokens=65536, prompt="def ", sample="main():"
)


def outer(number: int, partner: str | None, gap: float | None) -> OuterStepTaken:
    return OuterStepTaken(
        at=1.0, round=number, partner=partner, gap=gap, staleness=2, bytes_sent=100, bytes_received=90, seconds=0.1
    )


def of(name: str, stage: int, taken: Sequence[events.Event], slowdown: float = 1.0) -> PeerHistory:
    return history(name, stage, [started(f"Qm{name}", stage, parameters=5), *taken], slowdown)


def swarm() -> list[PeerHistory]:
    """Two stages of two replicas; source 0a is the first to begin and 0b the last to end."""
    steps = [inner(number, 100.5 + 0.5 * number) for number in range(10)]
    return [
        of(
            "0a",
            0,
            [
                *steps,
                outer(1, "Qm0b", 0.1),
                RoundSkipped(at=1.0, round=2, in_a_row=1),
                outer(2, None, None),
                outer(3, "Qm0b", 0.02),
                events.Hops(counts={"Qm1a": 5, "Qm1b": 5}),
                events.Hops(counts={"Qm1a": 30, "Qm1b": 10}),
                events.Traffic(sent={"microbatch": 1000, "gossip": 20}, received={"microbatch": 900}),
                events.RefusedMicrobatch(peer="Qm1a", reason="full", count=3),
                events.RefusedMicrobatch(peer="Qm9", reason="full", here=True),
                events.Lost(peer="Qm1b", what="microbatch", why="silent"),
                events.PeerViolation(peer="Qm1b", topic="gossip", why="NaN"),
            ],
        ),
        of("0b", 0, [*steps[1:6], inner(6, 110.0), events.Hops(counts={"Qm1b": 7, "Qmgone": 3})]),
        of(
            "1a",
            1,
            [
                *steps,
                events.Traffic(sent={"microbatch": 10}, received={}),
                events.Finished(why="over", step=9, round=3, progress=1),
            ],
        ),
        of("1b", 1, []),
    ]


def test_a_summary_counts_what_the_journals_say() -> None:
    summary = summarise(swarm())
    assert summary.tokens == 16 * 4096
    assert summary.seconds == pytest.approx(110.0 - 100.0)  # the first step began half a second before it ended
    assert summary.tokens_per_s == pytest.approx(16 * 4096 / 10)
    first = summary.peers[0]
    assert (first.met, first.solo, first.skipped, first.mean_staleness) == (2, 1, 1, 2.0)
    assert (first.gap_first, first.gap_last) == (0.1, 0.02)
    assert (first.refused, first.lost, first.violations) == ({"full": 3}, {"microbatch": 1}, 1)
    assert {name: both.sent for name, both in summary.bytes.items()} == {"gossip": 20, "microbatch": 1010}
    assert [peer.finished for peer in summary.peers] == [None, None, "over", None]


def test_shares_of_hops_are_of_their_sender() -> None:
    hops = {(hop.sender, hop.receiver): hop for hop in summarise(swarm()).hops}
    assert hops["0a", "1a"].share == 0.75
    assert hops["0a", "1b"].share == 0.25
    assert hops["0b", "1a"].microbatches == 0  # a route that nothing took is a route all the same
    assert hops["0b", "Qmgone"].share == pytest.approx(0.3)
    assert {hop.even for hop in hops.values()} == {0.5}


def test_a_summary_counts_all_lives_of_a_peer() -> None:
    """A new process counts from zero; a move to another stage begins new totals of next hops alone."""
    whole = [events.Hops(counts={"Qm1a": 30, "Qm1b": 10}), events.Traffic(sent={"gossip": 70}, received={})]
    more = [events.Hops(counts={"Qm1b": 40}), events.Traffic(sent={"gossip": 90}, received={"gossip": 5})]
    moved = events.Moved(origin=0, target=0, why="w")
    for again, sent in ((started("Qm0a", 0, pid=2), 70 + 90), (started("Qm0a", 0), 90)):
        lived = of("0a", 0, [*whole, moved, again, *more])
        summary = summarise([lived, of("1a", 1, []), of("1b", 1, [])])
        assert {(hop.receiver, hop.microbatches, hop.share) for hop in summary.hops} == {
            ("1a", 30, 3 / 8),
            ("1b", 50, 5 / 8),
        }
        assert (summary.bytes["gossip"].sent, summary.bytes["gossip"].received) == (sent, 5)


def test_a_summary_is_readable_with_and_without_a_verdict() -> None:
    text = "\n".join(lines(summarise(swarm()), SCORES))
    assert "merged model           2.0000         7.39   0.62 of the byte unigram entropy" in text
    assert "each in its stage's place: mean of 2, 2.200 to 2.400" in text
    assert "stage 0: 0a 62.5%, 0b 37.5% (even: 50.0%)" in text  # by tokens drawn: ten steps, six steps
    assert "stage 1: 1a 63.8%, 1b 36.2% (even: 50.0%)" in text  # by microbatches that came back: 30 and 17
    assert "3 refused (full), 1 microbatch lost, 1 violations" in text
    assert "Validation" not in "\n".join(lines(summarise(swarm()), None))
    assert lines(summarise([]), None)  # nobody came, and nothing divides by zero


def test_no_gap_is_explained() -> None:
    remark = "hold the same slow weights"
    twins = [of("0a", 0, [inner(1, 101.0), outer(1, "Qm0b", 0.0)]), of("0b", 0, [inner(1, 101.0)])]
    assert remark in "\n".join(lines(summarise(twins), None))
    assert remark not in "\n".join(lines(summarise(swarm()), None))
    missed = of("1a", 1, [outer(1, None, None)])
    assert remark not in "\n".join(lines(summarise([*twins, missed]), None))
    assert picture("A swarm", twins, summarise(twins), None).startswith(b"\x89PNG")


def test_busy_is_the_share_of_the_time_between_steps_for_which_the_device_worked() -> None:
    peer = of("0a", 0, [inner(1, 101.0, device_s=0.5)])
    assert peer.busy is None  # the first step of a life has waited for the others
    for event in (inner(2, 101.5, device_s=0.4), inner(3, 102.0, device_s=0.3), started("Qm0a", 0)):
        peer.take(event)
    peer.take(inner(3, 300.0, device_s=0.5))
    peer.take(inner(4, 300.5, device_s=0.2))
    assert peer.busy == pytest.approx((0.4 + 0.3 + 0.2) / 1.5)
    assert of("0a", 0, [inner(step, 101.0 + step) for step in range(9)]).busy is None  # an older journal


def test_the_summary_tells_slow_and_fast_replicas_apart() -> None:
    def at_work(name: str, device_s: float, slowdown: float) -> PeerHistory:
        return of(name, 1, [inner(step, 100.0 + step, device_s=device_s) for step in range(3)], slowdown)

    summary = summarise([at_work("1a", 0.3, 1.0), at_work("1b", 0.4, 1.0), at_work("1c", 0.5, 4.0)])
    assert [busy(summary, slowed=slowed) for slowed in (False, True)] == [pytest.approx(0.7), pytest.approx(1.0)]
    text = lines(summary, None)
    assert "  1a          60.0%        2" in text
    assert "  1c         100.0%        2   at 1/4 of its speed" in text
    assert "  fast replicas 70.0%, slow ones 100.0%" in text
    even = summarise([at_work("1a", 0.3, 1.0), at_work("1b", 0.4, 1.0)])
    assert busy(even, slowed=True) is None
    assert "  mean 70.0%" in lines(even, None)
    assert "busy" not in "\n".join(lines(summarise(swarm()), None))


def test_an_outage_is_told_with_the_speeds_before_meanwhile_and_after() -> None:
    """The first replica of the last stage falls after 3 of 10 steps, and works again 6 s later."""
    source, killed = PeerHistory("0a", 0), PeerHistory("1a", 1)
    outage, told = Outage("1a"), list[str]()
    assert outage.due(0.9, [source, killed], 100.0) is None  # it does not work yet
    assert outage.summary([source, killed]) is None
    for second in range(20):
        now, progress = 100.0 + second, second / 20
        source.take(inner(second, now, progress=progress))
        if killed.gone is None and not 6 <= second < 12:
            killed.take(inner(second, now))
        due = outage.due(progress, [source, killed], now)
        if due is not None:
            told.append(f"{due} at {second}")
        if due == "kill":
            killed.gone = "killed"
        elif due == "restart":
            killed.start_life()  # its first step is a second away
        if second == 11:
            missing = outage.summary([source, killed])
    assert told == ["kill at 6", "restart at 11"]
    found = outage.summary([source, killed])
    assert (found.progress, found.away_s) == (pytest.approx(0.3), pytest.approx(6.0))
    assert found.tokens_per_s_away == found.tokens_per_s_after == pytest.approx(4096.0)
    assert "1a was killed after 30% of the run, and at work again 6 s later" in lines(summarise([source], found), None)
    assert missing.away_s is None
    summary = summarise([source, killed], missing)
    assert picture("A swarm", [source, killed], summary, None).startswith(b"\x89PNG")
    assert "was not back before the end" in "\n".join(lines(summary, None))


def test_the_peer_of_the_outage_is_never_the_only_one_of_its_stage() -> None:
    assert DemoConfig(replicas=1, outage=True).killed_peer is None
    assert DemoConfig(stages=3, replicas=2, outage=True).killed_peer == "2a"


def test_replicas_are_as_many_as_memory_allows() -> None:
    assert [fitting_replicas(2, gib * 2**30) for gib in (1, 3, 4, 64)] == [2, 2, 3, 3]


@pytest.mark.parametrize(("allowed", "replicas"), [(None, 3), (2 * 2**30, 2)])
def test_a_container_shows_as_many_as_it_may_hold(
    allowed: int | None, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[DemoConfig] = []
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    monkeypatch.setattr(memory, "within_limit", lambda _: allowed)
    monkeypatch.setattr(run, "demonstrate", lambda config, _page: shown.append(config))
    monkeypatch.setattr(local_swarm, "run", lambda *_, **__: None)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert [config.replicas for config in shown] == [replicas]


@given(st.lists(st.floats(0, 1), max_size=12))
def test_labels_never_lie_over_each_other(heights: list[float]) -> None:
    wanted = sorted(heights)
    found = spread(wanted, 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(found))
    if all(b - a > 0.05 for a, b in pairwise(wanted)):
        assert found == pytest.approx(wanted)
    assert sum(found) == pytest.approx(sum(wanted))


def test_the_picture_is_drawn_for_full_and_for_empty_journals() -> None:
    for histories, scores in ((swarm(), SCORES), (swarm(), None), ([], None)):
        assert picture("A swarm", histories, summarise(histories), scores).startswith(b"\x89PNG")


def test_the_step_budget_fits_the_time() -> None:
    run = decode_run(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "test")
    once = 0.05
    per_step_s = once * run.pipeline.microbatches_per_step * 2 / EFFICIENCY
    assert affordable_steps(120.0, [once], run) == int(120 / per_step_s)
    assert affordable_steps(120.0, [once, once], run) == int(240 / per_step_s)
    assert affordable_steps(0.1, [once], run) == 20
    # Two stages of two replicas, one at a quarter: 1 1/4 of each stage are at work, enough for two cores, not for four.
    assert affordable_steps(120.0, [once] * 2, run, 4.0) == affordable_steps(120.0, [once] * 2, run)
    assert affordable_steps(120.0, [once] * 4, run, 4.0) == int(2.5 * 120 / per_step_s)


async def test_the_model_is_exported_then_evaluated_by_replica_and_sampled(tmp_path: Path) -> None:
    """The commands are real ones (tests of `export` and `inference` run them); here others answer in their place."""
    rows = [
        {"model": model, "loss": loss, "tokens": 9, "unigram_entropy": 3.2}
        for model, loss in (("merged", 2.0), ("1a", 2.5))
    ]
    answers = {"export": "Wrote it.", "evaluate": json.dumps({"models": rows}), "generate": f"{PROMPT}main():\n"}
    asked: list[str] = []

    class Answering(Children):
        def start(self, name: str, command: Sequence[str], logs: Path) -> Child:
            asked.append(name)
            return super().start(name, python(f"print({answers[name]!r}, end='')"), logs)

    scores = await evaluation(Answering(), f"{SCHEME}x", [tmp_path / "1a"], tmp_path / "model", tmp_path)
    assert asked[0] == "export"
    assert (scores.merged, scores.replicas, scores.single, scores.tokens) == (2.0, {"1a": 2.5}, 2.5, 9)
    assert scores.sample == "main():"


def test_a_demo_never_writes_over_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with user_error(Exit.USAGE) as caught:
        claim_output_dir(tmp_path / "mine", b"{}")
    assert "thesis.tex" in caught.value.why
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_reader_that_has_read_enough_ends_a_demo_without_an_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "noloco_node", "demo", "--home", str(tmp_path / "demo")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
async def test_a_demo_whose_pipe_or_terminal_is_closed_stops_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[], tuple[int, int]]
) -> None:
    reading, writing = opened()
    children, stopped = Children(), list[int]()

    async def stop() -> None:
        stopped.append(len(children.running()))

    async def closed(_: object) -> NoReturn:
        os.close(reading)
        raise EOFError

    monkeypatch.setattr(children, "running", lambda: ["a child"])
    monkeypatch.setattr(children, "stop", stop)
    monkeypatch.setattr(run, "Children", lambda: children)
    monkeypatch.setattr(run._Demo, "_freeze_run", closed)
    console = Console(file=os.fdopen(writing, "w"), force_terminal=os.isatty(writing))
    monkeypatch.setattr(run, "Console", lambda: console)
    with pytest.raises(EOFError):
        await demonstrate(DemoConfig(replicas=2, home=tmp_path / "demo"))
    assert stopped == [1]
    with contextlib.suppress(OSError):
        console.file.close()


def test_each_demo_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "noloco-demo-3").mkdir()
    (tmp_path / "noloco-demo-3" / "thesis.tex").touch()
    names = []
    for _ in range(3):
        with claim_output_dir(tmp_path / "noloco-demo", b"{}") as home:
            names.append(home.path.name)
    assert names == ["noloco-demo", "noloco-demo-2", "noloco-demo-4"]


def test_a_demo_that_is_a_moment_ahead_keeps_its_directory(tmp_path: Path) -> None:
    with claim_output_dir(tmp_path / "demo", b"{}") as first:
        (first.path / "demo.json").unlink()
        with claim_output_dir(tmp_path / "demo", b"{}") as second:
            assert second.path.name == "demo-2"


async def test_too_many_peers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with user_error(Exit.USAGE):
        await demonstrate(DemoConfig(stages=9, replicas=9, home=tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(("stages", "replicas", "slow"), [(1, 2, "0b"), (2, 2, "1b"), (3, 28, "2ab")])
def test_the_slow_replica_is_the_last_of_the_last_stage(stages: int, replicas: int, slow: str) -> None:
    even = DemoConfig(stages=stages, replicas=replicas)
    assert even.slow_peer is None
    uneven = msgspec.structs.replace(even, slowdown=SLOWDOWN)
    assert uneven.slow_peer == slow
    kept = msgspec.json.decode(mark(uneven, 12.0))
    assert (kept["slowdown"], kept["started_at"]) == (4.0, 12.0)


def test_one_replica_a_stage_cannot_be_uneven(tmp_path: Path) -> None:
    uneven = ("--heterogeneous", "--replicas", 1)
    assert "--replicas 2" in refused("demo", *uneven, "--home", tmp_path / "demo", code=Exit.USAGE).hint
    assert not (tmp_path / "demo").exists()


# Real processes. They are waited for by their output or by a pipe that they hold, never by a pause.

HURRY = KillPolicy(interrupt_s=0.1, terminate_s=0.1, kill_s=LAST_RESORT_S)
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]\n"
READY = "print('ready', flush=True)\n"
WAIT = "import signal; signal.pause()\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class Lifeline:
    """A named pipe that a process holds open for writing: the end of the file is the end of the process."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.grab = f"lifeline = open({str(path)!r}, 'wb', buffering=0); lifeline.write(b'here')\n"
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def expect(self, content: bytes) -> None:
        readable, _, _ = select.select([self._reader], [], [], LAST_RESORT_S)
        assert readable, f"waited in vain for {content!r}"
        assert os.read(self._reader, 100) == content

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def lifeline(tmp_path: Path) -> Iterator[Lifeline]:
    line = Lifeline(tmp_path / "lifeline")
    yield line
    line.close()


async def test_polite_children_leave_at_the_first_signal(tmp_path: Path) -> None:
    children = Children(KillPolicy(interrupt_s=LAST_RESORT_S))
    code = "try:\n    print('ready', flush=True); input()\nexcept KeyboardInterrupt:\n    raise SystemExit(7)"
    both = [children.start(name, python(code), tmp_path / name) for name in ("one", "two")]
    for child in both:
        assert await child.line("ad", LAST_RESORT_S) == "ady"
    await children.stop()
    assert [child.exit_code for child in both] == [7, 7]
    assert children.running() == []


async def test_stubborn_children_and_their_children_are_killed(tmp_path: Path, lifeline: Lifeline) -> None:
    children = Children(HURRY)
    daemon = STUBBORN + lifeline.grab + WAIT
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {daemon!r}])\n" + STUBBORN + READY + WAIT
    child = children.start("stubborn", python(code), tmp_path / "logs")
    await child.line("ready", LAST_RESORT_S)
    lifeline.expect(b"here")
    await children.stop()
    assert child.end == "killed by SIGKILL"
    lifeline.expect(b"")


async def test_what_a_dead_child_leaves_running_is_swept(tmp_path: Path, lifeline: Lifeline) -> None:
    children = Children()
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {lifeline.grab + WAIT!r}])\ninput()"
    child = children.start("short-lived", python(code), tmp_path / "logs")
    lifeline.expect(b"here")
    child.signal(signal.SIGTERM)
    assert await child.ended() == -signal.SIGTERM
    lifeline.expect(b"")
    await children.stop()


async def test_a_stop_that_is_cancelled_kills_at_once(tmp_path: Path) -> None:
    children = Children(KillPolicy(interrupt_s=3600.0))
    child = children.start("stubborn", python(STUBBORN + READY + WAIT), tmp_path / "logs")
    await child.line("ready", LAST_RESORT_S)
    stopping = asyncio.create_task(children.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await child.ended() == -signal.SIGKILL


async def test_sockets_of_killed_children_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind({str(path)!r})\n" + STUBBORN + READY + WAIT

    children = Children(HURRY)
    child = children.start("bound", python(code), tmp_path / "logs")
    await child.line("ready", LAST_RESORT_S)
    assert bound_sockets([child.pid]) == {path}
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(tmp_path / "ours"))
        await children.stop()
    assert not path.exists()
    assert (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("code", "why", "exit_code"),
    [
        ("import sys; sys.exit('no such invite') or 3", "no such invite", None),
        ("raise SystemExit(4)", "(it said nothing)", Exit.UNREACHABLE),
        (
            "import sys; sys.stderr.write('17:00  copy\\nnoloco-node: The disk is full.\\n  why: it is'); sys.exit(9)",
            "The disk is full.\n  why: it is",
            Exit.STORAGE,
        ),
    ],
)
async def test_a_child_that_dies_early_is_quoted(tmp_path: Path, code: str, why: str, exit_code: Exit | None) -> None:
    for ask in (lambda child: child.line(SCHEME, LAST_RESORT_S), lambda child: child.output(LAST_RESORT_S)):
        with pytest.raises(UserError, match="node: it ") as caught:
            await ask(Children(HURRY).start("node", python(code), tmp_path))
        assert caught.value.why == why
        assert caught.value.code is (exit_code or caught.value.code)


async def test_a_child_that_never_speaks_is_given_up(tmp_path: Path) -> None:
    children = Children(KillPolicy(interrupt_s=LAST_RESORT_S))
    child = children.start("mute", python("print('half a line', end='', flush=True); input()"), tmp_path)
    with pytest.raises(UserError, match="was not ready after 0 s"):
        await child.line("half", 0.2)
    with pytest.raises(UserError, match="was not done after 0 s"):
        await child.output(0.01)
    await children.stop()


def test_a_tied_module_ends_with_its_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guest.py").write_text(
        "import signal, sys\n"
        "try:\n    print(sys.argv[1:], __name__, flush=True)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    sys.exit(5)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = tied_command("guest", "--x", "y")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"['--x', 'y'] __main__\n"
        child.stdin.close()
        assert child.wait(LAST_RESORT_S) == 5


def test_the_signals_grow_firmer(tmp_path: Path) -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from noloco_node.demo import child_processes as c\nc.FIRMER_AFTER_S = 0.01\nc.leave_with_parent(0)"
    )
    assert subprocess.run(python(code), stdin=subprocess.DEVNULL, timeout=LAST_RESORT_S).returncode == -signal.SIGTERM


def test_children_of_a_killed_parent_leave(tmp_path: Path, lifeline: Lifeline, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guest.py").write_text(lifeline.grab + WAIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import signal\nfrom pathlib import Path\nfrom noloco_node.demo.child_processes import Children, tied_command\n"
        f"Children().start('guest', tied_command('guest'), Path({str(tmp_path)!r}))\nsignal.pause()"
    )
    with subprocess.Popen(python(code)) as parent:
        lifeline.expect(b"here")
        parent.kill()
        lifeline.expect(b"")
