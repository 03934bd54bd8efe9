"""Whatever happens to one side of a conversation at its worst moment, the other side goes on.

On either side of a meeting and of a microbatch's call, at four moments (before, in sending, in receiving, after), one
of four fates befalls a victim: its process crashes; its host falls silent and comes back; the conversation hangs while
the host beats on; the node is asked to leave. hivemind tests its all-reduce so, also with two victims.

Nodes are production nodes with quadratic models; a fate finds its moment because their conversations are overheard.
Messages with tensors are slow then, so that they travel for a while. Afterwards the survivors' weights are finite,
their slots and gates free, their next windows and rounds normal; and so are those of a victim that lived on.
"""

import asyncio
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from memory_swarms import until
from overheard import Cast, Heard, nothing_is_held

from gossip.exchange.messages import Acknowledge, Propose, Weights
from gossip.interface import OuterStepTaken
from noloco_node.journal import events
from noloco_node.sim.clock import run
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.peer import SimulatedPeer
from pipeline.messages import Gradient, Microbatch

TRAVELS_S = 4.0
"""For which a message with tensors is under way to or from a victim, at least."""
BYTES = 2**18
"""Of each such message."""
HALFWAY_S = 1.0
AWAY_S = 300.0
"""For which a host is silent: longer than any deadline of the others."""
STILL_S = 60.0
"""For which a line stands still in the middle of a message: beats, too, would wait behind it, so not for ever."""
WITHIN_S = 2000.0

SWARM = f"""
[swarm]
stages = {{stages}}
replicas = {{replicas}}
rounds = 10000
inner_steps_per_round = 3
microbatches_per_step = 2
overlap_steps = 1
codec = "float32"
refresh_s = 5.0
budget_s = 100.0
blocking = {{blocking}}

[network]
microbatch_bytes = {BYTES}
weights_bytes = {BYTES}

[devices]
forward_s = 1.0
slowness = [1.0, 1.13, 1.31]
"""


class Fate(Enum):
    CRASH = "crash"
    SILENCE = "silence"
    HANG = "hang"
    CANCEL = "cancel"


LIVES_ON = (Fate.SILENCE, Fate.HANG)


class Moment(NamedTuple):
    """When it happens. `ours`: the victim acts, not the one it talks with. `late_s`: so long after the act."""

    ours: bool
    act: str
    kind: type
    late_s: float = 0.0


class Strike(NamedTuple):
    """`calls`: whether the victim opened the conversation in which it happens."""

    victim: str
    calls: bool
    moment: Moment
    fate: Fate


GOSSIP = {
    ("before", True): Moment(True, "sends", Propose),
    ("before", False): Moment(True, "received", Propose),
    ("sending", True): Moment(True, "sends", Weights, HALFWAY_S),
    ("sending", False): Moment(True, "sends", Weights, HALFWAY_S),
    ("receiving", True): Moment(False, "sends", Weights, HALFWAY_S),
    ("receiving", False): Moment(False, "sends", Weights, HALFWAY_S),
    ("after", True): Moment(True, "sends", Acknowledge),
    ("after", False): Moment(True, "sends", Acknowledge),
}
PIPELINE = {
    ("before", True): Moment(True, "sends", Microbatch),
    ("before", False): Moment(True, "received", Microbatch),
    ("sending", True): Moment(True, "sends", Microbatch, HALFWAY_S),
    ("sending", False): Moment(True, "sends", Gradient, HALFWAY_S),
    ("receiving", True): Moment(False, "sends", Gradient, HALFWAY_S),
    ("receiving", False): Moment(False, "sends", Microbatch, HALFWAY_S),
    ("after", True): Moment(True, "received", Gradient),
    ("after", False): Moment(True, "sent", Gradient),
}
"""By when it happens, and whether the victim is the asker (upstream) or the answerer (downstream)."""


