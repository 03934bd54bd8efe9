"""How peers enter a run with an owner, and how visitors, nodes that slept and delegates renew their tickets."""

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from admission_keys import NOW_S, OWNER, admitted, key, public
from handlers import echo
from user_errors import user_error

from noloco_node.admission import admission_hook, ticket_service
from noloco_node.admission.admission_hook import GRACE_S
from noloco_node.admission.admission_state import MOST_PAUSE_S, RENEW_S, AdmissionState, HeldTicket
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
from noloco_node.admission.ticket_service import OPEN_DAYS, TicketService, TicketSigner, is_work, work
from noloco_node.errors import Exit, UserError
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.node.microbatches import ConversationPool
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.swarm import access, admissions, invite
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.admissions import HostedAdmissions
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC, RunFileText, RunRequest, fetch
from noloco_node.tasks import background

DOOR, DELEGATE, PEER, OTHER = 1, 3, 4, 5
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

    async def open(self, *, signs: bool) -> None:
        signer = TicketSigner(key(0))
        bare = self.hub.network(self.door)
        ticket = signer.ticket(self.digest, self.door, MEMBER, NOW_S + 10**9)
        self.network = network = admitted(bare, self.state, ticket)
        named = None if self.rule == "open" else lambda found: self.named.get(found, 0)
        service = TicketService(self.state, signer.ticket, self.now_s, named, lambda found: self.signs.get(found, 0))

        async def answer(conversation: Conversation) -> None:
            self.asked.append(conversation.peer)
            await service.answer(conversation)

        if signs:
            await bare.serve(ticket_service.TOPIC, ticket_service.SCHEMA, answer)
        await network.serve(TOPIC, SCHEMA, self.recipe.serve)
        await network.serve("state/0", SCHEMA, echo)

    def access(
        self, credential: InviteCredential | None, rights: Right, home: Path | None = None, *, is_pinned: bool = True
    ) -> RunAccess:
        place = f"/ip4/192.0.2.1/tcp/4001/p2p/{self.door}"
        found = RunAccess(invite.parse(invite.format(self.digest, [place], credential)), rights, home, self.now_s)
        if is_pinned:
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


