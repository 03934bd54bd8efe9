"""What systems allow and tell, with fakes of their calls."""

import asyncio
import os
import resource
import sys
import time
from types import SimpleNamespace

import pytest

from noloco_node.machine import memory, system

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("own", "most", "after"),
    [(256, UNLIMITED, system.WANTED_FILES), (256, 1024, 1024), (8192, 8192, 8192), (UNLIMITED, UNLIMITED, UNLIMITED)],
)
def test_a_process_may_open_as_many_files_as_a_node_wants(
    own: int, most: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(own, most)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    system.allow_files()
    assert limits[-1] == (after, most)
    assert system.allowed_files() == (sys.maxsize if after == UNLIMITED else after)


def test_a_system_that_refuses_leaves_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, UNLIMITED))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    system.allow_files()
    assert system.allowed_files() == 256


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_cuda_s_memory_grows_in_segments_unless_the_owner_has_a_setting(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(own))
    memory.expand_segments()
    assert environment == own or (not own and set(environment.values()) == {"expandable_segments:True"})
    assert environment


def test_this_machine_tells_its_sleep() -> None:
    assert 0.0 <= system.asleep_s() < 1e9


@pytest.mark.parametrize(
    ("clocks", "asleep_s"),
    [
        ({"CLOCK_BOOTTIME": 90.0, "CLOCK_MONOTONIC": 60.0}, 30.0),
        ({"CLOCK_MONOTONIC": 90.0, "CLOCK_UPTIME_RAW": 50.0}, 40.0),
        ({"CLOCK_MONOTONIC": 90.0}, 0.0),
    ],
    ids=["Linux", "macOS", "another"],
)
def test_sleep_is_the_difference_of_two_clocks(
    clocks: dict[str, float], asleep_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(clock_gettime=clocks.__getitem__, **{name: name for name in clocks})
    monkeypatch.setattr(system, "time", fake)
    assert system.asleep_s() == asleep_s
    assert system.time is not time


class UvLoop(asyncio.SelectorEventLoop):
    """Says that it comes from where uvloop's does."""


UvLoop.__module__ = "uvloop"


@pytest.mark.parametrize(("platform", "counts"), [("darwin", True), ("linux", False)])
def test_uvloop_counts_a_sleep_on_macos(platform: str, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    for loop, expected in ((UvLoop(), counts), (asyncio.SelectorEventLoop(), False)):
        assert system.counts_sleep(loop) == expected
        loop.close()
