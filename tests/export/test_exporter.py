"""An export from a swarm: one that was interrupted goes on, and a stage that died comes from a snapshot."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from dead_stage import forgotten, killed, seen
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Memory, Peer, asked_to_leave, recipe, until
from state_copies import SHAPES, of_parts, same_tensors, state
from torch import Tensor
from toy_gossip import at_once

from gossip.exchange.messages import Busy, Parts, ReplicaState
from gossip.rule.outer_step import ROUND_BOUND
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import SLOWER_TIMES, DonorBusy
from noloco_node.errors import Exit, UserError
from noloco_node.export import exporter, replica_fetch
from noloco_node.export.exporter import SwarmExport, export, parts_of
from noloco_node.export.replica_files import MergedReplicas, PartsDirectory, ReplicaFile, parts_beside
from noloco_node.export.sources import noted, read_provenance, told_of
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, copying_s
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.state_sync.snapshot_keeper import snapshot_of
from noloco_node.state_sync.starting_state import AGAIN_S, ATTEMPTS
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Checkpoint, arrays_of, load
from noloco_node.swarm.invite import SCHEME
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText

RUN = recipe(replicas=2)
PLAN = model_layout(RUN.run)
BEHIND = RUN.run.outer.staleness_at_most

INVITE = f"{SCHEME}{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"


def drawn(stage: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in PLAN.shapes[stage].values())


def of_state(slow: tuple[Tensor, ...], round: int, progress: float) -> ReplicaState:
    counters = {"round": round, "inner_steps": 3 * round, "progress": progress, "optimiser_steps": 0}
    return ReplicaState(slow=slow, momentum=(), optimiser=(), **counters)


class Interrupted(Exception):
    """Stands in for Ctrl-C."""


class Swarm:
    """Peers that give weights of a run, their own and such as they keep, and an export that comes to them.

    `asked`: of whom weights were fetched, and of which kind. `interrupted_at`: the fetch at which the export ends.
    `fails`: who says what it has, and does not give it; `full_until_s`: not yet.
    """

    def __init__(self, parts: Path) -> None:
        self.hub, self.parts = SimNetwork(), parts
        self.records: dict[str, PeerRecord] = {}
        self.asked: list[tuple[str, str]] = []
        self.interrupted_at = math.inf
        self.busy_until_s: dict[tuple[str, str], float] = {}
        self.full_until_s: dict[tuple[str, str], float] = {}
        self.fails: set[tuple[str, str]] = set()
        self._states: dict[tuple[str, str], ReplicaState] = {}
        self._networks: dict[str, PeerNetwork] = {}

    async def replica(self, peer: str, stage: int, round: int = 40) -> None:
        """Let a peer train at a stage, and give its weights."""
        self.at_work(peer, stage, round)
        await self._give(peer, stage, STATE, round)

    async def keeper(self, peer: str, stage: int, round: int) -> None:
        """Let a peer that is there already keep a snapshot of another stage."""
        await self._give(peer, stage, SNAPSHOT, round)

    def at_work(self, peer: str, stage: int, round: int) -> None:
        self.records[peer] = PeerRecord(peer=peer, stage=stage, state=PeerState.TRAINING, round=round, progress=0.5)

    def at_round(self, peer: str, round: int) -> None:
        """Let a replica go on to a round."""
        self.at_work(peer, self.records[peer].stage, round)
        self._states[peer, STATE] = replace(self._states[peer, STATE], round=round)

    async def _give(self, peer: str, stage: int, kind: str, round: int) -> None:
        progress = 0.5 if kind == STATE else 0.25
        slow = drawn(stage, sum(map(ord, peer + kind)))
        self._states[peer, kind] = of_state(slow, round, progress)

        async def provide(parts: Parts) -> ReplicaState:
            if parts is Parts.SLOW and (peer, kind) in self.fails:
                raise ConnectionAbortedError("its disk has died")
            return of_parts(self._states[peer, kind], parts)

        shapes = tuple(PLAN.shapes[stage].values())
        donor = Donor(provide, at_once, shapes, DonorLimits(deadline_s=6000.0, piece_s=600.0))

        async def serve(conversation: Conversation) -> None:
            if asyncio.get_running_loop().time() >= self.busy_until_s.get((peer, kind), 0.0):
                await donor.serve(conversation)
                return
            await conversation.receive()
            await conversation.send(Busy(retry_after_s=5.0))

        await self._network(peer).serve(topic(kind, stage), state_schema(shapes), serve)

    def _network(self, peer: str) -> PeerNetwork:
        if peer not in self._networks:
            self._networks[peer] = self.hub.network(peer)
        return self._networks[peer]

    def given(self, peer: str, kind: str = STATE) -> tuple[Tensor, ...]:
        return self._states[peer, kind].slow

    async def look(self) -> Roster:
        stages = range(len(PLAN.shapes))
        return Roster(stages=tuple(tuple(r for r in self.records.values() if r.stage == stage) for stage in stages))

    @contextlib.asynccontextmanager
    async def visited(self, *_: object) -> AsyncIterator[tuple[PeerNetwork, RunFileText, Any]]:
        """Stand in for `swarm.visited`."""
        yield self._network("visitor"), RUN, SimpleNamespace(peek=self.look)

    async def exported(self, *filed: ReplicaFile) -> list[MergedReplicas]:
        """Export, or go on with it; `asked` begins anew."""
        self.asked.clear()
        return await self.export_to_come(filed).stages()

    def export_to_come(self, filed: Sequence[ReplicaFile] = ()) -> SwarmExport:
        visitor, parts = self._network("visitor"), self._directory()
        return SwarmExport(network=visitor, recipe=RUN, look=self.look, layout=PLAN, parts=parts, filed=filed)

    def replica_part(self, peer: str) -> Path:
        """Return where a replica of stage 0 lies until that is complete."""
        return self._directory().of_replica(0, peer)

    def _directory(self) -> PartsDirectory:
        return PartsDirectory(self.parts, RUN.digest, PLAN.shapes, BEHIND)

    async def interrupted(self, at: int) -> None:
        """Export until so many replicas have come."""
        self.interrupted_at = at
        with contextlib.suppress(Interrupted):
            await self.exported()
        self.interrupted_at = math.inf


class First(Random):
    """Draws the first of all."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


