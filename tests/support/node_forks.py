"""Processes of `noloco-node` that begin with the libraries loaded: forks of one process that does nothing else.

To load torch and transformers takes four seconds of a core, more than most tests want of a node. What begins here is a
process like any other, with a session, arguments, environment, files and a daemon of its own. Only imports are shared;
who tests how a command starts, starts it as a person does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

LOOK_S = 0.02
_NEVER = threading.Event()


class Request(msgspec.Struct):
    """What a fork is to be: `noloco-node` with these arguments and variables of the environment, and its files."""

    arguments: list[str]
    environment: dict[str, str]
    out: str
    err: str
    code: str
    """Written at its end: the exit code as `Popen` says it."""


class ForkedProcess:
    """One of them, with what `subprocess.Popen` has of that name."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("noloco-node", timeout)
            _NEVER.wait(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class NodeForks:
    """The process that forks; it ends with us."""

    def __init__(self, environment: dict[str, str]) -> None:
        directory = tempfile.mkdtemp(prefix="node-forks-")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment, "TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": directory},
        )
        atexit.register(self._end, directory)

    def start(self, request: Request) -> ForkedProcess:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._process.stdout.readline()), Path(request.code))

    def _end(self, directory: str) -> None:
        self._process.communicate()
        shutil.rmtree(directory, ignore_errors=True)


def serve() -> None:
    """Fork for each line of the standard input, and write down how each fork ends."""
    alive: dict[int, Path] = {}

    def bury(*_: object) -> None:
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            path = alive.pop(pid)
            path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGCHLD, bury)
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            alive[pid] = Path(request.code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if not pid:
            become(request)
            return
        print(pid, flush=True)


def become(request: Request) -> None:
    """Be what was asked for."""
    os.setsid()
    for number, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), (request.out, os.O_WRONLY), (request.err, os.O_WRONLY))
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ |= request.environment
    tempfile.tempdir = None
    sys.argv[1:] = request.arguments
    runpy.run_module("noloco_node", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    gc.disable()
    for module in ("transformers.models.llama.modeling_llama", "noloco_node.cli.join", "noloco_node.export.exporter"):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    serve()
