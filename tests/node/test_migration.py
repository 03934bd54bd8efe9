"""A whole node moves: what it leaves behind, what it keeps, and what becomes of it where it cannot arrive.

The nodes are the production's, in memory and virtual time.
"""

import asyncio
import gc
import weakref
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, recipe, until
from sample_counters import counters

from gossip.interface import OuterStepTaken
from gossip.rounds.rounds import Rounds
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import StageModel
from noloco_node.network.interface import Conversation
from noloco_node.node.health import OF_TRAINING, TICK_S, Condition
from noloco_node.node.microbatches import MicrobatchServer
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.replica import Replica
from noloco_node.node.reporting import ProgressReporter
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.hardware.memory_host import MemoryStore
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.state_sync.starting_state import MOST_ASKED, asked_of
from noloco_node.storage.checkpoint import Checkpoint, files, save
from noloco_node.storage.checkpoint_store import KEPT, CheckpointStore
from noloco_node.swarm.roster import PeerRecord, Roster
from pipeline.messages import Microbatch
from pipeline.placement import Move

T = TypeVar("T")

SCENARIO = """
seed = 3
[swarm]
stages = 2
replicas = 3
rounds = 4000
moves = true
refresh_s = 0.5
inner_steps_per_round = 3
microbatches_per_step = 2
[devices]
forward_s = 0.2
"""
MOVING_S = 600.0
"""Within which somebody of a swarm out of balance has moved."""


class Cast:
    """Peers of a simulated swarm that move where they are needed; the last letter of a name is the stage asked for."""

    def __init__(self) -> None:
        self.setting = build_setup(decode_scenario(SCENARIO, "the test's scenario"))
        self.hub = SimNetwork(self.setting.scenario.network, size_bytes=self.setting.sizes.size_bytes)
        self.events: dict[str, list[events.Event]] = {}
        self.peers: list[SimulatedPeer] = []

    def start(self, *names: str, refuses: tuple[int, Exception] | None = None) -> list[SimulatedPeer]:
        """Start peers. `refuses`: a stage that they cannot build, and what is raised then."""

        def build(number: int) -> StageModel:
            if refuses is not None and number == refuses[0]:
                raise refuses[1]
            return self.setting.build(number)

        setting = self.setting._replace(build=build)
        found = [SimulatedPeer(name, int(name[-1]), setting, self.hub, self._hear) for name in names]
        for peer in found:
            self.events[peer.name] = []
            peer.start()
        self.peers += found
        return found

    def _hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        self.events[peer.name].append(event)

    def of(self, peer: SimulatedPeer, kind: type[T]) -> list[T]:
        """Return a peer's events of one kind."""
        return [event for event in self.events[peer.name] if isinstance(event, kind)]

    async def mover(self) -> SimulatedPeer:
        """Return the first that has moved, as soon as it has."""
        await until(lambda: any(self.of(peer, events.Moved) for peer in self.peers), MOVING_S)
        return next(peer for peer in self.peers if self.of(peer, events.Moved))

    async def steps(self, peer: SimulatedPeer, count: int) -> list[events.InnerStep]:
        """Return what a peer has stepped once it has taken some steps more."""
        before = len(self.of(peer, events.InnerStep))
        await until(lambda: len(self.of(peer, events.InnerStep)) >= before + count)
        return self.of(peer, events.InnerStep)

    async def crash(self, *peers: SimulatedPeer) -> None:
        """Let peers die."""
        for peer in peers:
            peer.crash()
            self.peers.remove(peer)
            assert peer.session.task is not None
            await asyncio.wait([peer.session.task])

    async def leave(self) -> None:
        """Ask all to go, and see that they do."""
        for peer in self.peers:
            peer.ask_to_leave()
        async with asyncio.timeout(120):
            await asyncio.gather(*[peer.session.task for peer in self.peers if peer.session.task is not None])
        assert not self.hub.failures


def at_stage(peer: SimulatedPeer) -> int | None:
    node = peer.session.node
    return None if node is None or node.replica is None else node.replica.stage