@pytest.fixture(autouse=True)
def _asked_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_fetch, "SystemRandom", First)


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Swarm:
    made: list[Swarm] = []
    fetch_of = replica_fetch.fetch_of

    async def watched(network: Any, peer: str, subject: WeightsOf, *others: Any) -> Checkpoint:
        (swarm,) = made
        if len(swarm.asked) >= swarm.interrupted_at:
            raise Interrupted
        swarm.asked.append((peer, subject.kind))
        if asyncio.get_running_loop().time() < swarm.full_until_s.get((peer, subject.kind), 0.0):
            raise DonorBusy("it serves others", 5.0)
        return await fetch_of(network, peer, subject, *others)

    async def thread(job: Any, *args: Any, **more: Any) -> Any:
        return job(*args, **more)

    monkeypatch.setattr(replica_fetch, "fetch_of", watched)
    monkeypatch.setattr(asyncio, "to_thread", thread)
    made.append(Swarm(parts_beside(tmp_path / "model")))
    return made[0]


async def two_stages(swarm: Swarm) -> None:
    for peer in ("a", "b", "c"):
        await swarm.replica(peer, 0)
    await swarm.replica("d", 1)


def peers_of(found: MergedReplicas) -> list[str]:
    return [each.peer for each in found.taken]


def same_stage(one: MergedReplicas, other: MergedReplicas) -> bool:
    return one.weights.keys() == other.weights.keys() and same_tensors(
        tuple(one.weights.values()), tuple(other.weights.values())
    )


# Replicas that come, go and are busy.


async def came(swarm: Swarm) -> list[str]:
    """Fetch the replicas of stage 0; return their peers."""
    return [
        copy.counters.peer
        async for copy in replica_fetch.fetched(swarm._network("visitor"), RUN.digest, swarm.look, 0, PLAN.shapes[0])
    ]


