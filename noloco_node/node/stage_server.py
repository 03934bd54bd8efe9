"""What a node serves of its stage: microbatches, meetings, copies of its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf, prod

from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import piece_s
from noloco_node.journal import events
from noloco_node.network.interface import Conversation, Handler
from noloco_node.network.schema import Schema, Violation
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.run.protocols import (
    GOSSIP,
    MICROBATCH,
    STATE,
    gossip_schema,
    microbatch_schema,
    moment_sizes,
    state_schema,
    topic,
)
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.snapshot_keeper import turn_away

ENDING_S = 1.0  # conversations that are about to end have so long for it


class StageServer:
    """Serves one replica to its peers, from `begin` to `stop`; `aclose` releases everything that holds its weights."""

    def __init__(self, context: NodeContext, replica: Replica) -> None:
        self._context, self._replica = context, replica
        self._shapes = tuple(context.dimensions.shapes[replica.stage].values())
        self._served: dict[str, Schema] = {}
        self._answering: set[asyncio.Task[object]] = set()
        """Conversations about microbatches and meetings. A microbatch may travel for minutes; an exchange may take as
        long."""
        self._moments = moment_sizes(context.run, self._shapes)
        limits, beside = self._donor_limits(), context.host.device.beside
        self._donor = Donor(replica.state, beside, self._shapes, limits, self._moments)

    async def begin(self) -> None:
        context, replica, run = self._context, self._replica, self._context.run
        if replica.stage > 0:
            answer = self._until_closed(replica.microbatches.serve)
            await self._serve(MICROBATCH, microbatch_schema(run, context.dimensions.width), answer)
        context.membership.issued = replica.microbatches.issued if replica.last else None
        await self._serve(GOSSIP, gossip_schema(run, self._shapes), self._until_closed(replica.rounds.serve))
        await self._serve(STATE, state_schema(self._shapes, self._moments), self._give)

    async def stop(self) -> None:
        """Turn away peers that still ask; `_gone` keeps no weights in memory."""
        for name, schema in self._served.items():
            await self._context.network.serve(name, schema, _gone)

    async def aclose(self) -> None:
        """Close the donor and break off meetings and microbatches, since each holds the weights in memory."""
        self._donor.close()
        if not self._answering:
            return
        _, left = await asyncio.wait(set(self._answering), timeout=ENDING_S)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _serve(self, protocol: str, schema: Schema, handler: Handler) -> None:
        name = topic(protocol, self._replica.stage)
        self._served[name] = schema
        handler = violations_journalled(self._context.reporter.record, protocol, handler)
        await self._context.network.serve(name, schema, handler)

    async def _give(self, conversation: Conversation) -> None:
        """Give a copy of our state, once our first microbatches have shown that the weights are good."""
        doubtful = self._replica.starting_weights.doubtful
        await (turn_away(conversation) if doubtful else self._donor.serve(conversation))

    def _until_closed(self, handler: Handler) -> Handler:
        """Return a handler whose conversations `aclose` breaks off."""

        async def answer(conversation: Conversation) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._answering.add(task)
            try:
                await handler(conversation)
            finally:
                self._answering.discard(task)

        return answer

    def _donor_limits(self) -> DonorLimits:
        """Return the limits of copies: a copy outlives its newcomer's patience, for a newcomer that returns."""
        sizes, options = [4 * prod(shape) for shape in self._shapes], self._context.options
        patience_s = copying_s(sum(sizes), options.slowest_bytes_per_s) if options.deadlines else inf
        return DonorLimits(deadline_s=8 * patience_s, piece_s=piece_s(patience_s, len(cut(sizes))))


async def _gone(conversation: Conversation) -> None:
    raise ConnectionResetError(f"we serve another stage now, {conversation.peer}")


def violations_journalled(record: Callable[[events.Event], None], topic: str, handler: Handler) -> Handler:
    """Return the handler, journalling violations; the network ends such a conversation by itself."""

    async def journalled(conversation: Conversation) -> None:
        try:
            await handler(conversation)
        except (Violation, asyncio.CancelledError) as error:
            violation = error if isinstance(error, Violation) else conversation.violation
            if violation is not None:
                record(events.PeerViolation(peer=conversation.peer, topic=topic, why=str(violation)))
            raise

    return journalled
