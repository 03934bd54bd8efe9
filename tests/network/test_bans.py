"""Who sends what no peer may send is shut out for longer and longer, and who errs now and then never."""

import asyncio
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.network.bans import (
    FIRST_BAN_S,
    GOOD_S,
    HALF_LIFE_S,
    LONGEST_BAN_S,
    MOST_KNOWN,
    MOST_OF_PREFIX,
    MOST_VIOLATIONS,
    BanHook,
    BanList,
)
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, Violation
from noloco_node.sim.network.sim_network import SimNetwork

DAY_S = 86_400.0


@dataclass(frozen=True)
class Word:
    word: str


@dataclass(frozen=True)
class Number:
    number: Annotated[int, (0, 10)]


SCHEMA = Schema({Word: MessageSpec("Word")})
COUNTS = Schema({Number: MessageSpec("Number")})


def test_one_that_goes_on_is_served_less_and_less() -> None:
    """A violation a second for a day, as often as it is let: a dozen each ban, and few bans."""
    bans, now_s, served = BanList(), 0.0, 0
    lengths = []
    while now_s < DAY_S:
        served += 1
        if ban_s := bans.note("x", now_s):
            lengths.append(ban_s)
        now_s += max(1.0, bans.left_s("x", now_s))
    assert served <= 5 * (len(lengths) + 1) <= 60
    assert lengths[0] == FIRST_BAN_S
    assert lengths == sorted(lengths)
    assert lengths[-1] == LONGEST_BAN_S


@given(st.lists(st.floats(HALF_LIFE_S, 10 * HALF_LIFE_S), max_size=50))
def test_who_errs_now_and_then_is_never_shut_out(pauses_s: list[float]) -> None:
    bans, now_s = BanList(), 0.0
    for pause_s in pauses_s:
        assert not bans.note("x", now_s)
        now_s += pause_s


def test_what_fails_in_one_moment_counts_once() -> None:
    bans = BanList()
    assert not any(bans.note("x", number * 0.01) for number in range(50))


def test_a_day_of_good_conduct_makes_the_next_ban_a_short_one() -> None:
    bans = BanList()
    for start_s in (0.0, 200.0, 3 * DAY_S):
        lengths = [bans.note("x", start_s + number) for number in range(int(MOST_VIOLATIONS))]
        assert lengths[-1] == (4 * FIRST_BAN_S if start_s == 200.0 else FIRST_BAN_S)


def test_what_is_remembered_of_strangers_is_bounded() -> None:
    bans = BanList()
    bans.shut_out("liar", 0.0, DAY_S)
    for number in range(MOST_KNOWN + 100):
        bans.note(f"x{number}", 0.0)
    assert len(bans._standings) == MOST_KNOWN
    assert bans.left_s("liar", 0.0) == DAY_S  # no number of names makes us forget it


_REASONS = st.one_of(st.just(None), st.floats(0.0, 2 * LONGEST_BAN_S))
"""A violation, or a quarantine of so many seconds; 0 is a parole."""


@given(st.lists(st.tuples(st.floats(0.0, HALF_LIFE_S), _REASONS), max_size=60))
def test_each_reason_to_shut_somebody_out_has_an_end_of_its_own(happens: list[tuple[float, float | None]]) -> None:
    both, violations, quarantine_ends_s, now_s = BanList(), BanList(), 0.0, 0.0
    for pause_s, for_s in happens:
        now_s += pause_s
        if for_s is None:
            assert both.note("x", now_s) == violations.note("x", now_s)
        else:
            both.shut_out("x", now_s, for_s)
            quarantine_ends_s = now_s + for_s
        assert both.left_s("x", now_s) == max(violations.left_s("x", now_s), quarantine_ends_s - now_s, 0.0)


async def test_a_hostile_peer_is_neither_served_nor_called_and_others_are() -> None:
    hub = SimNetwork()
    served: list[str] = []

    async def handler(conversation: Conversation) -> None:
        served.append(conversation.peer)
        if (await conversation.receive()).word == "bad":
            raise Violation("a bad word")
        await conversation.send(Word("yes"))

    victim = HookedNetwork(hub.network("victim"), BanHook())
    await victim.serve("talk", SCHEMA, handler)
    others = {name: hub.network(name) for name in ("liar", "honest")}
    for network in others.values():
        await network.serve("talk", SCHEMA, handler)

    async def say(name: str, word: str) -> bool:
        try:
            async with others[name].talk("victim", "talk", SCHEMA) as conversation:
                await conversation.send(Word(word))
                return isinstance(await conversation.receive(), Word)
        except ConnectionError:
            return False

    for _ in range(3600):
        assert not await say("liar", "bad")
        await asyncio.sleep(1.0)
    assert served.count("liar") <= 30
    assert victim.statistics()["bans.refused"] > 3500
    assert not await say("liar", "good"), "not yet"
    assert await say("honest", "good")
    with pytest.raises(ConnectionRefusedError, match="shut out"):
        async with victim.talk("liar", "talk", SCHEMA):
            raise AssertionError("we call nobody whom we do not serve")
    await asyncio.sleep(LONGEST_BAN_S)
    assert await say("liar", "good"), "and then again"