async def several(swarm: Swarm, peers: Iterable[str], **busy_until_s: float) -> float:
    """Let peers serve stage 0, some of them busy for a while; return the time."""
    for peer in peers:
        await swarm.replica(peer, 0)
    swarm.busy_until_s = {(peer, STATE): until_s for peer, until_s in busy_until_s.items()}
    return asyncio.get_running_loop().time()


async def test_who_died_meanwhile_is_not_asked_and_who_came_is(swarm: Swarm) -> None:
    await several(swarm, "abcd")
    late, found = swarm.records.pop("d"), []
    async for copy in replica_fetch.fetched(swarm._network("visitor"), RUN.digest, swarm.look, 0, PLAN.shapes[0]):
        assert same_tensors(copy.tensors["slow"], swarm.given(copy.counters.peer))
        found.append(copy.counters.peer)
        if copy.counters.peer == "a":
            del swarm.records["b"]
            swarm.records["d"] = late
    assert found == [peer for peer, _ in swarm.asked] == ["a", "c", "d"]


async def test_a_slow_line_at_home_is_waited_for(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen times slower than a line that is good enough: 0.6 Mbit/s."""
    size_bytes, shapes = 4 * sum(map(math.prod, SHAPES)), {str(n): shape for n, shape in enumerate(SHAPES)}
    monkeypatch.setattr(replica_fetch, "SLOWEST_BYTES_PER_S", size_bytes / 100.0)

    async def provide(parts: Parts) -> ReplicaState:
        return of_parts(state(), parts)

    donor = Donor(provide, at_once, SHAPES, DonorLimits(deadline_s=6000.0, piece_s=600.0))
    slow = swarm.hub.network("slow", Access(up_bytes_per_s=size_bytes / 1500.0))
    await slow.serve(topic(STATE, 0), state_schema(SHAPES), donor.serve)
    swarm.at_work("slow", 0, 40)
    found = [
        copy.counters.peer
        async for copy in replica_fetch.fetched(swarm._network("visitor"), RUN.digest, swarm.look, 0, shapes)
    ]
    assert found == ["slow"]
    assert asyncio.get_running_loop().time() > 1400.0


@pytest.mark.parametrize("slow", ["mnop", "Zmno"])
async def test_once_one_has_given_all_slow_ones_together_take_a_bounded_time(
    swarm: Swarm, slow: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger with many names could otherwise hold an export up for days."""
    size_bytes = 4 * sum(map(math.prod, PLAN.shapes[0].values()))
    monkeypatch.setattr(replica_fetch, "SLOWEST_BYTES_PER_S", size_bytes / 100.0)
    await several(swarm, "ab")
    await swarm.replica("y", 0)
    swarm.hub.set_access("b", Access(up_bytes_per_s=size_bytes / 200.0))
    for name in slow:
        await swarm.replica(name, 0)
        swarm.hub.set_access(name, Access(up_bytes_per_s=size_bytes / 1500.0))
    assert await came(swarm) == ["a", "b", "y"]
    bound_s = copying_s(size_bytes, size_bytes / 100.0)
    first_s = SLOWER_TIMES * bound_s * ("Z" in slow)  # while nobody else has given its weights it has its time
    assert asyncio.get_running_loop().time() < first_s + 200.0 + bound_s + 30.0
    assert "left out: m is too slow beside 2 replicas that have come" in capsys.readouterr().err


async def test_a_busy_replica_is_waited_for_and_that_is_said(swarm: Swarm, capsys: pytest.CaptureFixture[str]) -> None:
    await several(swarm, "abc", a=60.0, b=30.0)
    assert await came(swarm) == ["c", "b", "a"], "the others first"
    for peer in "bc":
        del swarm.records[peer]
    begun_s = await several(swarm, "", a=700.0)
    assert await came(swarm) == ["a"]
    assert 600.0 < asyncio.get_running_loop().time() - begun_s < 710.0
    assert "a serves others just now; asking it again for 15 minutes at most" in capsys.readouterr().err


@pytest.mark.parametrize(("others", "bound_s"), [("", replica_fetch.BUSY_S), ("cd", replica_fetch.BUSY_BESIDE_S)])
async def test_who_is_busy_for_ever_is_left_out_at_last(
    swarm: Swarm, others: str, bound_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    await several(swarm, f"b{others}", b=math.inf)
    assert await came(swarm) == list(others)
    assert bound_s <= asyncio.get_running_loop().time() < bound_s + 10.0
    assert "left out" in capsys.readouterr().err


async def test_however_many_strangers_offer_weights_so_many_are_taken(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_fetch, "MOST_GIVEN", 2)
    monkeypatch.setattr(replica_fetch, "MOST_ASKED", 3)

    await several(swarm, "abcd")
    assert await came(swarm) == ["a", "b"]
    swarm.records = {"d": swarm.records["d"]}
    for name in ("away 1", "away 2", "away 3"):
        swarm.at_work(name, 0, 40)
    assert await came(swarm) == []


@given(
    listed=st.sets(st.sampled_from("abcdef")),
    again_s=st.dictionaries(st.sampled_from("abcdef"), st.one_of(st.floats(0.0, 1e6), st.just(math.inf))),
    rng=st.randoms(use_true_random=False),
)
def test_nobody_is_asked_twice_before_all_were_asked_once(
    listed: set[str], again_s: dict[str, float], rng: Random
) -> None:
    peer = replica_fetch.next_to_ask(listed, again_s, rng)
    left = {each for each in listed if again_s.get(each) != math.inf}
    if peer is None:
        assert not left
        return
    assert peer in left
    if peer in again_s:
        assert left <= again_s.keys()
        assert all(again_s[peer] <= again_s[other] for other in left)


def test_ids_that_come_first_are_not_asked_first() -> None:
    """Of 192 replicas 64 are asked; somebody who chose 128 ids that come first has only his share of them."""
    strangers, honest = [f"a{number:03d}" for number in range(128)], [f"b{number:03d}" for number in range(64)]
    asked, rng = dict[str, float](), Random(5)
    for _ in range(replica_fetch.MOST_GIVEN):
        peer = replica_fetch.next_to_ask([*strangers, *honest], asked, rng)
        assert peer is not None
        asked[peer] = math.inf
    assert 10 <= sum(peer in honest for peer in asked) <= 33


# Going on.


async def test_replicas_that_had_come_of_an_unfinished_stage_are_not_fetched_again(
    swarm: Swarm, tmp_path: Path
) -> None:
    await two_stages(swarm)
    await swarm.interrupted(at=2)
    assert {path.name for path in swarm.parts.iterdir()} == {swarm.replica_part("a").name, swarm.replica_part("b").name}
    resumed = await swarm.exported()
    assert swarm.asked == [("c", STATE), ("d", STATE)]
    assert [peers_of(each) for each in resumed] == [["a", "b", "c"], ["d"]]
    await swarm.exported()
    assert swarm.asked == []
    swarm.parts = tmp_path / ".another.parts"
    at_one_go = await swarm.exported()
    assert len(swarm.asked) == 4
    assert all(same_stage(one, other) for one, other in zip(resumed, at_one_go, strict=True))
    assert [each.taken for each in resumed] == [each.taken for each in at_one_go]


def spoil(path: Path, how: str) -> None:
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-3] + b"???")
        return
    counters, tensors, _ = load(path)
    slow = tensors["slow"]
    if how == "of another run":
        counters = msgspec.structs.replace(counters, run_id="another")
    elif how == "of another peer":
        counters = msgspec.structs.replace(counters, peer="another")
    elif how == "of other shapes":
        slow = (torch.zeros(3), *slow[1:])
    atomic_file.write_tensors(path, arrays_of({"slow": slow}), msgspec.json.encode(counters).decode())


