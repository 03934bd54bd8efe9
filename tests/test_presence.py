"""The roster over a network in memory and virtual time: who appears, who leaves, and what strangers may write."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.presence import Presence
from noloco_node.roster import PeerRecord, Roster, State
from noloco_node.sim.clock import run
from noloco_node.sim.network.hub import Hub, MemoryNetwork
from noloco_node.sim.network.lines import Latency, Weather

RUN = "run"
WEATHER = Weather(latency=Latency(mean_s=0.05))


def record(peer: str, stage: int = 0, **facts: Any) -> PeerRecord:
    return PeerRecord(peer=peer, stage=stage, **({"state": State.TRAINING} | facts))


def peers(roster: Roster) -> list[list[str]]:
    return [[record.peer for record in stage] for stage in roster.stages]


def present(hub: Hub, peer: str) -> tuple[MemoryNetwork, Presence]:
    network = hub.network(peer)
    return network, Presence(network, RUN, 2)


def stored(serial: int, record: PeerRecord) -> bytes:
    """A record as `Presence` stores it."""
    return msgspec.msgpack.encode([serial, msgspec.to_builtins(record)])


def test_peers_appear_change_and_leave() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        _, other = present(hub, "b")
        assert peers(await one.claim(record("a", 0))) == [["a"], []]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(presence.run()) for presence in (one, other)]
            assert peers(await other.claim(record("b", 1))) == [["a"], ["b"]]
            while peers(one.roster) != [["a"], ["b"]]:
                await one.changed()
            # A change of state travels at once, other changes in the usual rhythm.
            other.update(record("b", 1, round=3, state=State.FINISHED))
            begun = asyncio.get_running_loop().time()
            while not one.roster.stage(1) or one.roster.stage(1)[0].round != 3:
                await one.changed()
            assert one.roster.stage(1)[0].state is State.FINISHED
            assert asyncio.get_running_loop().time() - begun < 12.0
            # Moving to another stage leaves no ghost; nor does leaving.
            await other.claim(record("b", 0))
            assert peers(await one.peek()) == [["a", "b"], []]
            await other.withdraw()
            assert peers(await one.peek()) == [["a"], []]
            await asyncio.sleep(60)
            assert peers(one.roster) == peers(other.roster) == [["a"], []]
            for task in tasks:
                task.cancel()

    run(main())


def test_a_peer_that_dies_without_a_word_leaves_by_itself() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        _, other = present(hub, "b")
        await one.claim(record("a", 0))
        await other.claim(record("b", 1))
        watching = asyncio.create_task(one.run())
        living = asyncio.create_task(other.run())
        await asyncio.sleep(100)
        assert peers(one.roster) == [["a"], ["b"]]
        living.cancel()
        hub.kill("b")
        await asyncio.sleep(15)
        assert peers(one.roster) == [["a"], ["b"]]
        await asyncio.sleep(40)
        assert peers(one.roster) == [["a"], []]
        watching.cancel()

    run(main())


class Forgetful:
    """A network whose readings fail or come back empty while `blind`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network, self.blind, self.fails = network, False, False
        self.peer_id, self.publish = network.peer_id, network.publish
        self.talk, self.serve, self.statistics = network.talk, network.serve, network.statistics

    async def read(self, key: str) -> Mapping[str, bytes]:
        if self.fails:
            raise ConnectionAbortedError("no answer")
        return {} if self.blind else await self._network.read(key)


@pytest.mark.parametrize("how", ["blind", "fails"])
def test_one_bad_reading_empties_no_roster(how: str) -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        network = Forgetful(hub.network("a"))
        one = Presence(network, RUN, 2)
        _, other = present(hub, "b")
        await one.claim(record("a", 0))
        await other.claim(record("b", 1))
        assert peers(await one.peek()) == [["a"], ["b"]]
        setattr(network, how, True)
        assert peers(await one.peek()) == [["a"], ["b"]]
        await asyncio.sleep(31)
        assert peers(await one.peek()) == [["a"], []]
        setattr(network, how, False)
        await other.claim(record("b", 1))
        assert peers(await one.peek()) == [["a"], ["b"]]
        assert one.statistics().get("reads.failed", 0) == (6 if how == "fails" else 0)

    run(main())


def test_samples_outlive_their_sources_and_never_shrink() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        _, other = present(hub, "b")
        await one.claim(record("a", 0, samples=100))
        await other.claim(record("b", 0, samples=50))
        roster = await one.peek()
        assert (roster.run_samples, roster.own_samples) == (150, 100)
        assert (roster.sources, roster.sources_finished) == (2, 0)
        other.update(record("b", 0, samples=60, state=State.FINISHED))
        await other.withdraw()
        roster = await one.peek()
        assert (roster.run_samples, roster.sources, roster.sources_finished) == (160, 2, 1)
        assert peers(roster) == [["a"], []]
        # A newcomer learns of it for minutes; who knew it does not forget. Of "a" nothing is heard any more: it neither
        # ends the run nor holds it up.
        await asyncio.sleep(300)
        _, late = present(hub, "c")
        roster = await late.peek()
        assert (roster.run_samples, roster.sources, roster.sources_finished) == (160, 1, 1)
        await asyncio.sleep(1000)
        assert (await one.peek()).run_samples == 160
        # Whoever comes back is known by its old count, and cannot lower it.
        hub.kill("b")
        _, again = present(hub, "b")
        await again.claim(record("b", 0, samples=10))
        assert (await one.peek()).run_samples == 160

    run(main())


