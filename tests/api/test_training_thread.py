"""Jobs of a node wait for the thread that trains, and no signal interrupts one."""

import queue
import signal
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.api.training_thread import IterationClock, TrainingThread


@given(st.lists(st.integers(), min_size=1, max_size=20))
def test_jobs_run_in_their_order_in_the_thread_that_asks(numbers: list[int]) -> None:
    thread, seen = TrainingThread(), list[tuple[int, int]]()
    futures = [thread.submit(lambda n=number: seen.append((n, threading.get_ident()))) for number in numbers]
    assert seen == []
    thread.work_until(futures[-1].done)
    assert seen == [(number, threading.get_ident()) for number in numbers]
    assert all(future.done() for future in futures)


def test_what_a_job_raises_is_its_callers() -> None:
    thread = TrainingThread()
    future = thread.submit(lambda: 1 // 0)
    thread.work_waiting()
    assert isinstance(future.exception(), ZeroDivisionError)


def test_an_interrupt_waits_for_the_end_of_a_job_and_leaves_the_next_one_waiting() -> None:
    thread, done = TrainingThread(), list[str]()

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("whole")

    first, second = thread.submit(interrupted), thread.submit(done.append, "next")
    with pytest.raises(KeyboardInterrupt):
        thread.work_until(second.done)
    assert first.done()
    assert not second.done()
    assert done == ["whole"]
    thread.work_until(second.done)
    assert done == ["whole", "next"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_ends_a_wait() -> None:
    thread = TrainingThread()
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        thread.work_until(lambda: False)
    timer.join()


def test_a_node_ends_while_the_thread_that_trains_takes_the_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(queue.SimpleQueue[Any]):
        """A queue whose last job somebody else takes as soon as one has looked; it raises instead of waiting."""

        def empty(self) -> bool:
            return super().empty() or super().get(block=False) is None

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            return super().get(block=False)

    thread = TrainingThread()
    monkeypatch.setattr(thread, "_jobs", Taken())
    thread.submit(lambda: None)
    thread.shutdown()


def test_a_thread_other_than_the_main_one_trains_too() -> None:
    thread = TrainingThread()
    future = thread.submit(threading.get_ident)
    other = threading.Thread(target=thread.work_until, args=(future.done,))
    other.start()
    other.join()
    assert future.result() == other.ident


def test_each_of_two_threads_sees_that_it_has_waited_long_enough() -> None:
    """One trains, and another one leaves: each may take what was to wake the other."""
    thread, over, looked = TrainingThread(), threading.Event(), threading.Semaphore(0)

    def is_done() -> bool:
        is_over = over.is_set()
        looked.release()
        return is_over

    both = [threading.Thread(target=thread.work_until, args=(is_done,), daemon=True) for _ in range(2)]
    for each in both:
        each.start()
        assert looked.acquire(timeout=30.0)
    over.set()
    thread.wake()
    for each in both:
        each.join(30.0)
    assert not any(each.is_alive() for each in both)


def test_what_waits_at_the_end_is_cancelled() -> None:
    thread = TrainingThread()
    future = thread.submit(int)
    thread.shutdown(cancel_futures=True)
    with pytest.raises(CancelledError):
        future.result()
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit(int)


def test_the_node_of_a_later_session_gives_jobs_again() -> None:
    thread, clock = TrainingThread(), IterationClock()
    clock.device(thread).close()
    device = clock.device(thread)
    future = thread.submit(threading.get_ident)
    thread.work_waiting()
    assert future.result() == threading.get_ident()
    device.close()


def test_the_end_of_a_node_waits_for_the_job_in_hand() -> None:
    thread, began, goes_on, done = TrainingThread(), threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        began.set()
        goes_on.wait()
        done.append("job")

    future = thread.submit(work)
    trainer = threading.Thread(target=thread.work_until, args=(future.done,))
    trainer.start()
    began.wait()
    ending = threading.Thread(target=lambda: (thread.shutdown(), done.append("end")))
    ending.start()
    goes_on.set()
    for each in (trainer, ending):
        each.join()
    assert done == ["job", "end"]


def test_a_step_costs_its_device_what_the_iteration_took() -> None:
    clock = IterationClock()
    device = clock.device(TrainingThread())
    clock.begin()
    clock.end()
    before_s = device.clock()
    assert device.clock() == before_s
    clock.charge()
    assert device.clock() > before_s
    device.close()
