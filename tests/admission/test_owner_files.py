"""The owner of a run, offline: a key that nobody else reads, invites, and whoever is shut out."""

import asyncio
import errno
import fcntl
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from admission_keys import key, public
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner
from user_errors import user_error

import noloco_node
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.owner_files import (
    IssuedEntry,
    MemberList,
    alone_with_members,
    key_file,
    load_key,
    load_members,
    make_key,
    members_file,
    save_key,
    save_members,
    with_revoked,
)
from noloco_node.admission.ticket import MEMBER, MOST_REVOKED, Right, encode, encode_list, peer_of, signed_list
from noloco_node.admission.ticket_service import OPEN_DAYS, TicketSigner
from noloco_node.cli import members
from noloco_node.cli.main import app
from noloco_node.cli.members import MemberAction, MemberOptions, clock_note, confirmation
from noloco_node.errors import Exit, UserError
from noloco_node.network.swarm_clock import CLOCK_DOUBT_S
from noloco_node.observe.swarm_view import short
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.admissions import HostedAdmissions
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC, RunFileText

PLACE = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
PEER, OTHER = peer_of(public(1)), peer_of(public(2))


class Owner:
    """A run file with its key, and the command line."""

    def __init__(self, directory: Path, rule: str) -> None:
        self.run = directory / "run.toml"
        assert self.call("init", str(self.run), "--admission", rule)
        self.recipe = RunFileText(self.run.read_text(), "the owner's")
        self.base = invites.format(self.recipe.digest, [PLACE])

    def call(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, arguments)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.output.strip()

    def members(self, action: str, *more: str) -> str:
        return self.call("members", action, *more, "--run", str(self.run))

    def invited(self, *more: str) -> invites.Invite:
        return invites.parse(self.members("invite", *more, "--invite", self.base))

    def state(self) -> AdmissionState:
        """Return what a peer knows that has read the run file and the owner's list."""
        admission, state = self.recipe.run.admission, AdmissionState(self.recipe.digest, lambda: 1.8e9)
        assert admission.owner is not None
        state.pin(bytes.fromhex(admission.owner), admission.rule)
        state.take_revocations(load_members(self.run).signed)
        return state


def test_the_key_is_its_owner_s_alone_and_not_in_the_run_file(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "invited")
    path = key_file(owner.run)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in owner.run.read_text()
    # The same key again: what was signed with it stays good.
    before = path.read_bytes()
    said = owner.call("init", str(owner.run), "--force", "--admission", "open")
    assert path.read_bytes() == before
    assert f"Wrote {path}" not in said.replace("\n", " ")
    save_key(owner.run, make_key(tmp_path / "another.toml"))
    assert path.read_bytes() == before


@pytest.mark.parametrize("rule", ["open", "invited", "listed"])
def test_a_named_peer_is_let_in_until_it_shut_out(tmp_path: Path, rule: str) -> None:
    owner = Owner(tmp_path, rule)
    invite = owner.invited(PEER, "--note", "Ada", "--days", "20000")
    ticket = invite.credential.ticket(invite.digest, PEER, MEMBER, 0.0, None)
    assert ticket is not None
    assert owner.state().show(PEER, ticket) == ""
    assert "Ada" in owner.members("list")
    assert "shut out until" in owner.members("revoke", PEER)
    assert "shut it out" in owner.state().show(PEER, ticket)
    assert "shut out" in owner.members("list")
    assert load_members(owner.run).number == 1


def test_a_revocation_lasts_as_long_as_the_longest_ticket(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "listed")
    ticket = owner.invited(PEER, "--days", "20000").credential
    owner.invited(PEER, "--days", "7")
    owner.members("revoke", PEER)
    assert load_members(owner.run).revoked[public(1).hex()] == ticket.chain[0].until
    assert "shut it out" in owner.state().show(PEER, encode(ticket.chain))


@pytest.mark.parametrize(("rule", "days"), [("open", OPEN_DAYS), ("invited", 90)])
def test_a_peer_that_no_entry_names_is_out_for_as_long_as_it_may_have_a_ticket(
    tmp_path: Path, rule: str, days: float
) -> None:
    """In an open run it has one of a bootstrap peer's; elsewhere it came by some invitation in the list."""
    owner = Owner(tmp_path, rule)
    if rule == "invited":
        owner.invited("--days", "90")
    owner.members("revoke", OTHER)
    left_s = load_members(owner.run).revoked[public(2).hex()] - time.time()
    assert left_s == pytest.approx(days * 86400, abs=60)


