"""A run with an owner, in memory and virtual time: members converse, strangers and who is shut out get nothing."""

import asyncio
from collections.abc import Callable

import pytest
from admission_keys import NOW_S, OWNER, RUN, key, member, public
from sample_messages import ASKS, Ask
from user_errors import user_error

from noloco_node.admission.admission_hook import (
    LIST_LIFETIME_S,
    PATIENCE_S,
    SCHEMA,
    SHOWN_EVERY_S,
    TOPIC,
    AdmissionHook,
)
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import (
    MEMBER,
    InviteCredential,
    Right,
    encode,
    encode_list,
    grant,
    peer_of,
    signed_list,
)
from noloco_node.errors import Exit, UserError
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.sim.network.sim_network import SimNetwork

REFRESH_S = 10.0


class Swarm:
    """Peers by number, each with a network of its own."""

    def __init__(self, rule: str = "invited") -> None:
        self.hub, self.rule = SimNetwork(), rule
        self.heard: list[str] = []
        self.states: dict[str, AdmissionState] = {}
        self.hooks: dict[str, AdmissionHook] = {}

    def unix_time(self) -> float:
        return NOW_S + asyncio.get_running_loop().time()

    def network(self, number: int, ticket: bytes) -> PeerNetwork:
        peer = peer_of(public(number))
        state = self.states[peer] = AdmissionState(RUN, self.unix_time)
        state.pin(OWNER, self.rule)
        bare = self.hub.network(peer)
        hook = self.hooks[peer] = AdmissionHook(bare, state, ticket)
        return HookedNetwork(bare, hook)

    async def server(self, number: int) -> PeerNetwork:
        """A member that answers about everything."""
        network = self.network(number, member(number))

        async def answer(conversation: Conversation) -> None:
            while True:
                said = await conversation.receive()
                self.heard.append(said.text)
                await conversation.send(said)

        for topic in ("gossip/0", "run", "state/1"):
            await network.serve(topic, ASKS, answer)
        return network


async def asked(network: PeerNetwork, server: PeerNetwork, topic: str, text: str = "hello") -> str:
    async with network.talk(server.peer_id, topic, ASKS) as conversation:
        await conversation.send(Ask(text=text))
        return str((await conversation.receive()).text)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm("invited")


def revoked(number: int, *keys: int) -> bytes:
    return encode_list(signed_list(key(0), RUN, number, {public(each): NOW_S + 10**6 for each in keys}))


async def test_members_converse_and_read_each_other(swarm: Swarm) -> None:
    server, other = await swarm.server(1), swarm.network(2, member(2))
    for topic in ("gossip/0", "run", "state/1"):
        assert await asked(other, server, topic) == "hello"
    assert await other.publish("roster", other.peer_id, b"I am here", 60.0)
    assert await server.read_all(["roster", "nothing"]) == [{other.peer_id: b"I am here"}, {}]


def expired(number: int) -> bytes:
    return member(number, until=NOW_S - 1)


def forged(number: int) -> bytes:
    return encode((grant(key(9), RUN, MEMBER, NOW_S + 99, public(number)),))


def of_another_run(number: int) -> bytes:
    return encode((grant(key(0), "6" * 64, MEMBER, NOW_S + 99, public(number)),))


def of_another_peer(number: int) -> bytes:
    return member(number + 1)


@pytest.mark.parametrize("made", [lambda _: b"", forged, expired, of_another_run, of_another_peer])
async def test_whoever_has_no_good_ticket_gets_nothing(swarm: Swarm, made: Callable[[int], bytes]) -> None:
    server, stranger = await swarm.server(1), swarm.network(2, made(2))
    for topic in ("gossip/0", "run", "state/1"):
        with pytest.raises(ConnectionRefusedError, match="does not let us in"):
            await asked(stranger, server, topic)
    # Nor where it leaves the ticket out altogether.
    bare = swarm.hub.network(peer_of(public(4)))
    with pytest.raises(ConnectionError):
        await asked(bare, server, "run")
    with user_error(Exit.NOT_ADMITTED):
        await swarm.hooks[stranger.peer_id].enter([server.peer_id])
    await stranger.publish("roster", stranger.peer_id, b"I am here", 60.0)
    await bare.publish("roster", bare.peer_id, b"I am here", 60.0)
    assert await server.read_all(["roster"]) == [{}]
    assert swarm.heard == []


