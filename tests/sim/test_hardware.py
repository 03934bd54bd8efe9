"""The simulator's clock, device, stages and quadratic models: what a peer stands on in virtual time."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch
from handlers import now
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.sim import clock
from noloco_node.sim.clock import Deadlock, run
from noloco_node.sim.hardware import quadratic_model
from noloco_node.sim.hardware.priced_stage import PricedStage, Prices, Stutter, VirtualDevice
from noloco_node.sim.hardware.quadratic_model import QuadraticModel, RandomBatches, quadratic_layout

# The clock.


def test_a_hang_names_the_innermost_place_of_every_task() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(stuck(), name="the one that hangs")
        await task

    with pytest.raises(Deadlock, match=r"the one that hangs: .*locks\.py:\d+ in Event\.wait"):
        run(main())


async def test_timers_of_one_moment_come_in_the_order_in_which_they_were_set() -> None:
    loop, seen = asyncio.get_running_loop(), list[int]()
    for number in range(50):
        loop.call_at(3.0, seen.append, number)
    await asyncio.sleep(3.0)
    assert seen == list(range(50))


async def test_deadlines_that_were_met_do_not_pile_up() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, clock.VirtualLoop)
    for _ in range(5000):
        async with asyncio.timeout(1e6):
            await asyncio.sleep(0.001)
    assert loop.timer_count <= 2 * clock.MANY_TIMERS
    assert now() == pytest.approx(5.0)


ORDERS = """
import asyncio
from noloco_node.sim.clock import run

async def main():
    order = []
    async def body(number):
        try:
            await asyncio.sleep(1000 if number else 1)
            raise ValueError
        except asyncio.CancelledError:
            order.append(number)
            raise
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(body(number))
    except ExceptionGroup:
        pass
    print(order)

run(main())
"""


def test_sets_of_tasks_have_the_same_order_in_every_process() -> None:
    """A task group cancels its tasks in the order of a set, which would follow addresses."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", f"x = [object() for _ in range({salt})]\n{ORDERS}"],
            env={**os.environ, "PYTHONHASHSEED": str(salt)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for salt in (1, 4242)
    }
    assert len(outputs) == 1
    assert outputs.pop().count(",") == 198


# The device.


@given(prices=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20), slowness=st.floats(0.1, 10.0))
async def test_jobs_run_in_turn_at_the_prices_that_they_name(prices: list[float], slowness: float) -> None:
    device = VirtualDevice()
    device.slowness = slowness
    spans: list[tuple[float, float]] = []

    def job(price: float) -> float:
        begun = device.clock()
        device.charge(price)
        spans.append((begun, device.clock()))
        return price

    assert await asyncio.gather(*[device.run(job, price) for price in prices]) == prices
    assert now() == pytest.approx(slowness * sum(prices), abs=1e-6)
    assert device.busy_s == pytest.approx(now(), abs=1e-6)
    for (begun, ended), price in zip(spans, prices, strict=True):
        assert ended - begun == pytest.approx(slowness * price, abs=1e-6)
    assert spans == sorted(spans)


async def test_a_job_that_has_begun_is_awaited_to_its_end_by_whoever_is_cancelled() -> None:
    device, done = VirtualDevice(job_s=10.0), []
    first = asyncio.create_task(device.run(done.append, "first"))
    second = asyncio.create_task(device.run(done.append, "second"))
    await asyncio.sleep(1.0)
    second.cancel()
    for _ in range(3):  # impatience does not help
        first.cancel()
        await asyncio.sleep(1.0)
    assert not first.done()
    await asyncio.wait({first, second})
    assert first.cancelled()
    assert second.cancelled()
    assert now() == 10.0
    assert done == ["first"]
    await device.run(done.append, "third")
    assert now() == 20.0


async def test_a_cancellation_in_the_moment_of_completion_spoils_nothing() -> None:
    device = VirtualDevice(job_s=1.0)
    task = asyncio.create_task(device.run(lambda: None))
    asyncio.get_running_loop().call_at(1.0, task.cancel)
    await asyncio.wait({task})
    assert await device.run(lambda: 7) == 7


async def test_what_a_job_raises_reaches_its_caller_after_its_time() -> None:
    device = VirtualDevice(job_s=2.0)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await device.run(fail)
    assert now() == 2.0
    assert await device.run(lambda: 1) == 1


async def test_what_is_computed_beside_waits_for_no_job() -> None:
    device = VirtualDevice(job_s=10.0)
    device.slowness = 2.0
    jobs = [asyncio.create_task(device.run(lambda: None)) for _ in range(3)]
    await asyncio.sleep(1.0)
    assert await device.beside(sum, [1, 2]) == 3
    assert now() == 21.0
    await asyncio.gather(*jobs)
    assert now() == 60.0


async def test_a_stuttering_device_stops_as_often_as_it_was_told() -> None:
    device = VirtualDevice(job_s=0.01, seed="x")
    device.stutter = Stutter(share=0.2, pause_s=1.0)
    for _ in range(1000):
        await device.run(lambda: None)
    assert now() == pytest.approx(10.0 + 200.0, rel=0.2)


# Stages.


def priced(number: int = 0) -> tuple[PricedStage, list[float], list[str]]:
    charged: list[float] = []
    wrong: list[str] = []
    prices = Prices(forward_s=1.0, step_s=0.5, copy_s=0.25, coding_s=0.125)
    return PricedStage(QuadraticModel(number), prices, charged.append, wrong.append), charged, wrong