@pytest.mark.parametrize("by", ["invite", "delegate"])
def test_a_named_peer_is_out_for_as_long_as_it_may_have_another_ticket(tmp_path: Path, by: str) -> None:
    """It has come by a single-use invite, or by a delegate, before the owner named it for a shorter time."""
    owner, days = Owner(tmp_path, "invited"), ("--days", "20000")
    digest, other = owner.recipe.digest, key(2)
    if by == "invite":
        invite = owner.invited(*days)
        ticket = invite.credential.ticket(digest, PEER, MEMBER, 0.0, None)
    else:
        invite = owner.invited(OTHER, "--may-sign", *days)
        ticket = TicketSigner(other, invite.credential.chain).ticket(digest, PEER, MEMBER, 2**40)
    assert ticket is not None
    assert owner.state().show(PEER, ticket) == ""
    owner.invited(PEER, "--days", "7")
    owner.members("revoke", PEER)
    assert "shut it out" in owner.state().show(PEER, ticket)


def test_the_list_says_what_has_expired(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "listed")
    entry = IssuedEntry(key=public(1).hex(), kind="ticket", until=int(time.time()))
    save_members(owner.run, MemberList(issued=(entry,)))
    owner.invited(OTHER, "--days", "9")
    first, second = owner.members("list").splitlines()
    assert "expired" in first
    assert "good" in second


def test_each_entry_of_the_list_is_one_line_and_its_columns_stand_below_each_other(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "invited")
    owner.invited(PEER, "--note", "two\nlines\x1b[31m")
    owner.invited("--note", "Ada")
    owner.members("ban", OTHER)
    lines = owner.members("list").splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    ids = [next((peer for peer in (PEER, OTHER) if peer in line), None) for line in lines]
    assert ids == [PEER, None, OTHER], "a line says which peer it means; a single-use invite is for none yet"
    assert len({line.index("until") for line in lines[:2]} | {lines[2].index("shut out until")}) == 1


def test_a_bootstrap_peer_says_a_command_that_a_shell_takes(tmp_path: Path) -> None:
    (directory := tmp_path / "a run").mkdir()
    owner = Owner(directory, "invited")
    hosted = HostedAdmissions(owner.recipe, owner.run, directory / "identity.key", None)
    words = shlex.split(hosted.advice(owner.base, "anywhere").partition(": ")[2])
    assert words == ["noloco-node", "members", "invite", "--run", str(owner.run), "--invite", owner.base]


def test_a_bootstrap_peer_sends_nobody_to_a_command_that_cannot_train_the_module_of_a_program(tmp_path: Path) -> None:
    run = noloco_node.init(tmp_path / "run.toml", nn.Linear(2, 2), steps=9)
    hosted = HostedAdmissions(RunFileText(run.read_text(), str(run)), run, tmp_path / "identity.key", None)
    advice = hosted.advice("noloco6:...", "anywhere")
    assert "noloco-node join" not in advice
    assert "the program that builds the module" in advice


def test_two_commands_at_once_lose_no_entry(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "invited")
    count, code = 4, "import sys; from noloco_node.cli.main import main; main()"
    words = ("members", "invite", "--run", str(owner.run), "--invite", owner.base)
    children = [subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL) for _ in range(count)]
    assert [child.wait(60) for child in children] == [0] * count
    assert len(load_members(owner.run).issued) == count


def test_without_a_bootstrap_peer_a_revocation_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    said = Owner(tmp_path, "open").members("revoke", PEER)
    assert re.search(r"not confirmed: no bootstrap peer was named[^$]*try: .*--invite", said)


@pytest.mark.parametrize("known", ["nobody", "nothing", "a later list"])
def test_a_bootstrap_peer_that_is_handed_the_list_confirms_it(tmp_path: Path, known: str) -> None:
    """One that has a later list takes no other: the owner works on an old copy of run.members."""
    owner, door = Owner(tmp_path, "listed"), peer_of(public(9))
    owner.members("ban", PEER)

    async def main() -> str:
        hub = SimNetwork()
        hosted = HostedAdmissions(owner.recipe, owner.run, tmp_path / "identity.key", None)
        if known != "nobody":
            network = await hosted.admitted(hub.network(door))
            await network.serve(TOPIC, SCHEMA, owner.recipe.serve)
        if known == "a later list":
            assert hosted._state.take_revocations(
                encode_list(signed_list(load_key(owner.run), hosted._state.run, 7, {}))
            )
        base = invites.parse(invites.format(owner.recipe.digest, [f"/ip4/192.0.2.1/tcp/4001/p2p/{door}"]))
        access = RunAccess(base, Right.LOOK, None, owner_key=load_key(owner.run))
        access.pin(owner.recipe.run)
        return await confirmation(access, hub.network(peer_of(public(8))), MemberOptions(run=owner.run))

    said = asyncio.run(main())
    assert ("confirmed: a bootstrap peer has taken list number 1" in said) == (known == "nothing")
    assert said.startswith("not confirmed: ") != (known == "nothing")
    assert ("has list number 7, later than yours" in said) == (known == "a later list")


