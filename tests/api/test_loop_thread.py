"""The engine's coroutines run in a thread of their own, and end as their caller wants."""

import asyncio
import os
import threading
from typing import get_type_hints

import pytest

from noloco_node.api.loop_thread import _SWITCHES, LoopThread, finished, in_python
from noloco_node.api.peer import PeerOptions
from noloco_node.errors import Exit, UserError

REFUSED = UserError("No.", why="a test", hint="nothing", code=Exit.USAGE)


async def where() -> int:
    return threading.get_ident()


async def refuse() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_refuse())


async def _refuse() -> None:
    raise REFUSED


def test_a_result_comes_from_another_thread() -> None:
    assert finished(where, "test") != threading.get_ident()


def test_an_error_of_ours_comes_without_its_group() -> None:
    with pytest.raises(UserError) as refused:
        finished(refuse, "test")
    assert refused.value is REFUSED


def test_a_hint_names_arguments_and_no_options() -> None:
    hint = "with --home, or --max-upload 3, or join --begin-anew"
    error = in_python(UserError("No.", why="--that", hint=hint, code=Exit.USAGE))
    hint = "with home=, or max_upload= 3, or join begin_anew=True"
    assert (error.hint, error.why, error.code) == (hint, "--that", Exit.USAGE)
    switches = {name for name, kind in get_type_hints(PeerOptions).items() if kind is bool}
    assert switches == _SWITCHES


def test_a_coroutine_that_is_cancelled_cleans_up() -> None:
    cleaned, over = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    thread = LoopThread(wait, "test", over.set)
    thread.cancel()
    assert thread.wait()
    assert over.wait()
    with pytest.raises(asyncio.CancelledError):
        thread.result()


def test_a_fork_is_told_that_it_has_no_thread() -> None:
    thread = LoopThread(where, "test")
    thread.wait()
    child = os.fork()
    if child == 0:
        try:
            thread.check_process()
        except UserError as error:
            os._exit(0 if "forked" in error.what else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    thread.check_process()
