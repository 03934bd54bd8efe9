"""What every test relies on."""

import asyncio
import functools
import gc
import inspect
import os
import signal
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# A machine with other work to do is no reason for an example to fail, and the same code must pass or fail everywhere:
# examples follow from the test. `pytest --hypothesis-profile=random` looks for new ones, and for twice as many.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("same")

REAL = ("network", "processes", "wan")
BY_THE_WALL_CLOCK = (*REAL, "real_time")
LONG = (*REAL, "shared")
"""Markers of tests that mostly wait, and of those that share what takes long."""

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process that they start inherits
# that: tests of Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Most of libp2p's daemons live for seconds. To collect garbage as they start takes a sixth of their time.
os.environ.setdefault("GOGC", "400")

# What is imported stays. To look through it for garbage again and again takes a quarter of the time of the imports, and
# half a second for each collection that a test asks for.
gc.disable()


def pytest_collection_finish() -> None:
    """Let the collector work from here on, and leave alone what is there."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Let it work at once in a process that collects no tests, because others run them."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what runs in virtual time, so that `pytest -m virtual` shows what all of it takes; sort what will run."""
    for item in items:
        if not _has_one(item, BY_THE_WALL_CLOCK) and isinstance(item, pytest.Function) and _simulates(item):
            item.add_marker("virtual")
    yield
    items[:] = long_ones_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in virtual time, or by the wall clock where a marker asks for it.

    Of a property of hypothesis, each example is one. An argument `loop` of a test by the wall clock makes its loop.
    """
    test, body = pyfuncitem.obj, _body(pyfuncitem)
    if not inspect.iscoroutinefunction(body):
        return None
    from noloco_node.sim.clock import run

    if _has_one(pyfuncitem, BY_THE_WALL_CLOCK):

        def run(coroutine: Any) -> None:
            with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop")) as runner:
                runner.run(coroutine)

    def runs(*arguments: Any, **named: Any) -> None:
        run(body(*arguments, **named))

    if body is not test:
        test.hypothesis.inner_test = functools.wraps(body)(runs)
        return None
    runs(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    return True


def long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return them in an order in which each worker begins with its share of the long tests.

    `--dist worksteal` gives each worker an equal part of the list, and who is done takes the end of another's. A long
    test there is waited for by all, and tests that share a swarm, torn apart, start it twice. Of three workers or more
    the last one has none that wait for daemons: it computes meanwhile.
    """
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        if _has_one(item, LONG):
            groups.setdefault(item.path if _has_one(item, ("shared",)) else item, []).append(item)
    short = [item for item in items if not _has_one(item, LONG)]
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    waiting, computing = (shares[:-1], shares[-1:]) if workers > 2 else (shares, shares)
    for group in sorted(groups.values(), key=len, reverse=True):
        min(waiting if _has_one(group[0], REAL) else computing, key=len).extend(group)
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares):
        room = max(0, (len(items) - len(ordered)) // (workers - number) - len(share))
        ordered += [*share, *short[:room]]
        short = short[room:]
    return ordered + short


def _has_one(item: pytest.Item, markers: Iterable[str]) -> bool:
    return not {mark.name for mark in item.iter_markers()}.isdisjoint(markers)


def _body(test: pytest.Function) -> Any:
    """Return the function of a test; of a property of hypothesis, that of an example."""
    return getattr(getattr(test.obj, "hypothesis", None), "inner_test", test.obj)


def _simulates(test: pytest.Function) -> bool:
    """Say whether a test is a coroutine, or its module uses the simulator or the swarms that run in it."""
    return inspect.iscoroutinefunction(_body(test)) or _uses_the_simulator(test.module)


@functools.cache
def _uses_the_simulator(module: ModuleType) -> bool:
    origins = (str(getattr(value, "__module__", "")) for value in vars(module).values())
    return any(origin == "swarms" or origin.startswith("noloco_node.sim.") for origin in origins)
