"""Who is asked to go goes soon, whenever it is asked, takes nothing of others' along, and leaves nothing behind."""

import asyncio
import errno
import signal
from collections.abc import Iterator

import pytest
import torch
from handlers import now
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, recipe, until
from overheard import Cast, Heard, nothing_is_held

from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.machine.signals import departure
from noloco_node.node.assignment import DRAIN_S
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.sim.clock import run
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint
from pipeline.messages import Microbatch

SWARM = """
seed = {seed}

[swarm]
stages = {stages}
replicas = 2
rounds = 10000
inner_steps_per_round = 3
microbatches_per_step = 4
windows_in_flight = {windows}
overlap_steps = 1
refresh_s = 2.0

[devices]
forward_s = 0.2
slowness = [1.0, 1.2]
"""
SOON_S = DRAIN_S + 5.0
"""For this swarm: the microbatches in its hands, and what else there is to do."""


def swarm(seed: int = 0, stages: int = 2, windows: int = 1) -> Cast:
    """Return a cast of two replicas a stage, all started."""
    torch.set_num_threads(1)
    cast = Cast(SWARM.format(seed=seed, stages=stages, windows=windows))
    for peer in cast.peers.values():
        peer.start()
    return cast


async def train(cast: Cast) -> None:
    """Wait until everybody has had two rounds."""
    await until(lambda: all(len(cast.since(name, OuterStepTaken)) >= 2 for name in cast.peers))


async def leave(cast: Cast, name: str, within_s: float) -> float:
    """Ask one to leave, and return how long that took; fail when it takes longer than it may, or ends in an error."""
    asked_s, task = now(), cast.peers[name].session.task
    assert task is not None
    cast.peers[name].ask_to_leave()
    async with asyncio.timeout(within_s):
        await asyncio.wait({task})
    task.result()
    return now() - asked_s


async def end(cast: Cast) -> None:
    """Ask all that are left to go, from the sources on, and check what they leave."""
    for stage in range(3):
        for peer in cast.of_stage(stage):
            if peer.running:
                peer.ask_to_leave()
        async with asyncio.timeout(60.0):
            await asyncio.gather(
                *[peer.session.task for peer in cast.of_stage(stage) if peer.session.task and peer.running]
            )
    assert cast.hub.failures == []


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    moment_s=st.floats(0.0, 90.0),
    stages=st.integers(1, 3),
    windows=st.sampled_from([1, 2]),
    number=st.integers(0, 5),
)
async def test_whenever_it_is_asked_it_goes_soon_and_nobody_loses_by_it(
    seed: int, moment_s: float, stages: int, windows: int, number: int
) -> None:
    cast = swarm(seed, stages, windows if stages > 1 else 1)
    name = list(cast.peers)[number % len(cast.peers)]
    leaver = cast.peers[name]
    await asyncio.sleep(moment_s)
    asked_s = now()
    before = len(cast.since(name, events.InnerStep))
    await leave(cast, name, SOON_S)
    taken = len(cast.since(name, events.InnerStep))
    assert taken <= before + 2  # the window under way, and at most one that was complete already
    if cast.since(name, events.Started):
        nothing_is_held(leaver)
        (finished,) = cast.since(name, events.Finished)
        assert finished.why == "asked to leave"
        assert finished.discarded < 4
        assert leaver.disk.counters.inner_steps == finished.step
        assert leaver.disk.counters.round == finished.round
    left = [other for other in cast.peers if other != name]
    gone_s = now()
    await until(lambda: all(len(cast.since(other, events.InnerStep, gone_s)) >= 3 for other in left), 120.0)
    # Its own microbatches came back before it went, and those of others were refused or had their gradient.
    lost = [loss for other in left for loss in cast.since(other, events.Lost, asked_s)]
    assert [loss for loss in lost if loss.what == "microbatch" and "broke" in loss.why] == []
    await end(cast)


