"""Whoever serves hears of a daemon that cannot be told, as a person can act on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import PATIENT
from user_errors import user_error

from noloco_node.errors import Exit
from noloco_node.libp2p.addresses import KnownPeers
from noloco_node.libp2p.control import PeerContext
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import Capacity, NetworkSettings, RunSecret
from noloco_node.libp2p.switchboard import Switchboard
from noloco_node.network.interface import Conversation
from noloco_node.swarm.run_distribution import SCHEMA


class Daemon:
    """One that fails as it is told to. `dead`: it is."""

    def __init__(self, fails: ConnectionError | None, *, dead: bool) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._fails, self._dead = fails, dead

    async def is_dead(self) -> bool:
        return self._dead

    async def offer(self, topic: str) -> None:
        if self._fails is not None:
            raise self._fails


@asynccontextmanager
async def network(daemon: Daemon | None) -> AsyncIterator[Libp2pNetwork]:
    switchboard = Switchboard(PATIENT, Capacity())
    parts: Any = None
    settings = NetworkSettings(run="ab" * 32, timeouts=PATIENT)
    made = Libp2pNetwork(
        PeerContext(parts, Path(), settings, RunSecret(settings.run), switchboard, KnownPeers()), print
    )
    joined: Any = None if daemon is None else SimpleNamespace(daemon=daemon, dialer=daemon)
    made._joined = joined
    yield made


async def answer(conversation: Conversation) -> None:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize(
    ("fails", "dead", "heard"),
    [
        (None, False, False),
        (ConnectionResetError("gone"), True, False),
        (ConnectionResetError("gone"), False, True),
        (ConnectionAbortedError("no answer within 5 s"), False, True),
        (ConnectionRefusedError("told already"), False, True),
    ],
)
async def test_a_daemon_that_cannot_be_told_ends_the_node_with_its_code(
    fails: ConnectionError | None, dead: bool, heard: bool
) -> None:
    async with network(Daemon(fails, dead=dead)) as made:
        if not heard:
            await made.serve("topic", SCHEMA, answer)
            return
        with user_error(Exit.DAEMON) as caught:
            await made.serve("topic", SCHEMA, answer)
        assert caught.value.why == str(fails)


async def test_records_that_nobody_took_are_counted_whichever_daemon_there_is() -> None:
    async def refuse(*_: object) -> bool:
        return False

    async def take(*_: object) -> bool:
        return True

    async with network(Daemon(None, dead=False)) as made:
        for publish in (refuse, take, refuse):
            joined: Any = SimpleNamespace(
                daemon=SimpleNamespace(died=asyncio.Future()), records=SimpleNamespace(publish=publish), rejoined=0
            )
            made._joined = joined
            assert await made.publish("key", "subkey", b"value", 60.0) == (publish is take)
        made._joined = None
        assert not await made.publish("key", "subkey", b"value", 60.0)
        assert made.statistics()["publish.failed"] == 3


async def test_so_does_a_daemon_that_does_not_come_back() -> None:
    async with network(None) as made:
        with user_error(Exit.DAEMON):
            await made.serve("topic", SCHEMA, answer)
