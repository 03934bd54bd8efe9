"""Short answers of the DHT: a reader gets exactly what the holder has, and pays for what it lacks."""

import contextlib
import tracemalloc
import zlib
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.libp2p import short_answers
from noloco_node.libp2p.hivemind_compat import load_hivemind
from noloco_node.libp2p.short_answers import MOST_VERSIONS, NAME_BYTES, Version, names, restored, shortened

NONCE = b"0123456789abcdef"
VERSIONS = st.dictionaries(
    st.text(max_size=8), st.builds(Version, st.floats(1e10, 1e11), st.binary(max_size=40)), max_size=20
)


def packed(records: dict[str, Version]) -> bytes:
    """Return the records as hivemind packs them."""
    load_hivemind()
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for subkey, version in records.items():
            dictionary.store(subkey, version.packed, version.expiry)
    return bytes(MSGPackSerializer.dumps(dictionary))


def unpacked(raw: bytes) -> dict[str, Version]:
    from hivemind.utils.serializer import MSGPackSerializer

    dictionary: Any = MSGPackSerializer.loads(raw)
    with dictionary.freeze():
        return {subkey: Version(each.expiration_time, each.value) for subkey, each in dictionary.items()}


@given(VERSIONS, VERSIONS, st.data())
def test_a_reader_gets_what_the_holder_has_whatever_it_knows(
    held: dict[str, Version], others: dict[str, Version], data: st.DataObject
) -> None:
    """`others`: that the holder lacks, or of which it has another version."""
    shared = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
    known = others | {subkey: held[subkey] for subkey in shared}
    answer = shortened(packed(held), NONCE, names(known, NONCE))
    assert unpacked(restored(answer, known)) == held


def test_what_the_reader_knows_does_not_travel() -> None:
    held = {f"peer {number}": Version(1.8e10 + number, bytes([number]) * 200) for number in range(60)}
    whole = shortened(packed(held), NONCE, b"")
    short = shortened(packed(held), NONCE, names(held, NONCE))
    assert unpacked(restored(short, held)) == unpacked(restored(whole, {})) == held
    assert len(short) < 60


def test_names_follow_from_the_nonce() -> None:
    held = {"peer": Version(1.8e10, b"record")}
    assert names(held, NONCE) != names(held, NONCE[::-1])
    assert len(names(held, NONCE)) == NAME_BYTES


def test_a_request_names_a_bounded_number_of_versions() -> None:
    known = {str(number): Version(1.8e10, b"") for number in range(MOST_VERSIONS + 9)}
    assert len(names(known, NONCE)) == MOST_VERSIONS * NAME_BYTES
    held = dict(list(known.items())[-20:])
    assert unpacked(restored(shortened(packed(held), NONCE, names(known, NONCE)), known)) == held


@given(VERSIONS, VERSIONS, st.binary(max_size=100))
def test_a_holder_answers_whatever_a_stranger_names(
    held: dict[str, Version], known: dict[str, Version], named: bytes
) -> None:
    answer = shortened(packed(held), NONCE, named)
    if len(named) < NAME_BYTES:
        assert unpacked(restored(answer, {})) == held


@given(VERSIONS, st.binary(max_size=200), st.booleans())
def test_an_answer_that_is_none_is_an_error_that_hivemind_takes_for_silence(
    known: dict[str, Version], raw: bytes, compressed: bool
) -> None:
    with contextlib.suppress(ValueError, TypeError, IndexError, zlib.error):
        restored(zlib.compress(raw) if compressed else raw, known)


@given(st.integers(0, 3_000), st.booleans())
def test_a_request_that_names_too_many_is_answered_as_far_as_it_is_bounded(more: int, repeats: bool) -> None:
    known = {str(number): Version(1.8e10, b"") for number in range(3)}
    padding = bytes(NAME_BYTES) if repeats else b""
    named = names(known, NONCE) + padding * (MOST_VERSIONS + more)
    answer = zlib.decompress(shortened(packed(known), NONCE, named))
    assert len(answer) <= MOST_VERSIONS // 8 + len(packed(known))


@pytest.mark.parametrize("bound", ["MOST_BYTES", "SMALL_BYTES"])
def test_an_answer_that_grows_beyond_the_bound_is_refused(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_answers, bound, 1000)
    monkeypatch.setattr(short_answers, "MOST_GROWTH", 1)
    answer = shortened(packed({"peer": Version(1.8e10, bytes(2000))}), NONCE, b"")
    with pytest.raises(ValueError, match="too long"):
        restored(answer, {})


def test_an_answer_that_was_cut_off_is_refused() -> None:
    answer = shortened(packed({"peer": Version(1.8e10, b"record")}), NONCE, b"")
    with pytest.raises(ValueError, match="cut off"):
        restored(answer[:-3], {})


def test_an_answer_of_other_things_than_records_takes_no_memory() -> None:
    lists = msgspec.msgpack.encode(msgspec.msgpack.Ext(80, msgspec.msgpack.encode((1, 1.8e10, [[]] * 1_000_000))))
    padding = bytes(len(lists) // short_answers.MOST_GROWTH)
    for answer in (zlib.compress(lists, level=0), zlib.compress(lists) + padding):
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"Expected|too long"):
            restored(answer, {})
        assert tracemalloc.get_traced_memory()[1] < 5 * len(lists)
        tracemalloc.stop()


def test_the_longest_honest_records_are_taken() -> None:
    """Their contents repeat as far as they can; no signature does."""
    rng = Random(0)
    held = {
        f"{rng.getrandbits(256):064x}"[:52]: Version(1.8e10 + number, rng.randbytes(64) + bytes(8 * 1024 - 64))
        for number in range(400)
    }
    assert unpacked(restored(shortened(packed(held), NONCE, b""), {})) == held
