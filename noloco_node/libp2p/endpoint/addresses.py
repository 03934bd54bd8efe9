"""Multiaddrs as a person types them: parsed with py-multiaddr, checked, and tried out before the daemon is started.

libp2p's daemon starts without a word on a TCP port that another program holds, and then nobody can reach it; so the
port is bound here first, for a moment. That is a test and no reservation, which is why the daemon's own answer is
checked as well.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import NamedTuple

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from noloco_node.errors import Exit, UserError

_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


class PeerAddress(NamedTuple):
    """Where a peer can be dialled: `transport` without the peer id, such as /ip4/192.0.2.1/tcp/4001, and the id
    itself."""

    transport: str
    peer: str

    def __str__(self) -> str:
        return f"{self.transport}/p2p/{self.peer}"


def parse_peer_address(text: str) -> PeerAddress:
    """Parse a multiaddr that ends in /p2p/ID; ValueError says which part is wrong."""
    parts = _parse(text)
    if not parts or parts[-1][0] != "p2p" or parts[-1][1] is None:
        raise ValueError(f"{text!r} does not end in /p2p/ and a peer id")
    if len(parts) == 1:
        raise ValueError(f"{text!r} names a peer but no place to dial, such as /ip4/192.0.2.1/tcp/4001 before /p2p")
    return PeerAddress(_join(parts[:-1]), parts[-1][1])


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
            raise _not_an_address(text, "over UDP the daemon speaks QUIC alone: end it in /quic-v1")
        host, port = parts[0][1], parts[1][1]
        if host is not None and port not in (None, "0"):
            _try_port(text, kinds, host, int(port or 0))


def check_announce(addresses: Sequence[str]) -> None:
    """Check the addresses that we tell others; `UserError` when one is wrong or has no port."""
    for text in addresses:
        try:
            parts = _parse(text)
        except ValueError as error:
            raise _not_an_address(text, str(error)) from None
        ports = [value for kind, value in parts if kind in ("tcp", "udp")]
        if not ports or "0" in ports:
            raise _not_an_address(text, "an announced address needs the port that others can reach")


def port_of(text: str) -> int:
    """Return the TCP or UDP port of an address, 0 where it has none."""
    parts = text.split("/")
    ports = [parts[i + 1] for i, part in enumerate(parts[:-1]) if part in ("tcp", "udp")]
    return int(ports[0]) if ports and ports[0].isdecimal() else 0


def with_port(text: str, port: int) -> str:
    """Return an address with its first TCP or UDP port replaced."""
    parts = text.split("/")
    place = next(i for i, part in enumerate(parts) if part in ("tcp", "udp"))
    return "/".join([*parts[: place + 1], str(port), *parts[place + 2 :]])


def with_ports_chosen(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return addresses to listen on with a free port wherever they leave it open.

    The daemon could choose as well, but another port each time that it is started again.
    """
    return tuple(text if port_of(text) else with_port(text, _free_port(text)) for text in addresses)


def _free_port(text: str) -> int:
    parts = _parse(text)
    kind = socket.SOCK_STREAM if parts[1][0] == "tcp" else socket.SOCK_DGRAM
    with socket.socket(_FAMILIES[parts[0][0]], kind) as trial:
        trial.bind((parts[0][1], 0))
        return int(trial.getsockname()[1])


def beyond_this_machine(addresses: Sequence[str]) -> list[str]:
    """Return the addresses that are not the loopback interface's."""
    return [text for text in addresses if not text.startswith(("/ip4/127.", "/ip6/::1/"))]


def from_this_machine(listen: Sequence[str]) -> list[str]:
    """Return the addresses at which somebody on this machine reaches whoever listens at these."""
    return [text.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/") for text in listen]


def _parse(text: str) -> list[tuple[str, str | None]]:
    try:
        return [(protocol.name, value) for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError) as error:
        raise ValueError(str(error)) from None


def _join(parts: Sequence[tuple[str, str | None]]) -> str:
    return "".join(f"/{kind}" if value is None else f"/{kind}/{value}" for kind, value in parts)


def _not_an_address(text: str, why: str) -> UserError:
    return _not_usable(text, why, "write it like /ip4/0.0.0.0/tcp/4001 (port 0 to listen lets the system choose)")


def _not_usable(text: str, why: str, hint: str) -> UserError:
    return UserError(f"The address {text!r} cannot be used.", why=why, hint=hint, code=Exit.CONFIG)


def _try_port(text: str, kinds: Sequence[str], host: str, port: int) -> None:
    kind = socket.SOCK_STREAM if kinds[1] == "tcp" else socket.SOCK_DGRAM
    with socket.socket(_FAMILIES[kinds[0]], kind) as trial:
        if kind == socket.SOCK_STREAM:
            # A port whose last connection is still in TIME_WAIT is free; one that somebody listens on is not.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
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
            raise _not_usable(
                text,
                f"this machine cannot listen there: {error.strerror}",
                "listen on an address that this machine has, or on all: /ip4/0.0.0.0/tcp/4001 (ports below 1024 are "
                "root's); the one that others dial, a router's, belongs to --announce",
            ) from None
