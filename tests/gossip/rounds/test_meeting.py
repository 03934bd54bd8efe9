"""What rounds do with codecs, delayed momentum, staleness, and slow weights that travel ahead of time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import CUT, SWALLOW, Line, Toy, ToySettings, World, changed, gossiping, honest, live

from gossip.exchange.codec import OwnWeights, encode
from gossip.exchange.messages import (
    NOTHING,
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Probe,
    Propose,
    ProposePrefetch,
    Weights,
)
from gossip.exchange.swap import common_steps
from gossip.interface import Candidate, Origin, PartnerTooStale, RoundSkipped
from gossip.rounds.matching import VAIN_AT_MOST
from gossip.rule.outer_step import Delay, Outer, OuterState, Tensors
from gossip.settings import Format, RoundTimeouts, absolute, wire_bytes
from noloco_node.sim.clock import run
from research.theory.pair_step import outer_step

REFERENCE = Outer(alpha=0.5, beta=0.7, gamma=0.7)
APART = Outer(alpha=0.4, beta=0.7, gamma=0.5)
SETTINGS = ToySettings(seed=3, **REFERENCE._asdict(), inner_steps_per_round=20)
SIZE = 600
codecs = pytest.mark.parametrize("codec", list(Format))
both_forms = pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let partners be of any length: all weights of a toy roll to one number, so what it learns lies along them."""
    monkeypatch.setattr("gossip.exchange.swap.TYPICAL_LENGTH", 1e6)


def drawn(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) + 3.0


def copy_of(state: OuterState) -> OuterState:
    slow, momentum, gathered = (tuple(tensor.clone() for tensor in tensors) for tensors in state[:3])
    return OuterState(slow, momentum, gathered, state.meetings)


def origin(slow: Tensor, *, rounds: int = 0, last_met: int = 0) -> Origin:
    return Origin(OuterState((slow,), (torch.zeros_like(slow),)), rounds=rounds, last_met=last_met)


def aged(slow: Tensor, staleness: int) -> Origin:
    """Return a beginning whose weights will have met nobody for so many rounds when the next one opens."""
    return origin(slow, rounds=20, last_met=21 - staleness)


def pair(settings: ToySettings, world: World, *, apart: float = 0.0) -> tuple[Toy, Toy]:
    """Two toys with many weights and different optima; `apart`: how far their slow weights differ."""
    first, second = (
        Toy(world, name, settings, optimum=optimum, origin=origin(drawn(1) + away * drawn(2)))
        for name, optimum, away in (("a", 1.0, 0.0), ("b", 2.0, apart))
    )
    return first, second


# Codecs.


@both_forms
@codecs
def test_a_pair_uses_what_both_decode(codec: Format, blocking: bool) -> None:
    toys = pair(replace(SETTINGS, codec=codec, blocking=blocking), World())
    run(live(list(toys), 95))
    a, b = toys
    assert len(a.met) == len(b.met) == 4
    # They began alike and have seen the same means: to the bit alike, whatever was rounded.
    assert torch.equal(a.rounds.state.slow[0], b.rounds.state.slow[0])
    assert not torch.equal(a.fast, b.fast)
    probes = 2 if codec is Format.INT4 else 1
    for step in (*a.met, *b.met):
        assert step.bytes_sent == step.bytes_received == wire_bytes(codec, [(SIZE,)]) + probes * 4 * SIZE


