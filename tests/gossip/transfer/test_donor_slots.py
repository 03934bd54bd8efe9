"""A donor's places: nobody has one for good who takes nothing, and nobody loses one while nobody waits."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_copies import SHAPES, Giving, copy_from, same, state
from toy_gossip import Line, World

from gossip.exchange.messages import Busy, Manifest, Parts, Piece, PieceRequest, Section, StateRequest
from gossip.transfer.chunks import cut
from gossip.transfer.donor import LEAST_PACE, NEWCOMERS, SETTLING_S, TURNS, DonorLimits, DonorSlot, DonorSlots, overdue

SPANS = cut([4 * math.prod(shape) for shape in SHAPES])
WHOLE = state()
TERMS = DonorLimits(deadline_s=8 * 3600.0, piece_s=600.0)

visits = st.builds(
    DonorSlot,
    since_s=st.one_of(st.none(), st.floats(0.0, 1000.0)),
    given_bytes=st.integers(0, 1000),
    total_bytes=st.just(1000),
)


@given(st.lists(visits, max_size=4), st.floats(1.0, 5000.0), st.floats(1000.0, 10_000.0))
def test_only_who_is_slow_or_has_had_a_turn_is_overdue_and_the_slowest_first(
    there: list[DonorSlot], turn_s: float, now_s: float
) -> None:
    found = overdue(there, turn_s, now_s)
    for visit in there:
        age_s = -math.inf if visit.since_s is None else now_s - visit.since_s
        slow = age_s > SETTLING_S and visit.given_bytes / 1000 / age_s < LEAST_PACE / turn_s
        if slow or age_s > turn_s:
            assert found.pace(now_s) <= visit.pace(now_s)
        else:
            assert found is not visit


@given(st.floats(0.0, 1e9), st.floats(2.0, 100.0))
def test_who_has_just_come_is_not_slow_whatever_the_clock_says(since_s: float, turns: float) -> None:
    visit = DonorSlot(since_s=since_s, total_bytes=1000)
    for age_s, displaced in ((SETTLING_S - 1.0, None), (SETTLING_S + 1.0, visit)):
        assert overdue([visit], turns * SETTLING_S, since_s + age_s) is displaced


async def test_a_place_is_given_back_once_and_by_its_own_visit() -> None:
    """A newcomer that lost its place and comes again at once has another one, which its old streams leave alone."""
    places = DonorSlots(turn_s=10.0)
    began, ended = asyncio.Event(), list[BaseException]()

    async def stay(peer: str) -> None:
        visit = places.enter(peer)
        visit.begin(100)
        began.set()
        try:
            async with places.turn(peer, visit):
                await asyncio.sleep(1e6)
        except ConnectionAbortedError as displaced:
            ended.append(displaced)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stay(f"slow{number}")) for number in range(NEWCOMERS)]
        await asyncio.sleep(11.0)
        third = group.create_task(stay("third"))
        await asyncio.sleep(0.1)
        assert (len(places), places.displaced) == (NEWCOMERS, 1)
        assert len(ended) == 1
        assert places.enter("slow0") is not None, "the other one has had its turn as well"
        await asyncio.sleep(0.1)
        for task in (*tasks, third):
            task.cancel()
    assert len(ended) == 2


async def _drip(world: World, name: str, every_s: float, pieces: list[int]) -> None:
    """Take a donor's place, and one small piece after the other very slowly, for ever."""
    while True:
        try:
            async with world.conversing(name)("donor") as line:
                await line.send(StateRequest(parts=Parts.ALL))
                found = await line.receive()
                while isinstance(found, Manifest):
                    await asyncio.sleep(every_s)
                    await line.send(PieceRequest(snapshot=found.snapshot, section=Section.SLOW, number=len(SPANS) - 1))
                    if isinstance(await line.receive(), Piece):
                        pieces.append(1)
        except ConnectionError:
            pass
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("every_s", [1e9, 60.0])
async def test_newcomers_that_hold_all_places_and_take_next_to_nothing_keep_nobody(every_s: float) -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE, TERMS)
    pieces: list[int] = []
    slow = [asyncio.create_task(_drip(world, f"slow{n}", every_s, pieces)) for n in range(NEWCOMERS)]
    await asyncio.sleep(2 * SETTLING_S)
    assert giving.donor.statistics()["visitors"] == NEWCOMERS
    begun_s = asyncio.get_running_loop().time()
    assert same(await copy_from(world, ["donor"], None, "honest"), WHOLE)
    took_s = asyncio.get_running_loop().time() - begun_s
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
    assert giving.donor.statistics()["displaced"] > 0
    assert every_s > 1e6 or pieces
    assert (took_s) < 2 * SETTLING_S


async def test_a_slow_line_keeps_its_place_for_its_turn_and_for_as_long_as_nobody_waits() -> None:
    world = World()
    terms = DonorLimits(deadline_s=TURNS * 400.0, piece_s=600.0)
    giving = Giving(world, "donor", WHOLE, terms)

    async def answer(line: Line) -> None:
        send = line.send

        async def slowly(message: object) -> None:
            if isinstance(message, Piece) and line.peer.startswith("slow"):
                # So that a whole copy takes two turns, over four streams.
                await asyncio.sleep(2 * 400.0 / len(SPANS))
            await send(message)

        line.send = slowly
        await giving.donor.serve(line)

    world.answerers["donor"] = answer
    begun_s = asyncio.get_running_loop().time()
    copies = [asyncio.create_task(copy_from(world, ["donor"], None, f"slow{n}")) for n in range(NEWCOMERS)]
    await asyncio.sleep(300.0)
    async with world.conversing("early")("donor") as line:
        await line.send(StateRequest(parts=Parts.ALL))
        assert isinstance(await line.receive(), Busy), "both get on, and have not had their turn"
    assert all(same(state, WHOLE) for state in await asyncio.gather(*copies))
    assert asyncio.get_running_loop().time() - begun_s > 1.5 * 400.0
    assert giving.donor.statistics() | {"displaced": 0} == giving.donor.statistics()
