"""What a swarm shows of its run to everybody, and what only those know who hold an invite.

libp2p tells whoever asks which protocols a peer speaks. So their names follow from the run's id one way: they keep runs
apart, and open nothing. Whoever calls proves that it knows the id, with a code for this caller, callee and topic (both
ids are authenticated by libp2p, so that nobody can use another's), and every request of the DHT carries a code as well.
"""

from __future__ import annotations

import hashlib
import hmac

from noloco_node.network.wire import WIRE_VERSION

PROOF_BYTES = 32
_TAG_BYTES = 16


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
        """Return a key of the DHT for what the network keeps there itself."""
        return f"{self._run}/{name}"

    def proof(self, caller: str, callee: str, topic: str) -> bytes:
        """Return what shows `callee` that `caller` knows the run, in a conversation about `topic`."""
        return self.code("call", caller.encode(), callee.encode(), topic.encode())

    def code(self, purpose: str, *parts: bytes) -> bytes:
        """Return a message authentication code; equal ones have equal parts."""
        told = b"".join(len(part).to_bytes(8) + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._key, told, "sha256")

    def _derived(self, purpose: str) -> bytes:
        return hashlib.sha256(f"noloco {purpose}\0{self._run}".encode()).digest()
