"""A newcomer's copy over lines with a bandwidth: crashes at any instant on either side, liars, what a person reads."""

import asyncio
import io
import os
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from dead_stage import killed
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, recipe, until
from rich.console import Console
from state_copies import LIKE, SHAPES, of_parts, same, state
from toy_gossip import at_once

from benchmarks.robustness.kill_download import kill_many
from gossip.exchange.messages import Parts, ReplicaState
from gossip.interface import OuterStepTaken
from gossip.transfer.donor import Donor, DonorLimits
from noloco_node.journal import events as journal_events
from noloco_node.machine.interface import Reporter, StageModel
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.sim.clock import run
from noloco_node.sim.hardware.memory_host import MemoryHost
from noloco_node.sim.hardware.priced_stage import VirtualDevice
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync.download import (
    COPY_AGAIN_S,
    LONGEST_PAUSE_S,
    DownloadLink,
    StateDownload,
    pause_s,
    progress_line,
)
from noloco_node.storage.transfer_files import PartialDownload
from noloco_node.swarm.membership import Membership
from noloco_node.tasks import loop_s
from noloco_node.terminal import Bar, say

TOTAL_BYTES = 16 * sum(tensor.numel() for tensor in LIKE)
RATE = TOTAL_BYTES / 20.0
"""Of a newcomer's line, in bytes a second: a whole state takes twenty seconds."""


class Shapes:
    """What a copy asks of a stage."""

    shapes = SHAPES


class Newcomers:
    """A world of donors of stage 1, and newcomers that come and go."""

    def __init__(self, directory: Path | None = None) -> None:
        self.network = SimNetwork()
        self.directory = directory
        self.events: list[journal_events.Event] = []
        self.said: list[str] = []
        self.drawn: list[tuple[float, str]] = []
        self.terminal = False

    def draw(self, share: float, text: str) -> bool:
        self.drawn.append((share, text))
        return self.terminal

    async def donor(self, name: str, whole: ReplicaState) -> None:
        async def provide(parts: Parts) -> ReplicaState:
            return of_parts(whole, parts)

        donor = Donor(provide, at_once, SHAPES, DonorLimits(deadline_s=600.0, piece_s=60.0))
        await self.network.network(name).serve(topic(STATE, 1), state_schema(SHAPES), donor.serve)

    def newcomer(self, down_bytes_per_s: float = RATE) -> StateDownload:
        network = self.network.network("new", Access(down_bytes_per_s=down_bytes_per_s))
        reporter = Reporter(record=self.events.append, say=self.said.append, draw=self.draw)
        keep = None
        if self.directory is not None:
            keep = PartialDownload(self.directory, 1, self.said.append)
        return StateDownload(
            1, cast(StageModel, Shapes()), DownloadLink(network, VirtualDevice(), 300.0), reporter, keep
        )

    def told(self, what: str) -> list[journal_events.CatchUp]:
        return [event for event in self.events if isinstance(event, journal_events.CatchUp) and event.what == what]


@pytest.mark.processes
def test_a_process_killed_while_it_copies_takes_over_every_whole_piece(tmp_path: Path) -> None:
    """Real processes, SIGKILLs at random instants; what a life takes over is checked in there."""
    told = asyncio.run(kill_many(tmp_path, kills=2, megabytes=4.0, seed=0))
    assert told.kills >= 2
    assert told.copies >= 1
    assert told.resumed >= 1, "none of the lives had anything to go on from"


