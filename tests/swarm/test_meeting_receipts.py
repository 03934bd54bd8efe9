"""In a run of one stage work counts as partners saw it at meetings, however long somebody is out of sight, and no
number of names makes it more than twice what it is."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from continued_runs import ADAPTER, Continued
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, recipe, until
from msgspec import structs

from noloco_node.journal import events
from noloco_node.run.peer_state import PeerState
from noloco_node.sim import clock
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.membership import Membership, roster_of
from noloco_node.swarm.receipts import (
    MOST_BROUGHT,
    MOST_TIMES,
    IssuedReceipts,
    MetWork,
    ReceiptLedger,
    SourceCount,
    SourceRecord,
    met_work,
    tag_of,
)
from noloco_node.swarm.roster import PeerRecord, SourceProgress
from noloco_node.swarm.run_samples import ALONE_S, DESERTED_OVER, RunSamples
from noloco_node.tasks import loop_s

ROUND = 8
"""Samples that a replica of speed 1 does in a round."""


class Swarm:
    """Replicas that meet in pairs each round. `speeds`: of each. What is known of it is what they sign."""

    def __init__(self, speeds: Sequence[int], seed: int) -> None:
        self.issued = {f"r{number}": IssuedReceipts(1) for number in range(len(speeds))}
        self.unmet = dict.fromkeys(self.issued, 0)
        self.done = dict.fromkeys(self.issued, 0)
        self.lost = dict.fromkeys(self.issued, 0)
        """What was more than a partner believes of one meeting."""
        self._speeds, self._rng = dict(zip(self.issued, speeds, strict=True)), Random(seed)

    def round(self) -> None:
        for name, speed in self._speeds.items():
            self.unmet[name] += ROUND * speed
            self.done[name] += ROUND * speed
        free = list(self.issued)
        self._rng.shuffle(free)
        for one, other in zip(free[::2], free[1::2], strict=False):
            for asked, partner in ((one, other), (other, one)):
                likely = min(self.unmet[partner], MOST_BROUGHT * max(ROUND, self.unmet[asked]))
                self.issued[asked].add(partner, likely, brought=self.unmet[asked])
                self.lost[partner] += self.unmet[partner] - likely
            self.unmet[one] = self.unmet[other] = 0

    def raws(self) -> dict[str, bytes]:
        return {name: issued.raw() for name, issued in self.issued.items() if issued.samples}


def ledger() -> ReceiptLedger:
    found = ReceiptLedger()
    found.take({})
    found.begin()
    return found


def others(swarm: Swarm, read: ReceiptLedger, me: str = "r0") -> MetWork:
    found = met_work(me, swarm.issued[me], read.signed_lately)
    assert found is not None
    return found


@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(12, 60), st.integers(0, 99))
def test_honest_work_counts_but_for_what_met_nobody_yet(speeds: list[int], rounds: int, seed: int) -> None:
    swarm, read = Swarm(speeds, seed), ledger()
    for _ in range(rounds):
        swarm.round()
        read.take(swarm.raws(), swarm.issued["r0"].brought)
    true = sum(done for name, done in swarm.done.items() if name != "r0")
    unmet = sum(swarm.unmet[name] + swarm.lost[name] for name in swarm.done if name != "r0")
    found = others(swarm, read)
    assert found.samples == true - unmet
    assert len(speeds) / 2 <= found.replicas <= 2 * len(speeds)


def test_work_that_was_done_out_of_sight_counts_once_it_is_read() -> None:
    """Each replica's records are lost for three readings of every thirty, and ours are one long gap."""
    swarm, read = Swarm([1, 1, 1, 1], 7), ledger()
    for reading in range(600):
        swarm.round()
        found = {
            name: raw for number, (name, raw) in enumerate(swarm.raws().items()) if (reading + 7 * number) % 30 >= 3
        }
        if not 200 <= reading < 400:
            read.take(found, swarm.issued["r0"].brought)
    read.take(swarm.raws(), swarm.issued["r0"].brought)
    assert others(swarm, read).samples == sum(swarm.done.values()) - swarm.done["r0"]


