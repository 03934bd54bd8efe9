"""A real and a simulated swarm of one run file agree: the simulator may not drift from the truth.

Real processes over libp2p train a run file; peers of the same ids train it again in virtual time, for texts, partners
and routes follow from (seed, peer). The tests compare what timing cannot change.

With one replica a stage that is every number of the run, bit by bit. The learning rate is constant, because progress
reaches each replica at another time. A window is of two microbatches: two gradients have one sum in floating point,
three have several.

With two by two, timing decides which microbatch goes where, how often replicas meet, and who does more. There the tests
hold each swarm to the laws of both: no work is used twice or lost, both sides book the same, and a meeting costs the
same bytes.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from memory_swarms import until
from msgspec import structs
from process_swarm import SLOW, host, is_finished, join, run_file
from processes import Command, Commands

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.errors import Exit
from noloco_node.journal.events import (
    CatchUp,
    Event,
    Finished,
    Hops,
    InnerStep,
    Lost,
    Noticed,
    Receipts,
    RefusedMicrobatch,
    Started,
    StateChanged,
    Traffic,
)
from noloco_node.journal.reader import read
from noloco_node.run.peer_state import PeerState
from noloco_node.sim import clock
from noloco_node.sim.network.link_model import Latency
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import NetworkConfig, Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.storage.checkpoint import Checkpoint, load_latest
from noloco_node.storage.home import HomePaths

pytestmark = [pytest.mark.network, pytest.mark.shared]

E = TypeVar("E")

SEED, STAGES, WINDOW, MICROBATCH, RATE, PER_ROUND = 3, 2, 2, 4, 0.003, 6
REFRESH_S = 0.5
ENDLESS = 1_000_000
"""Inner steps of a run that is left before its end."""
MEETINGS = 3
"""That each replica has before such a run is left."""


class Trace(NamedTuple):
    events: list[Event]
    saved: Checkpoint

    def __repr__(self) -> str:
        return f"Trace({self.started.peer} of stage {self.started.stage}, {len(self.events)} events)"

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def started(self) -> Started:
        return self.of(Started)[0]

    @property
    def finished(self) -> Finished:
        (finished,) = self.of(Finished)
        return finished

    @property
    def met(self) -> list[OuterStepTaken]:
        return meetings(self.of(OuterStepTaken))

    @property
    def hops(self) -> dict[str, int]:
        return self.of(Hops)[-1].counts

    @property
    def trained(self) -> int:
        """Microbatches that went through backward here; the steps of whoever a late peer copied are not its own."""
        return len(self.of(InnerStep)) * WINDOW + self.finished.discarded

    @property
    def came_back(self) -> int:
        """A source's microbatches whose gradient came back. One for the window after the last is not trained on here.

        Two windows are in flight, and a source that leaves ends only the first. A busy machine shows it.
        """
        came_back = sum(self.hops.values())
        assert self.trained <= came_back <= self.trained + WINDOW
        return came_back


class Swarm(NamedTuple):
    peers: dict[str, Trace]

    @property
    def sources(self) -> list[Trace]:
        return [trace for trace in self.peers.values() if trace.started.stage == 0]

    @property
    def last(self) -> list[Trace]:
        return [trace for trace in self.peers.values() if trace.started.stage == STAGES - 1]


class Pair(NamedTuple):
    real: Swarm
    simulated: Swarm


def meetings(outer: list[OuterStepTaken]) -> list[OuterStepTaken]:
    return [event for event in outer if event.partner is not None]


def train_really(commands: Commands, run: Path, replicas: int) -> Swarm:
    bootstrap, invite = host(commands, run)
    # Nothing begins without a source: by then the last stage is complete.
    nodes = [node for stage in reversed(range(STAGES)) for node in _join(commands, invite, stage, replicas)]

    def done(node: Command) -> bool:
        return is_finished(node) or len(meetings(node.events(OuterStepTaken))) >= MEETINGS

    commands.until(lambda: all(map(done, nodes)), "the run ends, or all have met", alive=[bootstrap, *nodes])
    # The sources first: their microbatches need somebody to come back from.
    for leaving in (nodes[replicas:], nodes[:replicas], [bootstrap]):
        for command in leaving:
            command.interrupt()
        for command in leaving:
            assert command.wait() == Exit.OK, command.complaint
    traces = [_trace(node) for node in nodes]
    return Swarm({trace.started.peer: trace for trace in traces})


def _join(commands: Commands, invite: str, stage: int, replicas: int) -> list[Command]:
    slow = SLOW if replicas > 1 else ()  # that run has no end
    nodes = [join(commands, invite, stage, "--refresh", str(REFRESH_S), *slow) for _ in range(replicas)]
    commands.until(lambda: all(node.events(Started) for node in nodes), f"stage {stage} is there", alive=nodes)
    return nodes


def _trace(node: Command) -> Trace:
    events = list(read(node.home / "journal.jsonl"))
    run_id = node.events(Started)[0].run
    saved = load_latest(HomePaths(node.home).run(run_id).checkpoint, run_id)
    assert saved is not None, node.complaint
    return Trace(events, saved)


def train_simulated(run: Path, real: Swarm) -> Swarm:
    """Train the run in virtual time with the real peers' ids, as far as the real processes do."""
    setting = build_setup(
        Scenario(
            seed=SEED,
            swarm=SwarmConfig(run=str(run), model="transformer", refresh_s=REFRESH_S),
            network=NetworkConfig(latency=Latency(mean_s=0.001)),
        )
    )
    # The very same run, although it never was a file here.
    assert {trace.started.run for trace in real.peers.values()} == {setting.recipe.digest}
    journals: dict[str, list[Event]] = {peer: [] for peer in real.peers}

    def observe(peer: SimulatedPeer, event: Event) -> None:
        journals[peer.name].append(event)

    def done(peer: SimulatedPeer) -> bool:
        outer = [event for event in journals[peer.name] if isinstance(event, OuterStepTaken)]
        return not peer.running or len(meetings(outer)) >= MEETINGS

    async def main() -> dict[str, Trace]:
        hub = SimNetwork(setting.scenario.network, seed=SEED, size_bytes=setting.sizes.size_bytes)
        peers = [SimulatedPeer(name, trace.started.stage, setting, hub, observe) for name, trace in real.peers.items()]
        for peer in peers:
            peer.start()
        await until(lambda: all(map(done, peers)))
        for stage in range(STAGES):
            leaving = [peer for peer in peers if peer.asked_stage == stage]
            for peer in leaving:
                peer.ask_to_leave()
            async with asyncio.timeout(600):
                await asyncio.gather(*(peer.session.task for peer in leaving if peer.session.task is not None))
        assert hub.failures == []
        assert [wrong for peer in peers for wrong in peer.session.wrong] == []
        return {peer.name: Trace(journals[peer.name], peer.disk) for peer in peers if peer.disk is not None}

    return Swarm(clock.run(main()))


