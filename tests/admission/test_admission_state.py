"""What one peer knows of who may take part: the latest list holds, and nothing that strangers show changes it."""

import asyncio
from typing import Any

import pytest
from admission_keys import NOW_S, OWNER, RUN, key, member, public
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from noloco_node.admission import admission_state, ticket
from noloco_node.admission.admission_state import (
    MOST_LOOKERS,
    MOST_SHOWN,
    MOST_TRIED,
    SILENCE_S,
    AdmissionState,
    HeldTicket,
    addressed,
    stamped,
    told,
    unstamped,
)
from noloco_node.admission.ticket import (
    LIST_BYTES,
    MEMBER,
    MOST_REVOKED,
    TICKET_BYTES,
    Right,
    decode_list,
    encode,
    encode_list,
    grant,
    peer_of,
    signed_list,
)
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.record_checks import RECORD_BYTES, SIGNATURE_BYTES
from noloco_node.units import format_utc

PEERS = [peer_of(public(number)) for number in range(1, 5)]


def state_at(now_s: float = NOW_S) -> AdmissionState:
    state = AdmissionState(RUN, lambda: now_s)
    state.pin(OWNER, "invited")
    return state


def list_of(number: int, *keys: int, until: int = NOW_S + 10) -> bytes:
    return encode_list(signed_list(key(0), RUN, number, {public(each): until for each in keys}))


@given(st.permutations(range(6)), st.integers(0, 5))
def test_the_latest_list_holds_in_whatever_order_they_come(order: list[int], begun: int) -> None:
    """Number n shuts out peer n % 4 + 1."""
    state = state_at()
    for number in order:
        state.take_revocations(list_of(number, number % 4 + 1))
    for number, peer in enumerate(PEERS, 1):
        state.show(peer, member(number))
    assert [peer for peer in PEERS if not state.rights(peer)] == [PEERS[5 % 4]]
    assert not state.take_revocations(list_of(begun))


@given(st.binary(max_size=200))
def test_a_list_of_a_stranger_changes_nothing(raw: bytes) -> None:
    state = state_at()
    state.take_revocations(list_of(1, 1))
    before = state.revocations
    forged = encode_list(signed_list(key(9), RUN, 7, {}))
    assert not any(map(state.take_revocations, (raw, forged, list_of(2)[:-1] + b"\0")))
    assert state.revocations == before


@given(st.data())
def test_one_changed_bit_makes_a_list_worthless(data: st.DataObject) -> None:
    raw = bytearray(list_of(3, 1, 2))
    place = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[place // 8] ^= 1 << place % 8
    assert decode_list(bytes(raw), OWNER, RUN) is None


def test_the_longest_list_fits_into_a_record() -> None:
    raw = encode_list(signed_list(key(0), RUN, 2**40, {public(number): 2**40 for number in range(MOST_REVOKED)}))
    assert decode_list(raw, OWNER, RUN) is not None


def test_a_revocation_ends_with_its_time() -> None:
    state = state_at(NOW_S + 10)
    state.take_revocations(list_of(1, 1))
    assert state.show(PEERS[0], member(1)) == ""


def test_a_flood_of_bad_tickets_pushes_nobody_out() -> None:
    state = state_at()
    state.show(PEERS[0], member(1))
    for number in range(MOST_SHOWN + 1):
        state.show(f"stranger {number}", b"garbage")
    assert state.rights(PEERS[0]) == MEMBER
    assert state.rights("stranger 7") == Right(0)


def test_a_flood_of_passing_identities_pushes_out_no_member() -> None:
    """Each has a good ticket to look. Whoever was shown lately stays longest."""
    state = state_at()
    state.show(PEERS[0], member(1))
    for number in range(2, MOST_LOOKERS + 50):
        peer = peer_of(public(number))
        assert state.show(peer, encode((grant(key(0), RUN, Right.LOOK, NOW_S + 99, public(number)),))) == ""
        state.show(peer_of(public(2)), encode((grant(key(0), RUN, Right.LOOK, NOW_S + 99, public(2)),)))
    assert state.rights(PEERS[0]) == MEMBER
    assert state.rights(peer_of(public(2))) == Right.LOOK
    assert state.refusal(peer_of(public(3)))


@given(st.lists(st.integers(1, 30), max_size=3 * MOST_TRIED), st.booleans())
def test_few_new_tickets_of_a_caller_are_verified_in_a_minute(lives_s: list[int], known: bool) -> None:
    """A caller that shows one ticket is verified once; one that shows many keeps what it had, and not for ever."""
    now_s, peer, verified = NOW_S, PEERS[0], 0

    def facts_of(*arguments: Any) -> Any:
        nonlocal verified
        verified += 1
        return ticket.facts_of(*arguments)

    state = AdmissionState(RUN, lambda: now_s)
    state.pin(OWNER, "invited")
    if known:
        assert state.rights_by(peer, member(1)) == MEMBER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_state, "facts_of", facts_of)
        for life_s in lives_s:
            forged = encode((grant(key(9), RUN, MEMBER, NOW_S + life_s, public(1)),))
            assert state.rights_by(peer, forged) == (MEMBER if known else Right(0))
            assert state.rights_by(PEERS[1], member(2)) == MEMBER
        assert verified <= MOST_TRIED + 1
    now_s += 60
    assert state.rights_by(peer, member(1)) == MEMBER