@pytest.mark.parametrize("names", [4, 40, 1000])
def test_names_that_meet_nobody_count_for_twice_the_work_at_most(names: int) -> None:
    swarm, read = Swarm([1, 1, 1, 1], 7), ledger()
    for _ in range(40):
        swarm.round()
    liars = {}
    for number in range(names):
        issued = IssuedReceipts(1)
        issued.add(f"name{(number + 1) % names}", 10**12)
        issued.add("r1", 10**12)
        liars[f"name{number}"] = issued.raw()
    read.take(swarm.raws() | liars, swarm.issued["r0"].brought)
    found = others(swarm, read)
    assert found.replicas == 4
    assert found.samples <= MOST_TIMES * 4 * 40 * ROUND


@pytest.mark.parametrize("mets", [1, 2, 3])
def test_liars_that_meet_others_count_little_more_while_they_are_fewer(mets: int) -> None:
    """Of eight replicas so many say what they like, sign for a thousand names, and bring as much as is believed."""
    swarm, read = Swarm([1] * (8 - mets) + [MOST_BROUGHT] * mets, 7), ledger()
    for _ in range(60):
        swarm.round()
    for number in range(8 - mets, 8):
        for name in range(1000):
            swarm.issued[f"r{number}"].add(f"name{name}", 10**12)
    read.take(swarm.raws(), swarm.issued["r0"].brought)
    typical = sum(swarm.issued["r0"].samples.values())
    assert others(swarm, read).samples <= MOST_TIMES * 2 * 8 * typical


@given(st.integers(1, 6), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**15), min_size=1))
def test_even_where_all_partners_lie_their_word_has_a_bound(partners: int, lies: dict[str, int]) -> None:
    ours = IssuedReceipts(1)
    for number in range(partners):
        ours.add(f"liar{number}", MOST_BROUGHT * ROUND, brought=ROUND)
    liars = [f"liar{number}" for number in range(partners)]
    signed = {tag_of(source): dict.fromkeys(liars, samples) for source, samples in lies.items()}
    found = met_work("r0", ours, signed)
    assert found.samples <= MOST_TIMES * (1 + partners) ** 2 * MOST_BROUGHT * partners * ROUND


def test_nothing_is_believed_before_the_first_meeting() -> None:
    assert met_work("r0", IssuedReceipts(1), {tag_of("name"): {"other": 10**12}}) is None


async def test_names_do_not_end_a_run_of_one_stage() -> None:
    """Four names say that they have done all and finished; but for the last rounds three sources do their work."""
    hub, what = SimNetwork(), recipe(stages=1, replicas=3, steps=60)
    honest = [Peer(hub, what, f"peer-{number}", 0, job_s=0.5) for number in range(3)]
    await until(lambda: all(len(peer.of(events.InnerStep)) > 7 for peer in honest))
    listed = []
    for number in range(4):
        liar = Membership(hub.network(f"name-{number}"), what.digest, 1, refresh_s=0.2)
        record = PeerRecord(peer=f"name-{number}", stage=0, state=PeerState.TRAINING, samples=10**9)
        await liar.claim(record)
        listed.append((liar, record, asyncio.create_task(liar.run())))
    await asyncio.sleep(2.0)
    for liar, record, _ in listed:
        liar.update(PeerRecord(peer=record.peer, stage=0, state=PeerState.FINISHED, samples=10**9))
    await asyncio.gather(*(peer.task for peer in honest))
    for _, _, task in listed:
        task.cancel()
    assert all(peer.of(events.Finished)[0].why == events.RUN_OVER for peer in honest)
    steps = [peer.of(events.InnerStep)[-1].step for peer in honest]
    assert 3 * 60 * 0.85 <= sum(steps) <= 3 * 60 * 1.1


