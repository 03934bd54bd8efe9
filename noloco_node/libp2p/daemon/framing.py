"""A protobuf message with its length before it, as a varint: how libp2p's daemon talks on its sockets.

Written by `delimited`; read from a socket of our own by `read_delimited`; collected by `Preamble` where a protocol is
handed bytes as they come.
"""

from __future__ import annotations

import asyncio
from typing import Any

from noloco_node.network.schema import Violation

_ANSWER_BYTES = 1 << 20
_PREAMBLE_BYTES = 64 * 1024


def delimited(message: Any) -> bytes:
    """Return a protobuf message with its length before it, as a varint."""
    content: bytes = message.SerializeToString()
    length, prefix = len(content), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + content


async def read_delimited(reader: asyncio.StreamReader) -> bytes:
    """Read one message with its length before it; a ConnectionError when the daemon stops in the middle."""
    preamble, is_whole = Preamble(_ANSWER_BYTES), False
    try:
        while not is_whole:
            wanted = preamble.wants()
            wanted[:] = await reader.readexactly(len(wanted))
            is_whole = preamble.got(len(wanted))
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the daemon did not finish its answer") from None
    return bytes(preamble.content)


class Preamble:
    """Collects the daemon's first message on a stream: a length as a varint, then so many bytes.

    Behind it the other peer's own first `proof_bytes`, if any.
    """

    def __init__(self, most_bytes: int = _PREAMBLE_BYTES, proof_bytes: int = 0) -> None:
        self._most_bytes, self.proof = most_bytes, bytearray(proof_bytes)
        self._length = self._shift = 0
        self._counting, self._proving = True, False
        self.content = bytearray(1)
        self._view = memoryview(self.content)

    def wants(self) -> memoryview:
        """Return where the next bytes belong."""
        return self._view

    def got(self, count: int) -> bool:
        """Note so many bytes; say whether all is complete."""
        self._view = self._view[count:]
        if self._view:
            return False
        if not self._counting:
            return self._is_proven()
        byte = self.content[0]
        self._length |= (byte & 0x7F) << self._shift
        self._shift += 7
        self._counting = byte >= 0x80
        if self._length > self._most_bytes or (self._counting and self._shift > 28):
            raise Violation(f"the daemon announces a message of {self._length} bytes")
        self.content = bytearray(1 if self._counting else self._length)
        self._view = memoryview(self.content)
        return not self._counting and self._length == 0 and self._is_proven()

    def _is_proven(self) -> bool:
        """Say whether the proof is there as well, or make room for it."""
        if self._proving or not self.proof:
            return True
        self._proving, self._view = True, memoryview(self.proof)
        return False
