"""A passing daemon that looks about before ours starts: is our identity in use, can others dial us, and where, and
which relays are there?

Each of these can be told only by others, and each decides how our daemon must be started; and as long as our own peer
id is not in the swarm, whoever answers to it is somebody else (a home that was copied to a second machine, say: two
peers of one id take each other's streams, and no error says why). So a daemon with a passing identity goes first, on
the ports that will be ours, for a second. Where nothing is to be found out it does not go: on a machine by itself, or
with an announced address and a new identity.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.daemon.control import Control
from noloco_node.libp2p.daemon.process import DaemonConfig, start_daemon
from noloco_node.libp2p.endpoint.addresses import (
    beyond_this_machine,
    bootstrap_address,
    checked_relays,
    parse_peer_address,
    port_of,
)
from noloco_node.libp2p.endpoint.settings import NetworkSettings, Reachability, ensure_identity, peer_bytes
from noloco_node.libp2p.hivemind_compat import HivemindParts, daemon_trouble
from noloco_node.libp2p.session import LinkContext, attached, connect, dialled, places
from noloco_node.libp2p.streams.dialback import ASK_S, SCHEMA, TOPIC, DialBackReply, DialMe, ReachVerdict, judge
from noloco_node.libp2p.streams.switchboard import StreamDialer

_FIND_S = 4.0
_LOOKS = 10
_LOOK_S = 0.2
_MOST_ASKED = 3


class PreflightGoal(NamedTuple):
    """What is to be found out: whether the identity is in use, and how others reach us."""

    identity: bool
    reach: bool


def preflight_goal(settings: NetworkSettings, *, identity_is_old: bool) -> PreflightGoal:
    """Decide what a scout must find out."""
    if not settings.bootstrap:
        return PreflightGoal(False, False)
    unsure = not settings.announce and bool(dialled_ports(settings.listen))
    return PreflightGoal(
        identity_is_old, settings.reach is Reachability.RELAYED or (settings.reach is Reachability.AUTO and unsure)
    )


def dialled_ports(listen: Sequence[str]) -> tuple[int, ...]:
    """Return the ports on which others can try to dial us: TCP, beyond this machine. Open ones count as 0."""
    return tuple(port_of(text) for text in beyond_this_machine(listen) if "/tcp/" in text)


async def preflight(
    context: LinkContext,
    settings: NetworkSettings,
    config: DaemonConfig,
    goal: PreflightGoal,
    tell: Callable[[str], None],
) -> DaemonConfig:
    """Return the config as it should be; `UserError` if our identity is in use, or there is no relay and must be.

    Whom we join by may be out of reach: then nothing is found out here, and the session says why.
    """
    doors = [bootstrap_address(text) for text in settings.bootstrap]
    parts, timeouts, identity = context.parts, context.exchange.timeouts, context.directory / "scout.key"
    ensure_identity(identity)
    place = f"-hostAddrs={','.join(config.listen)}" if goal.reach else "-noListenAddrs=1"
    chosen = (f"-id={identity}", place, "-dhtClient=1", "-tls=1", "-relay=1", "-idleTimeout=30s")
    async with start_daemon(parts.binary, chosen, context.directory, timeouts.start_s) as daemon:
        control = Control(daemon, parts.messages)
        async with attached(parts, control, daemon, timeouts.start_s) as client:
            try:
                causes = await dialled(
                    {asyncio.ensure_future(connect(control, parts, door, timeouts.reach_s)): door for door in doors}
                )
                reached = [door for door, cause in causes.items() if cause is None]
                if reached and goal.identity:
                    await _check_identity(parts, control, config.identity)
                if not reached or not goal.reach:
                    return config
                dialer = StreamDialer(parts, control, daemon, context.exchange, client.peer_id.to_base58())
                ports = dialled_ports(config.listen) if settings.reach is Reachability.AUTO else ()
                found = await asyncio.gather(*(_ask(dialer, door.peer, ports) for door in reached[:_MOST_ASKED]))
                own = await places(parts, control, timeouts.dht_s)
            except ConnectionError as error:
                raise daemon_trouble(str(error)) from None
    return choose_daemon_config(settings, config, own, judge([each for each in found if each is not None]), tell)


async def _check_identity(parts: HivemindParts, control: Control, identity: Path) -> None:
    """Raise `UserError` if a peer with this identity answers in the swarm. One that is cut off is not found."""
    ours = peer_bytes(identity)
    if ours is None:
        return
    pb = parts.messages
    wanted = pb.Request(type=pb.Request.CONNECT, connect=pb.ConnectRequest(peer=ours, addrs=[]))
    for _ in range(_LOOKS):
        try:
            await control.ask(wanted, _FIND_S)
            break
        except ConnectionError as error:
            # Just connected, the daemon has not yet learned that its neighbours know others.
            if "any peer in table" not in str(error):
                return
            await asyncio.sleep(_LOOK_S)
    else:
        return
    raise UserError(
        "Another node with the identity of this one is running.",
        why=f"the peer {parts.peer_text(ours)} answers in the swarm, and {identity} holds its key",
        hint="stop the other one; if this home is a copy of its home, delete that file here to become a new peer",
        code=Exit.HOME_IN_USE,
    )


async def _ask(dialer: StreamDialer, peer: str, ports: tuple[int, ...]) -> DialBackReply | None:
    """Ask one peer; None when it does not answer, or is of a version that does not know the question."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            stream = await dialer.dial(peer, TOPIC, SCHEMA)
            try:
                await stream.send(DialMe(ports=ports))
                answer = await stream.receive()
            finally:
                stream.leave()
            return answer if isinstance(answer, DialBackReply) else None
    return None


def choose_daemon_config(
    settings: NetworkSettings,
    config: DaemonConfig,
    own: Sequence[str],
    verdict: ReachVerdict,
    tell: Callable[[str], None],
) -> DaemonConfig:
    """Return how to start our daemon after what others said; `own`: the addresses that it knows itself."""
    relays = checked_relays([*settings.relays, *verdict.relays])
    if settings.reach is Reachability.AUTO and verdict.dialled is not False:
        new = [place for place in verdict.places if place not in own]
        if not new:
            return config
        tell(f"others reach us at {' and '.join(new)}: announcing that")
        return msgspec.structs.replace(config, announce=(*beyond_this_machine(own), *new))
    if relays:
        count = len({parse_peer_address(text).peer for text in relays})
        reason = (
            "as you asked" if settings.reach is Reachability.RELAYED else "nobody can dial us, a router is in between"
        )
        tell(f"being reached through {count} relay{'s' if count > 1 else ''}: {reason}")
        return msgspec.structs.replace(config, relays=relays)
    if settings.reach is Reachability.RELAYED:
        raise UserError(
            "This swarm has no relay to be reached through.",
            why="no peer of the invite knows of any",
            hint="ask whoever hosts the bootstrap peer to start it with --relays 4, or join without --relayed "
            "where others can dial you",
            code=Exit.UNREACHABLE,
        )
    tell(
        "nobody can dial us, and the swarm has no relay: we can call others, but they cannot call us. "
        "Forward a port of the router and give it with --listen and --announce, or ask for a bootstrap peer with relays"
    )
    return msgspec.structs.replace(config, dialable=False)
