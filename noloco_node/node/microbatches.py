"""The microbatches of a replica: the source draws them, the client calls the next stage, the server answers peers.

**Pool.** Only a first call pays the round trip that opens a stream. A call has a conversation to itself, and answers
belong to questions by their order. So nothing has to be correlated, and a call that is cancelled or lost breaks one
stream, on which nobody else was speaking.

**Turns.** Messages that share a line all arrive late, and together: of sixteen that leave at once the first is there
when the last is. One after another, the next stage begins with the first while the others leave. One at a time would be
too few: a receiver's line may be busy, and a long line carries less than it could while one message waits for its last
bytes. A receiver that is slow keeps a turn for `PATIENCE` times what a message usually takes, and then the next one
leaves beside it, so a slow receiver, or three, hold up nobody for long.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_node.journal import events
from noloco_node.network.interface import Conversation, ConversationEnded, PeerNetwork
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.timeouts import AdaptiveTimeout, TimeoutBounds
from noloco_node.node.node_context import NodeContext
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import MICROBATCH, microbatch_schema, topic
from noloco_node.swarm.receipts import IssuedReceipts
from noloco_node.swarm.roster import Roster
from noloco_node.tasks import loop_s
from pipeline.activation_codec import SizeBound, UnusualSizeError, as_microbatch, check_marked
from pipeline.messages import ACTIVATION_CODECS, EvaluationReply, Gradient, Microbatch, Refused, Reply, SequenceLosses
from pipeline.routing import Hop
from pipeline.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", Gradient, SequenceLosses)

RETRY_S = 1.0  # pause before a source tries the same tokens again, where the refusal names none
LONGEST_RETRY_S = 30.0  # the longest such pause: by then the next stage may have healed, or has other replicas
REPLIES = TimeoutBounds(least_s=10.0, most_s=math.inf, unknown_s=math.inf)
"""Of a reply to a microbatch; for each stage below us half as much more."""
MOST_IDLE = 192  # conversations that wait here for another microbatch: peers of one cloud need room for others too
IDLE_S = 60.0  # a conversation that was not used for so long is ended: its beats cost more than opening another
MOST_POOLED = 128  # with all peers; the one that has been idle for longest is ended first
FEWEST_AT_ONCE, MOST_AT_ONCE = 3, 8
"""Messages at a time. With too few for its receivers a line is idle while theirs are busy, with too many all are late.
In simulations of narrow lines two replicas a stage wanted three and eight replicas nine; with three, these carried an
eighth less, and with sixty-four, a thirtieth (docs/results.md)."""
PATIENCE = 4.0
LEAST_S = 1.0  # a turn lasts at least so long: what a message usually takes may be unknown, or next to nothing
SMOOTHING = 0.1


class MicrobatchSource:
    """Turns text into microbatches, keeps a fixed number of them in flight, and counts the samples that came back.

    The source hands them to its own worker as if they had come from outside. A refused microbatch is tried again with
    the same tokens: a sample without a gradient has not been trained on. At a progress of 1 every source stops.
    """

    def __init__(
        self,
        draw: Callable[[], Awaitable[Tensor]],
        process: Callable[[Microbatch, str], Awaitable[Reply]],
        progress: Callable[[int, float], float],
        *,
        samples: int = 0,
        prove: Callable[[str, int], None],
        me: str,
        budget_s: float,
        rng: Random,
        told: bool = False,
    ) -> None:
        """Hand in the callables.

        `draw`: returns the next marked tokens [batch, sequence + 1], int64. `process`: the worker's. `progress`:
        returns the run's progress, given this source's samples so far and when the last of them came back. `samples`:
        of an earlier session. `prove`: takes the peer that computed the loss of so many samples. `budget_s`: how long a
        microbatch may travel. `told`: later stages have to know all ids.
        """
        self.samples = samples
        self.returned_s = loop_s()  # when a gradient came back last, or we began
        self._draw, self._process, self._progress, self._prove = draw, process, progress, prove
        self._me, self._budget_s, self._rng, self._told = me, budget_s, rng, told

    async def run(self, in_flight: int) -> None:
        """Keep `in_flight` microbatches in flight until the run's token budget is used up."""
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(self._keep_sending())

    async def _keep_sending(self) -> None:
        while self._run_progress() < 1.0:
            tokens = await self._draw()
            while not await self._try(tokens):
                if self._run_progress() >= 1.0:
                    return

    def _run_progress(self) -> float:
        return self._progress(self.samples, self.returned_s)

    async def _try(self, tokens: Tensor) -> bool:
        progress = self._run_progress()
        microbatch = as_microbatch(tokens, told=self._told, progress=progress, budget_s=self._budget_s)
        match await self._process(microbatch, self._me):
            case Gradient(computed_by=signer):
                self.samples += len(tokens)
                self.returned_s = loop_s()
                self._prove(signer, len(tokens))
                return True
            case Refused(retry_after_s=retry_after_s):
                # The estimate is a stranger's: not a number reads as none.
                rest_s = min(retry_after_s, LONGEST_RETRY_S) if retry_after_s > 0.0 else RETRY_S
                await asyncio.sleep(rest_s * self._rng.uniform(0.8, 1.2))
                return False


