"""Snapshots of other stages, and a stage that comes back from one."""

import asyncio
import math
import shutil
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from continued_runs import ADAPTER, Continued
from dead_stage import forgotten, killed
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Memory, Peer, asked_to_leave, recipe, until
from msgspec import structs
from sample_counters import counters
from toy_gossip import at_once

from gossip.exchange.messages import Manifest, Parts, StateRequest
from gossip.interface import OuterStepTaken
from gossip.rule.outer_step import ROUND_BOUND
from noloco_node.journal import events as journal_events
from noloco_node.node.join import LOOK_S, LOOKS
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync import snapshot_keeper
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, ask_manifests
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.state_sync.snapshot_keeper import next_stage, possible
from noloco_node.state_sync.starting_state import (
    AGAIN_S,
    ATTEMPTS,
    FAR,
    MOST_TIMES,
    NORM_FACTOR,
    RunReach,
    asks_again,
    donors,
    reached,
    verify_snapshot,
)
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.checkpoint_store import KEPT_SNAPSHOTS, CheckpointStore
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.stage_records import CLOCK_S
from noloco_node.tasks import background, loop_s

# What is decided.


@given(
    rounds=st.lists(st.lists(st.integers(0, 100), max_size=5), min_size=1, max_size=6),
    kept=st.dictionaries(st.integers(0, 5), st.integers(0, 100)),
    every=st.integers(1, 30),
)
def test_the_stage_that_is_furthest_beyond_its_snapshot_is_next(
    rounds: list[list[int]], kept: dict[int, int], every: int
) -> None:
    number = next_stage(rounds, kept, every)

    def lag(stage: int) -> int | None:
        found = sorted(rounds[stage])
        return found[(len(found) - 1) // 2] - kept.get(stage, -every) if found else None

    lags = {stage: behind for stage in range(len(rounds)) if (behind := lag(stage)) is not None}
    if number is None:
        assert all(behind < every for behind in lags.values())
    else:
        assert lags[number] == max(lags.values()) >= every
        assert next_stage(rounds, {**kept, number: lags[number] + kept.get(number, -every)}, every) != number


@given(st.integers(1, 100), st.integers(1, 30), st.integers(0, 100))
def test_a_stage_that_began_anew_replaces_no_snapshot(kept: int, every: int, now: int) -> None:
    assert (next_stage([[now, now]], {0: kept}, every) is None) == (now < kept + every)


@given(
    honest=st.lists(st.integers(100, 105), min_size=1, max_size=2), every=st.integers(5, 30), lie=st.integers(0, 2**40)
)
def test_nobody_claims_a_round_that_no_snapshot_would_ever_pass(honest: list[int], every: int, lie: int) -> None:
    found = [offer("liar", 160 + lie), *(offer(f"honest-{number}", round) for number, round in enumerate(honest))]
    assert possible(found, every) == found[1:]
    assert possible([], every) == []


def offer(peer: str, round: int, norm: float = 1.0) -> ReplicaSummary:
    return ReplicaSummary(peer=peer, round=round, inner_steps=10 * round, progress=0.5, norm=norm)


@given(
    rounds=st.lists(st.integers(0, 600), max_size=8),
    own=st.one_of(st.none(), st.integers(0, 600)),
    latest=st.integers(0, 8),
)
def test_the_newest_possible_snapshot_is_asked_for_first_and_only_if_it_is_newer_than_ours(
    rounds: list[int], own: int | None, latest: int
) -> None:
    order = donors(own, [offer(f"peer-{n}", round) for n, round in enumerate(rounds)], RunReach(latest, 0.5))
    asked = [rounds[int(peer.removeprefix("peer-"))] for peer in order]
    assert asked == sorted(asked, reverse=True)
    believed = [round for round in rounds if round <= MOST_TIMES * (latest + ROUND_BOUND)]
    assert sorted(asked) == sorted(r for r in believed if own is None or r > own + ROUND_BOUND)


@given(st.integers(5, 10), st.integers(0, 10))
def test_a_stage_of_few_replicas_may_be_many_rounds_further_and_newcomers_do_not_count(rounds: int, new: int) -> None:
    """The stage with the fewest replicas takes most steps, and is the one that dies."""
    trained = PeerRecord(peer="a", stage=0, state=PeerState.TRAINING, round=rounds, progress=0.5)
    joining = [PeerRecord(peer=f"new-{n}", stage=0, state=PeerState.CATCHING_UP) for n in range(new)]
    run = reached(Roster(stages=((trained, *joining), ())))
    assert run == RunReach(rounds, 0.5)
    assert donors(None, [offer("keeper", 5 * rounds)], run) == ("keeper",)
    assert donors(None, [offer("liar", 5 * rounds)], RunReach(rounds, 0.2)) == ()


@given(
    honest=st.lists(st.floats(1.0, 1.9), min_size=2, max_size=6),
    lie=st.one_of(st.floats(1e-9, 1.0 / NORM_FACTOR * 0.99), st.floats(1.9 * NORM_FACTOR * 1.01, 1e9)),
)
def test_an_outlier_among_three_or_more_is_passed_over(honest: list[float], lie: float) -> None:
    offers = [*(offer(f"peer-{n}", 10, norm) for n, norm in enumerate(honest)), offer("liar", 12, lie)]
    assert "liar" not in donors(None, offers, RunReach(20, 0.5))
    assert len(donors(None, offers, RunReach(20, 0.5))) == len(honest)


@given(st.booleans(), st.booleans(), st.integers(0, 100))
def test_who_asks_for_snapshots_comes_to_an_end(promised: bool, saved: bool, attempt: int) -> None:
    assert asks_again(True, saved, 0)
    assert not asks_again(promised, saved, ATTEMPTS - 1)
    assert asks_again(False, False, 0)
    assert not asks_again(False, True, attempt)
    assert asks_again(promised, saved, attempt) <= asks_again(True, saved, attempt)


# On a disk.


@pytest.mark.real_time
async def test_the_last_few_of_each_stage_are_kept_and_room_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(stage: int, round: int) -> Checkpoint:
        return Checkpoint(
            counters(stage=stage, round=round, inner_steps=round), {"slow": (torch.full((4,), float(round)),)}
        )

    store = CheckpointStore(tmp_path / "checkpoint", tmp_path / "snapshots", "run", "me", pytest.fail)
    assert await store.slow(0) is None
    for round in (1, 2, 3):
        for stage in (0, 1):
            await store.keep(made(stage, round + stage))
    assert [len(list(path.iterdir())) for path in (tmp_path / "snapshots").iterdir()] == 2 * [KEPT_SNAPSHOTS]
    for stage in (0, 1):
        found = await store.slow(stage)
        assert found.counters.round == 3 + stage
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16))
    with pytest.raises(OSError, match="should be"):
        await store.keep(made(0, 9))
    found = await store.slow(0)
    assert found.counters.round == 3