@pytest.mark.parametrize("codec", [Format.FLOAT32, Format.INT4])
def test_a_mean_is_weighed_by_the_inner_steps_that_each_brings(codec: Format) -> None:
    def met(lie: int | None, weighs: bool = True) -> tuple[Toy, Toy, dict[str, int]]:
        brought: dict[str, int] = {}

        def tamper(sender: str, receiver: str, message: Any) -> Any:
            if isinstance(message, Probe):
                message = replace(message, inner_steps=lie) if sender == "b" and lie is not None else message
                brought.setdefault(sender, message.inner_steps)
            return message

        a, b = pair(replace(SETTINGS, codec=codec, weigh_by_steps=weighs), World(tamper=tamper))
        b.step_s = 3.0
        run(live([a, b], {"a": 66, "b": 22}))
        return *(a, b), brought

    a, b, brought = met(None)
    assert len(a.met) == len(b.met) == 1
    assert torch.equal(a.rounds.state.slow[0], b.rounds.state.slow[0])
    # The slow one's round comes after sixty steps of the fast one, whose optimum is the lower one.
    assert brought["b"] == 20
    assert 2.5 < brought["a"] / brought["b"] < 3.5
    plain, _, _ = met(None, weighs=False)
    huge, none, nothing = (met(lie)[0].rounds.state.slow[0] for lie in (2**40, 5, 0))
    weighed, even = a.rounds.state.slow[0], plain.rounds.state.slow[0]
    assert weighed.mean() < even.mean() < huge.mean()
    assert torch.equal(none, nothing)  # a claim below a quarter of the partner's counts as that


