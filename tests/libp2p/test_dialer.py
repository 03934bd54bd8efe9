"""Streams opened by way of a daemon, of which we play the part: what is cancelled half-way leaves nothing behind."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S, PATIENT
from sample_messages import ASKS, Ask
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import control
from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, place_text
from noloco_node.libp2p.control import Control, PeerContext, StreamDialer, delimited, read_delimited
from noloco_node.libp2p.daemon import private_directory, start_daemon
from noloco_node.libp2p.hivemind_compat import load_hivemind
from noloco_node.libp2p.settings import PROOF_BYTES, Capacity, NetworkSettings, RunSecret
from noloco_node.libp2p.stream import Stream
from noloco_node.libp2p.switchboard import Switchboard
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import Schema

pytestmark = pytest.mark.real_time
SECRET = RunSecret("run")
ME = "12D3KooWGKMUkB1hfRmXSjnKxXmYRyUnjGFQkSXPLfNkoR3r2hvS"
SOMEBODY = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"


def context(board: Switchboard) -> PeerContext:
    settings = NetworkSettings(run="run", timeouts=PATIENT)
    return PeerContext(load_hivemind(), Path(), settings, SECRET, board, KnownPeers())


class Watched(Switchboard):
    """A switchboard that tells the moment at which a stream has opened."""

    opened: Callable[[], None]

    def call(self, transport: asyncio.Transport, peer: str, topic: str, schema: Schema) -> Stream:
        stream = super().call(transport, peer, topic, schema)
        self.opened()
        return stream


async def dialled(
    directory: Path, answer: Any, opened: Callable[[asyncio.Task[Stream]], None]
) -> tuple[str, Switchboard]:
    """Dial by way of a daemon that answers so; `opened` is told of the task in the moment in which it opens."""
    parts, patience = load_hivemind(), PATIENT
    pb = parts.messages

    async def daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = pb.Request.FromString(await read_delimited(reader))
        assert request.streamOpen.proto == [SECRET.prefix + "topic"]
        writer.write(delimited(answer(pb)))
        await reader.read()
        writer.close()
        await writer.wait_closed()
        hung_up.set()

    place, hung_up = str(directory / "control.sock"), asyncio.Event()
    server = await asyncio.start_unix_server(daemon, place)
    board = Watched(patience, Capacity())
    likeness: Any = SimpleNamespace(control_path=place, stream_path=str(directory / "streams.sock"))
    dialer = StreamDialer(Control(parts, likeness), context(board), ME)
    dialling = asyncio.get_running_loop().create_task(dialer.dial(SOMEBODY, "topic", ASKS))
    board.opened = lambda: opened(dialling)
    try:
        async with asyncio.timeout(LAST_RESORT_S):
            await asyncio.wait([dialling])
            outcome = "cancelled"
            if not dialling.cancelled():
                error = dialling.exception()
                outcome = "open" if error is None else f"{type(error).__name__}: {error}"
            if outcome == "open":
                dialling.result().break_off(ConnectionResetError("enough"))
            await hung_up.wait()
            return outcome, board
    finally:
        server.close()


NOTHING = {"conversations.now": 0, "unread.bytes": 0, "unread.evicted": 0}


def accepted(pb: Any) -> Any:
    return pb.Response(type=pb.Response.OK)


def refused(pb: Any) -> Any:
    return pb.Response(type=pb.Response.ERROR, error=pb.ErrorResponse(msg="failed to dial"))


async def test_a_stream_opens_or_is_refused(tmp_path: Path) -> None:
    outcome, board = await dialled(tmp_path, accepted, lambda _: None)
    assert outcome == "open"
    assert board.statistics() == NOTHING | {
        "conversations.opened": 1,
        "lost.ConnectionResetError": 1,
        "bytes.sent.topic": 0,
        "bytes.received.topic": 0,
    }


async def test_a_refusal_is_the_peer_s(tmp_path: Path) -> None:
    outcome, board = await dialled(tmp_path, refused, lambda _: None)
    assert outcome == f"ConnectionRefusedError: {SOMEBODY} cannot be reached: failed to dial"
    assert board.statistics() == NOTHING | {"conversations.unopened": 1}


@pytest.mark.parametrize("late", [False, True], ids=["while it opens", "when it has just opened"])
async def test_a_dial_that_is_cancelled_in_the_moment_of_its_success_leaves_no_stream(
    tmp_path: Path, late: bool
) -> None:
    def cancel(dialling: asyncio.Task[Stream]) -> None:
        if late:
            asyncio.get_running_loop().call_soon(dialling.cancel)
        else:
            dialling.cancel()

    outcome, board = await dialled(tmp_path, accepted, cancel)
    assert outcome == "cancelled"
    assert board.statistics()["conversations.now"] == 0


@given(st.binary(max_size=80))
def test_an_address_of_a_stranger_is_text_or_nothing(raw: bytes) -> None:
    assert place_text(raw) == "" or place_text(raw).startswith("/")


async def knocked(
    directory: Path, topic: str, sent: Callable[[RunSecret], bytes]
) -> tuple[bytes, dict[str, int | float]]:
    """Open a stream to us as SOMEBODY, and return what comes back on it, and our counts."""
    parts, board, started = load_hivemind(), Switchboard(PATIENT, Capacity()), asyncio.Event()
    likeness: Any = SimpleNamespace(control_path="", stream_path=str(directory / "streams.sock"))
    dialer = StreamDialer(Control(parts, likeness), context(board), ME)

    async def answer(conversation: Conversation) -> None:
        await conversation.send(Ask(text="what is it?"))

    board.serve("topic", ASKS, answer)
    async with asyncio.timeout(LAST_RESORT_S), asyncio.TaskGroup() as group:
        service = group.create_task(board.run(started))
        await started.wait()
        await dialer.listen()
        reader, writer = await asyncio.open_unix_connection(likeness.stream_path)
        arrival = parts.messages.StreamInfo(peer=parts.peer_bytes(SOMEBODY), addr=b"", proto=SECRET.prefix + topic)
        writer.write(delimited(arrival) + sent(SECRET))
        heard = await reader.read(64)
        writer.close()
        dialer.close()
        service.cancel()
    return heard, board.statistics()


async def test_whoever_knows_the_run_is_answered(tmp_path: Path) -> None:
    heard, counts = await knocked(tmp_path, "topic", lambda secret: secret.proof(SOMEBODY, ME, "topic"))
    assert b"what is it?" in heard
    assert counts["conversations.answered"] == 1


@pytest.mark.parametrize(
    "sent",
    [
        lambda _: bytes(PROOF_BYTES),
        lambda _: RunSecret("another run").proof(SOMEBODY, ME, "topic"),
        lambda secret: secret.proof(ME, ME, "topic"),
        lambda secret: secret.proof(SOMEBODY, SOMEBODY, "topic"),
        lambda secret: secret.proof(SOMEBODY, ME, "another topic"),
    ],
    ids=["nothing", "another run's", "another caller's", "for another callee", "for another topic"],
)
async def test_whoever_only_knows_the_names_is_not(tmp_path: Path, sent: Callable[[RunSecret], bytes]) -> None:
    heard, counts = await knocked(tmp_path, "topic", sent)
    assert heard == b""
    assert "conversations.answered" not in counts


@given(st.text(max_size=80), st.text(max_size=80))
def test_what_everybody_sees_of_a_run_does_not_open_it(run: str, topic: str) -> None:
    secret = RunSecret(run)
    shown = repr(secret) + secret.prefix
    assert len(run) < 12 or run not in shown
    assert secret.key("relays") == f"{run}/relays"
    assert RunSecret(secret.prefix).proof(SOMEBODY, ME, topic) != secret.proof(SOMEBODY, ME, topic)
    assert secret.code("a", b"bc") != secret.code("ab", b"c") != secret.code("a", b"b", b"c")


# A daemon of ours that fails while it starts: it counts as any death, after which another one is tried.


async def test_a_daemon_without_a_place_for_its_sockets_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(UserError, match="did not start") as first, private_directory():
        pass
    with pytest.raises(UserError, match="did not start") as later:
        async with start_daemon("p2pd", (), Path(), 1.0):
            pass
    assert first.value.code is later.value.code is Exit.DAEMON


@pytest.mark.parametrize(
    "breaks", [asyncio.IncompleteReadError(b"", 1), FileNotFoundError(2, "No such file"), ConnectionResetError("gone")]
)
async def test_a_daemon_that_dies_while_it_is_greeted_is_trouble_with_it(
    breaks: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(_: str) -> None:
        raise breaks

    @asynccontextmanager
    async def begun(*_: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(control_path="", died=asyncio.get_running_loop().create_future())

    monkeypatch.setattr(control, "start_daemon", begun)
    parts: Any = SimpleNamespace(binary="", connect=connect)
    with user_error(Exit.DAEMON):
        async with Control.start(parts, (), Path(), 1.0):
            pass


async def test_an_address_that_is_named_twice_is_unreachable_too() -> None:
    class Deaf(Control):
        async def connect(self, address: PeerAddress, wait_s: float) -> str | None:
            return "nobody is there"

    nothing: Any = None
    door = PeerAddress("/ip4/192.0.2.1/tcp/4001", SOMEBODY)
    with user_error(Exit.UNREACHABLE):
        await Deaf(nothing, nothing).knock([door, door], 1.0)


async def test_no_earlier_address_of_a_peer_that_answers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Half(Control):
        async def connect(self, address: PeerAddress, wait_s: float) -> str | None:
            return None if address.transport.endswith("/4001") else "no program listens there"

    nothing: Any = None
    doors = [
        PeerAddress("/ip4/192.0.2.1/tcp/4000", SOMEBODY),
        PeerAddress("/ip4/192.0.2.1/tcp/4001", SOMEBODY),
        PeerAddress("/ip4/192.0.2.2/tcp/4000", ME),
    ]
    assert await Half(nothing, nothing).knock(doors, 1.0, logging.WARNING) == doors[1:2]
    (warning,) = caplog.messages
    assert str(doors[2]) in warning
