"""An open run gives tickets for work, and to no network more than its share."""

import asyncio
from types import SimpleNamespace

import pytest
from admission_keys import NOW_S, OWNER, RUN, key, member, public
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER, Right, decode, encode_list, facts_of, peer_of, signed_list
from noloco_node.admission.ticket_service import (
    LOOK_BITS,
    LOOKS_A_PREFIX,
    REFILL_S,
    SCHEMA,
    TICKETS_A_PREFIX,
    TOPIC,
    Quota,
    TicketReply,
    TicketRequest,
    TicketService,
    TicketSigner,
    prefix_of,
    work,
)
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.units import format_utc

ME = peer_of(public(2))


def asked(
    nonce: int,
    *,
    trains: bool = True,
    shut_out: bool = False,
    named: dict[bytes, int] | None = None,
    signs: dict[bytes, int] | None = None,
    shown: bytes | None = None,
) -> TicketReply:
    """Ask as peer 2. `named`: by the owner, until when; None in an open run. `signs`: the same of delegates.

    `shown`: the ticket that it has.
    """
    named_until = None if named is None else lambda key: named.get(key, 0)

    async def main() -> TicketReply:
        hub, state = SimNetwork(), AdmissionState(RUN, lambda: NOW_S)
        state.pin(OWNER, "open")
        if shut_out:
            state.take_revocations(encode_list(signed_list(key(0), RUN, 1, {public(2): NOW_S + 1})))
        if shown is not None:
            state.show(ME, shown)
        signer = TicketSigner(key(0))
        service = TicketService(state, signer.ticket, lambda: NOW_S, named_until, lambda key: (signs or {}).get(key, 0))
        await hub.network("bootstrap").serve(TOPIC, SCHEMA, service.answer)
        async with asyncio.timeout(60), hub.network(ME).talk("bootstrap", TOPIC, SCHEMA) as conversation:
            await conversation.send(TicketRequest(nonce=nonce, trains=trains))
            reply = await conversation.receive()
        assert isinstance(reply, TicketReply)
        return reply

    return run(main())


def test_work_is_paid_with_a_ticket() -> None:
    reply = asked(work(RUN, ME))
    facts = facts_of(decode(reply.ticket) or (), OWNER, RUN)
    assert facts.rights == MEMBER
    assert facts.keys == (public(2),)


def test_whoever_only_looks_works_little() -> None:
    assert asked(0, trains=False).refusal == "the work for a ticket was not done"
    facts = facts_of(decode(asked(work(RUN, ME, LOOK_BITS), trains=False).ticket) or (), OWNER, RUN)
    assert facts.rights == Right.LOOK
    assert facts.until < NOW_S + 86400


def test_without_work_or_shut_out_there_is_none() -> None:
    assert asked(0).refusal == "the work for a ticket was not done"
    refused = asked(0, trains=False, shut_out=True)
    assert refused.ticket == b""
    assert "shut it out" in refused.refusal


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2000), st.sampled_from([1.0, 0.5, 20.0])), max_size=300))
def test_no_prefix_has_more_than_its_share(asks: list[tuple[str, float, float]]) -> None:
    quota, now_s, given_out = Quota(), 0.0, dict.fromkeys("abc", 0.0)
    for prefix, pause_s, amount in asks:
        now_s += pause_s
        given_out[prefix] += amount * quota.take(prefix, now_s, amount)
    assert all(count <= TICKETS_A_PREFIX + now_s / REFILL_S for count in given_out.values())


