"""The gate: windows are exact, senders get their share, and nobody who gives up leaves a trace."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.admission_window import (
    PASSES_OF_ALL,
    PASSES_OF_ONE,
    UNKNOWN_PACE_S,
    AdmissionWindow,
    EvaluationQuota,
    Slot,
    WindowOutcome,
)
from pipeline.messages import Reason, Refused

OUTCOME = WindowOutcome(0.5, 1.0, 8)


async def slot_of(gate: AdmissionWindow, sender: str = "a") -> Slot:
    slot = await gate.enter(sender)
    assert isinstance(slot, Slot)
    return slot


async def settle() -> None:
    """Let everything run that can run now."""
    for _ in range(10):
        await asyncio.sleep(0)


def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_slot_ends_once_and_is_given_back_by_its_context() -> None:
    gate = AdmissionWindow(2)
    slot = await slot_of(gate)
    with slot:
        slot.succeed(OUTCOME)
    slot.give_back()
    slot.succeed(OUTCOME)
    assert (gate.succeeded, gate.in_flight) == (1, 0)
    with pytest.raises(KeyError), await slot_of(gate):
        raise KeyError
    assert (gate.succeeded, gate.in_flight) == (1, 0)
    assert gate.statistics()["given_back"] == 1


async def test_a_window_cannot_end_without_its_step() -> None:
    gate = AdmissionWindow(1)
    with pytest.raises(RuntimeError, match="full"):
        gate.next_window()
    (await slot_of(gate)).succeed(OUTCOME)
    with pytest.raises(RuntimeError, match="full"):
        gate.next_window()
    await gate.full()
    assert gate.next_window() == (OUTCOME,)
    waiting = started(gate.full())
    await settle()
    assert not waiting.done()
    await cancel(waiting)


@pytest.mark.parametrize(("window", "windows"), [(0, 1), (2, 0), (2, 3)])
def test_a_window_takes_a_microbatch_and_one_or_two_are_in_flight(window: int, windows: int) -> None:
    with pytest.raises(ValueError, match="window"):
        AdmissionWindow(window, windows=windows)


@pytest.mark.parametrize(
    ("senders", "queued", "estimate_s"), [("a", 4, 6.0), ("abcd", 1, 3.0)], ids=["half of the queue", "at least one"]
)
async def test_the_queue_is_bounded_and_a_refusal_estimates_from_the_measured_pace(
    senders: str, queued: int, estimate_s: float
) -> None:
    gate = AdmissionWindow(2)
    for number in range(10):
        slots = [await slot_of(gate, senders[(number + each) % len(senders)]) for each in range(2)]
        for slot in slots:
            await asyncio.sleep(3.0)
            slot.succeed(OUTCOME)
        await gate.full()
        gate.next_window()
    held = [await slot_of(gate, each) for each in (senders[:2] * 2)[:2]]
    waiting = [started(gate.enter("a")) for _ in range(queued)]
    await settle()
    assert gate.queued == queued
    refused = await gate.enter("a")
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.FULL
    assert refused.retry_after_s == pytest.approx(estimate_s)
    await cancel(*waiting)
    assert (gate.queued, gate.in_flight, len(held)) == (0, 2, 2)


async def test_senders_take_turns_and_share_the_queue() -> None:
    gate = AdmissionWindow(4, queue_limit=8)
    held = [await slot_of(gate, "greedy") for _ in range(4)]
    order: list[str] = []

    async def enter(sender: str) -> None:
        slot = await gate.enter(sender)
        if isinstance(slot, Slot):
            order.append(sender)
            slot.succeed(OUTCOME)

    tasks = [started(enter("greedy")) for _ in range(8)]
    await settle()
    assert gate.queued == 8, "alone, it may take all of it"
    assert isinstance(await gate.enter("late"), Refused)
    for slot in held:
        slot.succeed(OUTCOME)
    await gate.full()
    gate.next_window()
    await settle()
    assert gate.queued == 4
    assert (await gate.enter("greedy")) == Refused(reason=Reason.FULL, retry_after_s=2 * UNKNOWN_PACE_S)
    tasks += [started(enter("late")) for _ in range(4)]
    await settle()
    assert gate.queued == 8, "the late one's share was kept for it"
    for _ in range(2):
        await gate.full()
        gate.next_window()
        await settle()
    assert order == ["greedy"] * 4 + ["greedy", "late"] * 4
    await asyncio.gather(*tasks)


async def test_more_senders_than_places_are_counted_no_further() -> None:
    gate = AdmissionWindow(1, queue_limit=2)
    held = await slot_of(gate, "first")
    queued = [started(gate.enter(f"s{n}")) for n in range(2)]
    await settle()
    for n in range(1000):
        assert isinstance(await gate.enter(f"stranger {n}"), Refused)
    assert len(gate._heard[0]) == 2
    held.give_back()
    await cancel(*queued)


@pytest.mark.parametrize("at", ["queued", "granted", "granted then cancelled at once"])
async def test_a_cancelled_wait_leaves_no_trace(at: str) -> None:
    gate = AdmissionWindow(1)
    held = await slot_of(gate)
    waiting, behind = started(gate.enter("a")), started(gate.enter("b"))
    await settle()
    if at == "queued":
        await cancel(waiting)
        held.give_back()
    elif at == "granted":
        held.give_back()
        await cancel(waiting)
    else:
        waiting.cancel()
        held.give_back()
        await asyncio.gather(waiting, return_exceptions=True)
    slot = await behind
    assert isinstance(slot, Slot), "the next in line has the place"
    assert (gate.in_flight, gate.queued) == (1, 0)
    slot.give_back()
    assert gate.in_flight == 0


async def test_alone_refuses_at_once_drains_and_goes_on_in_the_middle_of_a_window() -> None:
    gate = AdmissionWindow(3)
    first, second, third = [await slot_of(gate) for _ in range(3)]
    queued = started(gate.enter("b"))
    await settle()
    first.succeed(OUTCOME)
    seen: list[tuple[int, int]] = []

    async def round_of_gossip() -> None:
        async with gate.alone(retry_after_s=4.0, deadline_s=10.0):
            seen.append((gate.in_flight, gate.succeeded))
            await asyncio.sleep(1.0)

    gossip = started(round_of_gossip())
    assert await queued == Refused(reason=Reason.GOSSIPING, retry_after_s=4.0)
    await asyncio.sleep(1.0)
    assert await gate.enter("b") == Refused(reason=Reason.GOSSIPING, retry_after_s=3.0)
    assert not seen, "two are in flight"
    second.succeed(OUTCOME)
    third.give_back()
    await gossip
    assert seen == [(0, 2)]
    (await slot_of(gate)).succeed(OUTCOME)
    await gate.full()
    assert len(gate.next_window()) == 3


async def test_alone_gives_up_at_its_deadline_and_the_gate_is_open_again() -> None:
    gate = AdmissionWindow(2)
    held = await slot_of(gate)
    with pytest.raises(TimeoutError):
        async with gate.alone(retry_after_s=1.0, deadline_s=5.0):
            raise AssertionError("something is in flight")
    (await slot_of(gate)).give_back()
    held.give_back()
    async with gate.alone(retry_after_s=1.0, deadline_s=5.0):
        await asyncio.sleep(50.0)  # The deadline is for draining alone.
    (await slot_of(gate)).give_back()


async def test_a_cancelled_round_leaves_the_gate_open() -> None:
    gate = AdmissionWindow(1)
    held = await slot_of(gate)

    async def gossip() -> None:
        async with gate.alone(retry_after_s=1.0, deadline_s=10.0):
            await asyncio.sleep(100.0)

    draining = started(gossip())
    await settle()
    await cancel(draining)
    held.give_back()
    inside = started(gossip())
    await settle()
    await cancel(inside)
    (await slot_of(gate)).give_back()


async def test_closing_refuses_the_queue_and_lets_what_is_in_flight_end() -> None:
    gate = AdmissionWindow(1)
    held = await slot_of(gate)
    queued = started(gate.enter("b"))
    await settle()
    gate.close()
    assert await queued == Refused(reason=Reason.LEAVING)
    assert gate.statistics()["refused_leaving"] == 1
    assert await gate.enter("c") == Refused(reason=Reason.LEAVING)
    full = started(gate.full())
    await settle()
    assert not full.done()
    held.succeed(OUTCOME)
    assert await full == (OUTCOME,), "what was in flight is not lost"
    assert await gate.enter("c") == Refused(reason=Reason.LEAVING)


async def test_after_closing_a_window_that_is_complete_is_used_and_a_partial_one_is_not() -> None:
    gate = AdmissionWindow(2)
    first, second = await slot_of(gate), await slot_of(gate)
    first.succeed(OUTCOME)
    gate.close()
    full = started(gate.full())
    await settle()
    assert not full.done(), "it may still become complete"
    second.succeed(OUTCOME)
    assert await full == (OUTCOME, OUTCOME)
    gate.next_window()
    assert await gate.full() is None

    partial = AdmissionWindow(2)
    slot = await slot_of(partial)
    waiting = started(partial.full())
    await settle()
    partial.close()
    slot.give_back()
    assert await waiting is None
    assert partial.succeeded == 0

    idle = AdmissionWindow(1)
    waiting = started(idle.full())
    await settle()
    idle.close()
    assert await waiting is None, "closing alone wakes it"


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("seed", range(12))
async def test_random_lives_keep_the_invariants(seed: int, windows: int) -> None:
    """Senders come, fail, succeed and give up at random; every window is exact and all work is shared evenly."""
    rng = Random(f"gate|{seed}")
    window, per_sender = rng.randint(1, 5), rng.randint(5, 15)
    most = Random(f"most|{seed}").randint(1, 2 * window)
    gate = AdmissionWindow(window, windows=windows, most=most)
    senders, served = [f"s{n}" for n in range(rng.randint(1, 5))], Counter[str]()
    done, alone = list[int](), list[int]()
    backward = 0

    async def through(slot: Slot) -> bool:
        """Forward, the reply's way, backward, and what can go wrong on it."""
        nonlocal backward
        begun = gate.steps
        await asyncio.sleep(rng.uniform(0.1, 2.0))
        if rng.random() < 0.15:
            return False
        assert await slot.turn()
        assert gate.steps - begun <= windows - 1, "weights are never more than a step old"
        assert slot.stale == (gate.steps > begun)
        backward += 1
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        backward -= 1
        return rng.random() < 0.85

    async def one(sender: str) -> None:
        while True:
            patience = asyncio.timeout(rng.choice([0.5, 5.0, 50.0]))
            try:
                async with patience:
                    slot = await gate.enter(sender)
            except TimeoutError:
                continue
            if isinstance(slot, Refused):
                await asyncio.sleep(slot.retry_after_s * rng.uniform(1.0, 1.5) + 0.01)
                continue
            with slot:
                assert gate.in_flight + gate.succeeded <= windows * window
                assert gate.in_flight <= most
                if await through(slot):
                    slot.succeed(OUTCOME._replace(stale=slot.stale))
                    served[sender] += 1
                    return

    async def steps() -> None:
        while True:
            await gate.full()
            assert windows == 2 or gate.in_flight == 0
            assert backward == 0
            await asyncio.sleep(0.5)
            assert backward == 0
            done.append(len(gate.next_window()))

    async def rounds() -> None:
        while True:
            await asyncio.sleep(rng.uniform(6.0, 18.0))
            async with gate.alone(retry_after_s=1.0, deadline_s=60.0):
                assert gate.in_flight == backward == len(alone) == 0
                alone.append(1)
                before = gate.statistics()
                await asyncio.sleep(1.0)
                changed = {name for name, value in gate.statistics().items() if value != before[name]}
                assert changed <= {"refused_gossiping"}, "no step is taken meanwhile"
                alone.clear()

    async with asyncio.timeout(3600.0):
        background = [started(steps()), started(rounds()), started(rounds())]
        async with asyncio.TaskGroup() as group:
            for sender in senders:
                for _ in range(per_sender):
                    group.create_task(one(sender))
        await asyncio.sleep(10.0)
        await cancel(*background)
        assert all(task.cancelled() for task in background)
    assert set(done) <= {window}
    assert sum(done) + gate.succeeded == len(senders) * per_sender
    assert (gate.in_flight, gate.queued, gate.turns._kept) == (0, 0, 0)
    assert (gate.turns._given, gate.turns.waiting) == (gate.succeeded, 0)
    assert windows == 2 or gate.statistics()["stale"] == gate.statistics()["deferred"] == 0
    assert set(served.values()) == {per_sender}


