"""How others come to us, without a network: what a scout must find out, what follows from the answers, which relays."""

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from noloco_node.admission.ticket import peer_of
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import addresses, reachability, relays
from noloco_node.libp2p.addresses import (
    KnownPeers,
    PeerAddress,
    check_listen,
    checked_relays,
    from_this_machine,
    parse_peer_address,
    plain_cause,
    port_of,
    relay_record,
    relays_of,
    unreachable,
    with_port,
    with_ports_chosen,
)
from noloco_node.libp2p.control import Control, PeerContext
from noloco_node.libp2p.daemon import RELAY_DATA_BYTES, RELAY_TIME_S, DaemonConfig, arguments, relay_arguments
from noloco_node.libp2p.reachability import (
    ASK_S,
    DialBackReply,
    DialBackService,
    DialMe,
    PreflightGoal,
    ReachVerdict,
    choose_daemon_config,
    host_of,
    is_elsewhere,
    judge,
    preflight_goal,
)
from noloco_node.libp2p.relays import Grant, RelayPool, grant_of, relay_configs
from noloco_node.libp2p.settings import NetworkSettings, Reachability
from noloco_node.network.bans import public_prefix
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import Violation
from noloco_node.sim.clock import run

PEERS = (
    "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu",
    "12D3KooWDew3PbJwkmKi9CybWvVzPR45JWKmhBr4v7wX92tMdw52",
    "12D3KooWFudLtKfvASkYC4Br5VfYwnHPm9bTwdeDuMcZAvZTfdkH",
)
FOURTH = "12D3KooWE3wMkqsrvixbbWXGBbXDoALQq2VPtG1px39g2zQKkrQw"
DOOR = f"/ip4/198.51.100.1/tcp/4001/p2p/{PEERS[0]}"
RELAY = f"/ip4/198.51.100.1/tcp/4002/p2p/{PEERS[1]}"
PUBLIC, LOCAL = "/ip4/0.0.0.0/tcp/4001", "/ip4/127.0.0.1/tcp/0"
POSTURE = DaemonConfig(identity=Path("key"), listen=(PUBLIC,))

places = st.sampled_from(["", "/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.6/tcp/4001"])
answers = st.lists(st.builds(DialBackReply, place=places, tried=st.booleans(), relays=st.just((RELAY,))), max_size=4)
own_places = st.lists(st.sampled_from(["/ip4/203.0.113.5/tcp/4001", "/ip4/10.0.0.2/tcp/4001"]), max_size=2)


def wanted(**chosen: object) -> NetworkSettings:
    return NetworkSettings(**{"run": "run", "listen": (PUBLIC,), "bootstrap": (DOOR,)} | chosen)


def test_a_scout_goes_only_where_there_is_something_to_find_out() -> None:
    assert preflight_goal(wanted(bootstrap=()), identity_is_old=True) == PreflightGoal(False, False)
    assert preflight_goal(wanted(), identity_is_old=False) == PreflightGoal(False, True)
    assert preflight_goal(wanted(listen=(LOCAL,)), identity_is_old=False) == PreflightGoal(False, False)
    assert preflight_goal(wanted(announce=(PUBLIC,)), identity_is_old=True) == PreflightGoal(True, False)
    assert preflight_goal(wanted(listen=("/ip4/0.0.0.0/udp/4001/quic-v1",)), identity_is_old=False) == PreflightGoal(
        False, False
    )
    assert preflight_goal(wanted(reach=Reachability.OPEN), identity_is_old=False) == PreflightGoal(False, False)
    assert preflight_goal(wanted(reach=Reachability.RELAYED, listen=(LOCAL,)), identity_is_old=False) == PreflightGoal(
        False, True
    )


@given(answers)
def test_one_success_proves_more_than_any_failures(found: list[DialBackReply]) -> None:
    verdict = judge(found)
    assert set(verdict.places) == {answer.place for answer in found if answer.place}
    if verdict.places:
        assert verdict.dialled is True
    elif any(answer.tried for answer in found):
        assert verdict.dialled is False
    else:
        assert verdict.dialled is None
    assert verdict.relays == ((RELAY,) if found else ())