# What a peer has left.


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_stage_that_dies_out_after_one_moved_away_is_revived_from_what_that_one_has(arrived: bool) -> None:
    """Also where the mover is on its way, and the others are still believed to live."""
    cast = Cast()
    cast.start("a0", "c1", "d1", "e1")
    mover = await cast.mover()
    assert cast.of(mover, events.Moved)[0].origin == 1
    await until(lambda: at_stage(mover) is None)
    left = mover.disk.counters
    if arrived:
        await until(lambda: at_stage(mover) == 0)
        await cast.steps(mover, 3)
    await cast.crash(*[peer for peer in cast.peers if peer.name.endswith("1") and peer is not mover])
    (newcomer,) = cast.start("new1")
    first = (await cast.steps(newcomer, 3))[0]
    assert first.progress > 0.0
    # Training goes on everywhere, and nothing was restarted.
    await cast.steps(mover, 3)
    await cast.leave()
    round, newcomer = left.round, newcomer
    assert any(f"reviving stage 1 from a snapshot of its round {round}" in line for line in newcomer.session.said)
    assert not any("LOST ITS WEIGHTS" in line for line in newcomer.session.said)


async def test_who_comes_back_to_a_stage_goes_on_from_what_it_left_there() -> None:
    """Nobody else has anything of it: it has moved away, the others died, and it is started again there."""
    cast = Cast()
    (watcher, *_) = cast.start("a0", "c1", "d1", "e1")
    mover = await cast.mover()
    await until(lambda: at_stage(mover) is None)
    left = mover.disk
    assert left is not None
    await until(lambda: at_stage(mover) == 0 and mover.disk is not left)
    await cast.crash(*[peer for peer in cast.peers if peer.name.endswith("1")])
    assert mover.disk.counters.stage == 0
    assert watcher.session.node is not None
    await until(lambda: not watcher.session.node.roster.stage(1))
    cast.events[mover.name].clear()
    mover.start()
    cast.peers.append(mover)
    first = (await cast.steps(mover, 1))[0]
    await cast.leave()
    assert first.step == left.counters.inner_steps + 1
    assert any("going on from our own checkpoint" in line for line in mover.session.said)


async def test_a_move_reads_no_checkpoint_of_the_stage_that_was_left() -> None:
    cast, read = Cast(), dict[str, list[int]]()

    class Noted(MemoryStore):
        def __init__(self, peer: SimulatedPeer) -> None:
            super().__init__(lambda: peer.disk)
            self._asked = read.setdefault(peer.name, [])

        async def load(self, stage: int) -> Checkpoint | None:
            self._asked.append(stage)
            return await super().load(stage)

    for peer in [SimulatedPeer(name, int(name[-1]), cast.setting, cast.hub, cast._hear) for name in "0001"]:
        peer.name = f"{len(cast.peers)}{peer.name}"
        peer.archive = Noted(peer)
        cast.events[peer.name] = []
        cast.peers.append(peer)
        peer.start()
    mover = await cast.mover()
    await until(lambda: at_stage(mover) == 1)
    await cast.leave()
    assert read[mover.name] == [0, 1]


# Who cannot arrive.

SHORTAGES = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    OSError(5, "Input/output error"),
    UserError("The model cannot be loaded.", why="it is not there", hint="fetch it", code=Exit.CONFIG),
    ExceptionGroup("", [UserError("The files cannot be kept.", why="full", hint="", code=Exit.STORAGE)]),
]


@pytest.mark.parametrize("shortage", SHORTAGES, ids=lambda shortage: type(shortage).__name__)
async def test_a_stage_that_cannot_be_built_sends_the_mover_back_to_where_it_was(shortage: Exception) -> None:
    cast = Cast()
    cast.start("d1")
    cast.start("a0", "b0", "c0", refuses=(1, shortage))
    mover = await cast.mover()
    await until(lambda: len(cast.of(mover, events.Moved)) == 2 and at_stage(mover) == 0)
    await cast.steps(mover, 3)
    assert mover.running
    moving = mover.session.node.assignment.migration
    assert moving._elsewhere() == (), "it does not try again"
    await cast.leave()
    there, back = cast.of(mover, events.Moved)[:2]
    assert (there.origin, there.target, back.origin, back.target) == (0, 1, 1, 0)
    assert any("we cannot serve stage 1: " in line and "Going back to stage 0" in line for line in mover.session.said)
    assert len(cast.of(mover, events.Finished)) == 1
    steps = [event.step for event in cast.of(mover, events.InnerStep)]
    assert steps == sorted(set(steps)), "it went on from its own checkpoint"


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
async def test_whoever_is_asked_to_leave_on_its_way_says_that_it_has_finished(after_s: float) -> None:
    cast = Cast()
    cast.start("a0", "b0", "c0", "d1")
    mover = await cast.mover()
    await asyncio.sleep(after_s)
    await cast.leave()
    (finished,) = cast.of(mover, events.Finished)
    assert finished.why == "asked to leave"
    assert finished.step >= cast.of(mover, events.InnerStep)[-1].step
    assert mover.disk is not None


