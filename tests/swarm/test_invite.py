"""Invites: what is formatted is parsed, and what is wrong is named."""

import contextlib
import string
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from admission_keys import public
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from noloco_node.admission.ticket import KEY_HEADER, peer_of
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.addresses import PeerAddress, check_announce, check_listen, parse_peer_address
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.run.peer_state import PeerState
from noloco_node.storage.home import HomePaths
from noloco_node.swarm import invite, roster
from noloco_node.swarm.invite import SCHEME, KeptInvite, from_where
from noloco_node.swarm.roster import PeerRecord, Roster

DIGEST = "0123456789abcdef" * 4
ED25519 = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESSES = [
    f"/ip4/192.0.2.1/tcp/4001/p2p/{ED25519}",
    f"/ip6/2001:db8::1/tcp/4001/p2p/{RSA}",
    f"/dns4/bootstrap.example.org/tcp/443/p2p/{ED25519}",
    f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{ED25519}",
    f"/ip4/192.0.2.1/tcp/4001/p2p/{RSA}/p2p-circuit/p2p/{ED25519}",
]


@given(
    st.text("0123456789abcdef", min_size=64, max_size=64), st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=8)
)
def test_what_is_formatted_is_parsed(digest: str, addresses: list[str]) -> None:
    text = invite.format(digest, addresses)
    parsed = invite.parse(f"  {text}\n")
    assert parsed.digest == digest
    assert listed(text) == addresses
    assert str(parsed) == text


def test_an_invite_is_found_in_a_home_where_none_is_given(tmp_path: Path) -> None:
    text = invite.format(DIGEST, ADDRESSES[:1])
    assert invite.found(text, tmp_path) == text
    assert invite.found("nonsense", tmp_path) == "nonsense", "parsing says what is wrong with it"
    for given_home in (None, str(tmp_path)):
        with user_error(Exit.CONFIG, "no invite"):
            invite.found(given_home, tmp_path)
    (tmp_path / "invite").write_text(f"{text}\n")
    assert invite.found(None, tmp_path) == invite.found(str(tmp_path), Path("elsewhere")) == text


def place(number: int, port: int = 4001) -> str:
    return f"/ip4/192.0.2.1/tcp/{port}/p2p/{peer_of(public(number))}"


@given(st.binary(min_size=16, max_size=16))
def test_no_few_ids_come_first_in_the_invites_of_others(salt: bytes) -> None:
    """Four names whose ids come first would be all by which a peer returns."""
    places = {peer_of(public(number)): place(number) for number in range(60)}
    liars = sorted(places)[: invite.BESIDE]
    stage = [PeerRecord(peer=p, stage=0, state=PeerState.TRAINING, addresses=(places[p],)) for p in sorted(places)]
    with patch.object(roster, "_SALT", salt):
        found = roster.some_addresses(Roster(stages=(tuple(stage),)))
    assert sorted(found) == sorted(places.values())
    assert {places[p] for p in liars} != set(found[: invite.BESIDE])


def home_of(number: int, directory: Path) -> HomePaths:
    home = HomePaths(directory)
    home.identity.write_bytes(KEY_HEADER + number.to_bytes(32) + public(number))
    return home


def listed(text: str) -> list[str]:
    return list(map(str, invite.parse(text).addresses))


PLACES = st.lists(st.builds(place, st.integers(0, 30), st.integers(1, 3)), max_size=30)


@given(PLACES.filter(bool), PLACES, st.lists(st.builds(place, st.just(31), st.integers(1, 99)), max_size=3))
def test_an_invite_is_widened_by_a_few_living_peers_and_stays_small(
    known: list[str], living: list[str], first: list[str]
) -> None:
    before = invite.parse(invite.format(DIGEST, known))
    text = invite.widened(before, living, first)
    after, others = listed(text), list(dict.fromkeys(first))
    assert after[: len(others)] == others
    assert len(set(after)) == len(after)
    assert set(after) <= {*known, *living, *first}
    peers = list(dict.fromkeys(each.peer for each in invite.parse(text).addresses if str(each) not in others))
    lasting = before.peers[: invite.LASTING]
    assert peers[: len(lasting)] == lasting
    assert len(peers) <= invite.MOST_PEERS
    assert set({each.rpartition("/")[2]: each for each in living[: invite.BESIDE]}.values()) <= set(after)