# In a swarm.


async def test_a_stage_that_lost_all_its_replicas_comes_back_from_a_snapshot() -> None:
    hub, what, store = SimNetwork(), recipe(replicas=2, steps=4000, per_round=3), Memory()
    keeper = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store)
    rest = [Peer(hub, what, name, stage, job_s=0.3) for name, stage in (("a0", 0), ("a1", 1), ("b1", 1))]
    await until(lambda: len(store.kept.get(1, [])) >= 2)
    assert 0 not in store.kept, "its own stage lies in its checkpoints"
    await killed(hub, rest[1:])
    await until(lambda: forgotten(keeper, 1))
    last = store.kept[1][-1]
    newcomer = Peer(hub, what, "newcomer", 1, job_s=0.3)
    await until(lambda: len(newcomer.of(journal_events.InnerStep)) >= 3)
    first = newcomer.of(journal_events.InnerStep)[0]
    assert first.step == last.counters.inner_steps + 1
    assert first.progress >= last.counters.progress > 0.0
    slow = newcomer.node.replica.rounds.state.slow if newcomer.node.replica is not None else ()
    if newcomer.node.replica is not None and newcomer.node.replica.rounds.finished == last.counters.round:
        assert all(map(torch.equal, slow, last.tensors["slow"]))
    # Training goes on everywhere, and nothing was restarted.
    steps = len(keeper.of(journal_events.InnerStep))
    await until(lambda: len(keeper.of(journal_events.InnerStep)) >= steps + 5)
    await asked_to_leave(keeper, rest[0], newcomer)
    assert all(each.counters.peer in ("a1", "b1", "newcomer") for each in store.kept[1])
    rounds = [each.counters.round for each in store.kept[1]]
    assert all(later - earlier >= 2 for earlier, later in pairwise(rounds))
    assert any("keeping snapshots of stage 1" in line for line in keeper.said)
    assert any("reviving stage 1 from a snapshot" in line for line in newcomer.said)
    assert not any("LOST ITS WEIGHTS" in line for line in newcomer.said)