class Strikes:
    """Strikes that wait for their moment among the peers of a cast; `struck`: when each victim was, in loop seconds."""

    def __init__(self, cast: Cast) -> None:
        self.cast, self.struck = cast, dict[str, float]()
        self._waiting: list[Strike] = []

    def prepare(self, strikes: Iterable[Strike]) -> None:
        """Let each strike fall at its moment, the next time that it comes; slow down the lines where that matters."""
        self._waiting, self.cast.listen = list(strikes), self._heard
        for strike in self._waiting:
            if strike.moment.late_s:
                rate = BYTES / TRAVELS_S
                slow = Access(up_bytes_per_s=rate) if strike.moment.ours else Access(down_bytes_per_s=rate)
                self.cast.hub.set_access(strike.victim, slow)

    async def _heard(self, heard: Heard) -> None:
        for strike in list(self._waiting):
            victim, _, moment, fate = strike
            calls = heard.calls if moment.ours else not heard.calls
            there = (heard.me if moment.ours else heard.other) == victim and calls == strike.calls
            if there and heard.act == moment.act and type(heard.message) is moment.kind:
                self._waiting.remove(strike)
                if moment.late_s:
                    asyncio.get_running_loop().call_later(moment.late_s, self._strike, strike)
                    return
                self._strike(strike)
                if fate is Fate.HANG:
                    await asyncio.get_running_loop().create_future()

    def _strike(self, strike: Strike) -> None:
        loop, hub, name = asyncio.get_running_loop(), self.cast.hub, strike.victim
        self.struck[name] = loop.time()
        match strike.fate:
            case Fate.CRASH:
                self.cast.peers[name].crash()
            case Fate.SILENCE:
                hub.set_access(name, Access())
                hub.silence(name)
                loop.call_later(AWAY_S, hub.resume, name)
            case Fate.HANG if strike.moment.late_s:
                hub.set_access(name, Access(up_bytes_per_s=1e-3, down_bytes_per_s=1e-3))
                loop.call_later(STILL_S, hub.set_access, name, Access())
            case Fate.CANCEL:
                hub.set_access(name, Access())
                self.cast.peers[name].ask_to_leave()


def weights_are_finite(peer: SimulatedPeer) -> bool:
    node, stage = peer.session.node, peer.session.stage
    assert node.replica is not None
    assert stage is not None
    state = node.replica.rounds.state
    return all(bool(tensor.isfinite().all()) for tensor in (*state.slow, *state.momentum, *stage.weights()))


async def suffer(strikes: list[Strike], stages: int, replicas: int, blocking: bool = False) -> None:
    text = SWARM.format(stages=stages, replicas=replicas, blocking=str(blocking).lower())
    cast = Cast(text)
    blows = Strikes(cast)
    for peer in cast.peers.values():
        peer.start()
    everybody = list(cast.peers)
    await until(lambda: all(len(cast.since(name, OuterStepTaken)) >= 2 for name in everybody), WITHIN_S)
    blows.prepare(strikes)
    await until(lambda: len(blows.struck) == len(strikes), WITHIN_S)
    gone = {strike.victim for strike in strikes if strike.fate not in LIVES_ON}
    left = [name for name in everybody if name not in gone]
    survivors = [name for name in everybody if name not in blows.struck]
    struck_s = max(blows.struck.values())

    def goes_on(names: list[str], since_s: float) -> bool:
        return all(
            len([e for e in cast.since(name, OuterStepTaken, since_s) if good(e.partner, name, names)]) >= 2
            and len(cast.since(name, events.InnerStep, since_s)) >= 6
            for name in names
        )

    def good(partner: str | None, name: str, names: list[str]) -> bool:
        stage = cast.peers[name].asked_stage
        others = [other for other in names if other != name and cast.peers[other].asked_stage == stage]
        return not others or partner in others

    # Nobody waits for a victim to come back.
    await until(lambda: goes_on(survivors, struck_s), AWAY_S)
    if set(left) != set(survivors):
        await asyncio.sleep(max(0.0, struck_s + AWAY_S - asyncio.get_running_loop().time()))
        await until(lambda: goes_on(left, struck_s + AWAY_S), WITHIN_S)
    tasks = [peer.session.task for peer in cast.peers.values() if peer.session.task is not None]
    for stage in range(stages):  # from the sources on: what is in flight then comes back
        leaving = [cast.peers[name] for name in left if cast.peers[name].asked_stage == stage]
        for peer in leaving:
            assert weights_are_finite(peer)
            peer.ask_to_leave()
        async with asyncio.timeout(30.0):
            await asyncio.wait([peer.session.task for peer in leaving if peer.session.task is not None])
    async with asyncio.timeout(60.0):
        await asyncio.wait(tasks)
    for name in left:
        nothing_is_held(cast.peers[name])
        assert cast.peers[name].disk is not None
    for task in tasks:
        assert task.cancelled() or task.exception() is None
    await asyncio.sleep(5.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert cast.hub.failures == []


def cases(table: dict[tuple[str, bool], Moment], names: tuple[str, str]) -> list[Any]:
    return [
        pytest.param(calls, moment, fate, id=f"{fate.value}-{when}-{names[0] if calls else names[1]}")
        for (when, calls), moment in table.items()
        for fate in Fate
    ]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("calls", "moment", "fate"), cases(GOSSIP, ("asker", "answerer")))
