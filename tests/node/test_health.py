"""What a node notices: clocks, sleep, deserted stages, an old roster; said once, again, and at the end."""

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, recipe, until

from noloco_node.cli import bootstrap
from noloco_node.journal import events
from noloco_node.machine.interface import Host, Reporter
from noloco_node.network.swarm_clock import CLOCK_DOUBT_S
from noloco_node.node.health import (
    LEAST_S,
    REMIND_S,
    STILL_S,
    ClockSample,
    Condition,
    HealthMonitor,
    JumpKind,
    Said,
    compare,
    sentence,
    warnings_due,
)
from noloco_node.node.reporting import STALL_S, STALLS
from noloco_node.observe.bottleneck import all_waits
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.clock import VirtualLoop
from noloco_node.sim.network.sim_network import SimNetwork, SimPeerNetwork
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration
from pipeline.messages import Microbatch, Reason, Refused, Reply

SECONDS = st.floats(0.0, 1e6).map(lambda seconds: 0.0 if seconds < 1.0 else seconds)


@given(SECONDS, SECONDS, st.floats(-1e6, 1e6), st.floats(0.0, 4.0))
def test_each_clock_tells_its_own_story(slept_s: float, still_s: float, set_s: float, late_s: float) -> None:
    before = ClockSample(loop_s=1e3, unix_s=1e9, asleep_s=50.0)
    ran_s = 5.0 + late_s + still_s
    after = ClockSample(1e3 + ran_s, 1e9 + ran_s + slept_s + set_s, 50.0 + slept_s)
    found = {happening.kind: happening.seconds for happening in compare(before, after, 5.0)}
    assert found.get(JumpKind.SLEPT, 0.0) == pytest.approx(slept_s if slept_s >= LEAST_S else 0.0, abs=1e-3)
    late = late_s + still_s
    assert found.get(JumpKind.STOOD_STILL, 0.0) == pytest.approx(late if late >= STILL_S else 0.0, abs=1e-3)
    if abs(abs(set_s) - LEAST_S) > 1e-3:
        assert found.get(JumpKind.CLOCK_SET, 0.0) == pytest.approx(set_s if abs(set_s) >= LEAST_S else 0.0, abs=1e-3)
    for happening in compare(before, after, 5.0):
        assert format_duration(abs(happening.seconds)) in sentence(happening)


@given(SECONDS, SECONDS, st.floats(-1e6, 1e6))
def test_a_loop_whose_clock_runs_through_a_sleep_tells_the_same_story(
    slept_s: float, still_s: float, set_s: float
) -> None:
    before, ran_s = ClockSample(1e3, 1e9, 50.0), 5.0 + still_s
    stops, runs = (
        ClockSample(1e3 + loop_s, 1e9 + ran_s + slept_s + set_s, 50.0 + slept_s) for loop_s in (ran_s, ran_s + slept_s)
    )
    for one, other in zip(compare(before, stops, 5.0), compare(before, runs, 5.0, loop_counts_sleep=True), strict=True):
        assert (one.kind, one.seconds) == (other.kind, pytest.approx(other.seconds))


NAMES = st.sets(st.sampled_from(["stage 0", "stage 1", "roster", "clock"]))


@given(st.lists(st.tuples(NAMES, st.floats(1.0, 200.0)), max_size=30))
def test_what_lasts_is_said_once_and_again_and_at_its_end(story: list[tuple[set[str], float]]) -> None:
    said: Mapping[str, Said] = {}
    now_s, lasting, last = 0.0, set[str](), dict[str, float]()
    for names, passed_s in story:
        now_s += passed_s
        conditions = {name: Condition("brief", f"{name} is bad", f"{name} is well") for name in sorted(names)}
        spoken, said = warnings_due(said, conditions, now_s)
        begun = {each.what for each in spoken if not each.over}
        assert {each.what for each in spoken if each.over} == lasting - names
        assert names - lasting <= begun
        for name in names & lasting:
            assert (name in begun) == (now_s - last[name] >= REMIND_S)
        last.update(dict.fromkeys(begun, now_s))
        lasting = names


