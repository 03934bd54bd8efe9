"""The thread that trains a foreign module is the node's device: it runs the node's jobs while it is in a call of ours.

So weights change in that thread alone, inside of `GossipOptimizer`, and never under a pass.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from noloco_node.machine.device import Device, WallClock
from noloco_node.machine.signals import deferred

P = ParamSpec("P")
T = TypeVar("T")


class _Job(NamedTuple):
    future: Future[Any]
    function: Callable[[], Any]

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except BaseException as error:
                self.future.set_exception(error)


class TrainingThread(Executor):
    """Keeps jobs for the thread that trains. A node that ends shuts it down; the next one opens it again."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._working = threading.RLock()  # a closure of the program may call us in a job
        self._looking, self._count = 0, threading.Lock()  # the threads that wait for jobs: another one may leave

    def open(self) -> None:
        """Take jobs again: a node that lost its network is followed by another one."""
        self._is_closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._is_closed:
            raise RuntimeError("the node has ended")
        future: Future[T] = Future()
        self._jobs.put(_Job(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs, cancel those that wait, and let the one in hand end."""
        self._is_closed = True
        with suppress(queue.Empty):
            while True:  # the thread that trains may take the last one at this moment
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()
        self.wake()
        if wait:
            with self._working:
                pass

    def wake(self) -> None:
        """Let the thread that trains look again whether it is done; also safe in a handler of a signal."""
        self._jobs.put(None)

    def work_until(self, is_done: Callable[[], bool]) -> None:
        """Run jobs in this thread until `is_done`; between two jobs a signal ends this as it would end any code."""
        came: list[None] = []

        def note() -> None:
            came.append(None)
            self.wake()

        # A job that moves weights must not be interrupted half-way.
        with deferred(note), self._among_others():
            while not (came or is_done()):
                job = self._jobs.get()
                if job is not None:
                    with self._working:
                        job.run()

    @contextmanager
    def _among_others(self) -> Iterator[None]:
        """Let another thread that waits for jobs look again once the body has ended: it may have taken their call."""
        with self._count:
            self._looking += 1
        try:
            yield
        finally:
            with self._count:
                self._looking -= 1
                if self._looking:
                    self.wake()

    def work_waiting(self) -> None:
        """Run the jobs that wait now."""
        self.work_until(self._jobs.empty)


class IterationClock:
    """A clock that moves by the seconds that the program takes for one iteration: what a step costs its device."""

    def __init__(self) -> None:
        self._now_s = self._charged_s = 0.0
        self._since_s = time.perf_counter()

    def begin(self) -> None:
        """Let an iteration begin."""
        self._since_s = time.perf_counter()

    def end(self) -> None:
        """Charge the iteration that has ended, without what follows up to the next one."""
        self._charged_s = time.perf_counter() - self._since_s

    def charge(self) -> None:
        """Let the clock move by the iteration; called in the job that stands for it."""
        self._now_s += self._charged_s

    def device(self, thread: TrainingThread) -> Device:
        """Return the training thread as the node's device."""

        def now() -> float:
            return self._now_s

        thread.open()
        # Nothing waits for a GPU here: the passes are the program's own.
        wall = WallClock(clock=now, core=now, finish=lambda _: None)
        return Device(torch.device("cpu"), wall=wall, thread=thread)