def lie_about(true: Checkpoint) -> Memory:
    """Return snapshots that claim to be newer, and are worth nothing."""
    store, counters = Memory(), structs.replace(true.counters, round=true.counters.round + 2 * ROUND_BOUND)
    slow = tuple([-30.0 * tensor for tensor in true.tensors["slow"]])
    store.kept[1], store.refuses = [Checkpoint(counters, {"slow": slow})], True
    return store


@pytest.mark.parametrize("alone", [False, True])
async def test_of_snapshots_of_a_dead_stage_loss_tells_which_is_worth_anything(alone: bool) -> None:
    """The liar's is asked for first, being the newest; where nobody has another, the stage begins anew."""
    hub, what, store = SimNetwork(), recipe(replicas=3, steps=4000, per_round=3), Memory()
    keeper, served = [
        Peer(hub, what, name, stage, snapshots=store, job_s=0.3) for stage, name in enumerate(("keeper", "served"))
    ]
    await until(lambda: len(store.kept.get(1, [])) >= 2)
    lies = lie_about(store.kept[1][-1])
    liar = Peer(hub, what, "liar", 0, snapshots=lies, job_s=0.3)
    sources = [keeper, liar, *(Peer(hub, what, name, 0, job_s=0.3) for name in ("a", "b"))]
    await until(lambda: all(len(peer.of(journal_events.InnerStep)) >= 2 for peer in sources))
    await killed(hub, [served])
    await until(lambda: forgotten(keeper, 1))
    await asyncio.sleep(CLOCK_S)  # for so long its record is believed by whoever sees it for the first time
    if alone:
        await killed(hub, [keeper])
    newcomer = Peer(hub, what, "newcomer", 1, job_s=0.3)
    await until(lambda: bool(newcomer.of(journal_events.Disowned)))
    assert newcomer.saved is None, "weights on trial are written nowhere"
    steps = len(newcomer.of(journal_events.InnerStep))
    await until(lambda: len(newcomer.of(journal_events.InnerStep)) >= steps + 10)
    await asked_to_leave(*sources[alone:], newcomer)
    disowned = newcomer.of(journal_events.Disowned)
    assert [each.loss > FAR * each.usual for each in disowned] == [True]
    assert newcomer.of(journal_events.InnerStep)[-1].loss < FAR * disowned[0].usual
    assert any("LOST ITS WEIGHTS" in line for line in newcomer.said) == alone
    began = [event.step for event in newcomer.of(journal_events.InnerStep) if event.step == 1]
    assert bool(began) == alone
    assert newcomer.saved is not None


