"""What the product leaves on disks: a home with all that may lie in it, and what an interrupted export leaves behind.

The home is that of a peer which served stage 0, keeps snapshots of stage 1, and was killed while it copied that stage.
"""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from compatibility import product
from compatibility.messages import numbers
from compatibility.recorded import RUN_FILE

STAGE, OTHER_STAGE = 0, 1
ME, KEPT_OF, DONOR = "12D3KooWMe", "12D3KooWAnother", "12D3KooWDonor"
BEGAN_AT = 1_800_000_000.5
NOW = datetime(2026, 11, 7, 12, 0)
OUT = "model"


def unheard(line: str) -> None:
    raise AssertionError(line)


@cache
def recipe() -> product.Recipe:
    return product.Recipe(RUN_FILE.read_text(), "the recorded run")


@cache
def shapes(stage: int) -> Mapping[str, tuple[int, ...]]:
    return product.model_layout(recipe().run).shapes[stage]


def weights(stage: int, first: int) -> tuple[Tensor, ...]:
    return tuple(numbers(shape, first + number) for number, shape in enumerate(shapes(stage).values()))


def checkpoint() -> product.Checkpoint:
    """Return a whole replica of our stage, in the middle of a momentum period."""
    counters = product.Counters(
        run_id=recipe().digest,
        stage=STAGE,
        round=6,
        inner_steps=27,
        progress=0.375,
        samples=216,
        optimiser_steps=26,
        meetings=1,
        last_met=5,
        data_position={"source": "0f" * 16, "place": {"epoch": 0, "index": 3}, "offset": 17},
        peer=ME,
    )
    groups = ("slow", "momentum", "gathered", "fast")
    tensors = {group: weights(STAGE, 10 * number) for number, group in enumerate(groups)}
    # Two for each parameter, first moments before second ones.
    tensors["optimiser"] = weights(STAGE, 50) + tuple(tensor.abs() for tensor in weights(STAGE, 60))
    return product.Checkpoint(counters, tensors)


def snapshot() -> product.Checkpoint:
    counters = product.Counters(
        run_id=recipe().digest,
        stage=OTHER_STAGE,
        round=4,
        inner_steps=18,
        progress=0.25,
        samples=0,
        optimiser_steps=0,
        last_met=4,
        peer=KEPT_OF,
    )
    return product.Checkpoint(counters, {"slow": weights(OTHER_STAGE, 70)})


def followed() -> tuple[Any, frozenset[int], list[tuple[Any, bytes, Tensor]]]:
    """Return the manifest of the donor whose pieces came, which units are of donors before, and some pieces."""
    found = []
    hashes = {}
    spans = product.pieces.cut([tensor.nbytes for tensor in weights(OTHER_STAGE, 0)])
    for number, section in enumerate((product.Section.SLOW, product.Section.MOMENTUM)):
        data = [product.pieces.gather(weights(OTHER_STAGE, 80 + number), span) for span in spans]
        digests = list(map(product.pieces.digest, data))
        hashes[str(section)] = product.pieces.listed(digests)
        found.append((product.PieceKey(section, 0), digests[0], data[0]))
    manifest = product.Manifest(
        snapshot="0123456789abcdef",
        round=5,
        inner_steps=22,
        progress=0.3125,
        optimiser_steps=21,
        meetings=0,
        last_met=5,
        norm=1.75,
        **hashes,
    )
    return manifest, frozenset({0}), found


