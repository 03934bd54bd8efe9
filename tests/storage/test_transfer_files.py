"""A donor's copy on the disk, and a newcomer's pieces there: whatever becomes of process or disk, they are right."""

import asyncio
import errno
import gc
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_copies import LIKE, SHAPES, TERMS, Giving, Listening, copy_from, of_parts, same, state
from toy_gossip import World, at_once

from gossip.exchange.messages import Busy, Gone, Manifest, Parts, PieceRequest, ReplicaState, Section, StateRequest
from gossip.transfer.assembly import Key, StateAssembly
from gossip.transfer.chunks import CopyInMemory, cut
from gossip.transfer.donor import ABANDONED_S, STREAMS, Donor
from noloco_node.machine.interface import Reporter, StageModel
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.sim.clock import run
from noloco_node.sim.hardware.priced_stage import VirtualDevice
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync.download import DownloadLink, StateDownload
from noloco_node.storage import atomic_file
from noloco_node.storage.atomic_file import SPARE_BYTES
from noloco_node.storage.transfer_files import PartialDownload, StateFile

SECTION_BYTES = sum(4 * tensor.numel() for tensor in LIKE)
WHOLE = state()
SILENT = Reporter(record=lambda event: None, say=lambda line: None)


class Shapes:
    """What a copy asks of a stage."""

    shapes = SHAPES


def partial(directory: Path, stage: int = 1, said: list[str] | None = None) -> PartialDownload:
    return PartialDownload(directory, stage, said.append if said is not None else lambda _: None)


def one_life(directory: Path, seconds: float, heard: Listening, whole: Any = WHOLE) -> bool:
    """Copy for so long, and be gone; say whether the copy was complete, and right."""

    async def main() -> bool:
        world = World(tamper=heard)
        Giving(world, "donor", whole)
        keep = partial(directory)
        try:
            async with asyncio.timeout(seconds):
                found = await copy_from(world, ["donor"], StateAssembly(LIKE, keep))
        except TimeoutError:
            return False
        assert same(found, whole)
        keep.discard()
        return True

    return run(main())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0), st.floats(0.0, 1.0), st.booleans()), max_size=5))
def test_files_that_are_torn_or_damaged_cost_pieces_and_never_a_wrong_one(
    tmp_path: Path, damage: list[tuple[int, float, bool]]
) -> None:
    heard = Listening()
    assert not one_life(tmp_path, 0.3, heard)
    paths = sorted(partial(tmp_path).path.iterdir())
    for number, share, torn in damage:
        path = paths[number % len(paths)]
        content = bytearray(path.read_bytes())
        place = int(share * (len(content) - 1))
        if torn or not content:
            content = content[:place]
        else:
            content[place] ^= 0x41
        path.write_bytes(content)
    before = dict(heard.pieces)
    assert one_life(tmp_path, 60.0, heard)
    pieces = 4 * len(StateAssembly(LIKE).spans)
    assert heard.pieces["donor"] <= before["donor"] + pieces


def test_whole_pieces_are_used_and_the_same_copy_asked_for(tmp_path: Path) -> None:
    heard = Listening()
    assert not one_life(tmp_path, 0.3, heard)
    first = heard.pieces["donor"]
    keep = partial(tmp_path)
    manifest, settled = keep.last()
    assert manifest.snapshot == heard.manifests[0].snapshot
    assert all(map(torch.equal, [manifest.slow], [heard.manifests[0].slow]))
    assert settled == frozenset()
    assert first - STREAMS <= len(list(keep.pieces())) <= first


async def test_settled_parameters_that_the_disk_has_lost_are_fetched(tmp_path: Path) -> None:
    heard = Listening()

    world = World(tamper=heard)
    for seed, name in ((1, "first"), (2, "second")):
        Giving(world, name, state(seed))
        await copy_from(world, [name])
    first, second = heard.manifests
    partial(tmp_path).follow(first, frozenset({0}))
    held = StateAssembly(LIKE, partial(tmp_path))
    held.load()
    needed, followed = held.follow(second, "second")
    assert len(needed) == 4 * len(held.spans)
    assert followed.held_bytes == 0


def test_the_pieces_of_another_stage_are_removed(tmp_path: Path) -> None:
    assert not one_life(tmp_path, 0.3, Listening())
    other = partial(tmp_path, stage=2)
    assert other.last() == (None, frozenset())
    other.follow(None, frozenset())
    assert [path.name for path in tmp_path.iterdir()] == ["stage-2"]


async def copied(directory: Path, said: list[str]) -> None:
    world = World()
    Giving(world, "donor", WHOLE)
    assert same(await copy_from(world, ["donor"], StateAssembly(LIKE, partial(directory, said=said))), WHOLE)
    assert len(said) == 1