async def test_who_leaves_before_a_merely_full_stage_finishes_its_window() -> None:
    hub, what = SimNetwork(), recipe(steps=4000, window=2, per_round=50)
    last = Peer(hub, what, "peer-last", 1, job_s=1.0)
    sources = [Peer(hub, what, f"peer-{n}", 0, job_s=0.05) for n in range(6)]
    await until(lambda: all(peer.of(events.InnerStep) for peer in sources), 300.0)
    leaver = sources[0]
    replica = leaver.replica
    assert replica.next_stage is not None
    after, gate = replica.next_stage, replica.admission
    await until(lambda: after.statistics()["waiting"] == gate.in_flight and gate.succeeded > 0)
    await asked_to_leave(leaver)
    assert leaver.of(events.Finished)[0].discarded == 0
    await asked_to_leave(last, *sources[1:])


async def test_it_takes_no_more_microbatches_and_finishes_those_in_its_hands() -> None:
    cast = swarm(stages=3)
    await train(cast)
    taken: list[float] = []

    async def listen(heard: Heard) -> None:
        mine = heard.me == "s1r0" and heard.act == "sends"
        if mine and heard.calls and isinstance(heard.message, Microbatch):
            taken.append(now())

    cast.listen = listen
    await until(lambda: len(taken) > 3)
    replica = cast.replica("s1r0")
    await until(lambda: replica.admission.in_flight >= 2)
    counts, asked_s, in_flight = (
        replica.worker.statistics(),
        now(),
        replica.admission.in_flight,
    )
    taken.clear()
    await leave(cast, "s1r0", SOON_S)
    after = replica.worker.statistics()
    # What was past the gate went on down and came back up; whoever queued or came later was sent elsewhere.
    assert len(taken) <= in_flight
    assert after["succeeded"] - counts["succeeded"] == in_flight
    assert after["counted_twice"] == counts["counted_twice"]
    assert not [loss for source in ("s0r0", "s0r1") for loss in cast.since(source, events.Lost, asked_s)]
    await end(cast)


def test_a_window_that_is_complete_is_used_and_a_partial_one_is_told() -> None:
    """Over many moments both happen; and every microbatch that succeeded is in a step or among the discarded."""

    async def main(moment_s: float) -> tuple[int, int]:
        cast = swarm(stages=2)
        await train(cast)
        await asyncio.sleep(moment_s)
        await leave(cast, "s1r1", SOON_S)
        succeeded = int(cast.replica("s1r1").worker.statistics()["succeeded"])
        (finished,) = cast.since("s1r1", events.Finished)
        assert succeeded == 4 * len(cast.since("s1r1", events.InnerStep)) + finished.discarded
        await end(cast)
        return finished.step, finished.discarded

    found = [run(main(0.37 * number)) for number in range(5)]
    assert len({discarded for _, discarded in found}) > 1


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.CATCHING_UP])
async def test_who_has_no_weights_yet_goes_at_once(state: PeerState) -> None:
    cast = swarm(stages=1)
    await train(cast)
    cast.peers["s0r1"].crash()
    cast.peers["s0r1"].disk = None
    await asyncio.sleep(60.0)
    if state is PeerState.CATCHING_UP:
        cast.hub.set_access("s0r0", Access(up_bytes_per_s=1000.0))
    begun_s = now() - 1e-3
    cast.peers["s0r1"].start()
    await until(lambda: state in [event.state for event in cast.since("s0r1", events.StateChanged, begun_s)], 60.0)
    if state is PeerState.CATCHING_UP:
        await asyncio.sleep(5.0)
    assert await leave(cast, "s0r1", SOON_S) < 2.0
    assert not cast.since("s0r1", events.Finished)
    cast.hub.set_access("s0r0", Access())
    gone_s = now()
    await until(lambda: len(cast.since("s0r0", events.InnerStep, gone_s)) >= 6, 120.0)
    await end(cast)


async def test_who_waits_for_a_stage_that_is_gone_does_not_wait_for_it_to_leave() -> None:
    cast = swarm(stages=2)
    await train(cast)
    for peer in cast.of_stage(1):
        peer.crash()
    await asyncio.sleep(45.0)
    for name in ("s0r0", "s0r1"):
        assert await leave(cast, name, SOON_S) < 5.0
        assert cast.peers[name].disk is not None


