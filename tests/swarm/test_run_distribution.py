"""The run file between peers: believed by its digest alone."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from memory_swarms import recipe

from noloco_node.errors import Exit, UserError
from noloco_node.network.interface import Conversation
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.run_distribution import (
    JOINING_CLOCK_ERROR_S,
    SCHEMA,
    TOPIC,
    RunFileReply,
    RunFileText,
    check_clock,
    fetch,
)

OURS, OTHER = recipe(steps=20), recipe(steps=21)


def fetched(serve: dict[str, Callable[[Conversation], Awaitable[None]]], peers: list[str]) -> RunFileText:
    async def main() -> RunFileText:
        hub = SimNetwork()
        for peer, handler in serve.items():
            await hub.network(peer).serve(TOPIC, SCHEMA, handler)
        return await fetch(hub.network("newcomer"), peers, OURS.digest)

    return run(main())


def test_the_first_peer_with_the_right_text_is_enough() -> None:
    got = fetched({"wrong": OTHER.serve, "right": OURS.serve}, ["nobody", "wrong", "right"])
    assert got.text == OURS.text
    assert got.run == OURS.run


def test_a_broken_file_of_one_peer_stops_nobody() -> None:
    async def broken(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(RunFileReply(text="[model\n= ", unix_time=time.time()))

    assert fetched({"broken": broken, "right": OURS.serve}, ["broken", "right"]).text == OURS.text


def test_without_any_each_peer_is_named_with_its_answer() -> None:
    with pytest.raises(UserError) as caught:
        fetched({"wrong": OTHER.serve}, ["nobody", "wrong"])
    assert caught.value.code is Exit.OTHER_RUN
    assert "nobody: " in caught.value.why
    assert f"wrong: serves a run with the digest {OTHER.digest[:12]}" in caught.value.why


def test_nothing_of_this_machine_is_read_for_a_file_of_others(tmp_path: Path) -> None:
    """Not even to work out its digest: a stranger could have a disk read whole."""
    text = f'{OURS.text}\n[data]\ntokenizer = "{tmp_path}"\n'

    async def serve(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(RunFileReply(text=text, unix_time=time.time()))

    with pytest.raises(UserError) as caught:
        fetched({"stranger": serve}, ["stranger"])
    assert "names a directory of this machine" in caught.value.why
    assert "--local" in caught.value.hint


@pytest.mark.parametrize(
    ("off_s", "word"), [(JOINING_CLOCK_ERROR_S + 1, "ahead of"), (-JOINING_CLOCK_ERROR_S - 1, "behind")]
)
def test_a_clock_that_is_off_is_said(off_s: float, word: str) -> None:
    async def serve(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(RunFileReply(text=OURS.text, unix_time=time.time() - off_s))

    with pytest.raises(UserError, match=f"clock is 61 s {word} a peer's"):
        fetched({"right": serve}, ["right"])
    check_clock(JOINING_CLOCK_ERROR_S - 1, "somebody")
