"""`noloco-node doctor`: look at this machine, visit the swarm of an invite, and say what was found and what to do.

The doctor tries each address of the invite by a short-lived daemon of its own, so that each has its own cause of
failure. Then it visits the swarm with the node's listening addresses but without a record, so that no peer counts on
it. It asks peers for the time, for a dial back and for some load, each with a deadline. A peer that does not answer is
a finding, not a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from noloco_node.admission.admission_state import WHEN_SHUT_OUT, AdmissionState, addressed
from noloco_node.admission.ticket import Right, peer_of_file
from noloco_node.doctor import machine_checks
from noloco_node.doctor.machine_checks import Finding, Grade, Needs, exit_code, fail, line, ok, verdict, warn
from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.libp2p import reachability
from noloco_node.libp2p.addresses import PeerAddress, check_announce, check_listen
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import EVERYWHERE, NetworkSettings
from noloco_node.network.calls import HookedNetwork, ask
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.planning.bandwidth import NARROW_S, MicrobatchBytes, microbatch_bytes
from noloco_node.run.config import RunConfig
from noloco_node.storage.home import HomePaths
from noloco_node.swarm import invite as invites
from noloco_node.swarm import run_distribution, speed_test
from noloco_node.swarm.access import RunAccess, connected
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration, format_rate

MOST_TRIED, AT_ONCE = 16, 4
ASK_S = 20.0
CLOCK_DOUBT_S = 2.0
PIECES = 16
MOST_ASKED = 3


class DoctorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options with which the node would be started."""

    home: Path
    device: str = "auto"
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


async def examine(invite: str | None, wish: DoctorRequest) -> AsyncIterator[Finding]:
    """Yield each finding as soon as it is known; the device and the memory come last, because they need torch."""
    parsed = None if invite is None else invites.parse(invite)
    found, needs = machine_checks.basics(wish.home), Needs()
    for finding in found if parsed is not None else [*found, *_places(wish)]:
        yield finding
    if parsed is not None:
        tried = await _try_addresses(parsed)
        for _, finding in tried:
            yield finding
        answering = [address for address, finding in tried if finding.grade is Grade.GOOD]
        if answering:
            found, needs = await _visit(msgspec.structs.replace(parsed, addresses=tuple(answering)), wish)
        else:
            hint = (
                "ask the person who sent it for a fresh one (any peer's `noloco-node status` prints one), and check "
                "that this machine is online"
            )
            found = [fail("invite", "none of its addresses can be reached", hint)]
        for finding in found:
            yield finding
    for finding in machine_checks.capacity(wish.home, wish.device, needs, None if parsed is None else parsed.digest):
        yield finding


def _places(wish: DoctorRequest) -> list[Finding]:
    """Return errors in the addresses to listen on and to announce; without a swarm they cannot be tried."""
    try:
        check_listen(wish.listen)
        check_announce(wish.announce)
    except UserError as error:
        return [fail("addresses", f"{error.what} {error.why}", error.hint)]
    return []


