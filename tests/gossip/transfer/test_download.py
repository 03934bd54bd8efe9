"""A newcomer copies a replica's state, whatever becomes of lines and donors, or says why it could not."""

import asyncio
import contextlib
import gc
import math
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from state_copies import (
    LIKE,
    SHAPES,
    TERMS,
    Giving,
    Listening,
    copy_from,
    drawn,
    holding,
    of_parts,
    same,
    state,
    wanted,
)
from toy_gossip import CUT, SWALLOW, Line, World, at_once

from gossip.exchange.codec import norm
from gossip.exchange.messages import (
    Busy,
    Gone,
    Implausible,
    Manifest,
    Parts,
    Piece,
    PieceRequest,
    Propose,
    ReplicaState,
    Section,
    StateRequest,
)
from gossip.transfer import donor as donors_side
from gossip.transfer.assembly import ChunkArrived, DonorLost, DonorSelected, Key, News, StateAssembly
from gossip.transfer.chunks import cut, digest, gather, tensors_of
from gossip.transfer.donor import ABANDONED_S, HOLD_S, NEWCOMERS, RETRY_S, STREAMS, DonorLimits
from gossip.transfer.download import (
    FAILURES_AT_MOST,
    LONGEST_WAIT_S,
    DonorBusy,
    MomentBounds,
    check_manifest,
    check_values,
    donors,
    download_state,
    manifest_of,
    piece_s,
)
from noloco_node.sim.clock import run

SPANS = cut([4 * math.prod(shape) for shape in SHAPES])
WHOLE = state()


@pytest.mark.parametrize("meetings", [0, 2])
@pytest.mark.parametrize("optimiser", [True, False])
def test_a_newcomer_gets_the_whole_state_of_one_donor(meetings: int, optimiser: bool) -> None:
    whole = state(gathered=drawn(9) if meetings else (), meetings=meetings)
    whole = whole if optimiser else replace(whole, optimiser=(), optimiser_steps=0)
    world = World()
    Giving(world, "donor", whole)
    assert same(run(copy_from(world, ["donor"])), whole)


async def test_an_export_gets_the_slow_weights_alone() -> None:
    world, heard = World(), Listening()
    world.tamper = heard
    Giving(world, "donor", state(gathered=drawn(9), meetings=1))
    # A newcomer's copy serves an export too.
    await copy_from(world, ["donor"])
    before = heard.pieces["donor"]
    found = await download_state(["donor"], world.conversing("export"), wanted(Parts.SLOW), at_once)
    assert heard.pieces["donor"] - before == len(SPANS)
    assert same(found, of_parts(WHOLE, Parts.SLOW))


async def test_what_is_copied_is_what_was_frozen_though_the_donor_trains_on() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)

    def train_on(sender: str, receiver: str, message: Any) -> Any:
        if isinstance(message, Piece):
            giving.whole = state(2, round=7)
        return message

    world.tamper = train_on
    assert same(await copy_from(world, ["donor"]), WHOLE)
    assert giving.whole.round == 7


# Lines that break, and donors that die.


@settings(max_examples=12)
@given(st.sets(st.integers(0, 4 * len(SPANS)), max_size=6))
@example(set(range(0, 8 * len(SPANS), 2)))
def test_a_stream_that_breaks_is_dialled_again_and_nothing_is_fetched_twice(broken: set[int]) -> None:
    arrived: list[News] = []
    sent = 0

    def cut_some(sender: str, receiver: str, message: Any) -> Any:
        nonlocal sent
        sent += isinstance(message, Piece)
        return CUT if isinstance(message, Piece) and sent in broken else message

    world = World(tamper=cut_some)
    Giving(world, "donor", WHOLE)
    assert same(run(copy_from(world, ["donor"], holding(arrived))), WHOLE)
    assert sum(isinstance(news, ChunkArrived) for news in arrived) == 4 * len(SPANS)
    # A break costs the piece under way on each stream at most.
    assert sent <= 4 * len(SPANS) + STREAMS * len(broken)