def test_only_a_source_counts_as_one() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        await one.claim(record("a", 1, samples=5))
        assert (await one.peek()).sources == 0

    run(main())


BAD_RECORDS = {
    "not MessagePack": b"\xc1garbage",
    "a record of another peer": stored(1, record("b", 0)),
    "a record of another stage": stored(1, record("m", 1)),
    "a number that is none": stored(1, record("m", 0, device_s=float("nan"))),
    "infinite speed": stored(1, record("m", 0, tokens_per_s=float("inf"))),
    "negative speed": stored(1, record("m", 0, device_s=-1.0)),
    "progress beyond the end": stored(1, record("m", 0, progress=1.5)),
    "a negative round": stored(1, record("m", 0, round=-1)),
    "an absurd count": stored(1, record("m", 0, samples=2**60)),
    "too long": stored(1, record("m", 0, waiting="x" * 5000)),
    "an unknown state": msgspec.msgpack.encode([1, {"peer": "m", "stage": 0, "state": "bored"}]),
    "no record at all": msgspec.msgpack.encode([1, 2, 3]),
}


@pytest.mark.parametrize("raw", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_what_strangers_write_is_checked_and_counted(raw: bytes) -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        stranger, _ = present(hub, "m")
        _, one = present(hub, "a")
        assert await stranger.publish(f"{RUN}/stage/0", "m", raw, 30.0)
        assert peers(await one.claim(record("a", 0))) == [["a"], []]
        assert one.statistics()["records.garbled"] == 1
        assert await stranger.publish(f"{RUN}/stage/0", "m", stored(2, record("m", 0)), 31.0)
        assert peers(await one.peek()) == [["a", "m"], []]

    run(main())


@given(st.binary(max_size=60), st.sampled_from(["stage/0", "stage/1", "sources"]))
def test_random_records_harm_nobody(raw: bytes, key: str) -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        stranger, _ = present(hub, "m")
        _, one = present(hub, "a")
        await stranger.publish(f"{RUN}/{key}", "m", raw, 30.0)
        roster = await one.claim(record("a", 0))
        assert peers(roster) == [["a"], []]
        assert roster.run_samples <= 2**53

    run(main())


def test_a_flood_of_records_is_bounded_and_the_known_stay() -> None:
    async def main() -> None:
        hub = Hub(Weather(latency=Latency(mean_s=0.0)))
        stranger, _ = present(hub, "m")
        _, one = present(hub, "z")
        _, other = present(hub, "y")
        await other.claim(record("y", 0))
        await one.claim(record("z", 0))
        for number in range(5000):
            name = f"a{number:05}"
            await stranger.publish(f"{RUN}/stage/0", name, stored(1, record(name, 0)), 300.0)
        roster = await one.peek()
        assert len(roster.stage(0)) <= 4097
        assert {"y", "z"} <= {record.peer for record in roster.stage(0)}

    run(main())


def test_a_record_of_ours_that_is_too_long_is_our_mistake() -> None:
    async def main() -> None:
        _, one = present(Hub(), "a")
        with pytest.raises(ValueError, match="4096 are allowed"):
            await one.claim(record("a", 0, waiting="x" * 5000))

    run(main())


def test_an_update_cannot_change_the_stage() -> None:
    async def main() -> None:
        _, one = present(Hub(), "a")
        with pytest.raises(ValueError, match="claim"):
            one.update(record("a", 0))

    run(main())


def test_a_lost_network_is_counted_and_not_raised() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        await one.claim(record("a", 0))
        hub.kill("a")
        await one.withdraw()
        await one.peek()
        assert one.statistics()["publish.failed"] >= 1

    run(main())


def test_samples_of_whom_nobody_saw_at_work_do_not_count() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        _, one = present(hub, "a")
        await one.claim(record("a", 0, samples=100))
        stranger, _ = present(hub, "stranger")
        for forged, samples in (("stranger", 2**50), ("invented", 1)):
            raw = msgspec.msgpack.encode((samples, True))
            assert await stranger.publish(f"{RUN}/sources", forged, raw, 600.0)
        roster = await one.peek()
        assert (roster.run_samples, roster.sources, roster.sources_finished) == (100, 1, 0)

    run(main())


def test_a_peer_at_work_reads_only_the_stages_that_it_has_to_do_with() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        one = Presence(hub.network("a"), RUN, 4)
        for stage, name in enumerate("bcde"):
            await Presence(hub.network(name), RUN, 4).claim(record(name, stage, samples=10))
        assert peers(await one.claim(record("a", 2))) == [["b"], ["c"], ["a", "d"], ["e"]]
        one.focus((2, 3))
        roster = await one.peek()
        assert peers(roster) == [["b"], [], ["a", "d"], ["e"]]
        assert one.complete
        assert (roster.run_samples, roster.sources) == (10, 1), "the sources count for everybody"
        one.focus(range(4))
        assert peers(await one.peek()) == [["b"], ["c"], ["a", "d"], ["e"]]

    run(main())
