"""Refusals that come late: the seconds for which a replica held a microbatch count, whatever it answers."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.messages import Gradient, Microbatch, Reason, Refused, Reply
from pipeline.next_stage import NextStage, NextStageClient
from pipeline.routing import SHORTEST_LATE_S, TIMES_COST, Hop, Standing

HIDDEN = torch.zeros(1, 2, 3)
MICROBATCH = Microbatch(hidden=HIDDEN, targets=torch.zeros(1, 2, dtype=torch.int64), progress=0.1, budget_s=600.0)
GRADIENT = Gradient(hidden=HIDDEN, loss=1.0, tokens=2)
REPLY_S = 1.0
BEGINS_S = 20.0
"""When replicas begin to refuse: until then all work."""

Act = Callable[[str], tuple[float, Reply]]
"""How long a replica takes from `BEGINS_S` on, and what it answers."""


def works(_: str) -> tuple[float, Reply]:
    return REPLY_S, GRADIENT


class Sender:
    """A sender with some microbatches in flight, whose next stage consists of a, b, c and d."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.accused = set[str]()
        hops = tuple([Hop(peer) for peer in "abcd"])
        self.next_stage = NextStage(NextStageClient(hops=lambda: hops, call=self.call), Random("late"))

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        began = asyncio.get_running_loop().time() >= BEGINS_S
        took_s, reply = self.act(peer) if began else works(peer)
        await asyncio.sleep(took_s)
        return reply

    async def until(self, end_s: float, in_flight: int) -> int:
        """Return how many gradients came until then."""
        loop, came = asyncio.get_running_loop(), 0

        async def keep_asking() -> None:
            nonlocal came
            while loop.time() < end_s:
                reply = await self.next_stage.ask(MICROBATCH, loop.time() + 600.0)
                came += isinstance(reply, Gradient)
                self.accused |= self.next_stage.suspects

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(keep_asking())
        return came


END_S = 220.0


@settings(max_examples=20)
@given(
    hold_s=st.floats(0.1, 9.0),
    share=st.sampled_from([0.2, 0.5, 1.0]),
    reason=st.sampled_from([Reason.FULL, Reason.GOSSIPING, Reason.NO_ROUTE, Reason.LEAVING]),
    in_flight=st.integers(1, 6),
)
async def test_who_holds_microbatches_before_it_refuses_costs_a_sender_a_sixth_at_most(
    hold_s: float, share: float, reason: Reason, in_flight: int
) -> None:
    """Also if it works in between; the others have room for all."""
    rng = Random(1)

    def act(peer: str) -> tuple[float, Reply]:
        holds = peer == "d" and rng.random() < share
        return (hold_s, Refused(reason=reason)) if holds else works(peer)

    sender = Sender(act)
    came, accused = await sender.until(END_S, in_flight), sender.accused
    least = 5 / 6 if hold_s > 1.1 * REPLY_S else 0.7
    assert came >= least * in_flight * (END_S - hold_s) / REPLY_S
    assert accused == {"d"} or accused == set()
    if share == 1.0 and hold_s > 1.1 * REPLY_S:
        assert accused == {"d"}


@pytest.mark.parametrize("hold_s", [0.3, 0.9])
@pytest.mark.parametrize("in_flight", [1, 4])
async def test_who_holds_each_microbatch_for_less_than_a_gradient_takes_costs_a_twentieth_at_most(
    hold_s: float, in_flight: int
) -> None:
    sender = Sender(lambda peer: (hold_s, Refused(reason=Reason.FULL)) if peer == "d" else works(peer))
    came = await sender.until(END_S, in_flight)
    assert came >= 0.95 * in_flight * END_S / REPLY_S
    assert not sender.accused


def test_who_refuses_again_without_work_is_left_alone_for_ten_times_what_that_took() -> None:
    hops = (Hop("a"), Hop("b"))
    standing = Standing(lambda: hops)
    assert standing.least_rest_s("a", 0.4) == 0.0, "one refusal says little"
    assert standing.least_rest_s("a", 0.4) == 0.0, "no other replica works"
    standing.succeed("b", 1.0)
    assert standing.least_rest_s("a", 0.4) == pytest.approx(TIMES_COST * 1.2)
    assert standing.least_rest_s("a", 0.1) == 0.0, "it was quick"
    standing.succeed("a", 1.0)
    standing.succeed("b", 1.0)
    assert standing.least_rest_s("a", 0.4) == 0.0, "it has worked"


@given(took_s=st.floats(0.0, 0.99), reason=st.sampled_from([Reason.FULL, Reason.GOSSIPING, Reason.LEAVING]))
@settings(max_examples=15)
async def test_who_refuses_sooner_than_a_gradient_comes_is_not_accused(took_s: float, reason: Reason) -> None:
    """Its line may be slow, and it may be busy for long."""
    rng = Random(2)

    def act(peer: str) -> tuple[float, Reply]:
        return (took_s * REPLY_S, Refused(reason=reason)) if peer in "cd" and rng.random() < 0.8 else works(peer)

    sender = Sender(act)
    await sender.until(100.0, 4)
    assert sender.accused == set()


@pytest.mark.parametrize("took_s", [2.0, 9.0, 30.0])
async def test_nobody_is_accused_for_what_a_later_stage_refuses_to_all(took_s: float) -> None:
    outage = (BEGINS_S, BEGINS_S + 100.0)

    def act(_: str) -> tuple[float, Reply]:
        is_out = outage[0] + REPLY_S <= asyncio.get_running_loop().time() < outage[1]
        return (took_s, Refused(reason=Reason.NO_ROUTE)) if is_out else works("")

    sender = Sender(act)
    came = await sender.until(outage[1] + 50.0 + took_s, 2)
    assert not sender.accused
    assert came >= 2 * 60


async def test_one_whose_later_stage_fails_it_seldom_is_excused_by_its_work() -> None:
    turns = iter(range(10**9))

    def act(peer: str) -> tuple[float, Reply]:
        if peer != "d" or next(turns) % 50:
            return works(peer)
        return 4.0, Refused(reason=Reason.NO_ROUTE)

    sender = Sender(act)
    await asyncio.wait_for(sender.until(600.0, 8), 1000.0)
    assert next(turns) > 500
    assert not sender.accused


@given(story=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0.01, 60.0)), max_size=60))
def test_of_a_replicas_time_a_tenth_may_be_excused_while_another_works(story: list[tuple[str, bool, float]]) -> None:
    hops = (Hop("a"), Hop("b"))
    standing, worked_s, excused_s = Standing(lambda: hops), 0.0, 0.0
    for peer, gradient, took_s in story:
        before = standing.by_others(peer)
        standing.succeed("b", 0.2)  # meanwhile
        if gradient or peer == "b":
            standing.succeed(peer, took_s)
            worked_s += took_s if peer == "a" else 0.0
        elif took_s > max(SHORTEST_LATE_S, standing.usual_s):
            excused_s += took_s if standing.excuses("a", took_s, before) else 0.0
        else:
            assert standing.excuses("a", took_s, before), "it is not late"
    assert TIMES_COST * excused_s <= worked_s + 1e-9