KEYS = st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=9, unique=True)


@given(KEYS, st.data())
def test_the_last_letters_of_an_id_mean_the_one_peer_of_the_list_that_has_them(
    keys: list[str], data: st.DataObject
) -> None:
    drawn = {peer_of(bytes.fromhex(each)): each for each in keys}
    listed = MemberList(revoked=dict.fromkeys(keys, 1))
    peer = data.draw(st.sampled_from(sorted(drawn)))
    shown = data.draw(st.sampled_from(["", "..."])) + peer[-data.draw(st.integers(1, len(peer))) :]
    ending = shown.lstrip(".")
    if len(ending) >= 6 and sum(each.endswith(ending) for each in drawn) == 1:
        assert members._subject(shown, listed) == drawn[peer]
    else:
        with user_error(Exit.USAGE, "is meant by"):
            members._subject(shown, listed)


def test_an_ending_that_two_peers_of_the_list_have_names_neither() -> None:
    # A peer id is one number: ids whose numbers differ by a multiple of 58 ** 6 end in the same six letters.
    first, second = (int.to_bytes(number, 32) for number in (1, 1 + 58**6))
    ending = peer_of(first)[-6:]
    assert peer_of(second).endswith(ending)
    with user_error(Exit.USAGE, "More than one"):
        members._subject(ending, MemberList(revoked={first.hex(): 1, second.hex(): 1}))
    assert members._subject(ending, MemberList(revoked={first.hex(): 1})) == first.hex()


def test_a_peer_is_banned_and_let_back_by_the_letters_that_status_shows(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "listed")
    owner.invited(PEER)
    for action in ("ban", "lift"):
        assert PEER in owner.members(action, short(PEER))


def test_an_invitation_is_revoked_by_what_the_list_shows(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "invited")
    invite = owner.invited("--days", "20000")
    ticket = invite.credential.ticket(invite.digest, OTHER, MEMBER, 0.0, None)
    assert ticket is not None
    assert owner.state().show(OTHER, ticket) == ""
    owner.members("revoke", owner.members("list")[:12])
    assert "shut out all that came by its invite" in owner.state().show(OTHER, ticket)
    assert str(invite.credential) not in members_file(owner.run).read_text()


@pytest.mark.parametrize("rule", ["open", "invited", "listed"])
@pytest.mark.parametrize("action", ["revoke", "ban"])
def test_what_was_shut_out_comes_back_by_the_same_ticket_and_nobody_else_does(
    tmp_path: Path, rule: str, action: str
) -> None:
    owner = Owner(tmp_path, rule)
    credential = owner.invited(PEER, "--days", "20000").credential
    assert credential is not None
    peers_state = owner.state()
    owner.members(action, PEER, "--days", "20000")
    owner.members("ban", OTHER, "--days", "20000")
    before = load_members(owner.run)
    peers_state.take_revocations(before.signed)
    assert "let back in" in owner.members("lift", PEER)
    assert peers_state.take_revocations(load_members(owner.run).signed)
    assert peers_state.show(PEER, encode(credential.chain)) == ""
    assert peers_state.shut_out(OTHER)
    assert not peers_state.take_revocations(before.signed), "the earlier list says nothing any more"
    assert not peers_state.shut_out(PEER)
    assert "not shut out" in owner.members("lift", PEER), "only the list is handed over"
    assert load_members(owner.run).number == 3


def test_nobody_is_let_back_in_where_nobody_was_shut_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not shut out"):
        Owner(tmp_path, "open").members("lift", PEER)


@pytest.mark.parametrize("invite", ["nonsense", "", invites.format("a" * 64, [PLACE])])
@pytest.mark.parametrize("action", ["invite", "revoke", "ban", "lift"])
def test_nothing_is_written_where_the_invite_cannot_be_used(tmp_path: Path, action: str, invite: str) -> None:
    owner = Owner(tmp_path, "open")
    with pytest.raises(UserError, match=r"no invite|not a valid invite|another run"):
        owner.members(action, PEER, "--invite", invite)
    assert not members_file(owner.run).exists()


