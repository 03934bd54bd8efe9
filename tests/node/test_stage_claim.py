"""A newcomer measures itself and takes the stage that limits the swarm; a replica moves on when it is needed elsewhere.

The nodes are the production's, in memory and virtual time.
"""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from memory_swarms import recipe
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import Reporter
from noloco_node.machine.memory import ARENAS, GraphBytes, trim, within_limit
from noloco_node.node import stage_claim
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.node_context import NodeContext, StageRequest
from noloco_node.node.replica import Replica
from noloco_node.node.stage_benchmark import TIMES, StageBenchmark, measure
from noloco_node.node.stage_claim import CLAIMS, LOOKS, ClaimedStage, claim_stage, claims_of
from noloco_node.planning import graph_memory
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.planning.plan import memories_on
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.hardware.memory_host import MemoryHost, MemoryStore
from noloco_node.sim.hardware.priced_stage import PricedStage, Prices, VirtualDevice
from noloco_node.sim.hardware.quadratic_model import QuadraticModel, RandomBatches, quadratic_layout
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from pipeline import forward_pass
from pipeline.hardware.loss_scale import FIRST
from pipeline.placement import capacities
from tests.explorer.search import ExploreResult, examine

CPU = torch.device("cpu")
WORK = (1.0, 1.0, 2.0)


class SmallHost(MemoryHost):
    """One of which is known how much memory is free."""

    free: int | None = None

    def free_bytes(self, given_back: int = 0) -> int | None:
        return self.free


class Seeker:
    """A peer that does nothing but claim a stage, on a device that takes `forward_s` for a pass at stage 0."""

    def __init__(
        self,
        hub: SimNetwork,
        name: str,
        *,
        forward_s: float = 0.1,
        wish: int | None = None,
        free: int | None = None,
        dials_only: bool = False,
    ) -> None:
        self.said: list[str] = []
        self.events: list[events.Event] = []
        self.built: list[int] = []
        self._device = VirtualDevice()
        self._forward_s = forward_s
        what = recipe(stages=3)
        network = hub.network(name, Access(dials_only=dials_only))
        self.membership = Membership(network, what.digest, 3, refresh_s=5.0)
        host = SmallHost(
            self._device, MemoryStore(lambda: None), build=self._build, open_text=self._no_text, save=self._never
        )
        host.free, host.needs_bytes, host.graph_bytes = free, [100, 200, 300], [GraphBytes(20, 20)] * 3
        reporter = Reporter(record=self.events.append, say=self.said.append)
        self.request = StageRequest(wish)
        self.context = NodeContext(
            run_file=what,
            dimensions=quadratic_layout(3, WORK),
            membership=self.membership,
            host=host,
            reporter=reporter,
            network=network,
        )

    async def claim(self, served: int | None = None) -> ClaimedStage:
        return await claim_stage(self.context, self.request, served)

    def _build(self, number: int) -> PricedStage:
        self.built.append(number)
        prices = Prices(forward_s=self._forward_s * WORK[number])
        return PricedStage(QuadraticModel(number), prices, self._device.charge, self.said.append)

    async def _no_text(self) -> RandomBatches:
        return RandomBatches((1, 1), 0)

    async def _never(self, _: object) -> str:
        raise AssertionError("who claims saves nothing")

    async def serve(self, stage: int, device_s: float) -> None:
        """Pose as a replica that has been at work for long."""
        record = PeerRecord(peer=self.context.me, stage=stage, state=PeerState.TRAINING, device_s=device_s)
        await self.membership.claim(record)


# The newcomer.


