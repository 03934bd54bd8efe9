"""What a relay grants for each circuit: asked of it before anybody relies on it.

p2pd sets its relay service up twice, with the limits that it was started with and with libp2p's own, and whichever
comes last counts: of relays started on a busy machine, every fourth ended each circuit after 128 KiB or two minutes.
Nothing that it prints tells which it was. But whoever reserves a place at a relay is told (libp2p's circuit protocol,
version 2), so a neighbour reserves one.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from noloco_node.libp2p.daemon.control import Control
from noloco_node.libp2p.daemon.framing import delimited, read_delimited
from noloco_node.libp2p.daemon.process import Daemon
from noloco_node.libp2p.hivemind_compat import HivemindParts

HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A message of two bytes: field 1, the kind, is 0."""
_LIMIT, _STATUS, _OK = 4, 5, 100
_DURATION, _DATA = 1, 2


class Grant(NamedTuple):
    """How long a circuit lasts (seconds), and how many bytes it carries each way; 0: without limit."""

    duration_s: int
    data_bytes: int

    def covers(self, wanted: Grant) -> bool:
        """Say whether it is no less than what is wanted."""
        return all(given == 0 or 0 < least <= given for given, least in zip(self, wanted, strict=True))


async def granted(parts: HivemindParts, control: Control, daemon: Daemon, relay: str, wait_s: float) -> Grant:
    """Reserve a place at a relay that `daemon` is connected with, and return what it grants.

    Raises ConnectionError where it does not answer, refuses, or is no relay.
    """
    pb = parts.messages
    wanted = pb.StreamOpenRequest(peer=parts.peer_bytes(relay), proto=[HOP])
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await control.reach(asyncio.open_unix_connection(daemon.control_path))
            try:
                writer.write(delimited(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)))
                opened = pb.Response.FromString(await read_delimited(reader))
                if opened.type == opened.ERROR:
                    raise ConnectionRefusedError(f"{relay} relays for nobody: {opened.error.msg}")
                writer.write(_RESERVE)
                return grant_of(await read_delimited(reader))
            finally:
                writer.close()
    except TimeoutError:
        raise ConnectionAbortedError(f"no answer within {wait_s:g} s") from None


def grant_of(raw: bytes) -> Grant:
    """Return the limits in an answer to a reservation; ConnectionRefusedError where it is none."""
    answer = _fields(raw)
    if answer.get(_STATUS) != _OK:
        raise ConnectionRefusedError(f"the relay gives no place (status {answer.get(_STATUS)})")
    limit = answer.get(_LIMIT, b"")
    found = _fields(limit) if isinstance(limit, bytes) else {}
    duration_s, data_bytes = (found.get(field, 0) for field in (_DURATION, _DATA))
    if not isinstance(duration_s, int) or not isinstance(data_bytes, int):
        raise ConnectionRefusedError("the relay's answer is malformed")
    return Grant(duration_s, data_bytes)


def _fields(raw: bytes) -> dict[int, Any]:
    """Return the fields of a protobuf message by their numbers, of several of one number the last."""
    try:
        message = Empty.FromString(raw)
    except DecodeError:
        raise ConnectionRefusedError("the relay's answer is malformed") from None
    return {field.field_number: field.data for field in UnknownFieldSet(message)}
