"""Child processes that never outlive their parent.

`Children.stop` asks all children to leave (SIGINT), waits, insists (SIGTERM), waits, and kills the rest of each child's
process group, which holds its libp2p daemon too. `Children.kill` does the last step alone, at once. For a parent that
dies itself, each child watches a pipe from it:

    python -m noloco_node.demo.child_processes MODULE [ARGUMENT ...]

runs a module as `python -m` would, and interrupts its own process when standard input ends. However the parent dies,
the kernel closes its end of the pipe.

One synchronous call starts a child and registers it. Its output goes to files, so no full pipe blocks it, and the last
words of a dead child can be read; or to where our own output goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from noloco_node.errors import COMPLAINT, Exit, UserError

POLL_S = 0.05
FIRMER_AFTER_S = 15.0
"""Seconds from the interrupt to the termination, and again to the kill, of a child whose parent is gone."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The environment of a child that computes in one thread: several share this machine's cores."""
LAST_WORDS = 12  # lines of a dead child's output that an error message quotes


class KillPolicy(NamedTuple):
    """Seconds that a child has to leave after each signal."""

    interrupt_s: float = 15.0
    terminate_s: float = 3.0
    kill_s: float = 5.0


class Child:
    """One process, leader of a session of its own, with its output in `<logs>/out.log` and `<logs>/err.log`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], logs: Path) -> None:
        self.name, self.logs = name, logs
        self._process = process
        self._swept = False

    @property
    def pid(self) -> int:
        """The id of the process, of its group and of its session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Once its end is seen, its group is swept."""
        code = self._process.poll()
        if code is not None:
            self.sweep()
        return code

    async def line(self, mark: str, timeout_s: float) -> str:
        """Return, from `mark` to its end, the first whole line of its standard output that holds `mark`.

        Raises `UserError` with its last words when it ends before, or when `timeout_s` seconds pass.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    ended = self.exit_code is not None  # asked first: what it wrote before it ended is read below
                    for line in (self.logs / "out.log").read_text(errors="replace").splitlines(keepends=True):
                        if mark in line and line.endswith("\n"):
                            return line[line.index(mark) :].strip()
                    if ended:
                        raise self.trouble("it ended before it was ready")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise self.trouble(f"it was not ready after {timeout_s:.0f} s") from None

    @property
    def end(self) -> str | None:
        """How it ended, in words; None while it runs."""
        code = self.exit_code
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def ended(self) -> int:
        while (code := self.exit_code) is None:  # noqa: ASYNC110 - not every system makes an event of a child's end
            await asyncio.sleep(POLL_S)
        return code

    async def output(self, timeout_s: float) -> str:
        """Wait for its end and return its standard output; raise `UserError` where it failed, or takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                code = await self.ended()
        except TimeoutError:
            raise self.trouble(f"it was not done after {timeout_s:.0f} s") from None
        if code != 0:
            raise self.trouble("it failed")
        return (self.logs / "out.log").read_text()

    def last_words(self) -> str:
        """Return what it complained of last, else the last lines of its standard error, else of its output."""
        for name in ("err.log", "out.log"):
            lines = (self.logs / name).read_text(errors="replace").strip().splitlines()
            complaints = [number for number, line in enumerate(lines) if line.startswith(COMPLAINT)]
            if complaints:
                return "\n".join(lines[complaints[-1] :][:LAST_WORDS]).removeprefix(COMPLAINT)
            if lines:
                return "\n".join(lines[-LAST_WORDS:])
        return "(it said nothing)"

    def last_word(self) -> str:
        """Return the last line of those that says anything: a traceback of several errors ends in a rule."""
        told = [line for line in self.last_words().splitlines() if any(map(str.isalnum, line))]
        return told[-1].strip(" |") if told else "(it said nothing)"

    def trouble(self, what: str) -> UserError:
        """Return an error that quotes the child, with the child's own exit code if that is documented."""
        code, end = self.exit_code, self.end
        known = {item.value for item in Exit} - {Exit.OK.value}
        return UserError(
            f"{self.name}: {what}" + ("" if end is None else f" ({end})"),
            why=self.last_words(),
            hint=f"read the whole of {self.logs / 'err.log'}",
            code=Exit(code) if code in known else Exit.BUG,
        )

    def signal(self, number: signal.Signals) -> None:
        """Signal the process alone, if it still runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its group, and remove the sockets that they leave."""
        sockets = bound_sockets([self.pid])
        self.signal(signal.SIGKILL)
        self.sweep()
        _unlink_sockets(sockets)

    def sweep(self) -> None:
        """Kill the rest of the process group, once: later the number may belong to others."""
        if self._swept:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is empty, or holds only the dead
            os.killpg(self.pid, signal.SIGKILL)
        self._swept = True
        if self._process.stdin is not None:
            self._process.stdin.close()


class Children:
    def __init__(self, policy: KillPolicy | None = None) -> None:
        self._policy = policy or KillPolicy()
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        *,
        environment: Mapping[str, str] = ONE_THREAD,
        shown: bool = False,
    ) -> Child:
        """Start `command` and return it at once. `environment`: added to ours. `shown`: it prints where we do."""
        with contextlib.ExitStack() as stack:
            out = err = None
            if not shown:
                logs.mkdir(parents=True, exist_ok=True)
                out, err = (stack.enter_context((logs / name).open("wb")) for name in ("out.log", "err.log"))
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
            )
        child = Child(name, process, logs)
        self._children.append(child)
        return child

    def running(self) -> list[Child]:
        return [child for child in self._children if child.exit_code is None]

    async def stop(self) -> None:
        """End them all, politely at first; if cancelled, kill at once."""
        sockets = bound_sockets(child.pid for child in self._children)
        try:
            for number, wait_s in (
                (signal.SIGINT, self._policy.interrupt_s),
                (signal.SIGTERM, self._policy.terminate_s),
            ):
                for child in self.running():
                    child.signal(number)
                if await self._all_ended(wait_s):
                    break
        finally:
            self.kill()
        await self._all_ended(self._policy.kill_s)
        _unlink_sockets(sockets)

    def kill(self) -> None:
        """Kill every process of every child, and await nothing."""
        for child in self._children:
            child.sweep()

    async def _all_ended(self, wait_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while self.running():
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True


def tied_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python module so that it ends with its parent."""
    return [sys.executable, "-m", "noloco_node.demo.child_processes", module, *arguments]


def bound_sockets(groups: Iterable[int]) -> frozenset[Path]:
    """Return the paths of the unix sockets that processes of these groups have bound.

    A process that is killed leaves the file of its socket behind, and nobody else knows the name.
    """
    wanted, paths = set(groups), set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it ended meanwhile, or is not ours
            if os.getpgid(process.pid) in wanted:
                paths |= {Path(str(bound.laddr)) for bound in process.net_connections("unix")}
    return frozenset(path for path in paths if path.is_absolute())


def _unlink_sockets(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


def leave_with_parent(descriptor: int) -> None:
    """Read `descriptor` to its end, then signal this process: SIGINT, SIGTERM, SIGKILL, with a pause between."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass  # a standard input that cannot be read is no parent either
    never = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        never.wait(FIRMER_AFTER_S)


def main() -> None:
    """Tie this process to its parent and become the module."""
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    # A shell that starts us in the background lets its children ignore the interrupt: here it is how they are stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=leave_with_parent, args=(0,), name="parent", daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