async def test_a_callee_that_hangs_keeps_nobody_beyond_the_bound() -> None:
    cast = swarm(stages=2)
    await train(cast)
    hung = 0

    async def listen(heard: Heard) -> None:
        nonlocal hung
        if heard.me.startswith("s1") and heard.act == "received" and isinstance(heard.message, Microbatch):
            hung += 1
            await asyncio.get_running_loop().create_future()

    cast.listen = listen
    await until(lambda: hung >= 8)
    assert await leave(cast, "s0r0", 4 * DRAIN_S) >= DRAIN_S
    assert any("did not come back" in line for line in cast.peers["s0r0"].session.said)
    assert cast.peers["s0r0"].disk is not None
    for peer in cast.of_stage(1):
        peer.crash()
    await leave(cast, "s0r1", 4 * DRAIN_S)


async def test_a_disk_that_refuses_is_said_and_keeps_nobody() -> None:
    cast = swarm(stages=1)
    await train(cast)
    cast.peers["s0r1"].disk_refuses = True
    task = cast.peers["s0r1"].session.task
    assert task is not None
    cast.peers["s0r1"].ask_to_leave()
    async with asyncio.timeout(SOON_S):
        await asyncio.wait({task})
    trouble = user_error_of(task.exception())
    assert trouble.code is Exit.STORAGE
    await asyncio.sleep(2.5)
    assert [record.peer for record in cast.roster("s0r0").stage(0)] == ["s0r0"]
    await end(cast)


async def test_a_disk_that_refuses_shows_in_the_record_and_the_journal_until_it_takes_one() -> None:
    cast = swarm(stages=1)
    await train(cast)
    full = cast.peers["s0r1"]

    def shown() -> tuple[Wait, ...]:
        (record,) = [each for each in cast.roster("s0r0").stage(0) if each.peer == "s0r1"]
        return record.waiting

    def noticed() -> list[bool]:
        return [event.over for event in cast.since("s0r1", events.Noticed) if event.what == events.DISK]

    full.disk_refuses = True
    await until(lambda: WaitCause.DISK in [wait.cause for wait in shown()])
    assert full.session.running, "it trains on"
    assert noticed() == [False]
    full.disk_refuses = False
    await until(lambda: WaitCause.DISK not in [wait.cause for wait in shown()])
    assert noticed() == [False, True]
    await end(cast)


async def test_a_disk_that_refuses_the_last_checkpoint_of_a_run_is_said_too() -> None:
    class Full(Peer):
        async def _save(self, checkpoint: Checkpoint) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

    peer = Full(SimNetwork(), recipe(stages=1, steps=4), "peer-a", 0)
    await asyncio.wait({peer.task})
    (finished,) = peer.of(events.Finished)
    assert finished.why == "the run is over"
    assert "finished; serving the weights" in " ".join(peer.said), "others may still take them home"
    trouble = user_error_of(peer.task.exception())
    assert trouble.code is Exit.STORAGE


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("polite", [True, False])
def test_the_first_signal_asks_who_heeds_it_and_the_second_ends(number: signal.Signals, polite: bool) -> None:
    said: list[str] = []

    async def main() -> str:
        heard = asyncio.Event()
        try:
            async with departure(said.append) as leaving:
                leaving.polite = polite
                asyncio.get_running_loop().call_soon(signal.raise_signal, number)
                await leaving.asked.wait()
                heard.set()
                asyncio.get_running_loop().call_soon(signal.raise_signal, number)
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "twice" if heard.is_set() else "once"
        return "never"

    assert asyncio.run(main()) == ("twice" if polite else "once")
    assert len(said) == polite


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("polite", [True, False])
def test_a_closed_terminal_asks_once_however_often_it_is_told(polite: bool) -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        try:
            async with departure(lambda _: None) as leaving:
                leaving.polite = polite
                loop.call_soon(signal.raise_signal, signal.SIGHUP)
                await leaving.asked.wait()
                for _ in range(3):
                    signal.raise_signal(signal.SIGHUP)
                    await asyncio.sleep(0)  # to read the signal
                    await asyncio.sleep(0)  # to be cancelled by it
                return "politely"
        except asyncio.CancelledError:
            return "at once"

    assert asyncio.run(main()) == ("politely" if polite else "at once")