@pytest.mark.parametrize("seed", range(5))
async def test_a_newcomer_killed_at_a_random_instant_resumes_from_its_disk(tmp_path: Path, seed: int) -> None:
    rng, world = Random(f"{seed}|newcomer"), Newcomers(tmp_path)
    await world.donor("donor", state())
    lives = 1
    task = asyncio.create_task(world.newcomer().attempt(("donor",)))
    while lives < 4:
        await asyncio.sleep(rng.uniform(2.0, 9.0))
        world.network.kill("new")
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        task = asyncio.create_task(world.newcomer().attempt(("donor",)))
        lives += 1
    found = await task
    assert isinstance(found, ReplicaState)
    assert same(found, state())
    resumed = world.told("resumed")
    assert [event.what for event in world.events[:1]] == ["began"]
    assert len(resumed) == 3
    held = [event.held_bytes for event in resumed]
    assert held == sorted(held)
    assert held[0] > 0
    (done,) = world.told("done")
    assert done.held_bytes == done.total_bytes == TOTAL_BYTES
    assert done.fetched_bytes == TOTAL_BYTES - held[-1]


@pytest.mark.parametrize("seed", range(5))
async def test_a_donor_that_crashes_at_a_random_instant_is_replaced(seed: int) -> None:
    rng, world = Random(f"{seed}|donor"), Newcomers()
    await world.donor("first", state(1))
    await world.donor("second", state(2))
    copying = world.newcomer()
    task = asyncio.create_task(copying.attempt(("first", "second")))
    await asyncio.sleep(rng.uniform(0.5, 19.0))
    world.network.kill("first")
    found = await task
    assert isinstance(found, ReplicaState)
    seconds = asyncio.get_running_loop().time()
    (lost,) = world.told("lost")
    assert lost.donor == "first"
    (done,) = world.told("done")
    assert done.donor == "second"
    assert seconds < 2 * 20.0 + 10.0
    for mixed in world.told("mixed"):
        # What stayed was not fetched again.
        assert done.fetched_bytes < lost.fetched_bytes + TOTAL_BYTES
        assert mixed.held_bytes > 0
        assert any("more than one replica" in line for line in world.said)


def copied(
    donors: dict[str, ReplicaState], *names: str, down_bytes_per_s: float = RATE, terminal: bool = False
) -> tuple[ReplicaState | str, Newcomers, float]:
    """Copy from these donors, with more names in the roster; return what came, the world, and the seconds."""

    async def main() -> tuple[ReplicaState | str, Newcomers, float]:
        world = Newcomers()
        world.terminal = terminal
        for name, whole in donors.items():
            await world.donor(name, whole)
        found = await world.newcomer(down_bytes_per_s).attempt((*donors, *names))
        return found, world, asyncio.get_running_loop().time()

    return run(main())


def test_a_line_with_a_bandwidth_is_used_to_the_full() -> None:
    found, _, seconds = copied({"donor": state()})
    assert isinstance(found, ReplicaState)
    assert same(found, state())
    assert 20.0 <= seconds < 1.1 * 20.0


def test_a_gross_outlier_is_refused_before_a_byte_of_its_weights() -> None:
    blown_up = state(3, slow=tuple(1000.0 * tensor for tensor in state(3).slow))
    found, world, _ = copied({"outlier": blown_up, "donor": state(1), "third": state(2)}, down_bytes_per_s=1e9)
    assert isinstance(found, ReplicaState)
    assert same(found, state(1))
    (refused,) = world.told("refused")
    assert (refused.donor, refused.fetched_bytes) == ("outlier", 0)
    assert "norm" in (refused.why or "")
    assert any("refused the copy of outlier" in line for line in world.said)


@pytest.mark.parametrize(
    ("other", "why"), [({"round": 60}, "its stage in round 60"), ({"progress": 0.9}, "that of its stage 0.90")]
)
def test_a_donor_far_from_what_others_answer_is_refused(other: dict[str, Any], why: str) -> None:
    _, world, _ = copied({"donor": state(), "other": state(**other)}, down_bytes_per_s=1e9)
    assert why in (world.told("refused")[0].why or "")


def test_names_have_no_voice() -> None:
    found, world, _ = copied({"donor": state()}, *(f"name{number}" for number in range(20)), down_bytes_per_s=1e9)
    assert isinstance(found, ReplicaState)
    assert not world.told("refused")