class Kept:
    """Has kept the first pieces of a section in an earlier life; counts how often it is read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None: ...
    def put(self, key: Key, digest: bytes, data: torch.Tensor) -> None: ...

    def pieces(self) -> Iterator[tuple[Key, bytes, torch.Tensor]]:
        self.read += 1
        for number, span in enumerate(SPANS[: self.count]):
            data = gather(tensors_of(WHOLE, Section.SLOW), span)
            yield Key(Section.SLOW, number), digest(data), data

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        return None, frozenset()

    def discard(self) -> None: ...


def test_what_an_earlier_life_kept_is_read_once_and_not_fetched() -> None:
    world, heard, kept = World(), Listening(), Kept(5)
    world.tamper = heard
    Giving(world, "donor", WHOLE)
    held = StateAssembly(LIKE, keep=kept)
    held.load()
    assert same(run(copy_from(world, ["donor"], held)), WHOLE)
    assert (kept.read, heard.pieces["donor"]) == (1, 4 * len(SPANS) - kept.count)


def test_a_last_piece_is_asked_for_by_one_stream_that_gives_up_after_some_breaks() -> None:
    """Also where each line breaks before anybody else has had a turn."""
    world, asked = World(), 0
    Giving(world, "donor", WHOLE)

    @asynccontextmanager
    async def converse(peer: str) -> AsyncIterator[Line]:
        async with world.conversing("new")(peer) as line:
            send = line.send

            async def broken(message: Any) -> None:
                nonlocal asked
                if isinstance(message, PieceRequest):
                    asked += 1
                    raise ConnectionResetError("broken")
                await send(message)

            line.send = broken
            yield line

    held = StateAssembly(LIKE, keep=Kept(len(SPANS) - 1))
    with pytest.raises(ConnectionRefusedError, match="broken"):
        run(download_state(["donor"], converse, wanted(Parts.SLOW), at_once, held))
    assert asked == FAILURES_AT_MOST


def dying(world: World, name: str, pieces: int) -> None:
    """Let a donor die for good after so many pieces."""
    given = 0

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        nonlocal given
        if sender == name and isinstance(message, Piece):
            given += 1
            if given > pieces:
                world.answerers.pop(name, None)
                return CUT
        return message

    world.tamper = tamper


@settings(max_examples=14)
@example(4 * len(SPANS) - 1, 6)  # the other streams have ended by then
@example(4 * len(SPANS) - 2, 6)
@example(4 * len(SPANS) - STREAMS, 6)
@given(st.integers(0, 4 * len(SPANS) - 1), st.integers(2, 30))
async def test_when_the_donor_dies_whole_parameters_stay_or_all_is_the_second_ones(pieces: int, round: int) -> None:
    world = World()
    first, second = state(1), state(2, round=round, last_met=2)
    Giving(world, "first", first)
    Giving(world, "second", second)
    dying(world, "first", pieces)
    news: list[News] = []
    found, news = await copy_from(world, ["first", "second"], holding(news)), news
    units = {part.tensor: span.unit for span in SPANS for part in span.parts}
    origins: dict[int, set[int]] = {}
    for section in Section:
        for number, tensor in enumerate(tensors_of(found, section)):
            candidates = {seed for seed in (1, 2) if torch.equal(tensor, tensors_of(state(seed), section)[number])}
            assert candidates, "halves of one tensor are of two replicas"
            origins.setdefault(units[number], set()).update(candidates)
    assert all(len(seeds) == 1 for seeds in origins.values()), "sections of one parameter are of two replicas"
    mixed = any(1 in seeds for seeds in origins.values())
    assert found.round == round
    assert found.last_met == 2
    follows = [each for each in news if isinstance(each, DonorSelected)]
    assert [each.donor for each in follows] == ["first", "second"]
    assert (follows[1].settled_bytes > 0) == mixed
    assert sum(isinstance(each, DonorLost) for each in news) == 1
    if abs(round - 6) > 4:
        assert not mixed
    # Nobody fetches more than a state and what the first one gave.
    arrived = [each for each in news if isinstance(each, ChunkArrived)]
    assert len(arrived) <= pieces + 4 * len(SPANS)


async def test_a_donor_that_lets_its_copy_go_is_asked_for_another() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    forgotten = False

    def forget(sender: str, receiver: str, message: Any) -> Any:
        nonlocal forgotten
        if isinstance(message, Piece) and not forgotten and sum(isinstance(n, ChunkArrived) for n in news) > 20:
            forgotten = True
            giving.whole = state(1, round=8)
            giving.donor._copies.clear()
        return message

    world.tamper = forget
    news: list[News] = []
    found = await copy_from(world, ["donor"], holding(news))
    assert same(found, state(1, round=8))
    assert [each.round for each in news if isinstance(each, DonorSelected)] == [6, 8]
    # The weights are the same, and so are their hashes.
    assert sum(isinstance(each, ChunkArrived) for each in news) == 4 * len(SPANS)


# Liars.


def sending(change: Any) -> Any:
    """Tamper with what the liar sends."""
    return lambda sender, receiver, message: change(message) if sender == "liar" else message


def garbled(message: Any) -> Any:
    return Piece(data=message.data ^ 1) if isinstance(message, Piece) else message


def short(message: Any) -> Any:
    return Piece(data=message.data[:-4]) if isinstance(message, Piece) else message


def boasting(message: Any) -> Any:
    return replace(message, norm=1e3 * message.norm) if isinstance(message, Manifest) else message


def few_hashes(message: Any) -> Any:
    return replace(message, slow=message.slow[:-1]) if isinstance(message, Manifest) else message


SPOILT = state(3)
SPOILT.optimiser[0][1, 1] = math.nan


@pytest.mark.parametrize("change", [garbled, short, boasting, few_hashes, "not finite"])
def test_a_liar_is_refused_and_the_next_donor_asked(change: Any) -> None:
    """Also one whose weights are not finite, though their hash is right."""
    spoilt = change == "not finite"
    world = World() if spoilt else World(tamper=sending(change))
    Giving(world, "liar", SPOILT if spoilt else state(3))
    Giving(world, "donor", WHOLE)
    news: list[News] = []
    assert same(run(copy_from(world, ["liar", "donor"], holding(news))), WHOLE)
    (left,) = [each for each in news if isinstance(each, DonorLost)]
    assert left.refused


@settings(max_examples=10)
@given(st.integers(1, 3 * len(SPANS)))
async def test_what_an_honest_donor_gave_survives_a_liar(pieces: int) -> None:
    world = World()
    Giving(world, "honest", WHOLE)
    Giving(world, "liar", state(3))
    Giving(world, "donor", WHOLE)
    dying(world, "honest", pieces)
    before, news = world.tamper, []

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        message = before(sender, receiver, message)
        return garbled(message) if sender == "liar" else message

    world.tamper = tamper
    assert same(await copy_from(world, ["honest", "liar", "donor"], holding(news)), WHOLE)
    last = [each for each in news if isinstance(each, DonorSelected)][-1]
    assert last.donor == "donor"
    assert last.held_bytes > 0


async def test_parameters_that_a_liar_wrote_over_are_settled_no_more() -> None:
    """What stays of a donor before counts without a hash, so it must be known to be still there."""
    left = {"first": 2 * len(SPANS), "second": 4, "liar": 3 * len(SPANS)}

    world = World()
    for seed, (name, round) in enumerate((("first", 6), ("second", 7), ("liar", 30), ("last", 7)), 1):
        Giving(world, name, state(seed, round=round))

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        if sender in left and isinstance(message, Piece):
            left[sender] -= 1
            if left[sender] < 0:
                if sender == "liar":
                    return garbled(message)
                world.answerers.pop(sender, None)
                return CUT
        return message

    world.tamper = tamper
    found = await copy_from(world, ["first", "second", "liar", "last"])
    for section in Section:
        for number, tensor in enumerate(tensors_of(found, section)):
            assert any(torch.equal(tensor, tensors_of(state(seed), section)[number]) for seed in (1, 2, 4))


async def test_of_two_donors_whose_copy_cannot_be_right_nothing_stays() -> None:
    """All hashes were right, so either may have lied: here the first one, about moments that only the end shows."""
    world, news = World(), list[News]()
    honest = state(1)
    second_moments = tuple(-tensor for tensor in honest.optimiser[len(honest.slow) :])
    Giving(world, "first", replace(honest, optimiser=(*honest.optimiser[: len(honest.slow)], *second_moments)))
    Giving(world, "second", state(2, round=7))
    Giving(world, "last", state(3, round=7))
    dying(world, "first", 4 * len(SPANS) - 1)
    found = await copy_from(world, ["first", "second", "last"], holding(news))
    assert same(found, state(3, round=7))
    selected = [each for each in news if isinstance(each, DonorSelected)]
    assert [each.donor for each in selected] == ["first", "second", "last"]
    assert [each.settled_bytes > 0 for each in selected] == [False, True, False]
    assert [each.donor for each in news if isinstance(each, DonorLost) and each.refused] == ["second"]


NOT_FINITE = (torch.full((40, 256), math.nan), *WHOLE.slow[1:])
WRONG = {
    "NaN in the slow weights": {"slow": NOT_FINITE},
    "NaN in the momentum": {"momentum": NOT_FINITE},
    "NaN in what was gathered": {"gathered": NOT_FINITE, "meetings": 1},
    "NaN in the optimiser": {"optimiser": (*NOT_FINITE, *NOT_FINITE)},
    "a negative second moment": {"optimiser": (*WHOLE.slow, *(-tensor.square() for tensor in WHOLE.slow))},
    "a first moment beside none": {"optimiser": (*WHOLE.slow, *(tensor * 0.0 for tensor in WHOLE.slow))},
    "slow weights of another norm": {"slow": tuple(tensor * 11 for tensor in WHOLE.slow)},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_cannot_be_right_is_implausible(what: str) -> None:
    announced = norm(WHOLE.slow)
    check_values(WHOLE, announced)
    with pytest.raises(Implausible):
        check_values(replace(WHOLE, **WRONG[what]), announced)


@pytest.mark.parametrize(("times", "plausible"), [(1.0, True), (1.1, False), (1.9, False)])
def test_moments_are_held_to_their_bounds_within_rounding(times: float, plausible: bool) -> None:
    second = (torch.tensor([9.0, 16.0]),)
    root = tuple(tensor.sqrt() for tensor in second)
    first = tuple(10.0 * times * tensor for tensor in root)
    nothing = tuple(torch.zeros_like(tensor) for tensor in second)
    long = tuple(times**2 * tensor for tensor in second)
    # A first moment beside its second, the norm of all first ones, and the sum of all second ones.
    for bounds, moments in (
        (MomentBounds(ratio=10.0), (first, second)),
        (MomentBounds(norm=50.0), (first, second)),
        (MomentBounds(norm=5.0), (nothing, long)),
    ):
        with contextlib.nullcontext() if plausible else pytest.raises(Implausible):
            bounds.check(*moments)


def manifest(parts: Parts = Parts.ALL) -> Manifest:
    async def main() -> Manifest:
        world = World()
        Giving(world, "donor", WHOLE)
        async with world.conversing("new")("donor") as line:
            found = await manifest_of(line, StateRequest(parts=parts), len(SPANS))
            assert isinstance(found, Manifest)
            return found

    return run(main())


WRONG_MANIFESTS = {
    "half of the optimiser": {"second": None},
    "gathered without a meeting": {"gathered": torch.zeros(len(SPANS), 32, dtype=torch.uint8)},
    "meetings that gathered nothing": {"meetings": 2},
    "a hash too many": {"slow": torch.zeros(len(SPANS) + 1, 32, dtype=torch.uint8)},
    "met in a round to come": {"last_met": 7},
}


@pytest.mark.parametrize("what", WRONG_MANIFESTS)
def test_a_manifest_that_cannot_be_right_is_implausible_before_memory_is_taken(what: str) -> None:
    right = manifest()
    check_manifest(right, Parts.ALL, len(SPANS))
    with pytest.raises(Implausible):
        check_manifest(replace(right, **WRONG_MANIFESTS[what]), Parts.ALL, len(SPANS))


def test_an_outline_costs_no_copy_and_says_the_norm() -> None:
    found = manifest(Parts.OUTLINE)
    assert found.slow is None
    assert found.norm == pytest.approx(math.hypot(*[float(tensor.norm()) for tensor in WHOLE.slow]))
    with pytest.raises(Implausible):
        check_manifest(manifest(), Parts.OUTLINE, len(SPANS))


async def test_an_outline_is_given_also_where_all_places_are_taken() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    async with world.conversing("one")("donor") as one, world.conversing("two")("donor") as two:
        for line in (one, two):
            await line.send(StateRequest(parts=Parts.ALL))
            assert isinstance(await line.receive(), Manifest)
        for parts, reply in ((Parts.OUTLINE, Manifest), (Parts.SLOW, Busy)):
            async with world.conversing("third")("donor") as line:
                await line.send(StateRequest(parts=parts))
                assert isinstance(await line.receive(), reply)
    assert giving.donor.statistics()["held"] == 1


# Nobody gives.


async def test_dead_silent_and_confused_donors_cost_only_their_deadlines() -> None:
    def tamper(sender: str, receiver: str, message: Any) -> Any:
        if receiver == "silent":
            return SWALLOW
        return {"cut": CUT, "confused": Propose(round=1)}.get(sender, message)

    # The silent one is given up for want of a manifest; a piece may take as long as its share of the deadline.
    world = World(tamper=tamper)
    for name in ("cut", "silent", "confused", "donor"):
        Giving(world, name, WHOLE)
    order = ["dead", "cut", "silent", "confused", "donor"]
    assert same(await copy_from(world, order), WHOLE)
    assert asyncio.get_running_loop().time() == pytest.approx(30.0 + 300.0 / 4, abs=10.0)


async def test_a_donor_that_falls_silent_in_the_middle_is_given_up_and_its_pieces_stay() -> None:
    world, given = World(), Counter[str]()

    def tamper(sender: str, receiver: str, message: Any) -> Any:
        given[sender] += isinstance(message, Piece)
        return SWALLOW if sender == "first" and given[sender] > 30 else message

    world.tamper = tamper
    Giving(world, "first", WHOLE)
    Giving(world, "second", WHOLE)
    news: list[News] = []
    assert same(await copy_from(world, ["first", "second"], holding(news)), WHOLE)
    seconds, news = asyncio.get_running_loop().time(), news
    # A stream waits twice as long the second time, for a slow line would look the same; the third time its donor, which
    # hears of no request, is the first to end it.
    assert seconds == pytest.approx(3 * piece_s(300.0, 4 * len(SPANS)) + TERMS.piece_s, abs=10.0)
    assert sum(isinstance(each, ChunkArrived) for each in news) == 4 * len(SPANS)


def test_nobody_gives_and_the_causes_are_named() -> None:
    """And nobody is taken for busy who will never give."""
    world = World(tamper=lambda sender, receiver, message: SWALLOW if receiver == "silent" else message)
    Giving(world, "silent", WHOLE)
    with pytest.raises(ConnectionRefusedError, match=r"dead is not there.*no manifest within 105 s") as caught:
        run(copy_from(world, ["dead", "silent"]))
    assert not isinstance(caught.value, DonorBusy)
    with pytest.raises(ConnectionRefusedError, match="none to ask"):
        run(copy_from(world, []))
    # The slow weights alone are one section of five, and so is their part of the deadline.
    with pytest.raises(ConnectionRefusedError, match=r"no manifest within 45 s"):
        run(download_state(["silent"], world.conversing("new"), wanted(Parts.SLOW), at_once))


async def test_always_busy_is_given_up_after_a_bounded_time() -> None:
    world = World()

    async def busy(line: Line) -> None:
        await line.receive()
        await line.send(Busy(retry_after_s=1e9))

    world.answerers["donor"] = busy

    with pytest.raises(DonorBusy, match="busy") as caught:
        await copy_from(world, ["donor"])
    assert caught.value.retry_after_s == LONGEST_WAIT_S
    assert 80.0 <= (asyncio.get_running_loop().time()) < 82.0


# What strangers cost a donor.


async def test_a_donor_that_is_closed_gives_nothing_and_keeps_nothing() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    await copy_from(world, ["donor"])
    assert giving.donor.statistics()["held"] == 1
    closed = giving.donor
    closed.close()
    assert closed.statistics()["held"] == 0
    with pytest.raises(ConnectionError):
        await copy_from(world, ["donor"], None, "late")
    assert (closed.statistics()["held"], giving.made) == (0, 1)
    # Neither a copy's timer nor a stream's frame keeps the replica.
    kept = weakref.ref(giving)
    world.answerers.clear()
    del giving
    gc.collect()
    assert kept() is None


async def test_a_donor_that_is_closed_while_a_piece_is_on_its_way_keeps_none_of_the_state() -> None:
    world = World()
    giving = Giving(world, "donor", state(7))
    kept = [weakref.ref(tensor) for tensor in giving.whole.slow]
    async with world.conversing("new")("donor") as line:
        await line.send(StateRequest(parts=Parts.ALL))
        manifest = await line.receive()
        assert isinstance(manifest, Manifest)
        await line.send(PieceRequest(snapshot=manifest.snapshot, section=Section.SLOW, number=0))
        assert isinstance(await line.receive(), Piece)
        giving.donor.close()
        giving.whole = WHOLE
        await asyncio.sleep(1.0)
        gc.collect()
        assert [each() for each in kept] == [None] * len(kept)


async def test_newcomers_share_a_copy_and_are_served_a_few_at_a_time() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    most = refused = 0

    def listen(sender: str, receiver: str, message: Any) -> Any:
        nonlocal most, refused
        most = max(most, int(giving.donor.statistics()["visitors"]))
        refused += isinstance(message, Busy)
        return message

    world.tamper = listen
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(copy_from(world, ["donor"], None, f"new{n}")) for n in range(6)]
    assert all(same(task.result(), WHOLE) for task in tasks)
    assert most == NEWCOMERS
    assert giving.made == 1
    assert giving.donor.statistics()["turned_away"] == refused > 0
    assert giving.donor.statistics()["visitors"] == 0


@settings(max_examples=10)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 1000))
async def test_copies_are_bounded_and_let_go(rounds: list[int], seed: int) -> None:
    """Newcomers come in one round after the other, some of them for an export, and none ever fetches."""
    rng = Random(seed)

    world = World()
    giving = Giving(world, "donor", WHOLE)
    number = 0
    for later in rounds:
        number += later
        giving.whole = state(number, round=6 + number)
        async with world.conversing("new")("donor") as line:
            await line.send(StateRequest(parts=rng.choice([Parts.ALL, Parts.SLOW])))
            assert isinstance(await line.receive(), Manifest)
        assert giving.donor.statistics()["held"] <= donors_side.COPIES
        await asyncio.sleep(rng.uniform(0.0, 60.0))
    await asyncio.sleep(HOLD_S + 1.0)
    assert giving.donor.statistics()["held"] == 0


async def test_who_asks_and_leaves_costs_a_donor_one_copy_in_a_while() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    provide, begun = giving.donor._provide, 0

    async def slowly(parts: Parts) -> ReplicaState:
        nonlocal begun
        begun += parts is Parts.ALL
        await asyncio.sleep(1.0 if parts is Parts.ALL else 0.0)
        return await provide(parts)

    giving.donor._provide = slowly
    for _ in range(8):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await copy_from(world, ["donor"])
    assert (begun, giving.donor.statistics()["manifests"]) == (1, 8)
    begun_s = asyncio.get_running_loop().time()
    assert same(await copy_from(world, ["donor"]), WHOLE)
    assert asyncio.get_running_loop().time() - begun_s < ABANDONED_S + RETRY_S + 2.0
    assert giving.made == 1


async def test_a_disk_that_gives_nothing_is_told_and_asked_again_later() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE)
    provide, failures = giving.donor._provide, 1

    async def broken_once(parts: Parts) -> ReplicaState:
        nonlocal failures
        if parts is Parts.ALL and failures:
            failures -= 1
            raise OSError("the disk is gone")
        return await provide(parts)

    giving.donor._provide = broken_once
    assert same(await copy_from(world, ["donor"]), WHOLE)
    statistics = giving.donor.statistics()
    assert (statistics["refused_by_disk"], statistics["copies"], statistics["held"]) == (1, 1, 1)


async def test_an_old_copy_is_given_to_nobody_and_makes_room() -> None:
    """However often somebody comes back for it: it would be refused as an outlier."""
    world = World()
    giving = Giving(world, "donor", WHOLE)
    snapshot, rounds = "", []
    for round in range(6, 60, 3):
        giving.whole = state(1, round=round)
        async with world.conversing("new")("donor") as line:
            await line.send(StateRequest(parts=Parts.ALL, snapshot=snapshot))
            found = await line.receive()
        snapshot = found.snapshot
        rounds.append(round - found.round)
        await asyncio.sleep(1.0)
    assert max(rounds) == 6
    assert giving.donor.statistics()["held"] <= donors_side.COPIES


async def test_a_line_that_is_slower_than_thought_is_given_more_time() -> None:
    """Pieces come one a minute, and the fourth stream would wait for its own longer than is allowed at first."""
    world = World()
    giving = Giving(world, "donor", WHOLE, DonorLimits(deadline_s=100 * 3600.0, piece_s=200.0))
    turn = asyncio.Lock()

    async def answer(line: Line) -> None:
        send = line.send

        async def slowly(message: Any) -> None:
            if isinstance(message, Piece):
                async with turn:
                    await asyncio.sleep(60.0)
            await send(message)

        line.send = slowly
        await giving.donor.serve(line)

    world.answerers["donor"] = answer
    asked = replace(wanted(), deadline_s=1500.0)
    assert piece_s(1500.0, 4 * len(SPANS)) < STREAMS * 60.0
    found = await download_state(["donor"], world.conversing("new"), asked, at_once)
    assert same(found, WHOLE)
    assert (asyncio.get_running_loop().time()) < 1.2 * 60.0 * 4 * len(SPANS)


async def test_a_copy_in_use_is_held_until_its_deadline() -> None:
    world = World()
    giving = Giving(world, "donor", WHOLE, DonorLimits(deadline_s=400.0, piece_s=60.0))
    async with world.conversing("new")("donor") as line:
        await line.send(StateRequest(parts=Parts.ALL))
        found = await line.receive()
        replies = []
        for _ in range(9):
            await asyncio.sleep(50.0)
            await line.send(PieceRequest(snapshot=found.snapshot, section=Section.FIRST, number=1))
            replies.append(type(await line.receive()))
    assert replies == [Piece] * 7 + [Gone] * 2
    assert giving.donor.statistics()["held"] == 0


@pytest.mark.parametrize(
    "first",
    [
        None,
        Propose(round=1),
        PieceRequest(snapshot="here", section=Section.SLOW, number=len(SPANS)),
        PieceRequest(snapshot="here", section=Section.SLOW, number=-1),
        PieceRequest(snapshot="here", section=Section.GATHERED, number=0),
    ],
)
async def test_a_newcomer_that_says_nothing_or_nonsense_is_given_up(first: Any) -> None:
    world = World()
    outcome: list[BaseException] = []
    giving = Giving(world, "donor", WHOLE)

    async def answer(line: Line) -> None:
        try:
            await giving.donor.serve(line)
        except ConnectionAbortedError as loss:
            outcome.append(loss)

    world.answerers["donor"] = answer
    async with world.conversing("new")("donor") as line:
        await line.send(StateRequest(parts=Parts.ALL))
        found = await line.receive()
        if isinstance(first, PieceRequest):
            await line.send(replace(first, snapshot=found.snapshot))
        elif first is not None:
            await line.send(first)
        with pytest.raises(ConnectionResetError):
            await line.receive()
    assert len(outcome) == 1
    assert giving.donor.statistics()["visitors"] == 0


def test_newcomers_spread_over_the_donors() -> None:
    replicas = [f"replica{number}" for number in range(5)]
    first = Counter(donors(f"new{number}", replicas, 7)[0] for number in range(1000))
    assert min(first.values()) > 150
    assert len(first) == 5
    order = donors("replica3", replicas, 7)
    assert sorted(order) == sorted(set(replicas) - {"replica3"})
    assert order == donors("replica3", list(reversed(replicas)), 7)
    assert order != donors("replica3", replicas, 8) or donors("new1", replicas, 7) != donors("new1", replicas, 8)