async def test_a_newcomer_measures_itself_and_takes_the_stage_that_limits_the_swarm() -> None:
    """Stage 1 has the fewest replicas, and yet stage 2 is the weakest: its replicas are slow."""
    hub = SimNetwork()
    for name, stage, device_s in (("a", 0, 0.4), ("b", 0, 0.4), ("c", 1, 0.25), ("d", 2, 2.0), ("e", 2, 2.0)):
        await Seeker(hub, name).serve(stage, device_s)
    late = Seeker(hub, "late", forward_s=0.1)
    place = await late.claim()
    (record,) = [each for each in late.membership.roster.stage(2) if each.peer == "late"]
    assert (place.number, late.built) == (2, [2])
    assert place.stage is not None, "what was built to be measured is what will be trained"
    # Three passes of work 2 at 0.1 s.
    assert record.device_s == pytest.approx(0.6)
    assert "stage 2 limits the swarm: 1 of 4 microbatches/s; with us 2.67" in late.said[-1]
    assert late.events == [events.Placed(stage=2, why=late.said[-1].partition(": ")[2], device_s=record.device_s)]


@pytest.mark.parametrize("times", [0.4, 0.6])
async def test_an_owner_is_told_of_a_device_that_is_too_slow_for_the_run(times: float) -> None:
    hub = SimNetwork()
    seeker = Seeker(hub, "slow", wish=None)
    seeker._forward_s = times * seeker.context.run.pipeline.budget_s / 3
    await seeker.claim()
    warned = [line for line in seeker.said if "much of this node's work may not count" in line]
    assert len(warned) == (times > 0.5)


@pytest.mark.parametrize(("alone", "claimed_s"), [(3.0, 0.4), (2.4, 0.5)])
async def test_a_newcomer_counts_what_its_device_computes_again_at_each_stage(alone: float, claimed_s: float) -> None:
    """A probe whose graph is kept tells too little of a stage that keeps none, or only some."""
    hub = SimNetwork()
    for name, stage, device_s in (("a", 0, 1.0), ("b", 1, 0.5), ("c", 2, 2.0)):
        await Seeker(hub, name).serve(stage, device_s)
    late = Seeker(hub, "late", forward_s=0.1, wish=None)
    late.context.host.passes, late.context.host.passes_alone = [4.0, 3.5, 3.0], [4.0, 3.5, alone]
    claiming = asyncio.create_task(late.claim())
    await asyncio.sleep(0.1)
    await Seeker(hub, "d").serve(2, 0.1)  # while it is measured
    place = await claiming
    (placed,) = late.events
    assert (late.built, place.number) == ([2], 0)
    assert isinstance(placed, events.Placed)
    assert placed.device_s == pytest.approx(claimed_s)


@pytest.mark.parametrize(("device_s", "claimed_s"), [(0.0, 0.0), (0.05, 0.1), (0.3, 0.2)])
async def test_a_replica_that_goes_elsewhere_claims_what_its_device_or_its_line_takes_there(
    device_s: float, claimed_s: float
) -> None:
    """From stage 2 to stage 0, where it has half the work and computes a third more; its speed is unknown at first."""
    mover = Seeker(SimNetwork(), "mover")
    mover.context.host.passes = [4.0, 3.5, 3.0]
    mover.context.host.line_s = lambda stage: 0.1  # of a slow line
    watcher = MigrationWatcher(mover.context, 2, 0, lambda: 0.0, set(), tuple)
    await watcher.take_place(0, device_s)
    await mover.membership.peek()
    ((record,), (), ()) = mover.membership.roster.stages
    assert record.device_s == watcher.device_s == pytest.approx(claimed_s)


async def test_who_comes_while_it_is_measured_changes_its_choice_but_not_what_it_knows() -> None:
    hub = SimNetwork()
    for name, stage, device_s in (("a", 0, 0.5), ("b", 1, 0.5), ("c", 2, 2.0)):
        await Seeker(hub, name).serve(stage, device_s)
    slow = Seeker(hub, "slow", forward_s=2.0)
    claiming = asyncio.create_task(slow.claim())
    await asyncio.sleep(5.0)
    await Seeker(hub, "d").serve(2, 0.1)
    place = await claiming
    assert slow.built == [2]
    assert place.number in (0, 1)
    assert place.stage is None
    (placed,) = slow.events
    assert isinstance(placed, events.Placed)
    assert placed.device_s == pytest.approx(6.0), "known by its work, not measured again"