# On the disk.


def kept_at(stage: int, step: int, peer: str = "me") -> Checkpoint:
    taken = counters(stage=stage, round=step // 2, inner_steps=step, optimiser_steps=step, peer=peer)
    one = (torch.full((3,), float(step)),)
    return Checkpoint(taken, {"slow": one, "momentum": one, "fast": one, "optimiser": one + one})


@pytest.mark.real_time
@settings(max_examples=25)
@given(stages=st.lists(st.integers(0, 2), min_size=1, max_size=12), kept=st.integers(1, 3))
async def test_the_last_checkpoint_of_every_stage_outlives_those_of_others(
    stages: list[int], kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each save is that of a new session, or of a stay, at some stage."""
    home, said = tmp_path_factory.mktemp("home"), list[str]()
    own = CheckpointStore(home / "checkpoint", home / "snapshots", "run", "me", said.append)
    last: dict[int, int] = {}
    for step, stage in enumerate(stages, start=1):
        found = await own.load(stage)
        assert (None if found is None else found.counters.inner_steps) == last.get(stage)
        await own.set_aside(stage)
        save(home / "checkpoint", kept_at(stage, step), kept)
        last[stage] = step
        assert await own.served() == stage
        for each, when in last.items():
            found = await own.load(each)
            assert found.counters.inner_steps == when
            assert found.tensors.keys() == {"slow", "momentum", "fast", "optimiser"}
    await own.set_aside(9)
    assert set(await own.stages()) == set(last)
    for each, when in last.items():
        slow = await own.slow(each)
        assert (slow.counters.inner_steps, slow.tensors.keys()) == (when, {"slow"})
        assert len(files(home / "snapshots" / str(each))) <= max(KEPT, kept)
    assert said == []


@pytest.mark.real_time
async def test_a_damaged_file_costs_no_more_than_itself_and_others_weights_are_not_gone_on_from(tmp_path: Path) -> None:
    said: list[str] = []
    own = CheckpointStore(tmp_path / "checkpoint", tmp_path / "snapshots", "run", "me", said.append)
    assert await own.served() is None
    assert await own.load(0) is None
    for step in (1, 2):
        save(tmp_path / "checkpoint", kept_at(1, step), 3)
    newest = files(tmp_path / "checkpoint")[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x00")
    await own.set_aside(0)
    found = await own.load(1)
    assert found.counters.inner_steps == 1
    save(tmp_path / "snapshots" / "2", kept_at(2, 5, peer="another"), 2)
    assert await own.load(2) is None
    slow = await own.slow(2)
    assert slow.counters.peer == "another"
    (tmp_path / "snapshots" / "3").write_text("in the way")
    save(tmp_path / "checkpoint", kept_at(3, 9), 3)
    await own.set_aside(0)
    kept = await own.load(3)
    assert kept is not None, "what could not be set aside stays"
    assert any("is of no use" in line for line in said)
    assert "could not be set aside" in said[-1]


# Who is asked.

records = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.sampled_from(PeerState)),
    max_size=40,
    unique_by=lambda row: row[1],
)


@given(records, st.integers(0, 5))
def test_movers_are_asked_for_snapshots_and_newcomers_are_not(
    rows: list[tuple[int, int, PeerState]], seed: int
) -> None:
    found: list[list[PeerRecord]] = [[], [], []]
    for stage, number, state in rows:
        found[stage].append(PeerRecord(peer=f"p{number}", stage=stage, state=state))
    roster = Roster(stages=tuple(map(tuple, found)))
    asked = asked_of(roster, "p0", Random(seed))
    wanted = (PeerState.TRAINING, PeerState.FINISHED, PeerState.CATCHING_UP)
    assert sorted(asked) == sorted({f"p{number}" for _, number, state in rows if state in wanted} - {"p0"})


def test_however_many_say_that_they_are_on_their_way_those_at_work_are_asked() -> None:
    many = [PeerRecord(peer=f"c{n}", stage=0, state=PeerState.CATCHING_UP) for n in range(2000)]
    working = [PeerRecord(peer=f"w{n}", stage=0, state=PeerState.TRAINING) for n in range(20)]
    asked = asked_of(Roster(stages=((*many, *working), ())), "me", Random(1))
    assert {record.peer for record in working} <= set(asked)
    assert len(asked) <= MOST_ASKED + MOST_ASKED // 4


async def test_a_meeting_that_is_still_answered_keeps_no_replica_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partner may take as long as an exchange to end one, and two stages at once may not fit the memory."""
    serve = Rounds.serve

    async def lingering(self: Rounds, conversation: Conversation) -> None:
        await serve(self, conversation)
        await asyncio.sleep(1000.0)

    monkeypatch.setattr(Rounds, "serve", lingering)

    hub, what = SimNetwork(), recipe(replicas=3, steps=4000, per_round=3)
    names = ("a0", "b0", "c0", "d0", "e1")
    peers = [Peer(hub, what, name, int(name[1]), job_s=0.5, moves=True) for name in names]
    replicas = dict[str, weakref.ref[Replica]]()
    while not any(peer.of(events.Moved) for peer in peers):
        replicas |= {peer.name: weakref.ref(peer.node.replica) for peer in peers if peer.node.replica is not None}
        await asyncio.sleep(0.1)
    (mover,) = [peer for peer in peers if peer.of(events.Moved)]
    await until(lambda: len(mover.stages) == 2)
    assert mover.of(OuterStepTaken), "it has met others, who may have asked it"
    gc.collect()
    assert replicas[mover.name]() is None
    await asked_to_leave(*peers)


async def test_what_stood_still_at_a_stage_is_not_called_over_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(self: ProgressReporter, explained: bool) -> dict[str, Condition]:
        return {what: Condition(what, what, "over") for what in OF_TRAINING} if self._replica.stage == 0 else {}

    monkeypatch.setattr(ProgressReporter, "conditions", stalled)
    hub, what = SimNetwork(), recipe(replicas=3, steps=4000, per_round=3)
    names = ("a0", "b0", "c0", "d0", "e1")
    peers = [Peer(hub, what, name, int(name[1]), job_s=0.5, moves=True) for name in names]
    await until(lambda: any(peer.of(events.Moved) for peer in peers))
    (mover,) = [peer for peer in peers if peer.of(events.Moved)]
    await until(lambda: len(mover.stages) == 2)
    await asyncio.sleep(3 * TICK_S)
    noticed = [each for each in mover.of(events.Noticed) if each.what in OF_TRAINING]
    assert noticed
    assert not any(each.over for each in noticed)
    await asked_to_leave(*peers)


async def test_a_microbatch_that_does_not_come_back_keeps_no_stage_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may travel for minutes, and two stages at once may not fit the memory."""
    run, answer = MigrationWatcher.run, MicrobatchServer._answer
    moves, hangs = asyncio.Event(), False

    async def run_or_move(self: MigrationWatcher) -> Move:
        if self._me.peer != "mover" or moves.is_set():
            return await run(self)
        await moves.wait()
        return Move("mover", 1, 0, 1.0, 2.0)

    async def answer_or_hang(self: MicrobatchServer, conversation: Conversation, microbatch: Microbatch) -> None:
        if hangs and self._stage == 2:
            await asyncio.sleep(1e4)
        await answer(self, conversation, microbatch)

    monkeypatch.setattr(MigrationWatcher, "run", run_or_move)
    monkeypatch.setattr(MicrobatchServer, "_answer", answer_or_hang)
    hub, what = SimNetwork(), recipe(stages=3, replicas=1, steps=4000, per_round=3)
    names = {"source": 0, "mover": 1, "other": 1, "last": 2}
    peers = {name: Peer(hub, what, name, stage, job_s=0.1, moves=True) for name, stage in names.items()}
    mover = peers["mover"]
    await until(lambda: bool(mover.of(events.InnerStep)))
    hangs = True
    await until(lambda: mover.replica.stranded)
    worker = weakref.ref(mover.replica.worker)
    moves.set()
    await until(lambda: len(mover.stages) == 2)
    assert any("did not come back" in line for line in mover.said)
    gc.collect()
    assert worker() is None
