"""`noloco-node doctor`: look at this machine, visit the swarm of an invite, say what was found and what to do.

The addresses of the invite are tried one by one, each by a passing daemon of its own, so that each has its cause. Then
the swarm is visited as a node would join it, listening where it would listen, but without a record: nobody counts on a
doctor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from noloco_node.admission.ticket import Right
from noloco_node.doctor import machine_checks, swarm_checks
from noloco_node.doctor.findings import Finding, Grade, exit_code, fail, line, ok, verdict, warn
from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.libp2p.addresses import PeerAddress, check_announce, check_listen
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import EVERYWHERE, NetworkSettings
from noloco_node.network.interface import HookedNetwork, PeerNetwork
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.planning.bandwidth import MicrobatchBytes, microbatch_bytes
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.connection import connected
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import RunFileText, fetch

MOST_TRIED, AT_ONCE = 16, 4


class DoctorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the node would be started: what the doctor has to look at."""

    home: Path
    device: str = "auto"
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


async def examine(invite: str | None, wish: DoctorRequest) -> list[Finding]:
    """Return all findings, those of the machine first."""
    if invite is None:
        return [*machine_checks.look(wish.home, wish.device, ()), *_places(wish)]
    parsed = invites.parse(invite)
    tried = await _try_addresses(parsed)
    answering = [address for address, finding in tried if finding.grade is Grade.GOOD]
    if answering:
        found, needs = await _visit(msgspec.structs.replace(parsed, addresses=tuple(answering)), wish)
    else:
        hint = (
            "ask whoever sent it for a fresh one (any peer's `noloco-node status` prints one), and check that this "
            "machine is online"
        )
        found, needs = [fail("invite", "none of its addresses can be reached", hint)], ()
    return [
        *machine_checks.look(wish.home, wish.device, needs, parsed.digest),
        *(finding for _, finding in tried),
        *found,
    ]


def _places(wish: DoctorRequest) -> list[Finding]:
    """Return what is wrong with the addresses to listen on and to announce, without a swarm to try them in."""
    try:
        check_listen(wish.listen)
        check_announce(wish.announce)
    except UserError as error:
        return [fail("addresses", f"{error.what} {error.why}", error.hint)]
    return []