async def test_whoever_may_look_may_not_train(swarm: Swarm) -> None:
    ticket = encode((grant(key(0), RUN, Right.LOOK, NOW_S + 999, public(2)),))
    server, visitor = await swarm.server(1), swarm.network(2, ticket)
    assert await asked(visitor, server, "run") == "hello"
    with pytest.raises(ConnectionError, match="does not let it"):
        await asked(visitor, server, "gossip/0")
    await visitor.publish("roster", visitor.peer_id, b"I am here", 60.0)
    assert await server.read_all(["roster"]) == [{}]


async def test_a_ticket_ends_at_its_second_also_within_a_conversation(swarm: Swarm) -> None:
    server, other = await swarm.server(1), swarm.network(2, member(2, until=NOW_S + 100))
    async with other.talk(server.peer_id, "gossip/0", ASKS) as conversation:
        await conversation.send(Ask(text="before"))
        assert (await conversation.receive()).text == "before"
        await asyncio.sleep(100.0 - asyncio.get_running_loop().time())
        await conversation.send(Ask(text="after"))
        with pytest.raises(ConnectionError):
            await conversation.receive()
    assert swarm.heard == ["before"]


async def test_a_peer_learns_that_it_is_shut_out_though_it_reads_no_list(swarm: Swarm) -> None:
    """One of the peers that it has met is gone."""
    servers = [await swarm.server(number) for number in (1, 2)]
    victim, told = swarm.network(5, member(5)), swarm.states[servers[1].peer_id]
    for server in servers:
        await asked(victim, server, "gossip/0")
    showing = asyncio.create_task(swarm.hooks[victim.peer_id].stay_shown())
    await asyncio.sleep(2.5 * SHOWN_EVERY_S)
    assert not swarm.states[victim.peer_id].raw_revocations
    swarm.hub.kill(servers[0].peer_id)
    told.take_revocations(revoked(1, 5))
    await asyncio.sleep(2 * SHOWN_EVERY_S + PATIENCE_S)
    assert swarm.states[victim.peer_id].raw_revocations == told.raw_revocations
    showing.cancel()
    with pytest.raises(UserError, match="does not let us in"):
        await victim.read_all(["roster"])


async def test_a_peer_that_never_answers_about_a_ticket_is_not_waited_for(swarm: Swarm) -> None:
    """Neither before a conversation, nor within one where our ticket has changed."""
    server, caller = await swarm.server(1), swarm.network(2, member(2))
    async with caller.talk(server.peer_id, "gossip/0", ASKS) as conversation:

        async def never(conversation: Conversation) -> None:
            await conversation.receive()
            await asyncio.sleep(10**6)

        await swarm.hooks[server.peer_id]._network.serve(TOPIC, SCHEMA, never)
        swarm.hooks[caller.peer_id].held.raw = member(2, until=NOW_S + 10**7)
        with pytest.raises(ConnectionError):
            await conversation.send(Ask(text="hello"))
    with pytest.raises(ConnectionError):
        await asked(caller, server, "gossip/0")
    assert asyncio.get_running_loop().time() < 3 * PATIENCE_S