@pytest.mark.parametrize("how", ["damaged", "of another run", "of another peer", "of other shapes"])
async def test_a_replica_whose_file_is_of_no_use_is_fetched_again(swarm: Swarm, how: str) -> None:
    await two_stages(swarm)
    await swarm.interrupted(at=2)
    spoil(swarm.replica_part("a"), how)
    found = await swarm.exported()
    assert swarm.asked == [("a", STATE), ("c", STATE), ("d", STATE)]
    assert peers_of(found[0]) == ["a", "b", "c"]


@pytest.mark.parametrize(("further", "again"), [(BEHIND, []), (BEHIND + 1, ["a", "b"])])
async def test_a_replica_that_its_stage_has_left_far_behind_is_fetched_again(
    swarm: Swarm, further: int, again: list[str]
) -> None:
    await two_stages(swarm)
    await swarm.interrupted(at=2)
    for peer in ("a", "b", "c"):
        swarm.at_round(peer, 40 + further)
    found = await swarm.exported()
    assert [peer for peer, _ in swarm.asked] == [*again, "c", "d"]
    assert peers_of(found[0]) == ["a", "b", "c"]
    assert {each.round for each in found[0].taken} == ({40 + further} if again else {40, 40 + further})


async def test_what_a_peer_gave_that_has_gone_since_still_counts(
    swarm: Swarm, capsys: pytest.CaptureFixture[str]
) -> None:
    await two_stages(swarm)
    await swarm.interrupted(at=2)
    del swarm.records["a"], swarm.records["b"]
    found = await swarm.exported()
    assert swarm.asked == [("c", STATE), ("d", STATE)]
    assert peers_of(found[0]) == ["a", "b", "c"]
    assert "stage 0: 2 replicas are here from an export that was interrupted" in capsys.readouterr().err


