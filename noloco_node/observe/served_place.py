"""Where something is served over HTTP: an address and a port that the owner names."""

from __future__ import annotations

import errno
import ipaddress
from typing import NamedTuple

from noloco_node.errors import Exit, UserError, reason_of

OWN_HOST = "127.0.0.1"


class ServedPlace(NamedTuple):
    """An address and a port; port 0 is any that is free."""

    host: str
    port: int

    @property
    def is_own(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def is_meant(self, host: str) -> bool:
        """Say whether a request's `Host` names an address, or our own name: no foreign name that leads to us.

        A page of another host in the same browser could make it ask us under a name of its own.
        """
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name in ("localhost", self.host):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def url(self, port: int) -> str:
        """Return its address with the port that was found."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


def parse_place(text: str, option: str) -> ServedPlace:
    """Return the place that HOST:PORT, or PORT alone, names; raise `UserError` for none. `option`: that takes it."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or OWN_HOST
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(
            f"{text!r} is no place to serve {option} at.",
            why="it has no port between 0 and 65535",
            hint=f"give a port, such as {option} 9464, or an address and a port",
            code=Exit.USAGE,
        )
    return ServedPlace(host, int(port))


def refused_place(place: ServedPlace, option: str, error: OSError) -> UserError:
    """Return what to say where nothing can be served at a place."""
    return UserError(
        f"Cannot serve {option} at {place.host}:{place.port}.",
        why="another program listens there" if error.errno == errno.EADDRINUSE else reason_of(error),
        hint=f"give another port with {option}, or 0 for any that is free",
        code=Exit.PORT_TAKEN,
    )
