"""The network over real libp2p daemons: what arrives, what is lost and how soon that shows, and what stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import uvloop

from noloco_node.errors import Exit, Trouble
from noloco_node.libp2p.addresses import beyond_this_machine
from noloco_node.libp2p.network import Libp2p, Settings
from noloco_node.libp2p.records import RecordLimits, overlook_orphans
from noloco_node.libp2p.stream import Patience
from noloco_node.libp2p.switchboard import Capacity
from noloco_node.port import Conversation
from noloco_node.wire import MessageSpec, Schema, TensorSpec

pytestmark = pytest.mark.network

NOBODY = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
LOCAL = "/ip4/127.0.0.1/tcp/0"
QUICK = Patience(beat_s=0.1, silence_s=0.8, open_s=3.0, dht_s=5.0)
BIG = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """16 MiB, or nothing."""

    numbers: torch.Tensor | None


SMALL = Schema({Ask: MessageSpec()})
LARGE = Schema({Bulk: MessageSpec({"numbers": TensorSpec((BIG,), "float32")})})


def p2pds() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.name() == "p2pd"}


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    temporary = tempfile.mkdtemp(prefix="noloco-network-")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    yield
    gc.collect()
    assert not psutil.Process().children()
    os.rmdir(temporary)


def run(main: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(limited())


on_both_loops = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@asynccontextmanager
async def peer(*bootstrap: str, prefix: str = "/noloco/1/run/", **settings: Any) -> AsyncIterator[tuple[Libp2p, int]]:
    """A peer on this machine, and the process id of its daemon."""
    before = p2pds()
    chosen = {"listen": (LOCAL,), "patience": QUICK, "bootstrap": bootstrap} | settings
    async with Libp2p.open(Settings(prefix=prefix, **chosen)) as network:
        (daemon,) = p2pds() - before
        yield network, daemon


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[Libp2p, int, Libp2p, int]]:
    async with peer() as (one, one_daemon), peer(*await one.addresses(), **settings) as (other, other_daemon):
        yield one, one_daemon, other, other_daemon


async def echo(conversation: Conversation) -> None:
    while True:
        await conversation.send(await conversation.receive())


async def took(call: Awaitable[Any]) -> float:
    begun = time.monotonic()
    await call
    return time.monotonic() - begun


async def fails(call: Callable[[], Awaitable[Any]], error: type[Exception], match: str) -> float:
    """Check that `call` raises `error`; return after how many seconds it did."""
    begun = time.monotonic()
    with pytest.raises(error, match=match):
        await call()
    return time.monotonic() - begun


class Work:
    """A handler that takes one question and then works for ever; tells what became of it."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, conversation: Conversation) -> None:
        try:
            await conversation.receive()
            self.begun.set()
            await asyncio.Event().wait()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


@on_both_loops
def test_what_is_sent_arrives_and_what_is_not_understood_does_not(loop: Any) -> None:
    async def main() -> None:
        async with pair() as (one, _, other, _):
            await other.serve("ask", SMALL, echo)
            await other.serve("bulk", LARGE, echo)
            async with one.talk(other.peer_id, "ask", SMALL) as conversation:
                assert conversation.peer == other.peer_id
                for text in ("a", "b" * 60_000):
                    await conversation.send(Ask(text=text))
                    assert await conversation.receive() == Ask(text=text)
            numbers = torch.randn(BIG)
            async with one.talk(other.peer_id, "bulk", LARGE) as conversation:
                await conversation.send(Bulk(numbers=numbers))
                assert torch.equal((await conversation.receive()).numbers, numbers)
            assert one.statistics()["bytes.sent.bulk"] > 4 * BIG
            assert other.statistics()["bytes.received.bulk"] > 4 * BIG

            # A stranger to the schema is told so, counted, and harms nobody.
            async with one.talk(other.peer_id, "bulk", SMALL) as conversation:
                await conversation.send(Ask(text="not what you speak of"))
                await fails(conversation.receive, ConnectionResetError, "does not decode")
            assert other.statistics()[f"violations.{one.peer_id}"] == 1
            async with one.talk(other.peer_id, "ask", SMALL) as conversation:
                await conversation.send(Ask(text="still there?"))
                assert await conversation.receive() == Ask(text="still there?")

            # Topics that nobody serves, peers that nobody knows, peers of another run.
            for who, topic, words in (
                (other.peer_id, "nonsense", "this run or version"),
                (NOBODY, "ask", "cannot be reached"),
            ):
                talk = one.talk(who, topic, SMALL)
                assert await fails(talk.__aenter__, ConnectionRefusedError, words) < 1.0
            await fails(one.talk("not base58", "ask", SMALL).__aenter__, ConnectionRefusedError, "no peer id")
            async with peer(*await one.addresses(), prefix="/noloco/1/another/") as (stranger, _):
                talk = stranger.talk(other.peer_id, "ask", SMALL)
                await fails(talk.__aenter__, ConnectionRefusedError, "this run or version")

    run(main(), loop)


