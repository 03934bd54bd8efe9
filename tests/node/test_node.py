"""Whole nodes, in virtual time: they find each other, train, gossip, end, leave, and come back."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from handlers import now
from memory_swarms import Peer, Text, asked_to_leave, ended, recipe, until
from torch import Tensor

from gossip.exchange.messages import ReplicaState, Weights
from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.network.interface import Conversation
from noloco_node.node.assignment import LONGEST_DRAIN_S
from noloco_node.run.peer_state import PeerState, WaitCause
from noloco_node.run.protocols import MICROBATCH, microbatch_schema, topic
from noloco_node.sim.clock import run
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.medium import Corruption
from noloco_node.sim.network.sim_network import SimNetwork, SimPeerNetwork
from noloco_node.state_sync.starting_state import FAR, from_donor
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.run_distribution import RunFileText


async def test_two_by_two_trains_gossips_and_ends() -> None:
    hub, what = SimNetwork(), recipe(replicas=2, steps=20)
    peers = [Peer(hub, what, f"peer-{stage}{replica}", stage) for stage in (0, 1) for replica in (0, 1)]
    await ended(*peers)
    assert not hub.failures
    for peer in peers:
        (finished,) = peer.of(events.Finished)
        assert finished.why == "the run is over"
        assert 17 <= finished.step <= 24
        met = [event for event in peer.of(OuterStepTaken) if event.partner]
        assert len(met) >= 3
        assert peer.saved is not None
    # Every microbatch whose gradient came back was asked of one of the two replicas of stage 1, evenly.
    for peer in peers[:2]:
        counts = peer.of(events.Hops)[-1].counts
        assert sum(counts.values()) == pytest.approx(40, abs=6)
        assert min(counts.values()) >= 0.7 * max(counts.values())


@pytest.mark.parametrize(("architecture", "stages"), [("llama", 1), ("gpt2", 2), ("llama", 3)])
async def test_without_gossip_and_with_one_replica_it_is_single_process_training(
    architecture: str, stages: int
) -> None:
    """The anchor: the swarm's losses and weights are those of one process that trains the whole model."""
    hub = SimNetwork()
    what = recipe(stages=stages, steps=20, window=1, per_round=1000, architecture=architecture)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in range(stages)]
    await ended(*peers)
    steps = peers[0].of(events.InnerStep)
    assert len(steps) == 20
    whole, names = _train_alone(peers, [event.learning_rate for event in steps], stages, architecture)
    losses = whole.pop("losses")
    torch.testing.assert_close(torch.tensor([event.loss for event in steps]), losses, rtol=1e-5, atol=1e-6)
    for peer, stage_names in zip(peers, names, strict=True):
        for name, tensor in zip(stage_names, peer.stepped, strict=True):
            expected = whole[name]
            assert float((tensor - expected).norm() / expected.norm().clamp_min(1e-12)) < 1e-5, name


def test_through_a_codec_a_swarm_takes_nearly_the_steps_that_it_takes_without() -> None:
    async def main(codec: str) -> list[float]:
        hub = SimNetwork()
        what = recipe(stages=3, steps=12, window=1, per_round=1000, codec=codec, width=32)
        peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in range(3)]
        await ended(*peers)
        assert not any(peer.of(events.PeerViolation) for peer in peers)
        return [event.loss for event in peers[0].of(events.InnerStep)]

    exact = run(main("float32"))
    for codec in ("bfloat16", "int8", "int5-int3"):
        losses = run(main(codec))
        assert len(losses) == len(exact) == 12
        assert losses != exact
        # Later the two go their own ways: a small error grows with every step.
        assert losses[:5] == pytest.approx(exact[:5], abs=0.03), codec


