"""Turns: exactly a window of them between two steps, the older before the younger, and nobody waits in a circle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from noloco_node.sim.clock import run
from pipeline.admission_window import AdmissionWindow, GradientTurns, Slot, TurnClaim, WindowOutcome
from pipeline.messages import Reason, Refused

OUTCOME = WindowOutcome(0.5, 1.0, 8)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def slot_of(gate: AdmissionWindow, sender: str = "a") -> Slot:
    slot = await gate.enter(sender)
    assert isinstance(slot, Slot)
    return slot


@settings(deadline=None)
@given(
    window=st.integers(1, 4),
    acts=st.lists(st.tuples(st.sampled_from(["admit", "take", "succeed", "fail", "step"]), st.integers(0, 99))),
)
@example(window=1, acts=[("admit", 0), ("admit", 0), ("take", 0), ("succeed", 0)])
def test_a_window_is_exact_and_nobody_sees_two_steps(window: int, acts: list[tuple[str, int]]) -> None:
    """Any order of arrivals, replies and failures that a gate with two windows in flight admits."""
    turns, in_flight, succeeded = GradientTurns(window), list[TurnClaim](), 0
    for act, choice in acts:
        claim = in_flight[choice % len(in_flight)] if in_flight else None
        if act == "admit" and succeeded + len(in_flight) < 2 * window:
            in_flight.append(turns.claim())
        elif act == "take" and claim is not None:
            older = claim.step < turns.steps
            assert turns.take(claim) or not older, "the older never wait"
        elif act == "succeed" and claim is not None and claim.granted:
            assert turns.steps - claim.step <= 1
            in_flight.remove(claim)
            succeeded += 1
        elif act == "fail" and claim is not None:
            in_flight.remove(claim)
            turns.release(claim)
        elif act == "step" and succeeded == window:
            assert not any(claim.granted for claim in in_flight), "a backward pass would see the step"
            turns.next_window(len(in_flight))
            succeeded = 0
        granted = succeeded + sum(claim.granted for claim in in_flight)
        waiting_older = sum(not claim.granted and claim.step < turns.steps for claim in in_flight)
        assert (turns._given, turns._kept) == (granted, waiting_older)
        assert granted + waiting_older <= window
    # Whatever came before, those in flight can all end, each in a window of `window`, and then everything is free.
    while in_flight:
        if succeeded == window:
            turns.next_window(len(in_flight))
            succeeded = 0
        before = len(in_flight)
        for claim in sorted(in_flight, key=lambda claim: claim.step):
            if turns.take(claim):
                in_flight.remove(claim)
                succeeded += 1
        assert len(in_flight) < before
    assert (turns._given, turns._kept) == (succeeded, 0)


def test_with_one_window_a_turn_is_always_there() -> None:
    async def main() -> None:
        gate = AdmissionWindow(3)
        for _ in range(4):
            slots = [await slot_of(gate) for _ in range(3)]
            assert all(slot.take_turn() for slot in slots)
            assert not any(slot.stale for slot in slots)
            for slot in slots:
                slot.succeed(OUTCOME)
            await gate.full()
            gate.next_window()
        assert gate.statistics()["deferred"] == 0

    run(main())


@pytest.mark.parametrize("windows", [0, 3])
def test_one_window_in_flight_or_two(windows: int) -> None:
    with pytest.raises(ValueError, match="windows in flight"):
        AdmissionWindow(2, windows=windows)


async def with_one_too_many(gate: AdmissionWindow) -> tuple[Slot, asyncio.Task[bool]]:
    """Fill a window of two and let a third microbatch ask for its turn."""
    first, second, third = [await slot_of(gate) for _ in range(3)]
    assert await first.turn()
    assert await second.turn()
    waiting = started(third.turn())
    await settle()
    assert not waiting.done(), "its gradient would be one too many"
    with pytest.raises(RuntimeError, match="out of turn"):
        third.succeed(OUTCOME)
    first.succeed(OUTCOME)
    second.succeed(OUTCOME)
    return third, waiting


def test_who_is_too_many_waits_for_the_step_and_is_stale_then() -> None:
    async def main() -> None:
        gate = AdmissionWindow(2, windows=2)
        third, waiting = await with_one_too_many(gate)
        assert await gate.full() == (OUTCOME, OUTCOME)
        await settle()
        assert not waiting.done(), "the step is being taken"
        assert not third.stale
        gate.next_window()
        assert await waiting
        assert third.stale
        third.succeed(OUTCOME._replace(stale=third.stale))
        assert gate.statistics()["stale"] == gate.statistics()["deferred"] == 1
        assert (gate.succeeded, gate.in_flight) == (1, 0)

    run(main())


def test_the_younger_leave_the_turn_of_an_older_alone_until_that_one_fails() -> None:
    async def main() -> None:
        gate = AdmissionWindow(2, windows=2)
        third, waiting = await with_one_too_many(gate)
        late = await slot_of(gate)
        await gate.full()
        gate.next_window()
        assert await waiting
        young = [await slot_of(gate) for _ in range(2)]
        wanting = [started(slot.turn()) for slot in young]
        await settle()
        assert not any(task.done() for task in wanting), "one turn is taken, the other kept for the late one"
        late.give_back()
        await settle()
        assert [task.done() for task in wanting] == [True, False], "whoever fails gives its turn to its window"
        third.give_back()
        await settle()
        assert all(task.done() for task in wanting), "and a turn that was taken, too"
        for slot in young:
            slot.succeed(OUTCOME)
        assert len(await gate.full() or ()) == 2

    run(main())


@pytest.mark.parametrize("at", ["waiting", "granted at that moment"])
def test_a_cancelled_wait_for_a_turn_leaves_no_trace(at: str) -> None:
    async def main() -> None:
        gate = AdmissionWindow(2, windows=2)
        third, waiting = await with_one_too_many(gate)
        if at == "waiting":
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await gate.full()
        gate.next_window()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        third.give_back()
        for _ in range(2):
            slots = [await slot_of(gate) for _ in range(2)]
            for slot in slots:
                assert await slot.turn()
                slot.succeed(OUTCOME)
            await gate.full()
            gate.next_window()
        assert (gate.in_flight, gate.turns._given, gate.turns._kept, gate.turns.waiting) == (0, 0, 0, 0)

    run(main())


def test_alone_drains_both_windows_by_the_step_between_them() -> None:
    async def main() -> None:
        gate, seen = AdmissionWindow(2, windows=2), list[str]()

        async def steps() -> None:
            while await gate.full() is not None:
                seen.append(f"step with {gate.in_flight} in flight")
                await asyncio.sleep(1.0)
                gate.next_window()

        async def round_of_gossip() -> None:
            async with gate.alone(retry_after_s=9.0, deadline_s=10.0):
                seen.append("alone")
                await asyncio.sleep(5.0)
                seen.append("over")

        third, waiting = await with_one_too_many(gate)
        gossip = started(round_of_gossip())
        await settle()
        assert isinstance(await gate.enter("b"), Refused)
        stepping = started(steps())
        assert await waiting
        assert seen == ["step with 1 in flight"]
        third.succeed(OUTCOME)
        await gossip
        (await slot_of(gate)).succeed(OUTCOME)
        await settle()
        assert seen == ["step with 1 in flight", "alone", "over", "step with 0 in flight"]
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)

    run(main())


def test_a_window_that_is_complete_before_the_round_waits_for_its_end() -> None:
    async def main() -> None:
        gate = AdmissionWindow(1, windows=2)
        async with gate.alone(retry_after_s=1.0, deadline_s=1.0):
            full = started(gate.full())
            await settle()
        (await slot_of(gate)).succeed(OUTCOME)
        assert await full == (OUTCOME,)

    run(main())


def test_closing_lets_both_windows_end() -> None:
    async def main() -> None:
        gate = AdmissionWindow(2, windows=2)
        third, waiting = await with_one_too_many(gate)
        fourth = await slot_of(gate)
        gate.close()
        assert await gate.full() == (OUTCOME, OUTCOME)
        gate.next_window()
        assert await waiting
        third.succeed(OUTCOME)
        full = started(gate.full())
        await settle()
        assert not full.done()
        fourth.give_back()
        assert await full is None, "the second window stays partial"
        assert await gate.enter("b") == Refused(reason=Reason.LEAVING)

    run(main())


def test_after_the_last_step_nobody_waits_for_a_turn() -> None:
    async def main() -> None:
        gate = AdmissionWindow(2, windows=2)
        third, waiting = await with_one_too_many(gate)
        gate.turns.end()
        assert await waiting is False
        assert await third.turn() is False
        third.give_back()
        assert gate.in_flight == 0

    run(main())
