"""Multiaddrs: parsed with py-multiaddr, checked, tried out, remembered, and why one of them cannot be reached.

libp2p's daemon starts without a word on a TCP port that another program holds, and then nobody can reach it. So we bind
the port first, for a moment, as a test; the daemon's own answer is checked as well.

A wrong address, a closed port, an unknown host and a wrong peer id ask for different things to be done. The daemon
tells them apart in the words of Go's network library; `plain_cause` puts them plainly.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from random import Random, SystemRandom
from typing import NamedTuple

import msgspec
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from noloco_node.errors import Exit, UserError, config_error
from noloco_node.network.bans import public_prefix

_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_TRANSPORTS = (("tcp",), ("tcp", "ws"), ("udp", "quic-v1"))
_QUIC_ALONE = "over UDP the daemon speaks QUIC alone: end it in /quic-v1"
RELAYS_KEY = "relays"  # of the records, after the run's id; each is a MessagePack list of addresses that end in /p2p/ID
RELAY_PLACES = 4  # addresses of one relay
_MOST_RELAYS = 16
_MOST_LOOKED_AT = 1024  # addresses: anybody may publish some, and have a peer look at them by a question
SHORTEST_ID = 46  # in letters, of an RSA key; those of other keys are longer
NO_PEER_ID = "what follows /p2p/ is no peer id; a character may be missing or wrong"
_ADDRESS_CHARACTERS = 256

_SYSTEM_RNG = SystemRandom()
_PLACES = msgspec.msgpack.Decoder(list[str])

_MOST_KNOWN = 32  # peers whose last place a `KnownPeers` remembers

EVERY_INTERFACE = ("0.0.0.0", "::")
_MEANINGS = {
    "failed to negotiate security protocol": "whoever answers there is no peer: another program, or a proxy in between",
    "connection refused": "connection refused: no program listens there",
    "no good addresses": "the host's name does not resolve, or none of its addresses can be dialled from here",
    "no such host": "the host's name does not resolve",
    "i/o timeout": "no answer (is a firewall in between?)",
    "network is unreachable": "this machine has no route to it",
    "no route to host": "this machine has no route to it",
}


class PeerAddress(NamedTuple):
    """Where a peer can be dialled: `transport` without the peer id, such as /ip4/192.0.2.1/tcp/4001, and the id
    itself."""

    transport: str
    peer: str

    def __str__(self) -> str:
        return f"{self.transport}/p2p/{self.peer}"


def parse_peer_address(text: str) -> PeerAddress:
    """Parse a multiaddr that ends in /p2p/ID; ValueError says which part is wrong."""
    if len(text) > _ADDRESS_CHARACTERS:  # a long peer id takes seconds to be decoded
        raise ValueError(f"{text[:40]!r}... has {len(text)} characters, at most {_ADDRESS_CHARACTERS} are allowed")
    parts = _parse(text)
    if not parts or parts[-1][0] != "p2p" or parts[-1][1] is None:
        raise ValueError(f"{text!r} does not end in /p2p/ and a peer id")
    if len(parts[-1][1]) < SHORTEST_ID:  # a cut may leave a digest of fewer bytes
        raise ValueError(f"{text!r} is no address: {NO_PEER_ID}")
    if len(parts) == 1:
        raise ValueError(f"{text!r} names a peer but no place to dial, such as /ip4/192.0.2.1/tcp/4001 before /p2p")
    return PeerAddress(str(Multiaddr(text)).rpartition("/p2p/")[0], parts[-1][1])


def relay_record(places: Sequence[str]) -> bytes:
    return msgspec.msgpack.encode(list(places))


def relays_of(records: Mapping[str, bytes], rng: Random = _SYSTEM_RNG) -> tuple[str, ...]:
    """Return the addresses of relays that records name; what is malformed counts as not said."""
    # By turns, so that no record hides the others; in any order, for peers can try ids until theirs come first.
    by_turns = zip_longest(*map(_places_in, rng.sample(list(records.values()), len(records))))
    return checked_relays(place for place in chain.from_iterable(by_turns) if place is not None)


def _places_in(raw: bytes) -> list[str]:
    try:
        return _PLACES.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def checked_relays(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return what is good among addresses of relays: of at most 16 relays, at most four of each."""
    found: dict[str, list[str]] = {}
    for text in islice(addresses, _MOST_LOOKED_AT):
        try:
            address = parse_peer_address(text)
        except ValueError:
            continue
        # A comma would smuggle a second address into the daemon's command line.
        if "," not in text and _is_readable(address) and (address.peer in found or len(found) < _MOST_RELAYS):
            found.setdefault(address.peer, []).append(str(address))
    return tuple(place for places in found.values() for place in dict.fromkeys(places[:RELAY_PLACES]))


