"""libp2p's daemon (p2pd) as a child process of ours: started, watched, and gone when we go.

We start it ourselves and let hivemind connect to it, instead of letting hivemind start it, because of what follows only
then:

- it runs in a session of its own, so that Ctrl-C in a terminal reaches us and not it: a polite leave needs the network;
- its sockets lie in a private directory, which goes away with it, also when the start-up is cancelled half-way;
- its death is an event. (hivemind does not notice: its `is_alive` stays true and its calls hang.) The end of the
  child's output is that event: the pipe closes with the last process that holds it, and the daemon has no children.

Should we be killed, the daemon ends by itself: it lost its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from noloco_node.errors import Exit, Trouble

logger = logging.getLogger(__name__)

_READY = "Peer ID:"
_TERMINATE_S = 2.0
_LONGEST_SOCKET_PATH = 100
"""The kernel's limit for the path of a Unix socket is 108 bytes."""


class Daemon:
    """A running p2pd: `died` completes with its last words when it is gone, for whatever reason."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.control_path = str(directory / "control.sock")
        self.stream_path = str(directory / "streams.sock")
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._ready = asyncio.Event()
        self._words: deque[str] = deque(maxlen=8)

    def __repr__(self) -> str:
        return f"Daemon(pid {self.pid}, {'dead' if self.died.done() else 'alive'})"

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        return self._process.pid

    async def _read_output(self, reader: asyncio.StreamReader) -> None:
        """Follow the daemon's output until it is gone."""
        try:
            while line := await _read_line(reader):
                text = _plain(line)
                if text.startswith(_READY):
                    self._ready.set()
                elif text:
                    self._words.append(text)
                    logger.debug("p2pd: %s", text)
        finally:
            self.died.set_result(self._words[-1] if self._words else "it said nothing")
            self._ready.set()

    async def _wait_until_ready(self, start_s: float) -> None:
        try:
            async with asyncio.timeout(start_s):
                await self._ready.wait()
        except TimeoutError:
            raise _did_not_start(f"it was not ready within {start_s:g} s") from None
        if self.died.done():
            raise _did_not_start(f"it ended at once: {self.died.result()}")

    async def _stop(self) -> None:
        """End the process: politely, then not."""
        try:
            if not self.died.done():
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TERMINATE_S):
                        await asyncio.shield(self.died)
        finally:
            # Closing its output precedes the death of a process by an instant, so this waits for that instant at most.
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def start_daemon(binary: str, arguments: Sequence[str], start_s: float) -> AsyncIterator[Daemon]:
    """Run p2pd with `arguments` for as long as the context; Trouble(Exit.DAEMON) when it does not start."""
    directory = _private_directory()
    try:
        # Popen, not asyncio's: it cannot be cancelled between the birth of the process and our knowing of it.
        environment = {**os.environ, "GOLOG_LOG_LEVEL": "ERROR", "GOLOG_LOG_FMT": "json"}
        try:
            process = subprocess.Popen(  # noqa: ASYNC220
                [binary, f"-listen=/unix{directory}/control.sock", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise _did_not_start(f"{binary}: {error.strerror}") from None
        daemon = Daemon(process, directory)
        transport: asyncio.ReadTransport | None = None
        reading: asyncio.Task[None] | None = None
        try:
            reader = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), process.stdout
            )
            reading = asyncio.get_running_loop().create_task(daemon._read_output(reader), name="p2pd's output")
            await daemon._wait_until_ready(start_s)
            yield daemon
        finally:
            try:
                await daemon._stop()
            finally:
                if reading is not None:
                    reading.cancel()
                if transport is not None:
                    transport.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _private_directory() -> Path:
    directory = tempfile.gettempdir()
    if len(directory) > _LONGEST_SOCKET_PATH - len("/noloco-12345678/control.sock"):
        directory = "/tmp"
    return Path(tempfile.mkdtemp(prefix="noloco-", dir=directory))


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, cut where it is absurdly long; empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)


def _plain(line: bytes) -> str:
    """Return the sentence in a line of the daemon's output, which is JSON for what its libraries log."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("{"):
        return text
    try:
        record = json.loads(text)
    except ValueError:
        return text
    return ": ".join(str(record[key]) for key in ("msg", "error") if key in record) or text


def _did_not_start(why: str) -> Trouble:
    return Trouble(
        "The libp2p daemon did not start.",
        why=why,
        attempt="check that this machine may run the program p2pd of the installed hivemind package "
        "and that its address to listen on is right; `noloco-node doctor` tests both",
        code=Exit.DAEMON,
    )