@pytest.mark.parametrize("count", [2, 5, 9, 14])
async def test_newcomers_that_start_together_spread_and_end(count: int) -> None:
    hub = SimNetwork()
    seekers = [Seeker(hub, f"p{n:02}", forward_s=(0.1, 0.1, 0.3)[n % 3]) for n in range(count)]
    places = await asyncio.gather(*[each.claim() for each in seekers])
    await seekers[0].membership.peek()
    claims = claims_of(seekers[0].membership.roster)
    assert sorted((each.peer, each.stage) for each in claims) == [
        (seeker.context.me, place.number) for seeker, place in zip(seekers, places, strict=True)
    ]
    assert all(len(each.events) <= CLAIMS for each in seekers)
    capacity = capacities(claims, WORK)
    for each in claims:
        # Nobody would do more good at the weakest stage than it does where it is.
        assert capacity[each.stage] - 1.0 / each.device_s <= min(capacity) * 1.01


async def test_a_stage_that_does_not_fit_is_left_out() -> None:
    hub = SimNetwork()
    await Seeker(hub, "a").serve(0, 0.5)
    await Seeker(hub, "b").serve(1, 1.0)
    small = Seeker(hub, "small", free=250)
    place = await small.claim()
    assert place.number == 1
    assert any("we cannot serve stage 2, which is weaker (0)" in line for line in small.said)


async def test_where_no_stage_fits_the_newcomer_leaves_before_it_builds_or_claims_anything() -> None:
    """What is free or allowed is never overrun; an owner who names a stage may use the reserve, and no more."""
    hub = SimNetwork()
    seekers = [Seeker(hub, "tiny", free=124), Seeker(hub, "told", free=199, wish=1)]
    refusals = []
    for seeker in seekers:
        with pytest.raises(UserError) as refusal:
            await seeker.claim()
        refusals.append(refusal.value)
        assert not seeker.membership.roster.stage(0) + seeker.membership.roster.stage(1)
    (whole, one), seekers, place = refusals, seekers, await Seeker(hub, "knows", free=200, wish=1).claim()
    assert whole.code is one.code is Exit.DEVICE
    assert "124 B; stage 0 wants 125 B, stage 1 wants 250 B, stage 2 wants 375 B" in whole.why
    assert "199 B; stage 1 wants 200 B" in one.why
    assert "--max-memory" in whole.hint
    assert [seeker.built for seeker in seekers] == [[], []]
    assert place.number == 1


async def test_whom_nobody_can_dial_takes_the_first_stage_though_another_is_weaker() -> None:
    hub = SimNetwork()
    for name, stage in (("a", 0), ("b", 0), ("c", 1)):
        await Seeker(hub, name).serve(stage, 0.5)
    hidden, told = (Seeker(hub, name, dials_only=True, wish=wish) for name, wish in (("hidden", None), ("told", 2)))
    place = await hidden.claim(2)
    assert (await told.claim()).number == 2, "its owner knows best"
    assert place.number == 0
    assert "nobody can dial us" in hidden.said[0]
    assert "expect no work" in told.said[0]


async def test_a_stage_that_keeps_more_of_a_microbatch_than_was_estimated_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_claim, "measure", lambda *_: StageBenchmark(0.6, 100))

    hub = SimNetwork()
    await Seeker(hub, "a").serve(0, 0.5)
    await Seeker(hub, "b").serve(1, 1.0)
    # Of stage 2, with one graph: 300 - 20 + 100, four fifths of what must be free.
    small, large = Seeker(hub, "small", free=474), Seeker(hub, "large", free=475)
    place = await small.claim()
    ample = await large.claim()
    assert (place, small.built) == (ClaimedStage(1), [2]), "what was built for the measurement is let go"
    assert "stage 2 does not fit" in small.said[0]
    assert ample.number == 2
    assert small.context.host.needs_bytes == [100, 200, 380], "nor will it move there"