def test_no_day_is_too_near_or_too_far_away_for_a_list(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "open")
    assert "shut out until" in owner.members("ban", PEER, "--days", "36500")
    for days in ("0", "0.001", "-1", "36501", "1e300", "inf", "nan"):
        assert "Invalid value for '--days'" in owner.members("ban", OTHER, "--days", days)
    assert load_members(owner.run).number == 1


def test_a_peer_that_is_shut_out_is_invited_when_that_is_over(tmp_path: Path) -> None:
    """It is named by what the list shows of it, though nobody invited it."""
    owner = Owner(tmp_path, "open")
    owner.members("ban", PEER)
    until = load_members(owner.run).revoked
    owner.members("ban", owner.members("list")[:12], "--days", "60")
    assert load_members(owner.run).revoked.keys() == until.keys()
    assert load_members(owner.run).revoked[public(1).hex()] > until[public(1).hex()]
    with user_error(Exit.USAGE, "is shut out until"):
        owner.invited(PEER)
    assert not load_members(owner.run).issued
    owner.invited(OTHER)
    save_members(owner.run, MemberList(revoked={public(1).hex(): int(time.time())}))
    owner.invited(PEER)


REVOKED = b'{"revoked": {"%s": %d}}'
NO_TEXT = b'{"issued": [{"key": "%s", "kind": "\xff", "until": 1}]}' % (b"f" * 64)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b'{"number": "one"}',
        b'{"number": -1}',
        REVOKED % (b"f" * 64, 10**18),
        REVOKED % (b"g" * 64, 0),
        NO_TEXT,
    ],
)
def test_a_damaged_list_is_an_error_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    """Taken for an empty one, it would let in again who was shut out."""
    owner = Owner(tmp_path, "open")
    members_file(owner.run).write_bytes(content)
    for words in (("list",), ("ban", PEER), ("invite", PEER, "--invite", owner.base)):
        with user_error(Exit.CONFIG, "is damaged"):
            owner.members(*words)
    assert members_file(owner.run).read_bytes() == content


def test_a_disk_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "nowhere" / "run.toml"

    def lock() -> None:
        with alone_with_members(run):
            raise AssertionError("without a key there is nothing to lock")

    members_file(tmp_path / "run.toml").mkdir()
    refused = {
        "owner": [lambda: save_key(run, make_key(run)), lock],
        "members": [lambda: save_members(run, MemberList()), lambda: save_members(tmp_path / "run.toml", MemberList())],
    }
    for name, calls in refused.items():
        for call in calls:
            with pytest.raises(UserError, match=rf"run\.{name} cannot be read or written"):
                call()
    save_members(tmp_path / "other.toml", MemberList(number=3))

    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(UserError, match=r"other\.members cannot be read") as caught:
        load_members(tmp_path / "other.toml")
    assert "Input/output error" in caught.value.why