# Turns: exactly a window of them between two steps, the older before the younger, and nobody waits in a circle.


@given(
    window=st.integers(1, 4),
    acts=st.lists(st.tuples(st.sampled_from(["admit", "take", "succeed", "fail", "step"]), st.integers(0, 99))),
)
@example(window=1, acts=[("admit", 0), ("admit", 0), ("take", 0), ("succeed", 0)])
def test_a_window_is_exact_and_nobody_sees_two_steps(window: int, acts: list[tuple[str, int]]) -> None:
    """Any order of arrivals, replies and failures that a gate with two windows in flight admits."""
    gate, in_flight, succeeded = AdmissionWindow(window, windows=2), list[Slot](), 0
    turns = gate.turns
    for act, choice in acts:
        claim = in_flight[choice % len(in_flight)] if in_flight else None
        if act == "admit" and succeeded + len(in_flight) < 2 * window:
            in_flight.append(Slot(gate))
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


async def test_who_is_too_many_waits_for_the_step_and_is_stale_then() -> None:
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


async def test_the_younger_leave_the_turn_of_an_older_alone_until_that_one_fails() -> None:
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


@pytest.mark.parametrize("at", ["waiting", "granted at that moment"])
async def test_a_cancelled_wait_for_a_turn_leaves_no_trace(at: str) -> None:
    gate = AdmissionWindow(2, windows=2)
    third, waiting = await with_one_too_many(gate)
    if at == "waiting":
        await cancel(waiting)
    await gate.full()
    gate.next_window()
    await cancel(waiting)
    third.give_back()
    for _ in range(2):
        slots = [await slot_of(gate) for _ in range(2)]
        for slot in slots:
            assert await slot.turn()
            slot.succeed(OUTCOME)
        await gate.full()
        gate.next_window()
    assert (gate.in_flight, gate.turns._given, gate.turns._kept, gate.turns.waiting) == (0, 0, 0, 0)


