"""What a stop signal does to a command, before its work and in it."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import LAST_RESORT_S

from benchmarks.structure.source import read_tree
from noloco_node import tasks
from noloco_node.errors import Exit
from noloco_node.export import huggingface
from noloco_node.export.sources import Provenance
from noloco_node.journal import events
from noloco_node.journal.writer import Journal
from noloco_node.machine import signals
from noloco_node.machine.signals import STOPS, run, run_until_interrupted, unwound
from noloco_node.run.presets import demo_run_text

HANDLERS = ("signal.signal(", "add_signal_handler(")
SETS_HANDLERS = {"noloco_node.machine.signals", "noloco_node.demo.child_processes"}
"""The second one lets its process heed an interrupt at all, before it becomes a command."""


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    # Who runs the tests may ignore some of them: by nohup, or in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in set(STOPS) - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_unwinds_the_body_and_says_so(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    put_away: list[str] = []
    body = ExitStack()
    body.callback(put_away.append, "what it held")
    with pytest.raises(SystemExit) as left, unwound("nothing was written"), body:
        signal.raise_signal(number)
    assert left.value.code == Exit.INTERRUPTED
    assert put_away
    assert capsys.readouterr().err == "noloco-node: interrupted, nothing was written\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_the_caller_ignores_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with unwound():
        signal.raise_signal(number)


def in_the_background_of_a_script() -> None:
    """Ignore what a shell lets its background jobs ignore."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_a_termination_unwinds_where_interrupts_are_ignored() -> None:
    in_the_background_of_a_script()
    with pytest.raises(SystemExit), unwound():
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_ends_a_coroutine_and_lets_it_put_away_what_it_holds(number: signal.Signals) -> None:
    in_the_background_of_a_script()
    put_away: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            put_away.append("what it held")

    with pytest.raises(SystemExit) as left:
        run(main())
    assert left.value.code == Exit.INTERRUPTED
    run_until_interrupted(main())
    assert len(put_away) == 2


@pytest.mark.parametrize("hears_interrupts", [False, True])
def test_a_demo_in_the_background_of_a_script_takes_interrupts_that_other_commands_ignore(
    hears_interrupts: bool,
) -> None:
    in_the_background_of_a_script()

    async def main() -> str:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(0.01)
        return "done"

    if not hears_interrupts:
        assert run(main()) == "done"
        return
    with pytest.raises(SystemExit) as left:
        run(main(), hears_interrupts=True)
    assert left.value.code == Exit.INTERRUPTED


def test_a_second_signal_does_not_wait_for_what_is_put_away() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await loop.create_future()
        finally:
            loop.call_soon(signal.raise_signal, signal.SIGTERM)
            await loop.create_future()

    with pytest.raises(SystemExit) as left:
        run(main())
    assert left.value.code == Exit.INTERRUPTED


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_while_libraries_are_loaded_ends_the_process_with_a_word(
    number: signal.Signals, ignored: bool
) -> None:
    # As a library does that is imported in the middle of an interrupt: it is swallowed.
    loading = (
        "import signal, sys, types\n"
        f"signal.signal({number:d}, {'signal.SIG_IGN' if ignored else 'signal.default_int_handler'})\n"
        "from noloco_node.__main__ import main\n"
        "class Loading(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        try:\n"
        f"            signal.raise_signal({number:d})\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
        "        return lambda: None\n"
        "sys.modules['noloco_node.cli.main'] = Loading('noloco_node.cli.main')\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=False)
    stays = ignored and number != signal.SIGTERM
    assert ended.returncode == (Exit.OK if stays else Exit.INTERRUPTED), ended.stderr
    assert ended.stderr == ("" if stays else "noloco-node: interrupted\n")


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_command_that_only_shows_something_ends_with_its_pipe_or_terminal_and_tells_of_a_disk_that_fails(
    number: int, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        raise ExceptionGroup("beside others", [OSError(number, "of the output, or of a disk")])

    monkeypatch.setattr(signals, "drop_output", lambda: None)
    monkeypatch.setattr(signals, "_reader_is_gone", lambda: is_gone)
    with nullcontext() if is_gone and number != errno.ENOSPC else pytest.raises(ExceptionGroup):
        run_until_interrupted(main())


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_in_the_last_moment_of_the_interpreter_changes_no_exit_code(number: signal.Signals) -> None:
    ending = (
        "import os, sys, types\n"
        "from noloco_node.__main__ import main\n"
        "class Last:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()):\n        kill(pid, {number:d})\n"
        "sys.modules['noloco_node.cli.main'] = types.SimpleNamespace(main=lambda: sys.exit(7))\n"
        "last = Last()\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", ending], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_termination_ends_a_page_that_a_script_shows_in_the_background(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(events.Started(peer="12D3peer", stage=0, run="r", version="0"))
    command = [sys.executable, "-m", "noloco_node", "watch", "--journal", str(tmp_path), "--web", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    shown = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=in_the_background_of_a_script,
    )
    assert shown.stdout is not None
    try:
        assert any("http://" in line for line in shown.stdout), "its address, once it is there"
        shown.send_signal(signal.SIGTERM)
        assert shown.wait(LAST_RESORT_S) == Exit.OK
    finally:
        shown.kill()
        shown.communicate()


def test_one_place_sets_the_handlers_of_signals() -> None:
    modules = read_tree().modules
    found = {name for name, module in modules.items() if any(each in module.text for each in HANDLERS)}
    assert {name for name in found if name.startswith("noloco_node.")} == SETS_HANDLERS


NOTES = Provenance(
    run_id="ab" * 32,
    rounds=(4,),
    replicas=(1,),
    untied=False,
    run_file=demo_run_text(stages=1, replicas=1, steps=100, seed=0),
)
MOMENTS = ("save_file", "_write_notes", "_follow_umask", "flush", "locked_aside")
"""In the writing of a checkpoint: functions that are called before it is in its place, and after."""


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_export_leaves_nothing_or_says_what_it_wrote(
    moment: str, is_after: bool, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last `flush` the directory is in its place."""
    step, calls = getattr(huggingface, moment), 0

    def interrupt() -> None:
        os.kill(os.getpid(), number)
        given_up = tasks.GIVEN_UP.get()
        assert given_up is not None
        assert given_up.wait(LAST_RESORT_S)

    def interrupted(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 and not is_after:
            interrupt()
        done = step(*given, **more)
        if is_after and (moment != "flush" or given == (tmp_path,)):
            interrupt()
        return done

    monkeypatch.setattr(huggingface, moment, interrupted)
    out, parameters = tmp_path / "model", {"weight": torch.ones(3)}
    writing = tasks.in_thread(lambda: huggingface.write_parameters(out, parameters, NOTES))
    if is_after and moment == "flush":
        run(writing)
        assert {path.name for path in out.iterdir()} >= {huggingface.PARAMETERS, "noloco.json"}
        return
    with pytest.raises(SystemExit) as left:
        run(writing)
    assert left.value.code == Exit.INTERRUPTED
    assert not list(tmp_path.iterdir())
