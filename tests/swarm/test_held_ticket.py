"""Tickets are renewed and replaced wherever one is held: by visitors, nodes that slept, and delegates."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from admission_keys import NOW_S, OWNER, admitted, key, public

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_hook import GRACE_S
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.owner_files import IssuedEntry, MemberList, save_members
from noloco_node.admission.ticket import (
    KEY_HEADER,
    LOOK_S,
    MEMBER,
    InviteCredential,
    Right,
    encode_list,
    grant,
    peer_of,
    signed_list,
)
from noloco_node.admission.ticket_service import TicketService, TicketSigner, is_work, work
from noloco_node.errors import Exit, UserError
from noloco_node.network.calls import ConversationPool
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage import atomic_file
from noloco_node.swarm import access, admissions, invite
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.admissions import HostedAdmissions
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC, RunFileText, RunRequest
from noloco_node.tasks import background

DOOR, DELEGATE, PEER, OTHER = 2, 3, 4, 5
DAY_S = 86400
ECHO = "gossip/0"


class OwnedRun:
    """A run with an owner whose bootstrap peer signs tickets, and a clock that may jump."""

    def __init__(self, rule: str) -> None:
        self.hub, self.jumped_s = SimNetwork(), 0.0
        self.recipe = RunFileText(
            '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'
            f'[admission]\nowner = "{OWNER.hex()}"\nrule = "{rule}"\n',
            "the owner's",
        )
        self.digest, self.rule, self.door = self.recipe.digest, rule, peer_of(public(DOOR))
        self.named, self.signs, self.asked = dict[bytes, int](), dict[bytes, int](), list[str]()
        self.state = AdmissionState(self.digest, self.now_s)
        self.state.pin(OWNER, rule)

    def now_s(self) -> float:
        return NOW_S + asyncio.get_running_loop().time() + self.jumped_s

    async def open(self) -> None:
        signer = TicketSigner(key(0))
        bare = self.hub.network(self.door)
        network = admitted(bare, self.state, signer.ticket(self.digest, self.door, MEMBER, NOW_S + 10**9))
        named = None if self.rule == "open" else lambda found: self.named.get(found, 0)
        service = TicketService(
            self.state,
            signer,
            self.now_s,
            named,
            lambda found: self.signs.get(found, 0),
        )

        async def answer(conversation: Conversation) -> None:
            self.asked.append(conversation.peer)
            await service.answer(conversation)

        await bare.serve(ticket_service.TOPIC, ticket_service.SCHEMA, answer)
        await network.serve(TOPIC, SCHEMA, self.recipe.serve)
        await network.serve("state/0", SCHEMA, echo)

    def access(self, credential: InviteCredential | None, rights: Right, home: Path | None = None) -> RunAccess:
        place = f"/ip4/192.0.2.1/tcp/4001/p2p/{self.door}"
        found = RunAccess(invite.parse(invite.format(self.digest, [place], credential)), rights, home, self.now_s)
        found.pin(self.recipe.run)
        return found

    async def enter(self, number: int, way: RunAccess) -> PeerNetwork:
        return await way.enter(self.hub.network(peer_of(public(number))))

    def named_until(self, number: int, until: int) -> InviteCredential:
        return InviteCredential((grant(key(0), self.digest, MEMBER, until, public(number)),))

    def revoke(self, number: int, *keys: int) -> bytes:
        raw = encode_list(signed_list(key(0), self.digest, number, {public(each): NOW_S + 10**9 for each in keys}))
        self.state.take_revocations(raw)
        return raw


async def echo(conversation: Conversation) -> None:
    while True:
        await conversation.send(await conversation.receive())


def played(rule: str, play: Callable[[OwnedRun], Awaitable[None]]) -> None:
    async def main() -> None:
        owned = OwnedRun(rule)
        await owned.open()
        await play(owned)

    run(main())


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for members takes no thread, which virtual time would not wait for."""

    async def here(_: object, run_id: str, peer: str) -> int:
        return work(run_id, peer, bits=4)

    monkeypatch.setattr(access.asyncio, "to_thread", here)
    monkeypatch.setattr(ticket_service, "is_work", partial(is_work, bits=4))


def home_of(number: int, directory: Path) -> Path:
    (directory / "identity.key").write_bytes(KEY_HEADER + number.to_bytes(32) + public(number))
    return directory


@pytest.mark.parametrize("renews", [True, False])
def test_whoever_looks_goes_on_for_longer_than_its_ticket_lasts(*, renews: bool) -> None:
    """Readings of the roster, and one conversation that lasts for hours; also where nobody renews ahead of time."""

    async def play(owned: OwnedRun) -> None:
        way = owned.access(InviteCredential(), Right.LOOK)
        network, said = await owned.enter(PEER, way), list[str]()

        async def readings() -> None:
            while True:
                await network.read_all(["roster"])
                await asyncio.sleep(10.0)

        async def nothing() -> None:
            await asyncio.sleep(0.0)

        async with (
            background(readings()),
            background(way.renew(said.append) if renews else nothing()),
            network.talk(owned.door, "state/0", SCHEMA) as conversation,
        ):
            for _ in range(30):
                await conversation.send(RunRequest())
                await conversation.receive()
                await asyncio.sleep(LOOK_S / 6)
        assert said == []

    played("open", play)