async def test_without_a_snapshot_it_is_said_loudly_and_a_returning_checkpoint_is_better() -> None:
    hub, what = SimNetwork(), recipe(replicas=1, steps=4000, per_round=3)
    source, old = Peer(hub, what, "source", 0, job_s=0.3), Peer(hub, what, "old", 1, job_s=0.3)
    await until(lambda: old.saved is not None and old.saved.counters.round >= 2)
    saved = old.saved
    await killed(hub, [old])
    await until(lambda: forgotten(source, 1))
    await asyncio.sleep(CLOCK_S)  # for so long its record is believed by whoever sees it for the first time
    back = Peer(hub, what, "back", 1, job_s=0.3, saved=saved)
    await until(lambda: len(back.of(journal_events.InnerStep)) >= 1)
    assert back.of(journal_events.InnerStep)[0].step == saved.counters.inner_steps + 1
    await killed(hub, [back])
    await until(lambda: forgotten(source, 1))
    stranger = Peer(hub, what, "stranger", 1, job_s=0.3)
    await until(lambda: len(stranger.of(journal_events.InnerStep)) >= 1)
    await asked_to_leave(source, stranger)
    assert any("no snapshot of stage 1 is newer than our own" in line for line in back.said)
    assert not any("LOST" in line for line in back.said)
    assert any(line.startswith("STAGE 1 HAS LOST ITS WEIGHTS") for line in stranger.said)


@pytest.mark.parametrize("adapter", ["", ADAPTER], ids=["all weights", "adapters"])
async def test_a_run_of_one_stage_that_died_goes_on_from_the_checkpoint_that_comes_back(
    tmp_path: Path, adapter: str
) -> None:
    """Nobody keeps snapshots of it. A newcomer that has asked the dead replicas waits for others all the same."""
    made = Continued(tmp_path, adapter=adapter, stages=1, replicas=3, steps=4000, per_round=3)
    shelves = [Memory() for _ in range(3)]
    peers = [
        made.peer(f"peer-{number}", 0, made.whole(), job_s=0.5, snapshots=shelf) for number, shelf in enumerate(shelves)
    ]
    await until(lambda: all(peer.saved is not None and peer.saved.counters.round > 1 for peer in peers))
    await killed(made.hub, peers)
    fresh = made.peer("fresh", 0, made.whole(), job_s=0.5, reached=0.1)
    await until(lambda: any("10.0% of the run is done" in line for line in fresh.said))
    assert any("could not copy the state" in line for line in fresh.said), "the dead were in the roster for a while"
    await asyncio.sleep((LOOKS - 1) * LOOK_S)
    saved = peers[0].saved
    assert saved is not None
    back = made.peer("back", 0, made.whole(), job_s=0.5, saved=saved)
    await until(
        lambda: len(fresh.of(journal_events.InnerStep)) > 1 and any(e.partner for e in fresh.of(OuterStepTaken))
    )
    assert back.of(journal_events.InnerStep)[0].step == saved.counters.inner_steps + 1
    assert fresh.of(journal_events.InnerStep)[0].step > saved.counters.inner_steps
    assert fresh.copied_stages == [0]
    assert not any(shelf.kept for shelf in shelves)
    assert not any("LOST" in line or "ANEW" in line for line in fresh.said)
    await asked_to_leave(fresh, back)


