"""One question, one answer: the control socket of the libp2p daemon.

The daemon takes one protobuf request a connection and answers in the same form.
Its answers must never keep us waiting: each has a deadline, and the daemon's death ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from noloco_node.libp2p.daemon.framing import delimited, read_delimited
from noloco_node.libp2p.daemon.process import Daemon

T = TypeVar("T")


class Control:
    """Asks the daemon; `messages` is the module of its protobuf messages."""

    def __init__(self, daemon: Daemon, messages: Any) -> None:
        self._daemon, self._messages = daemon, messages

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
                    answer = self._messages.Response.FromString(await read_delimited(reader))
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