async def opened(rule: str, *, signs: bool = True) -> OwnedRun:
    owned = OwnedRun(rule)
    await owned.open(signs=signs)
    return owned


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work that takes no thread, which virtual time would not wait for; returns for whom it was done."""
    done: list[str] = []

    async def here(job: Callable[..., object], *args: Any) -> object:
        if job is not work:
            return job(*args)
        run_id, peer = args
        done.append(peer)
        return work(run_id, peer, bits=4)

    monkeypatch.setattr(access.asyncio, "to_thread", here)
    monkeypatch.setattr(ticket_service, "is_work", lambda run, peer, nonce, _: is_work(run, peer, nonce, bits=4))
    return done


def home_of(number: int, directory: Path) -> Path:
    (directory / "identity.key").write_bytes(KEY_HEADER + number.to_bytes(32) + public(number))
    return directory


async def enter(
    owned: OwnedRun, number: int, credential: InviteCredential | None, rights: Right, home: Path | None = None
) -> None:
    """Enter by an invite, and fetch the run file."""
    way = owned.access(credential, rights, home, is_pinned=False)
    network = await owned.enter(number, way)
    recipe = await fetch(network, way.invite.peers, owned.digest)
    way.pin(recipe.run)
    assert recipe.text == owned.recipe.text
    assert (way.state is None) == (credential is None)


async def test_an_open_run_gives_a_ticket_once_and_the_home_keeps_it(tmp_path: Path, little_work: list[str]) -> None:
    owned = await opened("open")
    home = home_of(2, tmp_path)
    await enter(owned, 2, InviteCredential(), MEMBER, home)
    owned.hub.kill(peer_of(public(2)))
    await enter(owned, 2, InviteCredential(), MEMBER, home)
    assert little_work == [peer_of(public(2))]
    await enter(owned, 3, InviteCredential(), Right.LOOK)
    assert little_work == [peer_of(public(2))]
    # A home that was copied to another identity asks for its own.
    await enter(owned, 4, InviteCredential(), MEMBER, home)
    assert len(little_work) == 2


async def test_an_invitation_and_a_name_need_nobody_to_ask(tmp_path: Path) -> None:
    owned = await opened("invited", signs=False)
    until = NOW_S + 999
    link = grant(key(0), owned.digest, MEMBER | Right.ONCE, until, public(8))
    invitation = InviteCredential((link,), (8).to_bytes(32))
    await enter(owned, 2, invitation, MEMBER)
    await enter(owned, 3, invitation, Right.LOOK)
    with user_error(Exit.NOT_ADMITTED, "does not let us in") as caught:
        await enter(owned, 4, invitation, MEMBER)
    assert "used by somebody else" in caught.value.why
    named = InviteCredential((grant(key(0), owned.digest, MEMBER, until, public(5)),))
    await enter(owned, 5, named, MEMBER)
    with pytest.raises(UserError, match="does not let us in"):
        await enter(owned, 6, named, MEMBER)
    # With the home of the named peer a passing identity may look, and no more.
    await enter(owned, 7, named, Right.LOOK, home_of(5, tmp_path))
    with pytest.raises(UserError, match="does not let us in"):
        await enter(owned, 9, named, MEMBER, home_of(5, tmp_path))


@pytest.mark.parametrize("rights", [MEMBER, Right.LOOK])
async def test_an_invite_that_has_expired_is_said_to_have_expired(rights: Right) -> None:
    """An owner whose clock is behind hands out such ones."""
    owned = await opened("invited")
    link = grant(key(0), owned.digest, MEMBER | Right.ONCE, NOW_S - 1, public(8))
    with pytest.raises(UserError, match="does not let us in") as caught:
        await enter(owned, 2, InviteCredential((link,), (8).to_bytes(32)), rights)
    day = time.strftime("%Y-%m-%d", time.gmtime(NOW_S - 1))
    assert caught.value.why.startswith(f"the ticket that you have expired on {day}; the bootstrap peer says")


async def test_whoever_is_shut_out_is_told_so() -> None:
    owned = await opened("open")
    owned.state.take_revocations(encode_list(signed_list(key(0), owned.digest, 1, {public(2): NOW_S + 9})))
    with pytest.raises(UserError, match="does not let us in") as caught:
        await enter(owned, 2, InviteCredential(), MEMBER)
    assert "shut you out" in caught.value.why


async def test_a_visitor_whose_clock_is_hours_behind_is_told_so() -> None:
    """By that clock it signs a ticket to look which has expired for others: another invite would not help."""
    owned, seed = await opened("invited"), key(7)
    link = grant(key(0), owned.digest, MEMBER | Right.ONCE, NOW_S + 10**6, public(7))
    parsed = owned.access(InviteCredential((link,), seed.private_bytes_raw()), Right.LOOK).invite
    with pytest.raises(UserError, match="does not let us in") as caught:
        await owned.enter(PEER, RunAccess(parsed, Right.LOOK, None, lambda: owned.now_s() - 3 * LOOK_S))
    assert "is this machine's clock right?" in caught.value.why


async def test_a_door_that_signs_and_refuses_again_and_again_ends_the_attempt() -> None:
    owned, shown = OwnedRun("open"), list[bytes]()
    door = owned.hub.network(owned.door)

    async def refuse(conversation: Conversation) -> None:
        shown.append((await conversation.receive()).ticket)
        assert len(shown) < 50
        await conversation.send(admission_hook.TicketVerdict(refusal="its ticket has expired", revocations=b""))

    async def sign(conversation: Conversation) -> None:
        await conversation.receive()
        until = NOW_S + 10**6 + len(shown)
        ticket = TicketSigner(key(0)).ticket(owned.digest, conversation.peer, MEMBER, until)
        await conversation.send(ticket_service.TicketReply(ticket=ticket, refusal=""))

    await door.serve(admission_hook.TOPIC, admission_hook.SCHEMA, refuse)
    await door.serve(ticket_service.TOPIC, ticket_service.SCHEMA, sign)
    with pytest.raises(UserError, match="does not let us in"):
        await owned.enter(PEER, owned.access(InviteCredential(), MEMBER))
    assert len(set(shown)) == len(shown) == admission_hook.MOST_TRIES


async def test_without_a_pass_a_run_with_an_owner_gives_nothing() -> None:
    owned = await opened("open")
    with user_error(Exit.NOT_ADMITTED, "does not let us in") as caught:
        await enter(owned, 2, None, MEMBER)
    assert "no ticket" in caught.value.why


@pytest.mark.parametrize("renews", [True, False])
async def test_whoever_looks_goes_on_for_longer_than_its_ticket_lasts(*, renews: bool) -> None:
    """Readings of the roster, and one conversation that lasts for hours; also where nobody renews ahead of time."""
    owned = await opened("open")
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


async def test_the_owner_looks_by_its_key_whatever_the_rule() -> None:
    owned = await opened("listed")
    parsed = owned.access(None, Right.LOOK).invite
    with pytest.raises(UserError):
        await owned.enter(OTHER, owned.access(InviteCredential(), Right.LOOK))
    way = RunAccess(parsed, Right.LOOK, None, owned.now_s, owner_key=key(0))
    network = await owned.enter(PEER, way)
    way.pin(owned.recipe.run)
    for _ in range(4):
        assert await network.read_all(["roster"]) == [{}]
        await asyncio.sleep(LOOK_S / 2)
    assert peer_of(public(PEER)) not in owned.asked


@pytest.mark.parametrize("comes_by", ["the open invite", "a single-use invite of its own"])
async def test_a_kept_ticket_that_was_revoked_wins_over_nothing(tmp_path: Path, comes_by: str) -> None:
    owned = await opened("open")
    home = home_of(PEER, tmp_path)
    link = grant(key(0), owned.digest, MEMBER | Right.SIGN, NOW_S + 400 * DAY_S, public(DELEGATE))
    kept = TicketSigner(key(DELEGATE), (link,)).ticket(owned.digest, peer_of(public(PEER)), MEMBER, NOW_S + 365 * DAY_S)
    place = HomePaths(home).run(owned.digest).ticket
    place.parent.mkdir(parents=True)
    place.write_bytes(kept)
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


async def test_a_node_whose_delegate_is_revoked_while_it_trains_asks_the_owner_s_bootstrap_peer() -> None:
    owned = await opened("open")
    link = grant(key(0), owned.digest, MEMBER | Right.SIGN, NOW_S + 400 * DAY_S, public(DELEGATE))
    mine = grant(key(DELEGATE), owned.digest, MEMBER, NOW_S + 365 * DAY_S, public(PEER))
    network = await owned.enter(PEER, owned.access(InviteCredential((link, mine)), MEMBER))
    assert owned.asked == []
    owned.revoke(1, DELEGATE)
    await owned.network.read_all(["roster"])  # which publishes the list
    await network.read_all(["roster"])
    assert len(owned.asked) == 1
    await network.publish("roster", network.peer_id, b"I am here", 90.0)
    assert await network.read_all(["roster"]) == [{network.peer_id: b"I am here"}]


async def test_a_node_that_slept_over_the_end_of_its_ticket_asks_for_another_and_goes_on() -> None:
    owned = await opened("listed")
    owned.named[public(PEER)] = NOW_S + 100 * DAY_S
    way = owned.access(owned.named_until(PEER, NOW_S + 3 * DAY_S), MEMBER)
    network = await owned.enter(PEER, way)
    await network.read_all(["roster"])
    owned.jumped_s = 4.0 * DAY_S
    assert await network.read_all(["roster"]) == [{}]
    assert len(owned.asked) == 1
    assert way.admission.held.until == NOW_S + 100 * DAY_S


async def test_a_clock_that_jumps_ahead_ends_no_node_at_once_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it each ticket has expired, also one that was signed a moment ago: nobody has refused us anything."""
    owned, ahead_s = await opened("open"), [0.0]
    right = owned.now_s
    monkeypatch.setattr(owned, "now_s", lambda: right() + ahead_s[0])
    way = owned.access(InviteCredential(), MEMBER)
    network = await owned.enter(PEER, way)
    held = way.admission.held.raw
    for ahead_s[0] in (100.0 * DAY_S, 0.0):
        for _ in range(3):
            await network.read_all(["anything"])
            await asyncio.sleep(GRACE_S / 4)
    assert way.admission.held.raw == held
    assert len(owned.asked) < 8, "not at each use"
    ahead_s[0] = 100.0 * DAY_S
    await network.read_all(["anything"])
    await asyncio.sleep(GRACE_S + 1.0)
    with user_error(Exit.UNREACHABLE, "Nobody gives us a ticket") as caught:
        await network.read_all(["anything"])
    assert "clock" in caught.value.why


