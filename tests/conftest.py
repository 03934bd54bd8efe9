"""What every test relies on."""

from __future__ import annotations

import gc
import signal
from types import ModuleType

import pytest
from hypothesis import settings

# A machine with other work to do is no reason for an example to fail, and the same code must pass or fail everywhere:
# examples follow from the test. `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process that they start inherits
# that: tests of Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs in virtual time, so that `pytest -m virtual` shows what all of it together takes."""
    for item in items:
        real = any(item.get_closest_marker(name) for name in ("network", "processes", "wan"))
        if not real and isinstance(item, pytest.Function) and _simulates(item.module):
            item.add_marker("virtual")


def _simulates(module: ModuleType) -> bool:
    """Say whether a module uses the simulator, or the swarms that run in it."""
    origins = (str(getattr(value, "__module__", "")) for value in vars(module).values())
    return any(origin == "swarms" or origin.startswith("noloco_node.sim.") for origin in origins)