async def _try_addresses(parsed: invites.Invite) -> list[tuple[PeerAddress, Finding]]:
    """Try each address of an invite by itself, a few at a time, because a silent one takes long."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def attempt(address: PeerAddress) -> tuple[PeerAddress, Finding]:
        async with turns:
            return address, await _try_address(parsed.digest, address)

    return await asyncio.gather(*map(attempt, parsed.addresses[:MOST_TRIED]))


async def _try_address(digest: str, address: PeerAddress) -> Finding:
    about = f"bootstrap peer {address.transport}"
    # On the loopback interface: nothing is to be found out about this machine here.
    settings = NetworkSettings(run=digest, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=(str(address),))
    begun_s = loop_s()
    try:
        async with Libp2pNetwork.open(settings):
            return ok(about, f"answers, {loop_s() - begun_s:.1f} s after the start")
    except UserError as error:
        if error.code is not Exit.UNREACHABLE:
            return fail(about, f"{error.what} {error.why}", error.hint)
        cause = error.why.removeprefix(f"{address}: ")
        return warn(about, cause, "ask its owner; one address that answers is enough to join")


async def _visit(invite: invites.Invite, wish: DoctorRequest) -> tuple[list[Finding], Needs]:
    """Visit the swarm by the addresses of an invite; return findings, and what each stage needs of a machine."""
    digest, peers, access = invite.digest, invite.peers, RunAccess(invite, Right.LOOK, wish.home)
    settings = NetworkSettings(
        run=digest,
        listen=wish.listen or EVERYWHERE,
        announce=wish.announce,
        bootstrap=tuple(map(str, invite.addresses)),
        admission=access.state,
    )
    found, needs = list[Finding](), Needs()
    try:
        async with connected(settings) as whole:
            # A peer that does not take calls must not hold the doctor up for long.
            network = HookedNetwork(await access.enter(whole), DialTimeouts())
            found.append(await _clock(network, peers))
            run_file = await run_distribution.fetch(network, peers, digest, wish.local)
            access.pin(run_file.run)
            membership = run_file.membership(network)
            roster = await membership.peek()
            found += shut_out(access.state, wish.home)
            machine_checks.announce_torch()
            needs, microbatches = await asyncio.to_thread(_needs, run_file, wish.device)
            others = [record.peer for records in roster.stages for record in records]
            asked = list(dict.fromkeys([*peers, *others]))
            found += [*_module(run_file.run), *_census(roster), *await _line(network, asked, microbatches)]
    except (UserError, ExceptionGroup) as error:  # `connected` is a task group
        known = user_error_of(error)
        if known is None:
            raise
        found.append(fail("swarm", f"{known.what} {known.why}", known.hint))
    return found, needs


async def _clock(network: PeerNetwork, peers: Sequence[str]) -> Finding:
    told = await asyncio.gather(*(clock_of(network, peer) for peer in peers), return_exceptions=True)
    for each in told:
        if isinstance(each, BaseException) and not isinstance(each, ConnectionError):
            raise each
    return judge_clock([each for each in told if isinstance(each, float)])


def shut_out(state: AdmissionState | None, home: Path) -> list[Finding]:
    """Say that the owner has shut out the identity of this home, where it has: the doctor visits with a passing one."""
    peer = peer_of_file(HomePaths(home).identity)
    why = "" if state is None or peer is None else state.shut_out(peer)
    return [fail("admission", f"{addressed(why)}: {peer}", WHEN_SHUT_OUT)] if why else []


def _module(run: RunConfig) -> list[Finding]:
    if not run.model.is_foreign:
        return []
    says = "the run trains a module of a program: that program joins, and what it takes is not known here"
    return [warn("model", says, "noloco_node.GossipOptimizer, or noloco_node.join with its stages (docs/python.md)")]


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
    reach = judge_reach(await dialled_back(network, peers, ports), ports, addresses)
    rates, refusals = [], []
    for peer in peers:
        measured = await rates_with(network, peer)
        if isinstance(measured, str):
            refusals.append(f"{peer[-8:]}: {measured}")
        else:
            rates.append(measured)
        if len(rates) == MOST_ASKED or len(refusals) == MOST_ASKED:
            break
    return [*reach, *judge_rates(rates, refusals, microbatches)]


def _ports(addresses: Sequence[str]) -> tuple[int, ...]:
    """Return the TCP ports of our own addresses, two at most."""
    found = dict.fromkeys(
        int(parts[4])
        for address in addresses
        if "/p2p-circuit" not in address and len(parts := address.split("/")) > 4 and parts[3] == "tcp"
    )
    return tuple(found)[:2]


def _needs(run_file: run_distribution.RunFileText, wish: str) -> tuple[Needs, list[MicrobatchBytes]]:
    """Return what each stage of a run needs of a machine with this device, and the bytes of a microbatch there.

    Of a module that a program builds nothing is known.
    """
    if run_file.run.model.is_foreign:
        return Needs(), []
    # These imports load torch; before, a wrong invite has been refused already.
    import torch

    from noloco_node.machine.device import choose_device
    from noloco_node.planning.model_layout import model_layout
    from noloco_node.planning.plan import memories, memories_on

    run, layout = run_file.run, model_layout(run_file.run)
    try:
        device = choose_device(wish)
    except UserError:
        device = torch.device("cpu")  # `capacity` says that it is not there
    kept = (machine_checks.disk_bytes(plain.weights, keeps_best=run.keeps_best) for plain in memories(run, layout))
    needs = Needs(memories_on(run, layout, device), dict(enumerate(kept)))
    return needs, [microbatch_bytes(run, layout, number) for number in run.pipeline.all_stages]


async def report(invite: str | None, wish: DoctorRequest, tell: Callable[[str], None], *, as_json: bool) -> Exit:
    """Tell each finding as a line, or all of them as one JSON object; return the exit code."""
    found: list[Finding] = []
    async for finding in examine(invite, wish):
        found.append(finding)
        if not as_json:
            tell(line(finding))
    code = exit_code(found)
    tell(msgspec.json.encode({"findings": found, "fit": code is Exit.OK}).decode() if as_json else verdict(found))
    return code


class Rates(NamedTuple):
    """Bytes a second of the line with one peer; None where it was not measured."""

    up: float | None = None
    down: float | None = None


async def clock_of(network: PeerNetwork, peer: str, unix_time: Callable[[], float] = time.time) -> float:
    """Return how far our clock is ahead of a peer's, in seconds; raise `ConnectionError` without an answer."""
    try:
        async with (
            asyncio.timeout(ASK_S),
            network.talk(peer, run_distribution.TOPIC, run_distribution.SCHEMA) as conversation,
        ):
            asked = unix_time()  # not before the dial, which may take long
            await conversation.send(run_distribution.RunRequest())
            reply = await conversation.receive()
            if not isinstance(reply, run_distribution.RunFileReply):
                raise ConnectionAbortedError(f"expected a run file, got {type(reply).__name__}")
            return (asked + unix_time()) / 2 - reply.unix_time
    except TimeoutError:
        raise ConnectionAbortedError(f"no answer within {ASK_S:g} s") from None