def test_a_meeting_that_breaks_costs_the_others_nothing(calls: bool, moment: Moment, fate: Fate) -> None:
    run(suffer([Strike("s0r1", calls, moment, fate)], stages=1, replicas=3))


@pytest.mark.parametrize(("calls", "moment", "fate"), cases(PIPELINE, ("upstream", "downstream")))
def test_a_microbatch_that_breaks_costs_the_others_nothing(calls: bool, moment: Moment, fate: Fate) -> None:
    run(suffer([Strike("s1r0", calls, moment, fate)], stages=3, replicas=2))


PAIRS = {
    "none-before": (None, ("before", Fate.CRASH)),
    "before-before": (("before", Fate.CRASH), ("before", Fate.CRASH)),
    "sending-sending": (("sending", Fate.CRASH), ("sending", Fate.CRASH)),
    "sending-before": (("sending", Fate.CRASH), ("before", Fate.CRASH)),
    "sending-reducing": (("sending", Fate.CRASH), ("receiving", Fate.CRASH)),
    "slow sending-sending": (("sending", Fate.HANG), ("sending", Fate.CRASH)),
    "none-cancel": (None, ("receiving", Fate.CANCEL)),
}
"""hivemind's own pairs of faulty peers. Its reducer holds the others' parts; here who receives weights does."""


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_faulty_replicas_of_five_cost_the_others_nothing(pair: str, blocking: bool) -> None:
    strikes = [
        Strike(victim, calls, GOSSIP[when, calls], fate)
        for (victim, calls), found in zip((("s0r1", True), ("s0r3", False)), PAIRS[pair], strict=True)
        if found is not None
        for when, fate in (found,)
    ]
    run(suffer(strikes, stages=1, replicas=5, blocking=blocking))


@pytest.mark.parametrize("victim", ["s1r0", "s2r2"])
async def test_a_replica_that_hangs_for_good_is_left_alone_though_it_beats(victim: str) -> None:
    """Its process is there, its loop turns, its device never answers: each microbatch there used to cost the budget."""
    cast = Cast(SWARM.format(stages=3, replicas=3, blocking="false").replace("budget_s = 100.0", ""))
    for peer in cast.peers.values():
        peer.start()
    await until(lambda: all(len(cast.since(name, OuterStepTaken)) >= 2 for name in cast.peers), WITHIN_S)

    async def steps() -> int:
        begun_s = asyncio.get_running_loop().time()
        await asyncio.sleep(150.0)
        return sum(len(cast.since(peer.name, events.InnerStep, begun_s)) for peer in cast.of_stage(0))

    async def hang(heard: Heard) -> None:
        if heard.me == victim and heard.act == "received" and isinstance(heard.message, Microbatch):
            await asyncio.get_running_loop().create_future()

    before = await steps()
    cast.listen = hang
    await steps()
    assert await steps() > before / 2
    accused = {loss.peer for name in cast.peers for loss in cast.since(name, events.Lost) if "answered" in loss.why}
    assert accused == {victim}
    for peer in cast.peers.values():
        peer.crash()
