"""`noloco-node members`: the owner of a run lets peers in and shuts them out, with its key and its list.

Only the last step of a revocation needs the network: the command hands the list to a bootstrap peer, which confirms it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission import owner_files
from noloco_node.admission.owner_files import TICKET
from noloco_node.admission.ticket import MEMBER, InviteCredential, Right, grant, key_of, peer_of
from noloco_node.admission.ticket_service import OPEN_DAYS
from noloco_node.cli.options import default_home, invite_of_run, invite_text
from noloco_node.errors import UserError, config_error, usage_error, user_error_of
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.machine.signals import run
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK, CLOCK_DOUBT_S
from noloco_node.node.health import wrong_clock
from noloco_node.observe.swarm_view import plain
from noloco_node.run.runfile import read_run_text
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess, connected
from noloco_node.swarm.admissions import load_owner_key
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.units import format_utc

DAY_S = 86400
LEAST_DAYS, MOST_DAYS = 0.01, 36500.0  # with less an invite has expired before anybody could use it
LEAST_LETTERS = 6  # of a key or a peer id that names an entry of the list
TRY = (
    "the same command again with --invite and the line of a bootstrap peer that runs; or start one with the"
    " run file beside which this list lies"
)


class MemberAction(StrEnum):
    LIST = "list"
    INVITE = "invite"
    REVOKE = "revoke"
    BAN = "ban"
    LIFT = "lift"


@dataclass(frozen=True)
class MemberOptions:
    """The options of `members`."""

    who: Annotated[
        str | None,
        typer.Argument(
            metavar="[PEER]",
            help="A peer id; of one in the list its last letters, or the first digits of its key, will do.",
        ),
    ] = None
    run: Annotated[Path, typer.Option(help="The run file, beside which the owner's key lies.")] = Path("run.toml")
    invite: Annotated[
        str | None,
        typer.Option(
            callback=invite_text,
            help="The line that a bootstrap peer printed, or a file that holds it: `invite` adds a credential to it, "
            "`revoke`, `ban` and `lift` hand that peer the list.",
        ),
    ] = None
    days: Annotated[
        float, typer.Option(metavar="X", min=LEAST_DAYS, max=MOST_DAYS, help="Days that the invite or the ban lasts.")
    ] = 30.0
    note: Annotated[str, typer.Option(help="The person it is for; only your list keeps it.", show_default=False)] = ""
    may_sign: Annotated[
        bool, typer.Option("--may-sign", help="Let the peer host a bootstrap peer that signs tickets for others.")
    ] = False


def members(
    action: Annotated[MemberAction, typer.Argument(metavar="ACTION", help="list, invite, revoke, ban or lift.")],
    options: MemberOptions,
) -> None:
    """Let peers into your run and shut them out, with the owner's key beside the run file.

    `invite` prints an invite for one identity: PEER's, or that of the first peer
    that shows it. `revoke` ends a ticket or such an invite, `ban` shuts a peer
    out for some days, `lift` ends either before its time; all three hand the list
    to a bootstrap peer, and say whether it has taken the list.
    """
    typer.echo(administer(action, options))
    if action in (MemberAction.REVOKE, MemberAction.BAN, MemberAction.LIFT):
        typer.echo(run(_revocation_report(action, options)))


def administer(action: MemberAction, options: MemberOptions) -> str:
    """Do what the owner asks for, and return what was done; `UserError` if it cannot be done."""
    recipe = RunFileText(read_run_text(options.run), str(options.run))
    if recipe.run.admission.owner_key is None:
        raise config_error(
            f"The run of {options.run} has no owner.",
            "its section [admission] names no key, so everybody who holds an invite takes part",
            "`noloco-node init --admission RULE` makes a key and a run file that names it",
        )
    if action is MemberAction.LIST:
        return _listed(owner_files.load_members(options.run), time.time())
    key = load_owner_key(options.run, recipe.run.admission)
    given = _given_invite(options, recipe.digest)  # a refusal comes before anything is written
    with owner_files.alone_with_members(options.run):
        if action is MemberAction.INVITE:
            return _invite(options, recipe, key, given)
        if action is MemberAction.LIFT:
            return _let_back(options, recipe, key)
        return _shut_out(options, recipe, key, is_ban=action is MemberAction.BAN)


def _invite(options: MemberOptions, recipe: RunFileText, key: Ed25519PrivateKey, base: invites.Invite | None) -> str:
    """Sign a ticket for a peer, or a single-use invite for the first peer that shows it; return the invite."""
    if base is None:
        raise _usage("An invite needs addresses.", "--invite with the line that `noloco-node bootstrap` printed")
    now_s, members = time.time(), owner_files.load_members(options.run)
    until = int(now_s + options.days * DAY_S)
    rights = MEMBER | (Right.SIGN if options.may_sign else Right(0))
    if options.who is not None:
        subject = key_of(options.who)
        if subject is None:
            hint = "what `noloco-node join` says first: we are 12D3KooW…"
            raise _usage(f"{options.who!r} is no peer id.", hint, "it is not what a peer's key makes")
        if (out_s := members.revoked.get(subject.hex(), 0)) > now_s:
            why = "whatever it shows is refused until then, an invite of today as well"
            raise _usage(
                f"{options.who} is shut out until {format_utc(out_s)}.", "`noloco-node members lift` first", why
            )
        kind, credential = TICKET, InviteCredential((grant(key, recipe.digest, rights, until, subject),))
    elif recipe.run.admission.rule == "listed" or options.may_sign:
        raise _usage(
            "This needs a peer id." if options.may_sign else "A listed run lets in only peers that are named.",
            "noloco-node members invite PEER, which the peer's `noloco-node join` says first: we are 12D3KooW…",
        )
    else:
        holder = Ed25519PrivateKey.generate()
        subject = holder.public_key().public_bytes_raw()
        link = grant(key, recipe.digest, rights | Right.ONCE, until, subject)
        kind, credential = "single-use invite", InviteCredential((link,), holder.private_bytes_raw())
    issued = owner_files.IssuedEntry(
        key=subject.hex(), kind=kind, until=until, note=options.note, may_sign=options.may_sign
    )
    owner_files.save_members(options.run, msgspec.structs.replace(members, issued=(*members.issued, issued)))
    return str(msgspec.structs.replace(base, credential=credential))


def _shut_out(options: MemberOptions, recipe: RunFileText, key: Ed25519PrivateKey, *, is_ban: bool) -> str:
    members, now_s = owner_files.load_members(options.run), time.time()
    subject = _subject(options.who, members)
    asked_s = int(now_s + options.days * DAY_S)
    until = asked_s if is_ban else _longest_life(subject, members, recipe.run.admission.rule, now_s) or asked_s
    revoked = {subject: max(until, members.revoked.get(subject, 0))}
    changed = owner_files.with_revoked(members, key, recipe.digest, revoked, now_s)
    owner_files.save_members(options.run, changed)
    return (
        f"shut out until {format_utc(revoked[subject])}: {peer_of(bytes.fromhex(subject))} and all that entered by it "
        f"(list number {changed.number})."
    )


def _let_back(options: MemberOptions, recipe: RunFileText, key: Ed25519PrivateKey) -> str:
    """Take a key off the list; peers believe the list with the highest number, whatever was on an earlier one."""
    members, now_s = owner_files.load_members(options.run), time.time()
    subject = _subject(options.who, members)
    peer = peer_of(bytes.fromhex(subject))
    if not members.number:
        raise _usage(f"{peer} is not shut out.", "`noloco-node members list` says who is", "there is nothing to lift")
    if subject not in members.revoked:  # lifted before, and perhaps no bootstrap peer has taken the list
        return f"not shut out: {peer} (list number {members.number})."
    changed = owner_files.with_revoked(members, key, recipe.digest, {subject: 0}, now_s)
    owner_files.save_members(options.run, changed)
    return (
        f"let back in, as long as its tickets last: {peer} and all that entered by it (list number {changed.number})."
    )


def _subject(who: str | None, members: owner_files.MemberList) -> str:
    """Return the key that the owner means."""
    if who is None:
        raise _usage(
            "Which peer?", "a peer id, its last letters, or the first digits of a key: `members list` has both"
        )
    key = key_of(who)
    if key is not None:
        return key.hex()
    part = who.lstrip(".")  # some screens write ...abcdefgh for an id
    listed = {*(each.key for each in members.issued), *members.revoked}
    found = {each for each in listed if each.startswith(part) or peer_of(bytes.fromhex(each)).endswith(part)}
    if len(part) < LEAST_LETTERS or len(found) != 1:
        many = "More than one key or peer" if len(part) >= LEAST_LETTERS and found else "No key or peer"
        raise _usage(
            f"{many} of the owner's list is meant by {who!r}.",
            "`noloco-node members list`; for a peer that is not in it the whole id, from `noloco-node status --json`",
            f"it is no peer id, and not {LEAST_LETTERS} or more of one id's last letters or one key's first digits",
        )
    return found.pop()


def _longest_life(subject: str, members: owner_files.MemberList, rule: str, now_s: float) -> int:
    """Return the latest end of a ticket that a key may have; 0 if it can have none.

    A peer may have entered by any single-use invite in the list, or by any delegate, whatever else the list says of it.
    """
    own = [each for each in members.issued if each.key == subject]
    of_invite = any(each.kind != TICKET for each in own)
    others = [each for each in members.issued if not of_invite and (each.kind != TICKET or each.may_sign)]
    lives = [each.until for each in own + others]
    if rule == "open":  # a bootstrap peer gives a ticket to every peer that asks
        lives.append(int(now_s) + OPEN_DAYS * DAY_S)
    return max((life for life in lives if life > now_s), default=0)


def _listed(members: owner_files.MemberList, now_s: float) -> str:
    def standing(entry: owner_files.IssuedEntry) -> str:
        if members.revoked.get(entry.key, 0) > now_s:
            return "shut out"
        return "good" if entry.until > now_s else "expired"

    def row(key: str, kind: str, rest: str) -> str:
        whose = "" if kind not in (TICKET, "peer") else f"  {peer_of(bytes.fromhex(key))}"
        return f"{key[:12]}  {kind:17}  {rest.rstrip()}{whose}"

    lines = [
        row(each.key, each.kind, f"until {format_utc(each.until)}  {standing(each):8}  {plain(each.note)}")
        for each in members.issued
    ]
    others = {key: until for key, until in members.revoked.items() if until > now_s}
    for each in members.issued:
        others.pop(each.key, None)
    lines += [row(key, "peer", f"shut out until {format_utc(others[key])}") for key in sorted(others)]
    return "\n".join(lines or ["nobody was named, invited or shut out"])


def _usage(what: str, hint: str, why: str = "`noloco-node members` was not told enough") -> UserError:
    return usage_error(what, why=why, hint=hint)


async def _revocation_report(action: MemberAction, options: MemberOptions) -> str:
    """Say whether a bootstrap peer of the run has the owner's list."""
    recipe = RunFileText(read_run_text(options.run), str(options.run))
    invite = _bootstrap_invite(options, recipe.digest)
    if invite is None:
        return _not_confirmed("no bootstrap peer was named, and none lives on this machine")
    access = RunAccess(invite, Right.LOOK, None, owner_key=owner_files.load_key(options.run))
    access.pin(recipe.run)
    settings = NetworkSettings(
        run=recipe.digest, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=tuple(map(str, invite.addresses))
    )
    try:
        async with connected(settings) as network:
            return await confirmation(access, network, options) + clock_note(action, CLOCK.ahead_s())
    except (UserError, ExceptionGroup) as error:
        known = user_error_of(error)
        if known is None:
            raise
        return _not_confirmed(f"{known.what} {known.why}")


