"""What only others can tell before our daemon starts: is our identity in use, can others dial us, where, and through
which relays?

Each answer decides how our daemon must be started. And as long as our own peer id is not in the swarm, a peer that
answers to it is somebody else (a home that was copied to a second machine, say: two peers of one id take each other's
streams, and no error says why). So a daemon with a temporary identity goes first, on the ports that will be ours, for a
second. It does not go where nothing is to be found out: on a machine by itself, or with an announced address and a new
identity.

Each peer answers the topic `reach`: it names the relays that it knows, dials the asker back at the address that the
asker comes from, on the TCP ports that the asker listens on, and says whether a libp2p program greeted it there. It
dials nobody but the asker itself, so it cannot be used to knock at the doors of others. Over a relay it cannot tell,
and says that. libp2p has such a service too (AutoNAT). It takes half a minute, asks for several peers, and its daemon
keeps the result to itself.

While a node is at work, its line may get another address. So a node goes on asking (`until_elsewhere`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import addresses
from noloco_node.libp2p.control import Control, PeerContext, StreamDialer
from noloco_node.libp2p.daemon import DaemonConfig
from noloco_node.libp2p.hivemind_compat import daemon_trouble
from noloco_node.libp2p.settings import NetworkSettings, Reachability, ensure_identity, identity_in_use, peer_bytes
from noloco_node.network.bans import address_prefix, public_prefix
from noloco_node.network.calls import patient
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema, Violation
from noloco_node.tasks import loop_s

TOPIC = "reach"
_GREETING = b"/multistream/"
_GREETING_BYTES = 20
_DIAL_S = 4.0
_LOOK_S, _LOOK_AGAIN_S = 6.0, 10.0  # the DHT has so long to tell of relays, and is asked so often, however many ask us
ASK_S = 12.0  # a peer has so long to answer, its attempts included
_MOST_PORTS = 2
_MOST_DIALS, _DIALS_A_PREFIX = 64, 16
"""Attempts at the same time, on behalf of all askers, and of those of one address prefix.

