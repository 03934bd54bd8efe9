"""Processes of `noloco-node` that begin with the libraries loaded: forks of one process that does nothing else.

To load torch and transformers takes four seconds of a core, more than most tests want of a node. What begins here is a
process like any other, with a session, arguments, environment, files and a daemon of its own. Only imports are shared;
who tests how a command starts, starts it as a person does.
"""

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import msgspec

from noloco_node.libp2p.hivemind_compat import load_hivemind

LOOK_S = 0.02
NODE = (
    "transformers.models.llama.modeling_llama",
    "noloco_node.cli.host_machine",
    "noloco_node.node.node",
    "noloco_node.export.exporter",
    "noloco_node.cli.main",
    "typer._adapters",  # by the first command line that is read
    "noloco_node.planning.graph_memory",
    "pydantic.main",  # these three by libp2p, at the first address and the first record
    "netaddr.ip",
    "cid.cid",
)
"""Modules that a node loads."""
_NEW_NETWORK = 0x40000000
_NEVER = threading.Event()


class Request(msgspec.Struct):
    """What a fork is to be: `noloco-node` with these arguments and variables of the environment, and its files.

    `directory`: its working directory.
    """

    arguments: list[str]
    environment: dict[str, str]
    out: str
    err: str
    code: str
    """Written at its end: the exit code as `Popen` says it."""
    directory: str
    network: str = ""
    """The network namespace that it lives in; empty: ours."""
    program: str = ""
    """A Python program instead of `noloco-node`."""
    modules: list[str] = []
    """Modules that the program needs beside those of a node. They stay loaded for the next one."""


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


def enter_network(name: str) -> None:
    """Let this thread, and the threads and processes that it starts from now on, live in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):  # `os.setns` begins with Python 3.12
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


class NodeForks:
    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        # Python would otherwise warn at its end of a process that still runs.
        atexit.register(self._process.__exit__, None, None, None)

    def start(self, request: Request) -> ForkedProcess:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._process.stdout.readline()), Path(request.code))


def serve() -> None:
    alive: dict[int, Path] = {}
    ends, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unfinished = b""
    while True:
        ready, _, _ = select.select([sys.stdin, ends], [], [])
        if ends in ready:
            os.read(ends, 4096)
            note_ends(alive)
        if sys.stdin in ready:
            if not (news := os.read(sys.stdin.fileno(), 65536)):
                return
            *lines, unfinished = (unfinished + news).split(b"\n")
            for request in (msgspec.json.decode(line, type=Request) for line in lines):
                load(request.modules)
                if not (pid := os.fork()):
                    become(request)
                alive[pid] = Path(request.code)
                print(pid, flush=True)


def load(modules: Iterable[str]) -> None:
    """Import modules, and spare the garbage collector from looking through them: they stay."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def note_ends(alive: dict[int, Path]) -> None:
    """Write down who has ended; only then may a process id be given to another."""
    while alive and (end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        path = alive.pop(end.si_pid)
        path.with_suffix(".new").write_text(str(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))
        path.with_suffix(".new").rename(path)
        os.waitpid(end.si_pid, 0)


def become(request: Request) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), (request.out, os.O_WRONLY), (request.err, os.O_WRONLY))
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ |= request.environment
    os.chdir(request.directory)
    if request.network:
        enter_network(request.network)
    tempfile.tempdir = None
    sys.argv[1:] = request.arguments
    if request.program:
        runpy.run_path(request.program, run_name="__main__")
    else:
        runpy.run_module("noloco_node", run_name="__main__", alter_sys=True)
    raise SystemExit


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory = tempfile.mkdtemp(prefix="node-forks-")
    load(NODE)
    load_hivemind()
    gc.freeze()
    serve()
    shutil.rmtree(directory)
