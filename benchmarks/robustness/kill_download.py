"""Kill a newcomer while it copies a replica's state, at random instants, and see that the next session goes on from
there.

    python -m benchmarks.robustness.late_join --kills 50

A child process with the production code of a copy (`noloco_node.state_sync.download`, its pieces kept on the disk)
fetches a state of some MiB from this process, over a TCP connection with the frames of `noloco_node.network.wire` and
at a limited rate: no libp2p, so that a session costs a second. At a random instant of its copy it is killed by SIGKILL.
The next child must take over every whole piece that the one before has left on the disk, and the state that is complete
in the end must be the donor's, to the bit. Then another state begins.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossip.exchange.messages import Parts, ReplicaState, Section
from gossip.transfer.chunks import tensors_of
from gossip.transfer.donor import Donor, DonorLimits
from noloco_node.journal import events
from noloco_node.limits.rate_limit import FairLimiter
from noloco_node.machine.device import Device
from noloco_node.machine.interface import Reporter
from noloco_node.network import wire
from noloco_node.network.schema import Schema
from noloco_node.run.protocols import state_schema
from noloco_node.state_sync.download import DownloadLink, StateDownload
from noloco_node.storage.transfer_files import PartialDownload

STARTS_S = 1800.0
"""Guards against waiting for ever; a child loads torch before it begins."""


class Told(NamedTuple):
    """`resumed`: lives that began with pieces of the one before. `copies`: states that were completed, all right.

    `fetched`: bytes over all sessions, in sizes of the completed states.
    """

    kills: int
    resumed: int
    copies: int
    fetched: float
    seconds: float


class Lane:
    """One end of a conversation over TCP; `valve` limits what it sends."""

    peer = "other"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, schema: Schema) -> None:
        self._reader, self._writer, self._schema = reader, writer, schema
        self._intake = wire.FrameDecoder(schema)
        self.valve: FairLimiter | None = None

    async def send(self, message: Any) -> None:
        """Send one message, no faster than the valve lets it."""
        buffers = wire.encode(message, self._schema)
        if self.valve is not None:
            await self.valve.admit(sum(map(len, buffers)))
        self._writer.writelines(buffers)
        await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message."""
        while True:
            space = self._intake.wants()
            content = await self._reader.read(len(space))
            if not content:
                raise ConnectionResetError("the other is gone")
            space[: len(content)] = content
            if (frame := self._intake.got(len(content))) is not None:
                return frame.content


class Lanes:
    """The network of a child: everybody is at one port. Of a `PeerNetwork` a copy needs `talk` alone."""

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Lane]:
        """Open a conversation."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield Lane(reader, writer, schema)
        finally:
            writer.close()


class Shapes(NamedTuple):
    """Of a stage with about so many bytes of weights."""

    shapes: tuple[tuple[int, ...], ...]


def shapes_of(section_bytes: int) -> Shapes:
    """Return large and small tensors, as a model has them."""
    wide = max(8, section_bytes // (4 * 4 * 256))
    return Shapes(((wide, 256), (256,), (wide, 256), (3, 7), (wide, 512)))


def state_of(seed: int, shapes: Shapes) -> ReplicaState:
    """Return a whole state that no other seed has."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape, generator=generator) for shape in shapes.shapes)

    return ReplicaState(
        slow=drawn(),
        momentum=drawn(),
        optimiser=drawn() + tuple(1.0 + tensor.square() for tensor in drawn()),
        round=seed + 1,
        inner_steps=seed,
        progress=0.0,
        optimiser_steps=seed,
    )


def fingerprint(state: ReplicaState) -> str:
    """Return the SHA-256 of all tensors and of the round."""
    total = hashlib.sha256(str(state.round).encode())
    for section in Section:
        for tensor in tensors_of(state, section):
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


# The child.