async def test_an_expired_ticket_is_borne_for_a_while_where_nobody_answers() -> None:
    """A clock that was wrong for some seconds ends nothing; a silent run ends with a code that a service restarts."""
    owned = await opened("listed")
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

    with user_error(Exit.UNREACHABLE, "Nobody gives us a ticket"):
        await readings()
    assert GRACE_S <= asyncio.get_running_loop().time() - begun_s < 2 * GRACE_S


@pytest.fixture
def rarely_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ticket be shown every hour, not every 15 seconds, in tests that last for months of virtual time."""
    monkeypatch.setattr(admission_hook, "SHOWN_EVERY_S", 3600.0)


@pytest.mark.usefixtures("rarely_shown")
async def test_a_full_disk_costs_the_kept_ticket_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    owned = await opened("open")
    way = owned.access(owned.named_until(PEER, NOW_S + 2 * DAY_S), MEMBER, home_of(PEER, tmp_path))
    await owned.enter(PEER, way)
    monkeypatch.setattr(atomic_file, "write", full)
    monkeypatch.setattr(access, "say", said.append)
    async with background(way.renew(lambda _: None)):
        await asyncio.sleep(5 * DAY_S)
        assert way.admission.held.until > NOW_S + (OPEN_DAYS - 1) * DAY_S
        assert len(said) == 1
        await asyncio.sleep(60 * DAY_S)
        assert way.admission.held.until > NOW_S + 65 * DAY_S + RENEW_S - MOST_PAUSE_S, (
            "a week without signing peers is no harm"
        )
    assert "No space left" in said[0]


async def test_a_pooled_conversation_with_a_peer_that_is_shut_out_ends_at_once() -> None:
    owned = await opened("listed")
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
    owned.revoke(1, OTHER)
    await owned.network.read_all(["roster"])  # which publishes the list
    await caller.read_all(["roster"])
    with pytest.raises(ConnectionRefusedError, match="shut it out"):
        async with pool.talk(callee.peer_id) as conversation:
            await conversation.send(RunRequest())
    assert served == 3


def delegate(owned: OwnedRun, directory: Path, monkeypatch: pytest.MonkeyPatch, until: int) -> HostedAdmissions:
    async def here(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    monkeypatch.setattr(admissions.asyncio, "to_thread", here)
    monkeypatch.setattr(admissions.CLOCK, "unix_s", owned.now_s)
    home_of(DELEGATE, directory)
    named = IssuedEntry(key=public(PEER).hex(), kind="ticket", until=NOW_S + 200 * DAY_S)
    save_members(directory / "run.toml", MemberList(issued=(named,)))
    link = grant(key(0), owned.digest, MEMBER | Right.SIGN, until, public(DELEGATE))
    place = f"/ip4/192.0.2.1/tcp/4001/p2p/{owned.door}"
    known = invite.parse(invite.format(owned.digest, [place], InviteCredential((link,))))
    return HostedAdmissions(owned.recipe, directory / "run.toml", directory / "identity.key", known)


@pytest.mark.usefixtures("rarely_shown")
@pytest.mark.parametrize("prolonged", [True, False])
async def test_a_delegate_warns_for_days_and_goes_on_where_the_owner_prolongs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, prolonged: bool
) -> None:
    said: list[tuple[float, str]] = []

    owned = await opened("invited")
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
            assert newcomer.admission.held.until == NOW_S + 90 * DAY_S
        else:
            with user_error(Exit.NOT_ADMITTED):
                await network.read_all(["roster"])
    warned = [at_s for at_s, text in said if "our ticket expires in" in text]
    assert 22.9 * DAY_S < warned[0] < 24 * DAY_S
    assert len(warned) < 20
    assert any("new ticket" in text for _, text in said) == prolonged


async def test_what_fails_while_a_delegates_ticket_is_renewed_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("no such key")

    warned: list[str] = []
    owned = await opened("invited")
    monkeypatch.setattr(HeldTicket, "renew", fail)
    monkeypatch.setattr(admissions, "warn", warned.append)
    hosted = delegate(owned, tmp_path, monkeypatch, NOW_S + 30 * DAY_S)
    await hosted.admitted(owned.hub.network(peer_of(public(DELEGATE))))
    async with background(hosted.watch()):
        await asyncio.sleep(60.0)
    (line,) = warned
    assert line.startswith("renewing our ticket failed (ValueError: no such key)")