@given(
    st.text(max_size=60) | st.sampled_from(["/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.5/tcp/1", "/ip4/1.2.3.4/tcp/1\x1b[2J", ""])
)
def test_a_place_that_is_none_is_neither_announced_nor_shown(text: str) -> None:
    verdict = judge([DialBackReply(place=text, tried=True, relays=())])
    assert verdict.places == ()
    assert verdict.dialled is False


@given(answers, own_places, st.sampled_from([Reachability.AUTO, Reachability.RELAYED]))
def test_relays_are_used_where_nobody_can_dial_us_and_never_without_a_word(
    found: list[DialBackReply], own: list[str], reach: Reachability
) -> None:
    said: list[str] = []
    verdict = judge(found)
    chosen = wanted(reach=reach)
    if reach is Reachability.RELAYED and not verdict.relays:
        with user_error(Exit.UNREACHABLE, "no relay"):
            choose_daemon_config(chosen, POSTURE, own, verdict, said.append)
        return
    better = choose_daemon_config(chosen, POSTURE, own, verdict, said.append)
    assert (better.identity, better.listen) == (POSTURE.identity, POSTURE.listen)
    relayed = reach is Reachability.RELAYED or verdict.dialled is False
    assert better.relays == (verdict.relays if relayed else ())
    if relayed:
        assert not better.announce
    else:
        assert set(verdict.places) <= {*own, *better.announce}
    assert bool(said) == (better != POSTURE)


def test_a_swarm_without_relays_is_said_to_whom_it_concerns() -> None:
    said: list[str] = []
    alone = choose_daemon_config(wanted(), POSTURE, [], ReachVerdict(False, (), ()), said.append)
    assert alone == msgspec.structs.replace(POSTURE, dialable=False), "it takes the first stage, which dials the others"
    assert "the swarm has no relay" in said[0]


@given(answers, answers, own_places)
def test_a_peer_at_work_starts_anew_where_others_come_otherwise_and_then_no_more(
    before: list[DialBackReply], now: list[DialBackReply], own: list[str]
) -> None:
    def chosen(found: list[DialBackReply], config: DaemonConfig) -> DaemonConfig:
        return choose_daemon_config(wanted(), config, own, judge(found), lambda _: None)

    first = chosen(before, POSTURE)
    at = [*own, *first.announce]
    better = chosen(now, first) if is_elsewhere(first, at, judge(now)) else first
    assert not is_elsewhere(better, [*own, *better.announce], judge(now)), "it would start anew for ever"
    if judge(now).dialled is None:
        assert better == first
    if judge(now).dialled:
        assert better.dialable
        assert not better.relays
        assert set(judge(now).places) & {*own, *better.announce}


@pytest.mark.parametrize("first", [(), (RELAY,)])
@pytest.mark.parametrize("placed", [False, True])
def test_a_peer_whose_relays_are_gone_looks_for_others_and_one_that_has_a_place_for_none(
    first: tuple[str, ...], *, placed: bool
) -> None:
    """`first`: the relays at its start, when there may have been none."""
    config = msgspec.structs.replace(POSTURE, relays=first, dialable=bool(first))
    own = [NEAR, *([f"{RELAY}/p2p-circuit"] if placed else [])]
    assert is_elsewhere(config, own, ReachVerdict(False, (), (RELAY, DOOR))) == (not placed)
    assert not is_elsewhere(config, own, ReachVerdict(False, (), first))


NEAR, ELSEWHERE = "/ip4/192.168.1.7/tcp/4001", "/ip4/203.0.113.9/tcp/4001"