def _train_alone(
    peers: list[Peer], rates: list[float], stages: int, architecture: str
) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Train the whole model in plain transformers and torch on the tokens that the source drew."""
    from transformers import AutoModelForCausalLM

    from noloco_node.planning.model_layout import build_stage
    from pipeline.adamw import AdamW

    what = recipe(stages=stages, steps=20, window=1, per_round=1000, architecture=architecture)
    plan = peers[0].plan
    parts = [build_stage(what.run, plan, number, torch.device("cpu")) for number in range(stages)]
    names = [list(dict(part.named_parameters())) for part in parts]
    model = AutoModelForCausalLM.from_config(plan.prepared.config)
    model.load_state_dict(
        {name: weight.detach().clone() for part in parts for name, weight in part.named_parameters()}, strict=False
    )
    weights = dict(model.named_parameters())
    inner = what.run.inner
    # Not torch's NAdam: the gradient of a bias of keys is noise, of which a step makes as much as of any gradient.
    optimiser = AdamW(list(weights.values()), inner, torch.device("cpu"))
    losses = []
    for rate, tokens in zip(rates, peers[0].text.drawn, strict=False):
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        model.zero_grad()
        loss.backward()
        for group in names:
            torch.nn.utils.clip_grad_norm_([weights[name] for name in group], inner.clip_norm)
        optimiser.step(rate)
        losses.append(loss.item())
    return {**{name: weight.detach() for name, weight in weights.items()}, "losses": torch.tensor(losses)}, names


async def test_a_newcomer_whose_donor_lied_goes_on_from_a_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of its first microbatches tells; nobody's claims do."""

    def given(stage: Any, state: ReplicaState) -> Any:
        return from_donor(stage, replace(state, slow=tuple(-8.0 * each for each in state.slow), optimiser=()))

    hub, what = SimNetwork(), recipe(replicas=3, steps=30, per_round=2, extra="staleness_at_most = 2")
    peers = [Peer(hub, what, f"peer-{stage}{number}", stage) for stage in (0, 1) for number in (0, 1)]
    await until(lambda: len(peers[3].of(OuterStepTaken)) >= 4)
    monkeypatch.setattr("noloco_node.node.join.from_donor", given)
    late = Peer(hub, what, "peer-late", 1)
    await ended(late, *peers)
    disowned = late.of(events.Disowned)
    assert disowned[0].loss > FAR * disowned[0].usual
    assert any(event.adopted for event in late.of(OuterStepTaken))
    assert late.of(events.InnerStep)[-1].loss < FAR * disowned[0].usual


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_newcomer_before_the_first_round_begins_at_the_progress_of_the_others(stage: int) -> None:
    hub, what = SimNetwork(), recipe(replicas=2, steps=60, per_round=1000)
    peers = [Peer(hub, what, f"peer-{number}", number, 0.5) for number in (0, 1)]
    await until(lambda: len(peers[1].of(events.InnerStep)) >= 8)
    late = Peer(hub, what, "peer-late", stage, 0.5)
    await until(lambda: bool(late.of(events.InnerStep)))
    await asked_to_leave(*peers, late)
    old, late = peers[stage], late
    assert late.of(events.InnerStep)[0].progress >= old.of(events.InnerStep)[5].progress > 0.0


async def test_a_run_that_was_begun_is_begun_anew_only_where_its_owner_says_so() -> None:
    hub, what = SimNetwork(), recipe(steps=400, per_round=3)
    fresh = Peer(hub, what, "peer-fresh", 0, 0.5, reached=0.43)
    with pytest.raises(ExceptionGroup) as caught:
        await fresh.task
    trouble = user_error_of(caught.value)
    assert trouble.code is Exit.UNREACHABLE
    assert "43.0% of the run" in trouble.why
    assert "--begin-anew" in trouble.hint
    assert not fresh.of(events.Started)
    # One owner says so; the others follow.
    told = Peer(hub, what, "peer-0", 0, 0.5, reached=0.43, begin_anew=True)
    await until(lambda: bool(told.of(events.Started)))
    other = Peer(hub, what, "peer-1", 1, 0.5, reached=0.43)
    await until(lambda: bool(other.of(events.InnerStep)))
    for peer in (told, other):
        assert any("BEGINNING THE RUN ANEW" in line for line in peer.said)
        peer.leave.set()
    await asyncio.gather(told.task, other.task)


