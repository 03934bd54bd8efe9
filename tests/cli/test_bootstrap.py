"""What a bootstrap peer answers to newcomers, and to whom not."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from memory_swarms import recipe
from threadless import without_threads

from noloco_node.cli import bootstrap
from noloco_node.errors import UserError
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import speed_test
from noloco_node.swarm.run_distribution import RunHistory, fetch


@pytest.fixture(autouse=True)
def threadless() -> Iterator[None]:
    with without_threads():
        yield


async def test_a_stranger_that_violates_the_protocol_is_served_no_longer_and_newcomers_are(tmp_path: Path) -> None:
    hub, run = SimNetwork(), recipe(steps=20)
    await bootstrap._serve(hub.network("door"), run, RunHistory(tmp_path / "reached", print), {})
    stranger = hub.network("stranger")
    await fetch(stranger, ["door"], run.digest)
    for _ in range(10):
        with suppress(ConnectionError):
            async with stranger.talk("door", speed_test.TOPIC, speed_test.SCHEMA) as conversation:
                await conversation.send(speed_test.SendMe(pieces=10**6))
                await conversation.receive()
        await asyncio.sleep(2.0)
    with pytest.raises(UserError) as caught:
        await fetch(stranger, ["door"], run.digest)
    assert "shut out" in caught.value.why
    assert (await fetch(hub.network("newcomer"), ["door"], run.digest)).text == run.text