def test_a_person_reads_how_far_it_is_every_few_seconds() -> None:
    said = copied({"donor": state()})[1].said
    assert said[0].startswith("copying stage 1 from donor (round 6)")
    assert said[-1].startswith("copied stage 1: ")
    lines = [line for line in said if line.endswith("left")]
    assert 3 <= len(lines) <= 4
    assert all("bit/s" in line for line in lines)


def test_on_a_terminal_a_bar_takes_the_place_of_these_lines_and_is_gone_in_the_end() -> None:
    world = copied({"donor": state()}, terminal=True)[1]
    assert [line.partition(" stage")[0] for line in world.said] == ["copying", "copied"]
    *shares, last = [share for share, _ in world.drawn]
    assert shares == sorted(shares)
    assert (shares[-1], last) == (1.0, 1.0)
    assert all(0.0 < share <= 1.0 for share in shares)


def test_the_bar_is_drawn_below_what_others_say_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    bar = Bar(Console(file=screen, force_terminal=True, width=80, _environ={}))
    assert bar.draw(0.5, "half of [it]")
    assert "half of [it]" in screen.getvalue()
    say("in the middle")
    assert bar.draw(1.0, "")
    told = screen.getvalue()
    assert "in the middle" in told
    assert told.endswith("\x1b[2K"), "its line is empty again"
    bar.close()
    assert not Bar(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})).draw(0.5, "half")
    assert not Bar().draw(0.5, "half"), "this test's standard error is no terminal"
    assert capsys.readouterr() == ("", "")


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.floats(0.0, 1e10))
def test_the_line_of_progress_is_never_nonsense(held: int, left: int, rate: float) -> None:
    line = progress_line(3, held, held + left, rate)
    assert "nan" not in line
    assert "-" not in line
    assert line.count("left") == (rate > 0.0)


@given(st.integers(1, 1000))
def test_pauses_grow_and_are_bounded(attempts: int) -> None:
    assert COPY_AGAIN_S <= pause_s(attempts) <= pause_s(attempts + 1) <= LONGEST_PAUSE_S


# Whole nodes.

JOB_S = 0.3
"""Of a device's job: a swarm that is slow is cheap to watch."""


async def swarm(hub: SimNetwork, replicas: int) -> list[Peer]:
    """A run of two stages, past its first rounds; nobody hurries at its end."""
    what = recipe(replicas=3, steps=4000, per_round=4)
    peers = [Peer(hub, what, "peer-source", 0, JOB_S)]
    peers += [Peer(hub, what, f"peer-old{number}", 1, JOB_S) for number in range(replicas)]
    await until(lambda: all(len(peer.of(OuterStepTaken)) >= 2 for peer in peers[1:]))
    return peers


SLOW_LINE = Access(down_bytes_per_s=3000.0)


def caught_up(peer: Peer) -> bool:
    return any(event.what == "done" for event in peer.of(journal_events.CatchUp))


async def test_a_node_killed_while_it_catches_up_comes_back_and_is_met_only_then(tmp_path: Path) -> None:
    rng = Random(0)

    def keep(number: int) -> PartialDownload:
        return PartialDownload(tmp_path, number, lambda _: None)

    hub = SimNetwork()
    hub.set_access("peer-late", SLOW_LINE)
    peers = await swarm(hub, 1)
    what = recipe(replicas=3, steps=4000, per_round=4)
    late = Peer(hub, what, "peer-late", 1, JOB_S, keep=keep)
    await until(lambda: len(late.of(journal_events.CatchUp)) == 1)
    await asyncio.sleep(rng.uniform(7.0, 12.0))
    await killed(hub, [late])
    assert not caught_up(late)
    steps = len(peers[1].of(journal_events.InnerStep))
    late = Peer(hub, what, "peer-late", 1, JOB_S, keep=keep)
    await until(lambda: caught_up(late))
    # Nobody met it before, and nobody stood still for it.
    assert not [event for event in peers[1].of(OuterStepTaken) if event.partner == "peer-late"]
    assert len(peers[1].of(journal_events.InnerStep)) > steps
    await until(lambda: any(event.partner == "peer-late" for event in peers[1].of(OuterStepTaken)))
    assert late.of(journal_events.CatchUp)[0].what == "resumed"
    await asked_to_leave(late, *peers)
    assert os.listdir(tmp_path) == []


