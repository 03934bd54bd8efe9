"""What takes a while to open, and may be begun before it is asked for: a source's text.

A data set is looked up, a tokenizer loaded; none of it is needed before the first microbatch. A newcomer that copies
the state of its stage has the time: so the text is opened beside the copy and not after it, and what is wrong with it
is said before the copy has been paid for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node.data.text_source import TextSource


class BackgroundOpen:
    """The text that `make` opens in a thread, once; closing this closes it, asked for or not."""

    def __init__(self, make: Callable[[], TextSource]) -> None:
        self._make = make
        self._task: asyncio.Task[TextSource] | None = None

    def begin(self) -> None:
        """Begin to open it and to read ahead, if that was not done before."""
        self._begun(read_ahead=True)

    async def opened(self) -> TextSource:
        """Return it once it is open; raise what opening it raised."""
        # Whoever waits may be cancelled, and the thread works on: it is closed when it is done.
        return await asyncio.shield(self._begun(read_ahead=False))

    def close(self) -> None:
        """Close it, now or as soon as it is open."""
        if self._task is not None and self._task.done():
            _closed(self._task)
        elif self._task is not None:
            self._task.add_done_callback(_closed)

    def _begun(self, *, read_ahead: bool) -> asyncio.Task[TextSource]:
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._open, read_ahead), name="opening")
        return self._task

    def _open(self, read_ahead: bool) -> TextSource:
        text = self._make()
        try:
            if read_ahead:
                text.read_ahead()
        except BaseException:
            text.close()
            raise
        return text


def _closed(task: asyncio.Task[TextSource]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