async def copy(directory: Path, port: int, section_bytes: int) -> None:
    """Copy the state of a donor, and tell of it line by line: what happened, the bytes that are there,
    the state at the end.
    """

    def record(event: events.Event) -> None:
        if isinstance(event, events.CatchUp):
            print(json.dumps({"what": event.what, "held": event.held_bytes, "of": event.total_bytes}), flush=True)

    shapes, device = shapes_of(section_bytes), Device(torch.device("cpu"))
    reporter = Reporter(record=record, say=lambda line: None)
    keep = PartialDownload(directory, 0, lambda line: print(line, file=sys.stderr))
    line = DownloadLink(Lanes(port), device, 600.0)  # type: ignore[arg-type]
    copying = StateDownload(0, shapes, line, reporter, keep)  # type: ignore[arg-type]
    state = await copying.attempt(("donor",))
    assert isinstance(state, ReplicaState), state
    print(json.dumps({"what": "state", "is": fingerprint(state)}), flush=True)
    device.close()


# The donor, and the killing.


async def kill_many(directory: Path, *, kills: int, megabytes: float, seed: int) -> Told:
    """Kill `kills` children; raise AssertionError about the first session that does not go on as it should."""
    rng, begun_s, section_bytes = random.Random(f"{seed}|kill"), time.monotonic(), int(megabytes * 2**20 / 4)
    shapes = shapes_of(section_bytes)
    valve = FairLimiter(megabytes * 2**20 / 3.0)  # a whole copy takes three seconds
    present = {"state": state_of(seed, shapes)}

    async def provide(parts: Parts) -> ReplicaState:
        return present["state"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lane = Lane(reader, writer, state_schema(shapes.shapes))
        lane.valve = valve
        try:
            await donor.serve(lane)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    donor = Donor(provide, asyncio.to_thread, shapes.shapes, DonorLimits(deadline_s=3600.0, piece_s=60.0))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    resumed = killed = copies = before = 0
    async with server:
        finished = False
        while killed < kills or not resumed or not finished:
            # The last session is left alone. Where none has left a whole piece so far, there are more, and longer ones.
            kill = killed < kills or not resumed
            delay_s = rng.uniform(0.0, 1.6 * max(1.0, killed / kills)) if kill else STARTS_S
            asked = (str(directory), str(port), str(section_bytes))
            lines, finished = await live_and_die(asked, delay_s)
            first = lines[0]
            assert first["what"] in ("began", "resumed"), lines
            assert first["held"] == before, f"{before} bytes were on the disk, and {first['held']} are taken over"
            resumed += before > 0
            killed += not finished
            before = on_disk(directory)
            if finished:
                assert lines[-1]["is"] == fingerprint(present["state"]), "the copy is another one"
                copies, before = copies + 1, 0
                shutil.rmtree(directory / "stage-0", ignore_errors=True)
                present["state"] = state_of(seed + 1000 + copies, shapes)
    fetched = donor.statistics()["bytes"] / (4 * section_bytes)
    return Told(killed, resumed, copies, fetched, time.monotonic() - begun_s)


def on_disk(directory: Path) -> int:
    """Return the bytes of the whole pieces that a session has left behind."""
    keep = PartialDownload(directory, 0, lambda line: None)
    return sum({key: data.nbytes for key, _, data in keep.pieces()}.values())


async def live_and_die(asked: Sequence[str], delay_s: float) -> tuple[list[dict[str, Any]], bool]:
    """Let a child copy for so long and kill it; return its lines, and whether it had finished before."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name, *asked),
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(STARTS_S):
            lines = [await child.stdout.readline()]
        try:
            async with asyncio.timeout(delay_s):
                rest = await child.stdout.read()
            finished = True
        except TimeoutError:
            child.kill()
            rest = await child.stdout.read()
            finished = b'"state"' in rest
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    whole = [json.loads(line) for line in [*lines, *rest.splitlines()] if line.strip()]
    return whole, finished


def report(told: Told) -> str:
    """Return what came of it, in words."""
    return (
        f"{told.kills} kills while a state was copied, in {told.seconds:.0f} s: {told.resumed} lives went on with the"
        f" pieces of the session before, {told.copies} copies were completed, all of them the donor's to the bit;"
        f" {told.fetched:.2f} states were sent for them"
    )


def run_kills(kills: int, megabytes: float, seed: int) -> int:
    """Run the trial in a temporary directory and print what came of it."""
    with tempfile.TemporaryDirectory() as directory:
        print(report(asyncio.run(kill_many(Path(directory), kills=kills, megabytes=megabytes, seed=seed))))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The child of late_join.py --kills: copies a state.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("section_bytes", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(copy(options.directory, options.port, options.section_bytes))
