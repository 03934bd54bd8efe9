"""Whether a bootstrap peer has taken a revocation: it is handed the owner's list, and says which one it has then."""

from __future__ import annotations

import time

from noloco_node.admission.admitted_network import AdmittedNetwork
from noloco_node.admission.owner_files import load_key, load_members
from noloco_node.admission.ticket import Right
from noloco_node.cli.option_groups.members import MemberOptions
from noloco_node.cli.options import default_home, invite_text
from noloco_node.errors import UserError, user_error_of
from noloco_node.libp2p.endpoint.settings import NetworkSettings
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.runfile import read_run_text
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.connection import connected
from noloco_node.swarm.run_distribution import RunFileText

TRY = (
    "`noloco-node members revoke` again with --invite and the line of a bootstrap peer that runs; or start one with the"
    " run file beside which this list lies"
)


async def report(options: MemberOptions) -> str:
    """Say in one line whether a bootstrap peer of the run has the owner's list."""
    recipe = RunFileText(read_run_text(options.run), str(options.run))
    invite = _bootstrap_invite(options, recipe.digest)
    if invite is None:
        return _not_confirmed("no bootstrap peer was named, and none lives on this machine")
    access = RunAccess(invite, Right.LOOK, None, time.time, owner=load_key(options.run))
    access.pin(recipe.run)
    settings = NetworkSettings(
        run=recipe.digest, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=tuple(map(str, invite.addresses))
    )
    try:
        async with connected(settings) as network:
            return await confirmation(access, network, options)
    except (UserError, ExceptionGroup) as error:
        known = user_error_of(error)
        if known is None:
            raise
        return _not_confirmed(f"{known.what} {known.why}")


async def confirmation(access: RunAccess, network: PeerNetwork, options: MemberOptions) -> str:
    """Hand the owner's list to the bootstrap peers of the invite, and say what they answer."""
    members = load_members(options.run)
    access.take_revocations(members.signed)
    admitted = await access.enter(network)
    assert isinstance(admitted, AdmittedNetwork)
    reasons: list[str] = []
    for peer in dict.fromkeys(access.invite.peers):
        try:
            number = await admitted.list_known_to(peer)
        except (ConnectionError, PermissionError, TimeoutError) as error:
            reasons.append(str(error).replace(peer, f"...{peer[-8:]}"))
            continue
        if number >= members.number:
            return f"confirmed: a bootstrap peer has taken list number {number}; the swarm has it within half a minute"
        reasons.append(f"...{peer[-8:]} has list number {number}" if number >= 0 else f"...{peer[-8:]} has no list")
    return _not_confirmed("; ".join(reasons))


def _bootstrap_invite(options: MemberOptions, digest: str) -> invites.Invite | None:
    """Return the invite that was given, or the one of a bootstrap peer of this run that lives on this machine."""
    if options.invite is not None:
        return invites.parse(invites.found(invite_text(options.invite), default_home("bootstrap")))
    try:
        kept = invites.parse(invites.found(None, default_home("bootstrap")))
    except UserError:
        return None
    return kept if kept.digest == digest else None


def _not_confirmed(why: str) -> str:
    return f"not confirmed: {why}\n  try: {TRY}"