def test_the_owner_looks_by_its_key_whatever_the_rule() -> None:
    async def play(owned: OwnedRun) -> None:
        parsed = owned.access(None, Right.LOOK).invite
        with pytest.raises(UserError):
            await owned.enter(OTHER, owned.access(InviteCredential(), Right.LOOK))
        way = RunAccess(parsed, Right.LOOK, None, owned.now_s, owner=key(0))
        network = await owned.enter(PEER, way)
        way.pin(owned.recipe.run)
        for _ in range(4):
            assert await network.read_all(["roster"]) == [{}]
            await asyncio.sleep(LOOK_S / 2)
        assert peer_of(public(PEER)) not in owned.asked

    played("listed", play)


@pytest.mark.parametrize("comes_by", ["the open invite", "a single-use invite of its own"])
def test_a_kept_ticket_that_was_revoked_wins_over_nothing(tmp_path: Path, comes_by: str) -> None:
    async def play(owned: OwnedRun) -> None:
        home = home_of(PEER, tmp_path)
        link = grant(key(0), owned.digest, MEMBER | Right.SIGN, NOW_S + 400 * DAY_S, public(DELEGATE))
        kept = TicketSigner(key(DELEGATE), (link,)).ticket(
            owned.digest, peer_of(public(PEER)), MEMBER, NOW_S + 365 * DAY_S
        )
        (home / "ticket").write_bytes(owned.digest.encode() + b"\n" + kept)
        owned.revoke(1, DELEGATE)
        invitation = grant(key(0), owned.digest, MEMBER | Right.ONCE, NOW_S + 30 * DAY_S, public(8))
        own = InviteCredential((invitation,), (8).to_bytes(32))
        given = InviteCredential() if comes_by == "the open invite" else own
        network = await owned.enter(PEER, owned.access(given, MEMBER, home))
        assert await network.read_all(["roster"]) == [{}]
        # The next start needs nobody to sign.
        owned.hub.kill(peer_of(public(PEER)))
        owned.asked.clear()
        await owned.enter(PEER, owned.access(given, MEMBER, home))
        assert owned.asked == []

    played("open", play)


def test_a_node_whose_delegate_is_revoked_while_it_trains_asks_the_owner_s_bootstrap_peer() -> None:
    async def play(owned: OwnedRun) -> None:
        link = grant(key(0), owned.digest, MEMBER | Right.SIGN, NOW_S + 400 * DAY_S, public(DELEGATE))
        mine = grant(key(DELEGATE), owned.digest, MEMBER, NOW_S + 365 * DAY_S, public(PEER))
        network = await owned.enter(PEER, owned.access(InviteCredential((link, mine)), MEMBER))
        assert owned.asked == []
        raw = owned.revoke(1, DELEGATE)
        await owned.hub.network("x").publish(f"{owned.digest}/revocations", "x", raw, 60.0)
        await network.read_all(["roster"])
        assert len(owned.asked) == 1
        await network.publish("roster", network.peer_id, b"I am here", 90.0)
        assert await network.read_all(["roster"]) == [{network.peer_id: b"I am here"}]

    played("open", play)


def test_a_node_that_slept_over_the_end_of_its_ticket_asks_for_another_and_goes_on() -> None:
    async def play(owned: OwnedRun) -> None:
        owned.named[public(PEER)] = NOW_S + 100 * DAY_S
        way = owned.access(owned.named_until(PEER, NOW_S + 3 * DAY_S), MEMBER)
        network = await owned.enter(PEER, way)
        await network.read_all(["roster"])
        owned.jumped_s = 4.0 * DAY_S
        assert await network.read_all(["roster"]) == [{}]
        assert len(owned.asked) == 1
        assert way.admission is not None
        assert way.admission.held.until == NOW_S + 100 * DAY_S

    played("listed", play)


def test_an_expired_ticket_is_borne_for_a_while_where_nobody_answers() -> None:
    """A clock that was wrong for some seconds ends nothing; a silent run ends with a code that a service restarts."""

    async def play(owned: OwnedRun) -> None:
        network = await owned.enter(PEER, owned.access(owned.named_until(PEER, NOW_S + 3 * DAY_S), MEMBER))
        owned.hub.kill(owned.door)
        owned.jumped_s = 4.0 * DAY_S
        await network.read_all(["roster"])
        owned.jumped_s = 0.0
        await asyncio.sleep(GRACE_S)
        await network.read_all(["roster"])
        owned.jumped_s = 4.0 * DAY_S
        begun_s = asyncio.get_running_loop().time()

        async def readings() -> None:
            while True:
                await network.read_all(["roster"])
                await asyncio.sleep(10.0)

        with pytest.raises(UserError, match="Nobody gives us a ticket") as caught:
            await readings()
        assert GRACE_S <= asyncio.get_running_loop().time() - begun_s < 2 * GRACE_S
        assert caught.value.code is Exit.UNREACHABLE

    played("listed", play)