def train_twice(replicas: int, steps: int) -> Pair:
    """Train a run with real processes and in virtual time, each process with one thread for its tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Commands() as commands:
            # The learning rate is constant.
            inner, outer = "warmup_steps = 0\nfinal_fraction = 1.0", f"inner_steps_per_round = {PER_ROUND}"
            sizes = {"replicas": replicas, "steps": steps, "window": WINDOW}
            run = run_file(commands.directory, **sizes, inner=inner, outer=outer)
            real = train_really(commands, run, replicas)
            return Pair(real, train_simulated(run, real))
    finally:
        torch.set_num_threads(threads)


ONE_STEPS = 40


@pytest.fixture(scope="module")
def one_by_one() -> Pair:
    return train_twice(replicas=1, steps=ONE_STEPS)


@pytest.fixture(scope="module")
def two_by_two() -> Pair:
    return train_twice(replicas=2, steps=ENDLESS)


def each(pair: Pair) -> Iterator[tuple[Trace, Trace]]:
    assert pair.real.peers.keys() == pair.simulated.peers.keys()
    for name, trace in pair.real.peers.items():
        yield trace, pair.simulated.peers[name]


# One replica a stage: the same numbers.


def test_with_one_replica_a_stage_losses_are_equal(one_by_one: Pair) -> None:
    for real, simulated in each(one_by_one):
        assert [step.step for step in real.of(InnerStep)] == list(range(1, ONE_STEPS + 1))
        assert [step.step for step in simulated.of(InnerStep)] == list(range(1, ONE_STEPS + 1))
        assert {step.learning_rate for trace in (real, simulated) for step in trace.of(InnerStep)} == {RATE}
        losses = [step.loss for step in real.of(InnerStep) if step.loss is not None]
        assert len(losses) == ONE_STEPS
        assert [step.loss for step in simulated.of(InnerStep)] == losses
        assert losses[-1] < losses[0] - 1.0


def test_with_one_replica_a_stage_weights_and_momenta_are_equal(one_by_one: Pair) -> None:
    """The same operations on the same numbers in the same order are the same bits, in any process of this machine.

    No tolerance would do where the order is timing's: AdamW divides by the root of second moments, tiny ones too, and
    multiplies what rounding began. Momenta of windows of four ended 3e-7 to 8e-6 of the norm apart, single tensors up
    to 1.4e-4.
    """
    for real, simulated in each(one_by_one):
        assert real.saved.tensors.keys() == simulated.saved.tensors.keys()
        assert {"slow", "fast"} <= real.saved.tensors.keys()
        for group in real.saved.tensors:
            for one, other in zip(real.saved.tensors[group], simulated.saved.tensors[group], strict=True):
                assert torch.equal(one, other), group


def test_with_one_replica_a_stage_rounds_and_counters_are_equal(one_by_one: Pair) -> None:
    for real, simulated in each(one_by_one):
        rounds = [(event.round, event.partner, event.staleness) for event in real.of(OuterStepTaken)]
        assert rounds == [(event.round, event.partner, event.staleness) for event in simulated.of(OuterStepTaken)]
        assert rounds == [(number, None, 0) for number in range(1, ONE_STEPS // PER_ROUND + 2)]
        assert real.finished.discarded == simulated.finished.discarded == WINDOW - 1
        assert _counters(real.saved) == _counters(simulated.saved)
    (real_source,), (simulated_source,) = one_by_one.real.sources, one_by_one.simulated.sources
    assert real_source.hops == simulated_source.hops
    assert real_source.trained == ONE_STEPS * WINDOW + WINDOW - 1


def _counters(saved: Checkpoint) -> dict[str, Any]:
    """Return the counters of a checkpoint but the progress, which is known with a delay at later stages."""
    return {name: value for name, value in structs.asdict(saved.counters).items() if name != "progress"}


# Two by two: the same laws.

ALWAYS = {Started, StateChanged, InnerStep, OuterStepTaken, Traffic, Finished}
SOMETIMES = {CatchUp, Lost, Noticed, Receipts, RoundSkipped, RefusedMicrobatch}
"""A replica that is late for a round skips it, one that comes when the others have had a round copies them, and a full
queue refuses: a matter of timing, and of no concern. A model that knows its text by heart returns gradients of very
different sizes, and one far beyond the usual is lost (`pipeline.activation_codec`). A real machine that stands
still is noticed."""


def test_two_by_two_write_the_same_kinds_of_events(two_by_two: Pair) -> None:
    for real, simulated in each(two_by_two):
        expected = ALWAYS | ({Hops} if real.started.stage == 0 else set())
        for trace in (real, simulated):
            assert {type(event) for event in trace.events} - SOMETIMES == expected
            assert trace.finished.why == "asked to leave"
            # Whoever waits long enough for the others says more than once that it trains, and one that comes when the
            # others have had a round copies them.
            states = [event.state for event in trace.of(StateChanged) if event.state is not PeerState.CATCHING_UP]
            assert list(dict.fromkeys(states)) == [PeerState.JOINING, PeerState.TRAINING]
        assert real.started.pid > 0
        assert structs.replace(real.started, at=0.0, pid=0) == structs.replace(simulated.started, at=0.0)


@pytest.mark.parametrize("which", Pair._fields)
def test_two_by_two_use_every_microbatch_once(two_by_two: Pair, which: str) -> None:
    swarm: Swarm = getattr(two_by_two, which)
    last = {replica.started.peer for replica in swarm.last}
    for source in swarm.sources:
        assert source.hops.keys() <= last
        assert source.came_back >= source.trained
        assert source.saved.counters.samples == source.trained * MICROBATCH
    for replica in swarm.last:
        peer = replica.started.peer
        came_back = sum(source.hops.get(peer, 0) for source in swarm.sources)
        refused = [event for source in swarm.sources for event in source.of(Lost) if event.peer == peer]
        assert all("its gradient was refused" in event.why for event in refused)
        assert came_back + sum(event.count for event in refused) == replica.trained


@pytest.mark.parametrize("which", Pair._fields)
def test_two_by_two_book_each_meeting_on_both_sides(two_by_two: Pair, which: str) -> None:
    swarm: Swarm = getattr(two_by_two, which)
    for stage in (swarm.sources, swarm.last):
        one, other = stage
        assert {event.partner for event in one.met} == {other.started.peer}
        assert {event.partner for event in other.met} == {one.started.peer}
        # The two may number a meeting differently: one that was behind moves up by one an opening.
        assert [event.gap for event in one.met] == pytest.approx([event.gap for event in other.met], rel=1e-3, abs=1e-6)
        for side in stage:
            rounds = [event.round for event in side.met]
            assert rounds == sorted(set(rounds))
            assert len(rounds) >= MEETINGS


def test_two_by_two_send_as_many_bytes(two_by_two: Pair) -> None:
    """How many meetings were tried in vain is timing's; what a meeting takes, and what a microbatch, is not."""
    for real, simulated in each(two_by_two):
        (size,) = {(event.bytes_sent, event.bytes_received) for trace in (real, simulated) for event in trace.met}
        assert size[0] == size[1]
        for way in ("sent", "received"):
            # The simulator takes every message's header for as long: a hundredth of these messages.
            assert _microbatch_bytes(real, way) == pytest.approx(_microbatch_bytes(simulated, way), rel=0.01)


def _microbatch_bytes(trace: Trace, way: str) -> float:
    """Return what a microbatch costs. Two sources have no more in flight than a queue takes: none is sent twice."""
    counts: dict[str, int] = getattr(trace.of(Traffic)[-1], way)
    # The run file and how far the run had come travel only where processes join by an invite, and a state only to
    # whoever comes late.
    assert counts.keys() - {"run", "reached", "state"} == {"microbatch", "gossip"}
    refused = sum(event.count for event in trace.of(Lost) if event.what == "microbatch")
    passed = trace.came_back if trace.started.stage == 0 else trace.trained
    return counts["microbatch"] / (passed + refused)