def test_who_offered_one_snapshot_and_gives_another_is_refused() -> None:
    objection = verify_snapshot([offer("peer", 40, 2.0)], RunReach(0, 0.5))

    def refused(round: int, norm: float) -> bool:
        counters = {"inner_steps": 0, "progress": 0.5, "optimiser_steps": 0, "meetings": 0, "last_met": 0}
        given = Manifest(snapshot="", round=round, norm=norm, **counters)
        return asyncio.run(objection("peer", given)) is not None

    assert not refused(40, 2.0)
    assert not refused(MOST_TIMES * ROUND_BOUND, 2.0 * NORM_FACTOR)
    assert refused(MOST_TIMES * ROUND_BOUND + 1, 2.0)
    assert refused(40, 2.1 * NORM_FACTOR)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (OSError(28, "No space left on device"), "no snapshot of stage 1 this time"),
        (RuntimeError("can't allocate memory: you tried to allocate 9 bytes"), "no snapshot of stage 1 this time"),
        (ValueError("a mistake of ours"), "the keeping of snapshots failed"),
    ],
    ids=["disk", "memory", "mistake"],
)
async def test_what_goes_wrong_with_a_snapshot_costs_it_and_nothing_else(
    refusal: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_keeper, "FAILURE_S", 20.0)
    hub, what, store = SimNetwork(), recipe(replicas=1, steps=4000, per_round=3), Memory()
    store.refuses = refusal
    keeper, other = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store), Peer(hub, what, "other", 1, job_s=0.3)
    await until(lambda: any(said in line for line in keeper.said))
    store.refuses = None
    await until(lambda: 1 in store.kept)
    await asked_to_leave(keeper, other)
    assert len([line for line in keeper.said if said in line]) == 1
    assert store.kept[1][0].counters.peer == "other"


