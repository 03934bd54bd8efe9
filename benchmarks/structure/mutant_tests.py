"""Runs tests in forks of one process that has torch loaded, so that to try a mutant costs about a second.

A fork imports the project from a copy of its tree. In the first, every function of the two packages notes which of its
statements run, so that a mutant is tried with those tests alone that run its line. Each test may take a few times the
processor time that it took then; a fork that takes longer is ended by the kernel, whatever it does.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from hypothesis import Phase, settings

from benchmarks.structure.mutations import Mutant, noting

TESTED = ("gossip", "pipeline")
NEEDED = (
    *TESTED,
    "noloco_node",
    "benchmarks",
    "research",
    "docs",
    "tests",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "README.md",
)
OWN = (*TESTED, "noloco_node", "benchmarks", "research", "docs", "tests")
VIRTUAL = "not network and not processes and not wan and not browser and not docker"
PATIENCE, LEAST_S, WALL_S = 5.0, 10.0, 600.0
"""A test may take so many times what it took, and so many seconds beyond; but no longer by the clock on the wall."""
NOTE = "_note_statement"
"""What a function calls in the first run, a name that every module sees."""
MOST_S = 10.0
"""A mutant is tried with the nearest and quickest tests that took so many seconds together: all would take minutes."""
FIRST_S = 3.0
"""The quickest tests come first, together of so many seconds: most mutants end there, and no other test is loaded."""


class Timed(msgspec.Struct):
    """A test that passes: its processor time, and by file the lines of the statements that it runs."""

    seconds: float
    lines: dict[str, set[int]]


Baseline = dict[str, Timed]


class Outcome(msgspec.Struct):
    """How a mutant fared. `test`: the one that noticed, or did not end; none where the module cannot be imported."""

    kind: str
    test: str = ""


class Copy:
    """A copy of what the tests need, in which one file at a time is changed."""

    def __init__(self, source: Path, target: Path) -> None:
        self.path = target / "tree"
        self._said, self._told = target / "said.txt", target / "told.json"
        skipped = shutil.ignore_patterns("__pycache__", ".*")
        self.path.mkdir(parents=True)
        for name in NEEDED:
            if (source / name).is_dir():
                shutil.copytree(source / name, self.path / name, ignore=skipped)
            else:
                shutil.copy2(source / name, self.path / name)

    def baseline(self) -> Baseline:
        """Run all tests of the packages. Raises RuntimeError with pytest's last lines where one fails."""
        sources = [path for name in TESTED for path in (self.path / name).rglob("*.py")]
        places: list[tuple[str, int]] = []

        def note(path: str, number: int) -> str:
            places.append((path, number))
            return f"{NOTE}({len(places) - 1})"

        with contextlib.ExitStack() as kept:
            for source in sources:
                text = source.read_text()
                noted = noting(text, partial(note, source.relative_to(self.path).as_posix()))
                kept.enter_context(_changed(source, noted))
            status = self._pytest([f"tests/{name}" for name in TESTED], _Noter(places, self._told))
        if status:
            said = "\n".join(self._said.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"the tests must pass before anything is changed (status {status}):\n{said}")
        return msgspec.json.decode(self._told.read_bytes(), type=Baseline)

    def outcome(self, mutant: Mutant, baseline: Baseline) -> Outcome:
        """Try a mutant: the nearest and quickest tests first."""
        tests = concerned(mutant, baseline)
        if not tests:
            return Outcome("survived")
        with _changed(self.path / mutant.path, mutant.text):
            for some in in_two(tests, baseline):
                outcome = self._try(some, baseline)
                if outcome.kind != "survived":
                    break
        return outcome

    def _try(self, tests: Sequence[str], baseline: Baseline) -> Outcome:
        self._told.write_text('["", ""]')
        plugin = _Watcher(self._told, {test: baseline[test].seconds for test in tests})
        status = self._pytest(list(dict.fromkeys(test.split("::")[0] for test in tests)), plugin)
        running, failed = json.loads(self._told.read_bytes())
        if status in (-signal.SIGPROF, -signal.SIGALRM):
            return Outcome("timed out", running)
        if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
            raise RuntimeError(
                f"something else ended the tests, by signal {-status}: the same command goes on from here"
            )
        return Outcome("killed", failed or running) if status else Outcome("survived")

    def load(self) -> None:
        """Import into this process, for every fork, what the tests import of other projects; compile the copy."""
        self._pytest([f"tests/{name}" for name in TESTED], _Lister(self._told))
        for name in json.loads(self._told.read_bytes()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def _pytest(self, files: list[str], plugin: _Watcher) -> int:
        """Return the exit code of a fork, or as a negative number the signal that ended it."""
        if not (pid := os.fork()):
            _become(self.path, self._said, files, plugin)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def _changed(path: Path, text: str) -> Iterator[None]:
    """Let a file have another text for a while, and a time that no compiled file of it has."""
    original, times = path.read_bytes(), path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 2_000_000_000))
    try:
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def concerned(mutant: Mutant, baseline: Baseline) -> list[str]:
    """Return tests that run a mutant's line: those of its mirrored module first, the quick before the slow."""
    mirrored = Path("tests", mutant.path).with_name(f"test_{Path(mutant.path).name}").as_posix()
    found = []
    for test, timed in baseline.items():
        lines, is_own = timed.lines.get(mutant.path, set()), test.startswith(f"{mirrored}::")
        if (lines or is_own) if mutant.at_import else mutant.statement in lines:
            found.append((not is_own, timed.seconds, test))
    ends_s = accumulate(seconds for _, seconds, _ in sorted(found))
    return [
        test
        for (_, _, test), end_s in zip(sorted(found), ends_s, strict=True)
        if end_s <= MOST_S or test == min(found)[2]
    ]