async def test_a_stage_that_the_owner_names_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stage 2: 300 by the plan with one graph of 20, and 380 by the measurement."""
    monkeypatch.setattr(stage_claim, "measure", lambda *_: StageBenchmark(0.6, 100))
    hub = SimNetwork()
    small, large = Seeker(hub, "small", free=379, wish=2), Seeker(hub, "large", free=380, wish=2)
    with user_error(Exit.DEVICE, "Stage 2 does not fit") as refusal:
        await small.claim()
    assert "stage 2 wants 380 B" in refusal.value.why
    assert small.built == [2]
    place = await large.claim()
    assert (place.number, large.built) == (2, [2])
    assert place.stage is not None, "what was built for the measurement serves"
    assert large.context.host.needs_bytes == [100, 200, 380]


@pytest.mark.parametrize("wish", [None, 2])
async def test_a_stage_whose_whole_graph_has_no_room_as_measured_is_built_anew(
    wish: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of stage 2: 300 by the plan with one graph of 20 by layers; measured, 320 with a graph of 40, or 360 with 80."""
    monkeypatch.setattr(stage_claim, "measure", lambda *_: StageBenchmark(0.6, 80))
    for free, serves in ((449, False), (450, True)):
        hub = SimNetwork()
        await Seeker(hub, "a").serve(0, 0.5)
        await Seeker(hub, "b").serve(1, 1.0)
        seeker = Seeker(hub, f"free{free}", free=free, wish=wish)
        seeker.context.host.graph_bytes[:] = [GraphBytes(40, 20)] * 3
        place = await seeker.claim()
        assert (place.number, seeker.built, place.stage is not None) == (2, [2], serves)


