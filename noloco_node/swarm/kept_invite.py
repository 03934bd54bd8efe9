"""The invite that a home keeps: this peer and others that it met, so that the swarm is found when its bootstrap peers
are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from noloco_node.admission.peer_keys import peer_of, read_key
from noloco_node.errors import reason_of
from noloco_node.libp2p.addresses import PeerAddress, beyond_this_machine
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.swarm.invite import BESIDE, Invite, kept_addresses, widened
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import some_addresses

EVERY_S = 60.0
"""At most so often the file is written."""


class KeptInvite:
    """Keeps an invite in a file: `own` addresses, those of the invite that we came by, and some of living peers.

    Peers that were met before stay as long as no living one is known: by them a peer comes back that is alone.
    """

    def __init__(self, path: Path, came_by: Invite, own: Sequence[str], say: Callable[[str], None]) -> None:
        self._path, self._came_by, self._own, self._say = path, came_by, own, say
        self._others: list[str] = []
        self._written, self._refused = "", False

    def keep(self, others: Sequence[str] = ()) -> str:
        """Write the invite where it is another one than before, and return it; a disk that refuses is said once."""
        self._others = list(others)[:BESIDE] or self._others
        text = widened(self._came_by, self._others, self._own)
        if text != self._written:
            try:
                atomic_file.write(self._path, f"{text}\n".encode())
                self._written = text
            except OSError as error:
                if not self._refused:
                    self._say(f"cannot keep an invite in {self._path}: {reason_of(error)}")
                self._refused = True
        return text

    async def follow(self, membership: Membership) -> NoReturn:
        """Add living peers as the roster tells of them, until cancelled."""
        while True:
            self.keep(some_addresses(await membership.changed()))
            await asyncio.sleep(EVERY_S)


def met_before(invite: Invite, home: HomePaths) -> list[PeerAddress]:
    """Return whom an earlier life of this home met: by these it comes back where nobody of the invite is left."""
    return not_ours(kept_addresses(invite, home.path), home)


def not_ours(addresses: Sequence[PeerAddress], home: HomePaths) -> list[PeerAddress]:
    """Return the addresses of others: an invite that a home keeps names its own peer too."""
    key = read_key(home.identity) if home.identity.exists() else None
    ours = "" if key is None else peer_of(key.public_key().public_bytes_raw())
    return [each for each in addresses if each.peer != ours]


def from_where(addresses: Sequence[str]) -> str:
    """Say from where an invite with these addresses can be used."""
    if beyond_this_machine(addresses):
        return "from another machine"
    return "on this machine (others cannot dial 127.0.0.1: --listen and --announce give an address that they can)"