@on_both_loops
def test_conversations_end_as_they_should(loop: Any) -> None:
    async def main() -> None:
        async with pair(capacity=Capacity(per_peer=2)) as (one, _, other, _):
            heard: list[str] = []
            finished = asyncio.Event()

            async def listen(conversation: Conversation) -> None:
                heard.append((await conversation.receive()).text)
                await asyncio.sleep(0.05)
                heard.append((await conversation.receive()).text)
                finished.set()

            async def fail(conversation: Conversation) -> None:
                raise ValueError("a secret")

            work = Work()
            for topic, handler in (("listen", listen), ("fail", fail), ("work", work)):
                await other.serve(topic, SMALL, handler)

            # Leaving in the ordinary way loses nothing and cancels nothing.
            async with one.talk(other.peer_id, "listen", SMALL) as conversation:
                await conversation.send(Ask(text="first"))
                await conversation.send(Ask(text="last"))
            await finished.wait()
            assert heard == ["first", "last"]

            # A handler that fails says so, without its secrets; one that returns ends the conversation.
            async with one.talk(other.peer_id, "fail", SMALL) as conversation:
                await fails(conversation.receive, ConnectionResetError, "error: ValueError in the handler")
            async with one.talk(other.peer_id, "listen", SMALL) as conversation:
                await conversation.send(Ask(text="a"))
                await conversation.send(Ask(text="b"))
                await fails(conversation.receive, ConnectionResetError, "ended the conversation")
                await fails(lambda: conversation.send(Ask(text="c")), ConnectionResetError, "ended the conversation")

            # A caller that is cancelled cancels the callee's work.
            async def call() -> None:
                async with one.talk(other.peer_id, "work", SMALL) as conversation:
                    await conversation.send(Ask(text="work"))
                    await conversation.receive()

            calling = asyncio.create_task(call())
            await work.begun.wait()
            calling.cancel()
            assert await took(work.ended.wait()) < 0.5
            assert isinstance(work.error, asyncio.CancelledError)

            # One caller cannot occupy everything.
            await other.serve("echo", SMALL, echo)
            async with (
                one.talk(other.peer_id, "echo", SMALL) as first,
                one.talk(other.peer_id, "echo", SMALL) as second,
            ):
                for conversation in (first, second):
                    await conversation.send(Ask(text="hello"))
                    await conversation.receive()
                async with one.talk(other.peer_id, "echo", SMALL) as third:
                    await fails(third.receive, ConnectionResetError, "busy with 2 conversations of yours")
            assert other.statistics()["conversations.busy"] == 1

    run(main(), loop)


def test_beats_keep_a_long_silence_alive() -> None:
    async def main() -> None:
        async with pair() as (one, _, other, _):

            async def think(conversation: Conversation) -> None:
                await conversation.receive()
                await asyncio.sleep(2 * QUICK.silence_s)
                await conversation.send(Ask(text="done"))

            await other.serve("think", SMALL, think)
            async with one.talk(other.peer_id, "think", SMALL) as conversation:
                await conversation.send(Ask(text="think"))
                assert await conversation.receive() == Ask(text="done")

    run(main())


