"""libp2p's daemon (p2pd) as a child process of ours: its arguments, its life, and the directory of its sockets.

We start it ourselves and let hivemind connect to it, instead of letting hivemind start it, for three reasons:

- it runs in a session of its own, so that Ctrl-C in a terminal reaches us and not it: a polite leave needs the network;
- its sockets lie in a directory of ours, which goes away with it, also when the start-up is cancelled half-way;
- its death is an event. (hivemind does not notice: its `is_alive` stays true and its calls hang.) The end of the
  child's output is that event: the pipe closes with the last process that holds it, and the daemon has no children.

If we are killed, the daemon ends by itself, because it lost its client. The directory stays, and the next process
that starts removes it: every directory of our name and user whose mark nobody holds. The mark is a file under the
kernel's lock, which ends with the process, so no process number can be mistaken, not even across containers that
share /tmp. We lock it before it gets its name, so a directory that is just being made is never taken for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.libp2p.addresses import beyond_this_machine, parse_peer_address
from noloco_node.libp2p.settings import Reachability

logger = logging.getLogger(__name__)

WITHIN_S = 600.0  # deaths that lie farther back say nothing about the next one
MOST_DEATHS = 10
_LONGEST_PAUSE_S = 30.0
_READY = "Peer ID:"
_GREETINGS = ("Control socket:", "Peer Addrs:", "/")
_TERMINATE_S = 2.0
_NEWS_S = 0.2
_END_S = 0.05  # between the end of a process's output and its own
_OUTPUT_BYTES = 1 << 16

_PREFIX = "noloco-"
_MARK = "owner"
_LONGEST_SOCKET_PATH = 100  # the kernel's limit for the path of a Unix socket is 108 bytes

RELAY_TIME_S, RELAY_DATA_BYTES = 24 * 3600, 1 << 40  # what our relays grant each circuit
_ENOUGH_RELAYS = 4
_RELAY_BUFFER_BYTES = 256 * 1024
"""Each way of each circuit. By default 16 MiB: strangers who open circuits would take the memory."""


class Daemon:
    """A running p2pd: `died` completes with its last words when it is gone, for whatever reason."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        assert process.stdout is not None
        self.control_path = str(directory / "control.sock")
        self.stream_path = str(directory / "streams.sock")
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self._process, self._output = process, process.stdout
        self._ready = asyncio.Event()
        self._partial = b""
        self._words: deque[str] = deque(maxlen=8)
        self._ended = ""
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._output.fileno(), self._read_output)

    async def wait_until_ready(self, start_s: float) -> None:
        """Wait until the daemon can be asked; `UserError` when it is not there in time, or not any more."""
        try:
            async with asyncio.timeout(start_s):
                await self._ready.wait()
        except TimeoutError:
            raise _did_not_start(f"it was not ready within {start_s:g} s") from None
        if self.died.done():
            raise _did_not_start(f"it ended at once: {self.died.result()}")

    async def wait(self) -> str:
        """Wait until the daemon is gone, and return its last words. (To await `died` itself would cancel it.)"""
        await asyncio.wait({self.died})
        return self.died.result()

    async def is_dead(self) -> bool:
        """Say whether the daemon is gone; its sockets break a moment before we know."""
        await asyncio.wait({self.died}, timeout=_NEWS_S)
        return self.died.done()

    def end(self, why: str) -> None:
        """End a daemon that is of no use any more; `why`: its last words."""
        self._ended = why
        self._process.kill()

    async def stop(self) -> None:
        try:
            if not self.died.done():
                self._process.terminate()
                await asyncio.wait({self.died}, timeout=_TERMINATE_S)
        finally:
            # Closing its output precedes the death of a process by an instant, so this waits for that instant at most.
            self._process.kill()
            self._process.wait()
            self._loop.remove_reader(self._output.fileno())
            self._output.close()

    def _read_output(self) -> None:
        try:
            content = os.read(self._output.fileno(), _OUTPUT_BYTES)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._heed(_plain(line))
        if not content or len(self._partial) > _OUTPUT_BYTES:
            self._heed(_plain(self._partial))
            self._partial = b""
        if not content:
            self._loop.remove_reader(self._output.fileno())
            self.died.set_result(self._last_words())
            self._ready.set()

    def _last_words(self) -> str:
        if self._ended:
            return self._ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
            if code == -signal.SIGKILL:
                return "it was killed, as the system does when memory runs out"
        return self._words[-1] if self._words else "it said nothing"

    def _heed(self, text: str) -> None:
        if text.startswith(_READY):
            self._ready.set()
        elif text and not text.startswith(_GREETINGS):
            self._words.append(text)
            logger.debug("p2pd: %s", text)


