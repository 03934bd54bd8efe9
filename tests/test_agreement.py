"""A real and a simulated swarm of one run file agree: the simulator may not drift from the truth.

A swarm of real processes over libp2p trains to its end. Then the same run file is trained in virtual time by peers of
the same ids, for the order of a peer's text, its partners and its routes follow from (seed, peer). They start when the
real ones did, and a pass costs what the real processes' inner steps show.

What may depend on timing is kept out of the numbers. The learning rate follows the progress of the run, which each
replica learns when it learns it: so it is constant here (no warm-up, a fall to 1.0 of the peak). With one replica a
stage a window is then the same microbatches in any order, an outer step is taken in the pause in which it is due, and
the swarm is one sequence of numbers. Two microbatches that overtake each other are added up in another order, which
floating point notices: hence a tolerance of 1e-5 and not equality (measured: below 1e-7).

With two by two it is timing that says which microbatch goes into which window, and counts are compared. Most are held
to a law that is exact in both swarms; those that only timing decides have tolerances, each with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from msgspec import structs
from processes import Command, Commands
from test_swarm import LOCAL, host, is_finished

from noloco_node.checkpoint import Checkpoint, load_latest
from noloco_node.errors import Exit
from noloco_node.journal import (
    CatchUp,
    Deferred,
    Event,
    Finished,
    Hops,
    InnerStep,
    OuterStep,
    Refused,
    Started,
    StateChanged,
    Traffic,
    read,
)
from noloco_node.roster import State
from noloco_node.sim import clock
from noloco_node.sim.network.hub import Hub
from noloco_node.sim.network.lines import Latency
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario import DevicesConfig, NetworkConfig, Scenario, SwarmConfig
from noloco_node.sim.setting import work_out

pytestmark = pytest.mark.network

E = TypeVar("E")

SEED, STAGES, WINDOW, MICROBATCH, RATE, PER_ROUND = 3, 2, 4, 4, 0.003, 6
REFRESH_S = 0.5
LATE_S = 2.5
"""After which every source knows of a sample: it is announced, published and read once a refresh each, and the DHT of a
busy machine takes its time."""


class Trace(NamedTuple):
    """What one peer did: its journal, and what it saved in the end."""

    events: list[Event]
    saved: Checkpoint

    def __repr__(self) -> str:
        return f"Trace({self.started.peer} of stage {self.started.stage}, {len(self.events)} events)"

    def of(self, kind: type[E]) -> list[E]:
        """Return the journal's events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def started(self) -> Started:
        return self.of(Started)[0]

    @property
    def finished(self) -> Finished:
        (finished,) = self.of(Finished)
        return finished

    @property
    def met(self) -> list[OuterStep]:
        return [event for event in self.of(OuterStep) if event.partner is not None]

    @property
    def hops(self) -> dict[str, int]:
        """Microbatches that came back, by next hop."""
        return self.of(Hops)[-1].counts

    @property
    def trained(self) -> int:
        """Microbatches that went through backward here; the steps of whoever a late peer copied are not its own."""
        return len(self.of(InnerStep)) * WINDOW + self.finished.discarded


class Swarm(NamedTuple):
    """The peers of one swarm, by id."""

    peers: dict[str, Trace]

    @property
    def sources(self) -> list[Trace]:
        return [trace for trace in self.peers.values() if trace.started.stage == 0]

    @property
    def last(self) -> list[Trace]:
        return [trace for trace in self.peers.values() if trace.started.stage == STAGES - 1]

    @property
    def duration_s(self) -> float:
        """Seconds between the first inner step of the swarm and the last."""
        at = [event.at for trace in self.peers.values() for event in trace.of(InnerStep)]
        return max(at) - min(at)


class Pair(NamedTuple):
    """The same run twice."""

    real: Swarm
    simulated: Swarm