async def test_a_stage_that_died_comes_from_the_newest_snapshot_and_that_is_said(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "visited", swarm.visited)
    # The weights are drawn, and the model is too small for the text of its run.
    monkeypatch.setattr(exporter, "judged_by_loss", lambda run, layout, stages, filed, base: stages)
    out = tmp_path / "model"

    for peer in ("a", "b", "c"):
        await swarm.replica(peer, 0)
    await swarm.keeper("a", 1, round=10)
    await swarm.keeper("b", 1, round=12)
    found = await swarm.exported()
    assert swarm.asked[3:] == [("b", SNAPSHOT), ("a", SNAPSHOT)]
    assert [each.kept_by for each in found] == [None, "b"]
    assert same_tensors(tuple(found[1].weights.values()), swarm.given("b", SNAPSHOT))
    # Also where an interrupted export has left it.
    swarm.asked.clear()
    with atomic_file.held(swarm.parts, out), pytest.raises(UserError, match="Another process is writing"):
        await export(out, INVITE)
    told = await export(out, INVITE)
    assert swarm.asked == []
    assert not swarm.parts.exists()
    (note,) = read_provenance(out).snapshots
    assert (note.stage, note.kept_by, note.round, note.others_round) == (1, "b", 12, 40)
    assert (note.progress, note.others_progress) == (0.25, 0.5)
    assert (
        "No replica of stage 1 gave its weights; in their place is a snapshot of its round 12 that b keeps, 28 rounds "
        "behind the other stages (round 40); its progress is 25.0%, theirs 50.0%."
    ) in told


async def test_a_keeper_that_gives_nothing_gives_way_to_the_next(swarm: Swarm) -> None:
    for peer, round in (("a", 10), ("b", 12), ("c", 11)):
        await swarm.replica(peer, 0)
        await swarm.keeper(peer, 1, round)
    swarm.fails = {("b", SNAPSHOT)}
    swarm.at_work("dead", 1, 20)
    found = await swarm.exported()
    assert swarm.asked[-4:] == [("dead", STATE), ("b", SNAPSHOT), ("c", SNAPSHOT), ("a", SNAPSHOT)]
    assert found[1].kept_by == "c"


