"""A microbatch to and from other peers: the calls of the next stage's replicas, and the answers to those before us."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from noloco_node.journal import events
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import Violation
from noloco_node.network.timeouts import AdaptiveTimeout, TimeoutBounds
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import MICROBATCH, topic
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s
from pipeline.codec_formats import ACTIVATION_CODECS, ActivationCode
from pipeline.messages import Gradient, Microbatch, Refused, Reply
from pipeline.routing import Hop
from pipeline.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

REPLIES = TimeoutBounds(least_s=10.0, most_s=math.inf, unknown_s=math.inf)
"""Of a reply to a microbatch, where one stage is below us."""


class MicrobatchClient:
    """Sends microbatches to replicas of the next stage."""

    def __init__(self, config: ReplicaConfig, context: ReplicaContext) -> None:
        self._config, self._context = config, context
        self._timeout = AdaptiveTimeout(REPLIES)

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

    async def _reply(self, peer: str, microbatch: Microbatch) -> Reply:
        """Send a microbatch and return what comes; ConnectionAbortedError when nothing does for very much too long."""
        # Whoever is nearest to a replica that hangs must be the first to give up, with time left for another to answer,
        # or the innocent are accused. (A usual deadline is twice the mean at least.) That is why waits in vain do not
        # lengthen it: those who wait above would not know. Who needs three times as long as the others is left out.
        config, context = self._config, self._context
        begun_s, below = loop_s(), config.run.pipeline.stages - 1 - config.stage
        most_s = (1.0 + below / 2) * self._timeout.deadline_s(peer)
        try:
            async with (
                asyncio.timeout(most_s if config.deadlines and most_s < math.inf else None),
                context.network.talk(
                    peer, topic(MICROBATCH, config.stage + 1), context.microbatch_schema
                ) as conversation,
            ):
                await conversation.send(microbatch)
                reply = await conversation.receive()
                if not isinstance(reply, Gradient | Refused):
                    raise Violation(f"expected a gradient, got {type(reply).__name__}")
        except TimeoutError:
            raise ConnectionAbortedError(f"{peer} has not answered for {most_s:.0f} s, though it is there") from None
        if isinstance(reply, Gradient):
            if reply.hidden is not None:
                _check(ACTIVATION_CODECS[config.run.pipeline.codec].back, reply.hidden)
            self._timeout.took(peer, loop_s() - begun_s)
        return reply


class MicrobatchServer:
    """Takes microbatches of other peers."""

    def __init__(self, config: ReplicaConfig, context: ReplicaContext, worker: Worker) -> None:
        self._config, self._context, self._worker = config, context, worker

    async def serve(self, conversation: Conversation) -> None:
        """Take one microbatch of another peer through our stage and send the reply."""
        try:
            async with asyncio.timeout(self._config.run.pipeline.budget_s):
                microbatch = await conversation.receive()
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"{conversation.peer} sent no microbatch") from silence
        if not isinstance(microbatch, Microbatch):
            raise Violation(f"expected a microbatch, got {type(microbatch).__name__}")
        least, greatest = microbatch.targets.aminmax()
        if int(least) < 0 or int(greatest) >= self._context.vocabulary:
            raise Violation(f"targets outside the vocabulary of {self._context.vocabulary}")
        _check(ACTIVATION_CODECS[self._config.run.pipeline.codec].down, microbatch.hidden)
        reply = await self._worker.process(microbatch, conversation.peer)
        try:
            await conversation.send(reply)
        except ConnectionError:
            if isinstance(reply, Gradient):
                self._worker.reply_lost()
            raise
        if isinstance(reply, Refused):
            self._context.record(events.RefusedMicrobatch(peer=conversation.peer, reason=str(reply.reason), here=True))


def _check(code: ActivationCode, wire: Tensor) -> None:
    """Raise Violation for numbers that no stage sends."""
    from pipeline.codec import check

    try:
        check(code, wire)
    except ValueError as error:
        raise Violation(str(error)) from None