def test_a_list_on_a_network_disk_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks no file that is open for reading alone."""
    owner, flock = Owner(tmp_path, "listed"), fcntl.flock

    def nfs(file: int, how: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", nfs)
    owner.members("ban", PEER)
    assert load_members(owner.run).number == 1
    monkeypatch.setattr(os, "access", lambda *_: False)
    with user_error(Exit.STORAGE, "cannot be read or written"), alone_with_members(owner.run):
        raise AssertionError("a key that cannot be written cannot be locked there")


def test_a_list_holds_so_many_and_forgets_who_has_no_ticket_left(tmp_path: Path) -> None:
    key, later = make_key(tmp_path / "run.toml"), {f"{number:064x}": 200 for number in range(MOST_REVOKED)}
    full = with_revoked(MemberList(), key, "a" * 64, later, 100.0)
    assert (len(full.revoked), full.number) == (MOST_REVOKED, 1)
    with user_error(Exit.USAGE, f"{MOST_REVOKED + 1} tickets"):
        with_revoked(full, key, "a" * 64, {"f" * 64: 300}, 199.0)
    assert with_revoked(full, key, "a" * 64, {"f" * 64: 300}, 200.0).revoked == {"f" * 64: 300}


@pytest.mark.parametrize(
    ("rule", "arguments", "words"),
    [
        ("listed", ("invite", "--invite", "BASE"), "peers that are named"),
        ("open", ("invite", PEER), "needs addresses"),
        ("open", ("invite", "nobody", "--invite", "BASE"), "no peer id[^$]*a peer's key makes"),
        ("open", ("invite", "--may-sign", "--invite", "BASE"), "needs a peer id"),
        ("open", ("revoke",), "Which peer"),
        ("open", ("revoke", "0123456789ab"), "No key[^$]*6 or more[^$]*first digits[^$]*status --json"),
        ("open", ("ban", PEER[-8:]), "No key or peer of the owner's list is meant"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, rule: str, arguments: tuple[str, ...], words: str) -> None:
    owner = Owner(tmp_path, rule)
    with user_error(Exit.USAGE, words):
        owner.members(*(owner.base if each == "BASE" else each for each in arguments))


def test_only_whose_key_it_is_lets_anybody_in(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "invited")
    key_file(owner.run).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        owner.members("revoke", PEER)
    save_key(owner.run, make_key(owner.run))
    with user_error(Exit.CONFIG, "not the key of this run's owner"):
        owner.members("revoke", PEER)
    owner.run.write_text(owner.run.read_text().partition("[admission]")[0])
    with pytest.raises(UserError, match="has no owner"):
        owner.members("list")


@pytest.mark.parametrize("damage", ["directory", "text", "unreachable"])
def test_a_bootstrap_peer_outlives_a_list_that_it_cannot_read_and_takes_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    owner = Owner(tmp_path, "listed")
    hosted = HostedAdmissions(owner.recipe, owner.run, tmp_path / "identity.key", None)
    owner.members("revoke", PEER)
    path, said, threads = members_file(owner.run), list[str](), set[threading.Thread]()
    whole = path.with_suffix(".whole")
    path.rename(whole)
    if damage == "directory":
        path.mkdir()
    elif damage == "text":
        path.write_text("{")
    else:
        path.symlink_to(path)  # the system refuses to look at it, as at a file behind a server that is gone
    monkeypatch.setattr("noloco_node.swarm.admissions.WATCH_S", 0.0)
    monkeypatch.setattr("noloco_node.swarm.admissions.warn", said.append)

    async def main() -> None:
        loop, looks, read = asyncio.get_running_loop(), asyncio.Queue[None](), hosted._read_list

        def told_of() -> bytes:
            loop.call_soon_threadsafe(looks.put_nowait, None)
            return read()

        def take(raw: bytes) -> bool:
            threads.add(threading.current_thread())
            return takes(raw)

        takes = hosted._state.take_revocations
        monkeypatch.setattr(hosted, "_read_list", told_of)
        monkeypatch.setattr(hosted._state, "take_revocations", take)
        watching = asyncio.create_task(hosted.watch())
        for _ in range(3):
            await looks.get()
        path.rmdir() if damage == "directory" else path.unlink()
        whole.rename(path)
        for _ in range(3 + looks.qsize()):
            await looks.get()
        watching.cancel()

    asyncio.run(main())
    assert len(said) == 1
    assert str(path) in said[0]
    assert hosted.state.revocations is not None
    assert threads == {threading.main_thread()}, "where the lists of others are taken"


def test_two_changes_of_the_list_within_one_tick_of_the_file_system_are_both_taken(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "listed")
    owner.members("revoke", PEER)
    os.utime(members_file(owner.run), ns=(0, 0))
    hosted = HostedAdmissions(owner.recipe, owner.run, tmp_path / "identity.key", None)
    owner.members("revoke", public(1).hex())
    os.utime(members_file(owner.run), ns=(0, 0))
    assert hosted.state is not None
    assert hosted.state.take_revocations(hosted._read_list())


def test_a_list_that_is_no_file_lets_nobody_in(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "open")
    members_file(owner.run).mkdir()
    with user_error(Exit.STORAGE):
        HostedAdmissions(owner.recipe, owner.run, tmp_path / "identity.key", None)


@given(st.floats(-1e8, 1e8), st.sampled_from([MemberAction.REVOKE, MemberAction.BAN, MemberAction.LIFT]))
def test_an_owner_whose_clock_is_wrong_is_told_what_it_spoils(ahead_s: float, action: MemberAction) -> None:
    note = clock_note(action, ahead_s)
    assert bool(note) == (action is not MemberAction.LIFT and abs(ahead_s) >= CLOCK_DOUBT_S)
    assert ("behind" in note) == (bool(note) and ahead_s < 0.0)
    assert ("lift" in note) == (bool(note) and ahead_s > 0.0)
