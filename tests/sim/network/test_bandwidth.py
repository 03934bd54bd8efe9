"""Shared bandwidth: every byte passes, nothing is faster than a line, and who shares waits."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.sim.clock import run
from noloco_node.sim.network.link_model import Link, Transfer

Jobs = list[tuple[int, int, float, float]]


def durations(jobs: Jobs, ups: list[float], downs: list[float]) -> tuple[list[float], list[Link]]:
    """Return how long each transfer (sender, receiver, bytes, start) takes, and all links."""
    links = [Link(rate, 0.0) for rate in ups + downs]

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        taken = [math.nan] * len(jobs)

        def begin(number: int) -> None:
            sender, receiver, size, start_s = jobs[number]

            def done() -> None:
                taken[number] = loop.time() - start_s

            Transfer(links[sender], links[len(ups) + receiver], size, done)

        for number, job in enumerate(jobs):
            loop.call_at(job[3], begin, number)
        while any(map(math.isnan, taken)):  # noqa: ASYNC110 - the time is virtual
            await asyncio.sleep(10)
        return taken

    return run(main()), links


@pytest.mark.parametrize(("up", "down", "seconds"), [(100, 400, 10), (400, 100, 10), (math.inf, 50, 20)])
def test_one_transfer_takes_the_slower_line(up: float, down: float, seconds: float) -> None:
    taken, _ = durations([(0, 0, 1000, 0)], [up], [down])
    assert taken == [pytest.approx(seconds)]


def test_two_that_share_an_uplink_take_twice_as_long_and_the_later_one_is_alone_at_last() -> None:
    assert durations([(0, 0, 1000, 0), (0, 1, 1000, 0)], [100], [400, 400])[0] == pytest.approx([20, 20])
    assert durations([(0, 0, 1000, 0), (1, 0, 1000, 0)], [400, 400], [100])[0] == pytest.approx([20, 20])
    # 500 bytes alone, then both at half the rate until the first is through, then the second alone.
    assert durations([(0, 0, 1000, 0), (0, 1, 1000, 5)], [100], [400, 400])[0] == pytest.approx([15, 15])
    # The second is held up by its own downlink: the count of transfers halves the first one's rate all the same.
    assert durations([(0, 0, 1000, 0), (0, 1, 100, 0)], [100], [400, 5])[0] == pytest.approx([20, 20])


async def test_rounds_have_their_share_of_a_link_while_others_are_on_it() -> None:
    up, down = Link(100, 0.0, 0.2), Link(math.inf, 0.0, 0.2)
    loop, ended = asyncio.get_running_loop(), dict[str, float]()

    def begin(name: str, size: float, in_round: bool) -> None:
        Transfer(up, down, size, lambda: ended.setdefault(name, loop.time()), in_round=in_round)

    begin("round", 600, True)
    for number in range(4):
        begin(f"other {number}", 200, False)
    await asyncio.sleep(100)
    assert ended == pytest.approx({"round": 14, **{f"other {number}": 10 for number in range(4)}})


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 10_000), st.integers(0, 20)), max_size=12),
    st.lists(st.sampled_from([10.0, 100.0, 1000.0, math.inf]), min_size=6, max_size=6),
)
def test_every_byte_passes_and_none_faster_than_a_line(jobs: Jobs, rates: list[float]) -> None:
    taken, links = durations(jobs, rates[:3], rates[3:])
    for (sender, receiver, size, _), seconds in zip(jobs, taken, strict=True):
        assert seconds >= size / min(rates[sender], rates[3 + receiver]) * (1 - 1e-6) - 1e-6
    for number, link in enumerate(links):
        mine = [index for index, job in enumerate(jobs) if job[0 if number < 3 else 1] == number % 3]
        size = sum(jobs[index][2] for index in mine)
        assert link.moved_bytes == pytest.approx(size)
        assert not link.flows
        end_s = max((jobs[index][3] + taken[index] for index in mine), default=0.0)
        use = link.use(end_s + 1)
        assert use.moved_bytes == pytest.approx(size)
        if link.rate < math.inf:
            assert use.capacity_bytes == pytest.approx(link.rate * (end_s + 1))
            assert 0 <= use.utilisation <= 1


async def test_a_cancelled_transfer_and_a_new_rate_change_the_others_at_once() -> None:
    loop = asyncio.get_running_loop()
    up, down, ended = Link(100.0, 0.0), Link(math.inf, 0.0), []
    first = Transfer(up, down, 1000, lambda: ended.append(("first", loop.time())))
    Transfer(up, down, 1000, lambda: ended.append(("second", loop.time())))
    await asyncio.sleep(10)
    assert up.use(10.0).moved_bytes == pytest.approx(1000)
    first.cancel()
    await asyncio.sleep(2.5)
    up.change(25.0, loop.time())
    await asyncio.sleep(100)
    assert ended == [("second", pytest.approx(10 + 2.5 + 10))]
    assert up.use(loop.time()).moved_bytes == pytest.approx(1500)
    assert up.use(loop.time()).capacity_bytes == pytest.approx(12.5 * 100 + 100 * 25)