def test_what_strangers_say_of_themselves_breaks_no_invite(tmp_path: Path) -> None:
    before = invite.parse(invite.format(DIGEST, ADDRESSES[:1]))
    said = [
        "",
        "nonsense",
        "/ip4/192.0.2.1/tcp/1",
        f"{ADDRESSES[1]},{ADDRESSES[2]}",
        f"/ip4/192.0.2.1/tcp/1/http-path/a#b/p2p/{ED25519}",
        "/ip4/1/p2p/x",
        "\x00",
        ADDRESSES[1],
    ]
    assert invite.widened(before, said) == invite.format(DIGEST, ADDRESSES[:2])
    long = invite.format(DIGEST, [f"/ip4/192.0.2.1/tcp/{port}/p2p/{ED25519}" for port in range(1, 65)])
    assert invite.found(long, tmp_path) == long


def test_a_home_keeps_an_invite_and_says_once_that_it_cannot(tmp_path: Path) -> None:
    said: list[str] = []
    came_by = invite.parse(invite.format(DIGEST, ADDRESSES[:1]))
    kept = KeptInvite(HomePaths(tmp_path), came_by, ADDRESSES[1:2], said.append)
    assert kept.keep() == invite.format(DIGEST, ADDRESSES[1::-1])
    assert kept.keep(ADDRESSES[2:3]) == invite.found(None, tmp_path)
    assert listed(kept.keep()) == [ADDRESSES[1], ADDRESSES[2], ADDRESSES[0]], "where a peer is now comes first"
    assert kept.keep() == invite.found(None, tmp_path), "a peer that is alone remembers whom it met"
    assert kept.keep(["nonsense"]) == invite.found(None, tmp_path), (
        "nor does what a stranger says of itself replace them"
    )
    refused = KeptInvite(HomePaths(tmp_path / "nowhere"), came_by, (), said.append)
    refused.keep()
    refused.keep(ADDRESSES[2:3])
    assert len(said) == 1