async def test_a_snapshot_that_has_no_room_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a volunteer with a full disk would fetch it again every two minutes, and a replica send it."""
    monkeypatch.setattr(snapshot_keeper, "FAILURE_S", 20.0)
    fetch, fetched = WeightsOf.fetch, list[int]()
    monkeypatch.setattr(WeightsOf, "fetch", lambda self, *given: (fetched.append(self.number), fetch(self, *given))[1])
    hub, what, store = SimNetwork(), recipe(replicas=1, steps=4000, per_round=3), Memory()
    store.has_room = False
    keeper, other = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store), Peer(hub, what, "other", 1, job_s=0.3)
    await until(lambda: len(other.of(OuterStepTaken)) >= 4)
    await asyncio.sleep(60.0)
    assert not fetched
    assert any("bytes have no room" in line for line in keeper.said)
    store.has_room = True
    await until(lambda: 1 in store.kept)
    assert fetched == [1]
    await asked_to_leave(keeper, other)


async def test_a_stage_that_died_is_served_though_a_stranger_keeps_another_one_busy() -> None:
    hub, what, store = SimNetwork(), recipe(stages=3, replicas=1, steps=4000, per_round=3), Memory()
    keeper = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store)
    others = [Peer(hub, what, f"other-{stage}", stage, job_s=0.3) for stage in (1, 2)]
    await until(lambda: {1, 2} <= store.kept.keys())
    stranger, shapes = hub.network("stranger"), tuple(keeper.plan.shapes[1].values())

    async def hog() -> None:
        while True:
            async with stranger.talk("keeper", topic(SNAPSHOT, 1), state_schema(shapes)) as conversation:
                await conversation.send(StateRequest(parts=Parts.SLOW))
                await conversation.receive()
                await asyncio.sleep(20.0)

    async with background(hog()):
        await killed(hub, [others[1]])
        await until(lambda: forgotten(keeper, 2))
        back = Peer(hub, what, "back", 2, job_s=0.3)
        await until(lambda: bool(back.of(journal_events.InnerStep)))
    await asked_to_leave(keeper, others[0], back)
    assert any("reviving stage 2 from a snapshot" in line for line in back.said)


async def test_a_peer_that_left_a_stage_twice_offers_what_it_left_last_and_nothing_of_its_own() -> None:
    hub, shapes, lying = SimNetwork(), ((2,),), list[Checkpoint]()
    other = hub.network("other")

    async def beside(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    async def answer(value: Any) -> Any:
        return value

    archive = SimpleNamespace(
        set_aside=lambda own: answer(None), stages=lambda: answer((0, 1)), slow=lambda stage: answer(lying[-1])
    )
    device: Any = SimpleNamespace(beside=beside)
    places = (hub.network("keeper"), device, archive, [shapes, shapes], lambda size: 60.0, lambda number: False)
    server = snapshot_keeper.SnapshotServer(*places)
    serve = places[0].serve

    async def slow_serve(*arguments: Any) -> None:
        await asyncio.sleep(1.0)
        await serve(*arguments)

    places[0].serve = slow_serve  # type: ignore[method-assign]
    lying.append(Checkpoint(counters(round=3, stage=1), {"slow": (torch.ones(2),)}))
    async with background(server.note(lying[-1])):
        await asyncio.sleep(0.5)  # then the node leaves the stage that it has served meanwhile
    for round in (5, 9):
        lying.append(Checkpoint(counters(round=round, stage=1), {"slow": (torch.ones(2),)}))
        await server.begin(own=0)
        told = await ask_manifests(other, ["keeper"], WeightsOf(1, shapes, SNAPSHOT))
        assert told.manifests["keeper"].round == round
    lying.append(Checkpoint(counters(round=7, stage=1), {"slow": (torch.ones(2),)}))  # the file of round 9 is damaged
    assert (await WeightsOf(1, shapes, SNAPSHOT).fetch(other, ["keeper"], 60.0, at_once)).round == 7
    told = await ask_manifests(other, ["keeper"], WeightsOf(1, shapes, SNAPSHOT))
    assert told.manifests["keeper"].round == 7, "it offers what it gives"
    assert not (await ask_manifests(other, ["keeper"], WeightsOf(0, shapes, SNAPSHOT))).manifests


async def test_a_keeper_holds_no_snapshot_that_lies_on_the_disk() -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    async def slow(stage: int) -> Checkpoint:
        weights = torch.ones(2)
        read.append(weakref.ref(weights))
        return Checkpoint(counters(stage=stage), {"slow": (weights,)})

    async def beside(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    shapes, hub, archive, device = ((2,),), SimNetwork(), SimpleNamespace(slow=slow), SimpleNamespace(beside=beside)
    network = hub.network("keeper")
    places: Any = (network, device, archive, [shapes, shapes], lambda size: 60.0, lambda number: False)
    server = snapshot_keeper.SnapshotServer(*places)
    config = snapshot_keeper.SnapshotKeeperConfig(run_id="run", seed=0, own=0, every=5)
    with_roster: Any = (config, server, lambda: Roster(stages=((), ())), None)
    keeper = snapshot_keeper.SnapshotKeeper(*with_roster)
    async with background(keeper.run()):
        await asyncio.sleep(5.0)
        assert [each() for each in read] == [None, None]


async def test_weights_that_the_disk_has_damaged_are_read_once_in_a_while_however_many_ask() -> None:
    """To find out takes a pass over gigabytes."""
    reads, shapes = list[float](), ((4,),)

    class Archive:
        async def set_aside(self, own: int) -> None: ...

        async def stages(self) -> tuple[int, ...]:
            return (1,)

        async def slow(self, stage: int) -> Checkpoint | None:
            reads.append(loop_s())
            whole = Checkpoint(counters(stage=1), {"slow": (torch.ones(4),)})
            return whole if len(reads) == 3 else None

    hub, device = SimNetwork(), SimpleNamespace(beside=at_once)
    places: Any = (hub.network("keeper"), device, Archive(), [shapes, shapes], lambda size: 60.0, lambda number: False)
    await snapshot_keeper.SnapshotServer(*places).begin(0)
    stranger, told = hub.network("stranger"), list[int]()
    for _ in range(int(2.5 * snapshot_keeper.FAILURE_S)):
        replies = await ask_manifests(stranger, ["keeper"], WeightsOf(1, shapes, SNAPSHOT))
        told.append(len(replies.manifests))
        await asyncio.sleep(1.0)
    assert (len(reads), told[-1]) == (3, 1)
    assert all(later - earlier >= snapshot_keeper.FAILURE_S for earlier, later in pairwise(reads))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("takes_s", [1.0, 12.0, 100.0])
async def test_weights_that_take_long_to_read_are_offered_all_the_same(takes_s: float, saved: bool) -> None:
    """A checkpoint has gigabytes, and is hashed: to give up would lose the stage."""
    reads, shapes = list[float](), ((4,),)

    async def slow(stage: int) -> Checkpoint:
        reads.append(loop_s())
        await asyncio.sleep(takes_s)
        return Checkpoint(counters(stage=1), {"slow": (torch.ones(4),)})

    async def answer(value: Any) -> Any:
        return value

    archive = SimpleNamespace(set_aside=lambda own: answer(None), stages=lambda: answer((1,)), slow=slow)
    hub, device = SimNetwork(), SimpleNamespace(beside=at_once)
    places: Any = (hub.network("keeper"), device, archive, [shapes, shapes], lambda size: 60.0, lambda number: False)
    await snapshot_keeper.SnapshotServer(*places).begin(0)
    newcomer, subject = hub.network("newcomer"), WeightsOf(1, shapes, SNAPSHOT)
    for attempt in range(ATTEMPTS):
        replies = await ask_manifests(newcomer, ["keeper"], subject)
        if replies.manifests:
            break
        assert asks_again(replies.busy > 0, saved, attempt)
        await asyncio.sleep(AGAIN_S)
    assert replies.manifests["keeper"].round == counters(stage=1).round
    assert len(reads) == 1


async def test_what_a_stranger_asks_for_is_bounded() -> None:
    """Of the stages that live one at a time is served, and nobody gets more than slow weights."""
    hub, what, store = SimNetwork(), recipe(stages=3, replicas=1, steps=4000, per_round=3), Memory()
    keeper = Peer(hub, what, "keeper", 0, job_s=0.3, snapshots=store)
    others = [Peer(hub, what, f"other-{stage}", stage, job_s=0.3) for stage in (1, 2)]
    await until(lambda: {1, 2} <= store.kept.keys())
    await asyncio.sleep(1.0)
    shapes = [tuple(each.values()) for each in keeper.plan.shapes]
    stranger, reads = hub.network("stranger"), store.reads
    told = await ask_manifests(stranger, ["keeper", "other-1", "nobody"], WeightsOf(1, shapes[1], SNAPSHOT))
    assert list(told.manifests) == ["keeper"]
    assert told.manifests["keeper"].round == store.kept[1][-1].counters.round
    norm = math.hypot(*(float(torch.linalg.vector_norm(each)) for each in store.kept[1][-1].tensors["slow"]))
    assert told.manifests["keeper"].norm == pytest.approx(norm)
    assert store.reads == reads, "what everybody may ask costs the disk nothing"

    async def ask(stage: int, parts: Parts) -> Any:
        async with stranger.talk("keeper", topic(SNAPSHOT, stage), state_schema(shapes[stage])) as conversation:
            await conversation.send(StateRequest(parts=parts))
            return await conversation.receive()

    assert isinstance(await ask(1, Parts.SLOW), Manifest)
    assert isinstance(await ask(1, Parts.SLOW), Manifest)
    assert store.reads == reads + 1
    assert type(await ask(2, Parts.OUTLINE)).__name__ == "Busy"
    with pytest.raises(ConnectionError):
        await ask(1, Parts.ALL)
    with pytest.raises(ConnectionError):
        await ask(0, Parts.OUTLINE)
    assert keeper.node.roster.stage(2)[0].state is PeerState.TRAINING
    assert (await ask_manifests(stranger, ["keeper"], WeightsOf(2, shapes[2], SNAPSHOT))).busy == 1
    told = await ask_manifests(stranger, ["other-1"], WeightsOf(1, shapes[1], STATE))
    assert told.manifests.keys() == {"other-1"}
    await asked_to_leave(keeper, *others)
