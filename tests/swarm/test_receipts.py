"""Receipts: none lost or counted twice, none believed of who did nothing for us, and little of a friend's."""

import asyncio
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, recipe

from noloco_node.journal import events
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.receipts import (
    ENOUGH,
    LONGEST_ID,
    MOST_LISTED,
    MOST_SESSIONS,
    RECEIPT_BYTES,
    SPARE,
    IssuedReceipts,
    ReceiptLedger,
    ReceiptRecord,
    decode_receipts,
    tag_of,
)
from noloco_node.swarm.roster import PeerRecord
from noloco_node.units import LARGEST_COUNT
from tests.explorer.attacks import publish_identity


def raw(epoch: int, **samples: int) -> bytes:
    return msgspec.msgpack.encode(ReceiptRecord(epoch, {tag_of(source): count for source, count in samples.items()}))


def test_receipts_survive_a_restart_and_count_once() -> None:
    ledger = ReceiptLedger()
    for record in (raw(1, a=5), raw(1, a=9), raw(1, a=7), raw(2, a=3), raw(1, a=11), raw(2, a=4), raw(2, a=4)):
        ledger.take({"signer": record})
    assert ledger.signed("a") == 11 + 4


def test_a_life_that_began_by_a_clock_set_back_counts() -> None:
    """Also where an old record of the session before it is read in between, as stale places of the DHT give it."""
    ledger = ReceiptLedger()
    ledger.take({"signer": raw(50, a=1000)})
    for count in range(0, 5000, 500):
        ledger.take({"signer": raw(20, a=count)})
        ledger.take({"signer": raw(50, a=1000)})
    assert ledger.signed("a") == 1000 + 4500


def test_the_lives_of_a_signer_that_are_remembered_are_bounded() -> None:
    ledger = ReceiptLedger()
    for epoch in range(100):
        ledger.take({"signer": raw(epoch, a=1)})
    assert len(ledger._books["signer"].sessions) == MOST_SESSIONS


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=20))
def test_what_is_covered_never_shrinks(said: list[tuple[int, int]]) -> None:
    ledger, before = ReceiptLedger(), 0
    for epoch, count in said:
        ledger.take({"signer": raw(epoch, a=count)})
        assert before <= ledger.signed("a") <= sum(count for _, count in said)
        before = ledger.signed("a")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        raw(-1),
        raw(1, a=-1),
        raw(1, a=LARGEST_COUNT + 1),
        msgspec.msgpack.encode([1, {tag_of("a"): 1.5}]),
        msgspec.msgpack.encode([1, {tag_of("a")[1:]: 1}]),
        msgspec.msgpack.encode([1, {"a": 1}]),
        raw(1, **{f"p{number}": 1 for number in range(MOST_LISTED + 1)}),
        raw(1, a=1) + bytes(RECEIPT_BYTES),
    ],
)
def test_what_is_no_receipt_is_none(garbage: bytes) -> None:
    assert decode_receipts(garbage) is None
    ledger = ReceiptLedger()
    ledger.take({"signer": garbage})
    assert ledger.signed("a") == 0