@asynccontextmanager
async def start_daemon(
    binary: str, arguments: Sequence[str], parent: Path, start_s: float, processors: int = 0
) -> AsyncIterator[Daemon]:
    """Run p2pd with `arguments` for as long as the context, its sockets in a new directory in `parent`.

    `processors`: how many it may use at once; 0: all.

    Raises `UserError` (Exit.DAEMON) when it does not start.
    """
    directory = _new_directory(parent)
    try:
        # Popen, not asyncio's: nothing can be cancelled between the birth of the process and our knowing of it.
        try:
            process = subprocess.Popen(  # noqa: ASYNC220
                [binary, f"-listen=/unix{directory}/control.sock", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**os.environ, "GOLOG_LOG_LEVEL": "ERROR", "GOLOG_LOG_FMT": "json"}
                | ({"GOMAXPROCS": str(processors)} if processors else {}),
                start_new_session=True,
            )
        except OSError as error:
            raise _did_not_start(f"{binary}: {error.strerror}") from None
        daemon = Daemon(process, directory)
        try:
            await daemon.wait_until_ready(start_s)
            yield daemon
        finally:
            await daemon.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _plain(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    if not text.startswith("{"):
        return text
    try:
        record = json.loads(text)
    except ValueError:
        return text
    return ": ".join(str(record[key]) for key in ("msg", "error") if key in record) or text


def _did_not_start(why: str) -> UserError:
    return UserError(
        "The libp2p daemon did not start.",
        why=why,
        hint="check that this machine may run the program p2pd of the installed hivemind package "
        "and that its address to listen on is right",
        code=Exit.DAEMON,
    )


def restart_pause_s(deaths: Iterable[float], now: float) -> float | None:
    """Return how long to wait before a daemon is started again, after `deaths` (loop seconds): not at all, then ever
    longer; None where it is in vain.
    """
    recent = sum(now - death <= WITHIN_S for death in deaths)
    if recent > MOST_DEATHS:
        return None
    return 0.0 if recent <= 1 else min(_LONGEST_PAUSE_S, 2.0 ** (recent - 2))


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that is ours until the context ends; sweep away what dead processes left beside it."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_SOCKET_PATH - len("/noloco-12345678/12345678/control.sock"):
        parent = "/tmp"
    remove_stale(Path(parent))
    directory = _new_directory(Path(parent), _PREFIX)
    try:
        mark = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / "new").rename(directory / _MARK)
            yield directory
        finally:
            os.close(mark)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _new_directory(parent: Path, prefix: str = "") -> Path:
    """Make a directory for sockets; `UserError` (Exit.DAEMON) where the disk refuses."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise _did_not_start(f"its sockets have no place: {reason_of(error)}") from None


def remove_stale(parent: Path) -> list[Path]:
    """Remove the marked directories in `parent` whose owners are dead; return them. What cannot be removed stays."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in sorted(parent.glob(_PREFIX + "*")):
            with contextlib.suppress(OSError):
                if _is_ours(path) and _is_abandoned(path / _MARK):
                    shutil.rmtree(path)
                    removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_abandoned(mark: Path) -> bool:
    file = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon is started. `relays`: not empty if others reach us through these alone. `lends_line`: as in
    `Settings`. `dialable`: whether others reach us at all, as far as is known.
    """

    identity: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    lends_line: bool = True
    dialable: bool = True


def arguments(config: DaemonConfig, reach: Reachability) -> list[str]:
    """Return what p2pd is started with: a full member of libp2p's DHT, where peers find each other's addresses.

    A peer that is known to sit behind a router says so itself: libp2p would take half a minute to find out. Relays it
    looks for until it knows four, for three minutes, in which it takes no place at any. So where we know fewer, it is
    told that these are all; where there are enough, it may look for others should these end.
    """
    chosen = [
        *_common(config),
        "-dhtServer=1",
        f"-relayService={int(config.lends_line)}",
        f"-natPortMap={int(bool(beyond_this_machine(config.listen)))}",
    ]
    if config.relays:
        chosen += ["-autoRelay=1", "-forceReachabilityPrivate=1", f"-trustedRelays={','.join(config.relays)}"]
        if len({parse_peer_address(relay).peer for relay in config.relays}) < _ENOUGH_RELAYS:
            chosen.append("-relayDiscovery=0")
    elif reach is Reachability.OPEN:
        chosen.append("-forceReachabilityPublic=1")
    return chosen


def relay_arguments(config: DaemonConfig) -> list[str]:
    """Return what p2pd is started with to relay and do nothing else.

    libp2p ends a relayed connection after half an hour or four gibibytes by default. Peers behind routers train for
    days; a circuit that breaks costs them a microbatch or a round, so these limits only keep a relay from being a
    stranger's for ever.
    """
    return [
        *_common(config),
        "-connHi=2048",
        "-connLo=1024",
        "-relayService=1",
        f"-relayTimeLimit={RELAY_TIME_S}s",
        f"-relayDataLimit={RELAY_DATA_BYTES}",
        "-relayMaxCircuits=128",
        "-forceReachabilityPublic=1",
    ]


def _common(config: DaemonConfig) -> list[str]:
    chosen = [
        f"-id={config.identity}",
        f"-hostAddrs={','.join(config.listen)}",
        "-tls=1",
        "-autonat=1",
        "-connManager=1",
        "-relay=1",
        f"-relayBufferSize={_RELAY_BUFFER_BYTES}",
        "-idleTimeout=30s",
    ]
    return [*chosen, f"-announceAddrs={','.join(config.announce)}"] if config.announce else chosen
