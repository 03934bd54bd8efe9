"""Every sample of a run counts once in its progress, however sources come, go, return and are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from statistics import median_low
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, recipe, until
from sample_counters import counters
from torch import Tensor

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter
from noloco_node.node.stage_work import StageWork
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Counters
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.receipts import SOURCE_LIFETIME_S, IssuedReceipts
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.stage_records import CLOCK_ERROR_S
from pipeline.messages import Gradient, Microbatch, Reply

RUN = recipe(stages=1, steps=10_000, window=1).run
TOKENS = torch.zeros(2, 9, dtype=torch.int64)
REFRESH_S = 30.0
SAMPLE_S = 3.0
FORGOTTEN_S = 2 * (SOURCE_LIFETIME_S + CLOCK_ERROR_S)
"""After which the DHT knows nothing of a source."""


# The law, with sources that train nothing.


class Words:
    """A text of always the same tokens."""

    async def draw(self) -> Tensor:
        return TOKENS

    def position(self) -> dict[str, Any]:
        return {"drawn": 1}

    async def restore(self, position: Mapping[str, Any]) -> bool:
        return position == {"drawn": 1}

    def news(self) -> list[str]:
        return ["a row is left out"]


class Life:
    """One session of a source: real presence and counting, and gradients that come after a while."""

    def __init__(
        self, hub: SimNetwork, name: str, progress: float, counters: Counters | None, there: Mapping[str, Life]
    ) -> None:
        clock = asyncio.get_running_loop().time
        self._there, self._rng, self._met = there, Random(name), 0
        self.issued = IssuedReceipts(int(1000 * clock()))
        self._presence = Membership(hub.network(name), "run", 1, refresh_s=REFRESH_S, unix_time=clock)
        self._name, self._begun_with, self._counters = name, progress, counters
        self.done = 0
        """Samples of this session."""
        self._presence.issued = self.issued
        self.stamp = progress
        self.recorded: list[events.Event] = []
        self._duty = StageWork(
            RUN, self._presence, self._open_text, Reporter(record=self.recorded.append, say=lambda _: None)
        )
        self._task = asyncio.create_task(self._live(), name=name)

    async def _open_text(self) -> Words:
        await asyncio.sleep(15.0)
        return Words()

    async def _process(self, microbatch: Microbatch, sender: str) -> Reply:
        self.stamp = microbatch.progress
        await asyncio.sleep(len(microbatch.hidden) * SAMPLE_S)
        self.done += len(microbatch.hidden)
        return Gradient(hidden=None, loss=1.0, tokens=8)

    async def _live(self) -> None:
        await self._presence.claim(self._record(PeerState.CATCHING_UP))
        self._duty.begin(self._begun_with, self._counters)
        replica: Any = SimpleNamespace(stage=0, worker=SimpleNamespace(process=self._process))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._presence.run())
            group.create_task(self._duty.run_until_done(replica))
            while True:
                self._presence.update(self._record(PeerState.TRAINING))
                self._meet()
                await asyncio.sleep(REFRESH_S)

    def _meet(self) -> None:
        """Meet one of the others, as replicas do once a round."""
        others = [session for session in self._there.values() if session is not self]
        if others:
            partner = self._rng.choice(others)
            ours, theirs = (session.done - session._met for session in (self, partner))
            self.issued.add(partner._name, theirs, brought=ours)
            partner.issued.add(self._name, ours, brought=theirs)
            self._met, partner._met = self.done, partner.done

    def _record(self, state: PeerState) -> PeerRecord:
        steps = self._duty.samples // RUN.samples_per_step
        return PeerRecord(peer=self._name, stage=0, state=state, samples=self._duty.samples, inner_steps=steps)

    async def end(self, *, politely: bool) -> Counters:
        """End it, and return what its checkpoint counts."""
        samples, position = self._duty.samples, self._duty.position()
        taken = counters(progress=self.stamp, samples=samples, data_position=position)
        assert not self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])
        if politely:
            self._presence.update(self._record(PeerState.LEAVING))
            await self._presence.withdraw()
        return taken


class Run:
    """The sources of a run, and all that was ever done."""

    def __init__(self) -> None:
        self.hub = SimNetwork()
        self.sessions: dict[str, Life] = {}
        self.checkpoints: dict[str, Counters] = {}
        self.begun = 0
        self.last = ""
        """Who went last, and so knows how far the run was."""
        self._done_before = 0

    @property
    def done(self) -> int:
        return self._done_before + sum(session.done for session in self.sessions.values())

    def begin(self, name: str, *, anew: bool = False) -> None:
        """Let a source begin, at the progress of those that are there, or else at that of its checkpoint."""
        counters = None if anew else self.checkpoints.get(name)
        own = counters.progress if counters else 0.0
        known = median_low([session.stamp for session in self.sessions.values()]) if self.sessions else own
        self.sessions[name] = Life(self.hub, name, known, counters, self.sessions)
        self.begun += 1

    async def end(self, name: str, *, politely: bool) -> None:
        session = self.sessions.pop(name)
        self.checkpoints[name] = await session.end(politely=politely)
        self._done_before += session.done
        self.last = name
        self.hub.kill(name)

    def is_right(self) -> None:
        """Check what all say: at most a few readings late for each session that began."""
        true = self.done / RUN.budget_samples
        late = 4 * REFRESH_S / SAMPLE_S * (len(self.sessions) + self.begun) / RUN.budget_samples
        for name, session in self.sessions.items():
            assert true - late <= session.stamp <= true + late, name


async def test_what_is_left_out_of_a_text_goes_into_the_journal() -> None:
    swarm = Run()
    swarm.begin("a")
    await asyncio.sleep(10 * REFRESH_S)
    recorded = swarm.sessions["a"].recorded
    await swarm.end("a", politely=True)
    assert events.Noticed(what="text", text="a row is left out") in recorded


Change = tuple[str, bool, bool, float]
"""Which source comes or goes, whether it begins anew, whether it leaves politely, and the seconds until the next."""
changes = st.lists(
    st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans(), st.sampled_from([100.0, FORGOTTEN_S])),
    min_size=3,
    max_size=8,
)


@settings(max_examples=5)
@given(changes)
@example([("a", False, True, FORGOTTEN_S)] * 3)
@example(
    [
        ("b", False, True, FORGOTTEN_S),
        ("a", False, True, FORGOTTEN_S),
        ("c", False, True, 100.0),
        ("a", False, True, 500.0),
    ]
)
@example([("b", False, True, FORGOTTEN_S), ("a", False, False, FORGOTTEN_S), ("a", True, True, FORGOTTEN_S)])
@example(
    [
        ("b", False, False, 100.0),
        ("d", False, False, FORGOTTEN_S),
        ("b", False, False, FORGOTTEN_S),
        ("c", False, False, 100.0),
        ("a", False, False, FORGOTTEN_S),
        ("b", False, False, FORGOTTEN_S),
        ("c", False, False, FORGOTTEN_S),
        ("b", False, False, 100.0),
    ]
)
async def test_whoever_comes_goes_and_returns_every_sample_counts_once(story: list[Change]) -> None:
    """Source "a" is there from the beginning. Where nobody is left, the first to come is who went last."""
    told = Run()
    told.begin("a")
    await asyncio.sleep(FORGOTTEN_S)
    for name, anew, politely, pause_s in story:
        if name in told.sessions:
            await told.end(name, politely=politely)
        else:
            told.begin(name if told.sessions else told.last, anew=anew and bool(told.sessions))
        await asyncio.sleep(pause_s)
        told.is_right()
    for name in list(told.sessions):
        await told.end(name, politely=True)


async def test_who_comes_back_with_newer_news_of_the_run_than_its_stage_has_keeps_them() -> None:
    """All go, "c" for good and "b" last; "a" is the first to come back, and knows less of the run than "b"."""
    told = Run()
    for name in "abc":
        told.begin(name)
    for name in "cab":
        await asyncio.sleep(FORGOTTEN_S)
        await told.end(name, politely=True)
    await asyncio.sleep(FORGOTTEN_S)
    for name in "ab":
        told.begin(name)
        await asyncio.sleep(10 * REFRESH_S)
    stamp, true = told.sessions["b"].stamp, told.done / RUN.budget_samples
    assert abs(stamp - true) < 0.01


# Nodes.


async def test_a_source_that_comes_back_to_a_swarm_that_knows_nothing_does_what_is_left() -> None:
    what = recipe(stages=1, steps=40, per_round=4)
    first = Peer(SimNetwork(), what, "peer-a", 0)
    await until(lambda: len(first.of(events.InnerStep)) >= 25)
    await asked_to_leave(first)
    again = Peer(SimNetwork(), what, "peer-a", 0, saved=first.saved)
    await again.task
    steps = [event.step for peer in (first, again) for event in peer.of(events.InnerStep)]
    assert steps == list(range(1, len(steps) + 1))
    assert 38 <= len(steps) <= 40, "but for the microbatches that were discarded"
    assert again.of(events.Finished)[0].why == "the run is over"
    assert any("our own checkpoint" in line for line in again.said)


def test_two_sources_that_come_back_one_after_the_other_do_what_is_left() -> None:
    async def main() -> int:
        what = recipe(stages=1, replicas=2, steps=60, per_round=4)
        hub = SimNetwork()
        first = [Peer(hub, what, name, 0) for name in ("peer-a", "peer-b")]
        await until(lambda: len(first[0].of(events.InnerStep)) >= 25)
        await asked_to_leave(*first)
        hub = SimNetwork()
        again = [Peer(hub, what, first[0].name, 0, saved=first[0].saved)]
        await asyncio.sleep(1.0)
        again.append(Peer(hub, what, first[1].name, 0, saved=first[1].saved))
        await asyncio.gather(*[peer.task for peer in again])
        return sum(peer.counters.samples for peer in again if peer.saved is not None)

    budget = recipe(stages=1, replicas=2, steps=60).run.budget_samples
    assert 0.95 * budget <= run(main()) <= 1.05 * budget


class Slow(Peer):
    """One whose text takes long to open."""

    async def _open_text(self) -> Any:
        await asyncio.sleep(50.0)
        return self.text


async def test_what_others_do_while_a_source_opens_its_text_counts_for_it() -> None:
    """Its stamps, its learning rate and its end were late by that for all of its session."""
    hub, what = SimNetwork(), recipe(stages=2, replicas=2, steps=400)
    last = [Peer(hub, what, f"peer-last-{number}", 1, job_s=0.02) for number in range(2)]
    first = Peer(hub, what, "peer-first", 0, job_s=0.1)
    await until(lambda: len(first.of(events.InnerStep)) > 10)
    late = Slow(hub, what, "peer-late", 0, job_s=0.1)
    await until(lambda: len(late.of(events.InnerStep)) > 15, 1200.0)
    done = sum(peer.node.samples for peer in (first, late)) / what.run.budget_samples
    assert done > 0.08, "much was done meanwhile"
    assert abs(late.of(events.InnerStep)[-1].progress - done) < 0.02
    await asked_to_leave(*last, first, late)


async def test_what_comes_back_while_a_source_leaves_is_in_what_the_swarm_knows_of_it() -> None:
    """Each microbatch takes seconds, and the last ones return after its record was renewed for the last time."""
    hub, what = SimNetwork(), recipe(stages=2, steps=400, window=4)
    last = Peer(hub, what, "peer-last", 1, job_s=0.2)
    first = Peer(hub, what, "peer-first", 0, job_s=0.2)
    watching = Membership(hub.network("watcher"), what.digest, 2, refresh_s=0.2)
    await until(lambda: len(first.of(events.InnerStep)) > 3)
    await asked_to_leave(first)
    found = (await watching.peek()).run_samples
    await asked_to_leave(last)
    done = first.counters.samples
    assert found == done > 0


class Illiterate(Peer):
    """One whose text never opens."""

    async def _open_text(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


async def test_who_leaves_before_its_text_is_open_keeps_its_samples_and_its_place_in_the_text() -> None:
    what = recipe(stages=1, steps=400, per_round=4)
    first = Peer(SimNetwork(), what, "peer-a", 0)
    await until(lambda: len(first.of(events.InnerStep)) >= 5)
    await asked_to_leave(first)
    again = Illiterate(SimNetwork(), what, "peer-a", 0, saved=first.saved)
    await until(lambda: bool(again.of(events.Started)))
    await asked_to_leave(again)
    assert first.saved is not again.saved
    assert again.counters.samples == first.counters.samples > 0
    assert again.counters.data_position == first.counters.data_position