def _is_readable(address: PeerAddress) -> bool:
    """Say whether the daemon can read an address: given one of a kind that it does not know, it ends at once."""
    host, *transport = (kind for kind, _ in _parse(address.transport))
    return host in _HOSTS and tuple(transport) in _TRANSPORTS


def place_text(raw: bytes) -> str:
    """Return an address that the daemon tells of as text; empty if it is of a kind that we do not know."""
    try:
        return str(Multiaddr(raw))
    except Exception:  # a stranger's bytes; py-multiaddr raises errors of many kinds for them
        return ""


def check_listen(addresses: Sequence[str]) -> None:
    """Check that we may listen on `addresses`; `UserError` when one is wrong, or its port is taken."""
    for text in addresses:
        try:
            parts = _parse(text)
        except ValueError as error:
            raise _not_an_address(text, str(error)) from None
        kinds = [kind for kind, _ in parts]
        if len(parts) < 2 or kinds[0] not in _FAMILIES or kinds[1] not in ("tcp", "udp"):
            raise _not_an_address(text, "an address to listen on starts with /ip4/ or /ip6/, then /tcp/ and a port")
        if kinds[1] == "udp" and "quic-v1" not in kinds:
            raise _not_an_address(text, _QUIC_ALONE)
        host, port = parts[0][1], parts[1][1]
        if host is not None and port not in (None, "0"):
            _try_port(text, kinds, host, int(port or 0))


def check_announce(addresses: Sequence[str]) -> None:
    """Check that others may dial `addresses`; `UserError` (CONFIG) when one is wrong."""
    for text in addresses:
        try:
            parts = _parse(text)
        except ValueError as error:
            raise _not_dialable(text, str(error)) from None
        kinds = [kind for kind, _ in parts]
        if len(parts) < 2 or kinds[0] not in _HOSTS or kinds[1] not in ("tcp", "udp") or parts[1][1] == "0":
            raise _not_dialable(text, "an announced address needs the port that others can reach")
        if kinds[1] == "udp" and "quic-v1" not in kinds:
            raise _not_dialable(text, _QUIC_ALONE)
        if "p2p" in kinds:
            raise _not_dialable(text, "it names a peer; the id of this one is added where it is told")
        if parts[0][1] in EVERY_INTERFACE:
            raise _not_dialable(text, "it stands for every interface of a machine, and nobody can dial it")


def port_of(text: str) -> int:
    parts = text.split("/")
    ports = [parts[i + 1] for i, part in enumerate(parts[:-1]) if part in ("tcp", "udp")]
    return int(ports[0]) if ports and ports[0].isdecimal() else 0


def with_port(text: str, port: int) -> str:
    parts = text.split("/")
    place = next(i for i, part in enumerate(parts) if part in ("tcp", "udp"))
    return "/".join([*parts[: place + 1], str(port), *parts[place + 2 :]])