@on_both_loops
def test_a_killed_peer_is_lost_at_once_and_our_own_daemon_too(loop: Any) -> None:
    async def main() -> None:
        async with pair() as (one, _, other, other_daemon):
            work = Work()
            await other.serve("work", SMALL, work)
            watching = asyncio.create_task(other.wait_daemon())
            async with one.talk(other.peer_id, "work", SMALL) as conversation:
                await conversation.send(Ask(text="work"))
                await work.begun.wait()
                os.kill(other_daemon, signal.SIGKILL)
                assert await fails(conversation.receive, ConnectionResetError, "broke") < 1.0
            assert await took(work.ended.wait()) < 1.0
            talk = one.talk(other.peer_id, "work", SMALL)
            assert await fails(talk.__aenter__, ConnectionRefusedError, "cannot be reached") < 2.0

            # On the side whose daemon died nothing hangs, and it is said.
            with pytest.raises(Trouble, match="daemon died") as trouble:
                await watching
            assert trouble.value.code is Exit.DAEMON
            assert await took(other.publish("key", "me", b"x", 10.0)) < 1.0
            await fails(lambda: other.read("key"), ConnectionResetError, "daemon died")
            await fails(other.talk(one.peer_id, "x", SMALL).__aenter__, ConnectionResetError, "our own libp2p daemon")
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 3.0

    run(main(), loop)


def test_a_silent_peer_is_given_up_in_time_on_both_sides() -> None:
    async def main() -> None:
        async with pair() as (one, _, other, other_daemon):
            work = Work()
            await other.serve("work", SMALL, work)
            async with one.talk(other.peer_id, "work", SMALL) as conversation:
                await conversation.send(Ask(text="work"))
                await work.begun.wait()
                os.kill(other_daemon, signal.SIGSTOP)
                try:
                    waited = await fails(conversation.receive, ConnectionAbortedError, "was silent for 0.8 s")
                    assert QUICK.silence_s / 2 < waited < 2 * QUICK.silence_s
                    await work.ended.wait()
                finally:
                    os.kill(other_daemon, signal.SIGCONT)

    run(main())


def test_records_are_found_by_others_and_expire() -> None:
    async def main() -> None:
        async with pair() as (one, _, other, _):
            assert await one.read("run/stage/0") == {}
            assert await one.publish("run/stage/0", one.peer_id, b"first", 30.0)
            assert await other.publish("run/stage/0", other.peer_id, b"short", 1.0)
            assert await one.read("run/stage/0") == {one.peer_id: b"first", other.peer_id: b"short"}
            assert await one.publish("run/stage/0", one.peer_id, b"second", 31.0)
            found = await other.read("run/stage/0")
            while other.peer_id in found:
                found = await other.read("run/stage/0")
            assert found == {one.peer_id: b"second"}
            for size, lifetime_s in ((20_000, 10.0), (10, 1e6)):
                with pytest.raises(ValueError, match="more than the DHT takes"):
                    await one.publish("key", "me", b"x" * size, lifetime_s)

    run(main())


def trouble_of(*bootstrap: str, **settings: Any) -> Trouble:
    caught: list[Trouble] = []

    async def main() -> None:
        try:
            async with peer(*bootstrap, **settings):
                pytest.fail("it started")
        except Trouble as trouble:
            caught.append(trouble)

    run(main())
    return caught[0]


def test_each_trouble_at_the_start_is_told_from_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        trouble = trouble_of(listen=(address,))
        assert trouble.code is Exit.PORT_TAKEN
        assert address in str(trouble)
    for listen, words in (("nonsense", "unknown protocol"), ("/ip4/192.0.2.1/tcp/4001", "cannot listen there")):
        trouble = trouble_of(listen=(listen,))
        assert trouble.code is Exit.CONFIG
        assert words in str(trouble)
    trouble = trouble_of(f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", f"/dns4/no-such-host.invalid/tcp/1/p2p/{NOBODY}")
    assert trouble.code is Exit.UNREACHABLE
    assert f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}: connection refused" in trouble.why
    assert f"/dns4/no-such-host.invalid/tcp/1/p2p/{NOBODY}: the host's name does not resolve" in trouble.why
    assert trouble_of("/ip4/127.0.0.1/tcp/1").code is Exit.CONFIG