async def confirmation(access: RunAccess, network: PeerNetwork, options: MemberOptions) -> str:
    """Hand the owner's list to the bootstrap peers of the invite, and return their answer."""
    members = owner_files.load_members(options.run)
    access.take_revocations(members.signed)
    await access.enter(network)
    assert access.admission is not None
    reasons: list[str] = []
    for peer in access.invite.peers:
        try:
            number = await access.admission.list_known_to(peer)
        except (ConnectionError, PermissionError) as error:
            reasons.append(str(error).replace(peer, f"...{peer[-8:]}"))
            continue
        if members.number <= number <= owner_files.load_members(options.run).number:  # another command may have added
            return f"confirmed: a bootstrap peer has taken list number {number}; the swarm has it within half a minute"
        later = f", later than yours: restore the latest {owner_files.members_file(options.run).name}"
        has = f"list number {number}{later * (number > members.number)}" if number >= 0 else "no list"
        reasons.append(f"...{peer[-8:]} has {has}")
    return _not_confirmed("; ".join(reasons))


def clock_note(action: MemberAction, ahead_s: float) -> str:
    """Return a line for an owner whose clock is wrong: by it a peer is shut out until some time; else nothing."""
    if action is MemberAction.LIFT or abs(ahead_s) < CLOCK_DOUBT_S:
        return ""
    # A peer stays shut out until the later of two times.
    lift = ", end this one with `lift`" if ahead_s > 0.0 else ""
    return f"\n{wrong_clock(ahead_s).brief}, and the time above with it: set it{lift}, and give the command again"


def _given_invite(options: MemberOptions, digest: str) -> invites.Invite | None:
    """Return the invite that was given, if any; `UserError` where it is none of this run."""
    hint = "the line that this run's bootstrap peer printed"
    return None if options.invite is None else invite_of_run(options.invite, digest, options.run, hint)


def _bootstrap_invite(options: MemberOptions, digest: str) -> invites.Invite | None:
    """Return the given invite, or that of a bootstrap peer of this run that lives on this machine."""
    if (given := _given_invite(options, digest)) is not None:
        return given
    try:
        kept = invites.parse(invites.found(None, default_home("bootstrap")))
    except UserError:
        return None
    return kept if kept.digest == digest else None


def _not_confirmed(why: str) -> str:
    return f"not confirmed: {why}\n  try: {TRY}"
