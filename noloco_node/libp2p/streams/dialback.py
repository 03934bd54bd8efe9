"""Whether others can dial us: asked of the peers by whom we join, before anybody relies on it.

Each peer answers the topic `reach`: it names the relays that it knows, dials the asker back at the address that the
asker comes from, on the TCP ports that the asker listens on, and says whether a libp2p program greeted it there. It
dials nobody but the asker itself, so it cannot be used to knock at the doors of others. Over a relay it cannot tell,
and says that.

libp2p has such a service too (AutoNAT). It takes half a minute, asks for several peers, and its daemon keeps the result
to itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from noloco_node.network.interface import Conversation
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema

TOPIC = "reach"
_GREETING = b"/multistream/"
_GREETING_BYTES = 20
_DIAL_S = 4.0
_LOOK_S = 6.0
"""For the DHT to tell of relays."""
ASK_S = 12.0
"""For one peer to answer, its attempts included."""
_MOST_PORTS = 2
_MOST_DIALS = 8
"""Attempts at the same time, on behalf of all who ask."""


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
    """Take one success as proof: whoever failed may be in the wrong place."""
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
    """Return kind and host of the address that a peer comes from; None when it comes through a relay."""
    parts = origin.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    return parts[1], parts[2]


class DialBackService:
    """Answers the topic; `relays` looks up those that the swarm tells of."""

    def __init__(self, relays: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._relays = relays
        self._turns = asyncio.Semaphore(_MOST_DIALS)

    async def answer(self, conversation: Conversation) -> None:
        """Answer one question."""
        try:
            async with asyncio.timeout(ASK_S):
                question = await conversation.receive()
                ports = tuple(port for port in question.ports[:_MOST_PORTS] if port)
                home = host_of(conversation.origin) if ports else None
                relays, place = await asyncio.gather(self._known(), self._dial(home, ports))
                await conversation.send(DialBackReply(place=place, tried=home is not None, relays=relays))
        except TimeoutError:
            raise ConnectionAbortedError(f"{conversation.peer} took too long") from None

    async def _dial(self, home: tuple[str, str] | None, ports: Sequence[int]) -> str:
        """Return the first place where the asker greets us; empty if there is none."""
        if home is None:
            return ""
        kind, host = home
        async with self._turns:
            reached = await asyncio.gather(*(_greets(host, port) for port in ports))
        found = [port for port, good in zip(ports, reached, strict=True) if good]
        return f"/{kind}/{host}/tcp/{found[0]}" if found else ""

    async def _known(self) -> tuple[str, ...]:
        try:
            async with asyncio.timeout(_LOOK_S):
                return tuple(await self._relays())
        except TimeoutError:
            return ()


async def _greets(host: str, port: int) -> bool:
    """Say whether a libp2p program greets whoever dials this address."""
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return _GREETING in await reader.readexactly(_GREETING_BYTES)
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError):
        return False