def test_a_full_disk_costs_the_kept_ticket_and_not_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    async def play(owned: OwnedRun) -> None:
        way = owned.access(owned.named_until(PEER, NOW_S + 2 * DAY_S), MEMBER, home_of(PEER, tmp_path))
        await owned.enter(PEER, way)
        monkeypatch.setattr(atomic_file, "write", full)
        monkeypatch.setattr(access, "say", said.append)
        async with background(way.renew(lambda _: None)):
            await asyncio.sleep(10 * DAY_S)
        assert way.admission is not None
        assert way.admission.held.until > NOW_S + 300 * DAY_S

    played("open", play)
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_pooled_conversation_with_a_peer_that_is_shut_out_ends_at_once() -> None:
    async def play(owned: OwnedRun) -> None:
        caller = await owned.enter(PEER, owned.access(owned.named_until(PEER, NOW_S + DAY_S), MEMBER))
        callee = await owned.enter(OTHER, owned.access(owned.named_until(OTHER, NOW_S + DAY_S), MEMBER))
        served = 0

        async def counted(conversation: Conversation) -> None:
            nonlocal served
            while True:
                said = await conversation.receive()
                served += 1
                await conversation.send(said)

        await callee.serve(ECHO, SCHEMA, counted)
        pool = ConversationPool(caller, ECHO, SCHEMA)
        for _ in range(3):
            async with pool.talk(callee.peer_id) as conversation:
                await conversation.send(RunRequest())
                await conversation.receive()
        raw = owned.revoke(1, OTHER)
        await owned.hub.network("x").publish(f"{owned.digest}/revocations", "x", raw, 60.0)
        await caller.read_all(["roster"])
        with pytest.raises(ConnectionRefusedError, match="shut it out"):
            async with pool.talk(callee.peer_id) as conversation:
                await conversation.send(RunRequest())
        assert served == 3

    played("listed", play)


def delegate(owned: OwnedRun, directory: Path, monkeypatch: pytest.MonkeyPatch, until: int) -> HostedAdmissions:
    monkeypatch.setattr(admissions.time, "time", owned.now_s)
    home_of(DELEGATE, directory)
    named = IssuedEntry(key=public(PEER).hex(), kind="ticket", until=NOW_S + 200 * DAY_S)
    save_members(directory / "run.toml", MemberList(issued=(named,)))
    link = grant(key(0), owned.digest, MEMBER | Right.SIGN, until, public(DELEGATE))
    place = f"/ip4/192.0.2.1/tcp/4001/p2p/{owned.door}"
    known = invite.parse(invite.format(owned.digest, [place], InviteCredential((link,))))
    return HostedAdmissions(owned.recipe, directory / "run.toml", directory / "identity.key", known)


@pytest.mark.parametrize("prolonged", [True, False])
def test_a_delegate_warns_for_days_and_goes_on_where_the_owner_prolongs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, prolonged: bool
) -> None:
    said: list[tuple[float, str]] = []

    async def play(owned: OwnedRun) -> None:
        async def here(function: Callable[..., object], *arguments: object) -> object:
            return function(*arguments)

        monkeypatch.setattr(admissions.asyncio, "to_thread", here)
        monkeypatch.setattr(admissions, "WATCH_S", 3600.0)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(admissions, "say", lambda text: said.append((loop.time(), text)))
        hosted = delegate(owned, tmp_path, monkeypatch, NOW_S + 30 * DAY_S)
        network = await hosted.admitted(owned.hub.network(peer_of(public(DELEGATE))))
        async with background(hosted.watch()):
            await asyncio.sleep(28 * DAY_S)
            if prolonged:
                owned.signs[public(DELEGATE)] = NOW_S + 90 * DAY_S
            await asyncio.sleep(4 * DAY_S)
            place = f"/ip4/192.0.2.1/tcp/4001/p2p/{network.peer_id}"
            parsed = invite.parse(invite.format(owned.digest, [place], InviteCredential()))
            newcomer = RunAccess(parsed, MEMBER, None, owned.now_s)
            if prolonged:
                assert await network.read_all(["roster"]) == [{}]
                await owned.enter(PEER, newcomer)
                assert newcomer.admission is not None
                assert newcomer.admission.held.until == NOW_S + 90 * DAY_S
            else:
                with pytest.raises(UserError) as caught:
                    await network.read_all(["roster"])
                assert caught.value.code is Exit.NOT_ADMITTED

    played("invited", play)
    warned = [at_s for at_s, text in said if "our ticket expires in" in text]
    assert 22.9 * DAY_S < warned[0] < 24 * DAY_S
    assert len(warned) < 20
    assert any("new ticket" in text for _, text in said) == prolonged
