"""Tickets: whatever chain of honest grants is made is good, and whatever is changed about one is not."""

import msgspec
import pytest
from admission_keys import NOW_S, OWNER, RUN, key, public
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.admission.ticket import (
    MEMBER,
    Chain,
    InviteCredential,
    Right,
    _decoded_key,
    decode,
    encode,
    extended,
    facts_of,
    grant,
    key_of,
    parse_credential,
    peer_of,
)
from noloco_node.admission.ticket_service import is_work, work


def chain(*rights: Right, until: int = NOW_S) -> Chain:
    """Return a chain whose links are signed by the owner, by key 1, by key 2, and so on."""
    links: Chain = ()
    for number, each in enumerate(rights):
        links = extended(links, key(number), RUN, each, until, public(number + 1))
    return links


@pytest.mark.parametrize(
    ("rights", "good"),
    [
        ([MEMBER], True),
        ([Right.LOOK], True),
        ([Right.SIGN | MEMBER, MEMBER], True),
        ([Right.SIGN | MEMBER, Right.SIGN | MEMBER, Right.ONCE | MEMBER, MEMBER], True),
        ([Right.ONCE | MEMBER, MEMBER], True),
        ([MEMBER, Right.LOOK], True),
        ([MEMBER, Right.LOOK, Right.LOOK], False),
        ([Right.LOOK, Right.LOOK], False),
        ([Right.ONCE | MEMBER, MEMBER, Right.LOOK], True),
        ([MEMBER, MEMBER], False),
        ([Right.LOOK, Right.TRAIN], False),
        ([Right.SIGN | Right.LOOK, MEMBER], False),
        ([Right.ONCE | MEMBER, Right.ONCE | MEMBER], False),
        ([Right.ONCE | MEMBER, Right.SIGN | MEMBER], False),
        ([Right.ONCE | MEMBER, MEMBER, MEMBER], False),
        ([Right.ONCE | MEMBER], False),
    ],
)
def test_nobody_passes_on_more_than_it_has(rights: list[Right], good: bool) -> None:
    facts = facts_of(chain(*rights), OWNER, RUN)
    assert (facts is not None) == good
    if facts is not None:
        assert facts.rights == rights[-1]
        assert facts.keys == tuple(public(number + 1) for number in range(len(rights)))


CHAINS = st.sampled_from(
    [chain(MEMBER), chain(Right.SIGN | MEMBER, MEMBER), chain(Right.ONCE | MEMBER, MEMBER), chain(MEMBER, Right.LOOK)]
)


@given(CHAINS, st.data())
def test_one_changed_bit_makes_a_ticket_worthless(links: Chain, data: st.DataObject) -> None:
    raw = bytearray(encode(links))
    place = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[place // 8] ^= 1 << place % 8
    changed = decode(bytes(raw))
    assert changed is None or changed == links or facts_of(changed, OWNER, RUN) is None


@given(st.binary(max_size=700))
def test_bytes_of_a_stranger_are_no_ticket(raw: bytes) -> None:
    links = decode(raw)
    assert links is None or facts_of(links, OWNER, RUN) is None


@given(CHAINS)
def test_a_ticket_is_for_one_run_and_one_owner(links: Chain) -> None:
    assert facts_of(links, OWNER, RUN) is not None
    assert facts_of(links, OWNER, "6" * 64) is None
    assert facts_of(links, public(9), RUN) is None
    assert decode(encode(links)) == links


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=2))
def test_a_ticket_lasts_no_longer_than_what_it_depends_on(untils: list[int]) -> None:
    first = grant(key(0), RUN, Right.SIGN | MEMBER, untils[0], public(1))
    facts = facts_of(extended((first,), key(1), RUN, MEMBER, untils[1], public(2)), OWNER, RUN)
    assert facts.until == min(untils)


@pytest.mark.parametrize("text", ["1" * 65, "a" * 2**20, "/", ""])
def test_what_is_no_peer_id_by_its_form_is_not_kept_in_memory(text: str) -> None:
    before = _decoded_key.cache_info().currsize
    assert key_of(text) is None
    assert _decoded_key.cache_info().currsize == before


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_is_its_key(raw: bytes) -> None:
    peer = peer_of(raw)
    assert peer.startswith("12D3KooW")
    assert key_of(peer) == raw


@given(st.text(max_size=80))
def test_what_is_no_peer_id_has_no_key(text: str) -> None:
    found = key_of(text)
    assert found is None or peer_of(found) == text


CREDENTIALS = [
    InviteCredential(),
    InviteCredential(chain(Right.ONCE | MEMBER), (1).to_bytes(32)),
    InviteCredential(chain(MEMBER)),
]


@pytest.mark.parametrize("credential", CREDENTIALS)
def test_a_credential_travels_as_text_and_shows_no_secret(credential: InviteCredential) -> None:
    assert parse_credential(str(credential)) == credential
    assert len(repr(credential)) < 32
    assert "," not in str(credential)
    assert "@" not in str(credential)


@given(st.text(max_size=1200))
def test_any_text_is_a_credential_or_is_refused(text: str) -> None:
    try:
        found = parse_credential(text)
    except ValueError:
        return
    assert found == InviteCredential() or found.chain


def test_an_invitation_makes_a_ticket_for_whoever_holds_it() -> None:
    _, invitation, named = CREDENTIALS
    peer = peer_of(public(7))
    for rights in (MEMBER, Right.LOOK):
        raw = invitation.ticket(RUN, peer, rights, NOW_S - 10, None)
        assert raw is not None
        facts = facts_of(decode(raw) or (), OWNER, RUN)
        assert facts.rights == rights
        # Whoever only looks uses no single-use invite up.
        assert (facts.invite_key is None) == (rights == Right.LOOK)
    with pytest.raises(ValueError, match="another identity"):
        named.ticket(RUN, peer, MEMBER, NOW_S, key(7))
    # The named peer lets a passing identity of its own look.
    raw = named.ticket(RUN, peer, Right.LOOK, NOW_S, key(1))
    assert raw is not None
    assert facts_of(decode(raw) or (), OWNER, RUN) is not None


@settings(max_examples=20)
@given(st.text(max_size=20), st.text(max_size=20))
def test_work_is_for_one_run_and_one_peer(run: str, peer: str) -> None:
    nonce = work(run, peer, bits=6)
    assert is_work(run, peer, nonce, bits=6)
    assert not is_work(run, peer, -1, bits=6)
    assert not is_work(run, peer, 2**64, bits=6)


def test_a_ticket_is_small() -> None:
    longest = chain(Right.SIGN | MEMBER, Right.SIGN | MEMBER, Right.ONCE | MEMBER, MEMBER, until=2**40)
    assert decode(encode(longest)) == longest
    assert decode(encode((*longest, longest[0]))) is None
    assert decode(msgspec.msgpack.encode([])) is None