class Caller(NamedTuple):
    """A conversation, of which a hook sees who calls from where."""

    peer: str
    origin: str


def calls(hook: BanHook, peer: str, origin: str) -> ExitStack:
    """Return the conversation with a caller while it is answered."""
    answered = ExitStack()
    answered.enter_context(hook.answering(Caller(peer, origin), "talk"))
    return answered


ELSEWHERE = ["/ip4/8.8.9.1/tcp/1", "/ip6/2001:4860:4860::8888/tcp/1", "/ip4/8.8.8.1/tcp/1/p2p/x/p2p-circuit", ""]


async def test_many_identities_of_one_place_are_shut_out_together() -> None:
    hook, place = BanHook(), "/ip4/8.8.8.8/tcp/1"
    served = 0
    for number in range(3 * round(MOST_OF_PREFIX)):
        with suppress(Violation, ConnectionRefusedError), calls(hook, f"new{number}", place):
            served += 1
            raise Violation("a bad word")
        await asyncio.sleep(1.0)
    assert served <= MOST_OF_PREFIX + 2
    with pytest.raises(ConnectionRefusedError, match=r"8\.8\.8\.0/24 sent what no peer may send"):
        calls(hook, "honest", "/ip4/8.8.8.99/tcp/1")
    for origin in ELSEWHERE:
        calls(hook, "honest", origin)
    await asyncio.sleep(LONGEST_BAN_S)
    calls(hook, "honest", place)


async def test_strangers_of_a_prefix_do_not_shut_out_its_members_in_good_standing() -> None:
    hook, place = BanHook(), "/ip4/8.8.8.8/tcp/1"
    for name in ("member", "offender"):
        calls(hook, name, place).close()
    with suppress(ConnectionRefusedError), calls(hook, "without a ticket", place):
        raise ConnectionRefusedError("it has shown no ticket")
    await asyncio.sleep(GOOD_S)
    with suppress(ConnectionResetError), calls(hook, "member", place):
        raise ConnectionResetError("its line broke")
    calls(hook, "newcomer", place).close()
    with suppress(Violation), calls(hook, "offender", place):
        raise Violation("a bad word")
    for number in range(round(MOST_OF_PREFIX)):
        with suppress(Violation, ConnectionRefusedError), calls(hook, f"stranger {number}", place):
            raise Violation("a bad word")
        await asyncio.sleep(1.0)
    for name in ("newcomer", "offender", "without a ticket"):
        with pytest.raises(ConnectionRefusedError, match=r"8\.8\.8\.0/24 sent what no peer may send"):
            calls(hook, name, place)
    calls(hook, "member", place).close()
    for _ in range(round(MOST_VIOLATIONS)):
        with suppress(Violation, ConnectionRefusedError), calls(hook, "member", place):
            raise Violation("a bad word")
        await asyncio.sleep(1.0)
    with pytest.raises(ConnectionRefusedError, match="shut out"):
        calls(hook, "member", place)


async def test_of_peers_in_good_standing_a_bounded_number_is_remembered() -> None:
    hook = BanHook()
    for number in range(MOST_KNOWN + 10):
        calls(hook, f"peer {number}", "").close()
    assert len(hook._good_since_s) == MOST_KNOWN


async def test_a_violation_of_a_callee_counts_when_it_ends_the_conversation() -> None:
    hub = SimNetwork()
    victim = HookedNetwork(hub.network("victim"), BanHook())
    await hub.network("liar").serve("talk", SCHEMA, lambda conversation: conversation.send(Word("bad")))
    refused = 0
    for _ in range(100):
        try:
            async with victim.talk("liar", "talk", SCHEMA) as conversation:
                if (await conversation.receive()).word == "bad":
                    raise Violation("a bad word")
        except ConnectionRefusedError:
            refused += 1
        except Violation:
            await asyncio.sleep(1.0)
    assert refused == 95


@pytest.mark.parametrize("busy_s", [0.0, 0.5, 5.0, 3600.0])
async def test_a_violation_counts_however_long_the_handler_is_busy_when_it_comes(busy_s: float) -> None:
    hub, hook = SimNetwork(), BanHook()
    victim = HookedNetwork(hub.network("victim"), hook)

    async def work(conversation: Conversation) -> None:
        await conversation.receive()
        await asyncio.sleep(busy_s)
        await conversation.receive()

    await victim.serve("count", COUNTS, work)
    liar = hub.network("liar")
    for _ in range(round(MOST_VIOLATIONS)):
        with suppress(ConnectionError):
            async with liar.talk("victim", "count", COUNTS) as conversation:
                await conversation.send(Number(number=1))
                await conversation.send(Number(number=11))
                await conversation.receive()
        await asyncio.sleep(2.0)
    assert hook.statistics()["bans.begun"] == 1
    assert not hook._good_since_s
