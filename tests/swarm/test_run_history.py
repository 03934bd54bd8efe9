"""What is remembered of a run: by a home over restarts, and by whoever is asked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from noloco_node.network.interface import Conversation
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import (
    HISTORY_SCHEMA,
    HISTORY_TOPIC,
    LEAST,
    STEP,
    ReachedReply,
    RunHistory,
    reached,
)


def roster(*progress: float, round: int = 1) -> Roster:
    records = [
        PeerRecord(peer=str(number), stage=0, state=PeerState.TRAINING, round=round, progress=each)
        for number, each in enumerate(progress)
    ]
    return Roster(stages=(tuple(records), ()))


def test_a_home_remembers_the_last_that_it_saw(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "reached.json"

    def opened(run_id: str = "run") -> RunHistory:
        return RunHistory(path, run_id, said.append)

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
    assert opened("another run").progress == 0.0
    path.write_text("garbled")
    assert opened().progress == 0.0
    assert said == []


def test_a_disk_that_refuses_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    history = RunHistory(tmp_path / "nowhere" / "reached.json", "run", said.append)
    history.note(roster(0.2))
    history.note(roster(0.4))
    assert len(said) == 1
    assert history.progress == 0.4


@pytest.mark.parametrize(("says", "heard"), [(0.4, 0.4), (0.0, 0.0), (math.nan, 0.0), (1.5, 0.0)])
def test_whoever_knows_most_is_believed_within_bounds(tmp_path: Path, says: float, heard: float) -> None:
    async def main() -> None:
        hub = SimNetwork()
        knows = RunHistory(tmp_path / "reached.json", "run", print)
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

    run(main())
