"""One question, one answer: the control socket of the libp2p daemon.

The daemon takes one protobuf request a connection, with its length before it as a varint, and answers in the same form.
Its answers must never keep us waiting: each has a deadline, and the daemon's death ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from noloco_node.libp2p.daemon import Daemon

T = TypeVar("T")

_ANSWER_BYTES = 1 << 20


class Control:
    """Asks the daemon; `messages` is the module of its protobuf messages."""

    def __init__(self, daemon: Daemon, messages: Any) -> None:
        self._daemon, self._messages = daemon, messages

    def __repr__(self) -> str:
        return f"Control({self._daemon!r})"

    async def ask(self, request: Any, wait_s: float) -> Any:
        """Make one request.

        Raises ConnectionRefusedError with the daemon's words when it says no, ConnectionAbortedError when it does not
        answer in time, ConnectionResetError when it is gone.
        """
        try:
            async with asyncio.timeout(wait_s):
                reader, writer = await self.reach(asyncio.open_unix_connection(self._daemon.control_path))
                try:
                    writer.write(delimited(request))
                    await writer.drain()
                    answer = self._messages.Response.FromString(await _read_delimited(reader))
                finally:
                    writer.close()
        except TimeoutError:
            raise ConnectionAbortedError(f"no answer within {wait_s:g} s") from None
        if answer.type == answer.ERROR:
            raise ConnectionRefusedError(answer.error.msg)
        return answer

    async def reach(self, connecting: Coroutine[Any, Any, T]) -> T:
        """Connect to the daemon; ConnectionResetError when it is gone: our loss is no fault of the peer we want."""
        try:
            return await connecting
        except OSError as error:
            raise ConnectionResetError(f"our own libp2p daemon cannot be reached: {error.strerror}") from None

    async def bounded(self, call: Coroutine[Any, Any, T], wait_s: float) -> T:
        """Await a call that may hang for ever: no longer than `wait_s` seconds, nor than the daemon lives."""
        task = asyncio.get_running_loop().create_task(call)
        ends: set[asyncio.Future[Any]] = {task, self._daemon.died}
        try:
            await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._daemon.died.done():
                raise ConnectionResetError(f"our own libp2p daemon died: {self._daemon.died.result()}")
            raise ConnectionAbortedError(f"no answer within {wait_s:g} s")
        finally:
            task.cancel()


def delimited(message: Any) -> bytes:
    """Return a protobuf message with its length before it, as a varint."""
    content: bytes = message.SerializeToString()
    length, prefix = len(content), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + content


async def _read_delimited(reader: asyncio.StreamReader) -> bytes:
    """Read one message with its length before it; ConnectionResetError when the daemon stops in the middle."""
    length = shift = 0
    try:
        while True:
            byte = (await reader.readexactly(1))[0]
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if length > _ANSWER_BYTES or shift > 28:
                break
        if length > _ANSWER_BYTES:
            raise ConnectionResetError(f"the daemon announces an answer of {length} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the daemon did not finish its answer") from None