class ConversationPool:
    """Conversations about one topic with any peers; the peer that answers must take one call after another on each."""

    def __init__(self, network: PeerNetwork, topic: str, schema: Schema) -> None:
        self._network, self._topic, self._schema = network, topic, schema
        self._idle: dict[Conversation, tuple[AbstractAsyncContextManager[Conversation], float]] = {}
        """The context of each, and since when it has been idle (loop seconds); the one used last comes last."""
        self._idle_with: defaultdict[str, list[Conversation]] = defaultdict(list)
        """The same by peer."""
        self._closed = False

    @asynccontextmanager
    async def talk(self, peer: str) -> AsyncIterator[Conversation]:
        """Lend a conversation with a peer for one call; the errors are those of `PeerNetwork.talk`.

        Leaving the context by an exception breaks the stream and cancels what the callee still does. Leaving it in the
        ordinary way, which is for who has received the answer, hands the conversation to the next call.
        """
        conversation, talk = await self._take(peer)
        async with AsyncExitStack() as ending:
            if conversation is None:
                conversation = await ending.enter_async_context(talk)
            else:
                ending.push_async_exit(talk)
            yield conversation
            if not self._closed:
                ending.pop_all()
                self._idle[conversation] = (talk, loop_s())
                self._idle_with[conversation.peer].append(conversation)
        if len(self._idle) > MOST_POOLED:
            await self._end(next(iter(self._idle)))

    async def aclose(self) -> None:
        self._closed = True
        for conversation in list(self._idle):
            await self._end(conversation)

    async def _take(self, peer: str) -> tuple[Conversation | None, AbstractAsyncContextManager[Conversation]]:
        """Return the conversation with a peer that was used last, and its context, or the context of a new one.

        Ends those idle for too long.
        """
        oldest_s = loop_s() - IDLE_S
        while (oldest := next(iter(self._idle.items()), None)) is not None and oldest[1][1] <= oldest_s:
            await self._end(oldest[0])
        while mine := self._idle_with.get(peer):
            conversation = mine[-1]
            if conversation.is_quiet:
                return conversation, self._remove(conversation)
            await self._end(conversation)
        return None, self._network.talk(peer, self._topic, self._schema)

    async def _end(self, conversation: Conversation) -> None:
        """End a conversation, unless another call took it meanwhile."""
        if conversation in self._idle:
            await self._remove(conversation).__aexit__(None, None, None)

    def _remove(self, conversation: Conversation) -> AbstractAsyncContextManager[Conversation]:
        """Take a conversation out of the pool; return its context."""
        talk, _ = self._idle.pop(conversation)
        mine = self._idle_with[conversation.peer]
        mine.remove(conversation)
        if not mine:
            del self._idle_with[conversation.peer]
        return talk


class SendTurns:
    """The turns of one node that sends to so many receivers."""

    def __init__(self, receivers: int) -> None:
        self.at_once = min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, receivers))
        self._next = asyncio.Lock()
        self._left = asyncio.Event()
        self._since_s: dict[object, float] = {}  # since when each turn has been held, the oldest first
        self._usual_s = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._next:
            while len(self._since_s) >= self.at_once:
                await self._wait()
            mine, begun_s = object(), loop_s()
            self._since_s[mine] = begun_s
        try:
            yield
            self._usual_s += SMOOTHING * (loop_s() - begun_s - self._usual_s)
        finally:
            self._since_s.pop(mine, None)
            self._left.set()

    async def _wait(self) -> None:
        """Wait until a message has left, or the oldest has had its turn."""
        oldest, begun_s = next(iter(self._since_s.items()))
        self._left.clear()
        try:
            async with asyncio.timeout_at(begun_s + max(LEAST_S, PATIENCE * self._usual_s)):
                await self._left.wait()
        except TimeoutError:
            self._since_s.pop(oldest, None)