async def test_a_node_whose_donor_dies_goes_on_with_another() -> None:
    rng = Random(0)
    hub = SimNetwork()
    hub.set_access("peer-late", SLOW_LINE)
    source, *old = await swarm(hub, 2)
    late = Peer(hub, recipe(replicas=3, steps=4000, per_round=4), "peer-late", 1, JOB_S)
    await until(lambda: len(late.of(journal_events.CatchUp)) == 1)
    await asyncio.sleep(rng.uniform(3.0, 10.0))
    (donor,) = [peer for peer in old if peer.name == late.of(journal_events.CatchUp)[0].donor]
    (survivor,) = [peer for peer in old if peer is not donor]
    await killed(hub, [donor])
    await until(lambda: bool(late.of(journal_events.InnerStep)))
    events = late.of(journal_events.CatchUp)
    assert (events[-1].what, events[-1].donor) == ("done", survivor.name)
    assert "lost" in [event.what for event in events]
    assert late.of(journal_events.InnerStep)[0].progress > 0.0
    assert late.copied_stages == [1], "what else it takes is made ready once, beside the copy"
    assert [peer.copied_stages for peer in (source, survivor)] == [[], []]
    await asked_to_leave(late, survivor, source)


async def test_a_newcomer_that_can_dial_nobody_says_so_and_keeps_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is set back meanwhile."""
    hub, clock, begun_s = SimNetwork(), MemoryHost.unix_time, loop_s()
    monkeypatch.setattr(MemoryHost, "unix_time", lambda self: clock(self) - 3600.0 * (loop_s() > begun_s + 50.0))
    peers = await swarm(hub, 1)
    hub.set_access("peer-old0", Access(dials_only=True))
    watch = Membership(hub.network("watch"), recipe(replicas=3, steps=4000, per_round=4).digest, 2)
    late = Peer(hub, recipe(replicas=3, steps=4000, per_round=4), "peer-late", 1, JOB_S)
    await asyncio.sleep(100)
    lines = [line for line in late.said if "waiting for a replica of stage 1" in line]
    assert 3 <= len(lines) <= 9
    assert "since" in lines[-1]
    assert not any("(-" in line for line in lines), "nobody has waited for less than no time"
    assert "--stage" in lines[-1]
    roster = await watch.peek()
    (record,) = [record for record in roster.stage(1) if record.peer == "peer-late"]
    assert record.waiting == (Wait(cause=WaitCause.STATE),)
    assert record.state is PeerState.CATCHING_UP
    hub.set_access("peer-old0", Access())
    await until(lambda: bool(late.of(journal_events.Started)))
    await asked_to_leave(late, *peers)


async def test_a_node_that_was_away_for_long_fetches_what_differs() -> None:
    hub = SimNetwork()
    what = recipe(replicas=3, steps=4000, per_round=4)
    peers = await swarm(hub, 2)
    gone = peers.pop()
    await asked_to_leave(gone)
    hub.kill(gone.name)
    rounds = gone.counters.round
    await until(lambda: peers[1].of(OuterStepTaken)[-1].round > rounds + 6)
    back = Peer(hub, what, gone.name, 1, JOB_S, saved=gone.saved)
    await until(lambda: bool(back.of(journal_events.InnerStep)))
    events = back.of(journal_events.CatchUp)
    await asked_to_leave(back, *peers)
    assert events[-1].what == "done"
    assert 0 < events[-1].fetched_bytes <= events[-1].total_bytes
