"""The network over real libp2p daemons: what arrives, what is lost and how soon that shows, and what stays behind."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch
from event_loops import on_both_loops, on_uvloop
from handlers import Work, echo
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S, PATIENT, RECORD_S
from sample_messages import ASKS, Ask, Bulk
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import network as libp2p_network
from noloco_node.libp2p import reachability
from noloco_node.libp2p.addresses import PeerAddress, parse_peer_address, port_of
from noloco_node.libp2p.daemon import (
    RELAY_DATA_BYTES,
    RELAY_TIME_S,
    WITHIN_S,
    private_directory,
    remove_stale,
    restart_pause_s,
)
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.reachability import DialBackReply, DialMe
from noloco_node.libp2p.relays import Grant
from noloco_node.libp2p.settings import NetworkSettings, Reachability, TimeoutSettings, ensure_identity
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, TensorSpec
from noloco_node.network.swarm_clock import CLOCK

pytestmark = pytest.mark.network

NOBODY = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
LOCAL = "/ip4/127.0.0.1/tcp/0"
SILENCE_S = 3.0
QUICK = msgspec.structs.replace(
    PATIENT, beat_s=0.1, silence_s=SILENCE_S, least_silence_s=SILENCE_S, most_silence_s=SILENCE_S
)
"""Gives a silent peer up, after some thirty beats: so many a busy machine does not miss."""
BIG = 4 * 1024 * 1024
LARGE = Schema({Bulk: MessageSpec("Bulk", {"numbers": TensorSpec((BIG,), "float32")})})


def p2pds() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.name() == "p2pd"}


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    temporary = tempfile.mkdtemp(prefix="noloco-network-")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    earlier = psutil.Process().children()
    yield
    gc.collect()
    assert psutil.Process().children() == earlier
    os.rmdir(temporary)


@asynccontextmanager
async def peer(
    *bootstrap: str, run: str = "run", tell: Callable[[str], None] = print, **settings: Any
) -> AsyncIterator[tuple[Libp2pNetwork, int]]:
    """A peer on this machine, and the process id of its daemon."""
    before = p2pds()
    chosen = {"listen": (LOCAL,), "timeouts": PATIENT, "bootstrap": bootstrap} | settings
    async with Libp2pNetwork.open(NetworkSettings(run=run, **chosen), tell) as network:
        (daemon,) = p2pds() - before
        yield network, daemon


@asynccontextmanager
async def pair(
    timeouts: TimeoutSettings = PATIENT, **settings: Any
) -> AsyncIterator[tuple[Libp2pNetwork, int, Libp2pNetwork, int]]:
    async with (
        peer(timeouts=timeouts) as (one, one_daemon),
        peer(*await one.addresses(), timeouts=timeouts, **settings) as (other, other_daemon),
    ):
        yield one, one_daemon, other, other_daemon


async def fails(call: Callable[[], Awaitable[Any]], error: type[Exception], match: str) -> None:
    """Check that `call` raises `error`."""
    with pytest.raises(error, match=match):
        await call()


@on_both_loops
async def test_what_is_sent_arrives_and_what_is_not_understood_does_not(loop: Any) -> None:
    async with pair() as (one, _, other, _):
        await other.serve("ask", ASKS, echo)
        await other.serve("bulk", LARGE, echo)
        async with one.talk(other.peer_id, "ask", ASKS) as conversation:
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
        async with one.talk(other.peer_id, "bulk", ASKS) as conversation:
            await conversation.send(Ask(text="not what you speak of"))
            await fails(conversation.receive, ConnectionResetError, "does not decode")
        assert other.statistics()[f"violations.{one.peer_id}"] == 1
        async with one.talk(other.peer_id, "ask", ASKS) as conversation:
            await conversation.send(Ask(text="still there?"))
            assert await conversation.receive() == Ask(text="still there?")

        # Topics that nobody serves, peers that nobody knows, peers of another run.
        for who, topic, words in (
            (other.peer_id, "nonsense", "this run or version"),
            (NOBODY, "ask", "cannot be reached"),
        ):
            talk = one.talk(who, topic, ASKS)
            await fails(talk.__aenter__, ConnectionRefusedError, words)
        await fails(one.talk("not base58", "ask", ASKS).__aenter__, ConnectionRefusedError, "no peer id")
        with user_error(Exit.OTHER_RUN, "takes part in this run"):
            async with peer(*await one.addresses(), run="another"):
                pass


@on_both_loops
async def test_conversations_end_as_they_should(loop: Any) -> None:
    async with pair() as (one, _, other, _):
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
            await other.serve(topic, ASKS, handler)

        # Leaving in the ordinary way loses nothing and cancels nothing.
        async with one.talk(other.peer_id, "listen", ASKS) as conversation:
            await conversation.send(Ask(text="first"))
            await conversation.send(Ask(text="last"))
        await finished.wait()
        assert heard == ["first", "last"]

        # A handler that fails says so, without its secrets; one that returns ends the conversation.
        async with one.talk(other.peer_id, "fail", ASKS) as conversation:
            await fails(conversation.receive, ConnectionResetError, "error: ValueError in the handler")
        async with one.talk(other.peer_id, "listen", ASKS) as conversation:
            await conversation.send(Ask(text="a"))
            await conversation.send(Ask(text="b"))
            await fails(conversation.receive, ConnectionResetError, "ended the conversation")
            await fails(lambda: conversation.send(Ask(text="c")), ConnectionResetError, "ended the conversation")

        # A caller that is cancelled cancels the callee's work.
        async def call() -> None:
            async with one.talk(other.peer_id, "work", ASKS) as conversation:
                await conversation.send(Ask(text="work"))
                await conversation.receive()

        calling = asyncio.create_task(call())
        await work.begun.wait()
        calling.cancel()
        await work.ended.wait()
        assert work.outcome == "cancelled"

        # Another handler may serve a topic later, though the daemon is told of it once.
        await other.serve("fail", ASKS, echo)
        async with one.talk(other.peer_id, "fail", ASKS) as conversation:
            await conversation.send(Ask(text="hello"))
            assert await conversation.receive() == Ask(text="hello")


@on_uvloop
async def test_a_daemon_that_is_killed_is_lost_at_once_and_another_takes_its_place(loop: Any) -> None:
    said: list[str] = []
    async with peer(tell=said.append) as (one, one_daemon), peer(*await one.addresses()) as (other, _):
        work = Work()
        before = (one.peer_id, await one.addresses())
        for network in (one, other):
            await network.serve("work", ASKS, work)
            await network.serve("echo", ASKS, echo)
        watching = asyncio.create_task(one.wait_daemon())
        async with (
            other.talk(one.peer_id, "work", ASKS) as incoming,
            one.talk(other.peer_id, "echo", ASKS) as outgoing,
        ):
            await incoming.send(Ask(text="work"))
            await work.begun.wait()
            reading = asyncio.create_task(one.read("key"))
            os.kill(one_daemon, signal.SIGKILL)
            await fails(incoming.receive, ConnectionResetError, "broke")
            await fails(outgoing.receive, ConnectionResetError, "broke")
        await work.ended.wait()
        with contextlib.suppress(ConnectionResetError):
            await reading

        # Calls that begin now wait for the daemon that takes its place: the same peer, at the same address.
        async with one.talk(other.peer_id, "echo", ASKS) as conversation:
            await conversation.send(Ask(text="are you there?"))
            assert await conversation.receive() == Ask(text="are you there?")
        assert (one.peer_id, await one.addresses()) == before
        assert one.statistics()["daemon.died"] == 1
        assert "daemon died (it was killed" in said[0]
        assert "back in the swarm" in said[1]
        assert not watching.done()
        watching.cancel()

        # It serves what it served, and is a node of the DHT again, though nobody told it whom to join by.
        async with other.talk(one.peer_id, "echo", ASKS) as conversation:
            await conversation.send(Ask(text="and you?"))
            assert await conversation.receive() == Ask(text="and you?")
        while not await other.publish("key", other.peer_id, b"x", RECORD_S):  # noqa: ASYNC110 (the DHT sets no event)
            await asyncio.sleep(0.1)
        assert await one.read("key") == {other.peer_id: b"x"}
        assert await one.read_all(["another", "key"]) == [{}, {other.peer_id: b"x"}]


async def test_a_daemon_that_hangs_is_told_of_as_such_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_network, "REJOIN_S", 0.5)
    monkeypatch.setattr(libp2p_network, "ANSWER_S", 1.0)
    told: asyncio.Queue[str] = asyncio.Queue()
    async with peer(tell=told.put_nowait) as (one, daemon):
        before = (one.peer_id, await one.addresses())
        os.kill(daemon, signal.SIGSTOP)
        async with asyncio.timeout(LAST_RESORT_S):
            assert "our libp2p daemon died (it hung: it gave no answer for" in await told.get()
            assert "back in the swarm" in await told.get()
        assert (one.peer_id, await one.addresses()) == before


async def test_daemons_that_die_again_and_again_are_given_up() -> None:
    async with peer() as (one, _):
        cast(Any, one)._deaths.extend([asyncio.get_running_loop().time()] * 10)
        (daemon,) = p2pds()
        os.kill(daemon, signal.SIGKILL)
        with user_error(Exit.DAEMON, "again and again"):
            await one.wait_daemon()
        # Nothing hangs.
        assert not await one.publish("key", "me", b"x", RECORD_S)
        await fails(lambda: one.read("key"), ConnectionResetError, "our own libp2p daemon")
        assert await one.read_all(["key", "another"]) == [None, None]
        await fails(one.talk(NOBODY, "x", ASKS).__aenter__, ConnectionResetError, "our own libp2p daemon")


async def test_beats_keep_a_long_silence_alive_and_a_silent_peer_is_given_up_on_both_sides() -> None:
    async with pair(QUICK) as (one, _, other, other_daemon):
        work = Work()

        async def think(conversation: Conversation) -> None:
            await conversation.receive()
            await asyncio.sleep(1.5 * SILENCE_S)
            await conversation.send(Ask(text="done"))
            await work(conversation)

        await other.serve("think", ASKS, think)
        async with one.talk(other.peer_id, "think", ASKS) as conversation:
            await conversation.send(Ask(text="think"))
            assert await conversation.receive() == Ask(text="done")
            await conversation.send(Ask(text="work"))
            await work.begun.wait()
            os.kill(other_daemon, signal.SIGSTOP)
            try:
                await fails(conversation.receive, ConnectionAbortedError, r"was silent for 3\.0 s")
                await work.ended.wait()
            finally:
                os.kill(other_daemon, signal.SIGCONT)


@given(st.lists(st.floats(0, 1e4), max_size=30).map(sorted), st.floats(0, 1e3))
def test_a_daemon_is_started_again_at_once_then_ever_later_then_never(deaths: list[float], later: float) -> None:
    now = (deaths[-1] if deaths else 0.0) + later
    recent = [death for death in deaths if now - death <= WITHIN_S]
    wait = restart_pause_s(deaths, now)
    if len(recent) <= 1:
        assert wait == 0
    elif wait is None:
        assert len(recent) > 10
    else:
        assert 0 < wait <= 30
        sooner = restart_pause_s(recent[1:], now)
        assert sooner is not None
        assert sooner <= wait


async def test_records_are_found_by_others_and_expire() -> None:
    async with pair() as (one, _, other, _):
        assert await one.read("run/stage/0") == {}
        assert await one.publish("run/stage/0", one.peer_id, b"first", RECORD_S)
        found, lifetime_s = await one.read("run/stage/0"), 1.0
        while other.peer_id not in found:  # a busy machine may come too late for a short life
            assert await other.publish("run/stage/0", other.peer_id, b"short", lifetime_s)
            found, lifetime_s = await one.read("run/stage/0"), 2 * lifetime_s
        assert found == {one.peer_id: b"first", other.peer_id: b"short"}
        assert await one.publish("run/stage/0", one.peer_id, b"second", RECORD_S + 1.0)
        while other.peer_id in found:
            found = await other.read("run/stage/0")
        assert found == {one.peer_id: b"second"}
        for size, lifetime_s in ((20_000, 10.0), (10, 1e6)):
            with pytest.raises(ValueError, match="more than the DHT takes"):
                await one.publish("key", "me", b"x" * size, lifetime_s)


async def test_whom_the_dht_has_forgotten_it_meets_again_though_connections_outlasted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p_network, "REJOIN_S", 0.1)

    async with pair() as (one, _, other, _):
        for network in (one, other):
            table = dht_of(network).protocol.routing_table
            for node_id in list(table.uid_to_peer_id):
                del table[node_id]
            for _ in range(10):
                dht_of(network).blacklist.register_failure(NOBODY)
        tables = [dht_of(network).protocol.routing_table.uid_to_peer_id for network in (one, other)]
        while not all(tables):  # noqa: ASYNC110 (the DHT sets no event)
            await asyncio.sleep(0.1)
        assert one.statistics()["rejoined"] == 0
        ((_, entry),) = dht_of(one).blacklist.banned_peers.items()
        assert entry.expiration_time - time.time() < 20.0


async def test_records_are_found_by_the_time_that_others_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is a year behind them takes part as if it were right."""
    year_s = 365 * 86400.0
    monkeypatch.setattr(CLOCK, "_told", {})
    monkeypatch.setattr(CLOCK, "_offset_s", CLOCK._offset_s)
    monkeypatch.setattr(CLOCK, "_is_theirs", False)
    monkeypatch.setattr(CLOCK, "own_s", lambda: time.time() + year_s)
    async with pair() as (one, _, other, _):
        assert CLOCK.ahead_s() == pytest.approx(-year_s, abs=RECORD_S)
        assert await other.publish("key", other.peer_id, b"x", RECORD_S)
        assert await one.read("key") == {other.peer_id: b"x"}
    monkeypatch.undo()
    assert abs(CLOCK.ahead_s()) < 1.0


