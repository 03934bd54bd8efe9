"""What one peer's network is opened with: its settings, the key that makes its peer id, the secret of its run.

**Identity**: an Ed25519 key in a file that holds libp2p's `PrivateKey` protobuf (key type, then seed and public key),
which the daemon reads. Keys of other types, such as the RSA ones that hivemind writes, sign no records. The file is
created once, readable by its owner alone, whole or not at all, so the peer id survives restarts.

**Secret**: libp2p tells every caller which protocols a peer speaks. So their names follow from the run's id one way:
they keep runs apart, and open nothing. A caller proves that it knows the id, with a code for this caller, callee and
topic (libp2p authenticates both ids, so nobody can use another's), and every request of the DHT carries a code as well.
In a run with an owner the request also carries the caller's ticket.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from pathlib import Path
from typing import Self

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import ID_HEADER, KEY_HEADER, identity_errors, read_key
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.network.timeouts import PeerLiveness, TimeoutBounds
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.storage import atomic_file

EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)  # a free TCP port on all interfaces

PROOF_BYTES = 32
_TAG_BYTES = 16


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds."""

    beat_s: float = 1.0
    silence_s: float = 6.0  # a peer that was not heard for so long is given up, as long as we do not know its line
    least_silence_s: float = 5.0  # silence of a peer on an even line; three beats at least
    most_silence_s: float = 60.0  # silence of a peer whose line stutters
    stall_s: float = 30.0  # a peer that is alive and takes none of our bytes for so long is given up
    most_stall_s: float = 240.0
    """The longest time of a peer whose line was seen to take our bytes in pieces that far apart."""
    linger_s: float = 30.0  # how long a stream that we ended waits for the other's end
    open_s: float = 60.0  # for a peer to accept a stream
    return_s: float = 20.0  # for another daemon to take the place of one that died
    reach_s: float = 15.0  # for a bootstrap peer to answer
    dht_s: float = 20.0  # for the DHT to store or find records
    start_s: float = 120.0  # for the libp2p daemon to start

    def silences(self) -> TimeoutBounds:
        return TimeoutBounds(max(self.least_silence_s, 3 * self.beat_s), self.most_silence_s, self.silence_s)

    def liveness(self) -> PeerLiveness:
        return PeerLiveness(self.beat_s, self.silences(), self.stalls())

    def stalls(self) -> TimeoutBounds:
        return TimeoutBounds(self.stall_s, self.most_stall_s, self.stall_s)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How many conversations are answered at the same time, and what may come on them before it is received."""

    conversations: int = 512
    per_peer: int = 64
    per_prefix: int = 256  # of one public address prefix, or of all that come through relays: names are free
    unread_bytes: int = 1 << 30

    @classmethod
    def within(cls, free_bytes: int | None) -> Self:
        """Return one for a machine with so much free memory, of which a quarter may wait to be received."""
        return cls() if free_bytes is None else cls(unread_bytes=free_bytes // 4)


class Reachability(StrEnum):
    """How others come to us."""

    AUTO = "auto"  # ask whom we join by whether they can dial us, and use relays where they cannot
    RELAYED = "relayed"  # through relays alone: we are behind a router that lets nobody in
    OPEN = "open"  # directly, and others may use us as a relay: a bootstrap peer


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer's network needs to know. Addresses are multiaddrs."""

    run: str  # the id of the run, which opens it (`RunSecret`). Peers of another run cannot converse with us
    identity: Path | None = None  # the key file, created when absent; None for a passing identity
    listen: tuple[str, ...] = EVERYWHERE
    announce: tuple[str, ...] = ()  # where others can reach us, when the daemon cannot find that out itself
    bootstrap: tuple[str, ...] = ()  # peers to join by, each ending in /p2p/ID; none to begin a new network
    reach: Reachability = Reachability.AUTO
    relays: tuple[str, ...] = ()  # relays to use before those that the swarm tells of, each ending in /p2p/ID
    lends_line: bool = True
    """Whether peers who find no other relay may use us as one, with libp2p's usual limits for each of them."""
    admission: AdmissionState | None = None
    """Which peers' records we keep, and whose calls in the DHT we answer; None: a run without an owner."""
    timeouts: TimeoutSettings = TimeoutSettings()
    capacity: Capacity = Capacity()


class RunSecret:
    """The secret of a run: its id."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.prefix = f"/noloco/{WIRE_VERSION}/{self._derived('names')[:_TAG_BYTES].hex()}/"
        """Begins every protocol name."""
        self._key = self._derived("proofs")

    def __repr__(self) -> str:
        return f"RunSecret({self.prefix})"

    def key(self, name: str) -> str:
        return f"{self._run}/{name}"

    def proof(self, caller: str, callee: str, topic: str) -> bytes:
        """Return what shows `callee` that `caller` knows the run, in a conversation about `topic`."""
        return self.code("call", caller.encode(), callee.encode(), topic.encode())

    def code(self, purpose: str, *parts: bytes) -> bytes:
        told = b"".join(len(part).to_bytes(8) + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._key, told, "sha256")

    def _derived(self, purpose: str) -> bytes:
        return hashlib.sha256(f"noloco {purpose}\0{self._run}".encode()).digest()


def ensure_identity(path: Path) -> bool:
    """Create the key file unless it is there, and say whether it was; `UserError` when it cannot be used."""
    with identity_errors(path):
        if path.exists():
            if read_key(path) is None:
                raise _damaged(path)
            return True
        key = Ed25519PrivateKey.generate()
        atomic_file.write(path, KEY_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw())
        return False


def peer_bytes(path: Path) -> bytes:
    """Return the peer id that a key file makes, in bytes.

    An Ed25519 id is the multihash `identity` of the public key in libp2p's protobuf: the key itself.
    """
    return ID_HEADER + path.read_bytes()[-32:]


def identity_in_use(why: str, key: Path) -> UserError:
    """Return the error of two processes with one identity. `key`: its file."""
    return UserError(
        "Another node with the identity of this one is running.",
        why=why,
        hint=f"stop the other one; if this home is a copy of its home, delete {key} here to become a new peer",
        code=Exit.HOME_IN_USE,
    )


def _damaged(path: Path) -> UserError:
    return config_error(
        "The identity of this peer is damaged.",
        why=f"{path} holds no Ed25519 key of libp2p, or one whose halves do not belong together",
        hint="restore it from a backup, or delete it to become a new peer; the weights in the home stay",
    )
