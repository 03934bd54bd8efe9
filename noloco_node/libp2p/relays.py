"""Relays for peers behind routers: daemons that a bootstrap peer runs beside its own, and how newcomers learn of them.

A peer that nobody can dial keeps a connection to a relay, and is dialled through it (libp2p's circuits). libp2p waits
three minutes before it is content with a single relay, and takes four at once. So a bootstrap peer runs four, each a
daemon with a key and a port of its own; an idle relay costs memory alone. No bandwidth budget bounds what passes
through a relay: the daemon knows a most of bytes and of hours for each circuit, but no rate, and a circuit that has
ended is opened again.

p2pd sets its relay service up twice, with the limits that it was started with and with libp2p's own (128 KiB or two
minutes a circuit), and the later one counts. On several processors the two race; on one, ours come last. So a relay
uses one processor. It is also asked what it grants, by reserving a place (libp2p's circuit protocol, version 2:
`granted`), and started again where that is too little, since p2pd prints nothing about it.

Each bootstrap peer names its relays in one record in the DHT, not in the invite, so invites stay short, and every peer
can read it for a newcomer that asks (`reachability`). A rogue record can only lead to a relay that does not relay: what
passes through a relay is encrypted and authenticated between its two ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from noloco_node.errors import UserError
from noloco_node.libp2p import daemon
from noloco_node.libp2p.addresses import (
    RELAY_PLACES,
    PeerAddress,
    beyond_this_machine,
    check_announce,
    check_listen,
    from_this_machine,
    port_of,
    relay_record,
    with_port,
    with_ports_chosen,
)
from noloco_node.libp2p.control import Control, PeerContext, delimited, read_delimited
from noloco_node.libp2p.hivemind_compat import daemon_trouble
from noloco_node.libp2p.settings import NetworkSettings, ensure_identity

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"  # a message of two bytes: field 1, the kind, is 0
_LIMIT, _STATUS, _OK = 4, 5, 100
_DURATION, _DATA = 1, 2
_LIFETIME_S = 300.0
_TELL_EVERY_S = 60.0
_ASK_S = 10.0
_MOST_STARTS = 12
RELAY_PROCESSORS = 1
_LOOKS = 3
_LOOK_S = 0.2


class Grant(NamedTuple):
    """How long a circuit lasts (seconds), and how many bytes it carries each way; 0: without limit."""

    duration_s: int
    data_bytes: int

    def covers(self, wanted: Grant) -> bool:
        return all(given == 0 or 0 < least <= given for given, least in zip(self, wanted, strict=True))


class RelayPool(NamedTuple):
    """What relays need. `tell` tells a person what happens to them.

    `ask`: what the relay at one of these addresses grants; ConnectionError where it cannot be asked.
    """

    context: PeerContext
    tell: Callable[[str], None]
    ask: Callable[[Sequence[PeerAddress]], Awaitable[Grant]]


def relay_configs(settings: NetworkSettings, identities: Sequence[Path]) -> tuple[daemon.DaemonConfig, ...]:
    """Return how each relay is started: at the addresses of the settings, with its number added to every port.

    None where only this machine can reach us: it needs no relay. `UserError` when an address is wrong or a port taken.
    """
    if not beyond_this_machine(settings.listen):
        return ()
    made: list[daemon.DaemonConfig] = []
    for number, identity in enumerate(identities, 1):
        listen = _shifted(settings.listen, number)
        announce = _shifted(settings.announce, number)
        try:
            check_listen(listen)
            check_announce(announce)
        except UserError as trouble:
            raise _no_place(trouble, number, len(identities)) from None
        made.append(daemon.DaemonConfig(identity=identity, listen=with_ports_chosen(listen), announce=announce))
    return tuple(made)


def _no_place(trouble: UserError, number: int, count: int) -> UserError:
    """Return in the words of relays why one cannot listen: its addresses are none that anybody has typed."""
    return UserError(
        f"Relay {number} of {count} has no place to listen.",
        why=f"relays take the ports after the peer's own. {trouble.what} {trouble.why[:1].upper()}{trouble.why[1:]}",
        hint=f"choose a port with {count} free ones after it (--listen, --announce), or have fewer with --relays",
        code=trouble.code,
    )


def _shifted(addresses: Sequence[str], number: int) -> tuple[str, ...]:
    return tuple(with_port(text, port_of(text) + number) if port_of(text) else text for text in addresses)


@asynccontextmanager
async def relaying(pool: RelayPool, chosen: Sequence[daemon.DaemonConfig]) -> AsyncIterator[tuple[str, ...]]:
    """Run relays as long as the context, and start again those that die; yield their addresses."""
    ready: list[asyncio.Future[tuple[str, ...]]] = []
    tasks: list[asyncio.Task[NoReturn]] = []
    loop = asyncio.get_running_loop()
    try:
        for config in chosen:
            ensure_identity(config.identity)
            ready.append(loop.create_future())
            tasks.append(loop.create_task(_keep(pool, config, ready[-1]), name="relay"))
        yield tuple(place for found in await asyncio.gather(*ready) for place in found)
    finally:
        for each in ready:
            each.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *ready, return_exceptions=True)


async def _keep(pool: RelayPool, config: daemon.DaemonConfig, ready: asyncio.Future[tuple[str, ...]]) -> NoReturn:
    """Run one relay, and start it again when it dies, or grants less than it should."""
    loop, deaths, starts = asyncio.get_running_loop(), deque[float](maxlen=daemon.MOST_DEATHS + 1), 0
    while True:
        try:
            async with pool.context.start(daemon.relay_arguments(config), RELAY_PROCESSORS) as (control, client):
                peer = str(client.peer_id.to_base58())
                found = await _addresses(control, peer)
                starts += 1
                if not await _grants_enough(pool, config, peer):
                    if starts < _MOST_STARTS:
                        continue
                    pool.tell(f"the relay on port {port_of(config.listen[0])} breaks circuits early")
                starts = 0
                if not ready.done():
                    ready.set_result(found)
                why = await control.daemon.wait()
        except Exception as error:
            if not ready.done():  # or its reader would wait for ever
                ready.set_exception(daemon_trouble(str(error)) if isinstance(error, ConnectionError) else error)
                raise
            why = _in_one_line(error)
        deaths.append(loop.time())
        wait_s = daemon.restart_pause_s(deaths, loop.time())
        pool.tell(f"the relay on port {port_of(config.listen[0])} died ({why}); starting it again")
        await asyncio.sleep(30.0 if wait_s is None else wait_s)


async def _grants_enough(pool: RelayPool, config: daemon.DaemonConfig, peer: str) -> bool:
    # Not at the announced address: whether we reach ourselves there is up to our router.
    doors = [PeerAddress(place, peer) for place in from_this_machine(config.listen)]
    for _ in range(_LOOKS):
        try:
            return (await pool.ask(doors)).covers(Grant(daemon.RELAY_TIME_S, daemon.RELAY_DATA_BYTES))
        except (ConnectionError, UserError) as error:
            # Our daemon may not have noticed yet that this relay's predecessor is gone.
            logger.warning(
                "The relay on port %d cannot be asked what it grants: %s",
                port_of(doors[0].transport),
                _in_one_line(error),
            )
            await asyncio.sleep(_LOOK_S)
    return True


def _in_one_line(error: Exception) -> str:
    """Say what went wrong, without advice for those who wanted something else, such as to join."""
    return " ".join((error.why if isinstance(error, UserError) else str(error)).split())


async def _addresses(control: Control, peer: str) -> tuple[str, ...]:
    found = await control.places(_ASK_S)
    if not found:
        raise daemon_trouble("a relay listens on none of the addresses asked for")
    return tuple(f"{place}/p2p/{peer}" for place in (beyond_this_machine(found) or found)[:RELAY_PLACES])


async def granted(control: Control, relay: str, wait_s: float) -> Grant:
    """Reserve a place at a relay that the daemon is connected with, and return what it grants.

    Raises ConnectionError where it does not answer, refuses, or is no relay.
    """
    pb = control.parts.messages
    wanted = pb.StreamOpenRequest(peer=control.parts.peer_bytes(relay), proto=[HOP])
    async with control.connected(wait_s) as (reader, writer):
        writer.write(delimited(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)))
        opened = pb.Response.FromString(await read_delimited(reader))
        if opened.type == opened.ERROR:
            raise ConnectionRefusedError(f"{relay} relays for nobody: {opened.error.msg}")
        writer.write(_RESERVE)
        return grant_of(await read_delimited(reader))


def grant_of(raw: bytes) -> Grant:
    """Return the limits in an answer to a reservation; ConnectionRefusedError where it is none."""
    answer = _fields(raw)
    if answer.get(_STATUS) != _OK:
        raise ConnectionRefusedError(f"the relay gives no place (status {answer.get(_STATUS)})")
    limit = answer.get(_LIMIT, b"")
    found = _fields(limit) if isinstance(limit, bytes) else {}
    duration_s, data_bytes = (found.get(field, 0) for field in (_DURATION, _DATA))
    if not isinstance(duration_s, int) or not isinstance(data_bytes, int):
        raise ConnectionRefusedError("the relay's answer is malformed")
    return Grant(duration_s, data_bytes)


def _fields(raw: bytes) -> dict[int, Any]:
    try:
        message = Empty.FromString(raw)
    except DecodeError:
        raise ConnectionRefusedError("the relay's answer is malformed") from None
    return {field.field_number: field.data for field in UnknownFieldSet(message)}


async def tell(addresses: Sequence[str], publish: Callable[[bytes, float], Awaitable[bool]]) -> NoReturn:
    """Publish the record of our relays again and again; `publish` takes its bytes and lifetime in seconds."""
    while True:
        stored = await publish(relay_record(addresses), _LIFETIME_S)
        await asyncio.sleep(_TELL_EVERY_S if stored else _TELL_EVERY_S / 10)
