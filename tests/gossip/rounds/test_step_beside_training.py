"""The outer step is computed beside the training: nobody waits for it, nobody sees half of it, and it is taken once."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import Toy, ToySettings, World, gossiping, live

from gossip.exchange.codec import OwnWeights, encode
from gossip.interface import Origin, OuterStepTaken
from gossip.rounds.outer_optimiser import Step
from gossip.rounds.round_state import PendingCorrection, Stepping
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, absolute
from noloco_node.sim.clock import run

H = 10
SETTINGS = ToySettings(seed=3, alpha=0.5, beta=0.7, gamma=0.7, inner_steps_per_round=H, overlap_steps=4)
BLOCKING = replace(SETTINGS, blocking=True)
both_forms = pytest.mark.parametrize("settings", [SETTINGS, BLOCKING], ids=["overlapped", "blocking"])
few = hypothesis_settings(max_examples=40)
seconds = st.floats(0.0, 3.5 * H)
START = 20.0


class Watched(Toy):
    """A toy that keeps all snapshots and corrections, with the inner steps by then."""

    def __init__(self, world: World, name: str, settings: ToySettings, **traits: float) -> None:
        super().__init__(world, name, settings, **traits)
        self.snapshots: list[tuple[int, Tensor]] = []
        self.corrections: list[tuple[int, Tensor]] = []
        self.correct_s = 0.0
        """How long a correction takes before and after the weights change."""

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Nobody copies weights that lack a correction, nor is there memory for it."""
        assert self.rounds.settled
        found = await super().snapshot(slow)
        self.snapshots.append((self.inner_steps, found[0].clone()))
        return found

    async def correct(self, correction: Tensors) -> None:
        await asyncio.sleep(self.correct_s)
        self.corrections.append((self.inner_steps, correction[0].clone()))
        await super().correct(correction)
        await asyncio.sleep(self.correct_s)

    def replayed(self, steps: int) -> Tensor:
        """Return the fast weights after so many steps and the corrections until then, each added once."""
        fast, waiting = torch.full((4,), START), list(self.corrections)
        for step in range(1, steps + 1):
            fast = fast - 0.05 * (fast - self.optimum)
            while waiting and waiting[0][0] == step:
                fast = fast + waiting.pop(0)[1]
        return fast


def pair(settings: ToySettings, *outer_step_s: float, latency_s: float = 0.3) -> tuple[Watched, Watched]:
    world = World(latency_s=latency_s)
    first, second = (
        Watched(world, name, settings, optimum=optimum, outer_step_s=step_s)
        for name, optimum, step_s in zip("ab", (10.0, 16.0), outer_step_s, strict=True)
    )
    return first, second


async def leave(toy: Toy) -> None:
    await toy.rounds.leave()


def check_whole(toy: Watched) -> None:
    """What belongs together does, once the weights are settled: counters, slow weights, and fast weights."""
    assert toy.rounds.settled
    assert torch.equal(toy.fast, toy.replayed(toy.inner_steps)), "a correction is lost or doubled"
    steps = [event for event in toy.events if isinstance(event, OuterStepTaken)]
    assert len(steps) == len(toy.corrections)
    assert toy.rounds.finished == toy.rounds.slow_age.round == max((event.round for event in steps), default=0)
    if steps:
        (step, correction), slow = toy.corrections[-1], toy.rounds.state.slow[0]
        # A solo step and the round that is opened after it have their snapshots in one pause.
        taken = [fast for at, fast in toy.snapshots if at == step - steps[-1].staleness]
        assert any(torch.equal(correction, slow - fast) for fast in taken), "not from the snapshot that was exchanged"


# Nobody waits for it, and it is the same step.