async def test_a_list_that_the_dht_did_not_take_is_published_at_the_next_reading(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = swarm.network(1, member(1)), swarm.network(2, member(2))
    bare, tries = swarm.hooks[first.peer_id]._network, 0
    publish = bare.publish

    async def fails_once(key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        nonlocal tries
        tries += 1
        return tries > 1 and await publish(key, subkey, value, lifetime_s)

    monkeypatch.setattr(bare, "publish", fails_once)
    swarm.states[first.peer_id].take_revocations(revoked(1, 5))
    for _ in range(3):
        await first.read_all(["roster"])
        await other.read_all(["roster"])
    assert swarm.states[other.peer_id].raw_revocations == swarm.states[first.peer_id].raw_revocations
    assert tries == 2


async def test_no_call_waits_for_a_ticket_that_is_shown_again(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    server, caller = await swarm.server(1), swarm.network(5, member(5))
    await asked(caller, server, "gossip/0")
    hook = swarm.hooks[caller.peer_id]

    async def show(_: str) -> bytes:
        await asyncio.sleep(PATIENCE_S)
        return b""

    monkeypatch.setattr(hook, "_show", show)
    showing = asyncio.create_task(hook.stay_shown())
    await asyncio.sleep(SHOWN_EVERY_S + 1.0)
    async with asyncio.timeout(1.0):
        assert await asked(caller, server, "gossip/0") == "hello"
    showing.cancel()


async def test_whoever_is_revoked_is_out_everywhere_within_a_minute(swarm: Swarm) -> None:
    """Told to one peer alone, which leaves soon after: the list goes on by way of the others."""
    servers = [await swarm.server(number) for number in (1, 2, 3)]
    victim = swarm.network(5, member(5))
    assert [await asked(victim, server, "gossip/0") for server in servers] == ["hello"] * 3

    async def live(network: PeerNetwork) -> None:
        while True:
            await network.publish("roster", network.peer_id, b"I am here", 60.0)
            await network.read_all(["roster"])
            await asyncio.sleep(REFRESH_S)

    tasks = [asyncio.create_task(live(network)) for network in (*servers, victim)]
    await asyncio.sleep(1.0)
    owner = swarm.network(6, encode((grant(key(0), RUN, Right.LOOK, NOW_S + 999, public(6)),)))
    swarm.states[owner.peer_id].take_revocations(revoked(1, 5))
    await swarm.hooks[owner.peer_id].enter([servers[0].peer_id])
    begun_s = asyncio.get_running_loop().time()
    await asyncio.sleep(2 * REFRESH_S)
    tasks[0].cancel()
    for server in servers:
        with pytest.raises(ConnectionError):
            await asked(victim, server, "gossip/0")
    for server in servers[1:]:
        (found,) = await server.read_all(["roster"])
        assert found is not None
        assert server.peer_id in found
        assert victim.peer_id not in found
    assert asyncio.get_running_loop().time() - begun_s < 60.0
    with pytest.raises(ConnectionRefusedError, match="no member"):
        await asked(servers[1], victim, "gossip/0")
    # It learns of it itself, and says why.
    assert tasks[-1].done()
    error = tasks[-1].exception()
    assert isinstance(error, UserError)
    assert error.code is Exit.NOT_ADMITTED
    assert "shut you out" in error.why
    # Newcomers know of it as long as anybody is there.
    await asyncio.sleep(2 * LIST_LIFETIME_S)
    newcomer = await swarm.server(7)
    await newcomer.read_all(["roster"])
    with pytest.raises(ConnectionError):
        await asked(victim, newcomer, "gossip/0")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_invitation_is_for_whoever_shows_it_first(swarm: Swarm) -> None:
    link = grant(key(0), RUN, MEMBER | Right.ONCE, NOW_S + 999, public(8))
    invitation = InviteCredential((link,), (8).to_bytes(32))

    def holder(number: int, rights: Right) -> PeerNetwork:
        ticket = invitation.ticket(RUN, peer_of(public(number)), rights, NOW_S, None)
        return swarm.network(number, ticket or b"")

    looker, first, second = holder(4, Right.LOOK), holder(2, MEMBER), holder(3, MEMBER)

    server = await swarm.server(1)
    assert await asked(looker, server, "run") == "hello"
    assert await asked(first, server, "gossip/0") == "hello"
    with pytest.raises(ConnectionError, match="used by somebody else"):
        await asked(second, server, "gossip/0")
    assert await asked(holder(5, Right.LOOK), server, "run") == "hello"
    # Revoked, it ends for all who came by it.
    swarm.states[server.peer_id].take_revocations(revoked(1, 8))
    for network in (first, looker):
        with pytest.raises(ConnectionError, match="shut out all that came by its invite"):
            await asked(network, server, "run")


async def test_a_listed_run_takes_no_invitations() -> None:
    swarm = Swarm("listed")
    link = grant(key(0), RUN, MEMBER | Right.ONCE, NOW_S + 999, public(8))
    ticket = InviteCredential((link,), (8).to_bytes(32)).ticket(RUN, peer_of(public(2)), MEMBER, NOW_S, None)
    server = await swarm.server(1)
    with pytest.raises(ConnectionError, match="not one of this run's owner"):
        await asked(swarm.network(2, ticket or b""), server, "gossip/0")
    assert await asked(swarm.network(3, member(3)), server, "gossip/0") == "hello"