async def test_a_stage_that_nobody_serves_and_nobody_keeps_is_named_with_what_to_try(swarm: Swarm) -> None:
    await swarm.replica("a", 0)
    with pytest.raises(UserError) as nothing:
        await swarm.exported()
    swarm.at_work("dead", 1, 20)
    with pytest.raises(UserError) as dead:
        await swarm.exported()
    await swarm.keeper("a", 1, round=10)
    swarm.fails = {("a", SNAPSHOT)}
    with pytest.raises(UserError) as broken:
        await swarm.exported()
    assert swarm.asked == [("dead", STATE), ("a", SNAPSHOT)], "it is not asked twice, and stage 0 is there"
    nothing, dead, broken = nothing.value, dead.value, broken.value
    assert nothing.what == "Nobody serves stage 1, and nobody keeps a snapshot of it."
    assert dead.what == "Nobody gave the weights of stage 1, and nobody keeps a snapshot of it."
    assert "lists 1 replicas of it; of 2 peers that were asked for a snapshot 0 offered one" in dead.why
    assert broken.what == "Nobody gave the weights of stage 1, and no snapshot of it could be fetched and believed."
    for trouble in (nothing, dead, broken):
        assert "--from-home DIR" in trouble.hint
        assert trouble.code is Exit.UNREACHABLE


@pytest.mark.parametrize("busy", ["busy_until_s", "full_until_s"])
@pytest.mark.parametrize(("busy_s", "comes"), [(60.0, True), (math.inf, False)])
async def test_a_busy_keeper_is_waited_for_and_not_for_ever(
    swarm: Swarm, busy: str, busy_s: float, comes: bool
) -> None:
    least_s = busy_s if comes else AGAIN_S * (ATTEMPTS - 1)
    await swarm.replica("a", 0)
    await swarm.keeper("a", 1, round=10)
    setattr(swarm, busy, {("a", SNAPSHOT): busy_s})
    if comes:
        assert (await swarm.exported())[1].kept_by == "a"
    else:
        with pytest.raises(UserError, match="no snapshot of it could be fetched"):
            await swarm.exported()
    assert least_s <= (asyncio.get_running_loop().time()) < least_s + 2 * AGAIN_S


async def test_a_snapshot_that_an_interrupted_export_left_ends_no_search_for_others(swarm: Swarm) -> None:
    await swarm.replica("a", 0)
    await swarm.keeper("a", 1, round=10)
    await swarm.replica("b", 0)
    await swarm.keeper("b", 1, round=12)
    await swarm.interrupted(at=3)
    assert swarm.asked[2:] == [("b", SNAPSHOT)]
    swarm.asked.clear()
    await swarm.replica("c", 0)
    await swarm.keeper("c", 1, round=39)
    found = await swarm.exported()
    assert swarm.asked == [("c", STATE), ("c", SNAPSHOT), ("a", SNAPSHOT)]
    assert found[1].kept_by == "c"
    # Their keepers have gone: what they gave counts.
    for peer in "abc":
        del swarm.records[peer]
    await swarm.replica("d", 0)
    assert (await swarm.exported())[1].kept_by == "c"


async def test_a_snapshot_is_not_used_once_the_stage_lives_again(swarm: Swarm) -> None:
    await swarm.replica("a", 0)
    await swarm.keeper("a", 1, round=38)
    assert [each.kept_by for each in await swarm.exported()] == [None, "a"]
    await swarm.replica("back", 1, round=39)
    found = await swarm.exported()
    assert swarm.asked == [("back", STATE)]
    assert (peers_of(found[1]), found[1].kept_by) == (["back"], None)


@pytest.mark.parametrize(
    ("round", "taken", "left_out"),
    [
        (10 + ROUND_BOUND, ["of a home"], []),
        (11 + ROUND_BOUND, ["a", "of a home"], []),
        (10 + BEHIND, ["a", "of a home"], []),
        (11 + BEHIND, ["a"], ["of a home"]),
    ],
)
async def test_a_snapshot_counts_beside_a_home_where_it_is_clearly_newer(
    swarm: Swarm, tmp_path: Path, round: int, taken: list[str], left_out: list[str]
) -> None:
    await swarm.replica("a", 0)
    await swarm.keeper("a", 1, round)
    copy = snapshot_of(of_state(drawn(1, seed=9), 10, 0.25), "of a home", 1, RUN.digest)
    filed = PartsDirectory(tmp_path, RUN.digest, PLAN.shapes, BEHIND).keep(copy)
    found = (await swarm.exported(filed))[1]
    assert peers_of(found) == taken
    assert [each.peer for each in found.left_out] == left_out
    assert found.kept_by == ("a" if "a" in taken else None)
    assert filed.path.exists()


