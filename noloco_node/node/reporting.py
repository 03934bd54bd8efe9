"""Reports of a node that trains: its record to the swarm, totals to the journal, lines to its owner, and why it stands
still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import NoReturn

from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.node.health import Condition
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.observe.bottleneck import all_waits
from noloco_node.run.peer_state import LONGEST_DETAIL, PeerState
from noloco_node.swarm.roster import HOP_LETTERS, MOST_HOPS, PeerRecord
from noloco_node.tasks import loop_s
from noloco_node.units import format_duration

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
        self._meetings, self._stall = MissedMeetings(), Stall()
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
            self._reporter.notice("device", text)

    def conditions(self, explained: bool) -> dict[str, Condition]:
        """Return why no microbatch comes back, and why no partner is met, where either has lasted.

        `explained`: the time until now is no stall, because we were away or have told why the training stands still.
        """
        replica, me, rounds = self._replica, self._membership.me, self._replica.rounds
        if explained or rounds.holds_training:
            self._stall.end()
        patience_s = replica.late_s if replica.late_s < inf else 2.0 * self._run.pipeline.budget_s
        stall = self._stall.look(replica.statistics(), loop_s(), max(STALL_S, patience_s), replica.stage)
        listed = self._membership.roster.stage(replica.stage)
        others = sum(each.peer != me and each.state is PeerState.TRAINING for each in listed)
        alone = self._meetings.look(rounds.statistics(), rounds.view.left_alone, others, replica.stage, rounds.reasons)
        found = {"stall": stall, "rounds": alone}
        return {what: condition for what, condition in found.items() if condition is not None}

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


STATUS = "`noloco-node status INVITE` shows"
ROOM = f"another peer with --stage {{below}}, unless {STATUS} that a later stage holds it up"
HANGS = f"{STATUS} whether it works for others, and `noloco-node doctor INVITE` what is in the way here"
BEHIND = f"{STATUS} which later stage has nobody, too few, or a slow one; a peer with --stage N helps it"
DEVICE = "end other programs on the device, or start this node again"
ROUND = "nothing yet, for a round ends by itself; in a run with outer.overlap_steps a stage trains on meanwhile"
STALLS: Mapping[str, tuple[str, str]] = {
    "downstream.refused_full": ("refused by stage {below} as full", ROOM),
    "downstream.refused_gossiping": ("refused by stage {below} during its round", ROUND),
    "downstream.refused_leaving": ("refused by replicas of stage {below} that leave, or are not ready", ROOM),
    "downstream.refused_no_route": ("sent back by stage {below}, which reaches no later one", BEHIND),
    "downstream.refused_expired": ("out of time at stage {below} or later", BEHIND),
    "downstream.lost_given_up": ("not answered by stage {below} in time", HANGS),
    "downstream.lost_unreachable": ("not taken, for stage {below} was not reached", HANGS),
    "downstream.lost_broken": ("broken off on the way to stage {below} or back", HANGS),
    "worker.refused_late": ("refused here, for the device would not have been in time", DEVICE),
    "worker.shortages": ("without memory here", DEVICE),
    "downstream.waiting": ("waiting for a replica of stage {below}", HANGS),
    "downstream.calls": ("under way to stage {below}", HANGS),
    "gate.turns": ("with a gradient, waiting for the others of the window", BEHIND),
    "here": ("at our own device", DEVICE),
}
"""Why microbatches do not come back, and what to try: by totals of a replica, and what is under way now."""
UNDER_WAY = ("downstream.waiting", "downstream.calls", "gate.turns")  # these are no totals: they count the present
STANDS = "no microbatch has come back for "
STALL_S = 180.0  # a shorter one is not told


class Stall:
    """Notices that no microbatch comes back, and why.

    A step is late after several times what one usually takes (`Replica.late_s`), and in a step many microbatches come
    back: so neither large windows nor slow devices are called a stall.
    """

    def __init__(self) -> None:
        self._since_s, self._before = 0.0, dict[str, float]()

    def end(self) -> None:
        """Begin to wait anew."""
        self._before = {}

    def look(self, totals: dict[str, float], now_s: float, patience_s: float, stage: int) -> Condition | None:
        """Return why nothing comes back. `totals`: the statistics of a replica of this stage."""
        if totals["worker.succeeded"] != self._before.get("worker.succeeded"):
            self._since_s, self._before = now_s, totals | dict.fromkeys(UNDER_WAY, 0)
        away = sum(totals.get(name, 0) for name in UNDER_WAY)
        totals = totals | {"here": max(0, totals["gate.in_flight"] - away)}
        idle = not totals["gate.in_flight"] and not totals.get("downstream.waiting")
        whole = totals["gate.succeeded"] >= totals["gate.window"]  # what follows is the step's
        counts = {name: round(totals.get(name, 0) - self._before.get(name, 0)) for name in STALLS}
        causes = sorted((name for name in STALLS if counts[name] > 0), key=lambda name: -counts[name])
        if whole or (idle and not causes and not stage):
            self.end()  # a source draws none: it has no text, or its part is done
        if now_s - self._since_s < patience_s or not self._before:
            return None
        why = ", ".join(f"{counts[name]} {STALLS[name][0]}" for name in causes).format(below=stage + 1)
        what = f"no microbatch has come from stage {stage - 1} for " if idle and not causes else STANDS
        since = f"{what}{format_duration(now_s - self._since_s)}{': ' * bool(why)}{why}"
        hint = STALLS[causes[0]][1] if causes else f"{STATUS} whether that stage has a replica at work"
        return Condition(since[:LONGEST_DETAIL], f"{since}. Try: {hint.format(below=stage + 1)}", "the stall is over")


class MissedMeetings:
    """Notices that a replica trains alone beside others, and why."""

    ALONE = 3

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}  # the totals at the last meeting

    def look(
        self, totals: Mapping[str, float], left_alone: int, others: int, stage: int, reasons: Mapping[str, str]
    ) -> Condition | None:
        """Return why nobody is met. `left_alone`: how many partners; `reasons`: the last one, by count."""
        if totals["met"] > self._before.get("met", -1) or not others:
            self._before = dict(totals)
        since = {name: round(totals[name] - self._before[name]) for name in ("solo", "declined", "unanswered", "lost")}
        if since["solo"] < self.ALONE:
            return None
        text = f"{since['solo']} outer steps in a row were taken alone, though the roster lists {others} more of stage"
        words = {"declined": "proposals declined", "unanswered": "without an answer", "lost": "meetings broken off"}
        last = {name: f" (the last one: {reason})" for name, reason in reasons.items()}
        why = [f"{words[name]}: {since[name]}{last.get(name, '')}" for name in words if since[name]]
        why += [f"partners left alone for now: {left_alone}"] * (left_alone > 0)
        causes = ", ".join(why) or "none of them was ready when we were"
        over = "no outer step is taken alone beside others any more"
        return Condition(text.partition(",")[0], f"{text} {stage} at work: {causes}", over)


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