async def _try_addresses(parsed: invites.Invite) -> list[tuple[PeerAddress, Finding]]:
    """Try each address of an invite by itself, a few at a time: one that does not answer takes its while."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def attempt(address: PeerAddress) -> tuple[PeerAddress, Finding]:
        async with turns:
            return address, await _try_address(parsed.digest, address)

    return await asyncio.gather(*map(attempt, parsed.addresses[:MOST_TRIED]))


async def _try_address(digest: str, address: PeerAddress) -> Finding:
    about = f"bootstrap peer {address.transport}"
    # On the loopback interface: nothing is to be found out about this machine here.
    settings = NetworkSettings(run=digest, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=(str(address),))
    begun_s = asyncio.get_running_loop().time()
    try:
        async with Libp2pNetwork.open(settings):
            return ok(about, f"answers, {asyncio.get_running_loop().time() - begun_s:.1f} s after the start")
    except UserError as error:
        if error.code is not Exit.UNREACHABLE:
            return fail(about, f"{error.what} {error.why}", error.hint)
        cause = error.why.removeprefix(f"{address}: ")
        return warn(about, cause, "ask its owner; one address that answers is enough to join")


async def _visit(invite: invites.Invite, wish: DoctorRequest) -> tuple[list[Finding], Sequence[machine_checks.Need]]:
    """Visit the swarm by the addresses of an invite; return findings, and what each stage needs of a machine."""
    digest, answering, access = invite.digest, invite.addresses, RunAccess(invite, Right.LOOK, wish.home)
    settings = NetworkSettings(
        run=digest,
        listen=wish.listen or EVERYWHERE,
        announce=wish.announce,
        bootstrap=tuple(map(str, answering)),
        accepts=access.accepts,
    )
    found: list[Finding] = []
    needs: Sequence[machine_checks.Need] = ()
    try:
        async with connected(settings) as whole:
            # A peer that does not take calls must not hold the doctor up for long.
            network = HookedNetwork(await access.enter(whole), DialTimeouts())
            peers = [address.peer for address in answering]
            found.append(await _clock(network, peers))
            run_file = await fetch(network, peers, digest, wish.local)
            access.pin(run_file.run)
            membership = Membership(network, digest, run_file.run.pipeline.stages)
            roster = await membership.peek()
            needs, microbatches = await asyncio.to_thread(_needs, run_file)
            others = [record.peer for records in roster.stages for record in records]
            asked = list(dict.fromkeys([*peers, *others]))
            found += [*_census(roster), *await _line(network, asked, microbatches)]
    except (UserError, ExceptionGroup) as error:  # `connected` is a task group
        known = user_error_of(error)
        if known is None:
            raise
        found.append(fail("swarm", f"{known.what} {known.why}", known.hint))
    return found, needs


async def _clock(network: PeerNetwork, peers: Sequence[str]) -> Finding:
    told = await asyncio.gather(*(swarm_checks.clock_of(network, peer) for peer in peers), return_exceptions=True)
    for each in told:
        if isinstance(each, BaseException) and not isinstance(each, ConnectionError):
            raise each
    return swarm_checks.judge_clock([each for each in told if isinstance(each, float)])


def _census(roster: Roster) -> list[Finding]:
    says, lone = f"replicas by stage: {roster.census()}", roster.unserved
    if lone and any(roster.stages):
        hint = f"a node that joins takes stage {lone[0]} by itself; training waits until every stage has a replica"
        return [warn("swarm", says, hint)]
    return [ok("swarm", says)]


async def _line(network: PeerNetwork, peers: Sequence[str], microbatches: Sequence[MicrobatchBytes]) -> list[Finding]:
    """Ask peers whether they reach us, and measure the line with some of them, one after the other."""
    addresses = await network.addresses()
    ports = _ports(addresses)
    reach = swarm_checks.judge_reach(await swarm_checks.dialled_back(network, peers, ports), ports, addresses)
    rates, refusals = [], []
    for peer in peers:
        measured = await swarm_checks.rates_with(network, peer)
        if isinstance(measured, str):
            refusals.append(f"{peer[-8:]}: {measured}")
        else:
            rates.append(measured)
        if len(rates) == swarm_checks.MOST_ASKED or len(refusals) == swarm_checks.MOST_ASKED:
            break
    return [*reach, *swarm_checks.judge_rates(rates, refusals, microbatches)]


def _ports(addresses: Sequence[str]) -> tuple[int, ...]:
    """Return the TCP ports of our own addresses, two at most."""
    found = dict.fromkeys(
        int(parts[4])
        for address in addresses
        if "/p2p-circuit" not in address and len(parts := address.split("/")) > 4 and parts[3] == "tcp"
    )
    return tuple(found)[:2]


def _needs(run_file: RunFileText) -> tuple[list[machine_checks.Need], list[MicrobatchBytes]]:
    """Return what each stage of a run needs of a machine, and what a microbatch weighs there."""
    # They load torch: a wrong invite is to be refused at once.
    from noloco_node.planning.model_layout import model_layout
    from noloco_node.planning.plan import plan

    run, layout = run_file.run, model_layout(run_file.run)
    needs = [
        machine_checks.Need(
            number,
            stage.memory.total,
            stage.gpu.computing,
            stage.gpu.total - stage.gpu.computing,
            machine_checks.disk_bytes(stage.memory.weights),
        )
        for number, stage in enumerate(plan(run).stages)
    ]
    return needs, [microbatch_bytes(run, layout, number) for number in range(run.pipeline.stages)]


async def report(invite: str | None, wish: DoctorRequest, *, as_json: bool) -> tuple[str, Exit]:
    """Return what the doctor found, as lines or as one JSON object, and the exit code."""
    found = await examine(invite, wish)
    code = exit_code(found)
    if as_json:
        return msgspec.json.encode({"findings": found, "fit": code is Exit.OK}).decode(), code
    return "\n".join([*map(line, found), verdict(found)]), code