class Scene:
    """A node's watch over a roster that a test makes, on a machine whose clocks it moves."""

    def __init__(self, hub: SimNetwork) -> None:
        self.said: list[str] = []
        self.events: list[events.Event] = []
        self.forgiven: list[float] = []
        self.loop = asyncio.get_running_loop()
        self.set_s = self.slept_s = 0.0
        self.hub, self.network = hub, hub.network("a")
        self.tasks: list[asyncio.Task[None]] = []
        self.membership = Membership(self.network, "run", 3, unix_time=self.unix_time)
        self.stalls, self.excused = False, 0
        reporter = Reporter(record=self.events.append, say=self.said.append)
        host = cast(Host, self)
        self.watch = HealthMonitor(self.membership, reporter, host, self.forgiven.append, self.of_training)

    def of_training(self, explained: bool) -> dict[str, Condition]:
        stall = Condition("brief", "nothing comes back", "the stall is over")
        self.excused += explained
        return {"stall": stall} if self.stalls and not explained else {}

    # What the watch asks of its host.

    def unix_time(self) -> float:
        return 1e9 + self.loop.time() + self.slept_s

    def clock_ahead_s(self) -> float:
        return self.set_s

    def asleep_s(self) -> float:
        return self.slept_s

    # What a test lets happen.

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep: the loop's clock stands still, the time of day goes on."""
        self.slept_s += seconds

    def peer(self, name: str, stage: int) -> tuple[SimPeerNetwork, asyncio.Task[None]]:
        """Let another peer serve a stage."""
        network = self.hub.network(name)
        membership = Membership(network, "run", 3, unix_time=lambda: 1e9 + self.loop.time())

        async def live() -> None:
            await membership.claim(PeerRecord(peer=name, stage=stage, state=PeerState.TRAINING))
            await membership.run()

        self.tasks.append(asyncio.create_task(live()))
        return network, self.tasks[-1]

    def about(self, words: str) -> list[str]:
        return [line for line in self.said if words in line]


async def watched(set_s: float = 0.0) -> Scene:
    """Let peer `a` of stage 0 keep watch; `set_s`: by which its clock is wrong."""
    scene = Scene(SimNetwork())
    scene.set_s = set_s
    await scene.membership.claim(PeerRecord(peer="a", stage=0, state=PeerState.TRAINING))
    scene.tasks += [asyncio.create_task(scene.membership.run()), asyncio.create_task(scene.watch.run())]
    return scene


async def test_a_stage_without_replicas_is_named_with_what_to_do_until_one_comes() -> None:
    scene = await watched()
    dies, dying = scene.peer("b", 1)
    scene.peer("c", 2), scene.peer("d", 2)
    await asyncio.sleep(100)
    assert scene.said == []
    assert not scene.watch.trouble
    dying.cancel()
    scene.hub.kill(dies.peer_id)
    await asyncio.sleep(60)
    (line,) = scene.said
    assert "stage 1 has had no replica for" in line
    assert "--stage 1" in line
    assert "stage 1" in "".join(scene.watch.trouble)
    await asyncio.sleep(2.5 * REMIND_S)
    assert len(scene.about("stage 1 has had no replica")) == 3, "every few minutes"
    scene.peer("e", 1)
    await asyncio.sleep(20)
    assert scene.said[-1] == "stage 1 is served again"
    assert not scene.watch.trouble
    noticed = [event for event in scene.events if isinstance(event, events.Noticed)]
    assert [(event.what, event.over) for event in noticed] == [("stage 1", False)] * 3 + [("stage 1", True)]


async def test_what_cannot_be_seen_any_more_is_not_called_over() -> None:
    scene = await watched()
    for name in "bcd":
        scene.peer(name, 2)
    await asyncio.sleep(100)
    (line,) = scene.said
    assert "stage 1 has had no replica for" in line
    scene.hub.silence("a")
    await asyncio.sleep(200)
    assert "nothing was heard of the swarm for" in scene.said[1]
    scene.hub.resume("a")
    await asyncio.sleep(20)
    assert scene.said[2:] == ["the swarm is heard again"]
    scene.peer("e", 1)
    await asyncio.sleep(20)
    assert scene.said[3:] == ["stage 1 is served again"]


async def test_a_stage_that_is_watched_no_more_is_not_called_served() -> None:
    scene = await watched()
    scene.peer("b", 2)
    await until(lambda: bool(scene.about("stage 1 has had no replica for")))
    scene.membership.focus((2,))
    await asyncio.sleep(100)
    assert 1 not in scene.membership.watched
    assert not scene.about("stage 1 is served again")
    assert not scene.watch.trouble