def test_a_caller_with_a_worse_ticket_is_answered_when_its_better_one_is_refused() -> None:
    """Nor do calls count that came before we knew the owner."""
    peer, worse = PEERS[0], member(1, NOW_S + 40)
    by = grant(key(0), RUN, Right.SIGN | MEMBER, NOW_S + 60, public(2))
    better = encode((by, grant(key(2), RUN, MEMBER, NOW_S + 60, public(1))))
    state = AdmissionState(RUN, lambda: NOW_S)
    assert not any(state.rights_by(peer, better) for _ in range(2 * MOST_TRIED))
    state.pin(OWNER, "invited")
    assert state.rights_by(peer, better) == MEMBER
    assert all(state.rights_by(peer, worse) == MEMBER for _ in range(2 * MOST_TRIED))
    assert state.take_revocations(list_of(1, 2))
    assert state.rights_by(peer, better) == Right(0)
    assert state.rights_by(peer, worse) == MEMBER


@given(st.lists(st.one_of(st.binary(max_size=200), st.just(list_of(1, 2))), max_size=4), st.binary(max_size=200))
def test_before_the_owner_is_known_nothing_is_believed(lists: list[bytes], record: bytes) -> None:
    """So nothing that a stranger says first stands in the way of what the owner says later."""
    state = AdmissionState(RUN, lambda: NOW_S)
    assert not any(map(state.take_revocations, lists))
    assert state.raw_revocations == b""
    assert state.show(PEERS[0], member(1))
    assert not state.accepts(PEERS[0], stamped(member(1), record))
    state.pin(OWNER, "invited")
    assert state.show(PEERS[0], member(1)) == ""
    assert state.take_revocations(list_of(1, 2))
    assert "shut it out" in state.show(PEERS[1], member(2))


@given(st.binary(max_size=600), st.sampled_from(PEERS))
def test_no_bytes_of_a_stranger_are_a_record_to_keep(raw: bytes, peer: str) -> None:
    state = state_at()
    assert not state.accepts(peer, raw)
    assert state.accepts(peer, stamped(member(PEERS.index(peer) + 1), raw))
    assert unstamped(stamped(b"ticket", raw)) == (b"ticket", raw)


@given(st.sampled_from(PEERS), st.integers(0, 3), st.booleans(), st.binary(max_size=200))
def test_the_owner_s_list_is_nobody_s_stamp(peer: str, number: int, is_behind_ticket: bool, content: bytes) -> None:
    """Everybody has the list, so anybody could publish records of invented peers with it."""
    state = state_at()
    raw = list_of(number, 4)
    state.take_revocations(raw)
    assert not state.accepts(peer, raw + content)
    another = PEERS.index(peer) % len(PEERS) + 2  # whose ticket is no use to this peer
    assert not state.accepts(peer, stamped(member(another) if is_behind_ticket else raw[:TICKET_BYTES], raw))


def test_the_longest_list_behind_the_longest_ticket_fits_into_a_record() -> None:
    assert len(stamped(bytes(TICKET_BYTES), bytes(LIST_BYTES))) + SIGNATURE_BYTES <= RECORD_BYTES


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (admission_state.NO_TICKET, "you have shown no ticket"),
        (admission_state.EXPIRED, "your ticket has expired"),
        (admission_state.SHUT_OUT, "the owner of the run has shut you out"),
        (admission_state.FOREIGN, "your ticket is not one of this run's owner"),
        ("its ticket does not let it train", "your ticket does not let you train"),
    ],
)
def test_a_refusal_is_said_to_us(refusal: str, said: str) -> None:
    assert addressed(refusal) == said
    assert addressed(said) == said
    assert told([refusal, refusal]) == f"the bootstrap peer says: {said}"
    hint = admission_state.not_admitted(told([refusal])).hint
    assert ("members lift" in hint) == (refusal == admission_state.SHUT_OUT), "no invite helps who is shut out"