def test_a_record_of_a_thousand_sources_is_bounded_and_all_come_in_turn() -> None:
    issued, ledger = IssuedReceipts(1), ReceiptLedger()
    names = [f"12D3KooW{number:044}" for number in range(1000)]
    ledger.prove("signer", 1)
    for name in names:
        issued.add(name, 2**40)
    for _ in range(len(names) // MOST_LISTED + 1):
        record = issued.raw()
        assert len(record) <= RECEIPT_BYTES
        ledger.take({"signer": record})
    assert all(ledger.signed(name) == 2**40 for name in names)


def test_of_too_many_sources_the_one_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_node.swarm.receipts.MOST_SOURCES", 8)
    issued = IssuedReceipts(1)
    for number in range(20):
        issued.add(f"passing{number}", 1, brought=1)
        issued.add("steady", 1, brought=1)
        assert decode_receipts(issued.raw()) is not None
    for nobody in ("", "x" * (LONGEST_ID + 1)):
        issued.add(nobody, 1)
    assert issued.samples == {"steady": 20} | {f"passing{number}": 1 for number in range(13, 20)}
    assert issued.brought == issued.samples


def test_what_is_believed_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_node.swarm.receipts.MOST_SOURCES", 8)
    ledger = ReceiptLedger()
    ledger.take({})
    ledger.begin()
    for number in range(20):
        for _ in range(ENOUGH):
            ledger.prove("signer", 1)
        ledger.take({"signer": raw(number, steady=1, **{f"passing{number}": 1})})
        ledger._books.clear()
    assert set(ledger._settled) == {tag_of("steady")} | {tag_of(f"passing{number}") for number in range(13, 20)}
    assert ledger.verified("steady") == 20


class Swarm:
    """Sources that draw routes by chance over signers of the last stage, read by one of them."""

    def __init__(self, speeds: list[float], sources: int = 4, seed: int = 0) -> None:
        self.rng, self.speeds = Random(seed), {f"y{number}": speed for number, speed in enumerate(speeds)}
        self.issued = {name: IssuedReceipts(1) for name in self.speeds}
        self.true: Counter[str] = Counter()
        self.sources, self.ledger = [f"x{number}" for number in range(sources)], ReceiptLedger()
        self.signed_for_nothing: dict[str, dict[str, int]] = {}
        self.unread: set[str] = set()
        self.ledger.take({})
        self.ledger.begin()

    def refresh(self, microbatches: int = 40, batch: int = 2) -> None:
        """Let each source have so many microbatches computed, and read what is signed."""
        for source in ["me", *self.sources]:
            for signer in self.rng.choices(list(self.speeds), list(self.speeds.values()), k=microbatches):
                self.issued[signer].add(source, batch)
                self.true[source] += batch
                if source == "me":
                    self.ledger.prove(signer, batch)
        raws = {name: issued.raw() for name, issued in self.issued.items()}
        for signer, lies in self.signed_for_nothing.items():
            honest = decode_receipts(raws[signer]).samples if signer in raws else {}
            told = {tag_of(source): samples for source, samples in lies.items()}
            raws[signer] = msgspec.msgpack.encode(ReceiptRecord(1, honest | told))
        self.ledger.take({signer: each for signer, each in raws.items() if signer not in self.unread})


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [8.0, 1.0, 1.0], [1.0] * 10])
@pytest.mark.parametrize("microbatches", [3, 40])
def test_honest_work_is_credited(speeds: list[float], microbatches: int) -> None:
    swarm = Swarm(speeds)
    for _ in range(40):
        swarm.refresh(microbatches)
    for source in swarm.sources:
        assert 0.95 * swarm.true[source] <= swarm.ledger.verified(source) <= swarm.true[source]