@given(st.sampled_from(["slept", "stood still", "set"]), st.floats(30.0, 1e6), st.booleans())
@settings(max_examples=15)
async def test_a_sleep_and_a_set_clock_are_said_and_cost_nobody_his_place(how: str, seconds: float, back: bool) -> None:
    scene = await watched()
    for number, name in enumerate("bc"):
        scene.peer(name, 1 + number % 2)
    await asyncio.sleep(52)
    assert isinstance(scene.loop, VirtualLoop)
    if how == "slept":
        scene.sleep(seconds)
    elif how == "stood still":
        scene.loop.jump(seconds)
    else:
        scene.set_s = -seconds if back else seconds
    published = scene.hub.statistics()["records.published"]
    await asyncio.sleep(5.1)
    assert scene.hub.statistics()["records.published"] > published, "at once"
    words = {"slept": "slept for", "stood still": "stood still for", "set": "set back" if back else "went forward"}
    assert len(scene.about(words[how])) == 1
    assert bool(scene.forgiven) == bool(scene.excused) == (how != "set" or not back)
    for _ in range(20):
        await asyncio.sleep(5)
        assert [len(stage) for stage in scene.membership.roster.stages] == [1, 1, 1]
    wrong = scene.about("this machine's clock is")
    assert bool(wrong) == (how == "set" and seconds >= CLOCK_DOUBT_S)
    assert len(scene.said) == 1 + len(wrong), scene.said