async def test_who_comes_back_to_a_run_is_waited_for() -> None:
    hub, what = SimNetwork(), recipe(replicas=2, steps=400, per_round=3)
    peers = [Peer(hub, what, f"peer-{number}", number, 0.5) for number in (0, 1)]
    await until(lambda: len(peers[0].of(OuterStepTaken)) > 1)
    await asked_to_leave(*peers)
    fresh = Peer(hub, what, "peer-fresh", 0, 0.5, reached=0.1)
    await asyncio.sleep(8.0)
    for peer in peers:
        hub.kill(peer.name)
    back = [Peer(hub, what, f"peer-{number}", number, 0.5, saved=peers[number].saved) for number in (0, 1)]
    await until(lambda: bool(fresh.of(events.InnerStep)))
    assert any("copying stage 0" in line for line in fresh.said)
    await asked_to_leave(fresh, *back)


async def test_a_source_without_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, what = SimNetwork(), recipe(stages=1, steps=6, per_round=3)
    peer = Peer(hub, what, "peer", 0)
    encoded, draw = asyncio.Event(), peer.text.draw

    async def slow() -> Tensor:
        await encoded.wait()
        return await draw()

    monkeypatch.setattr(peer.text, "draw", slow)
    await until(lambda: peer.node.replica is not None and peer.replica.waits() is not None)
    waits = peer.replica.waits()
    assert waits.detail == "text to train on"
    encoded.set()
    await until(lambda: bool(peer.of(events.InnerStep)))
    assert peer.replica.waits() is None
    await peer.task


async def test_who_has_finished_waits_for_nothing() -> None:
    hub, what = SimNetwork(), recipe(steps=6, per_round=3)
    peers = [Peer(hub, what, f"peer-{number}", number) for number in (0, 1)]
    state = PeerState.FINISHED
    await until(lambda: all(any(e.state is state for e in peer.of(events.StateChanged)) for peer in peers))
    await asyncio.sleep(20.0)
    replica = peers[1].replica
    waits = replica.waits()
    assert waits.cause is WaitCause.MICROBATCHES
    assert replica.describe(state).waiting == ()
    await asked_to_leave(*peers)


async def list_as_replica(
    hub: SimNetwork, what: RunFileText, name: str, stage: int, round: int, progress: float = 0.0
) -> SimPeerNetwork:
    """Let a stranger claim to be a replica that trains."""
    network = hub.network(name)
    record = PeerRecord(peer=name, stage=stage, state=PeerState.TRAINING, round=round, progress=progress)
    await Membership(network, what.digest, what.run.pipeline.stages, refresh_s=200.0).claim(record)
    return network


async def test_a_reply_of_the_wrong_kind_is_a_violation_and_ends_nobody() -> None:
    hub, what = SimNetwork(), recipe(steps=8)

    async def echo(conversation: Conversation) -> None:
        await conversation.send(await conversation.receive())

    liar = await list_as_replica(hub, what, "peer-liar", 1, 0)
    await liar.serve(topic(MICROBATCH, 1), microbatch_schema(what.run, 16), echo)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1)]
    await ended(*peers, within_s=900)
    source = peers[0]
    assert source.of(events.Finished)[0].why == "the run is over"
    assert {event.peer for event in source.of(events.PeerViolation)} == {"peer-liar"}


async def test_a_newcomer_that_gets_no_copy_waits_and_does_not_begin_anew() -> None:
    hub, what = SimNetwork(), recipe()
    busy = Membership(hub.network("peer-busy"), what.digest, what.run.pipeline.stages)
    await busy.claim(PeerRecord(peer="peer-busy", stage=1, state=PeerState.TRAINING, round=3))
    listed = asyncio.create_task(busy.run())
    late = Peer(hub, what, "peer-late", 1)
    await asyncio.sleep(300)
    assert any("could not copy the state" in line for line in late.said)
    assert not late.of(events.Started)
    listed.cancel()
    late.leave.set()
    async with asyncio.timeout(30):
        await late.task


