"""This peer's part of the run at its stage: a source reads its text; a later stage works as long as sources do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

from torch import Tensor

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, Text
from noloco_node.node.microbatches import MicrobatchSource
from noloco_node.node.replica import Replica
from noloco_node.run.config import RunConfig
from noloco_node.storage.checkpoint import Counters
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.run_samples import ALONE_S, NEARLY_OVER, RunSamples, is_over_below
from noloco_node.swarm.shards import LEAST_PAUSE_S
from noloco_node.tasks import loop_s


class StageWork:
    """This peer's part of the run, whatever stage it serves.

    `text`: a source trains on it; it stays open when the peer moves away from stage 0, for its return.
    """

    def __init__(
        self, run: RunConfig, membership: Membership, open_text: Callable[[], Awaitable[Text]], reporter: Reporter
    ) -> None:
        self.text: Text | None = None
        self._run, self._membership, self._open_text, self._reporter = run, membership, open_text, reporter
        self._source: MicrobatchSource | None = None
        self._counted: RunSamples | None = None
        self._resumed: Counters | None = None

    @property
    def samples(self) -> int:
        """Sequences at this stage whose gradient came back; 0 unless we are a source."""
        if self._source is None:
            return self._resumed.samples if self._resumed else 0
        return self._source.samples

    def position(self) -> dict[str, Any] | None:
        """Return where the next draw from the text begins."""
        if self.text is None:
            return self._resumed.data_position if self._resumed else None
        return self.text.position()

    def rest(self) -> None:
        """Forget the stage that we served."""
        self._source = self._counted = self._resumed = None

    def begin(self, progress: float, counted: Counters | None) -> None:
        """Begin at a stage, at its progress, with our counters of it from an earlier session or assignment.

        The work of others counts from now on, however long our text takes to open.
        """
        self._resumed = counted
        # Our checkpoint may have more progress than the peers that came back before us.
        reached = max(progress, counted.progress if counted else 0.0)
        # The swarm forgets a source that was away for long; the checkpoint does not.
        own = max(self._membership.roster.own_samples, counted.samples if counted else 0)
        self._counted = RunSamples(self._run, self._membership, round(reached * self._run.budget_samples), own)

    async def run_until_done(self, replica: Replica) -> None:
        """Return when this peer's part of the run is done, and none of its microbatches is under way."""
        if replica.stage == 0:
            source = await self._make_source(replica)
            await source.run(self._run.pipeline.most_in_flight)
        else:
            begun_s, served = loop_s(), replica.microbatches

            def idle_s() -> float:
                return loop_s() - max(begun_s, served.returned_s)

            def over() -> bool:
                roster, samples = self._membership.roster, served.issued.samples
                return is_over_below(self._run, roster, samples, replica.progress.value, idle_s())

            def seems_over() -> bool:
                return idle_s() > (LEAST_PAUSE_S if replica.progress.value >= NEARLY_OVER else ALONE_S)

            await self._seen(over, seems_over)

    async def run_until_deserted(self, replica: Replica) -> None:
        """Return when the run is over at stage 0 and no peer is left to which our microbatches could go.

        A peer that holds our microbatches but has long returned none does not count: it may be waiting for us to leave.
        """

        def deserted() -> bool:
            source = self._source
            if source is None or self._counted is None:
                return False
            idle = replica.stranded or loop_s() - source.returned_s > ALONE_S
            return idle and self._counted.is_over(source.samples, source.returned_s)

        await self._seen(deserted)

    async def _seen(self, over: Callable[[], bool], seems_over: Callable[[], bool] = lambda: False) -> None:
        """Return once the roster says that the run is over.

        `seems_over`: no work comes any more. Then a sample, whose reading may not be due for minutes, is read at once.
        """
        read_s = -math.inf
        while not over():
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAST_PAUSE_S if self._membership.roster.is_sample else ALONE_S):
                    await self._membership.changed()
            roster = self._membership.roster
            # Another stage, which is no sample, may change every few seconds; and one that cannot be read stays old.
            age_s = loop_s() - max(read_s, roster.sources_read_at)
            if roster.is_sample and seems_over() and age_s >= LEAST_PAUSE_S:
                read_s = loop_s()
                await self._membership.peek()

    async def _make_source(self, replica: Replica) -> MicrobatchSource:
        opened, resumed = self.text is None, self._resumed
        replica.awaits_text = True
        text = self.text or await self._open_text()
        # A source that comes back to its stage reads on where it stopped.
        position = resumed.data_position if resumed is not None and opened else None
        if position is not None and not await text.restore(position):
            self._reporter.say("the text is another one than before: reading it from its beginning")
        self.text = text
        assert self._counted is not None, "a stage was begun"

        async def draw() -> Tensor:
            replica.awaits_text = True
            batch = await text.draw()
            replica.awaits_text = False
            for sentence in text.news():
                self._reporter.record(events.Noticed(what="text", text=sentence))
            return batch

        self._source = MicrobatchSource(
            draw,
            replica.worker.process,
            self._counted.progress,
            samples=self._counted.own_then,
            me=self._membership.me,
            prove=self._membership.receipts.prove,
            budget_s=self._run.pipeline.budget_s,
            rng=Random(f"{self._run.seed}|source|{self._membership.me}"),
            told=self._run.pipeline.subspace is not None,
        )
        return self._source