@few
@given(seconds, seconds)
def test_the_training_waits_for_no_outer_step_and_the_step_has_the_same_bits(one_s: float, other_s: float) -> None:
    at_once, later = pair(SETTINGS, 0.0, 0.0), pair(SETTINGS, one_s, other_s)
    for toys in (at_once, later):
        run(live(list(toys), H + int(max(one_s, other_s)) + 3, leave))
    for quick, slow in zip(at_once, later, strict=True):
        assert slow.idle_s == 0.0
        check_whole(slow)
        first, delayed = quick.corrections[0], slow.corrections[0]
        # The correction is the same; it comes at the first pause after the step.
        assert torch.equal(first[1], delayed[1])
        assert delayed[0] >= first[0]
        assert delayed[0] - first[0] <= slow.outer_step_s + 1
        assert slow.met[0].staleness == delayed[0] - H


@few
@given(seconds, seconds)
def test_no_round_is_opened_before_the_last_one_is_corrected(one_s: float, other_s: float) -> None:
    """`Watched.snapshot` fails where one is."""
    toys = pair(replace(SETTINGS, inner_steps_per_round=2, overlap_steps=1), one_s, other_s)
    run(live(list(toys), 60, leave))
    for toy in toys:
        assert toy.met
        # A partner that still computes its own step leaves the other alone: the pause waits for solo steps only.
        assert toy.idle_s == pytest.approx(toy.outer_step_s * len(toy.solo))
        check_whole(toy)


@both_forms
@few
@given(seconds)
def test_the_blocking_form_and_a_solo_step_end_in_their_pause(settings: ToySettings, step_s: float) -> None:
    blocking = pair(BLOCKING, step_s, step_s)
    run(live(list(blocking), 3 * H))
    alone = Watched(World(), "alone", settings, outer_step_s=step_s)
    run(live([alone], 3 * H))
    assert [step.staleness for step in alone.solo] == [0, 0, 0]
    for toy in (*blocking, alone):
        assert [step.staleness for step in toy.met] == [0] * len(toy.met)
        check_whole(toy)


# Nobody sees half of it.


@few
@given(seconds, st.lists(st.floats(0.0, 45.0), min_size=1, max_size=5))
async def test_who_reads_sees_slow_weights_and_counters_of_one_moment(step_s: float, moments: list[float]) -> None:
    toys = pair(SETTINGS, step_s, 0.0)
    toy = toys[0]

    async def look(at_s: float) -> None:
        await asyncio.sleep(at_s)
        async with toy.rounds.weights.reading():
            state, age = toy.rounds.state, toy.rounds.slow_age
            seen = [tensor.clone() for tensor in (*state.slow, *state.momentum)]
            assert (toy.slow != START) == (age.round > 0)
            await asyncio.sleep(0.7)
            assert all(map(torch.equal, (*state.slow, *state.momentum), seen))
            assert toy.rounds.slow_age == age

    async with asyncio.TaskGroup() as group:
        group.create_task(live(list(toys), 45))
        for at_s in moments:
            group.create_task(look(at_s))
    assert toy.idle_s <= 0.7 * len(moments)


@few
@given(seconds, st.integers(1, 40))
async def test_a_checkpoint_in_any_pause_holds_each_correction_once(step_s: float, pause: int) -> None:
    toy, other = pair(SETTINGS, step_s, 0.0)

    async def train_and_save() -> None:
        await toy.train(pause)
        release = await toy.rounds.read_settled()
        check_whole(toy)
        saved = toy.fast.clone(), toy.rounds.state.slow[0].clone()
        await asyncio.sleep(5.0)
        assert torch.equal(toy.fast, saved[0])
        assert torch.equal(toy.rounds.state.slow[0], saved[1])
        release()
        await toy.train(45 - pause)
        await toy.rounds.leave()
        check_whole(toy)

    async with gossiping(toy):
        await asyncio.gather(train_and_save(), live([other], 60))


# It is taken once, whatever happens.