def run_file(directory: Path, *, replicas: int, steps: int) -> Path:
    """Write a recipe whose learning rate is constant."""
    path = directory / "run.toml"
    path.write_text(f"""
name = "agreement"
seed = {SEED}
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[pipeline]
stages = {STAGES}
replicas = {replicas}
sequence_length = 32
microbatch_size = {MICROBATCH}
microbatches_per_step = {WINDOW}
[inner]
steps = {steps}
learning_rate = {RATE}
warmup_steps = 0
final_fraction = 1.0
[outer]
inner_steps_per_round = {PER_ROUND}
overlap_steps = 4
""")
    return path


def train_really(commands: Commands, run: Path, replicas: int) -> Swarm:
    """Train a run with real processes to its end."""
    bootstrap, invite = host(commands, run)
    # Nothing begins without a source: by then the last stage is complete.
    nodes = [node for stage in reversed(range(STAGES)) for node in _join(commands, invite, stage, replicas)]
    commands.until(lambda: all(map(is_finished, nodes)), "the run ends", alive=[bootstrap, *nodes])
    for command in (*nodes, bootstrap):
        command.interrupt()
    for command in (*nodes, bootstrap):
        assert command.wait() == Exit.OK, command.complaint
    traces = [_trace(node) for node in nodes]
    return Swarm({trace.started.peer: trace for trace in traces})


def _join(commands: Commands, invite: str, stage: int, replicas: int) -> list[Command]:
    """Start the replicas of a stage, and wait until they are there."""
    options = ("--stage", str(stage), "--listen", LOCAL, "--refresh", str(REFRESH_S), "--threads", "1")
    nodes = [commands.start("join", invite, *options, home=True) for _ in range(replicas)]
    commands.until(lambda: all(node.events(Started) for node in nodes), f"stage {stage} is there", alive=nodes)
    return nodes


def _trace(node: Command) -> Trace:
    events = list(read(node.home / "journal.jsonl"))
    saved = load_latest(node.home / "checkpoint", node.events(Started)[0].run)
    assert saved is not None, node.complaint
    return Trace(events, saved)


def train_simulated(run: Path, real: Swarm) -> Swarm:
    """Train the run in virtual time, with the real peers' ids, the moments of their starts and their speed.

    A process that shares two cores with others is fast and slow by turns, and how often two replicas can meet follows
    from whose turn it is: a round is due when the first of them has done its inner steps. So each device takes as long
    for an inner step, compared with its others, as the real process took for its own of that number.
    """
    typical_s = fmean(step.seconds for trace in real.peers.values() for step in trace.of(InnerStep)[1:])
    paces = {
        peer: {step.step: step.seconds / typical_s for step in trace.of(InnerStep)[1:]}
        for peer, trace in real.peers.items()
    }
    setting = work_out(
        Scenario(
            seed=SEED,
            swarm=SwarmConfig(run=str(run), model="transformer", refresh_s=REFRESH_S),
            network=NetworkConfig(latency=Latency(mean_s=0.001)),
            # A window takes as long as its microbatches at one stage and one more, until the other stage has work.
            devices=DevicesConfig(forward_s=typical_s / (3 * (WINDOW + 1))),
        )
    )
    # The very same run, although it never was a file here.
    assert {trace.started.run for trace in real.peers.values()} == {setting.recipe.digest}
    journals: dict[str, list[Event]] = {peer: [] for peer in real.peers}

    def observe(peer: SimulatedPeer, event: Event) -> None:
        journals[peer.name].append(structs.replace(event, at=asyncio.get_running_loop().time()))
        if isinstance(event, InnerStep):
            peer.slow_down(paces[peer.name].get(event.step + 1, 1.0))

    async def main() -> dict[str, Trace]:
        hub = Hub(setting.weather, seed=SEED, size_bytes=setting.size_bytes)
        peers = [SimulatedPeer(name, trace.started.stage, setting, hub, observe) for name, trace in real.peers.items()]
        first_s = min(trace.started.at for trace in real.peers.values())

        async def live(peer: SimulatedPeer) -> None:
            await asyncio.sleep(real.peers[peer.name].started.at - first_s)
            peer.start()
            assert peer.life.task is not None
            await peer.life.task

        async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(live(peer), name=peer.name)
        assert hub.failures == []
        assert [wrong for peer in peers for wrong in peer.life.wrong] == []
        return {peer.name: Trace(journals[peer.name], peer.disk) for peer in peers if peer.disk is not None}

    return Swarm(clock.run(main()))