async def test_replicas_of_an_interrupted_export_do_not_outweigh_a_snapshot_of_long_after(swarm: Swarm) -> None:
    """Their stage has died meanwhile, so that no roster says how old they are."""
    await swarm.replica("z", 0, round=5)
    for peer in ("k", "l", "m"):
        await swarm.replica(peer, 1, round=5)
    await swarm.interrupted(at=3)
    for peer in ("k", "l", "m"):
        del swarm.records[peer]
    swarm.at_round("z", 200)
    await swarm.keeper("z", 1, round=190)
    found = await swarm.exported()
    assert swarm.asked == [("z", STATE), ("z", SNAPSHOT)]
    assert (peers_of(found[1]), found[1].kept_by) == (["z"], "z")
    assert [each.peer for each in found[1].left_out] == ["k", "l"]
    assert found[1].left_out[0].why == "round 5, the snapshot that z keeps is of round 190"


@given(rounds=st.lists(st.integers(0, 300), min_size=1, max_size=5), data=st.data(), progress=st.floats(0.0, 1.0))
def test_what_is_noted_compares_with_stages_that_live_where_there_are_any(
    rounds: list[int], data: st.DataObject, progress: float
) -> None:
    kept = data.draw(st.sets(st.sampled_from(range(len(rounds))), min_size=1))
    stages = [
        (ReplicaSummary(peer=f"peer {n}", round=round, inner_steps=0, progress=progress, norm=1.0),)
        for n, round in enumerate(rounds)
    ]
    notes = noted(stages, {number: f"peer {number}" for number in kept})
    assert [note.stage for note in notes] == sorted(kept)
    for note in notes:
        assert note.round == rounds[note.stage]
        living = sorted(round for n, round in enumerate(rounds) if n not in kept)
        beside = living or sorted(round for n, round in enumerate(rounds) if n != note.stage)
        assert note.others_round == (beside[(len(beside) - 1) // 2] if beside else None)
        told = told_of(note)
        assert f"of its round {note.round} that peer {note.stage} keeps" in told
        if note.others_round is not None:
            lag = note.others_round - note.round
            assert ("behind the other" in told, "ahead of" in told, "in the same round" in told) == (
                lag > 0,
                lag < 0,
                lag == 0,
            )


@pytest.mark.usefixtures("swarm")
async def test_a_stage_of_a_whole_swarm_that_died_is_taken_home(tmp_path: Path) -> None:
    """With nodes, one of which keeps snapshots as a volunteer does."""
    hub, what, store = SimNetwork(), recipe(replicas=2, steps=4000, per_round=3), Memory()
    keeper = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store)
    rest = [Peer(hub, what, name, stage, job_s=0.3) for name, stage in (("a0", 0), ("a1", 1), ("b1", 1))]
    await until(lambda: len(store.kept.get(1, [])) >= 2)
    await killed(hub, rest[1:])
    await until(lambda: forgotten(keeper, 1))
    look, parts = seen(keeper.node.roster), parts_of(tmp_path / "model", what, keeper.plan)
    visitor = hub.network("visitor")
    found = await SwarmExport(network=visitor, recipe=what, look=look, layout=keeper.plan, parts=parts).stages()
    assert (found[0].kept_by, found[1].kept_by) == (None, "keeper")
    assert same_tensors(tuple(found[1].weights.values()), store.kept[1][-1].tensors["slow"])
    assert found[1].taken[0].round == store.kept[1][-1].counters.round
    await asked_to_leave(keeper, rest[0])