@pytest.mark.parametrize(
    ("said", "looks"),
    [
        ([ELSEWHERE, ELSEWHERE, ELSEWHERE], 3),
        ([ELSEWHERE, ELSEWHERE, PUBLIC, ELSEWHERE, ELSEWHERE, ELSEWHERE], 6),
        (["", ELSEWHERE, None, "", "", ELSEWHERE], 6),
    ],
)
async def test_a_peer_at_work_believes_those_outside_after_several_looks(
    said: list[str | None], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at home dials us where strangers cannot. `said`: where we were reached, look by look; None: nobody knew."""
    asked = 0

    async def answer(_: object, peer: str, ports: tuple[int, ...]) -> DialBackReply:
        nonlocal asked
        assert (peer, ports) == ("outside", (4001,))
        place = said[asked]
        asked += 1
        return DialBackReply(place=place or "", tried=place is not None, relays=())

    async def neighbours() -> list[PeerAddress]:
        relayed = PeerAddress(f"{RELAY}/p2p-circuit", "relayed")
        return [PeerAddress(NEAR, "at home"), PeerAddress("/ip4/8.8.8.8/tcp/1", "outside"), relayed]

    async def own() -> list[str]:
        return [PUBLIC]

    monkeypatch.setattr(reachability, "_answer", answer)
    nothing: Any = None
    begin_s = asyncio.get_running_loop().time()
    await reachability.until_elsewhere(nothing, POSTURE, neighbours, own, 300.0)
    assert asked == looks
    assert asyncio.get_running_loop().time() == begin_s + 300.0 * looks


def test_the_daemon_is_told_to_be_private_public_or_neither() -> None:
    relayed = DaemonConfig(identity=Path("key"), listen=(PUBLIC,), relays=(RELAY,))
    words = arguments(relayed, Reachability.AUTO)
    assert {"-autoRelay=1", "-forceReachabilityPrivate=1", f"-trustedRelays={RELAY}"} <= set(words)
    # With fewer than four it would take no place for three minutes, unless it is told that these are all.
    assert "-relayDiscovery=0" in words
    four = tuple(f"/ip4/198.51.100.1/tcp/{4000 + number}/p2p/{peer}" for number, peer in enumerate((*PEERS, FOURTH)))
    assert "-relayDiscovery=0" not in arguments(msgspec.structs.replace(relayed, relays=four), Reachability.AUTO)
    assert "-relayDiscovery=0" in arguments(
        msgspec.structs.replace(relayed, relays=(*four[:3], four[0])), Reachability.AUTO
    )
    assert "-forceReachabilityPublic=1" in arguments(POSTURE, Reachability.OPEN)
    assert not any("force" in word for word in arguments(POSTURE, Reachability.AUTO))
    assert "-relayService=1" in relay_arguments(POSTURE)


def test_whoever_keeps_to_a_budget_relays_for_nobody() -> None:
    assert "-relayService=1" in arguments(POSTURE, Reachability.AUTO)
    # By default 32 MiB a circuit, as many circuits as strangers like.
    for words in (arguments(POSTURE, Reachability.AUTO), relay_arguments(POSTURE)):
        assert "-relayBufferSize=262144" in words
    frugal = DaemonConfig(identity=Path("key"), listen=(PUBLIC,), lends_line=False)
    assert "-relayService=0" in arguments(frugal, Reachability.AUTO)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("/ip4/203.0.113.5/tcp/61000", ("ip4", "203.0.113.5")),
        ("/ip6/2001:db8::1/udp/4001/quic-v1", ("ip6", "2001:db8::1")),
        (f"/ip4/198.51.100.1/tcp/4002/p2p/{PEERS[1]}/p2p-circuit", None),
        ("", None),
    ],
)
def test_nobody_is_dialled_back_over_a_relay(origin: str, host: tuple[str, str] | None) -> None:
    assert host_of(origin) == host


class Caller:
    """A caller at an address of its own, with one message; notes what it is answered."""

    peer = "caller"

    def __init__(self, message: object) -> None:
        self.origin = "/ip4/198.51.100.7/tcp/50000"
        self.message, self.answers = message, list[DialBackReply]()

    async def receive(self) -> object:
        return self.message

    async def send(self, answer: DialBackReply) -> None:
        self.answers.append(answer)


async def no_relays() -> tuple[str, ...]:
    return ()


async def test_many_callers_have_few_ports_dialled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = most = 0

    async def connect(host: str, port: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(1.0)
        finally:
            under_way -= 1
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    service, callers = DialBackService(no_relays), [Caller(DialMe(ports=(1, 2, 3))) for _ in range(200)]
    for number, caller in enumerate(callers):
        caller.origin = f"/ip4/198.51.{number}.7/tcp/50000"
    await asyncio.gather(*(service.answer(cast(Conversation, caller)) for caller in callers))
    assert most == 64
    assert [caller.answers for caller in callers] == [[DialBackReply(place="", tried=True, relays=())]] * 200


async def test_a_household_that_starts_together_behind_a_silent_router_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that hears nothing in time takes itself for reachable, and asks for no relay."""

    async def connect(host: str, port: int) -> NoReturn:
        await asyncio.sleep(10**6)
        raise AssertionError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    service = DialBackService(no_relays)
    household = [Caller(DialMe(ports=(4001 + number, 4001 + number))) for number in range(30)]
    async with asyncio.timeout(ASK_S):
        await asyncio.gather(*(service.answer(cast(Conversation, each)) for each in household))
    assert [each.answers for each in household] == [[DialBackReply(place="", tried=True, relays=())]] * 30


@pytest.mark.parametrize("crowd", ["/ip4/203.0.113.{}/tcp/1", "/ip6/2001:db8:7:{:x}::1/tcp/1", "/ip4/10.0.0.{}/tcp/1"])
async def test_no_place_takes_the_turns_of_others(crowd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are free: a peer that asks again and again, and listens nowhere, keeps nobody from being dialled."""

    async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, SimpleNamespace]:
        if host != "198.51.100.7":
            await asyncio.sleep(10**6)
        reader = asyncio.StreamReader()
        reader.feed_data(b"\x13/multistream/1.0.0\n")
        return reader, SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(asyncio, "open_connection", connect)
    service, asked = DialBackService(no_relays), list[asyncio.Future[None]]()
    for number in range(120):
        caller = Caller(DialMe(ports=(1, 2)))
        caller.origin = crowd.format(number)
        asked.append(asyncio.ensure_future(service.answer(cast(Conversation, caller))))
        if number >= 60:
            honest = Caller(DialMe(ports=(7,)))
            async with asyncio.timeout(1.0):
                await service.answer(cast(Conversation, honest))
            assert honest.answers == [DialBackReply(place="/ip4/198.51.100.7/tcp/7", tried=True, relays=())]
        await asyncio.sleep(0.05)
    await asyncio.gather(*asked, return_exceptions=True)
    del asked
    await asyncio.sleep(10**7)  # until no timer knows of them
    gc.collect()
    assert not service._turns_by_prefix


async def test_many_callers_cost_one_look_into_the_dht() -> None:
    looks = list[float]()

    async def look() -> tuple[str, ...]:
        looks.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        return (f"{len(looks)}",)

    service, begin_s = DialBackService(look), asyncio.get_running_loop().time()
    for after_s in (0.0, 5.0, 12.0):
        await asyncio.sleep(begin_s + after_s - asyncio.get_running_loop().time())
        callers = [Caller(DialMe(ports=())) for _ in range(20)]
        await asyncio.gather(*(service.answer(cast(Conversation, caller)) for caller in callers))
        told = {caller.answers[0].relays for caller in callers}
        assert told == {("2",) if after_s == 12.0 else ("1",)}
    assert looks == [begin_s, begin_s + 12.0]


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_slow_dht_is_looked_into_no_oftener_and_hides_no_relay_that_is_known(*, gives_up: bool) -> None:
    """Nor is it for callers that give up: a look goes on for the others."""
    looks = list[float]()

    async def look() -> tuple[str, ...]:
        looks.append(asyncio.get_running_loop().time())
        await asyncio.sleep(3.0 if len(looks) == 1 else 10**6)
        return ("known",)

    service, begin_s, callers = DialBackService(look), asyncio.get_running_loop().time(), list[Caller]()
    for number in range(40):
        callers.append(Caller(DialMe(ports=())))
        asking = asyncio.ensure_future(service.answer(cast(Conversation, callers[-1])))
        await asyncio.sleep(0.5)
        if gives_up and number % 2 == 0:
            asking.cancel()
    await asyncio.sleep(20.0)
    assert looks == [begin_s, begin_s + 10.0]
    stayed = callers[1::2] if gives_up else callers
    assert [caller.answers[0].relays for caller in stayed] == [("known",)] * len(stayed)


async def test_a_caller_that_answers_where_it_should_ask_violates_the_protocol() -> None:
    reply = Caller(DialBackReply(place="", tried=False, relays=()))
    with pytest.raises(Violation):
        await DialBackService(no_relays).answer(cast(Conversation, reply))


def test_once_one_has_answered_the_dead_do_not_hold_us_up() -> None:
    async def main(*answers: tuple[float, str | None]) -> tuple[list[str | None], float]:
        class Answering(Control):
            """A daemon that connects to a place as is said."""

            async def connect(self, address: PeerAddress, wait_s: float) -> str | None:
                after_s, cause = answers[int(address.transport)]
                await asyncio.sleep(after_s)
                return cause

        nothing: Any = None
        doors = [PeerAddress(str(number), "a") for number in range(len(answers))]
        causes = await Answering(nothing, nothing).connect_all(doors, 60.0)
        return list(causes.values()), asyncio.get_running_loop().time()

    causes, took_s = run(main((1.0, None), (2.5, None), (0.5, "closed"), (15.0, "silent")))
    assert causes[:3] == [None, None, "closed"]
    assert "while others did" in (causes[3] or "")
    assert took_s < 5.0
    assert run(main((1.0, "closed"), (15.0, "silent"))) == (["closed", "silent"], 15.0)


def test_records_of_relays_are_read_with_care() -> None:
    assert relays_of({"a": relay_record([RELAY, DOOR]), "b": relay_record([RELAY])}) == (RELAY, DOOR)
    noise = {"a": b"\xc1", "b": b"\xa1\xff", "c": relay_record(["/ip4/1.2.3.4", "x" * 10_000]), "d": b""}
    assert relays_of(noise | {"e": relay_record([RELAY])}) == (RELAY,)
    assert relays_of({"a": relay_record(2000 * [""]), "b": relay_record([RELAY])}) == (RELAY,)
    assert relays_of({"a": relay_record([*2000 * [""], RELAY])}) == (), "names without a place count as well"
    assert checked_relays([f"/dns4/a,b/tcp/1/p2p/{PEERS[0]}", f"{RELAY}/p2p-circuit/p2p/{PEERS[0]}"]) == ()
    many = [f"/ip4/198.51.100.{number}/tcp/4001/p2p/{PEERS[0]}" for number in range(9)]
    assert len(checked_relays(many)) == 4


HOSTS = st.sampled_from(["/ip4/198.51.100.1", "/ip6/2001:db8::1", "/dns4/example.org", "/dns/example.org"])
STRANGE_HOSTS = st.sampled_from(["", "/ip6zone/eth0/ip6/fe80::1", f"/p2p/{PEERS[0]}", "/dnsaddr/example.org"])
WAYS = st.sampled_from(["/tcp/4001", "/tcp/4001/ws", "/udp/4001/quic-v1"])
STRANGE_WAYS = st.sampled_from(["", "/memory/1", "/tcp/4001/http-path/x", "/tcp/4001/noise", "/udp/1/webrtc-direct"])


def test_no_long_address_is_decoded() -> None:
    with pytest.raises(ValueError, match=r"has 79\d\d characters, at most 256 are allowed"):
        parse_peer_address(f"/ip4/198.51.100.1/tcp/1/p2p/{'z' * 7900}")


@given(HOSTS | STRANGE_HOSTS, WAYS | STRANGE_WAYS)
def test_no_relay_of_a_stranger_keeps_our_daemon_from_starting(host: str, way: str) -> None:
    """The daemon ends at once where it cannot read one of the addresses that it is given."""
    taken = checked_relays([f"{host}{way}/p2p/{PEERS[1]}"])
    is_plain = not (host == "" or "zone" in host or "p2p" in host or "dnsaddr" in host)
    is_known = way in ("/tcp/4001", "/tcp/4001/ws", "/udp/4001/quic-v1")
    assert len(taken) == (is_plain and is_known)
    assert list(map(str, map(parse_peer_address, taken))) == list(taken)


def test_a_flood_of_relays_costs_a_bounded_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, parse = list[str](), addresses.parse_peer_address

    def counted(text: str) -> PeerAddress:
        looked_at.append(text)
        return parse(text)

    monkeypatch.setattr(addresses, "parse_peer_address", counted)
    flood = {str(number): relay_record(8000 * ["/"]) for number in range(32)}
    assert relays_of({**flood, "ours": relay_record([RELAY])}) == (RELAY,)
    assert len(looked_at) == 1024
    liar = relay_record([f"/ip4/198.51.100.1/tcp/4001/p2p/{peer_of(bytes([number] * 32))}" for number in range(64)])
    assert RELAY in relays_of({"theirs": liar, "ours": relay_record([RELAY])})


def test_no_peers_hide_the_relays_of_others_by_ids_that_come_first() -> None:
    theirs = {
        f"{n:02}": relay_record([f"/ip4/198.51.100.1/tcp/4001/p2p/{peer_of(bytes([n] * 32))}"]) for n in range(32)
    }
    found = [RELAY in relays_of(theirs | {"ours": relay_record([RELAY])}, Random(seed)) for seed in range(100)]
    assert sum(found) > 30


@given(st.binary(max_size=200))
def test_no_bytes_of_a_stranger_disturb_the_list_of_relays(raw: bytes) -> None:
    assert RELAY in relays_of({"theirs": raw, "ours": relay_record([RELAY])})


def test_relays_listen_at_the_ports_after_the_peer_s_own() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = probe.getsockname()[1]
    keys = [Path(f"relay-{number}.key") for number in (1, 2)]
    chosen = wanted(listen=(f"/ip4/0.0.0.0/tcp/{base}",), announce=("/dns4/example.org/tcp/4001",))
    one, two = relay_configs(chosen, keys)
    assert (one.listen, two.listen) == ((f"/ip4/0.0.0.0/tcp/{base + 1}",), (f"/ip4/0.0.0.0/tcp/{base + 2}",))
    assert (one.announce, two.announce) == (("/dns4/example.org/tcp/4002",), ("/dns4/example.org/tcp/4003",))
    assert [one.identity, two.identity] == keys
    assert relay_configs(wanted(listen=(LOCAL,)), keys) == ()
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as trouble:
            relay_configs(wanted(listen=(f"/ip4/0.0.0.0/tcp/{port - 1}",)), keys[:1])
    assert trouble.value.code is Exit.PORT_TAKEN
    said = str(trouble.value)
    assert "Relay 1 of 1 has no place to listen" in said
    assert f"The port {port} is taken" in said
    assert "--relays" in said
    with user_error(Exit.CONFIG, "Relay 2 of 2"):
        relay_configs(wanted(listen=("/ip4/0.0.0.0/udp/65534/quic-v1",)), keys)


@given(st.integers(0, 65535), st.sampled_from(["/ip4/0.0.0.0/tcp/{}", "/ip6/::/udp/{}/quic-v1", "/dns4/tcp/tcp/{}"]))
def test_ports_are_found_and_replaced(port: int, form: str) -> None:
    if "/dns4/tcp/" not in form:
        text = form.format(7)
        assert with_port(text, port) == form.format(port)
        assert port_of(with_port(text, port)) == port


def test_open_ports_are_chosen_and_given_ones_kept() -> None:
    free, kept = with_ports_chosen(("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/4001/quic-v1"))
    assert port_of(free) > 0
    assert kept == "/ip4/127.0.0.1/udp/4001/quic-v1"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("form", ["/ip6/::/tcp/{}", "/ip6/::/udp/{}/quic-v1"])
def test_a_port_that_others_have_over_ipv4_is_free_over_ipv6(form: str) -> None:
    with socket.socket(type=socket.SOCK_STREAM if "tcp" in form else socket.SOCK_DGRAM) as other:
        other.bind(("0.0.0.0", 0))
        check_listen([form.format(other.getsockname()[1])])


def test_a_machine_without_ipv6_is_told_where_it_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("noloco_node.libp2p.addresses.socket.socket", without)
    for listen in (check_listen, with_ports_chosen):
        with user_error(Exit.CONFIG, "cannot listen there: Address family"):
            listen([f"/ip6/::/tcp/{0 if listen is with_ports_chosen else 4001}"])


def test_over_udp_only_what_the_daemon_speaks() -> None:
    with pytest.raises(UserError, match="cannot be used") as trouble:
        check_listen(("/ip4/127.0.0.1/udp/0/quic",))
    assert "quic-v1" in trouble.value.why


@given(st.integers(1, 16), st.integers(0, 200), st.integers(0, 2**32))
def test_many_names_of_one_place_make_no_peer_forget_the_others(others: int, crowd: int, seed: int) -> None:
    met = [PeerAddress(f"/ip4/8.8.{number}.1/tcp/1", f"other {number}") for number in range(others)]
    met += [PeerAddress(f"/ip4/9.9.9.{number}/tcp/1", f"name {number}") for number in range(crowd)]
    Random(seed).shuffle(met)
    known = KnownPeers()
    for each in met:
        known.note([each])
    kept = known.beside([])
    assert sum(each.peer.startswith("other") for each in kept) == others
    assert len(kept) == min(32, others + crowd)
    names = [each for each in met if each.peer.startswith("name")]
    assert [each for each in kept if each in names] == names[others - len(kept) :][::-1] or not names


def test_a_bootstrap_peer_of_thousands_looks_at_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def prefix(origin: str) -> str:
        nonlocal looks
        looks += 1
        return public_prefix(origin)

    monkeypatch.setattr(addresses, "public_prefix", prefix)
    KnownPeers(PeerAddress(f"/ip4/8.8.{number % 256}.1/tcp/{number}", f"{number}") for number in range(3000))
    assert looks <= 3000


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3)), max_size=200))
def test_the_latest_acquaintances_are_kept_each_once(met: list[tuple[int, int]]) -> None:
    known, door = KnownPeers(), parse_peer_address(DOOR)
    for peer, port in met:
        known.note([PeerAddress(f"/ip4/192.0.2.1/tcp/{port}", str(peer))])
    known.note([PeerAddress(f"/ip4/192.0.2.1/tcp/1/p2p/{PEERS[1]}/p2p-circuit", "relayed")])
    latest: dict[str, int] = {}
    for peer, port in met:
        latest.pop(str(peer), None)
        latest[str(peer)] = port
    expected = list(latest.items())[-32:][::-1]
    assert known.beside([door]) == [door, *(PeerAddress(f"/ip4/192.0.2.1/tcp/{port}", peer) for peer, port in expected)]


def reservation(duration_s: int = 0, data_bytes: int = 0, status: int = 100) -> bytes:
    """A relay's answer to a reservation, as libp2p's circuit protocol has it."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + number(value >> 7)

    limit = (b"\x08" + number(duration_s) if duration_s else b"") + (
        b"\x10" + number(data_bytes) if data_bytes else b""
    )
    field = b"\x22" + number(len(limit)) + limit if limit else b""
    return b"\x08\x02" + b"\x1a\x03\x08\x9b\x01" + field + b"\x28" + number(status)


@given(duration_s=st.integers(0, 2**31 - 1), data_bytes=st.integers(0, 2**62))
def test_what_a_relay_grants_is_read_from_its_answer(duration_s: int, data_bytes: int) -> None:
    grant = grant_of(reservation(duration_s, data_bytes))
    assert grant == Grant(duration_s, data_bytes)
    assert grant.covers(grant)
    assert Grant(0, 0).covers(grant)
    assert grant.covers(Grant(1, 1))
    if data_bytes:
        assert not grant.covers(Grant(1, data_bytes + 1))
        assert not grant.covers(Grant(1, 0))


@given(raw=st.one_of(st.binary(max_size=80), st.integers(0, 99).map(lambda status: reservation(1, 1, status))))
def test_an_answer_that_grants_nothing_is_a_refusal_whatever_it_is(raw: bytes) -> None:
    try:
        grant = grant_of(raw)
    except ConnectionRefusedError:
        return
    assert all(isinstance(limit, int) for limit in grant)
    assert b"\x28\x64" in raw


def test_libp2p_s_own_limits_are_not_enough() -> None:
    # As p2pd answers when libp2p's service has taken the place of the one that was asked for.
    assert not grant_of(b"\x08\x02\x22\x06\x08\x78\x10\x80\x80\x08\x28\x64").covers(
        Grant(RELAY_TIME_S, RELAY_DATA_BYTES)
    )


def test_a_relay_that_cannot_be_asked_is_told_in_one_line_without_advice_for_newcomers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(doors: Sequence[PeerAddress]) -> Grant:
        raise unreachable({str(door): "no answer" for door in doors})

    pool = RelayPool(cast(PeerContext, None), pytest.fail, ask)
    assert run(
        relays._grants_enough(pool, msgspec.structs.replace(POSTURE, listen=(PUBLIC, "/ip6/::/tcp/4001")), PEERS[0])
    )
    said = caplog.messages
    assert said
    assert all("\n" not in line and "bootstrap peer" not in line for line in said)
    assert all(line.count("no answer") == 2 for line in said)


@pytest.mark.parametrize("trouble", [RuntimeError("a bug"), ConnectionResetError("gone"), OSError("no space")])
async def test_a_relay_is_started_again_whatever_ends_it(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    starts, told = 0, list[str]()

    @asynccontextmanager
    async def start(*_: object) -> AsyncIterator[tuple[Any, Any]]:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise trouble
        daemon = SimpleNamespace(wait=asyncio.Event().wait if starts > 2 else partial(asyncio.sleep, 1.0, "killed"))
        yield SimpleNamespace(daemon=daemon), SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: PEERS[1]))

    async def ask(doors: Sequence[PeerAddress]) -> Grant:
        return Grant(0, 0)

    async def place(*_: object) -> tuple[str, ...]:
        return (RELAY,)

    monkeypatch.setattr(relays, "_addresses", place)
    pool = RelayPool(cast(PeerContext, SimpleNamespace(start=start)), told.append, ask)
    ready: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(relays._keep(pool, POSTURE, ready))
    assert await ready == (RELAY,)
    await asyncio.wait([keeping], timeout=60.0)
    keeping.cancel()
    assert starts == 3
    assert ["killed" in told[0], str(trouble) in told[1]] == [True, True]


@pytest.mark.parametrize(
    ("listen", "near"),
    [
        ("/ip4/0.0.0.0/tcp/4001", "/ip4/127.0.0.1/tcp/4001"),
        ("/ip6/::/udp/4001/quic-v1", "/ip6/::1/udp/4001/quic-v1"),
        ("/ip4/192.0.2.7/tcp/4001", "/ip4/192.0.2.7/tcp/4001"),
    ],
)
def test_whoever_listens_everywhere_is_reached_on_this_machine(listen: str, near: str) -> None:
    assert from_this_machine([listen]) == [near]


PEER = "12D3KooWNkoFmBk1MvVFopXqyA1Sppe8rVCzStqsG7uvJMpKv27U"
ADDRESS = parse_peer_address(f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("dial tcp4 192.0.2.1:4001: connect: connection refused", "no program listens there"),
        ("dial tcp4 192.0.2.1:4001: i/o timeout", "no answer"),
        ("failed to negotiate security protocol: message did not have trailing newline", "is no peer"),
        ("failed to negotiate security protocol: peer id mismatch: expected Qm, but remote key matches Qn", "Qn"),
        ("something new", "something new"),
    ],
)
def test_each_cause_reads_differently(words: str, cause: str) -> None:
    others = "  * [/ip4/192.0.2.2/tcp/4001] dial tcp4 192.0.2.2:4001: connect: network is unreachable"
    said = plain_cause(f"failed to dial {PEER}:\n{others}\n  * [/ip4/192.0.2.1/tcp/4001] {words}", ADDRESS)
    assert cause in said
    assert "no route" not in said
