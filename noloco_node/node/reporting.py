"""Reports of a node that trains: its record to the swarm, totals to the journal, a line to its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import NoReturn

from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.observe.bottleneck import all_waits
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import HOP_LETTERS, MOST_HOPS, PeerRecord
from noloco_node.tasks import loop_s

LINE_EVERY_S = 10.0
RECEIPTS_EVERY_S = 60.0
SPEED_EVERY_S = 30.0
MOST_SOURCES = 16  # the most sources whose receipts a node journals


class ProgressReporter:
    """Reports on one replica; `run` beside the training. `announce`: renews our record and returns its state."""

    def __init__(self, context: NodeContext, replica: Replica, announce: Callable[[], PeerState]) -> None:
        self._replica, self._announce, self._refresh_s = replica, announce, context.options.refresh_s
        self._membership, self._network, self._reporter = context.membership, context.network, context.reporter
        self._run, self._hops = context.run, HopSample(loop_s())
        self._device, self._speed = context.host.device, DeviceSpeed()
        self._meetings = MissedMeetings()
        self._warn = context.warn
        self.hops: tuple[tuple[str, int], ...] = ()  # next hops for our record, as `HopSample` has them

    async def run(self) -> NoReturn:
        said_at, totals_at, receipts_at, waited_for = -LINE_EVERY_S, 0.0, loop_s(), None
        speed_at = loop_s()
        while True:
            await asyncio.sleep(min(self._refresh_s, LINE_EVERY_S) / 2)
            now_s = loop_s()
            if now_s - totals_at >= self._refresh_s:
                totals_at = now_s
                self.record_totals()
            state = self._announce()
            if now_s - receipts_at >= RECEIPTS_EVERY_S:
                receipts_at = now_s
                self.record_receipts()
            if now_s - speed_at >= SPEED_EVERY_S:
                speed_at = now_s
                self._look_at_speed()
            self._look_at_meetings()
            waits = self._replica.waits()
            waits_for = waits and (waits.cause, waits.detail)
            if waits_for != waited_for:
                waited_for = waits_for
                self._reporter.record(events.StateChanged(state=state, waiting=waits))
            if now_s - said_at >= LINE_EVERY_S:
                said_at = now_s
                budget = spending(self._network.statistics())
                line = progress_line(self._replica.describe(PeerState.TRAINING))
                self._reporter.say(line + (f"; {budget}" if budget else ""))

    def _look_at_speed(self) -> None:
        slower = self._speed.look(self._device.busy_s, int(self._replica.worker.statistics()["succeeded"]))
        if slower is not None:
            text = (
                f"a microbatch takes the device {slower:.0f} times as long as before: another program computes on it, "
                "or its memory is short and the driver moves parts of it to main memory, as it does on Windows (WSL2) "
                "and on some laptops; end other programs, or serve a smaller stage"
            )
            self._warn(text)
            self._reporter.record(events.Noticed(what="device", text=text))

    def _look_at_meetings(self) -> None:
        counts, stage = self._replica.rounds.statistics(), self._replica.stage
        others = sum(record.peer != self._membership.me for record in self._membership.roster.stage(stage))
        alone = self._meetings.look(int(counts["met"]), int(counts["solo"]), others)
        if alone is not None:
            text = (
                f"{alone} outer steps in a row were taken alone, though the roster lists {others} more of stage "
                f"{stage}: "
                f"{self._replica.rounds.silence or 'none of them was ready when we were'}"
            )
            self._warn(text)
            self._reporter.record(events.Noticed(what="rounds", text=text))

    def record_totals(self) -> None:
        """Journal the totals so far: microbatches by next hop, bytes by purpose."""
        if self._replica.next_stage is not None:
            counts = {peer: total.succeeded for peer, total in self._replica.next_stage.hop_totals.items()}
            self._reporter.record(events.Hops(counts=counts))
            self.hops = self._hops.take(counts, loop_s())
        bytes_by: dict[str, dict[str, int]] = {"bytes.sent.": {}, "bytes.received.": {}}
        totals_now = self._network.statistics()
        budget = {name[len("budget.") :]: value for name, value in totals_now.items() if name.startswith("budget.")}
        if budget:
            self._reporter.record(events.Budget(bytes=budget))
        for name, value in totals_now.items():
            for prefix, counts in bytes_by.items():
                if name.startswith(prefix):
                    purpose = name.removeprefix(prefix).partition("/")[0]
                    counts[purpose] = counts.get(purpose, 0) + int(value)
        self._reporter.record(events.Traffic(sent=bytes_by["bytes.sent."], received=bytes_by["bytes.received."]))

    def record_receipts(self) -> None:
        """Journal what the largest sources claim and how much of it is signed, if anything is known.

        Only sources read receipts: a later stage knows those of before it joined.
        """
        if self._replica.stage > 0:
            return
        other_sources = self._membership.roster.other_sources
        largest = sorted(other_sources, key=lambda source: (-source.claimed, source.peer))[:MOST_SOURCES]
        own = self._membership.receipts.signed(self._membership.me)
        if own or any(source.signed for source in largest):
            tokens = self._run.tokens
            claimed = {source.peer: tokens(source.claimed) for source in largest}
            signed = {source.peer: tokens(source.signed) for source in largest}
            self._reporter.record(events.Receipts(claimed=claimed, signed=signed, own=tokens(own)))


class MissedMeetings:
    """Notices that a replica trains alone beside others: once, and again after the next meeting."""

    ALONE = 3

    def __init__(self) -> None:
        self._met = self._solo_before = 0
        self._said = False

    def look(self, met: int, solo: int, others: int) -> int | None:
        """Return how many outer steps in a row were taken alone, where that is to be said."""
        if met > self._met or not others:
            self._met, self._solo_before, self._said = met, solo, False
        alone = solo - self._solo_before
        if self._said or alone < self.ALONE:
            return None
        self._said = True
        return alone


class DeviceSpeed:
    """Notices, once, that microbatches take the device many times as long as they did."""

    TIMES, LOOKS = 10.0, 3
    """How much longer, and at how many looks in a row: one may see a process that was stopped for a while."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self._least_s, self._slow, self._told = inf, 0, False

    def look(self, busy_s: float, microbatches: int) -> float | None:
        """Return how many times as long a microbatch takes, when it is time to say so. Both numbers are totals."""
        before, self._seen = self._seen, (busy_s, microbatches)
        if before is None or microbatches <= before[1]:
            return None
        mean_s = (busy_s - before[0]) / (microbatches - before[1])
        self._least_s = min(self._least_s, max(mean_s, 1e-6))
        slower = mean_s / self._least_s
        self._slow = self._slow + 1 if slower >= self.TIMES else 0
        if self._told or self._slow < self.LOOKS:
            return None
        self._told = True
        return slower


