"""Why a bootstrap peer cannot be reached, in words that a person can act on.

A wrong address, a closed port, an unknown host and a wrong peer id ask for different things to be done, so they must
not read the same. The daemon does tell them apart, in the words of Go's network library; here they are put plainly.
"""

from __future__ import annotations

from collections.abc import Mapping

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.endpoint.addresses import PeerAddress, parse_peer_address


def bootstrap_address(text: str) -> PeerAddress:
    """Parse the address of a bootstrap peer; `UserError` when it is wrong."""
    try:
        return parse_peer_address(text)
    except ValueError as error:
        raise UserError(
            "The address of a bootstrap peer is wrong.",
            why=str(error),
            hint="copy it from the line that `noloco-node bootstrap` printed",
            code=Exit.CONFIG,
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


_MEANINGS = {
    "failed to negotiate security protocol": "whoever answers there is no peer: another program, or a proxy in between",
    "connection refused": "connection refused: no program listens there",
    "no good addresses": "the host's name does not resolve, or none of its addresses can be dialled from here",
    "no such host": "the host's name does not resolve",
    "i/o timeout": "no answer (is a firewall in between?)",
    "network is unreachable": "this machine has no route to it",
    "no route to host": "this machine has no route to it",
}


def unreachable(causes: Mapping[str, str]) -> UserError:
    """Return the error that names every address that was tried and why it failed."""
    return UserError(
        "No bootstrap peer could be reached.",
        why="\n       ".join(f"{address}: {cause}" for address, cause in causes.items()),
        hint="ask whoever sent the invite whether the bootstrap peer still runs and whether its address is right",
        code=Exit.UNREACHABLE,
    )
