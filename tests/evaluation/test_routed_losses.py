"""Evaluations of pipelines: what is asked of the stages, and whole swarms that evaluate while they train."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from held_out import Held
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, ended, recipe, until

from noloco_node.data.held_out_text import HeldOutText, evaluated_sequences
from noloco_node.evaluation.evaluator import MOST_LOSS, TRIES, evaluation_quota, routed_losses
from noloco_node.journal import events
from noloco_node.run.protocols import MICROBATCH, microbatch_schema, topic
from noloco_node.sim.clock import run as in_virtual_time
from noloco_node.sim.network.sim_network import SimNetwork
from pipeline.activation_codec import as_microbatch
from pipeline.admission_window import PASSES_OF_ONE
from pipeline.messages import EvaluationReply, Microbatch, Reason, Refused, SequenceLosses

EVALUATED = "[data]\nevaluate_every_rounds = 2\n"
RUN = recipe(extra=EVALUATED).run
SIZE, LENGTH = RUN.pipeline.ids_shape


def text(sequences: int) -> HeldOutText:
    tokens = torch.randint(32, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    names = [f"document {number}" for number in range(sequences)]
    return HeldOutText(list(torch.split(tokens, 8)), names, sequences, complete=True)


def answering(
    *replies: EvaluationReply,
) -> tuple[list[Microbatch], Callable[[Microbatch], asyncio.Future[EvaluationReply]]]:
    """Return the microbatches that were asked, and what answers them in turn, the last reply again and again."""
    asked: list[Microbatch] = []

    def evaluate(microbatch: Microbatch) -> asyncio.Future[EvaluationReply]:
        asked.append(microbatch)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(replies[min(len(asked), len(replies)) - 1])
        return answer

    return asked, evaluate


@given(count=st.integers(1, SIZE), sums=st.lists(st.floats(0.0, LENGTH * MOST_LOSS, width=32), min_size=2, max_size=2))
def test_a_microbatch_has_the_size_of_the_run_and_only_what_was_asked_counts(count: int, sums: list[float]) -> None:
    async def main() -> None:
        asked, evaluate = answering(SequenceLosses(sums=torch.tensor(sums)))
        tokens = text(count).batches[0]
        assert (await routed_losses(RUN, evaluate, tokens)).tolist() == torch.tensor(sums)[:count].tolist()
        (microbatch,) = asked
        assert microbatch.forward_only
        assert microbatch.hidden.shape == microbatch.targets.shape == (SIZE, LENGTH)
        assert torch.equal(microbatch.hidden[:count], tokens[:, :-1])

    in_virtual_time(main())


@pytest.mark.parametrize("sums", [[0.5, -0.1], [1.01 * MOST_LOSS * LENGTH, 0.0], [torch.nan, 0.0]])
async def test_losses_that_no_model_has_are_refused(sums: list[float]) -> None:
    _, evaluate = answering(SequenceLosses(sums=torch.tensor(sums)))
    with pytest.raises(ValueError, match="claims a loss"):
        await routed_losses(RUN, evaluate, text(2).batches[0])


@pytest.mark.parametrize("reason", Reason)
async def test_a_refusal_is_named_after_a_few_tries_and_at_once_where_tries_are_in_vain(reason: Reason) -> None:
    asked, evaluate = answering(Refused(reason=reason))
    with pytest.raises(ConnectionError, match=f"refused it: {reason}"):
        await routed_losses(RUN, evaluate, text(2).batches[0])
    assert len(asked) == (1 if reason in (Reason.QUOTA, Reason.NOT_FINITE) else TRIES)
    good = SequenceLosses(sums=torch.ones(2))
    _, evaluate = answering(Refused(reason=Reason.LEAVING), good)
    assert torch.equal(await routed_losses(RUN, evaluate, text(2).batches[0]), good.sums)


async def test_sequences_of_which_nothing_is_learnt_are_asked_of_nobody() -> None:
    asked, evaluate = answering(Refused(reason=Reason.FULL))
    assert (await routed_losses(RUN, evaluate, ~text(2).batches[0])).tolist() == [0.0, 0.0]
    assert asked == []


@given(every=st.integers(1, 5), window=st.integers(1, 8), per_round=st.integers(1, 20))
def test_one_evaluation_and_the_last_one_fit_into_the_quota(every: int, window: int, per_round: int) -> None:
    extra = f"[data]\nevaluate_every_rounds = {every}\n"
    run = recipe(window=window, per_round=max(3, per_round), extra=extra).run
    quota, passes = evaluation_quota(run), -(-evaluated_sequences(run) // SIZE)
    had = [quota.take("a sender", 0) for _ in range(3 * passes)]
    assert sum(had) == PASSES_OF_ONE * passes
    # A forward pass is a third of the work: one sender takes two windows' worth of each that many windows.
    assert sum(had) <= 2 * 3 * window


async def test_a_pipeline_evaluates_beside_its_training_and_at_its_end() -> None:
    hub, what, held = SimNetwork(), recipe(replicas=2, steps=40, extra=EVALUATED), text(11)
    peers = [Peer(hub, what, f"{stage}-{n}", stage, evaluation=Held(held, "abc")) for stage in (0, 1) for n in (0, 1)]
    await ended(*peers, within_s=3600)
    made = [event for peer in peers[:2] for event in peer.of(events.Evaluated)]
    assert len(made) >= 3
    assert not any(peer.of(events.Evaluated) for peer in peers[2:])
    assert not [told for peer in peers for told in peer.of(events.Noticed)]
    for event in made:
        assert (event.documents, event.tokens, event.best, event.samples) == (11, 11 * LENGTH, False, ())
        assert 2.0 < event.loss < 6.0
        assert event.margin is not None
    (last,) = [peer for peer in peers[:2] if any("of the final weights" in line for line in peer.said)]
    event = last.of(events.Evaluated)[-1]
    words = f"evaluation {event.number}, of the final weights, a mean over chains of replicas: held-out loss"
    assert any(line.startswith(words) for line in last.said)
    assert sum("of the final weights" in line for peer in peers for line in peer.said) == 1
    # The last evaluation is that of the weights that an export takes, over the chains that its microbatches took.
    exact = [chain_loss(source, end, held) for source in (last,) for end in peers[2:]]
    assert min(exact) - 1e-3 <= event.loss <= max(exact) + 1e-3
    assert not any(peer.of(events.PeerViolation) or peer.of(events.Lost) for peer in peers)


def chain_loss(first: Peer, last: Peer, held: HeldOutText) -> float:
    losses = [
        last.stages[-1].token_losses(first.stages[-1].activations(batch[:, :-1]), batch[:, 1:])
        for batch in held.batches
    ]
    return torch.cat(losses).mean().item()


async def test_evaluations_count_no_samples_and_earn_no_receipts() -> None:
    issued = []
    for extra in ("", EVALUATED):
        hub, what = SimNetwork(), recipe(steps=20, extra=extra)
        source, last = (
            Peer(hub, what, f"peer-{stage}", stage, evaluation=Held(text(11)) if extra else None) for stage in (0, 1)
        )
        await ended(source, last, within_s=3600)
        assert bool(source.of(events.Evaluated)) == bool(extra)
        assert last.replica.microbatches.issued.samples == {"peer-0": source.counters.samples}
        steps = len(source.of(events.InnerStep))
        issued.append(
            (
                source.counters.samples,
                steps,
                len(last.of(events.InnerStep)),
                last.replica.worker.statistics()["succeeded"],
            )
        )
    assert issued[0] == issued[1]


async def test_a_stranger_beyond_its_quota_is_refused_and_the_training_goes_on() -> None:
    hub, what = SimNetwork(), recipe(steps=60, window=4, per_round=20, extra=EVALUATED)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1)]
    await until(lambda: bool(peers[1].of(events.InnerStep)))
    asked = as_microbatch(text(2).batches[0], told=False, progress=0.0, budget_s=60.0)
    hidden = peers[0].stages[-1].activations(asked.hidden)
    asked = replace(asked, hidden=hidden, forward_only=True)
    replies = []
    async with hub.network("stranger").talk(
        "peer-1", topic(MICROBATCH, 1), microbatch_schema(what.run, 16)
    ) as conversation:
        for _ in range(30):
            await conversation.send(asked)
            replies.append(await conversation.receive())
    passes = -(-evaluated_sequences(what.run) // SIZE)
    assert [type(reply) for reply in replies[: PASSES_OF_ONE * passes]] == [SequenceLosses] * PASSES_OF_ONE * passes
    assert set(map(str, replies[PASSES_OF_ONE * passes :])) == {str(Refused(reason=Reason.QUOTA))}
    await ended(*peers, within_s=3600)
    assert peers[1].replica.microbatches.issued.samples == {"peer-0": peers[0].counters.samples}
    here = [event for event in peers[1].of(events.RefusedMicrobatch) if event.here]
    assert {event.reason for event in here} >= {"evaluation quota"}


async def test_a_training_microbatch_is_not_answered_by_losses_nor_an_evaluation_by_a_gradient() -> None:
    hub, what = SimNetwork(), recipe(extra=EVALUATED, steps=10_000)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in (0, 1)]
    await until(lambda: bool(peers[0].of(events.InnerStep)))
    worker = peers[1].replica.worker
    evaluate, worker.evaluate = worker.evaluate, worker.process
    with pytest.raises(ConnectionError):
        await peers[0].replica.losses(text(2).batches[0])
    worker.process = evaluate
    wrong = {"expected SequenceLosses, got Gradient", "expected Gradient, got SequenceLosses"}
    await until(lambda: {event.why for event in peers[0].of(events.PeerViolation)} == wrong)
    await asked_to_leave(*peers)