def judge_clock(ahead_s: Sequence[float]) -> Finding:
    """Judge our clock by the median of what several peers say."""
    about = "clock"
    if not ahead_s:
        return warn(about, "no peer told the time", "make sure that the machine sets its clock by itself (NTP)")
    off = median(ahead_s)
    how_long = f"{abs(off):.1f} s" if abs(off) < CLOCK_DOUBT_S else format_duration(abs(off))
    says = f"{how_long} {'ahead of' if off > 0 else 'behind'} what {len(ahead_s)} peer(s) say"
    remedy = "set the clock (timedatectl set-ntp true)"
    return warn(about, says, remedy) if abs(off) > CLOCK_DOUBT_S else ok(about, says)


async def dialled_back(network: PeerNetwork, peers: Sequence[str], ports: tuple[int, ...]) -> reachability.ReachVerdict:
    """Ask peers to dial us back at our ports; those that do not answer do not count."""
    question, expected, topic = reachability.DialMe(ports=ports), reachability.DialBackReply, reachability.TOPIC
    answers: list[reachability.DialBackReply] = []

    async def note_answer(peer: str) -> None:
        with suppress(ConnectionError):
            schema, patience_s = reachability.SCHEMA, reachability.ASK_S
            answers.append(await ask(network, peer, topic, schema, question, expected, patience_s))

    await asyncio.gather(*map(note_answer, peers[:MOST_ASKED]))
    return reachability.judge(answers)


