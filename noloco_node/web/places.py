"""Addresses and ports at which a node serves its page and its metrics, and the page's token."""

from __future__ import annotations

import errno
import ipaddress
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from noloco_node.errors import Exit, UserError, reason_of, usage_error
from noloco_node.storage.atomic_file import write_whole

OWN_HOST = "127.0.0.1"


class ServedPlace(NamedTuple):
    """An address and a port; 0 stands for any free port."""

    host: str
    port: int

    @property
    def is_own(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def is_meant(self, host: str) -> bool:
        """Say whether a request's `Host` is an address or our own name.

        A page of another host could make its reader's browser ask us under a name of that host.
        """
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() in ("localhost", self.host.encode("idna").decode().lower()):  # as a browser writes it
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def url(self, port: int) -> str:
        """Return its address with the port that the system gave."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"

    def refused(self, option: str, error: OSError) -> UserError:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            hint = f"give another port with {option}, or 0 for any that is free"
        else:
            hint = f"give an address of this machine with {option}"
        return UserError(
            f"Cannot serve {option} at {self.host}:{self.port}.",
            why="another program listens there" if error.errno == errno.EADDRINUSE else reason_of(error),
            hint=hint,
            code=Exit.PORT_TAKEN,
        )


class PagePlace(NamedTuple):
    """The address of a page. `token`: part of it; "" for a page that anybody may see."""

    place: ServedPlace
    token: str


def parse_place(text: str, option: str) -> ServedPlace:
    """Return the place that HOST:PORT, or PORT alone, names; raise `UserError` for any other text."""
    typed, _, port = text.rpartition(":")
    host = typed[1:-1] if (in_brackets := typed.startswith("[") and typed.endswith("]")) else typed
    why = ""
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        why = "it has no port between 0 and 65535"
    elif ":" in host and not in_brackets:
        why = "an address with colons stands in brackets"
    else:
        try:
            host.encode("idna")
        except UnicodeError:
            why = f"no host is called {host!r}"
    if why:
        hint = f"give a port, such as {option} 9464, or an address and a port: 127.0.0.1:9464, [::1]:9464"
        raise usage_error(f"{text!r} is no place to serve {option} at.", why, hint)
    return ServedPlace(host or OWN_HOST, int(port))


def metrics_place(text: str | None, *, is_open: bool) -> ServedPlace | None:
    """Return the place that `--metrics` names; raise `UserError` for one that others reach unless `is_open`."""
    if text is None:
        return None
    place = parse_place(text, "--metrics")
    if not is_open and not place.is_own:
        raise usage_error(
            f"Metrics at {place.host} could be read by others.",
            why="they are served without a password, and say what this machine does and when",
            hint="leave the address out, or add --metrics-open where a firewall or a container keeps others away",
        )
    return place


def kept_token(path: Path) -> str:
    """Return the token that a home keeps, or keep a new one, so that the address outlives the process."""
    with suppress(OSError, UnicodeDecodeError):
        found = path.read_text().strip()
        if found.isascii() and found.isalnum() and len(found) >= 32:
            return found
    token = new_token()
    with suppress(UserError):
        write_whole(path, token.encode())
    return token


def new_token() -> str:
    return secrets.token_hex(16)