async def test_a_rejoining_source_goes_on_in_its_text_and_from_its_checkpoint() -> None:
    hub, what = SimNetwork(), recipe(stages=1, replicas=2, steps=400, per_round=3)
    peers = [Peer(hub, what, name, 0) for name in ("peer-a", "peer-b")]
    await until(lambda: len(peers[1].of(events.InnerStep)) >= 12)
    await asked_to_leave(peers[1])
    hub.kill("peer-b")
    second = Peer(hub, what, "peer-b", 0, saved=peers[1].saved)
    await until(lambda: len(second.of(events.InnerStep)) >= 1)
    drawn = len(second.text.drawn)
    await asked_to_leave(peers[0], second)
    assert any("our own checkpoint" in line and "the stage is in round" in line for line in second.said)
    position = peers[1].counters.data_position
    assert drawn > position["drawn"] > 10
    first, second = peers[1], second
    # What the first session had counted still counts.
    assert second.node.samples >= first.node.samples > 0


@pytest.mark.parametrize("claimed", [0.0, 1.0])
async def test_a_strangers_progress_moves_no_replica_that_returns(claimed: float) -> None:
    """It is the only other one that is listed: nobody contradicts it."""
    hub, what = SimNetwork(), recipe(stages=1, replicas=1, steps=60, per_round=3)
    first = Peer(hub, what, "peer-a", 0)
    await until(lambda: len(first.of(events.InnerStep)) >= 24)
    first.leave.set()
    await first.task
    hub.kill("peer-a")
    before = first.of(events.InnerStep)[-1].progress
    await list_as_replica(hub, what, "peer-liar", 0, first.counters.round, claimed)
    second = Peer(hub, what, "peer-a", 0, saved=first.saved)
    await until(lambda: bool(second.of(events.InnerStep)))
    assert second.of(events.InnerStep)[0].progress == pytest.approx(before, abs=0.1)
    second.leave.set()
    await second.task


async def test_a_replica_that_has_ended_its_last_round_opens_no_other_in_its_next_life() -> None:
    hub, what = SimNetwork(), recipe(stages=1, replicas=1, steps=20, per_round=3)
    first = Peer(hub, what, "peer-a", 0)
    await first.task
    assert first.of(OuterStepTaken)
    assert first.counters.slow_steps == first.counters.inner_steps
    hub.kill("peer-a")
    second = Peer(hub, what, "peer-a", 0, saved=first.saved)
    await second.task
    assert not second.of(OuterStepTaken)


class Hesitant(Text):
    """A text whose end shows only a moment after it was asked for more."""

    async def draw(self) -> Tensor:
        await asyncio.sleep(0.02)
        return await super().draw()


async def test_a_failure_in_the_midst_of_a_step_leaves_a_checkpoint_that_agrees_with_itself() -> None:
    peer = Peer(SimNetwork(), recipe(stages=1, steps=400, window=1), "peer-a", 0)
    peer.text = Hesitant(recipe(stages=1, window=1).run, "peer-a")
    await until(lambda: len(peer.of(events.InnerStep)) >= 3)
    peer.text.failure = OSError("the text is gone")
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await peer.task
    assert_counted(peer)


@pytest.mark.parametrize("wait_s", [0.0, 70.0, 140.0])
async def test_a_leave_does_not_cut_off_a_step_that_lasts_longer_than_it_waits(wait_s: float) -> None:
    """Each job of this device takes longer than anybody waits for microbatches."""
    what = recipe(stages=1, steps=400, window=1)
    peer = Peer(SimNetwork(), what, "peer-a", 0, job_s=2 * LONGEST_DRAIN_S, refresh_s=30.0)
    await until(lambda: len(peer.of(events.InnerStep)) >= 2, 10_000.0)
    await asyncio.sleep(wait_s)
    await asked_to_leave(peer, within_s=1000.0)
    assert_counted(peer)