def test_of_many_peers_a_few_others_are_kept_and_no_more_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand addresses take the loop of a node most of a second; our own record is among those of the roster."""
    others, parsed = [place(number) for number in range(1, 1001)], 0
    home = home_of(1, tmp_path)
    kept = KeptInvite(home, invite.parse(invite.format(DIGEST, ADDRESSES[:1])), [place(1, 2)], print)

    def counted(text: str) -> PeerAddress:
        nonlocal parsed
        parsed += 1
        return parse_peer_address(text)

    monkeypatch.setattr(invite, "parse_peer_address", counted)
    text = kept.keep(others)
    assert parsed < 10 * invite.BESIDE
    assert text == invite.format(DIGEST, [place(1, 2), ADDRESSES[0], *others[1 : 1 + invite.BESIDE]])


def test_a_home_that_comes_back_by_peers_that_it_met_keeps_the_way_to_them(tmp_path: Path) -> None:
    """The invite that it was given may have led nowhere: a port with a wrong digit."""
    KeptInvite(HomePaths(tmp_path), invite.parse(invite.format(DIGEST, ADDRESSES[:1])), (), print).keep()
    wrong = invite.parse(invite.format(DIGEST, ADDRESSES[2:3]))
    KeptInvite(HomePaths(tmp_path), wrong, ADDRESSES[1:2], print).keep()
    kept = [str(each) for each in invite.parse(invite.found(None, tmp_path)).addresses]
    assert kept == [ADDRESSES[1], ADDRESSES[2], ADDRESSES[0]]


@settings(max_examples=20)
@given(
    st.lists(
        st.lists(st.builds(place, st.integers(1, 200), st.integers(1, 60_000)), max_size=6), min_size=1, max_size=4
    )
)
def test_a_home_that_joins_by_its_own_invite_again_and_again_keeps_the_way_into_the_swarm(met: list[list[str]]) -> None:
    """Each start may listen on another port, and so may the peers that it meets; our own record is among theirs."""
    with TemporaryDirectory() as directory:
        home, (bootstrap,) = home_of(1, Path(directory)), ADDRESSES[:1]
        came_by = invite.format(DIGEST, [bootstrap])
        for port, others in enumerate(met * 4, 1):
            kept = KeptInvite(home, invite.parse(came_by), [own := place(1, port)], print)
            kept.keep()
            kept.keep(others)
            came_by = invite.found(None, home.path)
            assert listed(came_by)[:2] == [own, bootstrap]
            assert sum(each.endswith(own.rpartition("/")[2]) for each in listed(came_by)) == 1
            assert len(listed(came_by)) <= 2 * (1 + invite.MOST_PEERS)
            now = {each.rpartition("/")[2]: each for each in others[: invite.BESIDE]}
            assert {each for each in now.values() if place(1)[-20:] not in each} <= set(listed(came_by))


@settings(max_examples=20)
@given(
    st.sampled_from([[], ["192.0.2.1"]]),
    st.lists(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.2", "127.0.0.1"]), max_size=2, unique=True), max_size=6),
)
def test_an_invite_leads_to_where_its_peer_is_now(first: list[str], moves: list[list[str]]) -> None:
    def at(hosts: list[str]) -> list[str]:
        return [place(1).replace("192.0.2.1", host) for host in hosts]

    with TemporaryDirectory() as directory:
        home, said = home_of(1, Path(directory)), list[str]()
        kept = KeptInvite(home, invite.parse(invite.format(DIGEST, ADDRESSES[:1])), own := at(first), said.append)
        kept.keep()
        known = set(own)
        for hosts in moves:
            told = len(said)
            kept.move(now := at(hosts))
            own = now if set(hosts) - {"127.0.0.1"} or first == [] == own else own
            assert listed(kept.keep()) == [*own, ADDRESSES[0]], "without a line a peer is where it was"
            assert [invite.found(None, home.path) in line for line in said[told:]] == [True] * bool(
                known and known.isdisjoint(own)
            )
            known.update(own)


def test_an_invite_says_from_where_it_can_be_used() -> None:
    assert from_where(ADDRESSES[:1]) == "from another machine"
    assert from_where([f"/ip4/127.0.0.1/tcp/4001/p2p/{ED25519}"]).startswith("on this machine")


def test_an_address_is_split_into_place_and_peer() -> None:
    assert parse_peer_address(ADDRESSES[0]) == PeerAddress("/ip4/192.0.2.1/tcp/4001", ED25519)
    assert parse_peer_address(ADDRESSES[4]).transport == f"/ip4/192.0.2.1/tcp/4001/p2p/{RSA}/p2p-circuit"
    beside = f"/ip6zone/eth0/ip6/fe80::1/tcp/4001/p2p/{RSA}"
    assert str(parse_peer_address(beside)) == beside


@given(st.lists(st.integers(len(SCHEME), 200), max_size=4), st.sampled_from(["\n", "\r\n", " ", "\n  "]))
def test_line_breaks_of_a_chat_program_break_no_invite(places: list[int], broken: str) -> None:
    whole = invite.format(DIGEST, ADDRESSES[:2])
    text = whole
    for place in sorted(places, reverse=True):
        text = text[:place] + broken + text[place:]
    assert invite.parse(text) == invite.parse(whole)


@given(st.integers(1, len(ADDRESSES[0]) - 1))
def test_an_address_that_is_cut_off_is_named_once_in_our_own_words(kept: int) -> None:
    with user_error(Exit.CONFIG) as trouble:
        invite.parse(f"{SCHEME}{DIGEST}@{ADDRESSES[0][:kept]}")
    why = trouble.value.why.removeprefix("address 1 is wrong: ")
    assert why.startswith(repr(ADDRESSES[0][:kept]))
    assert not {"MultiAddr", "CID", "string:"} & {*why.replace("(", " ").split()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", f"does not start with '{SCHEME}'"),
        ("https://example.org", f"does not start with '{SCHEME}'"),
        (f"{SCHEME}{DIGEST[1:]}@{ADDRESSES[0]}", "64 hex digits in lower case, not 63 characters"),
        (f"{SCHEME}{DIGEST.upper()}@{ADDRESSES[0]}", "64 hex digits in lower case"),
        (f"{SCHEME}{DIGEST}", "no address follows"),
        (f"{SCHEME}{DIGEST}@", "no address follows"),
        (f"{SCHEME}{DIGEST}@/ip4/192.0.2.1/tcp/4001", "address 1 is wrong: .* does not end in /p2p/"),
        (f"{SCHEME}{DIGEST}@{ADDRESSES[0]},/ip4/300.0.2.1/tcp/4001", "address 2 is wrong: .*not IPv4"),
        (f"{SCHEME}{DIGEST}@/ip4/192.0.2.1/tcp/99999/p2p/{RSA}", "address 1 is wrong: .*not in range"),
        (f"{SCHEME}{DIGEST}@/ip4/192.0.2.1/tcp/4001/p2p/nobody", "address 1 is wrong: .*is no peer id"),
        (f"{SCHEME}{DIGEST}@/p2p/{RSA}", "address 1 is wrong: .*no place to dial"),
        (f"{SCHEME}{DIGEST}@{ADDRESSES[0]},", "address 2 is wrong"),
        (f"{SCHEME}{DIGEST}@{','.join(ADDRESSES[:1] * 65)}", "lists 65 addresses"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with user_error(Exit.CONFIG) as trouble:
        invite.parse(text)
    with pytest.raises(ValueError, match=words):
        raise ValueError(trouble.value.why)


@pytest.mark.parametrize(("version", "words"), [(1, "an older protocol"), (WIRE_VERSION + 1, "a newer protocol")])
def test_an_invite_of_another_version_says_which_of_the_two_is_older(version: int, words: str) -> None:
    with user_error(Exit.OTHER_RUN, "another version") as trouble:
        invite.parse(f"noloco{version}:{DIGEST}@{ADDRESSES[0]}")
    assert words in trouble.value.why


@given(st.text(string.printable, max_size=80))
def test_any_text_is_an_invite_or_trouble(text: str) -> None:
    for candidate in (text, f"{SCHEME}{text}", f"{SCHEME}{DIGEST}@{text}", f"{SCHEME}{DIGEST}@/ip4/192.0.2.1/{text}"):
        with contextlib.suppress(UserError):
            parsed = invite.parse(candidate)
            assert invite.parse(str(parsed)) == parsed


@given(st.lists(st.sampled_from(ADDRESSES), min_size=1))
def test_each_bootstrap_peer_is_asked_once_however_many_addresses_it_has(addresses: list[str]) -> None:
    """Asked for the time by each address, one wrong clock outvotes two right ones."""
    parsed = invite.parse(invite.format(DIGEST, addresses))
    assert parsed.peers == [*dict.fromkeys(each.rpartition("/")[2] for each in addresses)]


def test_a_home_knows_others_of_the_same_run(tmp_path: Path) -> None:
    parsed = invite.parse(invite.format(DIGEST, ADDRESSES[:1]))
    assert invite.kept_addresses(parsed, tmp_path) == []
    (tmp_path / "invite").write_text(invite.format(DIGEST, ADDRESSES[:3]))
    assert list(map(str, invite.kept_addresses(parsed, tmp_path))) == ADDRESSES[1:3]
    (tmp_path / "invite").write_text(invite.format(DIGEST[::-1], ADDRESSES[:3]))
    assert invite.kept_addresses(parsed, tmp_path) == []


def test_an_announced_address_is_one_that_others_can_dial() -> None:
    """The invite carries it, and nobody finds a peer by a wrong one."""
    check_announce(["/ip4/192.0.2.1/tcp/4001", "/dns4/example.org/tcp/443", "/ip6/2001:db8::1/udp/4001/quic-v1"])
    without_port = ("/ip4/192.0.2.1/tcp/0", "/ip4/192.0.2.1", "", "nonsense", "/dns4/example.org/udp/0/quic-v1")
    nowhere = ("/tcp/4001", "/p2p-circuit/tcp/1", "/ip4/192.0.2.1/udp/4001", ADDRESSES[0], "192.0.2.1:4001")
    for text in (*without_port, *nowhere):
        with user_error(Exit.CONFIG) as trouble:
            check_announce([text])
        check_announce([trouble.value.hint.partition("like ")[2].partition(";")[0]])


def test_every_interface_is_no_address_to_announce() -> None:
    for text in ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/udp/4001/quic-v1", "/ip6/0:0:0:0:0:0:0:0/tcp/4001"):
        with pytest.raises(UserError, match="cannot be used") as trouble:
            check_announce([text])
        assert "nobody can dial it" in trouble.value.why


def test_addresses_to_listen_on_are_checked() -> None:
    check_listen(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])
    for text in ("/ip4/127.0.0.1", "/dns4/example.org/tcp/4001", "127.0.0.1:4001", ""):
        with user_error(Exit.CONFIG):
            check_listen([text])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12))
def test_a_peer_that_is_met_at_many_ports_loses_no_host(met: list[tuple[int, int]]) -> None:
    (_, peer) = ADDRESSES[0].rsplit("/", 1)
    seed = [
        f"{place}/tcp/4001/p2p/{peer}" for place in ("/dns4/seed.example.org", "/ip4/192.0.2.9", "/ip6/2001:db8::1")
    ]
    text = invite.format(DIGEST, seed)
    for host, port in met:
        text = invite.widened(invite.parse(text), [f"/ip4/10.0.0.{host}/tcp/{port}/p2p/{peer}"])
    assert set(seed) <= {str(each) for each in invite.parse(text).addresses}