def test_a_wrong_peer_id_is_named_and_one_good_address_is_enough() -> None:
    async def main() -> None:
        async with peer() as (one, _):
            (good,) = await one.addresses()
            wrong = good.replace(one.peer_id, NOBODY)
            with pytest.raises(Trouble, match=f"another peer answers there: {one.peer_id}") as trouble:
                async with peer(wrong):
                    pytest.fail("it started")
            assert trouble.value.code is Exit.UNREACHABLE
            async with peer(wrong, "/ip4/127.0.0.1/tcp/1/p2p/" + NOBODY, good) as (other, _):
                assert await other.publish("key", other.peer_id, b"x", 10.0)
                assert await one.read("key") == {other.peer_id: b"x"}

    run(main())


def test_an_identity_survives_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    async def name() -> None:
        async with peer(identity=tmp_path / "identity") as (network, _):
            names.append(network.peer_id)

    names: list[str] = []
    run(name())
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o600
    run(name())
    assert names[0] == names[1]
    (tmp_path / "identity").write_bytes(b"\x08\x01\x12\x40 short")
    assert trouble_of(identity=tmp_path / "identity").code is Exit.STORAGE
    assert trouble_of(identity=tmp_path / "absent" / "identity").code is Exit.STORAGE


@on_both_loops
def test_a_start_that_is_cancelled_leaves_nothing(loop: Any) -> None:
    async def main() -> None:
        async def start() -> None:
            async with peer():
                pytest.fail("it was not cancelled")

        starting = asyncio.create_task(start())
        while not p2pds():  # noqa: ASYNC110 (a process is born, which sets no event)
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not p2pds()

    run(main(), loop)


def test_a_daemon_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "identity").write_bytes(b"\x08" + b"x" * 60)
    trouble = trouble_of(identity=tmp_path / "identity")
    assert trouble.code is Exit.DAEMON
    assert "ended at once" in trouble.why


def test_hivemind_is_loaded_without_torch() -> None:
    program = (
        "import sys; from noloco_node.libp2p import network; network._load_hivemind();"
        "assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


class Record(NamedTuple):
    """A record as hivemind shows it to a validator."""

    subkey: bytes
    value: bytes
    expiration_time: float


def test_only_records_of_our_form_are_stored() -> None:
    subkey, value, soon = b"\xa1a", b"\xc4\x01x", time.time() + 30
    limits = RecordLimits()
    assert limits.validate(Record(subkey, value, soon))
    for wrong in (
        Record(b"\xc0", value, soon),
        Record(b"\xa1", value, soon),
        Record(subkey, b"\x01", soon),
        Record(subkey, b"\xc1", soon),
        Record(subkey, b"\xc5\xff\xff" + bytes(65535), soon),
        Record(subkey, value, soon + 1e5),
        Record(subkey, value, float("nan")),
    ):
        assert not limits.validate(wrong), wrong


def test_addresses_of_this_machine_are_for_this_machine_only() -> None:
    mixed = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/1", "/ip6/::1/tcp/1", "/dns4/example.org/tcp/1"]
    assert beyond_this_machine(mixed) == [mixed[1], mixed[3]]


@on_both_loops
def test_only_hivemind_s_forgotten_searches_are_overlooked(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        told: list[str] = []
        running = asyncio.get_running_loop()
        running.set_exception_handler(lambda _, context: told.append(context["message"]))
        overlook_orphans(running)

        async def ours() -> None:
            await asyncio.get_running_loop().create_future()

        async def forget(waiting: Coroutine[Any, Any, Any]) -> None:
            task = asyncio.create_task(waiting)
            await asyncio.sleep(0)
            del task

        await forget(asyncio.Event().wait())
        gc.collect()
        assert told == []
        await forget(ours())
        gc.collect()
        assert told == ["Task was destroyed but it is pending!"]

    run(main(), loop)