async def test_the_last_step_of_a_run_is_in_its_last_round_however_long_it_lasts() -> None:
    what = recipe(stages=1, steps=3, window=1, per_round=2)
    peer = Peer(SimNetwork(), what, "peer-a", 0, job_s=2 * LONGEST_DRAIN_S, refresh_s=30.0)
    await peer.task
    assert_counted(peer)
    assert len(peer.of(events.InnerStep)) == 3
    assert len(peer.of(OuterStepTaken)) == 2
    # But for what a difference from slow weights is rounded by.
    for slow, fast in zip(peer.saved.tensors["slow"], peer.saved.tensors["fast"], strict=True):
        torch.testing.assert_close(slow, fast, rtol=0.0, atol=1e-4)


def assert_counted(peer: Peer) -> None:
    """Check that the steps in the weights are those that were counted, journalled and saved."""
    taken = peer.stages[-1].statistics()["inner_steps"]
    assert peer.counters.inner_steps == peer.counters.optimiser_steps == taken
    assert len(peer.of(events.InnerStep)) == taken > 0


async def test_a_replica_saves_every_few_minutes() -> None:
    hub, what = SimNetwork(), recipe(stages=1, steps=10_000, window=1)
    peer = Peer(hub, what, "peer-a", 0, job_s=2.0)
    await until(lambda: peer.saved is not None, 1000.0)
    assert peer.counters.inner_steps == len(peer.of(events.InnerStep))
    await asked_to_leave(peer)


async def test_a_polite_leave_is_heard_in_the_last_round() -> None:
    """The last round may wait for an exchange, and an exchange of large weights for hours."""
    hub = SimNetwork(size_bytes=lambda message, topic: 2**30 if isinstance(message, Weights) else 100)
    what = recipe(stages=1, replicas=2, steps=4, per_round=100)
    peers = [Peer(hub, what, name, 0) for name in ("peer-a", "peer-b")]
    for peer in peers:
        hub.set_access(peer.name, Access(up_bytes_per_s=2**20))
    await until(lambda: all("last round" in " ".join(peer.said) for peer in peers))
    await asyncio.sleep(5.0)
    begun_s = now()
    await asked_to_leave(*peers)
    assert all(peer.saved is not None for peer in peers)
    assert (now() - begun_s) < 5.0


async def test_weights_that_violate_the_protocol_are_journalled_by_whoever_gets_them() -> None:
    hub, what = SimNetwork(), recipe(stages=1, replicas=2, steps=30, per_round=3)
    peers = [Peer(hub, what, name, 0) for name in ("peer-a", "peer-b")]
    await until(lambda: len(peers[1].of(events.InnerStep)) >= 2)
    # Of the messages that a replica of the only stage sends, weights alone hold tensors.
    hub.corrupt("peer-a", Corruption.SHAPE, 4)
    await asyncio.gather(*[peer.task for peer in peers])
    one, other = peers
    violations = [event for event in other.of(events.PeerViolation) if event.peer == "peer-a"]
    assert {event.topic for event in violations} == {"gossip"}
    assert len(violations) + len([e for e in other.of(events.Lost) if e.what == "exchange"]) >= 4
    assert not one.of(events.PeerViolation)
    # The first to finish leaves the other one alone, perhaps with a round open.
    assert other.of(OuterStepTaken)[0].partner == "peer-a"


async def test_a_node_that_was_away_leaves_no_partner_alone() -> None:
    """What it lost meanwhile, it lost by its own standstill."""
    hub, what = SimNetwork(), recipe(stages=1, replicas=3, steps=10_000, window=1)
    peers = [Peer(hub, what, name, 0) for name in ("peer-a", "peer-b", "peer-c")]
    await until(lambda: all(len(peer.of(events.InnerStep)) > 2 for peer in peers))
    replica = peers[0].node.replica
    assert replica is not None
    state, now_s = replica.rounds._round_state, now()
    for forgiven in (False, True):
        state.note_silence("peer-b", now_s - 60.0, 60.0, "silent")
        if forgiven:
            peers[0].node._forgive(15.0)
        state.begin_round(last=False)
        asked, _ = state.queue.next(["peer-b"], now_s)
        assert asked == ("peer-b" if forgiven else None)
    await asked_to_leave(*peers)
