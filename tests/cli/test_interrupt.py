"""What Ctrl-C does to a command, before and in its work."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
import typer

from noloco_node.cli.interrupt import unwound
from noloco_node.errors import Exit


def test_an_interrupt_unwinds_the_body_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    put_away: list[str] = []
    body = ExitStack()
    body.callback(put_away.append, "what it held")
    with pytest.raises(typer.Exit) as left, unwound("nothing was written"), body:
        signal.raise_signal(signal.SIGINT)
    assert left.value.exit_code == Exit.INTERRUPTED
    assert put_away
    assert capsys.readouterr().err == "noloco-node: interrupted, nothing was written\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_who_has_interrupts_ignored_is_not_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with unwound():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("ignored", "code"), [(False, Exit.INTERRUPTED), (True, Exit.OK)])
def test_an_interrupt_while_libraries_are_loaded_ends_the_process_with_a_word(ignored: bool, code: Exit) -> None:
    # As a library does that is imported in the middle of an interrupt: it is swallowed.
    loading = (
        "import signal, sys, types\n"
        f"signal.signal(signal.SIGINT, {'signal.SIG_IGN' if ignored else 'signal.default_int_handler'})\n"
        "from noloco_node.__main__ import main\n"
        "class Loading(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        try:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
        "        return lambda: None\n"
        "sys.modules['noloco_node.cli.main'] = Loading('noloco_node.cli.main')\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == ("" if ignored else "noloco-node: interrupted\n")