@pytest.mark.parametrize("wish", [None, 1])
async def test_memory_that_runs_out_in_the_measurement_is_an_error_that_a_person_can_read(
    wish: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> StageBenchmark:
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr(stage_claim, "measure", measure)
    with user_error(Exit.DEVICE, "does not fit in memory here") as refusal:
        await Seeker(SimNetwork(), "a", free=1000, wish=wish).claim()
    assert "CUDA out of memory" in refusal.value.why


async def test_a_stage_must_fit_main_memory_too_where_the_device_has_its_own() -> None:
    hub = SimNetwork()
    poor, poorest = Seeker(hub, "poor", free=1000), Seeker(hub, "poorest", free=1000)
    for seeker, beside in ((poor, [40, 60, 70]), (poorest, [60, 70, 80])):
        seeker.context.host.beside_bytes[:] = beside
        seeker.context.host.free_beside_bytes = lambda _=0: 55
    place = await poor.claim()
    with pytest.raises(UserError) as refusal:
        await poorest.claim()
    refusal = refusal.value
    assert place.number == 0
    assert "1 kB of the device and 55 B of main memory" in refusal.why


async def test_of_equals_the_stage_of_an_earlier_life() -> None:
    hub = SimNetwork()
    found = set()
    for served in range(3):
        hub = SimNetwork()
        place = await Seeker(hub, f"p{served}").claim(served)
        found.add((served, place.number))
    assert found == {(0, 0), (1, 1), (2, 2)}


async def test_an_owners_wish_is_taken_at_once_and_a_wrong_one_refused() -> None:
    hub = SimNetwork()
    await Seeker(hub, "a").serve(1, 0.5)
    told = Seeker(hub, "told", wish=1)
    with user_error(Exit.USAGE, "no stage 3"):
        await Seeker(hub, "wrong", wish=3).claim()
    place = await told.claim(0)
    assert (place, told.built) == (ClaimedStage(1), [])


async def test_without_the_dht_a_newcomer_gives_up_and_whoever_moves_waits() -> None:
    hub = SimNetwork()

    def deaf(seeker: Seeker, times: int) -> None:
        network, left = seeker.membership._network, iter(range(times))
        read_all = network.read_all

        async def lost(keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
            found = await read_all(keys)
            return [None if next(left, None) is not None else each for each in found]

        network.read_all = lost

    new, mover = Seeker(hub, "new"), Seeker(hub, "mover", wish=1)
    deaf(new, 10**6)
    with user_error(Exit.UNREACHABLE, "Nobody could tell"):
        await new.claim()
    await mover.serve(0, 0.5)
    deaf(mover, 40)
    place = await mover.claim()
    assert place == ClaimedStage(1)
    assert len(mover.said) >= LOOKS


# The measurement.


@pytest.mark.parametrize(("logits", "form"), [(2**24, "text"), (64, "text"), (2**24, "messages")])
def test_a_microbatch_is_measured_at_every_stage_of_a_real_model_and_leaves_no_trace(
    logits: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward_pass, graph_memory):
        monkeypatch.setattr(module, "LOGITS", logits)
    monkeypatch.setattr(graph_memory, "_families", {})  # what was worked out with other LOGITS
    template = 'chat_template = "chatml"\n' if form == "messages" else ""
    what = recipe(stages=3, extra=f'[data]\nsource = "json"\npath = "x"\nform = "{form}"\n{template}')
    plan, ticks = model_layout(what.run), iter(range(100))
    for number in range(3):
        stage = make_stage(what.run, plan, number, torch.device("cpu"))
        before = [tensor.clone() for tensor in stage.weights()]
        probe = measure(stage, number, what.run, plan, lambda: float(next(ticks)))
        assert probe.device_s == 1.0
        assert probe.kept_bytes == pytest.approx(memories_on(what.run, plan, CPU)[number].whole_graph, rel=0.2)
        assert stage.statistics()["backwards"] == TIMES
        again = make_stage(what.run, plan, number, torch.device("cpu"), by_layers=True)
        assert measure(again, number, what.run, plan, lambda: 0.0).kept_bytes == 0, "autograd does not tell"
        assert all(torch.equal(was, now) for was, now in zip(before, stage.weights(), strict=True))
        # A step on what was left behind would be a step on nothing.
        assert stage.step(0.1, 1).gradient_norm == 0.0
    assert plan.work[2] > plan.work[0] > 0.0, "the head costs, the embedding hardly"


def test_a_measurement_in_float16_is_that_of_usual_passes_and_leaves_the_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("noloco_node.machine.device.autocast_dtype", lambda *_: torch.float16)
    what = recipe(stages=3)
    plan = model_layout(what.run)
    for number in range(3):
        stage = make_stage(what.run, plan, number, torch.device("cpu"))
        assert measure(stage, number, what.run, plan, lambda: 0.0).kept_bytes > 0
        assert (stage.statistics()["overflows"], stage._scale.value) == (0, FIRST)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_memory_that_is_free_goes_back_to_the_system() -> None:
    process = psutil.Process()
    made = [bytearray(20_000) for _ in range(4000)]
    kept = made[::40]  # between them nothing is large enough to be given back by itself
    before = process.memory_info().rss
    del made
    trim()
    assert process.memory_info().rss < before - 40_000_000
    assert len(kept) == 100


THREADS_THAT_ALLOCATE = """
import ctypes, threading
from noloco_node.machine.memory import share_arenas
share_arenas()
barrier = threading.Barrier(6)
def allocate():
    barrier.wait()
    kept = [bytearray(5000) for _ in range(200)]
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for each in threads: each.start()
for each in threads: each.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_threads_share_the_arenas_of_the_c_library() -> None:
    told = subprocess.run([sys.executable, "-c", THREADS_THAT_ALLOCATE], capture_output=True, text=True, check=True)
    assert 1 <= told.stdout.count("<heap nr=") <= ARENAS


def test_memory_is_read_where_somebody_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("500\n")
    (tmp_path / "memory.current").write_text("200\n")
    assert within_limit(tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 60\nfile 140\nactive_file 30\ninactive_file 110\n")
    assert within_limit(tmp_path) == 440, "a checkpoint that was just written is no reason to stay away"
    (tmp_path / "memory.max").write_text("max\n")
    assert within_limit(tmp_path) is None
    what = recipe(stages=3)
    drawn = model_layout(what.run)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    each = zip(*(memories_on(what.run, drawn, device) for device in (CPU, torch.device("cuda"))), strict=True)
    assert all(0 < gpu.computing < cpu.total > gpu.beside > 0 for cpu, gpu in each)


# Moving, with whole nodes.

STARVED = """
seed = {seed}
[swarm]
stages = 2
replicas = 3
rounds = {rounds}
moves = {moves}
refresh_s = 1.0
save_every_s = 20.0
inner_steps_per_round = 4
microbatches_per_step = 2
[devices]
forward_s = 0.1
"""


def crash(at_s: float, *peers: str) -> str:
    return "".join(f"[[fault]]\nkind = 'crash'\nat_s = {at_s}\npeer = '{peer}'\n" for peer in peers)


def seen(text: str) -> tuple[ExploreResult, list[str]]:
    """Run a scenario under all invariants; return the moves too, as said."""
    told: list[str] = []
    verdict = examine(decode_scenario(text, "the test's scenario"), told.append)
    return verdict, [line for line in told if " moved: " in line]


def test_a_starved_stage_gets_a_replica_of_the_other_and_training_goes_on() -> None:
    """Of three replicas one is left: one of the other stage moves, once, and all that must hold in any swarm holds."""
    text = STARVED.format(seed=3, rounds=25, moves="true") + crash(50.0, "s1r0", "s1r1")
    verdict, moves = seen(text)
    assert verdict.broken is None
    assert verdict.counts["excused"] == 0, "the run came to its end"
    assert len(moves) == 1
    assert "origin 0, target 1" in moves[0]
    stayed, none = seen(text.replace("moves = true", "moves = false"))
    assert (stayed.broken, none) == (None, [])
    assert verdict.counts["virtual_s"] < stayed.counts["virtual_s"]


def drawn(peer: SimulatedPeer) -> int:
    """Return how many microbatches a peer has drawn from its text, in any of its assignments."""
    text = peer.session.node._services.work.text
    return 0 if text is None else int(text.position()["drawn"])


def test_a_source_that_comes_back_to_its_stage_goes_on_in_its_text() -> None:
    """It is needed at stage 1, and later at stage 0 again: two moves of one peer, the second after a longer stay."""
    watch: list[Moves] = []

    class Moves(Watcher):
        def __init__(self, world: World) -> None:
            self.world, self.seen = world, list[tuple[float, str, events.Moved]]()
            self.drawn: dict[tuple[str, int], int] = {}
            self.left: dict[str, weakref.ref[Replica]] = {}
            self.arrivals = 0
            watch.append(self)

        def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
            name = peer.name
            arrives = isinstance(event, events.StateChanged) and event.state is PeerState.CATCHING_UP
            if (arrives or isinstance(event, events.Started)) and name in self.left:
                self.arrivals += arrives
                assert self.left[name]() is None, "two stages at once may not fit"
            if isinstance(event, events.Moved):
                assert peer.replica is not None
                self.left[name] = weakref.ref(peer.replica)
                self.seen.append((self.world.now_s, name, event))
                self.drawn[name, event.origin] = drawn(peer)

    text = STARVED.format(seed=3, rounds=60, moves="true") + crash(50.0, "s1r0", "s1r1")
    text += crash(135.0, "s1r2") + crash(140.0, "s0r0")
    # So late that of those at stage 1 the one who moved has stayed longest.
    text += "".join(f"[[fault]]\nkind = 'restart'\nat_s = 200.0\npeer = 's1r{n}'\n" for n in (0, 1))
    simulate(
        build_setup(decode_scenario(text, "the test's scenario")), lambda world: [Moves(world)], lambda world: None
    )
    assert [(event.origin, event.target) for _, _, event in watch[0].seen] == [(0, 1), (1, 0)]
    assert watch[0].arrivals >= 2, "the old weights are gone before those of the other stage are copied"
    (first_s, mover, _), (second_s, again, _) = watch[0].seen
    assert mover == again == "s0r1"
    assert second_s - first_s >= 120.0
    assert drawn(watch[0].world.peers[mover]) > watch[0].drawn[mover, 0] > 0
