"""Shards: whatever depths peers have, they find each other, and a few shards tell how large a stage is."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.swarm.shards import (
    DEEPEST,
    FOLLOWED,
    FOLLOWED_S,
    LEAST_IN_SHARD,
    LEAST_PAUSE_S,
    MANY_GONE,
    MOST_IN_SHARD,
    ReadingRhythm,
    Shard,
    followed,
    next_depth,
    next_pause_s,
    prevailing,
    stage_size,
    written,
)

RUN = "run/stage/1"
depths = st.integers(0, 12)


def population(name: int, replicas: int) -> list[str]:
    return [f"{name}-{number}" for number in range(replicas)]


def found(peers: dict[str, int], shards: list[Shard], *, parents: bool = True) -> set[str]:
    """Return the peers, with these depths, whose records a reader of these shards finds."""
    read = {*shards, *(shard.parent for shard in shards if parents and shard.depth)}
    return {peer for peer, depth in peers.items() if read.intersection(written(peer, depth))}


@given(st.text(max_size=60), depths)
def test_a_peer_writes_under_its_own_shard_and_under_those_it_continues_with_zeros(peer: str, depth: int) -> None:
    shards = written(peer, depth)
    assert shards[0].depth == depth
    assert all(shard.holds(peer, depth) for shard in shards)
    every = [Shard(each, prefix) for each in range(min(depth, 6) + 1) for prefix in range(2**each)]
    assert {shard for shard in every if shard.holds(peer, depth)} == {s for s in shards if s.depth <= 6}
    assert not Shard(depth + 1, shards[0].prefix << 1).holds(peer, depth)


def test_keys_differ_and_the_whole_stage_has_the_key_that_it_always_had() -> None:
    shards = [Shard(depth, prefix) for depth in range(7) for prefix in range(2**depth)]
    assert len({shard.key(RUN) for shard in shards}) == len(shards)
    assert [shard.key(RUN) for shard in written("p", 0)] == [shard.key(RUN) for shard in followed("r", 1, 0, 5.0)]
    assert Shard(0, 0).key(RUN) == RUN


def test_a_peer_writes_under_one_key_more_on_average() -> None:
    more = [len(written(peer, 10)) - 1 for peer in population(0, 4000)]
    assert fmean(more) == pytest.approx(1.0, abs=0.1)
    assert max(more) <= 10


@given(st.integers(0, 10**6), st.integers(0, 3), st.data())
@settings(max_examples=30)
def test_readers_and_writers_whose_depths_differ_by_one_overlap(name: int, depth: int, data: st.DataObject) -> None:
    peers = population(name, 32 * 2**depth)
    moods = data.draw(st.sampled_from([(-1,), (0,), (1,), (-1, 0), (0, 1), (-1, 0, 1)]))
    there = {peer: max(0, depth + moods[place % len(moods)]) for place, peer in enumerate(peers)}
    shards = followed(f"reader {name}", 1, depth, data.draw(st.floats(0.0, 1e5)))
    seen = found(there, shards)
    assert len(seen) >= 8, "a reader always finds somebody"
    assert len(seen) <= 4 * FOLLOWED * MOST_IN_SHARD
    deeper = {peer for peer, each in there.items() if each > depth}
    if depth and len(deeper) < len(there):
        readers = [shard for number in range(12 * 2**depth) for shard in followed(f"{number}", 1, depth, 0.0)]
        reached = found(there, readers)
        assert reached >= there.keys() - deeper, "whoever is not deeper is found by somebody"


@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=30)
def test_a_key_that_is_too_short_shows_the_depth_and_the_size(name: int, depth: int, shorter: int) -> None:
    peers = population(name, 40 * 2**depth)
    at = max(0, depth - shorter)
    shard = followed("newcomer", 1, at, 0.0)
    seen = found(dict.fromkeys(peers, depth), shard, parents=False)
    assert seen, "16 to 64 peers stand there, by a hash"
    size = stage_size([depth] * len(seen), len(shard))
    assert abs(size.peers - len(peers)) <= 6.0 * size.error * size.peers + 1e-6
    assert abs(next_depth([depth] * len(seen), size.peers) - depth) <= 1


@given(st.integers(0, 10**6), st.integers(1, 3), st.data())
@settings(max_examples=30)
def test_the_estimate_has_no_bias_whatever_depths_the_peers_have(name: int, depth: int, data: st.DataObject) -> None:
    peers = population(name, 24 * 2**depth)
    share = data.draw(st.floats(0.0, 1.0))
    there = {peer: depth - (place < share * len(peers)) for place, peer in enumerate(peers)}
    shards = [Shard(depth, prefix) for prefix in range(2**depth)]
    seen = [[each for peer, each in there.items() if shard.counts(peer, each)] for shard in shards]
    assert all(
        {peer for peer, each in there.items() if shard.counts(peer, each)} <= found(there, [shard]) for shard in shards
    )
    total = math.fsum(2.0**each / 2**depth for counted in seen for each in counted)
    assert total == pytest.approx(len(peers)), "every peer stands for itself once over all shards"


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("mixed", [0, 1])
def test_the_stated_error_is_the_error(count: int, mixed: int) -> None:
    depth, told, true = 5, [], 1000
    errors = []
    for name in range(100):
        there = {peer: depth + mixed * (place % 2) for place, peer in enumerate(population(name, true))}
        shards = followed("r", 1, depth, 0.0, count)
        counted = [each for peer, each in there.items() if any(shard.counts(peer, each) for shard in shards)]
        size = stage_size(counted, len(shards))
        told.append(size.error)
        errors.append(size.peers / true - 1.0)
    assert pstdev(errors) == pytest.approx(fmean(told), rel=0.25)
    assert abs(fmean(errors)) < 4 * fmean(told) / math.sqrt(len(errors))


@given(st.lists(depths, max_size=200), st.floats(0.0, 1e7))
def test_a_depth_keeps_a_key_within_bounds(others: list[int], peers: float) -> None:
    depth = next_depth(others, peers)
    assert 0 <= depth <= DEEPEST
    if depth < DEEPEST:
        assert peers / 2**depth <= MOST_IN_SHARD
    if depth:
        assert peers / 2**depth >= LEAST_IN_SHARD or peers / 2 ** (depth - 1) > MOST_IN_SHARD


@given(st.integers(1, MOST_IN_SHARD))
def test_a_small_stage_has_one_key_and_is_known_exactly(replicas: int) -> None:
    size = stage_size([0] * replicas, 1)
    assert size == (replicas, 0.0)
    assert str(size) == str(replicas)
    assert next_depth([0] * replicas, size.peers) == 0


@given(st.integers(MOST_IN_SHARD + 1, 10**6), depths)
@settings(max_examples=100)
def test_one_depth_prevails_and_stays(replicas: int, common: int) -> None:
    """A peer that disagrees takes the depth of the others if it is possible. Possible ones are close together."""
    depth = next_depth([common] * 40, replicas)
    assert next_depth([depth] * 40, replicas) == depth
    assert abs(next_depth([depth] * 27 + [depth + 1] * 13, replicas) - depth) <= 1
    other = next_depth([0] * 40, replicas)
    assert depth - other in (0, 1, 2)


@given(st.integers(1, 200), st.integers(0, 8), st.data())
def test_few_liars_stand_for_few(honest: int, depth: int, data: st.DataObject) -> None:
    liars = data.draw(st.lists(st.integers(0, 64), max_size=(honest - 1) // 4))
    told = [depth] * honest + liars
    assert prevailing(told) <= max(depth, 0)
    assert stage_size(told, 1).peers <= (honest + 2 * len(liars)) * 2**depth


@given(st.integers(2, 200), st.integers(0, 8), st.data())
def test_liars_fewer_than_the_honest_make_a_stage_no_thousand_times_as_large(
    honest: int, depth: int, data: st.DataObject
) -> None:
    liars = data.draw(st.lists(st.integers(0, DEEPEST), max_size=honest - 1))
    told = [depth] * honest + liars
    assert prevailing(told) <= depth + 1
    size = stage_size(told, 1)
    assert size.peers <= (honest + 4 * len(liars)) * 2**depth
    assert next_depth(told, size.peers) <= max(depth + 1, math.ceil(math.log2(size.peers / MOST_IN_SHARD)))


@given(st.text(max_size=60), st.integers(0, 3), depths, st.floats(0.0, 1e6), st.sampled_from([1, 2, 4, 8]))
def test_followed_shards_differ_and_outlive_a_change_of_depth(
    reader: str, stage: int, depth: int, now_s: float, count: int
) -> None:
    shards = followed(reader, stage, depth, now_s, count)
    assert len(set(shards)) == len(shards) == min(count, 2**depth)
    assert all(shard.depth == depth and 0 <= shard.prefix < 2**depth for shard in shards)
    deeper = followed(reader, stage, depth + 1, now_s, count)
    if len(deeper) == len(shards):
        assert [shard.parent for shard in deeper] == shards


@given(st.floats(0.0, 100.0), st.floats(LEAST_PAUSE_S, 1e4), st.lists(st.floats(0.0, 1.0), max_size=20))
def test_the_pause_between_two_readings_settles_where_a_part_of_the_sample_is_gone(
    churn_per_hour: float, most_s: float, before: list[float]
) -> None:
    pause_s = LEAST_PAUSE_S
    for gone in before:
        pause_s = next_pause_s(pause_s, gone, most_s)
        assert LEAST_PAUSE_S <= pause_s <= most_s

    def gone_in(seconds: float) -> float:
        return 1.0 - math.exp(-churn_per_hour / 3600.0 * seconds)

    for _ in range(20):
        pause_s = next_pause_s(pause_s, gone_in(pause_s), most_s)
    assert pause_s == LEAST_PAUSE_S or gone_in(pause_s) <= MANY_GONE
    assert pause_s == most_s or gone_in(pause_s) > MANY_GONE / 1.5


def test_a_sample_is_read_again_when_its_pause_is_over_or_its_shards_are_others() -> None:
    rhythm, shards, others = ReadingRhythm(), [Shard(3, 1), Shard(3, 6)], [Shard(3, 2), Shard(3, 6)]
    assert rhythm.is_due(shards, 0.0)
    for steady, pause_s in [(True, LEAST_PAUSE_S), (True, 30.0 * 2**0.5), (True, 50.0), (False, LEAST_PAUSE_S)]:
        rhythm.note(shards, 100.0, steady=steady, gone=0.0, most_s=50.0)
        assert rhythm.pause_s == pytest.approx(pause_s)
        assert not rhythm.is_due(shards, 99.0 + pause_s)
        assert rhythm.is_due(shards, 101.0 + pause_s)
        assert rhythm.is_due(others, 101.0)


def test_shards_are_exchanged_one_after_the_other_and_all_are_followed() -> None:
    readings = [followed("r", 1, 6, now_s) for now_s in range(0, int(20 * FOLLOWED_S), 60)]
    changes = [sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairwise(readings)]
    assert max(changes) == 1
    assert sum(changes) == pytest.approx(2 * 20, abs=6)
    readers: list[int] = [shard.prefix for number in range(2000) for shard in followed(f"r{number}", 1, 5, 0.0)]
    assert {readers.count(prefix) > 60 for prefix in range(32)} == {True}
