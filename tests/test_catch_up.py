"""A newcomer copies a replica's state, or says why it could not."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from toys import CUT, SWALLOW, Line, World, at_once

from gossip.catch_up import Wanted, catch_up, check_state, donors, serve
from gossip.messages import Busy, Implausible, Offer, Parts, ReplicaState
from noloco_node.sim.clock import run

SLOW = (torch.arange(6.0).reshape(2, 3), torch.ones(4))
MOMENTUM = (torch.zeros(2, 3), torch.full((4,), 0.5))
OPTIMISER = (torch.ones(7), torch.ones(2, 2))
WHOLE = ReplicaState(
    slow=SLOW, momentum=MOMENTUM, optimiser=OPTIMISER, round=3, inner_steps=170, progress=0.25, optimiser_steps=400
)
SLOW_ONLY = replace(WHOLE, momentum=(), optimiser=())


def wanted(parts: Parts) -> Wanted:
    shapes = tuple(torch.empty_like(tensor, device="meta") for tensor in SLOW)
    return Wanted(parts=parts, like=shapes, optimiser_like=OPTIMISER, deadline_s=30.0)


async def provide(parts: Parts) -> ReplicaState:
    await asyncio.sleep(1.0)
    return WHOLE if parts is Parts.ALL else SLOW_ONLY


def donor(giving: Callable[[Parts], Awaitable[ReplicaState]] = provide, at_once: int = 2) -> Callable[[Line], Any]:
    turns = asyncio.Semaphore(at_once)

    async def answer(line: Line) -> None:
        await serve(line, giving, turns, deadline_s=60.0)

    return answer


async def give(state: ReplicaState) -> ReplicaState:
    return state


def copied(world: World, order: list[str], parts: Parts = Parts.ALL) -> ReplicaState:
    return run(catch_up(order, world.conversing("new"), wanted(parts), at_once))


@pytest.mark.parametrize(("parts", "expected"), [(Parts.ALL, WHOLE), (Parts.SLOW, SLOW_ONLY)])
def test_a_newcomer_gets_what_it_asked_for(parts: Parts, expected: ReplicaState) -> None:
    world = World()
    world.answerers["donor"] = donor()
    assert copied(world, ["donor"], parts) is expected


def test_optimiser_tensors_may_be_left_out() -> None:
    world = World()
    bare = replace(WHOLE, optimiser=())
    world.answerers["donor"] = donor(lambda parts: give(bare))
    assert copied(world, ["donor"]) is bare


WRONG = {
    "a missing tensor": replace(WHOLE, slow=SLOW[:1]),
    "a wrong shape": replace(WHOLE, slow=(SLOW[0].T, SLOW[1])),
    "a wrong dtype": replace(WHOLE, slow=(SLOW[0].double(), SLOW[1])),
    "NaN in the slow weights": replace(WHOLE, slow=(SLOW[0], torch.full((4,), math.nan))),
    "infinity in the momentum": replace(WHOLE, momentum=(MOMENTUM[0], torch.full((4,), math.inf))),
    "no momentum": replace(WHOLE, momentum=()),
    "half of the optimiser": replace(WHOLE, optimiser=OPTIMISER[:1]),
    "NaN in the optimiser": replace(WHOLE, optimiser=(OPTIMISER[0], torch.full((2, 2), math.nan))),
    "a negative round": replace(WHOLE, round=-1),
    "progress beyond the end": replace(WHOLE, progress=1.5),
    "progress that is no number": replace(WHOLE, progress=math.nan),
    "negative steps": replace(WHOLE, optimiser_steps=-7),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_cannot_be_right_is_refused_and_the_next_donor_asked(what: str) -> None:
    with pytest.raises(Implausible):
        check_state(WRONG[what], wanted(Parts.ALL))
    world = World()
    world.answerers["liar"] = donor(lambda parts: give(WRONG[what]))
    world.answerers["donor"] = donor()
    assert copied(world, ["liar", "donor"]) is WHOLE


def test_an_export_refuses_what_it_did_not_ask_for() -> None:
    with pytest.raises(Implausible):
        check_state(WHOLE, wanted(Parts.SLOW))


def test_dead_silent_and_confused_donors_cost_only_their_deadline() -> None:
    def tamper(sender: str, receiver: str, message: Any) -> Any:
        if receiver == "silent":
            return SWALLOW
        return {"cut": CUT, "confused": Offer(round=1)}.get(sender, message)

    world = World(tamper=tamper)
    for name in ("cut", "silent", "confused", "donor"):
        world.answerers[name] = donor()

    async def main() -> float:
        order = ["dead", "cut", "silent", "confused", "donor"]
        assert await catch_up(order, world.conversing("new"), wanted(Parts.ALL), at_once) is WHOLE
        return asyncio.get_running_loop().time()

    assert 30.0 < run(main()) < 40.0


def test_nobody_gives_and_the_causes_are_named() -> None:
    world = World(tamper=lambda sender, receiver, message: SWALLOW if receiver == "silent" else message)
    world.answerers["silent"] = donor()
    with pytest.raises(ConnectionRefusedError, match=r"dead is not there.*no complete reply within 30 s"):
        copied(world, ["dead", "silent"])
    with pytest.raises(ConnectionRefusedError, match="none to ask"):
        copied(world, [])


def test_a_busy_donor_serves_all_of_them_in_turn_and_never_too_many_at_once() -> None:
    busy = 0

    def listen(sender: str, receiver: str, message: Any) -> Any:
        nonlocal busy
        busy += isinstance(message, Busy)
        return message

    world = World(tamper=listen)
    copying = most = 0

    async def counted(parts: Parts) -> ReplicaState:
        nonlocal copying, most
        copying += 1
        most = max(most, copying)
        await asyncio.sleep(3.0)
        copying -= 1
        return WHOLE

    world.answerers["donor"] = donor(counted, at_once=2)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                converse = world.conversing(f"new{number}")
                group.create_task(catch_up(["donor"], converse, wanted(Parts.ALL), at_once))

    run(main())
    assert most == 2
    assert busy >= 4


def test_always_busy_is_given_up_after_a_bounded_time() -> None:
    world = World()

    async def busy(line: Line) -> None:
        await line.receive()
        await line.send(Busy(retry_after_s=1e9))

    world.answerers["donor"] = busy

    async def main() -> float:
        with pytest.raises(ConnectionRefusedError, match="busy"):
            await catch_up(["donor"], world.conversing("new"), wanted(Parts.ALL), at_once)
        return asyncio.get_running_loop().time()

    assert 80.0 <= run(main()) < 82.0


def test_a_newcomer_that_says_nothing_or_nonsense_is_given_up() -> None:
    async def main(first: object) -> None:
        world = World()
        outcome: list[BaseException] = []
        giving = donor()

        async def answer(line: Line) -> None:
            try:
                await giving(line)
            except ConnectionAbortedError as loss:
                outcome.append(loss)

        world.answerers["donor"] = answer
        async with world.conversing("new")("donor") as line:
            if first is not None:
                await line.send(first)
            with pytest.raises(ConnectionResetError):
                await line.receive()
        assert len(outcome) == 1

    run(main(None))
    run(main(Offer(round=1)))


def test_newcomers_spread_over_the_donors() -> None:
    replicas = [f"replica{number}" for number in range(5)]
    first = Counter(donors(f"new{number}", replicas, 7)[0] for number in range(1000))
    assert min(first.values()) > 150
    assert len(first) == 5
    order = donors("replica3", replicas, 7)
    assert sorted(order) == sorted(set(replicas) - {"replica3"})
    assert order == donors("replica3", list(reversed(replicas)), 7)
    assert order != donors("replica3", replicas, 8) or donors("new1", replicas, 7) != donors("new1", replicas, 8)