@pytest.mark.parametrize("signers", [16, 40, 80, 128])
@pytest.mark.parametrize("each", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("unread", [0.0, 0.25])
def test_work_is_credited_before_a_source_has_met_all_signers(signers: int, each: float, unread: float) -> None:
    """A source of a large stage has met few signers for a long time; the others count for the work of the rest.

    `each`: microbatches of a source, for each signer. `unread`: the part of the signers whose receipts are not read.
    """
    credited = []
    for seed in range(5):
        swarm = Swarm([1.0] * signers, sources=20, seed=seed)
        swarm.unread = {f"y{number}" for number in range(int(unread * signers))}
        swarm.refresh(round(each * signers))
        done = [swarm.true[source] for source in swarm.sources]
        believed = map(min, done, map(swarm.ledger.verified, swarm.sources))
        credited.append(sum(believed) / sum(done))
    assert sum(credited) / len(credited) >= 0.6


@pytest.mark.parametrize("microbatches", [5, 10, 40])
def test_a_signer_gives_its_friend_little_before_a_source_has_met_all_signers(microbatches: int) -> None:
    given_away, batch = [], 2
    for seed in range(40):
        swarm = Swarm([1.0] * 40, seed=seed)
        swarm.signed_for_nothing = {"y0": {"friend": 10**9}}
        swarm.refresh(microbatches, batch)
        given_away.append(swarm.ledger.verified("friend"))
    assert sum(given_away) / len(given_away) <= 1.5 * SPARE * batch


def test_who_proved_nothing_to_us_has_no_voice() -> None:
    swarm = Swarm([1.0] * 4)
    swarm.signed_for_nothing = {f"z{number}": {"liar": 10**12, "x0": 10**12, "me": 40} for number in range(100)}
    for _ in range(10):
        swarm.refresh()
    assert swarm.ledger.verified("liar") == 0
    assert swarm.ledger.verified("x0") <= swarm.true["x0"]
    assert swarm.ledger.signed("liar") == 100 * 10**12, "as anybody can see who looks"


def test_a_signer_that_works_signs_little_more_for_its_friend() -> None:
    """One of four signers and one of five sources are one person: the source's part of the run grows by a quarter."""
    swarm = Swarm([1.0] * 4)
    for number in range(1, 41):
        swarm.signed_for_nothing = {"y0": {"x0": 10**9 * number, "friend": 10**9 * number}}
        swarm.refresh()
    assert swarm.ledger.verified("x0") < 1.45 * swarm.true["x0"]
    assert swarm.ledger.verified("friend") < 0.3 * swarm.true["x1"]
    assert all(swarm.ledger.verified(name) >= 0.9 * swarm.true[name] for name in ("x1", "x2", "x3"))


def test_who_comes_late_learns_what_others_did_before_and_one_signer_adds_little() -> None:
    swarm = Swarm([1.0] * 4)
    for _ in range(10):
        swarm.refresh()
    swarm.ledger.begin()
    swarm.signed_for_nothing = {"y0": {"friend": 10**9}}
    swarm.ledger.prove("y0", 2)
    assert swarm.ledger.believed_in_all("friend") == 0, "the first reply proves nothing"
    swarm.refresh()
    assert swarm.ledger.verified("x1") < 0.2 * swarm.true["x1"]
    assert 0.8 * swarm.true["x1"] <= swarm.ledger.believed_in_all("x1") <= swarm.true["x1"]
    assert swarm.ledger.believed_in_all("friend") < 0.02 * swarm.true["x1"]


async def test_a_run_of_whole_nodes_ends_by_receipts_and_not_by_a_claim() -> None:
    """Two sources, two signers, and an identity that claims a whole budget and has finished, from the beginning on."""
    hub, what = SimNetwork(), recipe(replicas=2, steps=30)
    peers = [Peer(hub, what, f"peer-{stage}{number}", stage, job_s=0.2) for stage in (0, 1) for number in (0, 1)]
    liar, tasks, serial = hub.network("liar"), {peer.task for peer in peers}, 0
    record = PeerRecord(peer="liar", stage=0, state=PeerState.TRAINING)
    while tasks:
        serial += 1
        claim = what.run.budget_samples
        await publish_identity(liar, what.digest, record, serial, 30.0, claim, finished=True)
        _, tasks = await asyncio.wait(tasks, timeout=0.5)
    for peer in peers:
        assert [event.why for event in peer.of(events.Finished)] == ["the run is over"]
    steps = sum(len(peer.of(events.InnerStep)) for peer in peers[:2])
    assert steps * what.run.samples_per_step >= 0.9 * what.run.budget_samples
    last = [peer.of(events.Receipts)[-1] for peer in peers[:2]]
    assert all(set(each.signed.values()) > {0} for each in last), "the liar's, and more than that of the other source"


@pytest.mark.parametrize("steps", [10, 40])
async def test_the_journal_of_a_source_knows_all_receipts_in_the_end(steps: int) -> None:
    """Signers tell of their last work when they end, which is after the source; a short run ends between readings."""
    hub, what = SimNetwork(), recipe(replicas=2, steps=steps)
    places = [(stage, number) for stage in (0, 1) for number in (0, 1)]
    peers = [Peer(hub, what, f"peer-{at}{number}", at, job_s=0.2, refresh_s=5.0) for at, number in places]
    await asyncio.wait({peer.task for peer in peers})
    assert not [told for peer in peers[2:] for told in peer.of(events.Receipts)], "these read no receipts"
    for source in peers[:2]:
        learnt = sum(step.tokens for step in source.of(events.InnerStep))
        drawn = what.run.tokens(len(source.text.drawn) * what.run.pipeline.microbatch_size)
        assert learnt <= source.of(events.Receipts)[-1].own <= drawn, "what came too late for a step is signed too"