Thirty machines of a household that start together after a power cut, behind a router that is silent, have two turns of
`_DIAL_S`. One that hears nothing within `ASK_S` would take itself for reachable.
"""

_FIND_S = 4.0
_SEARCHES = 10
_SEARCH_PAUSE_S = 0.2
_MOST_ASKED = 3
LOOK_S = 300.0  # between two times at which a peer at work asks how others reach it
MOST_LOOK_S = 14_400.0  # that time doubles up to this, after each start that changed nothing
_DOUBTS = 3  # looks in a row that must agree: a busy machine may not greet a caller in time
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DialMe:
    """Dial me back, please: at these TCP ports, at most two."""

    ports: tuple[Port, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DialBackReply:
    """`place`: the multiaddr at which the asker was reached, empty if at none; `tried`: whether that says anything.

    `relays`: those that the answering peer knows of.
    """

    place: str
    tried: bool
    relays: tuple[str, ...]


SCHEMA = Schema({DialMe: MessageSpec("DialMe"), DialBackReply: MessageSpec("Dialled", header_bytes=LONG_HEADER_BYTES)})


class ReachVerdict(NamedTuple):
    """What several answers say: `dialled` None if nobody could tell; `places` where we were reached."""

    dialled: bool | None
    places: tuple[str, ...]
    relays: tuple[str, ...]


def judge(answers: Sequence[DialBackReply]) -> ReachVerdict:
    """Take one success as proof: a peer that failed may be in the wrong place."""
    places = tuple(dict.fromkeys(answer.place for answer in answers if is_place(answer.place)))
    tried = any(answer.tried for answer in answers)
    relays = tuple(dict.fromkeys(relay for answer in answers for relay in answer.relays))
    return ReachVerdict(True if places else False if tried else None, places, relays)


def is_place(text: str) -> bool:
    """Say whether a stranger's text is a TCP address: it is shown to people, and goes to the daemon's command line."""
    parts = text.split("/")
    if len(parts) != 5 or parts[::3] != ["", "tcp"] or parts[1] not in ("ip4", "ip6"):
        return False
    try:
        host = ipaddress.ip_address(parts[2])
    except ValueError:
        return False
    good = f"ip{host.version}" == parts[1] and "%" not in parts[2] and parts[4].isascii() and parts[4].isdecimal()
    return good and len(parts[4]) <= 5 and 0 < int(parts[4]) < 65536


def host_of(origin: str) -> tuple[str, str] | None:
    parts = origin.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    return parts[1], parts[2]


class DialBackService:
    """Answers the topic; `relays` looks up those that the swarm tells of."""

    def __init__(self, relays: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._relays = relays
        self._turns = asyncio.Semaphore(_MOST_DIALS)
        self._turns_by_prefix = WeakValueDictionary[str, asyncio.Semaphore]()
        """Of the prefixes for which an attempt is under way, or waits."""
        self._found, self._looked_s = tuple[str, ...](), 0.0
        self._looking: asyncio.Task[None] | None = None  # no caller's own: one that gives up would end it for all

    async def answer(self, conversation: Conversation) -> None:
        async with patient(conversation, ASK_S):
            question = await conversation.receive()
            if not isinstance(question, DialMe):
                raise Violation("a caller about reachability asks to be dialled")
            ports = tuple(dict.fromkeys(port for port in question.ports[:_MOST_PORTS] if port))
            home = host_of(conversation.origin) if ports else None
            relays, place = await asyncio.gather(self._known(), self._dial(home, ports))
            await conversation.send(DialBackReply(place=place, tried=home is not None, relays=relays))

    async def _dial(self, home: tuple[str, str] | None, ports: Sequence[int]) -> str:
        if home is None:
            return ""
        kind, host = home
        prefix = str(address_prefix(f"/{kind}/{host}"))
        turns = self._turns_by_prefix.setdefault(prefix, asyncio.Semaphore(_DIALS_A_PREFIX))
        reached = await asyncio.gather(*(self._greets(host, port, turns) for port in ports))
        found = [port for port, good in zip(ports, reached, strict=True) if good]
        return f"/{kind}/{host}/tcp/{found[0]}" if found else ""

    async def _greets(self, host: str, port: int, turns: asyncio.Semaphore) -> bool:
        try:
            async with turns, self._turns, asyncio.timeout(_DIAL_S):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    return _GREETING in await reader.readexactly(_GREETING_BYTES)
                finally:
                    writer.close()
        except (OSError, TimeoutError, EOFError):
            return False

    async def _known(self) -> tuple[str, ...]:
        if self._looking is None or loop_s() - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s, self._looking = loop_s(), asyncio.create_task(self._look())
        await asyncio.shield(self._looking)
        return self._found

    async def _look(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                self._found = tuple(await self._relays())


class PreflightGoal(NamedTuple):
    """The open questions: whether the identity is in use, and how others reach us."""

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
    return tuple(addresses.port_of(text) for text in addresses.beyond_this_machine(listen) if "/tcp/" in text)


async def preflight(
    context: PeerContext,
    config: DaemonConfig,
    goal: PreflightGoal,
    doors: Sequence[addresses.PeerAddress],
    tell: Callable[[str], None],
) -> DaemonConfig:
    """Return the config as it should be; `UserError` if our identity is in use, or there is no relay and must be.

    `doors`: whom to ask. They may be out of reach: then nothing is found out here, and the session says why.
    """
    settings, identity, timeouts = context.settings, context.directory / "scout.key", context.settings.timeouts
    ensure_identity(identity)
    place = f"-hostAddrs={','.join(config.listen)}" if goal.reach else "-noListenAddrs=1"
    chosen = (f"-id={identity}", place, "-dhtClient=1", "-tls=1", "-relay=1", "-idleTimeout=30s")
    async with context.start(chosen) as (control, client):
        try:
            causes = await control.connect_all(doors, timeouts.reach_s)
            reached = [door for door, cause in causes.items() if cause is None]
            if reached and goal.identity:
                await _check_identity(control, config.identity)
            if not reached or not goal.reach:
                return config
            dialer = StreamDialer(control, context, client.peer_id.to_base58())
            ports = dialled_ports(config.listen) if settings.reach is Reachability.AUTO else ()
            said = await _ask(dialer, reached[:_MOST_ASKED], ports)
            own = await control.places(timeouts.dht_s)
        except ConnectionError as error:
            raise daemon_trouble(str(error)) from None
    return choose_daemon_config(settings, config, own, said, tell)


async def _check_identity(control: Control, identity: Path) -> None:
    """Raise `UserError` if a peer with this identity answers in the swarm. One that is cut off is not found."""
    ours = peer_bytes(identity)
    pb = control.parts.messages
    wanted = pb.Request(type=pb.Request.CONNECT, connect=pb.ConnectRequest(peer=ours, addrs=[]))
    for _ in range(_SEARCHES):
        try:
            await control.ask(wanted, _FIND_S)
            break
        except ConnectionError as error:
            # Just connected, the daemon has not yet learned that its neighbours know others.
            if "any peer in table" not in str(error):
                return
            await asyncio.sleep(_SEARCH_PAUSE_S)
    else:
        return
    raise identity_in_use(
        f"the peer {control.parts.peer_text(ours)} answers in the swarm, and {identity} holds its key", identity
    )


async def _ask(dialer: StreamDialer, peers: Sequence[addresses.PeerAddress], ports: tuple[int, ...]) -> ReachVerdict:
    answers = await asyncio.gather(*(_answer(dialer, each.peer, ports) for each in peers))
    return judge([answer for answer in answers if answer is not None])


async def _answer(dialer: StreamDialer, peer: str, ports: tuple[int, ...]) -> DialBackReply | None:
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
    settings: NetworkSettings, config: DaemonConfig, own: Sequence[str], said: ReachVerdict, tell: Callable[[str], None]
) -> DaemonConfig:
    """Return how to start our daemon after what others said; `own`: the addresses that it knows itself."""
    if settings.reach is Reachability.AUTO and said.dialled is None:
        return config
    config = msgspec.structs.replace(config, announce=settings.announce, relays=(), dialable=True)
    relays = addresses.checked_relays([*settings.relays, *said.relays])
    if settings.reach is Reachability.AUTO and said.dialled:
        new = [place for place in said.places if place not in own]
        if not new:
            return config
        tell(f"others reach us at {' and '.join(new)}: announcing that")
        return msgspec.structs.replace(config, announce=(*addresses.beyond_this_machine(own), *new))
    if relays:
        count = len({addresses.parse_peer_address(text).peer for text in relays})
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


async def until_elsewhere(
    dialer: StreamDialer,
    config: DaemonConfig,
    neighbours: Callable[[], Awaitable[Sequence[addresses.PeerAddress]]],
    own: Callable[[], Awaitable[Sequence[str]]],
    look_s: float,
) -> None:
    """Return once several looks in a row find that no peer asked reaches us as `config` says (`is_elsewhere`).

    So it is where a line got another address. `own`: returns the addresses that our daemon announces.
    """
    doubts = 0
    while doubts < _DOUBTS:
        await asyncio.sleep(look_s)
        with contextlib.suppress(ConnectionError):
            said = await _ask(dialer, _outside(await neighbours()), dialled_ports(config.listen))
            doubts = doubts + 1 if is_elsewhere(config, await own(), said) else 0


def _outside(neighbours: Sequence[addresses.PeerAddress]) -> list[addresses.PeerAddress]:
    """Return whom to ask: some that dial us from outside, each of another prefix; else some of our own network."""
    direct = [each for each in neighbours if "/p2p-circuit" not in each.transport]
    by_prefix = {address_prefix(each.transport): each for each in direct if public_prefix(each.transport)}
    found = list(by_prefix.values()) or direct
    return random.sample(found, min(len(found), _MOST_ASKED))


def is_elsewhere(config: DaemonConfig, own: Sequence[str], said: ReachVerdict) -> bool:
    """Say whether a daemon should start anew: others do not reach it as its config says, or could reach it better.

    `own`: the addresses that it announces.
    """
    is_direct = config.dialable and not config.relays
    if said.dialled:
        return not is_direct or not set(said.places) & set(own)
    has_place = any("/p2p-circuit" in place for place in own)
    return said.dialled is False and (is_direct or not (has_place or set(said.relays) <= set(config.relays)))
