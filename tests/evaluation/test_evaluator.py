"""Which peer evaluates, and what an evaluation in a pause does."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from held_out import Held
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, recipe
from msgspec import structs
from sample_counters import evaluated_counters
from torch import Tensor

from noloco_node.data.held_out_text import HeldOutText, text_loss
from noloco_node.data.row_forms import data_error
from noloco_node.errors import config_error
from noloco_node.evaluation.evaluator import (
    AT_THE_END,
    EVALUATION,
    LONGEST_END_S,
    LOOK_S,
    SAMPLING,
    Evaluator,
    EvaluatorContext,
    chosen,
    last_evaluation,
)
from noloco_node.journal import events
from noloco_node.machine.interface import Reporter
from noloco_node.run.config import DataConfig, ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.peer_state import Evaluation, PeerState
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import PeerRecord, Roster

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)


def sample(documents: int = 6) -> HeldOutText:
    """Return sequences of eight tokens, one of each document."""
    tokens = torch.randint(32, (documents, 9), generator=torch.Generator().manual_seed(3))
    return HeldOutText([tokens[:4], tokens[4:]], [f"document {each}" for each in range(documents)], documents, True)


class Trial:
    """An evaluator of a replica that has the same loss for each token; `others`: peers that train beside it."""

    def __init__(
        self,
        host: Held,
        others: tuple[str, ...] = (),
        loss: Callable[[], float] = lambda: 2.0,
        begun: int = 0,
        every: int = 4,
        routed: bool = False,
    ) -> None:
        self.events: list[events.Event] = []
        self.said: list[str] = []
        self.passes: list[int] = []
        self.ending = False
        self._loss = loss
        self.records = [PeerRecord(peer=peer, stage=0, state=PeerState.TRAINING) for peer in others]
        self.below: tuple[PeerRecord, ...] = ()
        """Of the next stage."""
        pipeline = PipelineConfig(stages=1 + routed, microbatch_size=3, sequence_length=8)
        data = DataConfig(evaluate_every_rounds=every)
        context = EvaluatorContext(
            run_id="run",
            run=RunConfig(model=ModelConfig(), pipeline=pipeline, data=data),
            me="me",
            host=host,
            roster=lambda: Roster(stages=(tuple(self.records), self.below)),
            losses=self._token_losses,
            logits=self._logits,
            evaluated=self._evaluated,
            busy_s=lambda: 0.5 * len(self.passes),
            is_ending=lambda: self.ending,
            reporter=Reporter(record=self.events.append, say=self.said.append),
        )
        self.evaluator = Evaluator(context, begun)

    async def _token_losses(self, tokens: Tensor) -> Tensor:
        self.passes.append(len(tokens))
        return torch.full((len(tokens), tokens.shape[1] - 1), self._loss())

    async def _logits(self, ids: Tensor) -> Tensor:
        """Return logits by which each letter is followed by the next one of the alphabet."""
        self.passes.append(ids.shape[1])
        return 100.0 * torch.nn.functional.one_hot(ids + 1, 384).float()

    async def _evaluated(self, loss: float) -> Checkpoint:
        return Checkpoint(evaluated_counters(loss, inner_steps=9, progress=0.1, peer="me"), {})

    async def pauses(self, *rounds: int) -> list[events.Event]:
        """Pause in these rounds, with time between two of them to read the text; return the events of the last."""
        for number in rounds:
            before = len(self.events)
            await self.evaluator.in_pause(number, 10 * number, 0.5)
            for _ in range(5):
                await asyncio.sleep(0.0)
        return self.events[before:]


@given(st.sets(NAMES, min_size=1, max_size=8), st.integers(0, 10**6))
def test_peers_with_equal_rosters_choose_the_same_one(peers: set[str], number: int) -> None:
    orders = [sorted(peers), sorted(peers, reverse=True)]
    assert len({chosen("run", number, order) for order in orders}) == 1
    assert chosen("run", number, peers) in peers
    # A peer that leaves changes the choice only where it was chosen.
    first = chosen("run", number, peers)
    for gone in peers - {first}:
        assert chosen("run", number, peers - {gone}) == first


def test_each_peer_has_its_turn_about_as_often() -> None:
    counts = Counter(chosen("run", number, "abcd") for number in range(4000))
    assert set(counts) == set("abcd")
    assert all(900 < count < 1100 for count in counts.values())
    assert chosen("run", 1, ()) is None


async def test_an_evaluation_has_the_loss_of_all_sequences_and_is_told_once() -> None:
    held = Held(sample())
    trial = Trial(held)
    assert await trial.pauses(1, 2, 3) == []
    assert held.reads == 0
    assert await trial.pauses(4) == []  # the text is not here yet
    (event,) = await trial.pauses(4)
    assert isinstance(event, events.Evaluated)
    assert (event.number, event.round, event.step, event.loss) == (1, 4, 40, 2.0)
    assert (event.tokens, event.documents, event.margin) == (48, 6, 0.0)
    assert trial.passes == [3, 1, 2]
    assert event.device_s == 1.5
    assert trial.evaluator.newest == event.evaluation
    words = "held-out loss 2.0000 ± 0.0000 in round 4, over 48 tokens of 6 documents"
    assert trial.said == [f"evaluation 1: {words}, the least so far"]
    assert await trial.pauses(4, 5, 6, 7) == []
    (event,) = await trial.pauses(9)  # a round that was missed does not matter
    assert isinstance(event, events.Evaluated)
    assert (event.number, held.reads) == (2, 1)


async def test_only_the_peer_that_is_chosen_evaluates() -> None:
    others, trial = ("a", "b", "c"), Trial(Held(sample()), ("a", "b", "c"))
    for number in range(1, 41):
        await trial.pauses(4 * number, 4 * number)
    mine = [number for number in range(1, 41) if chosen("run", number, ("me", *others)) == "me"]
    assert [event.number for event in trial.events if isinstance(event, events.Evaluated)] == mine


async def test_a_replica_that_comes_late_evaluates_nothing_that_was_due_before() -> None:
    trial = Trial(Held(sample()), begun=11)
    assert await trial.pauses(11, 11) == []
    assert len(await trial.pauses(12, 12)) == 1


@pytest.mark.parametrize(
    "trouble",
    [
        config_error("There is no text.", "the hub is away", ""),
        OSError("no route"),
        ValueError("damaged"),
        MemoryError(),
    ],
)
async def test_without_text_an_evaluation_is_left_out_and_the_next_reads_anew(trouble: Exception) -> None:
    held = Held(trouble)
    trial = Trial(held)
    (told,) = await trial.pauses(4, 4)
    assert isinstance(told, events.Noticed)
    assert told.what == EVALUATION
    assert told.text.startswith("evaluation 1 is left out: ")
    assert trial.said == [told.text]
    assert await trial.pauses(5, 6, 7) == []
    assert held.reads == 1
    assert await trial.pauses(8, 8) == [], "the same trouble is told once"
    assert held.reads == 2


async def test_a_lack_of_memory_or_a_loss_that_is_not_finite_ends_nothing() -> None:
    def short() -> float:
        raise MemoryError("no memory is left")

    for loss, words in ((short, "left out: no memory is left"), (lambda: math.nan, "a loss that is not finite")):
        trial = Trial(Held(sample()), loss=loss)
        (told,) = await trial.pauses(4, 4)
        assert isinstance(told, events.Noticed)
        assert words in told.text
        assert trial.evaluator.newest is None


async def test_a_text_without_a_token_to_learn_ends_nothing() -> None:
    (told,) = await Trial(Held(HeldOutText([], [], 0, complete=True))).pauses(4, 4)
    assert isinstance(told, events.Noticed)
    assert "left out: there is no token to evaluate on" in told.text


async def test_the_weights_of_the_best_evaluation_are_kept() -> None:
    held = Held(sample())
    rest = [3.0, 3.5, 2.0, 2.0, 1.0]
    trial = Trial(held, loss=lambda: rest[0])
    best = []
    await trial.pauses(4)
    for number in range(1, 5):
        (event,) = await trial.pauses(4 * number)
        assert isinstance(event, events.Evaluated)
        best.append(event.best)
        del rest[0]
    assert best == [True, False, True, False]
    assert await held.best_loss() == 2.0
    held.full = True
    told, event = await trial.pauses(20)
    assert isinstance(told, events.Noticed)
    assert "No space left on device" in told.text
    assert isinstance(event, events.Evaluated)
    assert event.best


async def test_the_model_goes_on_from_the_prompts_of_its_owner() -> None:
    trial = Trial(Held(sample(), "abc", "xy\x1b"))
    (event,) = await trial.pauses(4, 4)
    assert isinstance(event, events.Evaluated)
    first, second = event.samples
    assert (first.prompt, second.prompt) == ("abc", "xy\x1b")
    assert first.text.startswith("defghijklm")
    assert len(first.text) <= SAMPLING.tokens
    assert max(trial.passes) == 8  # a sequence is as long as those that are trained on
    assert trial.said[1].startswith("  'abc' goes on 'defgh")
    assert trial.said[2].startswith("  'xy\\x1b' goes on ")


async def test_prompts_that_no_template_writes_cost_the_samples_and_no_evaluation() -> None:
    held = Held(sample(), "abc")
    held.unfit = data_error("The chat template does not write this prompt.", "a system begins", "another one")
    trial = Trial(held)
    first = [*await trial.pauses(1, 4), *await trial.pauses(5)]
    assert [type(event) for event in first] == [events.Noticed, events.Evaluated]
    assert "samples are left out: The chat template does not write this prompt. a system begins" in trial.said
    (again,) = await trial.pauses(8)
    assert isinstance(again, events.Evaluated), "told once"
    assert again.samples == ()


async def test_a_node_that_leaves_does_not_wait_for_the_rest_of_an_evaluation() -> None:
    trial = Trial(Held(sample()))
    await trial.pauses(4)
    trial.ending = True
    assert await trial.pauses(4) == []
    assert trial.passes == []
    await trial.evaluator.aclose()


async def test_a_swarm_evaluates_its_own_weights_and_its_records_tell_it() -> None:
    hub, text = SimNetwork(), sample(12)
    what = recipe(stages=1, replicas=2, steps=60, per_round=5, extra="[data]\nevaluate_every_rounds = 2\n")
    peers = [Peer(hub, what, f"peer-{number}", 0, evaluation=Held(text)) for number in range(2)]
    seen: set[tuple[str, int]] = set()
    async with asyncio.timeout(3600):
        while not all(peer.task.done() for peer in peers):
            await asyncio.sleep(0.1)
            for record in peers[0].node.roster.stage(0):
                if record.evaluation is not None:
                    seen.add((record.peer, record.evaluation.number))
    made = [(peer, event) for peer in peers for event in peer.of(events.Evaluated)]
    assert len(made) >= 3
    assert {(peer.name, event.number) for peer, event in made[:-2]} <= seen
    for _, event in made:
        assert event.documents == 12
        assert 0.0 < event.loss < 2 * math.log(32)
        assert event.margin is not None
    # The last evaluation of a peer that took no step after it has the loss of its fast weights.
    stage = peers[0].stages[-1]
    losses = torch.cat([stage.token_losses(batch[:, :-1], batch[:, 1:]) for batch in text.batches])
    assert losses.mean().item() == pytest.approx(text_loss(stage.infer, text).mean, rel=1e-5)


async def test_logits_that_are_not_finite_end_a_sample_and_not_the_training() -> None:
    trial = Trial(Held(sample(), "abc"))

    async def logits(ids: Tensor) -> Tensor:
        return torch.zeros(1, ids.shape[1], 384).index_fill(2, torch.tensor([7]), math.inf)

    trial.evaluator._context = replace(trial.evaluator._context, logits=logits)
    (event,) = await trial.pauses(4, 4)
    assert isinstance(event, events.Evaluated)
    assert event.samples == (events.TextSample(prompt="abc", text=""),)


@pytest.mark.parametrize(
    "trouble", [MemoryError("none left"), PermissionError("no"), RuntimeError("cannot allocate memory")]
)
async def test_an_evaluation_counts_whose_weights_cannot_be_kept(trouble: Exception) -> None:
    held = Held(sample())
    trial = Trial(held)

    async def fail(*_: object) -> None:
        raise trouble

    held.best_loss = fail
    told, event = await trial.pauses(4, 4)
    assert isinstance(told, events.Noticed)
    assert isinstance(event, events.Evaluated)
    assert not event.best


async def test_a_pipeline_does_not_pause_for_an_evaluation_and_keeps_nothing_of_it() -> None:
    held = Held(sample(), "abc")
    trial = Trial(held, routed=True)
    await trial.pauses(4)
    before = len(trial.events)
    await trial.evaluator.in_pause(4, 40, 0.5)
    assert trial.passes == [], "it begins once the pause is over"
    await asyncio.sleep(1.0)
    (event,) = trial.events[before:]
    assert isinstance(event, events.Evaluated)
    assert (event.best, event.samples, held.kept, trial.passes) == (False, (), [], [3, 3])
    assert trial.said[0].startswith("evaluation 1, a mean over chains of replicas: held-out loss 2.0000")


async def test_an_evaluation_of_a_pipeline_that_fails_is_told_and_ends_nothing() -> None:
    for trouble in (ConnectionRefusedError("the stages behind refused it: full"), OSError(5, "no"), KeyError("x")):

        def fail(trouble: Exception = trouble) -> float:
            raise trouble

        trial = Trial(Held(sample()), loss=fail, routed=True)
        (told,) = await trial.pauses(4, 4)
        assert isinstance(told, events.Noticed)
        assert told.text.startswith("evaluation 1 is left out: ")
        assert trial.said == [told.text]


async def test_one_peer_evaluates_the_final_weights_once_the_next_stage_has_ended() -> None:
    loop = asyncio.get_running_loop()
    trials = [Trial(Held(sample()), ("a", "b"), routed=routed) for routed in (False, True)]
    for trial in trials:
        trial.ending = True  # what is left out beside the training is made now
        trial.below = (PeerRecord(peer="later", stage=1, state=PeerState.TRAINING),)
        trial.records[:] = [replace_state(record) for record in trial.records]
        loop.call_later(20.0, setattr, trial, "below", ())
    winner = chosen("run", AT_THE_END, ("me", "a", "b"))
    for trial, ends_s in zip(trials, (0.0, 20.0), strict=True):
        trial.evaluator._context = replace(trial.evaluator._context, me=str(winner))
        begun_s = loop.time()
        await trial.evaluator.at_the_end(9, 90, 1.0)
        assert loop.time() - begun_s == pytest.approx(ends_s, abs=2 * LOOK_S)
        (event,) = trial.events
        assert isinstance(event, events.Evaluated)
        assert (event.number, event.round, event.step) == (3, 9, 90)
        assert "of the final weights" in trial.said[0]
        for other in {"me", "a", "b"} - {winner}:
            trial.evaluator._context = replace(trial.evaluator._context, me=other)
            await trial.evaluator.at_the_end(9, 90, 1.0)
        assert len(trial.events) == 1


async def test_a_later_stage_stays_until_the_final_weights_are_evaluated() -> None:
    loop, every = asyncio.get_running_loop(), 4

    def made(number: int, round: int) -> Evaluation:
        return Evaluation(number=number, round=round, loss=2.0, margin=None, tokens=1, documents=1)

    def source(state: PeerState, evaluation: Evaluation | None) -> PeerRecord:
        return PeerRecord(peer="source", stage=0, state=state, evaluation=evaluation)

    ends = (
        (source(PeerState.FINISHED, made(3, 9)), 20.0),
        (source(PeerState.LEAVING, None), 20.0),
        (source(PeerState.FINISHED, made(2, 9)), LONGEST_END_S),
    )
    for last, ends_s in ends:
        records = [source(PeerState.TRAINING, made(2, 8))]
        loop.call_later(20.0, records.__setitem__, 0, last)
        begun_s = loop.time()
        await last_evaluation(lambda records=records: Roster(stages=(tuple(records),)), every)
        assert loop.time() - begun_s == pytest.approx(ends_s, abs=2 * LOOK_S)


def replace_state(record: PeerRecord) -> PeerRecord:
    return structs.replace(record, state=PeerState.FINISHED)


async def test_the_last_evaluation_takes_no_longer_than_its_bound() -> None:
    trial = Trial(Held(sample()), routed=True)
    trial.below = (PeerRecord(peer="later", stage=1, state=PeerState.TRAINING),)
    begun_s = asyncio.get_running_loop().time()
    await trial.evaluator.at_the_end(9, 90, 1.0)
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(LONGEST_END_S)
    assert trial.said == [f"evaluation 3 is left out: it took longer than {LONGEST_END_S:.0f} s"]
