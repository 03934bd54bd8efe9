"""One daemon at work for a peer: started, asked, connected to others, a node of the DHT. It ends with the daemon.

What outlives it is handed in (`PeerContext`: topics and streams, of which those by way of this daemon break with it),
so that another session can follow under the same identity and addresses.

The daemon is told of no bootstrap peers; we connect it to each ourselves. Its own way ends in one message for a closed
port, an unknown host and a wrong peer id; asked about one address, it says exactly which it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.addresses import (
    KnownPeers,
    PeerAddress,
    beyond_this_machine,
    parse_peer_address,
    place_text,
    port_of,
    unreachable,
)
from noloco_node.libp2p.control import Control, Grant
from noloco_node.libp2p.daemon import DaemonConfig, arguments
from noloco_node.libp2p.dht_records import DhtRecords
from noloco_node.libp2p.hivemind_compat import DaemonClient, daemon_trouble
from noloco_node.libp2p.switchboard import PeerContext, StreamDialer

logger = logging.getLogger(__name__)

REJOIN_S = 15.0
"""Between two looks at who is connected."""
_RELAY_S = 10.0
"""For a relay to give us a place."""
_LOOK_S = 0.2
_MOST_CIRCUITS = 2
_CIRCUIT = "/p2p-circuit"


class Session:
    """Made by `Session.open`; `died` of its daemon ends it."""

    def __init__(self, context: PeerContext, config: DaemonConfig, control: Control, client: DaemonClient) -> None:
        self.daemon, self.peer_id = control.daemon, client.peer_id.to_base58()
        self.rejoined = 0
        self._parts, self._config, self._control, self._client = context.parts, config, control, client
        self._timeouts = context.settings.timeouts
        self.dialer = StreamDialer(control, context, self.peer_id)
        self.records = DhtRecords(control, config.identity, context.secret, context.settings)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: PeerContext, config: DaemonConfig, doors: Sequence[PeerAddress], *, alone: bool
    ) -> AsyncIterator[Session]:
        """Join by whichever of `doors` open, for as long as the context; `alone`: also if none does.

        Raises `UserError`, with what to try, when that cannot be.
        """
        chosen = arguments(config, context.settings.reach)
        async with context.start(chosen) as (control, client):
            session = cls(context, config, control, client)
            try:
                await session._join(doors, alone)
                yield session
            finally:
                session.dialer.close()
                await session.records.close()

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs under which others may reach us, each ending in /p2p/ID; those of this machine only
        if there are no others. Behind a router, two through relays come first.
        """
        found = await self._places()
        circuits = [place for place in found if _is_circuit(place)]
        circuits = circuits or [f"{relay}{_CIRCUIT}" for relay in self._config.relays]
        direct = [place for place in found if not _is_circuit(place)]
        chosen = (*circuits[:_MOST_CIRCUITS], *(beyond_this_machine(direct) or direct))
        return tuple(f"{place}/p2p/{self.peer_id}" for place in chosen)

    async def is_placed(self) -> bool:
        """Wait a while for a relay's place; say whether others can reach us by now as they should."""
        try:
            async with asyncio.timeout(_RELAY_S):
                # The daemon sets no event when a relay has taken us in.
                while self._config.relays and not any(map(_is_circuit, await self._places())):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False
        return True

    async def neighbours(self) -> list[PeerAddress]:
        """Return whom we are connected with, and where; relays take no part in the swarm and do not count."""
        pb = self._parts.messages
        answer = await self._control.ask(pb.Request(type=pb.Request.LIST_PEERS), REJOIN_S)
        relays = {parse_peer_address(text).peer for text in self._config.relays}
        found = [
            (place, self._parts.peer_text(entry.id)) for entry in answer.peers for place in map(place_text, entry.addrs)
        ]
        known = [(place.removesuffix(f"/p2p/{peer}"), peer) for place, peer in found if place and peer not in relays]
        return [PeerAddress(place, peer) for place, peer in known]

    async def stay_joined(self, doors: Sequence[PeerAddress], met: KnownPeers) -> NoReturn:
        """Note whom we are connected with in `met`, and stay in touch with them.

        Where that is nobody, as after a night in sleep mode, knock at `doors` and at whom we met. Where the DHT alone
        has forgotten everybody, as after a minute without a line, which a connection outlasts, greet them.
        """
        while True:
            with contextlib.suppress(ConnectionError, UserError):
                present = await self.neighbours()
                if present:
                    met.note(present)
                    if not self.records.neighbours:
                        await self._greet(present)
                else:
                    answering = await self.knock(met.beside(doors))
                    self.rejoined += len(answering)
                    await self._greet(answering)
            await asyncio.sleep(REJOIN_S)

    async def _greet(self, peers: Sequence[PeerAddress]) -> None:
        for each in peers:
            with contextlib.suppress(ConnectionError):
                await self.records.greet(self._parts.PeerID.from_base58(each.peer))

    async def knock(self, doors: Sequence[PeerAddress], level: int = logging.DEBUG) -> list[PeerAddress]:
        """Connect to peers and return those that answered; `UserError` when there are some and none did.

        The failures of others are logged.
        """
        causes = await self._control.connect_all(doors, self._timeouts.reach_s)
        failed = {str(address): cause for address, cause in causes.items() if cause is not None}
        if failed and len(failed) == len(doors):
            raise unreachable(failed)
        for place, cause in failed.items():
            logger.log(level, "Of the ways into the swarm %s cannot be reached: %s", place, cause)
        return [address for address, cause in causes.items() if cause is None]

    async def granted(self, doors: Sequence[PeerAddress]) -> Grant:
        await self.knock(doors)
        return await self._control.granted(doors[0].peer, self._timeouts.reach_s)

    # Inside.

    async def _places(self) -> list[str]:
        return await self._control.places(self._timeouts.dht_s)

    async def _join(self, doors: Sequence[PeerAddress], alone: bool) -> None:
        reached: list[PeerAddress] = []
        try:
            await self._check_places()
            await self.dialer.listen()
            try:
                reached = await self.knock(doors, logging.DEBUG if alone else logging.WARNING)
            except UserError:
                if not alone:
                    raise
            await self.records.join(self._parts, self._client, reached, self._timeouts.start_s)
        except ConnectionError as error:
            raise daemon_trouble(str(error)) from None
        if doors and not self.records.neighbours and not alone:
            raise UserError(
                "Nobody who answers takes part in this run.",
                why=f"at {' and '.join(str(address) for address in reached)} is another run, or another version",
                hint="ask whoever sent the invite for a fresh one, and for the version of this program that they use",
                code=Exit.OTHER_RUN,
            )

    async def _check_places(self) -> None:
        """Raise `UserError` unless the daemon listens: on a taken port it starts without a word."""
        found = await self._places()
        ports = {port_of(place) for place in found}
        deaf = [] if self._config.announce else [text for text in self._config.listen if port_of(text) not in ports]
        if deaf or not found:
            raise UserError(
                f"The libp2p daemon does not listen on {' and '.join(deaf) or 'any address'}.",
                why="another program took the port in that moment, or this machine has no such address",
                hint="start again, or choose another port with --listen",
                code=Exit.PORT_TAKEN,
            )


def _is_circuit(place: str) -> bool:
    return _CIRCUIT in place
