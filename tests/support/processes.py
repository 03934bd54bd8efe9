"""Commands of ours as real processes: started, watched through what they write, and gone when the test is.

A test that starts processes has three worries. It must not wait blindly: `Commands.until` polls a condition,
and fails at once when a process that is needed has ended, with the last words of all of them. It must leave
nothing behind: whatever belongs to one `Commands` is its child or has its directory in the command line (homes, and the
sockets of libp2p's daemons), so it can be found and ended by process id. And it must see what a process leaves: each
command has a directory for temporary files of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil
from limits import LAST_RESORT_S
from node_forks import NodeForks, Request

from noloco_node.journal.events import Event
from noloco_node.journal.reader import Tail

T = TypeVar("T")
E = TypeVar("E")

POLL_S = 0.05
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
MEMBER = Path(__file__).with_name("local_member.py")
_NEVER = threading.Event()


class Command:
    """One process of `noloco-node`, or of a program that uses it; leader of its own process group as under a shell."""

    def __init__(
        self,
        name: str,
        directory: Path,
        arguments: Iterable[str],
        *,
        forked: bool,
        program: Path | None = None,
        network: str = "",
        modules: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.home, self.temporary = directory / "home", directory / "tmp"
        self.temporary.mkdir(parents=True)
        self._out, self._err = directory / "out", directory / "err"
        self._tail = Tail(self.home / "journal.jsonl")
        self._events: list[Event] = []
        # torch makes a directory for its compiler wherever it is imported; nothing else may stay behind.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"), "TMPDIR": str(self.temporary)}
        self._out.touch()
        self._err.touch()
        files = (str(self._out), str(self._err), str(directory / "code"), os.getcwd())
        request = Request(
            [*arguments], environment, *files, network=network, program=str(program or ""), modules=[*modules]
        )
        self.process = _forks().start(request) if forked else _spawn(request)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.process.poll()

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def complaint(self) -> str:
        return self._err.read_text()

    def events(self, kind: type[E]) -> list[E]:
        while news := self._tail.poll():
            self._events += news
        return [event for event in self._events if isinstance(event, kind)]

    def daemons(self) -> list[psutil.Process]:
        """Return its libp2p daemon, also when that has outlived it."""
        return _alive_with(f"-listen=/unix{self.temporary}/")

    def left_behind(self) -> list[str]:
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))

    def interrupt(self) -> None:
        """Do what Ctrl-C in a terminal does: signal the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=LAST_RESORT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {LAST_RESORT_S:g} s:\n{self.complaint}") from None

    def close(self) -> None:
        self._tail.close()

    def __repr__(self) -> str:
        return f"Command({self.name}, pid={self.process.pid}, exit code {self.exit_code})"


class Commands:
    """All processes of one test, or of a few that share them; a context that leaves none of them."""

    def __init__(self) -> None:
        # Not pytest's directory: its name is too long for the path of a socket.
        self.directory = Path(tempfile.mkdtemp(prefix="swarm-", dir="/tmp"))
        self._commands: list[Command] = []

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(
        self,
        *arguments: str,
        name: str | None = None,
        home: bool = False,
        forked: bool = True,
        program: Path | None = None,
        network: str = "",
        modules: Iterable[str] = (),
    ) -> Command:
        """Start `noloco-node`, or a Python program, with `arguments`; with `home`, also with a home of its own.

        `forked`: it begins with the libraries loaded, and with `modules`, which a program needs beside them. `network`:
        the network namespace that it lives in; empty: ours.
        """
        name = name or f"{arguments[0]}{len(self._commands)}"
        directory = self.directory / name
        more = ("--home", str(directory / "home")) if home else ()
        command = Command(
            name, directory, [*arguments, *more], forked=forked, program=program, network=network, modules=modules
        )
        self._commands.append(command)
        return command

    def until(self, condition: Callable[[], T], what: str, *, alive: Iterable[Command] = ()) -> T:
        """Return what `condition` returns once that is true; fail when one of `alive` ends, or as the last resort."""
        needed, deadline = tuple(alive), time.monotonic() + LAST_RESORT_S
        while not (found := condition()):
            ended = [command for command in needed if command.exit_code is not None]
            if ended or time.monotonic() > deadline:
                why = f"{ended} ended" if ended else f"waited {LAST_RESORT_S:g} s"
                raise AssertionError(f"{what}: {why}\n{self.last_words()}")
            _NEVER.wait(POLL_S)
        return found

    def last_words(self) -> str:
        return "\n".join(f"--- {command!r}\n{command.complaint[-1500:]}" for command in self._commands)

    def running(self) -> list[psutil.Process]:
        """Return every process that belongs to us, daemons included."""
        own = {command.process.pid for command in self._commands if command.exit_code is None}
        found = {process.pid: process for process in _alive_with(str(self.directory))}
        return [*found.values(), *(psutil.Process(pid) for pid in own - found.keys())]

    def end(self) -> None:
        for command in self._commands:
            command.close()
        for process in self.running():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for command in self._commands:
            command.wait()
        self.until(lambda: not self.running(), "a daemon outlives SIGKILL")

    def __repr__(self) -> str:
        return f"Commands({self._commands!r})"


def _spawn(request: Request) -> subprocess.Popen[bytes]:
    with Path(request.out).open("wb") as out, Path(request.err).open("wb") as err:
        inside = ("ip", "netns", "exec", request.network) if request.network else ()
        what = (request.program,) if request.program else ("-m", "noloco_node")
        return subprocess.Popen(
            [*inside, sys.executable, *what, *request.arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **request.environment},
        )


@cache
def _forks() -> NodeForks:
    return NodeForks(ENVIRONMENT)


def _alive_with(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