@both_forms
@few
@given(seconds, st.floats(0.5, 45.0))
async def test_a_cancelled_replica_has_taken_a_step_wholly_or_not_at_all(
    settings: ToySettings, step_s: float, cancelled_at_s: float
) -> None:
    toys = pair(settings, step_s, step_s)
    for toy in toys:
        toy.correct_s = 2.0
    living = asyncio.create_task(live(list(toys), 45))
    await asyncio.sleep(cancelled_at_s)
    living.cancel()
    await asyncio.wait({living})
    for toy in toys:
        # What is computed is awaited, so a replica whose device is lost saves slow weights of one moment.
        assert toy.rounds._round_state.step_task is None
        assert (toy.slow != START) == (toy.rounds.slow_age.round > 0)
        (await toy.rounds.read_settled())()
        check_whole(toy)


@few
@given(seconds, st.integers(1, 40), st.booleans())
def test_who_leaves_takes_the_step_that_was_agreed(step_s: float, pause: int, last: bool) -> None:
    async def end(toy: Toy) -> None:
        met, phase = len(toy.met), toy.rounds._round_state.phase
        if last:
            await toy.rounds.last_round(30.0)
        await toy.rounds.leave()
        assert isinstance(toy, Watched)
        check_whole(toy)
        if isinstance(phase, Stepping | PendingCorrection):
            assert len(toy.met) > met
        if last:
            assert toy.rounds.slow_steps == toy.inner_steps, "the slow weights hold every step"

    run(live(list(pair(SETTINGS, step_s, step_s / 2)), {"a": pause, "b": 40}, end))


class Broken(RuntimeError):
    """What a step raises half-way."""


async def test_a_step_that_fails_ends_the_gossip_and_is_never_saved() -> None:
    toys = pair(SETTINGS, 0.0, 0.0)
    failing = toys[0].rounds._optimiser

    def spoilt(step: Step) -> None:
        failing.state.slow[0].zero_()
        raise Broken

    failing._take = spoilt
    with pytest.raises(ExceptionGroup) as caught:
        await live(list(toys), 30)
    assert caught.group_contains(Broken)
    assert toys[0].rounds.finished == 0
    for _ in range(2):
        with pytest.raises(Broken):
            await toys[0].rounds.read_settled()


async def test_a_correction_that_fails_is_not_added_again() -> None:
    toy, _ = toys = pair(SETTINGS, 0.0, 0.0)
    tries = 0

    async def lost(correction: Tensors) -> None:
        nonlocal tries
        tries += 1
        raise Broken

    toy.correct = lost
    with pytest.raises(ExceptionGroup) as caught:
        await live(list(toys), 30)
    assert caught.group_contains(Broken)
    # So no checkpoint is written: the fast weights may be half corrected.
    for _ in range(2):
        with pytest.raises(RuntimeError, match="take_correction of a round that is Correcting"):
            await toy.rounds.read_settled()
    assert tries == 1


# Adopting.


@few
@given(seconds, st.integers(0, 20), st.sampled_from([Format.FLOAT32, Format.INT4]))
async def test_adopted_weights_replace_ours_beside_the_training(step_s: float, steps: int, codec: Format) -> None:
    """Slow and fast weights become the partner's."""
    settings = replace(SETTINGS, codec=codec)
    origin = Origin(OuterState((torch.full((4,), START),)))
    toy = Toy(World(), "a", settings, outer_step_s=step_s, origin=origin)
    rounds, optimiser = toy.rounds, toy.rounds._optimiser
    rounds.disown()
    theirs = torch.tensor([1.0, -2.0, 3.0, 4.0])
    snapshot = await optimiser.snapshot(0)
    wire = encode(absolute(codec), OwnWeights((theirs,))).coded.wire
    step = await optimiser.adopting("b", wire, snapshot, disowned=True)
    taking = asyncio.create_task(optimiser.take(step))
    for _ in range(steps):
        await asyncio.sleep(1.0)
        toy.fast = toy.fast - 0.05 * (toy.fast - toy.optimum)
    moved, correction = toy.fast.clone(), await taking
    assert torch.equal(rounds.state.slow[0], theirs)
    assert torch.equal(toy.fast, moved)
    await optimiser.correct(correction)
    assert torch.equal(toy.fast, theirs)