IDS = torch.full((1, 1), 5)


def test_a_stage_names_its_prices() -> None:
    stage, charged, wrong = priced()
    forward = stage.forward(IDS)
    forward.backward(torch.zeros(1, 1, 1))
    stage.step(0.1, 1)
    stage.weights()
    stage.loss(IDS, IDS)
    stage.step(0.1, 1)
    assert charged == [1.125, 2.125, 0.5, 0.25, 3.25, 0.5]
    assert wrong == []


@given(backward=st.floats(0.0, 4.0), by_layers=st.booleans())
def test_a_backward_pass_costs_the_same_at_each_stage(backward: float, by_layers: bool) -> None:
    """The last stage takes both passes at once; what is computed again is a forward pass."""
    charged: list[float] = []
    prices = Prices(forward_s=1.0, backward=backward, by_layers=by_layers)
    stage = PricedStage(QuadraticModel(0), prices, charged.append, print)
    stage.forward(IDS).backward(torch.zeros(1, 1, 1))
    stage.loss(IDS, IDS)
    assert sum(charged[:2]) == pytest.approx(charged[2]) == pytest.approx(prices.passes_s + by_layers)


def test_a_pass_without_its_graph_is_charged_again() -> None:
    charged: list[float] = []
    stage = PricedStage(QuadraticModel(0), Prices(forward_s=1.0, coding_s=0.5, graphs=1), charged.append, print)
    kept, dropped = stage.forward(IDS), stage.forward(IDS)
    kept.backward(torch.zeros(1, 1, 1))
    dropped.backward(torch.zeros(1, 1, 1))
    assert charged == [1.5, 1.5, 2.5, 3.5]


def test_a_stage_notices_a_window_that_was_not_exact() -> None:
    stage, _, wrong = priced()
    stage.loss(IDS, IDS)
    stage.step(0.1, 2)
    assert wrong == ["an inner step for 2 microbatches was taken on 1"]
    stage.loss(IDS, IDS)
    stage.discard()
    stage.step(0.1, 0)
    assert len(wrong) == 1


@pytest.mark.parametrize("change", ["step", "correct", "set"])
def test_a_stage_notices_weights_that_change_under_a_living_graph(change: str) -> None:
    stage, _, wrong = priced()
    forward = stage.forward(IDS)
    {
        "step": lambda: stage.step(0.1, 0),
        "correct": lambda: stage.correct(stage.weights()),
        "set": lambda: stage.set_weights(stage.weights()),
    }[change]()
    forward.backward(torch.zeros(1, 1, 1))
    assert "changed between" in wrong[-1]


# Quadratic models.


def test_a_bowl_descends_to_its_centre() -> None:
    stage = QuadraticModel(1)
    losses = []
    for number in range(4000):
        losses.append(stage.loss(torch.full((1, 1), number), IDS).loss)
        stage.step(0.05, 1)
    assert sum(losses[-500:]) < 0.2 * sum(losses[:20]) / 20 * 500
    assert float(torch.linalg.vector_norm(stage.weights()[0])) < 0.5


def test_a_bowl_keeps_what_rounds_and_checkpoints_hold() -> None:
    """Weights are handed out without a copy, so no later step may change them."""
    stage = QuadraticModel(0)
    (kept,) = stage.weights()
    before = kept.clone()
    stage.loss(IDS, IDS)
    stage.step(0.5, 1)
    stage.correct((torch.ones(quadratic_model.SIZE),))
    assert torch.equal(kept, before)
    state = stage.optimiser_state()
    other = QuadraticModel(0)
    other.load_optimiser_state(state)
    assert other.optimiser_state().steps == 1


def test_a_gradient_that_is_not_finite_is_thrown_away() -> None:
    stage = QuadraticModel(0)
    before = stage.weights()[0].clone()
    stage.loss(torch.full((1, 1, 1), float("nan")), IDS)
    assert not stage.step(0.1, 1).applied
    assert torch.equal(stage.weights()[0], before)


def test_the_loss_of_wide_bowls_shows_the_weights_of_the_whole_route() -> None:
    """Or no loss would tell a newcomer what a donor's weights are worth."""
    losses = []
    for worth in (1.0, -1.0):
        first, last = (QuadraticModel(number, quadratic_model.WIDE, 3.0) for number in range(2))
        first.set_weights((worth * first.weights()[0],))
        passed = first.forward(torch.full((1, 1), 7))
        assert passed.output.shape == (1, 1, quadratic_layout(2, size=quadratic_model.WIDE).width)
        reply = last.loss(passed.output, IDS)
        assert reply.hidden is not None
        assert passed.backward(reply.hidden) is not None
        losses.append(reply.loss)
    assert losses[1] > 2 * losses[0]


async def test_numbers_go_on_where_they_were() -> None:
    text = RandomBatches((2, 3), 10)
    drawn = [await text.draw() for _ in range(5)]
    again = RandomBatches((2, 3), 10)
    assert await again.restore({"drawn": 4})
    assert torch.equal(await again.draw(), drawn[4])
    assert drawn[0].shape == (2, 4)
    assert int(drawn[0].max()) < quadratic_layout(1).vocabulary
