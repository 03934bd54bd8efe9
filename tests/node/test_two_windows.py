"""Two windows in flight, whole: nodes in virtual time, what `check` says of it, and what the simulator watches."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from handlers import now
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, Text, asked_to_leave, ended, recipe, until
from msgspec import structs
from torch import Tensor

from gossip.interface import OuterStepTaken
from noloco_node.journal import events
from noloco_node.planning.plan import plan
from noloco_node.planning.plan_text import describe
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.validation import problems
from noloco_node.sim.clock import run
from noloco_node.sim.hardware.priced_stage import PricedStage, Prices
from noloco_node.sim.hardware.quadratic_model import QuadraticModel
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.run_distribution import RunFileText

FAR = NetworkConditions(latency=Latency(shape="constant", mean_s=0.1))


def with_windows(plain: RunFileText, windows: int) -> RunFileText:
    return RunFileText(plain.text.replace("[inner]", f"windows_in_flight = {windows}\n[inner]"), "the test's run file")


def assert_free(peer: Peer) -> None:
    replica = peer.replica
    gate = replica.admission.statistics()
    assert (gate["in_flight"], gate["queued"]) == (0, 0)
    stage = peer.stages[-1].statistics()
    assert gate["stale"] == stage["stale_backwards"], "the gate knows which gradients are stale, the stage it is"
    if replica.last:
        assert gate["stale"] == gate["deferred"] == 0


# Nodes.


@pytest.mark.parametrize("blocking", [False, True])
async def test_three_by_two_trains_gossips_and_ends(blocking: bool) -> None:
    hub = SimNetwork(FAR)
    extra = "blocking = true" if blocking else ""
    what = with_windows(recipe(stages=3, replicas=2, steps=14, window=4, per_round=4, extra=extra), 2)
    peers = [Peer(hub, what, f"peer-{stage}{replica}", stage) for stage in (0, 1, 2) for replica in (0, 1)]
    await ended(*peers)
    assert not hub.failures
    for peer in peers:
        (finished,) = peer.of(events.Finished)
        assert finished.why == "the run is over"
        assert 10 <= finished.step <= 22
        steps = peer.of(events.InnerStep)
        assert {event.tokens for event in steps} == {4 * 2 * 8}, "every batch is exact"
        assert [b.step - a.step for a, b in pairwise(steps)] == [1] * (len(steps) - 1)
        assert len([event for event in peer.of(OuterStepTaken) if event.partner]) >= 2
        assert_free(peer)
        stale = [event.stale for event in steps]
        assert sum(stale) <= peer.stages[-1].statistics()["stale_backwards"] <= sum(stale) + finished.discarded
        assert max(stale) <= 4
        if not peer.name.startswith("peer-2"):
            # At most a whole window of each step is stale, and on such long lines some of it is.
            assert 0 < peer.stages[-1].statistics()["stale_backwards"] <= 4 * finished.step


@pytest.mark.parametrize("wait_s", [0.0, 1.5, 3.0])
async def test_a_leave_does_not_cut_off_a_step_above_a_stage_that_is_gone(wait_s: float) -> None:
    """The younger window waits for a replica that would take it, while the step of the older one is under way."""
    hub, what = SimNetwork(), with_windows(recipe(steps=400, per_round=4), 2)
    source, below = Peer(hub, what, "peer-0", 0, job_s=1.0), Peer(hub, what, "peer-1", 1, job_s=0.2)
    await until(lambda: len(source.of(events.InnerStep)) >= 5)
    await asyncio.sleep(wait_s)
    below.leave.set()
    replica = source.replica
    await until(lambda: replica.stranded and replica.admission.succeeded == replica.admission.window)
    source.leave.set()
    await asyncio.gather(source.task, below.task)
    taken = source.stages[-1].statistics()["inner_steps"]
    assert source.counters.inner_steps == source.counters.optimiser_steps == taken
    assert len(source.of(events.InnerStep)) == taken
    (finished,) = source.of(events.Finished)
    assert (finished.step, finished.discarded) == (taken, 0)


def test_who_is_stranded_with_gradients_of_the_next_window_knows_it() -> None:
    """Some wait for a replica of a stage that died, the others for their turn behind these."""

    async def main(steps: int) -> tuple[Peer, float, bool]:
        hub = SimNetwork(NetworkConditions(latency=Latency(shape="lognormal", mean_s=0.3, std_s=0.6)))
        what = with_windows(recipe(steps=400, window=3, per_round=10_000, layers=3), 2)
        peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1)]
        await until(lambda: len(peers[0].of(events.InnerStep)) >= steps)
        replica = peers[0].replica
        await until(lambda: replica.admission.turns.waiting >= 2)
        hub.kill("peer-1")
        peers[1].task.cancel()
        await asyncio.wait([peers[1].task])
        await until(lambda: replica.stranded, 60.0)
        both = 0 < replica.admission.turns.waiting < replica.admission.in_flight
        begun_s = now()
        await asked_to_leave(peers[0])
        return peers[0], now() - begun_s, both

    kinds = set()
    for steps in range(2, 20, 6):
        peer, took_s, both = run(main(steps))
        assert peer.of(events.Finished)[0].why == "asked to leave"
        assert took_s < 10.0, "virtual time: it did not wait for what could not come back"
        kinds.add(both)
    assert True in kinds, "what was under way at its death may have let all of them take their turn"


async def test_leaving_in_the_midst_of_two_windows_is_polite() -> None:
    hub, what = SimNetwork(FAR), with_windows(recipe(stages=3, steps=400, window=4, per_round=6), 2)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1, 2)]
    await until(lambda: len(peers[1].of(events.InnerStep)) >= 5)
    for leaver in (peers[1], peers[0], peers[2]):
        leaver.leave.set()
        async with asyncio.timeout(30):
            await leaver.task
    for peer in peers:
        assert peer.of(events.Finished)[0].why == "asked to leave"
        assert peer.counters.inner_steps == peer.of(events.InnerStep)[-1].step
        assert_free(peer)


class Song(Text):
    """A text that can be learned: each token is the one before plus three, now and then another."""

    async def draw(self) -> Tensor:
        noise = await super().draw()
        start = noise[:, :1]
        plain = (start + 3 * torch.arange(noise.shape[1])) % 32
        return torch.where(noise % 8 == 0, noise, plain)


def last_loss(windows: int) -> float:
    """Return the mean loss of the last 20 steps of a run of two stages, one window in flight or two."""

    async def main() -> float:
        hub = SimNetwork(FAR)
        what = with_windows(recipe(steps=60, window=4, per_round=10_000), windows)
        peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1)]
        peers[0].text = Song(what.run, "peer-0")
        await ended(*peers)
        assert (peers[0].stages[-1].statistics()["stale_backwards"] > 0) == (windows == 2)
        steps = peers[1].of(events.InnerStep)
        return sum(event.loss for event in steps[-20:]) / 20

    return run(main())


def test_stale_gradients_train_nearly_as_well() -> None:
    one, two = last_loss(1), last_loss(2)
    assert one < 2.0 < 3.4, "ln 32 is 3.47: it learned something"
    assert two == pytest.approx(one, rel=0.1)


# What a person is told.


def a_run(**pipeline: Any) -> RunConfig:
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8}
    model = ModelConfig(architecture="llama", sizes={**sizes, "num_attention_heads": 2})
    return RunConfig(model=model, pipeline=PipelineConfig(**pipeline))


def test_a_plan_counts_the_second_window_in_memory_and_time() -> None:
    one, two = (
        plan(a_run(stages=4, microbatches_per_step=8, sequence_length=16, windows_in_flight=windows))
        for windows in (1, 2)
    )
    for plain, double in zip(one.stages[:-1], two.stages[:-1], strict=True):
        assert double.memory.waiting == 2 * plain.memory.waiting
        assert double.memory.graph == plain.memory.graph
        assert double.memory.other_graphs == plain.memory.other_graphs + 8 * plain.memory.whole_graph
        assert double.memory.stale_weights == double.memory.weights == plain.memory.weights
        assert plain.memory.stale_weights == 0
        assert double.memory.total - plain.memory.total == plain.memory.waiting + plain.memory.weights
    assert one.stages[-1].memory == two.stages[-1].memory
    assert all(second > first + 0.1 for first, second in zip(one.efficiency, two.efficiency, strict=True))


def test_a_report_takes_the_largest_stage_apart_with_its_stale_weights() -> None:
    for stages, windows, told in [((5, 6, 7), 2, True), ((5, 6, 7), 1, False), ((1, 2, 3), 2, False)]:
        short = {"sequence_length": 16, "microbatch_size": 1, "microbatches_per_step": 8}
        run = a_run(stages=4, boundaries=stages, windows_in_flight=windows, **short)
        (said,) = (line for line in describe(plan(run)) if line.startswith("Memory at stage"))
        assert said.startswith(f"Memory at stage {0 if stages[0] == 5 else 3} ")
        assert ("stale weights" in said) == told, "a last stage has one window whatever the others have"


def test_a_second_window_is_offered_to_deep_pipelines_and_refused_to_a_single_stage() -> None:
    deep = plan(a_run(stages=8, microbatches_per_step=16, replicas=5, sequence_length=16))
    assert any("windows_in_flight = 2" in warning for warning in deep.warnings)
    for stages in (1, 2):
        found = [problem.field for problem in problems(a_run(stages=stages, windows_in_flight=2))]
        assert ("pipeline.windows_in_flight" in found) == (stages == 1)
    single = a_run(stages=1)
    assert not list(problems(structs.replace(single, pipeline=structs.replace(single.pipeline, stages=1))))


# What the simulator watches.

IDS = torch.full((1, 1), 5)


@given(windows=st.sampled_from([1, 2]), acts=st.lists(st.sampled_from(["step", "correct", "set"]), max_size=4))
def test_a_priced_stage_knows_how_much_may_change_under_a_graph(windows: int, acts: list[str]) -> None:
    """With two windows: one inner step, and whatever comes after it in the same pause, but nothing before it."""
    wrong: list[str] = []
    stage = PricedStage(QuadraticModel(0), Prices(), lambda price: None, wrong.append, windows)
    forward = stage.forward(IDS)
    for act in acts:
        if act == "step":
            stage.step(0.1, 0)
        elif act == "correct":
            stage.correct(stage.weights())
        else:
            stage.set_weights(stage.weights())
    forward.backward(torch.zeros(1, 1, 1))
    allowed = not acts or (windows == 2 and acts.count("step") == 1)
    assert (not wrong) == allowed