def train_twice(replicas: int, steps: int) -> Pair:
    """Train a run with real processes and in virtual time, each process with one thread for its tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Commands() as commands:
            run = run_file(commands.directory, replicas=replicas, steps=steps)
            real = train_really(commands, run, replicas)
            return Pair(real, train_simulated(run, real))
    finally:
        torch.set_num_threads(threads)


ONE_STEPS, TWO_STEPS = 28, 60
BUDGET = TWO_STEPS * WINDOW * 2
"""Microbatches of the run of two by two."""


@pytest.fixture(scope="module")
def one_by_one() -> Pair:
    return train_twice(replicas=1, steps=ONE_STEPS)


@pytest.fixture(scope="module")
def two_by_two() -> Pair:
    return train_twice(replicas=2, steps=TWO_STEPS)


def each(pair: Pair) -> Iterator[tuple[Trace, Trace]]:
    """Yield the two lives of each peer: the real and the simulated one."""
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
        assert [step.loss for step in simulated.of(InnerStep)] == pytest.approx(losses, rel=1e-5)
        assert losses[-1] < losses[0] - 1.0


def test_with_one_replica_a_stage_weights_and_momenta_are_equal(one_by_one: Pair) -> None:
    for real, simulated in each(one_by_one):
        assert real.saved.tensors.keys() == simulated.saved.tensors.keys()
        for group in ("slow", "fast", "momentum"):
            for one, other in zip(real.saved.tensors[group], simulated.saved.tensors[group], strict=True):
                # AdamW divides by the root of second moments, tiny ones too: rounding shows more here than in losses.
                assert float((one - other).norm()) < 1e-4 * float(one.norm()), group


def test_with_one_replica_a_stage_rounds_and_counters_are_equal(one_by_one: Pair) -> None:
    for real, simulated in each(one_by_one):
        rounds = [(event.round, event.partner, event.staleness) for event in real.of(OuterStep)]
        assert rounds == [(event.round, event.partner, event.staleness) for event in simulated.of(OuterStep)]
        assert rounds == [(number, None, 0) for number in range(1, ONE_STEPS // PER_ROUND + 2)]
        assert real.finished.discarded == simulated.finished.discarded == WINDOW - 1
        assert _counters(real.saved) == _counters(simulated.saved)
    (real_source,), (simulated_source,) = one_by_one.real.sources, one_by_one.simulated.sources
    assert real_source.hops == simulated_source.hops
    assert real_source.trained == ONE_STEPS * WINDOW + WINDOW - 1


def _counters(saved: Checkpoint) -> dict[str, Any]:
    """Return the counters of a checkpoint but the progress, which is known with a delay at later stages."""
    return {name: value for name, value in structs.asdict(saved.counters).items() if name != "progress"}


# Two by two: the same counts.

ALWAYS = {Started, StateChanged, InnerStep, OuterStep, Traffic, Finished}
SOMETIMES = {CatchUp, Deferred, Refused}
"""A replica that is late for a round defers, one that comes when the others have had a round copies them, and a full
queue refuses: a matter of timing, and of no concern."""


def test_two_by_two_write_the_same_kinds_of_events(two_by_two: Pair) -> None:
    for real, simulated in each(two_by_two):
        expected = ALWAYS | ({Hops} if real.started.stage == 0 else set())
        for trace in (real, simulated):
            assert {type(event) for event in trace.events} - SOMETIMES == expected
            assert trace.finished.why == "the run is over"
            # Whoever waits long enough for the others says more than once that it trains, and one that comes when the
            # others have had a round copies them.
            states = [event.state for event in trace.of(StateChanged) if event.state is not State.CATCHING_UP]
            assert list(dict.fromkeys(states)) == [State.JOINING, State.TRAINING, State.FINISHED]
        assert structs.replace(real.started, at=0.0) == structs.replace(simulated.started, at=0.0)


@pytest.mark.parametrize("which", Pair._fields)
def test_two_by_two_use_every_microbatch_once(two_by_two: Pair, which: str) -> None:
    swarm: Swarm = getattr(two_by_two, which)
    for source in swarm.sources:
        assert sum(source.hops.values()) == source.trained
    for replica in swarm.last:
        assert sum(source.hops[replica.started.peer] for source in swarm.sources) == replica.trained
    # A source never stops too early; it stops too late by what it has in flight and has not heard of.
    total = sum(source.trained for source in swarm.sources)
    assert sum(source.saved.counters.samples for source in swarm.sources) == total * MICROBATCH
    assert BUDGET <= total <= BUDGET * (1.0 + LATE_S / swarm.duration_s) + 2 * WINDOW


def test_two_by_two_divide_the_inner_steps_alike(two_by_two: Pair) -> None:
    # How many there are is held to the law above in both: a run is over in seconds, and the part of them in which the
    # last microbatches go unheard of depends on when the refreshes fall (seen: from 4 to 17 % of all).
    real_total, simulated_total = (sum(source.trained for source in swarm.sources) for swarm in two_by_two)
    for real, simulated in each(two_by_two):
        # Of two real processes the faster one, or the one that came first, does more; simulated ones keep their pace.
        share = len(real.of(InnerStep)) * WINDOW / real_total
        assert share == pytest.approx(len(simulated.of(InnerStep)) * WINDOW / simulated_total, rel=0.35)


def test_two_by_two_meet_as_often(two_by_two: Pair) -> None:
    for swarm in two_by_two:
        for stage in (swarm.sources, swarm.last):
            first, second = ([event.round for event in trace.met] for trace in stage)
            assert first == second
            assert first == sorted(set(first))
    for real, simulated in each(two_by_two):
        # Real processes are fast and slow by turns: whoever is late for a round defers, and a few are missed. How many
        # can be met at all depends on how long the first process had to wait for the second, in both swarms alike.
        few = 4
        assert min(len(real.met), len(simulated.met)) > 0
        assert abs(len(real.met) - len(simulated.met)) <= few
        assert abs(real.finished.round - simulated.finished.round) <= few
        assert {event.partner for event in real.met} == {event.partner for event in simulated.met}


def test_two_by_two_share_the_next_hops_alike(two_by_two: Pair) -> None:
    for real, simulated in each(two_by_two):
        if real.started.stage == 0:
            assert real.hops.keys() == simulated.hops.keys()
            # Real replicas get entries of the bags by their measured speed, and of two
            # processes on a busy machine one may look twice as fast as the other: a third instead of a half.
            for peer, count in real.hops.items():
                assert abs(count / real.trained - simulated.hops[peer] / simulated.trained) < 0.2


def test_two_by_two_send_as_many_bytes(two_by_two: Pair) -> None:
    for real, simulated in each(two_by_two):
        for trace, other in ((real, simulated), (simulated, real)):
            assert _bytes_by(trace, "sent") == pytest.approx(_bytes_by(other, "sent"), rel=0.02)
            assert _bytes_by(trace, "received") == pytest.approx(_bytes_by(other, "received"), rel=0.02)


def _bytes_by(trace: Trace, way: str) -> dict[str, float]:
    """Return what a microbatch and a meeting cost.

    The run file travels only where processes join by an invite, and a state only to whoever comes late.
    """
    counts = getattr(trace.of(Traffic)[-1], way)
    assert counts.keys() - {"run", "state"} == {"microbatch", "gossip"}
    return {"microbatch": counts["microbatch"] / trace.trained, "gossip": counts["gossip"] / len(trace.met)}


def test_two_by_two_take_about_as_long(two_by_two: Pair) -> None:
    # Simulated devices keep the real pace, waits included, and may wait once more.
    assert 0.5 < two_by_two.simulated.duration_s / two_by_two.real.duration_s < 2.0
