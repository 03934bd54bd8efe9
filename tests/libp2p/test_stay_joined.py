"""How a peer stays in touch with the swarm, without a daemon: whom it asks for the time, and which relays it names."""

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.admission.ticket import peer_of
from noloco_node.libp2p import network as libp2p_network
from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, relay_record
from noloco_node.libp2p.network import MISSED, JoinedDaemon, Libp2pNetwork
from noloco_node.libp2p.settings import RunSecret, TimeoutSettings
from noloco_node.network.swarm_clock import SwarmClock


@given(
    st.integers(0, 2**32),
    st.sampled_from(["/ip4/8.8.8.{}/tcp/1", "/ip4/9.9.9.9/tcp/{}/p2p/relay/p2p-circuit"]),
)
def test_many_names_of_one_place_move_no_clock(seed: int, crowd: str) -> None:
    """Nor does a peer that has many connections. A household counts by its peers, and a door by itself."""
    honest = [PeerAddress(f"/ip4/7.7.{number}.7/tcp/1", f"honest {number}") for number in range(6)]
    honest += [PeerAddress(f"/ip4/192.168.1.{number}/tcp/1", f"at home {number}") for number in range(3)]
    present = [*honest, *(PeerAddress(crowd.format(number), f"liar {number}") for number in range(1, 99))]
    present += [PeerAddress(f"/ip4/192.168.1.99/tcp/{port}", "liar at home") for port in range(50)]
    now_s, rng = 0.0, Random(seed)
    clock = SwarmClock(lambda: 1.8e9 + now_s, lambda: now_s)
    for look in range(200):
        now_s += 60.0
        rng.shuffle(present)
        asked = libp2p_network.voices(present, ["honest 0"])
        assert len(asked) == len(honest) + 2
        voice, told = asked[look % len(asked)]
        assert (voice == told.peer) == (told.peer == "honest 0" or "home" in told.peer)
        clock.note(voice, 1.8e9 + now_s + 1e6 * told.peer.startswith("liar"))
        assert look < len(asked) or clock.ahead_s() == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize("wall_stood_still", [False, True])
async def test_a_virtual_machine_that_was_paused_knows_the_time_within_two_minutes(
    wall_stood_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, lost_s, asked, peers = asyncio.get_running_loop(), 0.0, 0, [f"peer {number}" for number in range(20)]
    clock = SwarmClock(lambda: 1.8e9 + loop.time() - lost_s * wall_stood_still, lambda: loop.time() - lost_s)
    monkeypatch.setattr(libp2p_network, "CLOCK", clock)

    async def ask_time(peer: str, voice: str, *, is_door: bool) -> None:
        nonlocal asked
        asked += 1
        clock.note(voice, 1.8e9 + loop.time(), is_door=is_door)

    async def neighbours() -> list[PeerAddress]:
        return [PeerAddress("/ip4/192.168.1.1/tcp/1", peer) for peer in peers]

    async def knock(*_: object) -> list[PeerAddress]:
        return []

    joined: Any = JoinedDaemon.__new__(JoinedDaemon)
    joined.peer_id, joined.rejoined, joined.neighbours, joined._timeouts = "me", 0, neighbours, TimeoutSettings()
    joined.control = SimpleNamespace(knock=knock)
    joined.records = SimpleNamespace(is_neighbour=lambda _: True, ask_time=ask_time)
    joined._id_of = lambda each: each.peer
    staying = asyncio.create_task(joined.stay_joined([], KnownPeers()))
    await asyncio.sleep(3600.0)
    assert asked < 70
    lost_s = 8 * 3600.0
    await asyncio.sleep(120.0)
    assert clock.unix_s() == pytest.approx(1.8e9 + loop.time(), abs=1.0)
    asked = 0
    await asyncio.sleep(3600.0)
    assert asked < (800 if wall_stood_still else 70), "a machine whose own clock stays wrong asks on"
    staying.cancel()


@given(st.lists(st.sampled_from([None, ConnectionAbortedError]), max_size=30))
async def test_a_daemon_is_ended_once_it_misses_several_answers_in_a_row(
    answers: list[type[ConnectionError] | None],
) -> None:
    """One or two may be missed, as by a process that stood still."""
    story, ended = iter(answers), list[int]()
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    looks = 0

    async def neighbours() -> list[PeerAddress]:
        nonlocal looks
        error = next(story, over)
        if ended or error is over:
            over.cancel()
            await asyncio.get_running_loop().create_future()
        looks += 1
        if error is not None:
            raise error
        return []

    async def knock(*_: object) -> list[PeerAddress]:
        return []

    joined: Any = JoinedDaemon.__new__(JoinedDaemon)
    joined.peer_id, joined.rejoined, joined.neighbours, joined._timeouts = "me", 0, neighbours, TimeoutSettings()
    joined.control = SimpleNamespace(knock=knock)
    joined.daemon = SimpleNamespace(end=lambda _: ended.append(looks))
    staying = asyncio.create_task(joined.stay_joined([], KnownPeers()))
    await asyncio.wait({over})
    staying.cancel()
    missed = [error is ConnectionAbortedError for error in answers]
    in_a_row = [end for end in range(MISSED, len(missed) + 1) if all(missed[end - MISSED : end])]
    assert ended == in_a_row[:1]


@given(st.integers(0, 300))
async def test_no_records_of_others_hide_the_relays_of_a_bootstrap_peer(others: int) -> None:
    """Records of relays carry no ticket, so one member may store two thousand of them under free names."""
    own = tuple(f"/ip4/192.0.2.1/tcp/{4001 + n}/p2p/{peer_of(bytes([n]) * 32)}" for n in range(4))
    told = {
        f"{n}": relay_record([f"/ip4/203.0.113.1/tcp/1/p2p/{peer_of((1000 + n).to_bytes(32))}"]) for n in range(others)
    }

    async def read(key: str) -> dict[str, bytes]:
        if others == 0:
            raise ConnectionAbortedError
        return told

    network: Any = Libp2pNetwork.__new__(Libp2pNetwork)
    network._own_relays, network.read = own, read
    network._context = SimpleNamespace(secret=RunSecret("run"))
    found = await network._relays()
    assert found[:4] == own
    assert len(found) == min(16, 4 + others)
