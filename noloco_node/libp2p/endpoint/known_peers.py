"""Whom we have met and where: what a peer goes back by when its daemon died, its machine slept or its hours have come
again, and nobody of the invite is left.
"""

from __future__ import annotations

from collections.abc import Iterable

from noloco_node.libp2p.endpoint.addresses import PeerAddress, parse_peer_address

_MOST = 32


class KnownPeers:
    """The last peers met, at most 32, each with the place where it was met last."""

    def __init__(self) -> None:
        self._places: dict[str, PeerAddress] = {}

    def note(self, addresses: Iterable[PeerAddress]) -> None:
        """Remember these as the latest. Who was met through a relay alone is not at a place that can be dialled."""
        for address in addresses:
            if "/p2p-circuit" not in address.transport:
                self._places.pop(address.peer, None)
                self._places[address.peer] = address
        for peer in list(self._places)[:-_MOST]:
            del self._places[peer]

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