SPOILS: dict[str, tuple[Format, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]] = {
    "a scale that is none": (Format.INT8, lambda wire: (wire[0], torch.full_like(wire[1], float("nan")))),
    "scales a million times ours": (Format.INT8, lambda wire: (wire[0], wire[1] * 1e6)),
    "half of the codes": (Format.INT8, lambda wire: (wire[0][: SIZE // 2], wire[1])),
    "no codes": (Format.INT4, lambda wire: ()),
    "codes of another form": (Format.INT4, lambda wire: (wire[0].to(torch.int8),)),
    "another shape": (Format.BFLOAT16, lambda wire: (wire[0].reshape(2, -1),)),
    "the other sign": (Format.FLOAT32, lambda wire: (-wire[0],)),
    "noise of our norm": (Format.BFLOAT16, lambda wire: (drawn(9).sub(3.0).mul(3.2).bfloat16(),)),
    "weights far from ours": (Format.FLOAT32, lambda wire: (wire[0] * 9.0,)),
    "NaN": (Format.FLOAT32, lambda wire: (wire[0] * float("nan"),)),
    "infinity": (Format.BFLOAT16, lambda wire: (wire[0] * float("inf"),)),
}


@both_forms
@pytest.mark.parametrize("what", SPOILS)
def test_weights_that_cannot_be_right_change_nothing(what: str, blocking: bool) -> None:
    codec, spoil = SPOILS[what]
    world = World(tamper=changed("b", Weights, lambda message: replace(message, fast=spoil(message.fast))))
    a, b = pair(replace(SETTINGS, codec=codec, skips_before_solo=100, blocking=blocking), world)
    run(live([a, b], 45))
    assert a.met == []
    assert len(a.lost) == a.rounds.statistics()["implausible"] >= 1
    assert all(loss.implausible for loss in a.lost)
    assert torch.equal(a.rounds.state.slow[0], drawn(1))
    assert torch.equal(a.fast, undisturbed(drawn(1), 45, 1.0))
    assert not a.rounds.state.momentum[0].any()


# Delayed momentum.


@hypothesis_settings(max_examples=10)
@given(st.integers(1, 4), st.floats(0.0, 1.0))
def test_rounds_apply_the_joint_rule(period: int, share: float) -> None:
    delay = Delay(period, share / period)
    seen: list[tuple[Tensor, OuterState]] = []

    toy = Toy(
        World(),
        "alone",
        replace(SETTINGS, momentum_period=delay.period, momentum_spread=delay.spread),
        origin=origin(drawn(1)),
    )
    snapshot = toy.snapshot

    async def taken(slow: Tensors) -> Tensors:
        seen.append((toy.fast.clone(), copy_of(toy.rounds.state)))
        return await snapshot(slow)

    toy.snapshot = taken
    run(live([toy], 20 * 6))
    assert len(seen) == len(toy.solo) == 6
    for (fast, before), after in zip(seen, [state for _, state in seen[1:]] + [toy.rounds.state], strict=True):
        expected = outer_step(before, (fast,), before.slow, REFERENCE, delay)
        assert expected.meetings == after.meetings
        for one, other in zip(expected[:3], after[:3], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# Staleness.


async def test_solo_rounds_without_a_meeting_are_counted_and_a_meeting_ends_them() -> None:
    world = World()
    toy, late = (Toy(world, name, replace(SETTINGS, skips_before_solo=2)) for name in ("a", "late"))
    late.listed, seen = False, []
    toy.stale_list = (Candidate("ghost", 0),)
    async with gossiping(toy, late):
        for _ in range(9):
            await toy.train(20)
            seen.append(toy.rounds.statistics()["staleness"])
        toy.stale_list, late.listed = None, True
        await asyncio.gather(toy.train(30), late.train(30))
    # Each opening finds the one before unmet: two skipped rounds in a round of one number, then a solo round, ...
    assert seen == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [step.staleness_rounds for step in toy.solo] == [1, 2, 3][: len(toy.solo)]
    assert sum(isinstance(event, RoundSkipped) for event in toy.events) + len(toy.solo) >= 8
    (met,) = toy.met
    # Neither has ever met anybody.
    assert met.staleness_rounds == met.partner_staleness > 1
    assert toy.rounds.slow_age.last_met == met.staleness_rounds


@both_forms
@pytest.mark.parametrize("codec", [Format.FLOAT32, Format.INT8, Format.INT4])
@pytest.mark.parametrize("outer", [REFERENCE, APART], ids=["fast", "fast and slow"])
def test_the_stale_one_adopts_and_the_fresh_one_goes_on(codec: Format, outer: Outer, blocking: bool) -> None:
    world = World()
    settings = replace(SETTINGS, codec=codec, **outer._asdict(), blocking=blocking, staleness_at_most=5)
    toys = [
        Toy(world, "fresh", settings, origin=aged(drawn(1), 5)),
        Toy(world, "stale", settings, optimum=9.0, origin=aged(drawn(1) + 2.0, 6)),
    ]
    run(live(toys, 22))
    fresh, stale = toys
    (step,) = stale.met
    assert step.adopted
    assert (step.staleness_rounds, step.partner_staleness) == (6, 5)
    # It has met the fresh one, which brings its inner steps to another meeting.
    ((partner, theirs, ours),) = stale.saw
    assert (partner, theirs, fresh.saw) == ("fresh", 0, [])
    assert ours >= 20
    (event,) = fresh.events
    assert isinstance(event, PartnerTooStale)
    assert (event.partner, event.partner_staleness) == ("stale", 6)
    assert fresh.rounds.statistics()["open"] == 1
    assert fresh.rounds.statistics()["too_stale"] == stale.rounds.statistics()["adopted"] == 1
    # Nothing of the fresh one has moved; the stale one is where it is, its momentum at rest, and as stale as it.
    assert torch.equal(fresh.rounds.state.slow[0], drawn(1))
    assert torch.equal(fresh.fast, undisturbed(drawn(1), 22, 10.0))
    # The blocking form takes its snapshot when the inner step under way has ended.
    theirs = drawn(1) if outer is APART else undisturbed(drawn(1), 21 if blocking else 20, 10.0)
    # As absolute as the codec can: a 2^-8 of weights up to 10, whatever the distance.
    assert torch.allclose(stale.rounds.state.slow[0], theirs, atol=0.0 if codec is Format.FLOAT32 else 0.05)
    assert not stale.rounds.state.momentum[0].any()
    assert stale.rounds.slow_age.last_met == 16
    # The stale one's weights stay at home; slow ones have travelled ahead both ways.
    assert step.bytes_received - step.bytes_sent == wire_bytes(absolute(codec), [(SIZE,)])


@both_forms
@codecs
@pytest.mark.parametrize("outer", [REFERENCE, APART], ids=["fast", "fast and slow"])
def test_a_stale_one_does_not_go_back_to_weights_behind_its_own(codec: Format, outer: Outer, blocking: bool) -> None:
    """It may have missed a round, and yet know more than the first partner that it meets, which may be a liar."""
    world = World()
    settings = replace(SETTINGS, codec=codec, **outer._asdict(), blocking=blocking, staleness_at_most=5)
    begin = {"behind": (drawn(1) - 1.5, 0.5, 5), "ahead": (drawn(1) + 3.0, 9.0, 5), "stale": (drawn(1), 9.0, 6)}
    for name, (slow, optimum, age) in begin.items():
        Toy(world, name, settings, optimum=optimum, origin=aged(slow, age))
    run(live(list(world.toys.values()), 60))
    stale = world.toys["stale"]
    adopted = [step.partner for step in stale.met if step.adopted]
    assert adopted == ["ahead"]
    assert not any(loss.implausible for loss in stale.lost)
    assert all(loss.partner == "behind" for loss in stale.lost if "go back" in loss.why)


@pytest.mark.parametrize("disowned", [False, True])
def test_whoever_disowns_its_weights_takes_the_partners_however_unlike(disowned: bool) -> None:
    world, settings = World(), replace(SETTINGS, staleness_at_most=5)
    start = torch.linspace(1.0, 2.0, SIZE)
    toys = [
        Toy(world, "honest", settings, optimum=9.0, origin=origin(start, rounds=9, last_met=9)),
        Toy(world, "newcomer", settings, optimum=-9.0, origin=origin(-start, rounds=9, last_met=9)),
    ]
    if disowned:
        toys[1].rounds.disown()
    run(live(toys, 25))
    honest, newcomer = toys
    assert not honest.met or not disowned
    assert [step.adopted for step in newcomer.met] == ([True] if disowned else [])
    if disowned:
        assert (newcomer.rounds.state.slow[0] > 0.0).all()
        assert newcomer.rounds.slow_age.last_met == 9


@pytest.mark.parametrize(("rounds", "during_meeting"), [(40, False), (40, True), (2, False), (2, True)])
async def test_disowned_weights_are_given_up_for_a_partners_whenever_they_were_disowned(
    rounds: int, during_meeting: bool
) -> None:
    """In the run's first rounds nobody is beyond the bound, and a meeting that has begun ends in a mean."""
    world, settings = World(latency_s=0.6), replace(SETTINGS, staleness_at_most=16, inner_steps_per_round=20)
    start = torch.linspace(1.0, 2.0, SIZE)
    toys = [
        Toy(world, "honest", settings, optimum=9.0, origin=origin(start, rounds=rounds, last_met=rounds)),
        Toy(world, "newcomer", settings, optimum=9.0, origin=origin(start + 0.5, rounds=rounds, last_met=rounds)),
    ]

    async def judge() -> None:
        while during_meeting and toys[1].rounds.view.meeting_partner is None:  # noqa: ASYNC110 - the time is virtual
            await asyncio.sleep(0.1)
        toys[1].rounds.disown()

    judging = asyncio.create_task(judge())
    await live(toys, 100)
    await judging
    _, newcomer = toys
    adopted = [step.adopted for step in newcomer.met]
    assert adopted[: 1 + during_meeting] == [False, True][1 - during_meeting :]
    assert sum(adopted) == 1
    assert not newcomer.rounds.disowned
    assert newcomer.rounds.slow_age.last_met > rounds


def undisturbed(start: Tensor, steps: int, optimum: float) -> Tensor:
    for _ in range(steps):
        start = start - 0.05 * (start - optimum)
    return start


UNASKED: dict[str, tuple[Outer, tuple[int, int], Callable[[Weights], Weights], str]] = {
    "slow ones beside fast ones": (REFERENCE, (1, 1), lambda sent: replace(sent, slow=sent.fast), "does not need"),
    "no slow ones": (APART, (1, 1), lambda sent: replace(sent, slow=()) if sent.fast else sent, "no slow weights"),
    "its own, though it adopts": (REFERENCE, (5, 6), lambda sent: replace(sent, fast=(drawn(2),)), "too stale"),
    "two sets to adopt": (REFERENCE, (6, 5), lambda sent: replace(sent, slow=sent.fast), "two sets"),
}


@both_forms
@pytest.mark.parametrize("what", UNASKED)
def test_weights_that_the_rule_does_not_ask_for_change_nothing(what: str, blocking: bool) -> None:
    outer, ages, spoil, why = UNASKED[what]

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        if isinstance(message, ProposePrefetch):
            return CUT  # or slow weights travel before the meeting
        return spoil(message) if sender == "b" and isinstance(message, Weights) else message

    settings = replace(SETTINGS, **outer._asdict(), skips_before_solo=100, blocking=blocking, staleness_at_most=5)
    world = World(tamper=tamper)
    a, b = (Toy(world, name, settings, origin=aged(drawn(1), age)) for name, age in zip("ab", ages, strict=True))
    run(live([a, b], 30))
    assert a.met == []
    assert a.lost
    assert all(loss.implausible and why in loss.why for loss in a.lost)
    assert a.rounds.reasons["lost"] == a.lost[-1].why
    assert a.rounds.statistics().get("too_stale", 0) == 0, "nothing was lent for good"
    assert torch.equal(a.rounds.state.slow[0], drawn(1))


@both_forms
@pytest.mark.parametrize("breaks", [False, True], ids=["too stale", "breaks off"])
async def test_whoever_had_meetings_enough_in_this_round_has_no_other(breaks: bool, blocking: bool) -> None:
    """Otherwise somebody who claims to be too stale could have all our weights sent again and again."""
    world, said, accepted = World(), [], 0
    settings = replace(SETTINGS, staleness_at_most=3, skips_before_solo=100, blocking=blocking)
    toy = Toy(world, "a", settings, origin=aged(drawn(1), 1))
    toy.stale_list = (Candidate("stranger", 20),)
    claim = Probe(round=20, last_met=0, version=0, holds=NOTHING, slow=drawn(1), fast=None)

    async def hammer() -> None:
        nonlocal accepted
        while True:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(5.0), world.conversing("stranger")("a") as line:
                    await line.send(Propose(round=20))
                    reply = await line.receive()
                    if isinstance(reply, Decline):
                        said.append(reply.reason)
                    elif not breaks:
                        accepted += 1
                        for message in (claim, Weights(fast=(), slow=()), Acknowledge()):
                            await line.send(message)
                            await line.receive()
                    else:
                        accepted += 1
            await asyncio.sleep(0.1)

    hammering = asyncio.create_task(hammer())
    await toy.train(20 * 4 + 19)
    hammering.cancel()
    opened = 4
    record_timeout = VAIN_AT_MOST * opened
    assert accepted == record_timeout
    assert len(toy.lost) == (record_timeout if breaks else 0)
    assert toy.rounds.statistics()["too_stale"] == (0 if breaks else record_timeout)
    assert said.count(DeclineReason.MET) > 10 * opened


# Ahead of time.


def swarm(world: World, settings: ToySettings, count: int) -> list[Toy]:
    return [
        Toy(world, f"p{number}", settings, optimum=1.0 + number, origin=origin(drawn(1) + 0.1 * drawn(number)))
        for number in range(count)
    ]


def slow_of(toys: list[Toy]) -> list[Tensor]:
    return [toy.rounds.state.slow[0] for toy in toys]


@pytest.mark.parametrize("codec", [Format.FLOAT32, Format.INT8, Format.INT4])
def test_slow_weights_travel_ahead_and_not_again(codec: Format) -> None:
    """The meetings come to the same as without it, and hardly one has to send slow weights."""

    def lived(tamper: Callable[[str, str, Any], Any]) -> list[Toy]:
        toys = swarm(World(tamper=tamper), replace(SETTINGS, **APART._asdict(), codec=codec), 4)
        run(live(toys, 20 * 6 + 5))
        return toys

    with_it = lived(honest)
    without = lived(lambda sender, receiver, message: SWALLOW if isinstance(message, ProposePrefetch) else message)
    coded = wire_bytes(codec, [(SIZE,)])
    for toy in with_it:
        statistics = toy.rounds.statistics()
        assert statistics["spared"] == len(toy.met) == 6
        # The next round's have travelled too.
        assert statistics["sent_ahead"] == 7
        assert toy.idle_s < 1e-6
        # Two sets a round, whichever way they went.
        assert all(2 * coded < step.bytes_sent < 2 * coded + 3 * 4 * SIZE + 1 for step in toy.met)
    for toy in without:
        assert toy.rounds.statistics()["spared"] == 0
        assert len(toy.met) == 6
    assert all(torch.equal(x, y) for x, y in zip(slow_of(with_it), slow_of(without), strict=True))


@pytest.mark.parametrize("fate", [CUT, SWALLOW], ids=["cut", "swallowed"])
@pytest.mark.parametrize("number", range(9))
def test_whatever_breaks_ahead_the_meeting_mends(number: int, fate: object) -> None:
    """The n-th message that anybody sends is lost: it is one of those ahead of the first round."""
    sent = 0

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal sent
        sent += 1
        return fate if sent == number + 1 else message

    def slow_after(tamper: Callable[[str, str, Any], Any]) -> list[Tensor]:
        async def main() -> list[Tensor]:
            settings = replace(SETTINGS, **APART._asdict(), patience=RoundTimeouts(exchange_s=4.0))
            toys = list(pair(settings, World(tamper=tamper), apart=0.1))
            await live(toys, 25)
            assert all(len(toy.met) == 1 for toy in toys)
            assert all(toy.rounds.statistics()["lost"] == 0 for toy in toys)
            return slow_of(toys)

        return run(main())

    assert all(torch.equal(x, y) for x, y in zip(slow_after(tamper), slow_after(honest), strict=True))
    assert sent > 9


@pytest.mark.parametrize("hanging", [Accept, Probe])
def test_a_meeting_does_not_count_on_what_a_swap_under_way_replaces(
    hanging: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first swap reaches one side only; the second one, of the same weights, lasts beyond the round's opening."""
    asked, swaps, held, send, opened = "", 0, list[int](), Line.send, asyncio.Event()

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal asked, swaps
        if isinstance(message, Accept) and message.round == 0:
            asked, swaps = sender, swaps + 1
        elif isinstance(message, Probe) and message.round == 1:
            held.append(message.holds)
            opened.set()
        first_lost = isinstance(message, Weights) and not message.fast and sender == asked
        return SWALLOW if first_lost else message

    async def send_late(line: Line, message: Any) -> None:
        if isinstance(message, hanging) and message.round == 0 and swaps == 1 + (hanging is Probe):
            await opened.wait()
        await send(line, message)

    monkeypatch.setattr(Line, "send", send_late)
    settings = replace(SETTINGS, **APART._asdict(), patience=RoundTimeouts(answer_s=60.0, exchange_s=60.0, sleep_s=1.0))
    toys = pair(settings, World(tamper=tamper), apart=0.1)
    run(live(list(toys), 23))
    for toy in toys:
        assert (len(toy.met), toy.lost) == (1, [])
    assert held[:2] == [NOTHING, NOTHING]


async def test_a_swap_is_declined_while_it_makes_no_sense() -> None:
    world, said = World(), []
    toys = [Toy(world, name, replace(SETTINGS, **outer._asdict())) for name, outer in (("a", APART), ("b", REFERENCE))]
    toys[0].stale_list = (Candidate("somebody", 0),)
    for name in ("a", "b"):
        async with world.conversing("stranger")(name) as line:
            await line.send(ProposePrefetch())
            said.append(await line.receive())
    assert all(isinstance(answer, Decline) for answer in said)


async def swap_in_vain(line: Line, probe: Probe) -> None:
    """Agree on a swap ahead of time, take what comes, and give nothing."""
    await line.send(ProposePrefetch())
    if isinstance(await line.receive(), Accept):
        await line.send(probe)
        await line.receive()
        await line.receive()


async def test_a_stranger_is_given_slow_weights_twice_at_most_and_it_is_counted() -> None:
    world, given = World(), 0

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal given
        given += isinstance(message, Weights) and receiver == "stranger"
        return message

    world.tamper = tamper
    toy = Toy(world, "a", replace(SETTINGS, **APART._asdict(), skips_before_solo=1), origin=origin(drawn(1)))
    toy.stale_list = (Candidate("stranger", 0),)
    probe = Probe(round=0, last_met=0, version=0, holds=NOTHING, slow=drawn(1), fast=None)

    async def hammer() -> None:
        while True:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1.0), world.conversing("stranger")("a") as line:
                    await swap_in_vain(line, probe)
            await asyncio.sleep(0.1)

    hammering = asyncio.create_task(hammer())
    await toy.train(64)
    hammering.cancel()
    assert len(toy.solo) == 1
    assert given == 2
    # Each time a probe and a set of weights.
    assert toy.solo[0].bytes_sent == 2 * (4 * SIZE + 4 * SIZE)
    assert toy.rounds.statistics()["sent_ahead"] == 0


def test_weights_ahead_that_cannot_be_right_are_a_violation() -> None:
    lie = changed("b", Weights, lambda message: replace(message, slow=(message.slow[0] * 1e6,)))
    a, b = pair(replace(SETTINGS, **APART._asdict()), World(tamper=lie), apart=0.1)
    run(live([a, b], 18))
    assert a.lost
    assert all(loss.implausible and loss.partner == "b" for loss in a.lost)
    statistics = a.rounds.statistics()
    assert (statistics["implausible"], statistics["unanswered"]) == (len(a.lost), 0)


@pytest.mark.parametrize("codec", [Format.FLOAT32, Format.INT8, Format.INT4])
def test_slow_weights_other_than_those_sent_ahead_are_checked_and_bounded_like_any(codec: Format) -> None:
    ahead, probes = 0, dict[str, Tensor]()
    far = encode(codec, OwnWeights((9.0 * drawn(1),))).coded.wire if codec is not Format.INT4 else ()

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal ahead
        if isinstance(message, Probe):
            probes[sender] = message.slow
        if sender == "b" and isinstance(message, Weights):
            ahead += not message.fast
            return replace(
                message,
                slow=far or (torch.full((SIZE // 2,), 0x88, dtype=torch.uint8),) if message.fast else message.slow,
            )
        return message

    def after(tamper: Callable[[str, str, Any], Any]) -> Toy:
        a, b = pair(replace(SETTINGS, **APART._asdict(), codec=codec), World(tamper=tamper), apart=0.1)
        run(live([a, b], 25))
        return a

    liars, honests = after(tamper), after(honest)
    assert ahead
    moved = float((liars.rounds.state.slow[0] - honests.rounds.state.slow[0]).abs().max())
    if codec is Format.INT4:
        # Whatever the codes are, each value is within eight steps of ours.
        assert 0.0 < moved <= 16 * common_steps(probes["a"], probes["b"], [SIZE])[0]
    else:
        assert liars.met == []
        assert liars.lost
        assert torch.equal(liars.rounds.state.slow[0], drawn(1))


# What goes wrong at home.


@codecs
@both_forms
async def test_weights_of_ours_that_are_not_finite_cost_the_meeting_and_not_the_node(
    codec: Format, blocking: bool
) -> None:
    a, b = pair(replace(SETTINGS, codec=codec, blocking=blocking), World())

    async def poison() -> None:
        await asyncio.sleep(10.2)
        a.fast[0] = torch.nan

    poisoning = asyncio.create_task(poison())
    await live([a, b], 45)
    await poisoning
    assert a.met == b.met == []
    assert {(loss.why.split(":")[0], loss.implausible) for loss in a.lost} == {
        ("our own weights are not finite", False)
    }
    # The partner is left, and blames nobody.
    assert b.lost
    assert not any(loss.implausible for loss in b.lost)


def test_a_gate_of_ours_that_does_not_drain_is_named() -> None:
    a, b = pair(replace(SETTINGS, blocking=True), World())

    @asynccontextmanager
    async def stuck(retry_after_s: float) -> AsyncIterator[None]:
        await asyncio.sleep(3)
        raise TimeoutError
        yield

    b.alone = stuck
    run(live([a, b], 45))
    assert a.met == b.met == []
    assert b.lost
    assert all("our own gate" in loss.why for loss in b.lost)
    assert not any("our own gate" in loss.why for loss in a.lost)


# Slow lines.


@both_forms
def test_an_exchange_that_runs_out_of_time_has_more_next_time_unless_work_stands_still(blocking: bool) -> None:
    slow = RoundTimeouts(answer_s=60.0, exchange_s=4.0, sleep_s=5.0)
    toys = pair(replace(SETTINGS, blocking=blocking, patience=slow), World(latency_s=2.5))
    run(live(list(toys), 300))
    for toy in toys:
        assert toy.lost, "the first ran out of it"
        assert bool(toy.met) != blocking
        if not blocking:
            assert len(toy.met) >= 3


@both_forms
def test_whoever_has_given_a_meeting_up_acknowledges_nothing(blocking: bool) -> None:
    """Else the partner would take the step alone. The last round gives a meeting up that takes too long."""
    given_up: list[str] = []
    askers: list[str] = []

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        if isinstance(message, Accept):
            askers.append(receiver)
        if isinstance(message, Weights) and receiver == askers[0] and not given_up:
            given_up.append(receiver)
            toys[receiver].rounds._round_state.end_meeting()
        return message

    toys = {toy.name: toy for toy in pair(replace(SETTINGS, blocking=blocking), World(tamper=tamper))}
    run(live(list(toys.values()), 30))
    assert len(given_up) == 1
    first, second = toys.values()
    assert len(first.met) == len(second.met) == 1, "they meet once more, and step together"


@given(st.lists(st.booleans(), max_size=30), st.booleans())
def test_the_time_of_an_exchange_is_bounded_whatever_befalls_it(fates: list[bool], blocking: bool) -> None:
    round_state = pair(replace(SETTINGS, blocking=blocking), World())[0].rounds._round_state
    base_s = SETTINGS.patience.exchange_s
    for late in fates:
        before_s = round_state.exchange_s
        round_state.note_exchange(late=late)
        assert base_s <= round_state.exchange_s <= (base_s if blocking else 16 * base_s)
        if not blocking:
            assert (round_state.exchange_s >= before_s) if late else (round_state.exchange_s <= before_s)


class Watched:
    """A timing that allows what it is told to, and notes what it learns."""

    def __init__(self, allowed_s: float) -> None:
        self.allowed_s, self.times, self.vain = allowed_s, list[float](), 0

    def deadline_s(self, peer: str, /) -> float:
        return self.allowed_s

    def took(self, peer: str, seconds: float, /) -> None:
        self.times.append(seconds)

    def record_timeout(self, peer: str, begun_s: float, now_s: float, /) -> None:
        self.vain += 1
        self.allowed_s *= 2.0


async def test_an_answer_is_awaited_for_as_long_as_the_shell_says() -> None:
    world = World(latency_s=4.0)
    toys = pair(SETTINGS, world)
    timings = []
    for toy in toys:
        timings.append(Watched(3.0))
        toy.rounds._meetings._context = replace(toy.rounds._meetings._context, answers=timings[-1])
    await live(list(toys), 200)
    assert all(toy.met for toy in toys)
    assert 1 <= max(timing.vain for timing in timings) <= 4
    assert any(timing.times and min(timing.times) >= 8.0 for timing in timings), "five seconds would not do"


@pytest.mark.parametrize("partitioned", [True, False])
async def test_a_dial_that_nobody_takes_leaves_nobody_alone(partitioned: bool) -> None:
    """A partition heals at once: the ordinary 20 seconds later, whoever was out of reach is asked again."""
    world = World()
    asker, asked = pair(replace(SETTINGS, patience=RoundTimeouts(answer_s=60.0)), world)
    Toy(world, "third", SETTINGS)
    protocol = asker.rounds._meetings
    round_state = asker.rounds._round_state

    @asynccontextmanager
    async def converse(peer: str) -> AsyncIterator[Line]:
        if partitioned:
            await asyncio.sleep(100.0)
        async with world.conversing(asker.name)(peer) as line:
            yield line

    async def hold(line: Line) -> None:
        await asyncio.sleep(100.0)

    world.answerers[asked.name] = hold
    protocol._context = replace(protocol._context, converse=converse)
    for _ in range(2):
        round_state.begin_round(last=False)
        await protocol._ask(asked.name)
    round_state.begin_round(last=False)
    assert (round_state.queue.next([asked.name], asyncio.get_running_loop().time())[0] is None) == (not partitioned)