@pytest.mark.parametrize("error_s", [-400.0, 100.0])
async def test_a_wrong_clock_of_our_own_is_said_once_and_its_end(
    error_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a node and by a bootstrap peer, also where nobody is heard."""
    scene = await watched(error_s)
    monkeypatch.setattr(bootstrap.CLOCK, "ahead_s", lambda: scene.set_s)
    told, said = list[str](), list[str]()
    monkeypatch.setattr(bootstrap, "warn", told.append)
    monkeypatch.setattr(bootstrap, "say", said.append)
    hosting = asyncio.create_task(bootstrap.tell_of(scene.membership))
    for number, name in enumerate("bcdef"):
        scene.peer(name, number % 3)
    await asyncio.sleep(100)
    (line,) = scene.about("this machine's clock is")
    assert f"{'ahead of' if error_s > 0 else 'behind'} the other peers'" in line
    assert format_duration(abs(error_s)) in line
    for name in "gj":
        scene.peer(name, 0)
        await asyncio.sleep(70)
    assert told == [line], "by a bootstrap peer too, and once"
    scene.set_s = 0.0
    await asyncio.sleep(60)
    for number, name in enumerate("hi"):
        scene.peer(name, number)
        await asyncio.sleep(70)
    assert scene.said[-1] == "this machine's clock is right again"
    assert said.count(scene.said[-1]) == 1
    assert told == [line]
    hosting.cancel()


async def test_a_bootstrap_peer_with_too_few_peers_to_go_by_says_that_its_clock_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, told = await watched(0.0), list[str]()
    disputed_s = -2 * 86_400.0
    monkeypatch.setattr(bootstrap.CLOCK, "disputed_s", lambda: disputed_s)
    monkeypatch.setattr(bootstrap, "warn", told.append)
    hosting = asyncio.create_task(bootstrap.tell_of(scene.membership))
    for name in "bcd":
        scene.peer(name, 0)
        await asyncio.sleep(30)
    (line,) = told
    assert line.startswith("this machine's clock is 2 days behind that of each peer that told the time")
    disputed_s = 0.0
    scene.peer("e", 1)
    await asyncio.sleep(30)
    assert told == [line]
    hosting.cancel()


async def test_a_wrong_clock_explains_no_stall_and_a_stage_without_replicas_does() -> None:
    scene = await watched(-400.0)
    scene.peer("b", 1)
    _, dying = scene.peer("c", 2)
    await asyncio.sleep(100)
    assert scene.about("this machine's clock is")
    scene.stalls = True
    await asyncio.sleep(6)
    assert scene.said[-1] == "nothing comes back"
    scene.stalls = False
    await asyncio.sleep(6)
    assert scene.said[-1] == "the stall is over"
    dying.cancel()
    scene.hub.kill("c")
    await until(lambda: bool(scene.about("stage 2 has had no replica")))
    scene.stalls = True
    await asyncio.sleep(60)
    assert len(scene.about("nothing comes back")) == 1
    scene.peer("d", 2)
    await until(lambda: len(scene.about("nothing comes back")) == 2)


async def test_a_stage_that_is_served_again_leaves_no_stall_to_tell() -> None:
    """Microbatches come back long after that, for the device is slow."""
    hub, what = SimNetwork(), recipe(stages=2, replicas=1, steps=4000, window=1)
    source, sink = (Peer(hub, what, name, stage, 10.0, refresh_s=10.0) for stage, name in enumerate(["source", "sink"]))
    await until(lambda: len(source.of(events.InnerStep)) >= 2)
    sink.task.cancel()
    hub.kill("sink")
    await asyncio.sleep(STALL_S + 60.0)
    _late = Peer(hub, what, "late", 1, 10.0, refresh_s=10.0)
    done = len(source.of(events.InnerStep))
    await until(lambda: len(source.of(events.InnerStep)) > done)
    assert "stage 1 is served again" in source.said
    assert not [line for line in source.said if "no microbatch" in line]


async def test_training_resumes_by_itself_when_a_deserted_stage_is_served_again() -> None:
    hub, what = SimNetwork(), recipe(stages=2, replicas=1, steps=4000, window=2)
    source, sink = Peer(hub, what, "source", 0, 0.5), Peer(hub, what, "sink", 1, 0.5)
    await until(lambda: len(source.of(events.InnerStep)) >= 5)
    sink.task.cancel()
    hub.kill("sink")
    await until(lambda: any("stage 1 has had no replica" in line for line in source.said))
    done = len(source.of(events.InnerStep))
    # `status` shows it, from our record.
    await until(lambda: "stage 1 has had no replica" in all_waits(source.node.roster.stage(0)[0].waiting, 0))
    _late = Peer(hub, what, "late", 1, 0.5)
    await until(lambda: len(source.of(events.InnerStep)) >= done + 5)
    await until(lambda: "stage 1 is served again" in source.said)


@pytest.mark.parametrize("how", ["hangs", "full", "left"])
async def test_a_training_that_stands_still_says_why_on_the_screen_and_in_status(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, what = SimNetwork(), recipe(stages=2, replicas=1, steps=4000, window=2)
    source, sink = Peer(hub, what, "source", 0, 0.5), Peer(hub, what, "sink", 1, 0.5)
    await until(lambda: len(source.of(events.InnerStep)) >= 5)
    assert sink.node.replica is not None
    worker, before = sink.node.replica.worker, source.node.roster.stage(0)[0].tokens_per_s
    process, healed = worker.process, asyncio.Event()

    async def stand_still(microbatch: Microbatch, sender: str) -> Reply:
        if how == "full" and not healed.is_set():
            return Refused(reason=Reason.FULL, retry_after_s=5.0)
        await healed.wait()
        return await process(microbatch, sender)

    monkeypatch.setattr(worker, "process", stand_still)
    begun_s = loop_s()
    await until(lambda: any("no microbatch has come back" in line for line in source.said))
    assert STALL_S <= loop_s() - begun_s + 5.0 <= STALL_S + 30.0
    (line,) = (line for line in source.said if "no microbatch has come back" in line)
    cause = "refused by stage 1 as full" if how == "full" else "not answered by stage 1 in time"
    assert line.index(cause) == min(
        line.find(words.format(below=1)) for words, _ in STALLS.values() if words.format(below=1) in line
    )
    await until(lambda: cause in all_waits(source.node.roster.stage(0)[0].waiting, 0))
    assert source.node.roster.stage(0)[0].tokens_per_s < before / 50, "no speed of before"
    if how == "left":
        source.leave.set()
        await until(source.task.done)
        assert "the stall is over" not in source.said
        return
    healed.set()
    await until(lambda: "the stall is over" in source.said)


async def test_a_healthy_run_on_slow_devices_is_no_stall() -> None:
    """A microbatch takes longer there and back than the shortest stall that is told."""
    hub, what = SimNetwork(), recipe(stages=2, replicas=1, steps=4000, window=1)
    peers = [Peer(hub, what, name, stage, 80.0, refresh_s=10.0) for stage, name in enumerate(["source", "sink"])]
    await until(lambda: all(len(peer.of(events.InnerStep)) >= 5 for peer in peers), patience_s=1e5)
    assert all(each.seconds > STALL_S for peer in peers for each in peer.of(events.InnerStep)[1:])
    assert not [line for peer in peers for line in peer.said if "no microbatch" in line]