async def test_alone_drains_both_windows_by_the_step_between_them() -> None:
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
    await cancel(stepping)


async def test_a_window_that_is_complete_before_the_round_waits_for_its_end() -> None:
    gate = AdmissionWindow(1, windows=2)
    async with gate.alone(retry_after_s=1.0, deadline_s=1.0):
        full = started(gate.full())
        await settle()
    (await slot_of(gate)).succeed(OUTCOME)
    assert await full == (OUTCOME,)


async def test_closing_lets_both_windows_end() -> None:
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


async def test_after_the_last_step_nobody_waits_for_a_turn() -> None:
    gate = AdmissionWindow(2, windows=2)
    third, waiting = await with_one_too_many(gate)
    gate.turns.end()
    assert await waiting is False
    assert await third.turn() is False
    third.give_back()
    assert gate.in_flight == 0


@given(
    passes=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    asked=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=200),
)
def test_senders_have_a_fixed_number_of_evaluation_passes_in_the_time_of_an_evaluation(
    passes: int, microbatches: int, asked: list[tuple[str, int]]
) -> None:
    quota, trained, had = EvaluationQuota(passes, microbatches), 0, Counter[tuple[int, str]]()
    for sender, more in asked:
        trained += more
        window = trained // microbatches
        before, of_all = had[window, sender], sum(count for (number, _), count in had.items() if number == window)
        taken = quota.take(sender, trained)
        assert taken == (before < PASSES_OF_ONE * passes and of_all < PASSES_OF_ALL * passes)
        had[window, sender] += taken


@given(names=st.lists(st.text(), max_size=50), trained=st.integers(0, 2**48))
def test_a_run_without_evaluations_gives_none_to_anybody(names: list[str], trained: int) -> None:
    quota = EvaluationQuota()
    assert not any(quota.take(name, trained) for name in names)
