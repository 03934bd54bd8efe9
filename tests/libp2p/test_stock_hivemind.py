"""A peer of stock hivemind that knows the address of ours is not let into the DHT of our run.

`hivemind-dht` is the program that hivemind brings to host a DHT: a process of its own, which knows nothing of us.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from limits import PATIENT, RECORD_S

from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings

pytestmark = pytest.mark.network

LOCAL = "/ip4/127.0.0.1/tcp/0"
PROGRAM = Path(sys.executable).parent / "hivemind-dht"


@asynccontextmanager
async def stock(*options: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.subprocess.Process]]:
    """Run hivemind-dht and end it afterwards, with the daemon that it starts."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "--host_maddrs",
        LOCAL,
        "--refresh_period",
        "1",
        *options,
        stdin=subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    try:
        yield process.stdout, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def said(output: asyncio.StreamReader, pattern: str) -> str:
    """Read what hivemind-dht prints until a line matches, and return what the first group found there."""
    heard: list[str] = []
    while line := (await output.readline()).decode():
        heard.append(line)
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"it never said {pattern}: {heard}")


@asynccontextmanager
async def ours(*bootstrap: str) -> AsyncIterator[Libp2pNetwork]:
    async with Libp2pNetwork.open(
        NetworkSettings(run="run", listen=(LOCAL,), bootstrap=bootstrap, timeouts=PATIENT)
    ) as network:
        yield network


@pytest.fixture(autouse=True)
def only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not PROGRAM.exists():
        pytest.skip("hivemind-dht is not installed beside this Python")
    temporary = tempfile.mkdtemp(prefix="noloco-stock-")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    yield
    shutil.rmtree(temporary)


async def test_stock_hivemind_gets_nothing_of_a_run_whose_address_it_knows() -> None:
    """Else it would be a neighbour, and be given others' records to keep."""
    async with ours() as first:
        (door,) = await first.addresses()
        async with stock("--initial_peers", door) as (output, process), ours(door) as second:
            await said(output, "(bootstrap failed)")
            await process.wait()
            assert await first.publish("run/stage/0", first.peer_id, b"first", RECORD_S)
            assert await second.publish("run/stage/0", second.peer_id, b"second", RECORD_S)
            everything = {first.peer_id: b"first", second.peer_id: b"second"}
            assert await first.read("run/stage/0") == everything
            assert await second.read("run/stage/0") == everything