class MicrobatchClient:
    """Sends microbatches to replicas of the next stage."""

    def __init__(self, context: NodeContext, stage: int, turns: SendTurns) -> None:
        self._context, self._stage, self._turns = context, stage, turns
        self._timeout = AdaptiveTimeout(REPLIES)
        self._given_up: set[str] = set()
        """Replicas of the roster whose latest reply came too late for us."""
        self.bound = SizeBound(ACTIVATION_CODECS[context.run.pipeline.codec].back)
        """Bounds the gradients that replicas return."""
        self._unbounded: dict[asyncio.Timeout, float] = {}
        """Calls that began before any replica had replied, and when (loop seconds)."""
        self._roster: Roster | None = None
        self._hops: tuple[Hop, ...] = ()  # the replicas to call, as of the roster
        schema = microbatch_schema(context.run, context.dimensions.width)
        self._pool = ConversationPool(context.network, topic(MICROBATCH, stage + 1), schema)

    def hops(self) -> tuple[Hop, ...]:
        """Return the replicas of the next stage that train: the same tuple until there is another roster."""
        roster = self._context.membership.roster
        if roster is not self._roster:
            self._hops = self._in_states(roster, PeerState.TRAINING)
            self._roster = roster
            self._given_up.intersection_update([hop.peer for hop in self._hops])
        return self._hops

    def evaluators(self) -> tuple[Hop, ...]:
        """Return the replicas of the next stage that evaluate: also those that have finished."""
        return self._in_states(self._context.membership.roster, PeerState.TRAINING, PeerState.FINISHED)

    def _in_states(self, roster: Roster, *states: PeerState) -> tuple[Hop, ...]:
        records = roster.stage(self._stage + 1)
        return tuple([Hop(each.peer, each.device_s) for each in records if each.state in states])

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        """Have a peer take a microbatch to the end of the pipeline and back; journal what goes wrong."""
        return await self._call(peer, microbatch, Gradient)

    async def evaluate(self, peer: str, microbatch: Microbatch) -> EvaluationReply:
        """Have a peer take a microbatch to the end of the pipeline alone, as `call` does."""
        return await self._call(peer, microbatch, SequenceLosses)

    async def _call(self, peer: str, microbatch: Microbatch, wanted: type[T]) -> T | Refused:
        record = self._context.reporter.record
        try:
            reply = await self._reply(peer, microbatch, wanted)
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

    async def _reply(self, peer: str, microbatch: Microbatch, wanted: type[T]) -> T | Refused:
        """Send a microbatch and return the reply; ConnectionAbortedError when it takes far too long."""
        # The caller that is nearest to a replica that hangs must give up first, with time left to ask another one, or
        # innocent replicas are accused. So waits in vain do not lengthen its deadline: callers above would not know.
        # But the next call is a trial, which may take a part of the budget: it shows how slow a replica has become.
        begun_s, share = loop_s(), 1.0 + (self._context.run.pipeline.stages - 1 - self._stage) / 2
        most_s = share * self._timeout.deadline_s(peer)
        if peer in self._given_up:
            most_s = max(most_s, microbatch.budget_s / (2 + self._stage))
        limit = self._limit(most_s, begun_s)
        try:
            async with limit:
                try:
                    reply = await self._exchange(peer, microbatch, wanted)
                except ConversationEnded:
                    # The callee closed the idle stream while our microbatch was on its way: try once more.
                    reply = await self._exchange(peer, microbatch, wanted)
        except TimeoutError:
            if wanted is Gradient:  # evaluations do not steer the training
                self._given_up.add(peer)
            waited_s = loop_s() - begun_s
            raise ConnectionAbortedError(f"{peer} has not answered for {waited_s:.0f} s, though it is there") from None
        finally:
            self._unbounded.pop(limit, None)
        if isinstance(reply, Gradient):
            self._timeout.took(peer, loop_s() - begun_s)
            self._given_up.discard(peer)
            self._bound_first(share * self._timeout.deadline_s(peer))
            if self._context.run.pipeline.is_last(self._stage + 1):
                reply = replace(reply, computed_by=peer)
        return reply

    def _limit(self, most_s: float, begun_s: float) -> asyncio.Timeout:
        """Return the time limit of a call; before any reply has come, the first one will set it."""
        limit = asyncio.timeout(most_s if self._context.options.deadlines and most_s < math.inf else None)
        if self._context.options.deadlines and most_s == math.inf:
            self._unbounded[limit] = begun_s
        return limit

    def _bound_first(self, most_s: float) -> None:
        """Limit the calls that began before the first reply came."""
        unbounded, self._unbounded = self._unbounded, {}
        for limit, begun_s in unbounded.items():
            limit.reschedule(max(loop_s(), begun_s + most_s))

    async def _exchange(self, peer: str, microbatch: Microbatch, wanted: type[T]) -> T | Refused:
        async with self._pool.talk(peer) as conversation:
            async with self._turns.turn():
                await conversation.send(microbatch)
            reply: object = await conversation.receive()
            if not isinstance(reply, (wanted, Refused)):
                raise Violation(f"expected {wanted.__name__}, got {type(reply).__name__}")
            if isinstance(reply, Gradient) and reply.hidden is not None:
                # Within the conversation, so that a violation counts against the peer.
                counted = _counted(self.bound, "gradient", peer, reply.hidden, microbatch.learnt_share)
                reply = replace(reply, hidden=counted)
            return reply