def events() -> list[Any]:
    """Return an event of every kind that a journal may hold, and of some more than one form."""
    journal, state = product.journal, product.State
    return [
        journal.Started(peer=ME, stage=0, run="ab" * 32, version="1.2.3", device="cuda:0", parameters=1880, pid=4242),
        *(journal.StateChanged(state=each) for each in state),
        journal.StateChanged(
            state=state.TRAINING, waiting=product.Wait(product.WaitCause.OTHER, detail="stage 1, for 12 s")
        ),
        journal.Placed(stage=1, why="no stage is weaker", device_s=0.125),
        journal.Moved(origin=1, target=0, why="stage 0 does less", discarded=3),
        journal.InnerStep(
            step=1, progress=0.01, loss=5.875, tokens=128, seconds=0.5, learning_rate=2.5e-3, device_s=0.25, stale=2
        ),
        journal.InnerStep(step=2, progress=0.02, loss=None, tokens=128, seconds=0.5, learning_rate=5e-3),
        product.OuterStepTaken(
            round=1,
            partner=DONOR,
            gap=0.0625,
            staleness=2,
            bytes_sent=1234,
            bytes_received=1235,
            seconds=1.5,
            staleness_rounds=1,
            partner_staleness=2,
            adopted=True,
        ),
        product.OuterStepTaken(round=2, seconds=0.0),
        product.PartnerTooStale(round=3, partner=DONOR, partner_staleness=17, bytes_sent=900, bytes_received=100),
        product.RoundSkipped(round=4, in_a_row=2),
        journal.Hops(counts={DONOR: 40, KEPT_OF: 2}),
        journal.Traffic(sent={"gossip": 2468, "microbatch": 9}, received={"state": 70_000}),
        journal.Budget(bytes={"upload.allowed": 250_000.0, "upload.used": 1234.5}),
        journal.Noticed(what="slept", text='the machine slept for 90 s, "they say"', over=True),
        journal.RefusedMicrobatch(peer=DONOR, reason="full", here=True, count=3),
        journal.Lost(peer=DONOR, what="microbatch", why="the stream broke", count=2),
        journal.PeerViolation(peer=DONOR, topic="gossip/0", why="Weights.fast[0] is not finite"),
        journal.Energy(joules=5400.5),
        journal.Receipts(claimed={DONOR: 4096}, signed={DONOR: 4032}, own=2048),
        journal.SpotCheck(peer=DONOR, finding="quarantined", distance=1.75, usual=0.0625, for_s=600.0, count=2),
        journal.CatchUp(
            what="began",
            stage=1,
            donor=DONOR,
            round=9,
            total_bytes=4000,
            held_bytes=40,
            fetched_bytes=4,
            seconds=0.5,
            why="Grüße",
        ),
        journal.CatchUp(
            what="done", stage=1, donor=None, round=9, total_bytes=40, held_bytes=40, fetched_bytes=40, seconds=1.0
        ),
        journal.Continued(peer=ME, stage=0, run="ab" * 32, version="1.2.3", device="cuda:0", parameters=1880, pid=4242),
        journal.Disowned(stage=1, round=20, loss=9.5, usual=3.0),
        journal.Evaluated(
            number=2,
            round=20,
            step=81,
            progress=0.5,
            loss=3.25,
            margin=0.125,
            tokens=12_288,
            documents=76,
            seconds=1.5,
            device_s=0.75,
            best=True,
            samples=(journal.TextSample(prompt="The ", text='swarm "is"\n'),),
        ),
        journal.Finished(why="the run is over", step=40, round=10, progress=1.0, discarded=1),
    ]


def write_home(path: Path) -> None:
    """Write a home as a node does, but for what would differ each time: the key, times of day, the process."""
    with product.Home.open(path) as home:
        key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
        with mock.patch.object(Ed25519PrivateKey, "generate", return_value=key):
            product.settings.ensure_identity(home.identity)
        home.keep_run_file(recipe().text)
        times = iter(range(1000))
        first, *others = events()
        for name, several in ((product.journal_writer.rotated(home.journal), [first]), (home.journal, others)):
            with product.journal_writer.Journal(name, now=lambda: BEGAN_AT + next(times)) as journal:
                for event in several:
                    journal.write(event)
        ledger = product.Ledger(path / "traffic.json", lambda: NOW, unheard)
        ledger.add(123_456, 654_321)
        ledger.keep()
        paths = home.enter(recipe().digest)
        product.save_checkpoint(paths.checkpoint, checkpoint())
        asyncio.run(checkpoints_in(path).keep(snapshot()))
        manifest, settled, found = followed()
        keep = partial(path)
        keep.follow(None, frozenset())
        keep.follow(manifest, settled)
        for each in found:
            keep.put(*each)
    holder = product.Holder(pid=4242, since=BEGAN_AT, command="noloco-node join 'an invite'")
    (path / "lock").write_bytes(msgspec.json.encode(holder))


def partial(home: Path) -> Any:
    return product.Partial(paths_in(home).partial_download, OTHER_STAGE, unheard)


def checkpoints_in(home: Path) -> Any:
    paths = paths_in(home)
    return product.OwnCheckpoints(paths.checkpoint, paths.snapshots, recipe().digest, ME, unheard)


def paths_in(home: Path) -> Any:
    """Return the files of our run in a home."""
    return product.HomePaths(home).run(recipe().digest)


def fetched(stage: int, peer: str) -> Any:
    counters = product.Counters(
        run_id=recipe().digest,
        stage=stage,
        round=6,
        inner_steps=27,
        progress=0.375,
        samples=0,
        optimiser_steps=0,
        peer=peer,
    )
    return product.Checkpoint(counters, {"slow": tuple(weights(stage, 95))})


def write_parts(path: Path) -> None:
    """Write what an export leaves that was interrupted: a replica, and a snapshot of the other stage."""
    lying = parts(path)
    lying.path.mkdir(parents=True, exist_ok=True)
    lying.keep(fetched(STAGE, DONOR))
    lying.keep(fetched(OTHER_STAGE, KEPT_OF), is_snapshot=True)


def parts(path: Path) -> Any:
    return product.PartsDirectory(path, recipe().digest, [shapes(0), shapes(1)], 0)


def files_below(path: Path) -> dict[str, bytes]:
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def same_checkpoint(one: product.Checkpoint, other: product.Checkpoint) -> bool:
    return (
        one.counters == other.counters
        and one.tensors.keys() == other.tensors.keys()
        and all(
            len(one.tensors[group]) == len(other.tensors[group])
            and all(map(torch.equal, one.tensors[group], other.tensors[group]))
            for group in one.tensors
        )
    )