def judge_reach(verdict: reachability.ReachVerdict, ports: Sequence[int], addresses: Sequence[str]) -> list[Finding]:
    """Judge whether others can reach us, directly or through a relay. `addresses`: our own."""
    about = "dialled back"
    listed = " and ".join(map(str, ports)) or "none"
    relayed = [address for address in addresses if "/p2p-circuit" in address]
    relay = ok("relay", f"in use: others reach this machine through {len(relayed)} of them")
    if verdict.dialled:
        reached = ok(about, f"peers reach this machine at {' and '.join(verdict.places)}")
        return [reached, ok("relay", "not needed") if not relayed else relay]
    forward = (
        "forward a TCP port of your router to this machine, give it with --listen /ip4/0.0.0.0/tcp/PORT, and ask "
        f"again; open it in the firewall as well (tried: {listed})"
    )
    if verdict.dialled is None:
        why = "they were reached through a relay, or do not answer that" if ports else "it is tried over TCP alone"
        said = warn(about, f"no peer could try: {why}", forward)
        return [said, relay] if relayed else [said]
    if relayed:
        return [warn(about, "nobody can dial this machine directly; a relay stands in, at some cost", forward), relay]
    if verdict.relays:
        count = len(verdict.relays)
        return [
            warn(about, "nobody can dial this machine", forward),
            warn("relay", f"{count} known and not in use", "join as usual: they are taken when needed"),
        ]
    return [
        fail(about, "nobody can dial this machine: it can call others, but they cannot call it", forward),
        fail("relay", "the swarm knows of none", "ask for a bootstrap peer that runs with --relays 4"),
    ]


async def rates_with(network: PeerNetwork, peer: str) -> Rates | str:
    """Measure the line with one peer both ways, or return why it cannot be measured."""
    try:
        async with asyncio.timeout(2 * speed_test.PATIENCE_S):
            down = await _download(network, peer)
            return down if isinstance(down, str) else Rates(up=await _upload(network, peer), down=down)
    except TimeoutError:
        return f"not done within {2 * speed_test.PATIENCE_S:.0f} s"
    except ConnectionError as error:
        return str(error) or type(error).__name__


async def _download(network: PeerNetwork, peer: str) -> float | str:
    async with network.talk(peer, speed_test.TOPIC, speed_test.SCHEMA) as conversation:
        await conversation.send(speed_test.SendMe(pieces=PIECES))
        first = await conversation.receive()
        if isinstance(first, speed_test.NotNow):
            return f"it measures others now; try again in {first.retry_after_s:.0f} s"
        took = await speed_test.count(conversation, PIECES, first)
        return took.count / took.seconds


async def _upload(network: PeerNetwork, peer: str) -> float | None:
    async with network.talk(peer, speed_test.TOPIC, speed_test.SCHEMA) as conversation:
        await conversation.send(speed_test.TakeFromMe(pieces=PIECES))
        if not isinstance(await conversation.receive(), speed_test.Go):
            return None
        begun_s = loop_s()
        await speed_test.send(conversation, PIECES)
        took = await conversation.receive()
        if not isinstance(took, speed_test.Took):
            raise ConnectionAbortedError(f"expected a measurement, got {type(took).__name__}")
        # The other's clock may be anything; what was sent cannot have taken longer than it took us.
        seconds = min(max(took.seconds, 1e-6), loop_s() - begun_s)
        return (PIECES - 1) * speed_test.PIECE_BYTES / seconds


def judge_rates(
    measured: Sequence[Rates], refusals: Sequence[str], microbatches: Sequence[MicrobatchBytes]
) -> list[Finding]:
    """Judge the fastest line with a peer, each way; `microbatches`: of a microbatch at each stage."""
    if not measured:
        why = "; ".join(refusals) or "nobody was there to ask"
        return [warn("rates", f"not measured: {why}", "ask again in a minute, or when more peers are there")]
    found = []
    for way in ("up", "down"):
        rates = [rate for each in measured if (rate := getattr(each, way)) is not None]
        if not rates:
            continue
        about, best = f"{way}load", max(rates)
        says = f"{format_rate(best)} with a peer, the best of {len(rates)}"
        least_s = min((getattr(one, way) / best for one in microbatches), default=0.0)
        if least_s > NARROW_S:
            says += f"; a microbatch takes {least_s:.1f} s of it at the least"
            found.append(warn(about, says, "others will send fewer microbatches here; a cable is faster than radio"))
        else:
            found.append(ok(about, says))
    return found
