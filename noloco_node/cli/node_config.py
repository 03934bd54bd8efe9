"""What one peer may choose for itself, whatever the run."""

from __future__ import annotations

import msgspec

from noloco_node.limits.budget import OwnerLimits


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This machine: what one peer may choose for itself, whatever the run."""

    home: str
    """Directory of this node's identity, journal and checkpoint; it belongs to one running node."""
    device: str = "auto"
    listen: tuple[str, ...] = ()
    """Multiaddrs to listen on; none: a free TCP port on all interfaces."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell others, where they differ from those listened on (behind a port forwarding)."""
    relayed: bool = False
    """Be reached through relays; otherwise others are asked whether they can dial us."""
    stage: int | None = None
    """The stage to serve; None takes the one that limits the swarm."""
    stay: bool = False
    """Stays at its stage for good, also where the owner did not name it."""
    data: str | None = None
    """Another source of text than the run's, as `with_source` reads it."""
    local: tuple[str, ...] = ()
    """Directories of this machine that the run file may name."""
    most_memory_bytes: int | None = None
    """Of the device's memory; None: all that is free."""
    most_disk_bytes: int | None = None
    """That the run's model may take when it is fetched; None: all that is free."""
    threads: int | None = None
    """Threads that torch may use; None leaves it to torch."""
    slowdown: float = 1.0
    """How many times slower than it is the device acts: for trials of uneven swarms."""
    keep: int = 3
    """Checkpoints that are kept."""
    keep_snapshots: int = 0
    """Rounds between two snapshots of each other stage; 0 keeps none."""
    allowance: OwnerLimits = OwnerLimits()
    """What its owner lets it take of the line, and when."""
    linger_s: float = 600.0
    """How long a finished node goes on serving its weights."""
    refresh_s: float = 10.0
    """Time between two refreshes of the own record and of the roster."""