@given(st.text())
def test_whatever_a_stranger_says_is_one_short_line_that_moves_no_cursor(text: str) -> None:
    assert addressed(text).isprintable()
    assert len(addressed(text)) <= 1000


# Our own ticket.


class Signer:
    """Gives tickets after a second, one after the other, or an error."""

    def __init__(self, *answers: bytes | UserError) -> None:
        self.left, self.asked = list(answers), 0

    async def __call__(self) -> bytes:
        self.asked += 1
        await asyncio.sleep(1.0)
        answer = self.left.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer


def holding(signer: Signer, *own: bytes) -> HeldTicket:
    held = HeldTicket(lambda: NOW_S, lambda: own, signer)
    held.raw = own[0]
    return held


async def test_of_many_uses_that_are_refused_one_asks_for_another_ticket() -> None:
    signer = Signer(member(1, until=NOW_S + 9000))
    held = holding(signer, member(1))
    await asyncio.gather(*(held.another("it has expired") for _ in range(5)))
    assert (signer.asked, held.raw) == (1, member(1, until=NOW_S + 9000))


async def test_where_nobody_signs_it_is_asked_once_in_a_while() -> None:
    silent = UserError("No answer.", why="all are away", hint="", code=Exit.UNREACHABLE)
    signer = Signer(silent, member(1, until=NOW_S + 9000))
    held = holding(signer, member(1))
    for words in ("it has expired; all are away", "no signing peer answers"):
        with user_error(Exit.UNREACHABLE, words):
            await held.another("it has expired")
    assert signer.asked == 1
    await asyncio.sleep(SILENCE_S)
    await held.another("it has expired")
    assert signer.asked == 2


@pytest.mark.parametrize("named", [False, True])
async def test_a_peer_that_is_shut_out_hears_that_alone_and_until_when(*, named: bool) -> None:
    """One whose delegate is shut out hears too why a signing peer gives it no other ticket: it needs an invite."""
    state, signs = state_at(), MEMBER | Right.SIGN
    state.take_revocations(list_of(1, 1 if named else 2, until=NOW_S + 90))
    by = grant(key(0), RUN, signs, NOW_S + 99, public(2)), grant(key(2), RUN, MEMBER, NOW_S + 99, public(1))
    why = addressed(state.show(PEERS[0], encode(by)))
    until, unnamed = f" until {format_utc(NOW_S + 90)}", told(["the owner of the run has not named it"])
    with pytest.raises(UserError) as caught:
        await holding(Signer(admission_state.not_admitted(unnamed)), encode(by)).another(why)
    if named:
        assert caught.value.why == addressed(admission_state.SHUT_OUT) + until
    else:
        assert caught.value.why == f"{addressed(admission_state.CAME_BY)}{until}; {unnamed}"
    assert ("members lift" in caught.value.hint) == named


async def test_who_is_given_what_was_refused_is_not_admitted() -> None:
    for answer in (member(1), UserError("No.", why="it is shut out", hint="", code=Exit.NOT_ADMITTED)):
        held = holding(Signer(answer), member(1))
        with user_error(Exit.NOT_ADMITTED, "we are revoked"):
            await held.another("we are revoked")
        assert held.raw == member(1), "a ticket that looks may still be good elsewhere"


@given(st.lists(st.tuples(st.sampled_from(["owner", "delegate", "invite"]), st.integers(-3, 3)), max_size=6))
def test_a_peer_that_has_shown_a_good_ticket_stays_in_whatever_old_ones_its_records_carry(
    shown: list[tuple[str, int]],
) -> None:
    """The owner has revoked the delegate, key 2, and peer 3 holds the single-use invite, key 4."""
    state, peer, subject = state_at(), PEERS[0], public(1)
    state.take_revocations(list_of(1, 2))
    invite = grant(key(0), RUN, MEMBER | Right.ONCE, NOW_S + 9, public(4))
    state.show(PEERS[2], encode((invite, grant(key(4), RUN, MEMBER, NOW_S + 9, public(3)))))
    good = False
    for signer, life_s in shown:
        until, signs = NOW_S + life_s, MEMBER | Right.SIGN
        chain = {
            "owner": (grant(key(0), RUN, MEMBER, until, subject),),
            "delegate": (grant(key(0), RUN, signs, until, public(2)), grant(key(2), RUN, signs, until, subject)),
            "invite": (invite, grant(key(4), RUN, MEMBER, until, subject)),
        }[signer]
        good |= signer == "owner" and life_s > 0
        assert (state.show(peer, encode(chain)) == "") == good