def in_two(tests: Sequence[str], baseline: Baseline) -> list[Sequence[str]]:
    """Split the tests after those that take a few seconds together."""
    total_s, cut = 0.0, 0
    while cut < len(tests) and (not cut or total_s + baseline[tests[cut]].seconds < FIRST_S):
        total_s += baseline[tests[cut]].seconds
        cut += 1
    return [part for part in (tests[:cut], tests[cut:]) if part]


class _Watcher:
    """A plugin of pytest: keeps the tests that are wanted, in their order, limits each, and notes which one fails."""

    def __init__(self, told: Path, seconds: dict[str, float]) -> None:
        self.told, self._seconds = told, seconds
        self._place = {test: place for place, test in enumerate(seconds)}

    @property
    def seconds_known(self) -> bool:
        """Whether the tests ran before, so that a limit is known for each."""
        return bool(self._seconds)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        if self._place:
            items[:] = sorted(
                (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        _limit(LEAST_S + PATIENCE * self._seconds[item.nodeid])
        self.tell([item.nodeid, ""])
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell([report.nodeid, report.nodeid])

    def tell(self, what: object) -> None:
        """Write what the process that forked is to know."""
        self.told.write_bytes(msgspec.json.encode(what))


class _Lister(_Watcher):
    """Only collects, and tells which modules that took."""

    def __init__(self, told: Path) -> None:
        super().__init__(told, {})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = {name for name in list(sys.modules) if name.split(".")[0] not in (*OWN, "__main__", "conftest")}
        self.tell(sorted(name for name in names if "site-packages" in str(getattr(sys.modules[name], "__file__", ""))))
        session.items.clear()


class _Noter(_Watcher):
    """Notes which statements of the packages every test runs."""

    def __init__(self, places: list[tuple[str, int]], told: Path) -> None:
        super().__init__(told, {})
        self._places = places
        self._found: Baseline = {}
        self._seen: set[int] = set()
        vars(builtins)[NOTE] = self._seen.add

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._seen.clear()
        _clear_caches()
        begun_s = time.process_time()
        try:
            return (yield)
        finally:
            lines: dict[str, set[int]] = {}
            for path, number in map(self._places.__getitem__, tuple(self._seen)):
                lines.setdefault(path, set()).add(number)
            self._found[item.nodeid] = Timed(time.process_time() - begun_s, lines)

    def pytest_sessionfinish(self) -> None:
        self.tell(self._found)


def _clear_caches() -> None:
    """Empty the caches of the packages' functions, so that every test that calls one runs it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in TESTED:
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def _limit(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)


def _become(tree: Path, said: Path, files: list[str], plugin: _Watcher) -> NoReturn:
    """Be a process that runs these tests of a copy, and ends."""
    code = 70
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        if plugin.seconds_known:
            _limit(WALL_S / 10)
        os.chdir(tree)
        sys.dont_write_bytecode = plugin.seconds_known
        sys.path[:] = [str(tree), *(path for path in sys.path if path and not Path(path, "gossip").is_dir())]
        for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
            del sys.modules[name]
        settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=_PHASES)
        code = int(pytest.main([*_OPTIONS, *files], plugins=[plugin]))
    finally:
        os._exit(code)


_PHASES = (Phase.explicit, Phase.generate)
"""Without the search for the smallest example: that a test fails is enough."""
_OPTIONS = (
    *("-x", "-q", "-n0", "-m", VIRTUAL, "--hypothesis-profile=mutants", "--timeout=0", "-p", "no:cacheprovider"),
    *("-o", "faulthandler_timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--no-header"),
)