def with_ports_chosen(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return addresses to listen on with a free port wherever they leave it open.

    The daemon could choose as well, but another port each time that it is started again.
    """
    return tuple(text if port_of(text) else with_port(text, _free_port(text)) for text in addresses)


def _free_port(text: str) -> int:
    (family, host), (transport, _), *_ = _parse(text)
    try:
        with _trial(family, transport) as trial:
            trial.bind((host, 0))
            return int(trial.getsockname()[1])
    except OSError as error:
        raise _not_here(text, error) from None


def _trial(family: str, transport: str) -> socket.socket:
    """Return a socket like the daemon's, which over IPv6 leaves the ports of IPv4 to others."""
    trial = socket.socket(_FAMILIES[family], socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)
    if family == "ip6":
        trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return trial


def beyond_this_machine(addresses: Sequence[str]) -> list[str]:
    """Return the addresses that are not the loopback interface's."""
    return [text for text in addresses if not text.startswith(("/ip4/127.", "/ip6/::1/"))]


def present(before: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """Return where others reach us: `now`, or where they did `before` while this machine has no line."""
    has_line = bool(beyond_this_machine(now)) or not beyond_this_machine(before)
    return now if now and has_line else before


def from_this_machine(listen: Sequence[str]) -> list[str]:
    """Return the addresses at which a program on this machine reaches one that listens at these."""
    return [text.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/") for text in listen]


def _parse(text: str) -> list[tuple[str, str | None]]:
    try:
        return [(protocol.name, value) for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError) as error:
        why = str(error).removeprefix(f"Invalid MultiAddr {text!r}: ").removesuffix(f" (string: {text})")
        if why.startswith("Invalid CID"):
            why = NO_PEER_ID
        raise ValueError(f"{text!r} is no address: {why}") from None


def _not_an_address(text: str, why: str) -> UserError:
    return _not_usable(text, why, "write it like /ip4/0.0.0.0/tcp/4001 (port 0 to listen lets the system choose)")


def _not_dialable(text: str, why: str) -> UserError:
    return _not_usable(text, why, "announce what others dial, like /ip4/203.0.113.7/tcp/4001; or leave --announce out")


def _not_usable(text: str, why: str, hint: str) -> UserError:
    return config_error(f"The address {text!r} cannot be used.", why=why, hint=hint)


def _not_here(text: str, error: OSError) -> UserError:
    return _not_usable(
        text,
        f"this machine cannot listen there: {error.strerror}",
        "listen on an address that this machine has, or on all: /ip4/0.0.0.0/tcp/4001 (ports below 1024 are root's); "
        "the one that others dial, a router's, belongs to --announce",
    )


def _try_port(text: str, kinds: Sequence[str], host: str, port: int) -> None:
    try:
        with _trial(kinds[0], kinds[1]) as trial:
            if kinds[1] == "tcp":
                # A port whose last connection is still in TIME_WAIT is free; one that somebody listens on is not.
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"The port {port} is taken.",
                why=f"another program already listens on {text}",
                hint="choose another port, or 0 to let the system choose one; "
                "if it is an earlier node of yours, stop that one first",
                code=Exit.PORT_TAKEN,
            ) from None
        raise _not_here(text, error) from None


def bootstrap_address(text: str) -> PeerAddress:
    try:
        return parse_peer_address(text)
    except ValueError as error:
        raise config_error(
            "The address of a bootstrap peer is wrong.",
            why=str(error),
            hint="copy it from the line that `noloco-node bootstrap` printed",
        ) from None


def plain_cause(words: str, address: PeerAddress) -> str:
    """Return in plain words why the daemon did not reach an address."""
    mine = [line for line in words.splitlines() if f"[{address.transport}" in line]
    if mine:
        text = mine[0].split("] ", 1)[-1]
    else:
        # A name that does not resolve leaves no line of its own, and other addresses of that peer may have left theirs.
        text = "no good addresses" if address.transport.startswith("/dns") else words
    if "remote key matches " in text:
        return f"another peer answers there: {text.rsplit(' ', 1)[-1]}"
    for sign, meaning in _MEANINGS.items():
        if sign in text:
            return meaning
    return text


def unreachable(causes: Mapping[str, str]) -> UserError:
    return UserError(
        "No bootstrap peer could be reached.",
        why="\n       ".join(f"{address}: {cause}" for address, cause in causes.items()),
        hint="ask whoever sent the invite whether the bootstrap peer still runs and whether its address is right",
        code=Exit.UNREACHABLE,
    )


class KnownPeers:
    """The last peers met, at most 32, each with the place where it was met last.

    Of more the address prefix that has most of them loses the one met longest ago: names are free.
    """

    def __init__(self, met: Iterable[PeerAddress] = ()) -> None:
        self._places: dict[str, PeerAddress] = {}
        self.note(met)

    def note(self, addresses: Iterable[PeerAddress]) -> None:
        """Remember these as the latest. A peer met through a relay alone has no place that can be dialled."""
        for address in addresses:
            if "/p2p-circuit" not in address.transport:
                self._places.pop(address.peer, None)
                self._places[address.peer] = address
        crowds, later = Counter[str](), dict[str, int]()  # in one pass: a bootstrap peer is connected with thousands
        for peer, address in reversed(self._places.items()):
            crowd = public_prefix(address.transport)
            later[peer] = crowds[crowd]
            crowds[crowd] += 1
        kept = set(sorted(later, key=later.__getitem__)[:_MOST_KNOWN])
        self._places = {peer: address for peer, address in self._places.items() if peer in kept}

    def beside(self, doors: Iterable[PeerAddress]) -> list[PeerAddress]:
        """Return `doors`, then all others that we remember, the latest first."""
        first = list(doors)
        return [*first, *(address for address in reversed(self._places.values()) if address not in first)]

    def doors(self) -> tuple[str, ...]:
        """Return as text where they can be dialled, the latest first."""
        return tuple(text for text in map(str, self.beside(())) if _reads(text))


def _reads(text: str) -> bool:
    """Say whether an address is one that a person could have typed; what daemons tell of may be of newer kinds."""
    try:
        parse_peer_address(text)
    except ValueError:
        return False
    return True