async def test_a_disk_that_refuses_is_said_once_and_the_copy_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    written, write = 0, os.write

    def full(file: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > 40_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)

    await copied(tmp_path, said)
    assert "No space left" in said[0]


async def test_the_last_room_of_a_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    room = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES + 60_000)

    def usage(path: Path) -> Any:
        taken = sum(each.stat().st_size for each in tmp_path.rglob("*-*") if each.is_file())
        return room._replace(free=room.free - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)

    await copied(tmp_path, said)
    assert "MB are free" in said[0]
    assert 40_000 < room.free - usage(tmp_path).free <= 60_000


def test_a_piece_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    keep, key = partial(tmp_path), Key(Section.SLOW, 0)
    for value in range(3):
        keep.put(key, bytes([value]) * 32, torch.full((5 - value,), value, dtype=torch.uint8))
    ((found, digest, data),) = keep.pieces()
    assert (found, digest, data.tolist()) == (key, bytes([2]) * 32, [2, 2, 2])
    keep.discard()
    assert not keep.path.exists()


def open_files(directory: Path) -> list[str]:
    descriptors = (Path(each) for each in Path("/proc/self/fd").iterdir())
    return [str(each) for each in descriptors if each.is_symlink() and os.readlink(each).startswith(str(directory))]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3])
async def test_a_copy_that_is_cancelled_leaves_no_file_open(tmp_path: Path, seconds: float) -> None:
    async def provide(parts: Parts) -> ReplicaState:
        return of_parts(WHOLE, parts)

    hub, keep = SimNetwork(), partial(tmp_path)
    donor = Donor(provide, at_once, SHAPES, TERMS)
    await hub.network("donor").serve(topic(STATE, 1), state_schema(SHAPES), donor.serve)
    network = hub.network("new", Access(down_bytes_per_s=16 * SECTION_BYTES))
    copying = StateDownload(1, cast(StageModel, Shapes()), DownloadLink(network, VirtualDevice(), 300.0), SILENT, keep)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await copying.attempt(("donor",))
    assert keep.last()[0] is not None
    assert open_files(tmp_path) == []
    # Another attempt goes on with the same pieces.
    found = await copying.attempt(("donor",))
    assert isinstance(found, ReplicaState)
    assert same(found, WHOLE)
    assert open_files(tmp_path) == []
    assert len({key for key, _, _ in partial(tmp_path).pieces()}) == 4 * len(StateAssembly(LIKE).spans)


SPANS = cut([torch.empty(shape, device="meta").numel() * 4 for shape in SHAPES])
STATES = {
    "whole": state(),
    "no momentum": state(momentum=()),
    "amid a period": state(gathered=state(9).slow, meetings=2),
    "slow weights": state(momentum=(), optimiser=()),
}


@pytest.mark.parametrize("whole", STATES.values(), ids=STATES)
def test_a_file_has_the_pieces_of_the_state_that_it_was_made_of(tmp_path: Path, whole: ReplicaState) -> None:
    expected = CopyInMemory(whole)
    pieces = {(section, span): expected.read(section, span) for section in expected.sections for span in SPANS}
    size, sections = expected.norm(), expected.sections
    held = StateFile(tmp_path, whole)
    for tensors in (whole.slow, whole.momentum, whole.optimiser, whole.gathered):
        for tensor in tensors:
            tensor.add_(1.0)  # the replica trains on
    assert (held.norm(), held.sections) == (size, sections)
    assert held.counters.slow == ()
    for (section, span), piece in pieces.items():
        assert torch.equal(held.read(section, span), piece)
    assert not list(tmp_path.iterdir())


def test_the_disk_is_free_again_once_a_copy_is_let_go(tmp_path: Path) -> None:
    held = StateFile(tmp_path, state())
    descriptor = held._file.fileno()
    os.fstat(descriptor)
    del held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_a_disk_without_room_has_newcomers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StateFile] = []

    async def provide(parts: Parts) -> Any:
        if parts is Parts.OUTLINE:
            return state()
        made.append(StateFile(tmp_path, state()))
        return made[-1]

    donor, wanted = Donor(provide, at_once, SHAPES, TERMS), StateRequest(parts=Parts.ALL)
    with monkeypatch.context() as full:
        full.setattr(atomic_file, "SPARE_BYTES", 2**60)
        assert isinstance(await donor._manifest(wanted), Busy)
    assert isinstance(await donor._manifest(wanted), Busy), "not at once again"
    await asyncio.sleep(ABANDONED_S)
    manifest = await donor._manifest(wanted)
    assert isinstance(manifest, Manifest)
    assert len(made) == 1
    made[0]._file.truncate(0)  # as a disk that loses what was written
    asked = PieceRequest(snapshot=manifest.snapshot, section=Section.FIRST, number=0)
    assert isinstance(await donor._piece(asked), Gone)
    assert donor.statistics()["held"] == 0