@pytest.mark.parametrize("stages", [1, 2])
async def test_who_says_at_first_that_the_run_is_done_ends_it_for_nobody(stages: int) -> None:
    """Nobody has finished a round yet, so that little of the run can be done, whatever its only peer claims."""
    hub, what = SimNetwork(), recipe(stages=stages, replicas=2, steps=20)
    liar = Membership(hub.network("liar"), what.digest, stages, refresh_s=0.2)
    record = PeerRecord(peer="liar", stage=0, state=PeerState.TRAINING, samples=10**9, progress=1.0)
    await liar.claim(record)
    telling = asyncio.create_task(liar.run())
    await asyncio.sleep(1.0)
    liar.update(structs.replace(record, state=PeerState.FINISHED))
    await asyncio.sleep(1.0)
    honest = [Peer(hub, what, f"peer-{number}", number % stages, job_s=0.1) for number in range(2 * stages)]
    await asyncio.gather(*(peer.task for peer in honest))
    telling.cancel()
    steps = [peer.of(events.InnerStep)[-1].step for peer in honest if peer.node.samples]
    assert 2 * 20 * 0.85 <= sum(steps) <= 2 * 20 * 1.1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_a_signer_that_begins_to_count_anew_loses_no_sample_that_it_signed(parts: list[int]) -> None:
    """It begins anew once everybody is known again; what it saw before is in its estimate of the run's samples."""
    issued, read = IssuedReceipts(1), ledger()
    for part in parts:
        issued.add("a", part, brought=part)
        read.take({"r1": issued.raw()})
        issued.begin()
        assert not issued.samples
        assert not issued.brought
    assert read.signed("a") == sum(parts)


@pytest.mark.parametrize(
    ("jobs_s", "adapter"), [((0.1,), ""), ((0.1, 0.8), ""), ((0.1, 0.2, 0.3, 0.4), ""), ((0.1, 0.8), ADAPTER)]
)
async def test_replicas_of_one_stage_do_the_budget_together_and_no_more(
    tmp_path: Path, jobs_s: tuple[float, ...], adapter: str
) -> None:
    """At whatever speeds, and alone too."""
    made = Continued(tmp_path, adapter=adapter, stages=1, replicas=len(jobs_s), steps=80, per_round=4)
    peers = [made.peer(f"peer-{number}", 0, made.whole(), job_s=job_s) for number, job_s in enumerate(jobs_s)]
    await asyncio.gather(*(peer.task for peer in peers))
    steps = [len(peer.of(events.InnerStep)) for peer in peers]
    assert len(jobs_s) * 80 * 0.95 <= sum(steps) <= len(jobs_s) * 80 * 1.1, steps


@given(
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from([PeerState.TRAINING, PeerState.FINISHED, None])),
    st.sampled_from([0.0, 0.4, 0.8]),
)
def test_who_has_met_too_few_ends_soon_after_the_others_have_and_never_while_one_works(
    others: dict[str, PeerState | None], reached: float
) -> None:
    """A replica that came late, say. None: that peer went without a word. No claim ends a run that has hardly begun."""
    records = {peer: PeerRecord(peer=peer, stage=0, state=state) for peer, state in others.items() if state}
    finished = {peer for peer, state in others.items() if state is PeerState.FINISHED}
    claims = tuple(SourceProgress(peer, 900, 0, 0, peer in finished) for peer in sorted(others))
    counts = {peer: SourceCount(SourceRecord(900, peer in finished), 0.0, 0) for peer in others}
    own = PeerRecord(peer="me", stage=0, state=PeerState.TRAINING)
    membership = SimpleNamespace(
        me="me",
        roster=roster_of("me", own, [records], counts, 0.0, None, claims),
        issued=IssuedReceipts(1),
        receipts=ledger(),
        begin_counting=lambda: None,
    )

    async def look() -> list[bool]:
        run = recipe(stages=1, replicas=3, steps=1000).run
        counted = RunSamples(run, cast(Any, membership), round(reached * run.budget_samples), 0)
        found = []
        for _ in range(3):
            found.append(counted.is_over(8, loop_s()))
            await asyncio.sleep(0.6 * ALONE_S)
        return found

    works = any(state is PeerState.TRAINING for state in others.values())
    over = bool(finished) and not works and 2 * len(finished) >= len(others) and reached > DESERTED_OVER
    assert clock.run(look()) == [False, False, over]