@pytest.mark.parametrize("count", [3, 40])
def test_other_prefixes_reset_no_bound_and_take_nobody_s_place(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """One person has all prefixes of one network; what is remembered holds `count` prefixes and networks."""
    monkeypatch.setattr(ticket_service, "MOST_PREFIXES", count)
    quota, now_s = Quota(), 0.0
    mine = [f"2001:db8:{number:x}::/48" for number in range(2 * count)]
    got = dict.fromkeys([*mine, "8.8.8.0/24"], 0)
    for _ in range(3 * TICKETS_A_PREFIX):
        for prefix in mine:
            got[prefix] += quota.take(prefix, now_s)
    bound = TICKETS_A_PREFIX * (count + 1)
    assert sum(got.values()) == bound, "those beyond the number remembered share the bound of their network"
    assert all(quota.take("8.8.8.0/24", now_s) for _ in range(TICKETS_A_PREFIX)), "another network has its own"
    assert not quota.take("8.8.9.0/24", now_s), "which its prefixes share as long as there is no more room"
    now_s += REFILL_S * TICKETS_A_PREFIX
    assert all(quota.take("1.1.1.0/24", now_s) for _ in range(TICKETS_A_PREFIX)), "those with a whole share make room"
    assert all(len(known) <= count for known in quota._left)


@given(st.lists(st.floats(-1e6, 1e6), max_size=100), st.floats(0, 1e5))
def test_a_clock_that_is_set_takes_no_ticket_away(readings: list[float], pause_s: float) -> None:
    """However the clock was set, a prefix has after a pause what it would have by a clock that goes evenly."""
    quota = Quota()
    for now_s in readings:
        quota.take("a", now_s)
    last_s = readings[-1] if readings else 0.0
    expected = int(min(TICKETS_A_PREFIX, pause_s / REFILL_S))
    assert sum(quota.take("a", last_s + pause_s) for _ in range(TICKETS_A_PREFIX)) >= expected


def test_passing_identities_of_one_network_get_a_share_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_service, "is_work", lambda *_, **__: True)
    state = AdmissionState(RUN, lambda: NOW_S)
    state.pin(OWNER, "open")
    service = TicketService(state, TicketSigner(key(0)).ticket, lambda: NOW_S)
    peers = [peer_of(public(number)) for number in range(2, 102)]

    def given_out(*, trains: bool) -> int:
        requests = [
            (SimpleNamespace(peer=peer, origin="/ip4/192.0.2.7/tcp/1"), TicketRequest(nonce=0, trains=trains))
            for peer in peers
        ]
        return sum(bool(service._decide(asks, request)[0]) for asks, request in requests)

    assert given_out(trains=False) == LOOKS_A_PREFIX
    assert given_out(trains=True) == TICKETS_A_PREFIX


def test_a_delegate_that_the_list_names_gets_the_right_to_sign_anew() -> None:
    for named in (None, {public(2): NOW_S + 50}):
        facts = facts_of(decode(asked(0, named=named, signs={public(2): NOW_S + 70}).ticket) or (), OWNER, RUN)
        assert (facts.rights, facts.until) == (MEMBER | Right.SIGN, NOW_S + 70)


@pytest.mark.parametrize(
    ("origin", "prefix"),
    [
        ("/ip4/192.0.2.7/tcp/4001", "192.0.2.0/24"),
        ("/ip6/2001:db8:1:2::7/udp/4001/quic-v1", "2001:db8:1::/48"),
        ("/ip4/192.0.2.7/tcp/4001/p2p/12D3/p2p-circuit", "relayed"),
        ("/dns4/example.org/tcp/4001", "relayed"),
        ("", "relayed"),
    ],
)
def test_prefixes(origin: str, prefix: str) -> None:
    assert prefix_of(origin) == prefix


@given(st.text(max_size=60))
def test_any_origin_has_a_prefix(origin: str) -> None:
    assert prefix_of(origin)


@pytest.mark.parametrize("trains", [True, False])
def test_where_the_owner_names_peers_a_ticket_is_good_for_as_long_as_its_list_says(*, trains: bool) -> None:
    facts = facts_of(decode(asked(0, trains=trains, named={public(2): NOW_S + 50}).ticket) or (), OWNER, RUN)
    assert facts.until == NOW_S + 50
    assert facts.rights == (MEMBER if trains else Right.LOOK)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({}, "has not named it"),
        ({public(3): NOW_S + 50}, "has not named it"),
        ({public(2): NOW_S}, f"named it until {format_utc(NOW_S)}, and for no longer"),
    ],
)
def test_whom_the_owner_has_not_named_gets_no_ticket_and_is_told_which_it_is(named: dict[bytes, int], why: str) -> None:
    assert asked(work(RUN, ME), named=named) == TicketReply(ticket=b"", refusal=f"the owner of the run {why}")


def test_a_member_gets_another_ticket_although_its_network_has_had_its_share() -> None:
    quota = [0.0]

    def take(*_: object) -> bool:
        quota[0] += 1
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quota, "take", take)
        assert "tickets" in asked(work(RUN, ME)).refusal
        assert asked(work(RUN, ME), shown=member(2)).ticket
    assert quota == [1.0]
