"""Rounds: everybody meets, nobody hangs, and whatever goes wrong costs one skipped round and changes no weights."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
from toy_gossip import CUT, SWALLOW, Line, Toy, ToySettings, World, changed, gossiping, live

from gossip.exchange.messages import Accept, Acknowledge, Decline, DeclineReason, Propose
from gossip.interface import Candidate, RoundSkipped
from gossip.rule.outer_step import Outer
from gossip.settings import RoundTimeouts
from noloco_node.sim.clock import run

REFERENCE = Outer(alpha=0.5, beta=0.7, gamma=0.7)
SETTINGS = ToySettings(seed=3, **REFERENCE._asdict(), inner_steps_per_round=20)
BLOCKING = replace(SETTINGS, blocking=True)
both_forms = pytest.mark.parametrize("settings", [SETTINGS, BLOCKING], ids=["overlapped", "blocking"])


def swarm(world: World, count: int, settings: ToySettings = SETTINGS, **traits: Any) -> list[Toy]:
    return [Toy(world, f"p{number:02}", settings, **traits) for number in range(count)]


def trained(start: float, optimum: float, steps: int) -> float:
    """Where a toy is after so many inner steps without gossip."""
    return optimum + (start - optimum) * 0.95**steps


# Many replicas.


@both_forms
@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_unequal_replicas_all_meet_and_stay_together(count: int, settings: ToySettings) -> None:
    world = World(latency_s=0.05)
    toys = [
        Toy(world, f"p{number:02}", settings, step_s=1.0 + 0.07 * (number % 7), optimum=10.0 + number % 5)
        for number in range(count)
    ]
    run(live(toys, {toy.name: int(300 / toy.step_s) for toy in toys}))
    for toy in toys:
        openings = toy.inner_steps // 20
        assert len(toy.met) >= 0.7 * openings - 1
        assert not toy.solo
        assert toy.rounds.statistics()["implausible"] == 0
        # Training never waits for a partner; in the blocking form it waits at the gate, not here.
        assert toy.idle_s == pytest.approx(0.0, abs=1e-6)
        # One meeting may have been going on at the end.
        assert toy.shut - len(toy.met) in (0, 1) if settings.blocking else toy.shut == 0
    # They started at 20 and would end between 10 and 14, each at its own optimum.
    optima = [toy.optimum for toy in toys]
    assert fmean(toy.slow for toy in toys) == pytest.approx(fmean(optima), abs=0.5)
    assert max(toy.slow for toy in toys) - min(toy.slow for toy in toys) < max(optima) - min(optima) + 0.01
    partners = {toy.name: {step.partner for step in toy.met} for toy in toys}
    assert all(len(met) >= min(count - 1, 4) for met in partners.values())


@pytest.mark.parametrize("step_s", [1.0, 30.0])
async def test_proposals_do_not_grow_with_the_length_of_a_round(step_s: float) -> None:
    """Each asks the other of a pair once a round at most, however long the other takes until its round opens."""
    world = World()
    toys = [Toy(world, f"p{number}", SETTINGS, step_s=step_s) for number in range(2)]

    async def late(toy: Toy, steps: int) -> None:
        await asyncio.sleep(steps * step_s)
        await toy.train(20 * 10)

    async with gossiping(*toys):
        await asyncio.gather(*map(late, toys, (0, 7)))
    for toy in toys:
        assert len(toy.met) >= 9
        assert toy.rounds.statistics()["proposals_sent"] <= 11


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_replica_one_round_behind_or_ahead_heals_and_meets(late: int, ahead: bool) -> None:
    world = World()
    toys = [Toy(world, f"p{n}", SETTINGS, rounds=7 + (late if ahead else -late) * (n == 2)) for n in range(4)]
    run(live(toys, 70))
    assert all(len(toy.met) == 3 for toy in toys)
    assert len({toy.rounds.finished for toy in toys}) == 1
    assert sum(toy.rounds.statistics()["healed"] for toy in toys) >= 1


# One meeting.


@both_forms
def test_crossed_proposals_meet_exactly_once(settings: ToySettings) -> None:
    proposals: list[str] = []

    def listen(sender: str, receiver: str, message: Any) -> Any:
        if isinstance(message, Propose):
            proposals.append(sender)
        return message

    toys = swarm(World(latency_s=0.3, tamper=listen), 2, settings)
    run(live(toys, 30))
    first, second = toys
    assert sorted(proposals) == ["p00", "p01"]
    assert [step.partner for step in first.met] == ["p01"]
    assert [step.partner for step in second.met] == ["p00"]
    assert first.rounds.statistics()["declined"] + second.rounds.statistics()["declined"] == 1
    assert first.slow == second.slow


def test_snapshots_are_kept_while_the_exchange_lasts_longer_than_a_round() -> None:
    world = World(latency_s=5.0)
    patient = replace(SETTINGS, patience=RoundTimeouts(answer_s=20.0), overlap_steps=19)
    toys = [Toy(world, "a", patient, optimum=10.0), Toy(world, "b", patient, optimum=16.0)]
    run(live(toys, 58))
    mean = fmean(trained(20.0, toy.optimum, 20) for toy in toys)
    for toy in toys:
        # Opened at step 20, agreed 10 and 15 s later, over after 40, when the next round was due: nothing is skipped.
        (step,) = toy.events
        assert step is toy.met[0]
        assert step.staleness >= 20
        assert toy.slow == pytest.approx(20.0 - 0.7 * (20.0 - mean), rel=1e-6)


async def test_a_snapshot_is_retaken_while_nobody_comes() -> None:
    world, settings = World(), replace(SETTINGS, overlap_steps=4)
    toys = [Toy(world, "fast", settings), Toy(world, "slow", settings, step_s=1.9)]
    await live(toys, {"fast": 190, "slow": 100})
    for toy in toys:
        assert toy.met
        # Never older than the overlap when the exchange begins, and that takes far less than a step.
        assert max(step.staleness for step in toy.met) <= 4
    assert toys[0].rounds.statistics()["retaken"] >= 12


# What goes wrong.


def isolated(steps: int, optimum: float = 10.0) -> float:
    """The fast weight of a toy that nobody ever disturbed, in float32."""
    fast = torch.full((4,), 20.0)
    for _ in range(steps):
        fast = fast - 0.05 * (fast - optimum)
    return float(fast[0])


def broken_meeting(spoil: str, fate: object, settings: ToySettings = SETTINGS, by: str = "a") -> tuple[Toy, Toy]:
    """Let a and b meet once, and spoil the first message of this kind that `by` sends."""
    spoilt = False

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal spoilt
        if sender == by and type(message).__name__ == spoil and not spoilt:
            spoilt = True
            return fate
        return message

    patient = replace(settings, patience=RoundTimeouts(exchange_s=6.0))
    world = World(tamper=tamper)
    # b opens a little later: it declines at first, and is the asker afterwards.
    first, second = Toy(world, "a", patient), Toy(world, "b", patient, step_s=1.02)
    run(live([first, second], 39))
    assert spoilt
    return first, second


@both_forms
@pytest.mark.parametrize("fate", [CUT, SWALLOW], ids=["cut", "swallowed"])
@pytest.mark.parametrize(
    ("spoil", "by"),
    [
        *(("Propose", "b"), ("Decline", "b"), ("Accept", "a"), ("Weights", "a"), ("Weights", "b")),
        *(("Acknowledge", "b"), ("Acknowledge", "a")),
    ],
)
def test_a_line_lost_in_a_meeting_changes_nothing_but_for_the_asked_whose_last_word_is_lost(
    settings: ToySettings, fate: object, spoil: str, by: str
) -> None:
    settings = replace(settings, patience=replace(settings.patience, sleep_s=100.0))
    toys = broken_meeting(spoil, fate, settings, by)
    for toy in toys:
        # They may meet afterwards; if not, the weights are to the bit those of a replica that met nobody.
        if not toy.met:
            assert float(toy.fast[0]) == isolated(39)
            assert toy.slow == 20.0
        assert toy.rounds.statistics()["engaged"] == 0
    if (spoil, by) == ("Acknowledge", "a"):
        assert [len(toy.met) for toy in toys] == [1, 0]
    else:
        assert toys[0].met == [] or toys[0].slow == toys[1].slow


@both_forms
@pytest.mark.parametrize("holds", ["answers", "meetings", "meetings that it asks for"])
async def test_a_peer_that_holds_others_up_takes_a_tenth_of_their_time(settings: ToySettings, holds: str) -> None:
    """It is there and takes each call; and then it does not answer, or never says what a meeting begins with."""
    world, held = World(), list[str]()
    patience = RoundTimeouts(answer_s=30.0, exchange_s=100.0)
    honest = [Toy(world, name, replace(settings, inner_steps_per_round=10, patience=patience)) for name in "abcd"]
    Toy(world, "holder", settings)

    async def hold(line: Line, accepts: bool) -> None:
        message = await line.receive()
        if accepts:
            await line.send(Accept(round=message.round))
        if not isinstance(message, Decline):
            held.append(line.peer)
            while True:
                await line.receive()

    async def ask_again_and_again(peer: str) -> None:
        while True:
            with suppress(ConnectionError):
                async with world.conversing("holder")(peer) as line:
                    await line.send(Propose(round=1))
                    await hold(line, accepts=False)
            await asyncio.sleep(1.0)

    world.answerers["holder"] = partial(hold, accepts=holds != "answers")
    asks = holds == "meetings that it asks for"
    asking = [asyncio.create_task(ask_again_and_again(toy.name)) for toy in honest if asks]
    try:
        await live(honest, 1100)
    finally:
        for task in asking:
            task.cancel()
    for toy in honest:
        assert 1 <= held.count(toy.name) <= (4 if holds == "answers" else 2)
        assert len(toy.met) >= 80, "of 110 rounds"


@both_forms
@pytest.mark.parametrize("nonsense", [None, 7, Acknowledge(), "Accept"])
def test_nonsense_instead_of_an_answer_or_a_proposal_is_survived(settings: ToySettings, nonsense: object) -> None:
    world = World(tamper=changed("fool", Propose | Accept | Decline, lambda message: nonsense))
    toys = a, b, fool = [Toy(world, name, settings) for name in ("a", "b", "fool")]
    run(live(toys, 100))
    assert fool.met == []
    assert len(a.met) == len(b.met) >= 3


# Alone, skipped, solo.


def test_alone_every_round_is_solo_at_once() -> None:
    (toy,) = swarm(World(), 1)
    run(live([toy], 60))
    assert [step.round for step in toy.solo] == [1, 2, 3]
    assert all(step.staleness == 0 and step.gap is None and step.bytes_sent == 0 for step in toy.solo)
    assert toy.rounds.statistics()["skipped"] == 0


def test_nobody_answers_skip_a_few_times_then_solo() -> None:
    (toy,) = swarm(World(), 1, replace(SETTINGS, skips_before_solo=3))
    toy.stale_list = (Candidate("ghost", 0),)
    run(live([toy], 20 * 10))
    kinds = ["skipped" if isinstance(event, RoundSkipped) else "solo" for event in toy.events]
    # Openings at 20, 40, ...: each skipped round is known when the next opening is due.
    assert kinds == ["skipped"] * 3 + ["solo"] + ["skipped"] * 3 + ["solo"] + ["skipped"]
    assert [event.in_a_row for event in toy.events if isinstance(event, RoundSkipped)] == [1, 2, 3, 1, 2, 3, 1]
    assert toy.rounds.statistics()["unanswered"] > 0
    assert list(toy.rounds.reasons) == ["unanswered"]


# The last round.


async def end_politely(toy: Toy) -> None:
    await toy.rounds.last_round(30.0)
    toy.listed = False


@both_forms
def test_the_last_round_is_met_where_a_partner_is_there(settings: ToySettings) -> None:
    world = World()
    toys = [Toy(world, name, settings, step_s=step_s) for name, step_s in (("a", 1.0), ("b", 1.1))]
    run(live(toys, 32, end_politely))
    a, b = toys
    assert len(a.met) == len(b.met) == 2
    assert a.met[-1].staleness == b.met[-1].staleness == 0
    assert a.slow == b.slow
    assert float(a.fast[0]) == pytest.approx(a.slow, rel=1e-6)
    assert not a.solo


@both_forms
@pytest.mark.parametrize(("listed", "took_s"), [((), 10.0), ((Candidate("ghost", 0),), 40.0)])
async def test_the_last_round_alone_is_solo_at_once_and_otherwise_at_the_deadline(
    settings: ToySettings, listed: tuple[Candidate, ...], took_s: float
) -> None:
    (toy,) = swarm(World(), 1, settings)
    toy.stale_list = listed
    await live([toy], 10, end_politely)
    assert asyncio.get_running_loop().time() == pytest.approx(took_s, abs=0.1)
    assert len(toy.solo) == 1
    assert toy.slow == pytest.approx(20.0 - 0.7 * (20.0 - trained(20.0, 10.0, 10)), rel=1e-6)


async def test_after_the_last_round_every_proposal_is_declined() -> None:
    world = World()
    (toy,) = swarm(world, 1)
    await live([toy], 10, end_politely)
    async with world.conversing("late")("p00") as line:
        await line.send(Propose(round=1))
        answer = await line.receive()
    assert isinstance(answer, Decline)
    assert answer.reason is DeclineReason.LEAVING


@both_forms
def test_the_last_round_waits_for_an_exchange_in_progress(settings: ToySettings) -> None:
    # The exchange has just begun, on both sides, when training ends.
    toys = swarm(World(latency_s=0.3), 2, settings)
    run(live(toys, 21, end_politely))
    a, b = toys
    assert a.slow == b.slow
    # The blocking form's exchange holds all inner steps: nothing is left for a round more, nor for a solo step.
    assert len(a.met) == len(b.met) == (1 if settings.blocking else 2)
    assert a.rounds.statistics()["solo"] == b.rounds.statistics()["solo"] == 0
    assert not a.lost


@both_forms
def test_an_exchange_that_is_not_over_by_the_deadline_is_given_up(settings: ToySettings) -> None:
    async def end(toy: Toy) -> None:
        await toy.rounds.last_round(30.0)
        # Whatever arrives later must change nothing.
        await asyncio.sleep(300.0)

    toys = swarm(World(latency_s=8.0), 2, replace(settings, patience=RoundTimeouts(answer_s=100.0, exchange_s=10.0)))
    run(live(toys, 10, end))
    for toy in toys:
        assert toy.met == []
        assert len(toy.solo) == 1
        assert toy.slow == pytest.approx(20.0 - 0.7 * (20.0 - trained(20.0, 10.0, 10)), rel=1e-6)
        assert float(toy.fast[0]) == pytest.approx(toy.slow, rel=1e-6)
        assert not toy.rounds.statistics()["open"]
