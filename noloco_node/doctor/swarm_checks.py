"""What peers tell a doctor: the time of day, whether they can dial back, how fast the line to them is.

Everything is asked of the swarm's own peers, by topics that all of them serve; there is no other service. Each question
has a deadline, each peer that does not answer is a finding and not a failure, and one peer's word is checked against
another's where there are several: a clock is judged by the median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from noloco_node.doctor.findings import Finding, fail, ok, warn
from noloco_node.libp2p import reachability
from noloco_node.network.interface import PeerNetwork, ask
from noloco_node.planning.bandwidth import NARROW_S, MicrobatchBytes
from noloco_node.swarm import speed_test
from noloco_node.swarm.run_distribution import JOINING_CLOCK_ERROR_S, SCHEMA, TOPIC, RunFileReply, RunRequest
from noloco_node.units import format_rate

ASK_S = 20.0
CLOCK_DOUBT_S = 2.0
PIECES = 16
MOST_ASKED = 3


class Rates(NamedTuple):
    """Bytes a second of the line with one peer; None where it was not measured."""

    up: float | None = None
    down: float | None = None


async def clock_of(network: PeerNetwork, peer: str, unix_time: Callable[[], float] = time.time) -> float:
    """Return how far our clock is ahead of a peer's, in seconds; a ConnectionError where the peer does not say."""
    try:
        async with asyncio.timeout(ASK_S), network.talk(peer, TOPIC, SCHEMA) as conversation:
            asked = unix_time()
            await conversation.send(RunRequest())
            reply = await conversation.receive()
            if not isinstance(reply, RunFileReply):
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
    says = f"{abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} what {len(ahead_s)} peer(s) say"
    remedy = "set the clock (timedatectl set-ntp true)"
    if abs(off) > JOINING_CLOCK_ERROR_S:
        return fail(about, f"{says}; records of who is there expire by the time of day", remedy)
    return warn(about, says, remedy) if abs(off) > CLOCK_DOUBT_S else ok(about, says)


async def dialled_back(network: PeerNetwork, peers: Sequence[str], ports: tuple[int, ...]) -> reachability.ReachVerdict:
    """Ask peers to dial us back at our ports; one that does not answer says nothing."""

    request = reachability.DialMe(ports=ports)

    async def reply_of(peer: str) -> reachability.DialBackReply | None:
        try:
            return await ask(
                network,
                peer,
                reachability.TOPIC,
                reachability.SCHEMA,
                request,
                reachability.DialBackReply,
                reachability.ASK_S,
            )
        except ConnectionError:
            return None

    answers = await asyncio.gather(*(reply_of(peer) for peer in peers[:MOST_ASKED]))
    return reachability.judge([answer for answer in answers if answer is not None])


def judge_reach(verdict: reachability.ReachVerdict, ports: Sequence[int], addresses: Sequence[str]) -> list[Finding]:
    """Judge whether others can come to us: directly, or else through a relay. `addresses`: our own."""
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
        return [
            warn(about, "nobody can dial this machine directly; a relay stands in, at some cost", forward),
            relay,
        ]
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
    """Measure the line with one peer both ways; return why where it is not to be had."""
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
        loop, begun_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await speed_test.send(conversation, PIECES)
        took = await conversation.receive()
        if not isinstance(took, speed_test.Took):
            raise ConnectionAbortedError(f"expected a measurement, got {type(took).__name__}")
        # The other's clock may be anything; what was sent cannot have taken longer than it took us.
        seconds = min(max(took.seconds, 1e-6), loop.time() - begun_s)
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
