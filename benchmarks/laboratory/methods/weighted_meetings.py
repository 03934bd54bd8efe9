"""Meetings whose mean is weighed by tokens: by the inner steps that each of the two brings.

With dynamic local updates a fast machine comes to a meeting with eleven inner steps where a slow one has two, and the
rule takes the plain mean of both. Here it takes the weighed one: of fast weights x with n inner steps since their last
meeting, and y with k,

    (n x + k y) / (n + k)  =  (x + y') / 2      with  y' = x + 2 k / (n + k) (y - x)

so the partner's weights are moved to y' on their way in, and the production's rounds do the rest as ever, whatever
their momentum and gains. What is weighed is the weights, in which the new contributions are; both sides do it alike, so
both see the same mean. It needs to see what travels: weights as float32, and no slow ones among them (gamma = beta).
How many inner steps the partner brings would be a number in a message; here it is looked up.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.laboratory.experiments.cell import Cell
from benchmarks.laboratory.methods.replicas import Replica
from gossip.exchange.messages import Weights
from gossip.rule.outer_step import Tensors
from noloco_node.network.interface import Conversation


def check(cell: Cell) -> None:
    """Raise ValueError unless meetings of this cell can be weighed."""
    if cell.weighed and not (cell.codec == "float32" and cell.rule.gamma == cell.rule.beta):
        raise ValueError("a weighed mean is for weights that travel as float32 and alone: gamma = beta")


class Luggage:
    """How many inner steps a replica would bring to a meeting with its last snapshot."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._met_at = self._snapshot_at = replica.steps

    def __repr__(self) -> str:
        return f"<Luggage of {self._replica!r}: {self.steps}>"

    @property
    def steps(self) -> int:
        """Inner steps from the last meeting's snapshot to this one's; at least one."""
        return max(1, self._snapshot_at - self._met_at)

    def packed(self) -> None:
        """Note that a snapshot is taken now."""
        self._snapshot_at = self._replica.steps

    def met(self, staleness: int) -> None:
        """Note that a meeting is over, with a snapshot from so many inner steps ago."""
        self._met_at = self._replica.steps - staleness


class Weighed:
    """A conversation in which the partner's weights arrive as a weighed mean needs them."""

    def __init__(self, conversation: Conversation, mine: Luggage, theirs: Luggage) -> None:
        self._conversation, self._mine, self._theirs = conversation, mine, theirs
        self._sent: Tensors = ()

    def __repr__(self) -> str:
        return f"<Weighed: {self._conversation!r}, ours {self._mine.steps}, theirs {self._theirs.steps}>"

    @property
    def peer(self) -> str:
        """The other's peer id."""
        return self._conversation.peer

    async def send(self, message: Any) -> None:
        """Send a message; remember our weights."""
        if isinstance(message, Weights):
            self._sent = message.fast
        await self._conversation.send(message)

    async def receive(self) -> Any:
        """Return the next message; weights are moved to where the plain mean with ours is the weighed one."""
        message = await self._conversation.receive()
        if not isinstance(message, Weights) or not (self._sent and message.fast):
            return message  # where one side adopts the other's weights there is no mean
        share = self._theirs.steps / (self._mine.steps + self._theirs.steps)
        return Weights(fast=moved(self._sent, message.fast, share), slow=message.slow)


def moved(own: Tensors, theirs: Tensors, share: float) -> Tensors:
    """Return the weights whose plain mean with ours has theirs at this share."""
    return tuple(torch.lerp(mine, other, 2.0 * share) for mine, other in zip(own, theirs, strict=True))