class HopSample:
    """A few next hops at a time: those that took most microbatches since they were told last."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._told: dict[str, tuple[int, float]] = {}

    def take(self, counts: Mapping[str, int], now_s: float) -> tuple[tuple[str, int], ...]:
        """Return the end of each hop's id and its microbatches a minute; `counts`: totals, by peer."""
        before = {peer: self._told.get(peer, (0, self._begun_s)) for peer in counts}
        grown = {peer: counts[peer] - told for peer, (told, _) in before.items()}
        chosen = sorted((peer for peer in grown if grown[peer] > 0), key=lambda peer: (-grown[peer], peer))[:MOST_HOPS]
        self._told = before | {peer: (counts[peer], now_s) for peer in chosen}
        return tuple(
            (peer[-HOP_LETTERS:], round(60.0 * grown[peer] / max(1e-3, now_s - before[peer][1]))) for peer in chosen
        )


def progress_line(record: PeerRecord) -> str:
    loss = "" if record.loss is None else f", loss {record.loss:.3f}"
    gap = "" if record.gap is None else f", gap {record.gap:.2g}"
    waits = f"; waiting for {all_waits(record.waiting, record.stage)}" if record.waiting else ""
    return (
        f"step {record.inner_steps}, round {record.round}, progress {record.progress:.1%}{loss}{gap}, "
        f"{record.tokens_per_s:,.0f} tokens/s{waits}"
    )
