"""A test that hangs ends within minutes and is named, also if it catches whatever is raised in it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANGING = """
import threading

def test_that_waits():
    threading.Event().wait()

def test_that_waits_and_catches_what_is_raised():
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass

def test_that_ends():
    pass
"""


def test_the_limits_are_minutes() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 180 <= options["timeout"] < options["faulthandler_timeout"] <= 600
    assert options["faulthandler_exit_on_timeout"] is True
    assert options["timeout_method"] == "signal"


@pytest.mark.processes
def test_a_hanging_test_is_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider", "-n1", "-q", "--tb=line")
    short = ("--timeout=1", "-o", "faulthandler_timeout=5")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *short, tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    names = ("test_that_waits", "test_that_waits_and_catches_what_is_raised")
    assert (done.returncode, failed) == (1, {f"test_hanging.py::{name}" for name in names}), done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
