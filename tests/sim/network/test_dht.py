"""The DHT of the simulation: what a reader may find, for any order of publications, lags and partitions."""

from hypothesis import example, given
from hypothesis import strategies as st

from noloco_node.sim.network.dht import SimDht

LIFETIME_S = 30.0
steps = st.lists(
    st.tuples(st.floats(0, 20), st.sampled_from(["a", "b", "c"]), st.sampled_from([10.0, 30.0, 60.0])), max_size=40
)


def put(records: SimDht, subkey: str, value: bytes, now_s: float, side: int | None = None) -> bool:
    return records.publish(("key", subkey), (value, LIFETIME_S), now_s, side=side)


@example([(0.0, "a", 10.0)] * 3)
@given(steps)
def test_without_a_lag_a_reader_finds_exactly_what_lives(history: list[tuple[float, str, float]]) -> None:
    records, lives, now_s = SimDht(), {}, 0.0
    for number, (wait_s, subkey, lifetime_s) in enumerate(history):
        now_s += wait_s
        value = str(number).encode()
        known = lives.get(subkey)
        took = records.publish(("key", subkey), (value, lifetime_s), now_s, side=None)
        assert took == (known is None or known[1] <= now_s + lifetime_s)
        if took:
            lives[subkey] = (value, now_s + lifetime_s)
            records.forget(("key", subkey), now_s, now_s)
        found = records.read("key", now_s, lag_s=0.0, side=None)
        assert found == {name: value for name, (value, expires_s) in lives.items() if expires_s > now_s}
    assert records.statistics()["records.kept"] <= 2 * len(lives)


@given(steps, st.floats(0, 15))
def test_with_a_lag_a_reader_finds_the_past_but_nothing_that_has_expired(
    history: list[tuple[float, str, float]], lag_s: float
) -> None:
    records, log, now_s = SimDht(), [], 0.0
    for number, (wait_s, subkey, _) in enumerate(history):
        now_s += wait_s
        value = str(number).encode()
        assert put(records, subkey, value, now_s)
        records.forget(("key", subkey), now_s - 15, now_s)
        log.append((now_s, subkey, value))
        expected: dict[str, bytes] = {}
        lives: dict[str, float] = {}
        for published_s, name, said in log:
            if published_s <= now_s - lag_s:
                expected[name], lives[name] = said, published_s + LIFETIME_S
        found = records.read("key", now_s, lag_s=lag_s, side=None)
        assert found == {name: said for name, said in expected.items() if lives[name] > now_s}


def test_readers_share_one_mapping_that_does_not_change_under_them() -> None:
    records = SimDht()
    put(records, "a", b"1", 0.0)
    first = records.read("key", 1.0, lag_s=0.0, side=None)
    assert records.read("key", 2.0, lag_s=0.0, side=None) is first
    put(records, "b", b"2", 3.0)
    assert first == {"a": b"1"}
    second = records.read("key", 4.0, lag_s=0.0, side=None)
    assert second == {"a": b"1", "b": b"2"}
    assert records.read("key", 31.0, lag_s=0.0, side=None) == {"b": b"2"}
    assert second == {"a": b"1", "b": b"2"}


def test_each_side_of_a_partition_has_its_own_truth_and_afterwards_the_longest_lived_is_everybodys() -> None:
    records = SimDht()
    put(records, "a", b"before", 0.0)
    put(records, "b", b"before", 0.0)
    records.unite()
    put(records, "a", b"left", 10.0, side=0)
    put(records, "c", b"left", 10.0, side=0)
    put(records, "c", b"right", 12.0, side=1)
    assert records.read("key", 20.0, lag_s=0.0, side=0) == {"a": b"left", "b": b"before", "c": b"left"}
    assert records.read("key", 20.0, lag_s=0.0, side=1) == {"a": b"before", "b": b"before", "c": b"right"}
    assert records.read("key", 35.0, lag_s=0.0, side=1) == {"c": b"right"}
    records.unite()
    assert records.read("key", 35.0, lag_s=0.0, side=None) == {"a": b"left", "c": b"right"}
