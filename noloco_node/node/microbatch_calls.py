"""A microbatch to and from other peers: the calls of the next stage's replicas, and the answers to those before us."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from noloco_node.journal import events
from noloco_node.network.conversation_pool import IDLE_S, ConversationPool, SendTurns
from noloco_node.network.interface import Conversation, ConversationEnded
from noloco_node.network.schema import Violation
from noloco_node.network.timeouts import AdaptiveTimeout, TimeoutBounds
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import MICROBATCH, topic
from noloco_node.swarm.receipts import IssuedReceipts
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s
from pipeline.activation_codec import SizeBound, UnusualSizeError
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch, Refused, Reply
from pipeline.routing import Hop
from pipeline.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

REPLIES = TimeoutBounds(least_s=10.0, most_s=math.inf, unknown_s=math.inf)
"""Of a reply to a microbatch, where one stage is below us."""
MOST_IDLE = 256
"""Conversations that wait here for another microbatch: half of what is answered at all."""


class MicrobatchClient:
    """Sends microbatches to replicas of the next stage."""

    def __init__(self, config: ReplicaConfig, context: ReplicaContext, turns: SendTurns) -> None:
        self._config, self._context, self._turns = config, context, turns
        self._timeout = AdaptiveTimeout(REPLIES)
        self.bound = SizeBound(ACTIVATION_CODECS[config.run.pipeline.codec].back)
        """Of the gradients that are returned to us."""
        self._unbounded: dict[asyncio.Timeout, float] = {}
        """Calls that began before anybody had replied, and when (loop seconds)."""
        self._pool = ConversationPool(context.network, topic(MICROBATCH, config.stage + 1), context.microbatch_schema)

    def hops(self, roster: Roster) -> tuple[Hop, ...]:
        """Return the replicas of the next stage that train."""
        if self._config.last:
            return ()
        records = roster.stage(self._config.stage + 1)
        return tuple([Hop(record.peer, record.device_s) for record in records if record.state is PeerState.TRAINING])

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        """Have a peer take a microbatch to the end of the pipeline and back; journal what goes wrong."""
        record = self._context.record
        try:
            reply = await self._reply(peer, microbatch)
        except Violation as violation:
            record(events.PeerViolation(peer=peer, topic=MICROBATCH, why=str(violation)))
            raise
        except ConnectionError as loss:
            record(events.Lost(peer=peer, what="microbatch", why=str(loss) or type(loss).__name__))
            raise
        if isinstance(reply, Refused):
            record(events.RefusedMicrobatch(peer=peer, reason=str(reply.reason)))
        return reply

    async def aclose(self) -> None:
        """End the conversations that were kept for further calls."""
        await self._pool.aclose()

    async def _reply(self, peer: str, microbatch: Microbatch) -> Reply:
        """Send a microbatch and return what comes; ConnectionAbortedError when nothing does for very much too long."""
        # Whoever is nearest to a replica that hangs must be the first to give up, with time left for another to answer,
        # or the innocent are accused. (A usual deadline is twice the mean at least.) That is why waits in vain do not
        # lengthen it: those who wait above would not know. Who needs three times as long as the others is left out.
        begun_s, share = loop_s(), 1.0 + (self._config.run.pipeline.stages - 1 - self._config.stage) / 2
        limit = self._limit(share * self._timeout.deadline_s(peer), begun_s)
        try:
            async with limit:
                try:
                    reply = await self._exchange(peer, microbatch)
                except ConversationEnded:
                    # It was let go of while our microbatch was on its way, and nothing was taken: once more.
                    reply = await self._exchange(peer, microbatch)
        except TimeoutError:
            waited_s = loop_s() - begun_s
            raise ConnectionAbortedError(f"{peer} has not answered for {waited_s:.0f} s, though it is there") from None
        finally:
            self._unbounded.pop(limit, None)
        if isinstance(reply, Gradient):
            if reply.hidden is not None:
                reply = replace(reply, hidden=self._bounded(peer, reply.hidden))
            self._timeout.took(peer, loop_s() - begun_s)
            self._bound_first(share * self._timeout.deadline_s(peer))
            if self._config.stage + 2 == self._config.run.pipeline.stages:
                reply = replace(reply, computed_by=peer)
        return reply

    def _bounded(self, peer: str, gradient: Tensor) -> Tensor:
        """Return what counts of a gradient; ConnectionAbortedError where none does of an honest one, else Violation."""
        try:
            return self.bound.bounded(peer, gradient)
        except UnusualSizeError as error:
            raise ConnectionAbortedError(f"its gradient was refused: {error}") from None
        except ValueError as error:
            raise Violation(str(error)) from None

    def _limit(self, most_s: float, begun_s: float) -> asyncio.Timeout:
        """Return the limit of a call; one that nothing bounds yet is bounded by the first reply of anybody."""
        limit = asyncio.timeout(most_s if self._config.deadlines and most_s < math.inf else None)
        if self._config.deadlines and most_s == math.inf:
            self._unbounded[limit] = begun_s
        return limit

    def _bound_first(self, most_s: float) -> None:
        """Bound the calls that began before the first reply came: by now it is known what one takes."""
        unbounded, self._unbounded = self._unbounded, {}
        for limit, begun_s in unbounded.items():
            limit.reschedule(max(loop_s(), begun_s + most_s))

    async def _exchange(self, peer: str, microbatch: Microbatch) -> Reply:
        async with self._pool.talk(peer) as conversation:
            async with self._turns.turn():
                await conversation.send(microbatch)
            reply = await conversation.receive()
            if not isinstance(reply, Gradient | Refused):
                raise Violation(f"expected a gradient, got {type(reply).__name__}")
            return reply


class MicrobatchServer:
    """Takes microbatches of other peers, on each conversation one after another."""

    def __init__(self, config: ReplicaConfig, context: ReplicaContext, worker: Worker, turns: SendTurns) -> None:
        self._config, self._context, self._worker, self._turns = config, context, worker, turns
        self.bound = SizeBound(ACTIVATION_CODECS[config.run.pipeline.codec].down)
        """Of the activations that come."""
        # By the clock of the world, so that a later life's is higher.
        self.issued = IssuedReceipts(int(1000 * context.unix_time()))
        """What came back from here, by source; in a run of one stage, what partners brought to meetings."""
        self.returned_s = -math.inf
        """When something did last (loop seconds)."""
        self._idle: dict[Conversation, asyncio.Timeout] = {}
        """The waits for another microbatch; the longest comes first."""
        self._closed = False

    @property
    def idle(self) -> int:
        """How many conversations wait for another microbatch."""
        return len(self._idle)

    async def serve(self, conversation: Conversation) -> None:
        """Answer microbatches of another peer until no more come."""
        try:
            async with asyncio.timeout(self._config.run.pipeline.budget_s):
                microbatch = await conversation.receive()
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"{conversation.peer} sent no microbatch") from silence
        while microbatch is not None:
            await self._answer(conversation, microbatch)
            microbatch = None  # its tensors are not held while we wait
            if not self._closed:
                microbatch = await self._next(conversation)

    def close(self) -> None:
        """End the conversations that are idle, and the others once they have their answer."""
        self._closed = True
        for wait in self._idle.values():
            _end(wait)

    async def _next(self, conversation: Conversation) -> Any:
        """Return what comes next; None when the caller has ended, or is not to be waited for any longer."""
        # The caller ends first, or its next microbatch might meet our end on its way.
        wait_s = IDLE_S + self._config.run.pipeline.budget_s
        try:
            async with asyncio.timeout(wait_s) as wait:
                self._idle[conversation] = wait
                if len(self._idle) > MOST_IDLE:
                    _end(next(iter(self._idle.values())))
                return await conversation.receive()
        except (TimeoutError, ConnectionResetError):
            return None
        finally:
            del self._idle[conversation]

    async def _answer(self, conversation: Conversation, microbatch: Any) -> None:
        """Take one microbatch through our stage and send the reply."""
        if not isinstance(microbatch, Microbatch):
            raise Violation(f"expected a microbatch, got {type(microbatch).__name__}")
        least, greatest = microbatch.targets.aminmax()
        if int(least) < 0 or int(greatest) >= self._context.vocabulary:
            raise Violation(f"targets outside the vocabulary of {self._context.vocabulary}")
        try:
            hidden = self.bound.bounded(conversation.peer, microbatch.hidden)
        except ValueError as error:
            raise Violation(str(error)) from None
        source = conversation.peer if self._config.stage == 1 else microbatch.source
        reply = await self._worker.process(replace(microbatch, hidden=hidden, source=source), conversation.peer)
        if isinstance(reply, Gradient):
            self.returned_s = loop_s()
            self.issued.add(source, len(microbatch.targets))
        try:
            async with self._turns.turn():
                if not conversation.is_quiet:
                    raise Violation("spoke again, or left, before it had its answer")
                await conversation.send(reply)
        except ConnectionError:
            if isinstance(reply, Gradient):
                self._worker.reply_lost()
            raise
        if isinstance(reply, Refused):
            self._context.record(events.RefusedMicrobatch(peer=conversation.peer, reason=str(reply.reason), here=True))


def _end(wait: asyncio.Timeout) -> None:
    """Let a wait end now, unless it is over already."""
    if not wait.expired():
        wait.reschedule(loop_s())
