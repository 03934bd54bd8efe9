"""What peers tell of a run: its file, believed by its digest alone, and how far it had come."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_swarms import recipe
from threadless import without_threads
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.network.interface import Conversation
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import run_distribution
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import (
    ATTEMPT_EVERY_S,
    ATTEMPTS,
    HISTORY_SCHEMA,
    HISTORY_TOPIC,
    LEAST,
    SCHEMA,
    STEP,
    TOPIC,
    ReachedReply,
    RunFileReply,
    RunFileText,
    RunHistory,
    fetch,
    reached,
)

OURS, OTHER = recipe(steps=20), recipe(steps=21)


def fetched(serve: dict[str, Callable[[Conversation], Awaitable[None]]], peers: list[str]) -> RunFileText:
    async def main() -> RunFileText:
        hub = SimNetwork()
        for peer, handler in serve.items():
            await hub.network(peer).serve(TOPIC, SCHEMA, handler)
        return await fetch(hub.network("newcomer"), peers, OURS.digest)

    with without_threads():
        return run(main())


def test_the_first_peer_with_the_right_text_is_enough() -> None:
    got = fetched({"wrong": OTHER.serve, "right": OURS.serve}, ["nobody", "wrong", "right"])
    assert got.text == OURS.text
    assert got.run == OURS.run


@settings(max_examples=15)
@given(late_s=st.floats(0.0, 2 * (ATTEMPTS - 1) * ATTEMPT_EVERY_S, width=16))
def test_a_peer_that_has_just_started_is_asked_again_for_a_while(late_s: float) -> None:
    """After a power cut all peers start at once, and no node may leave for good because it came a moment too early."""
    patience_s = (ATTEMPTS - 1) * ATTEMPT_EVERY_S
    assume(not patience_s <= late_s < patience_s + 1.0)  # the last question takes a moment to arrive
    said = list[str]()

    async def main() -> str | Exit:
        hub, clock = SimNetwork(), asyncio.get_running_loop()
        clock.call_later(late_s, lambda: tasks.append(clock.create_task(serving(hub))))
        try:
            return (await fetch(hub.network("newcomer"), ["starting"], OURS.digest)).text
        except UserError as error:
            return error.code

    async def serving(hub: SimNetwork) -> None:
        await hub.network("starting").serve(TOPIC, SCHEMA, OURS.serve)

    tasks = list[asyncio.Task[None]]()
    with without_threads(), patch.object(run_distribution, "say", said.append):
        assert run(main()) == (OURS.text if late_s < patience_s else Exit.UNREACHABLE)
    waits = min(ATTEMPTS - 1, math.ceil(late_s / ATTEMPT_EVERY_S))
    assert waits - 1 <= len(said) <= waits, "each wait is said; what is asked takes a moment to arrive"
    assert all("waiting for a peer that serves the run file (starting " in line for line in said)


def test_what_will_not_change_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(run_distribution, "say", said.append)
    with pytest.raises(UserError, match="No peer of the invite serves"):
        fetched({"wrong": OTHER.serve}, ["wrong"])
    assert not said


@pytest.mark.real_time
async def test_files_are_hashed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local directory may have gigabytes, and a loop that stands still answers nobody."""
    places = list[threading.Thread]()

    def hashes(_: RunConfig) -> dict[str, str]:
        places.append(threading.current_thread())
        return {}

    monkeypatch.setattr(run_distribution, "content_hashes", hashes)
    hub = SimNetwork()
    await hub.network("right").serve(TOPIC, SCHEMA, OURS.serve)
    assert (await fetch(hub.network("newcomer"), ["right"], OURS.digest)).text == OURS.text
    assert threading.main_thread() not in places


def test_a_broken_file_of_one_peer_stops_nobody() -> None:
    async def broken(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(RunFileReply(text="[model\n= ", unix_time=time.time()))

    assert fetched({"broken": broken, "right": OURS.serve}, ["broken", "right"]).text == OURS.text


def test_no_words_of_a_stranger_reach_the_screen_but_a_short_line() -> None:
    async def broken(conversation: Conversation) -> None:
        await conversation.receive()
        text = f"[model]\n{json.dumps('x' + chr(27) + '[31m' + 'y' * 9000)} = 1\n"
        await conversation.send(RunFileReply(text=text, unix_time=time.time()))

    with user_error(Exit.OTHER_RUN) as caught:
        fetched({"broken": broken}, ["broken"])
    assert caught.value.why.startswith("broken: ")
    assert caught.value.why.isprintable()
    assert len(caught.value.why) <= 500


@pytest.mark.parametrize(
    ("peers", "code"),
    [([], Exit.UNREACHABLE), (["nobody"], Exit.UNREACHABLE), (["nobody", "of another run"], Exit.OTHER_RUN)],
)
def test_a_node_that_reached_nobody_is_started_again(peers: list[str], code: Exit) -> None:
    async def main() -> None:
        hub = SimNetwork()
        hub.network("of another run")
        await fetch(hub.network("newcomer"), peers, OURS.digest)

    with user_error(code) as caught:
        run(main())
    assert caught.value.why


def test_without_any_each_peer_is_named_with_its_answer() -> None:
    with user_error(Exit.OTHER_RUN) as caught:
        fetched({"wrong": OTHER.serve}, ["nobody", "wrong"])
    assert "nobody cannot be reached; wrong: serves" in caught.value.why
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


def roster(*progress: float, round: int = 1) -> Roster:
    records = [
        PeerRecord(peer=str(number), stage=0, state=PeerState.TRAINING, round=round, progress=each)
        for number, each in enumerate(progress)
    ]
    return Roster(stages=(tuple(records), ()))


def test_a_home_remembers_the_last_that_it_saw(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "reached.json"

    def opened() -> RunHistory:
        return RunHistory(path, said.append)

    history = opened()
    history.note(roster(0.2, 0.3, round=0))
    assert (history.progress, path.exists()) == (0.0, False), "nobody has finished a round"
    history.note(roster(0.0))
    assert opened().progress == LEAST, "begun all the same"
    history.note(roster(0.2, 0.3, 0.9))
    assert opened().progress == 0.3
    history.note(roster(0.3 + STEP / 2))
    assert opened().progress == 0.3, "not written at every look"
    history.note(roster())
    history.note(roster(1.0 - STEP / 2))
    history.note(roster(1.0))
    assert opened().progress == 1.0
    path.write_text("garbled")
    assert opened().progress == 0.0
    assert said == []


def test_a_disk_that_refuses_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    history = RunHistory(tmp_path / "nowhere" / "reached.json", said.append)
    history.note(roster(0.2))
    history.note(roster(0.4))
    assert len(said) == 1
    assert history.progress == 0.4


@pytest.mark.parametrize(("says", "heard"), [(0.4, 0.4), (0.0, 0.0), (math.nan, 0.0), (1.5, 0.0)])
async def test_whoever_knows_most_is_believed_within_bounds(tmp_path: Path, says: float, heard: float) -> None:
    hub = SimNetwork()
    knows = RunHistory(tmp_path / "reached.json", print)
    knows.note(roster(0.2))

    async def answer(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(ReachedReply(progress=says))

    await hub.network("knows").serve(HISTORY_TOPIC, HISTORY_SCHEMA, knows.serve)
    await hub.network("says").serve(HISTORY_TOPIC, HISTORY_SCHEMA, answer)
    hub.network("old")
    asking = hub.network("asking")
    assert await reached(asking, ["says", "old", "gone"]) == heard
    assert await reached(asking, ["knows", "says"]) == max(0.2, heard)
    assert await reached(asking, []) == 0.0
