"""Handlers of a conversation that tests of several networks serve."""

import asyncio

from noloco_node.network.interface import Conversation


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(conversation: Conversation) -> None:
    while True:
        await conversation.send(await conversation.receive())


class Work:
    """A handler that takes one question and then works for so long; tells what became of it."""

    def __init__(self, seconds: float = 1e6) -> None:
        self.seconds, self.outcome = seconds, ""
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, conversation: Conversation) -> None:
        try:
            await conversation.receive()
            self.begun.set()
            await asyncio.sleep(self.seconds)
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        except ConnectionError as error:
            self.outcome = str(error)
            raise
        finally:
            self.ended.set()