async def test_two_parts_of_a_swarm_that_were_cut_apart_find_each_other_though_either_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part has neighbours, connections and a DHT that answers, so nobody lacks anything."""
    monkeypatch.setattr(libp2p_network, "REJOIN_S", 0.1)

    async with pair() as (one, _, _, _), pair() as (far, _, farther, _):
        assert await farther.publish("key", farther.peer_id, b"there", RECORD_S)
        assert await one.read("key") == {}
        one._context.known_peers.note(map(parse_peer_address, await far.addresses()))
        while await one.read("key") != {farther.peer_id: b"there"}:  # noqa: ASYNC110 (the DHT sets no event)
            await asyncio.sleep(0.1)
        assert one.statistics()["rejoined"] == 0, "it was never out"


def dht_of(network: Libp2pNetwork) -> Any:
    """Return hivemind's node."""
    return cast(Any, network._joined.records._node)._node


async def trouble_of(*bootstrap: str, **settings: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        async with peer(*bootstrap, **settings):
            pytest.fail("it started")
    return caught.value


async def test_each_trouble_at_the_start_is_told_from_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        trouble = await trouble_of(listen=(address,))
        assert trouble.code is Exit.PORT_TAKEN
        assert address in str(trouble)
    for listen, words in (
        ("nonsense", "unknown protocol"),
        ("/ip4/198.51.100.1/tcp/4001", "cannot listen there"),
        ("/ip4/198.51.100.1/tcp/0", "cannot listen there"),
    ):
        trouble = await trouble_of(listen=(listen,))
        assert trouble.code is Exit.CONFIG
        assert words in str(trouble)
    trouble = await trouble_of(f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", f"/dns4/no-such-host.invalid/tcp/1/p2p/{NOBODY}")
    assert trouble.code is Exit.UNREACHABLE
    assert f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}: connection refused" in trouble.why
    assert f"/dns4/no-such-host.invalid/tcp/1/p2p/{NOBODY}: the host's name does not resolve" in trouble.why
    assert (await trouble_of("/ip4/127.0.0.1/tcp/1")).code is Exit.CONFIG


async def test_a_wrong_peer_id_is_named_and_one_good_address_is_enough() -> None:
    async with peer() as (one, _):
        (good,) = await one.addresses()
        wrong = good.replace(one.peer_id, NOBODY)
        with user_error(Exit.UNREACHABLE, f"another peer answers there: {one.peer_id}"):
            async with peer(wrong):
                pytest.fail("it started")
        async with peer(wrong, "/ip4/127.0.0.1/tcp/1/p2p/" + NOBODY, good) as (other, _):
            assert await other.publish("key", other.peer_id, b"x", RECORD_S)
            assert await one.read("key") == {other.peer_id: b"x"}


async def test_an_identity_survives_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path, names = tmp_path / "identity", set[str]()
    for _ in range(2):
        async with peer(identity=path) as (network, _):
            names.add(network.peer_id)
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(names) == 1
    assert (await trouble_of(identity=tmp_path / "absent" / "identity")).code is Exit.STORAGE


@settings(max_examples=60)
@given(st.binary(max_size=80) | st.integers(0, 68 * 8 - 1) | st.just(b"\x08\x00\x12" + bytes(300)))
def test_a_damaged_identity_is_refused_whatever_bit_of_it_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes | int
) -> None:
    """A peer whose key has one wrong bit was told that all others belong to another run."""
    path = tmp_path_factory.mktemp("damaged") / "identity.key"
    assert not ensure_identity(path)
    assert ensure_identity(path)
    if isinstance(damage, int):
        key = bytearray(path.read_bytes())
        key[damage // 8] ^= 1 << damage % 8
        damage = bytes(key)
    path.write_bytes(damage)
    with pytest.raises(UserError, match="is damaged") as trouble:
        ensure_identity(path)
    assert trouble.value.code is Exit.CONFIG, "no other start would end otherwise"


async def test_a_copied_identity_is_noticed_at_the_start(tmp_path: Path) -> None:
    identity, copy = tmp_path / "identity", tmp_path / "copy"
    async with peer() as (boot, _):
        door = await boot.addresses()
        async with peer(*door, identity=identity) as (original, _):
            copy.write_bytes(identity.read_bytes())
            with user_error(Exit.HOME_IN_USE, "identity of this one") as trouble:
                async with peer(*door, identity=copy):
                    pytest.fail("it started")
            assert original.peer_id in trouble.value.why
        # Once the original is gone, the identity is free.
        async with peer(*door, identity=copy) as (heir, _):
            assert heir.peer_id == original.peer_id


async def test_whoever_asks_is_dialled_back_and_told_of_relays(tmp_path: Path) -> None:
    anywhere = ("/ip4/0.0.0.0/tcp/0",)

    async def ask(network: Libp2pNetwork, peer: str, *ports: int) -> DialBackReply:
        async with network.talk(peer, reachability.TOPIC, reachability.SCHEMA) as conversation:
            await conversation.send(DialMe(ports=ports))
            return cast(DialBackReply, await conversation.receive())

    said: list[str] = []
    async with peer(listen=anywhere, reach=Reachability.OPEN, tell=said.append) as (boot, _):
        before = p2pds()
        async with boot.relaying([tmp_path / "one.key", tmp_path / "two.key"]) as relays:
            assert len({parse_peer_address(relay).peer for relay in relays}) == 2
            async with peer(*await boot.addresses(), listen=anywhere, tell=said.append) as (joiner, _):
                assert said == []  # a scout went, and found nothing to change
                port = port_of((await joiner.addresses())[0])
                answer = await ask(joiner, boot.peer_id, 1, port)
                assert port_of(answer.place) == port
                assert set(answer.relays) == set(relays)
                assert (await ask(joiner, boot.peer_id, 1)) == DialBackReply(place="", tried=True, relays=answer.relays)
                assert not (await ask(joiner, boot.peer_id)).tried

            # A relay that dies is started again.
            relay = min(p2pds() - before)
            running = p2pds()
            os.kill(relay, signal.SIGKILL)
            while len(p2pds() - {relay}) < len(running):  # noqa: ASYNC110 (a process is born)
                await asyncio.sleep(0.05)
            assert "the relay on port" in said[0]


async def test_every_relay_grants_what_it_was_told_to(tmp_path: Path) -> None:
    async with peer(listen=("/ip4/0.0.0.0/tcp/0",), reach=Reachability.OPEN) as (boot, _):
        async with boot.relaying([tmp_path / f"{number}.key" for number in range(6)]) as relays:
            for relay in relays:
                assert await boot._granted([parse_peer_address(relay)]) == Grant(RELAY_TIME_S, RELAY_DATA_BYTES)
            with pytest.raises(UserError, match="reached"):
                await boot._granted([PeerAddress("/ip4/127.0.0.1/tcp/1", NOBODY)])
        async with peer(*await boot.addresses()) as (other, _):
            own = [parse_peer_address(text) for text in await other.addresses()]
            assert (await boot._granted(own)).data_bytes > 0


@pytest.mark.parametrize("listen", ["/ip6/::1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])
async def test_peers_converse_over_ipv6_and_over_quic(listen: str) -> None:
    async with peer(listen=(listen,)) as (one, _):
        (address,) = await one.addresses()
        assert address.startswith(listen.split("0/quic")[0].removesuffix("0"))
        async with peer(address, listen=(listen,)) as (other, _):
            await other.serve("bulk", LARGE, echo)
            numbers = torch.randn(BIG)
            async with one.talk(other.peer_id, "bulk", LARGE) as conversation:
                await conversation.send(Bulk(numbers=numbers))
                assert torch.equal((await conversation.receive()).numbers, numbers)


def test_directories_of_dead_processes_are_swept_away_and_no_others(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, tempfile; from noloco_node.libp2p.daemon import private_directory\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with private_directory(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = Path(tempfile.gettempdir())
    subprocess.run([sys.executable, "-c", program, str(parent)], check=False)
    (left,) = parent.iterdir()
    (left / "sub").mkdir()
    (left / "sub" / "control.sock").touch()
    for name, mode in (("noloco-network-other", 0o700), ("noloco-shared", 0o777)):
        (parent / name).mkdir()
        (parent / name).chmod(mode)
    (parent / "noloco-shared" / "owner").touch()
    (parent / "noloco-link").symlink_to(tmp_path)
    (tmp_path / "owner").touch()
    with private_directory() as ours:
        assert not left.exists()
        assert remove_stale(parent) == []
        assert {path.name for path in parent.iterdir()} == {
            ours.name,
            "noloco-network-other",
            "noloco-shared",
            "noloco-link",
        }
    assert (tmp_path / "owner").exists()
    (parent / "noloco-link").unlink()
    shutil.rmtree(parent / "noloco-shared")
    (parent / "noloco-network-other").rmdir()


@on_uvloop
async def test_a_start_that_is_cancelled_leaves_nothing(loop: Any) -> None:
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


async def test_a_daemon_that_ends_at_once_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_network, "ensure_identity", lambda path: True)
    (tmp_path / "identity").write_bytes(b"\x08" + b"x" * 60)
    trouble = await trouble_of(identity=tmp_path / "identity")
    assert trouble.code is Exit.DAEMON
    assert "ended at once" in trouble.why


def test_hivemind_is_loaded_once_and_without_torch_by_two_threads_at_once() -> None:
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from noloco_node.libp2p.hivemind_compat import load_hivemind\n"
        "with Pool(2) as pool: first, second = pool.map(lambda _: load_hivemind(), range(2))\n"
        "assert first is second\n"
        "assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
