"""How the libp2p daemon is started: what it offers to others, as arguments of its command line."""

from __future__ import annotations

from pathlib import Path

import msgspec

from noloco_node.libp2p.endpoint.addresses import beyond_this_machine, parse_peer_address
from noloco_node.libp2p.endpoint.settings import Reachability


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon is started. `relays`: not empty if others reach us through these alone. `lends_line`: as in
    `Settings`. `dialable`: whether others reach us at all, as far as is known.
    """

    identity: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    lends_line: bool = True
    dialable: bool = True


RELAY_TIME_S, RELAY_DATA_BYTES = 24 * 3600, 1 << 40
"""What our relays grant each circuit."""
_ENOUGH_RELAYS = 4
_RELAY_BUFFER_BYTES = 256 * 1024
"""Each way of each circuit. By default 16 MiB: strangers who open circuits would take the memory."""


def arguments(config: DaemonConfig, reach: Reachability) -> list[str]:
    """Return what p2pd is started with: a full member of libp2p's DHT, where peers find each other's addresses.

    A peer that is known to sit behind a router says so itself: libp2p would take half a minute to find out. Relays it
    looks for until it knows four, for three minutes, in which it takes no place at any. So where we know fewer, it is
    told that these are all; where there are enough, it may look for others should these end.
    """
    chosen = [
        *_common(config),
        "-dhtServer=1",
        f"-relayService={int(config.lends_line)}",
        f"-natPortMap={int(bool(beyond_this_machine(config.listen)))}",
    ]
    if config.relays:
        chosen += ["-autoRelay=1", "-forceReachabilityPrivate=1", f"-trustedRelays={','.join(config.relays)}"]
        if len({parse_peer_address(relay).peer for relay in config.relays}) < _ENOUGH_RELAYS:
            chosen.append("-relayDiscovery=0")
    elif reach is Reachability.OPEN:
        chosen.append("-forceReachabilityPublic=1")
    return chosen


def relay_arguments(config: DaemonConfig) -> list[str]:
    """Return what p2pd is started with to relay and do nothing else.

    libp2p ends a relayed connection after half an hour or four gibibytes by default. Peers behind routers train for
    days; a circuit that breaks costs them a microbatch or a round, so these limits only keep a relay from being a
    stranger's for ever.
    """
    return [
        *_common(config),
        "-connHi=2048",
        "-connLo=1024",
        "-relayService=1",
        f"-relayTimeLimit={RELAY_TIME_S}s",
        f"-relayDataLimit={RELAY_DATA_BYTES}",
        "-relayMaxCircuits=128",
        "-forceReachabilityPublic=1",
    ]


def _common(config: DaemonConfig) -> list[str]:
    chosen = [
        f"-id={config.identity}",
        f"-hostAddrs={','.join(config.listen)}",
        "-tls=1",
        "-autonat=1",
        "-connManager=1",
        "-relay=1",
        f"-relayBufferSize={_RELAY_BUFFER_BYTES}",
        "-idleTimeout=30s",
    ]
    return [*chosen, f"-announceAddrs={','.join(config.announce)}"] if config.announce else chosen