class MicrobatchServer:
    """Takes microbatches of peers of the stage before, one after another on each conversation."""

    def __init__(self, context: NodeContext, stage: int, worker: Worker, turns: SendTurns) -> None:
        self._context, self._stage, self._worker, self._turns = context, stage, worker, turns
        self.bound = SizeBound(ACTIVATION_CODECS[context.run.pipeline.codec].down)
        """Bounds the activations that peers send."""
        # By Unix time, so that a later session's number is higher.
        self.issued = IssuedReceipts(int(1000 * context.host.unix_time()))
        """Samples whose gradient we returned, by source; in a run of one stage, what partners brought to meetings."""
        self.returned_s = -math.inf  # when we returned a gradient last (loop seconds)
        self._idle: dict[Conversation, asyncio.Timeout] = {}  # the waits for another microbatch, the longest first
        self._closed = False

    @property
    def idle(self) -> int:
        """How many conversations wait for another microbatch."""
        return len(self._idle)

    async def serve(self, conversation: Conversation) -> None:
        """Answer the microbatches of one peer until it sends no more."""
        try:
            async with asyncio.timeout(self._context.run.pipeline.budget_s):
                microbatch = await conversation.receive()
        except TimeoutError as silence:
            raise ConnectionAbortedError(f"{conversation.peer} sent no microbatch") from silence
        while microbatch is not None:
            await self._answer(conversation, microbatch)
            microbatch = None  # its tensors are not held while we wait
            if not self._closed:
                microbatch = await self._next(conversation)

    def close(self) -> None:
        """End the idle conversations, and the others once they have their answer."""
        self._closed = True
        for wait in self._idle.values():
            _end(wait)

    async def _next(self, conversation: Conversation) -> Any:
        """Return the next message; None when the caller has ended, or after it was idle for long."""
        # The caller has to end an idle stream first, or its next microbatch might meet our end on its way.
        wait_s = IDLE_S + self._context.run.pipeline.budget_s
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
        some_given = self._context.run.data.has_rows
        try:
            check_marked(microbatch, self._context.dimensions.vocabulary, some_given=some_given)
        except ValueError as error:
            raise Violation(str(error)) from None
        hidden = _counted(self.bound, "microbatch", conversation.peer, microbatch.hidden)
        source = conversation.peer if self._stage == 1 else microbatch.source
        take = self._worker.evaluate if microbatch.forward_only else self._worker.process
        reply = await take(replace(microbatch, hidden=hidden, source=source), conversation.peer)
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
            self._context.reporter.record(
                events.RefusedMicrobatch(peer=conversation.peer, reason=str(reply.reason), here=True)
            )


def _counted(bound: SizeBound, what: str, peer: str, wire: Tensor, share: float = 1.0) -> Tensor:
    """Return what counts of a peer's message; Violation for a bad one, ConnectionAbortedError for an unusual size."""
    try:
        return bound.bounded(peer, wire, share)
    except UnusualSizeError as error:
        raise ConnectionAbortedError(f"its {what} was refused: {error}") from None
    except ValueError as error:
        raise Violation(str(error)) from None


def _end(wait: asyncio.Timeout) -> None:
    """Let a wait end now, unless it is over already."""
    if not wait.expired():
        wait.reschedule(loop_s())
