"""Views of a swarm from the records of its peers in the DHT.

A record is unchecked: its peer says it of itself. `noloco_node.swarm.run_samples` decides which tokens count. Their
growth is the swarm's speed; until they have been watched for long enough, it is the speed that sources report.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType

import msgspec

from noloco_node.observe import swarm_view as views
from noloco_node.observe.bottleneck import CAUSES, Cause, wait_words
from noloco_node.observe.journal_observer import routes
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import Evaluation, PeerState
from noloco_node.swarm.roster import HOP_LETTERS, MOST_HOPS, Given, PeerRecord, Roster, SourceProgress, shown_name
from noloco_node.swarm.run_samples import believed_samples

LEAST_SPAN_S, SPAN_S = 20.0, 60.0
"""For which the run's tokens are watched before their growth is believed, and over which it is measured."""
MOST_TOLD = 32
MOST_EVALUATED = 4096
ROUTE_S = 60.0  # for which a route that nobody tells of any more is shown
MOST_PER_MINUTE = 2**20
NOTHING = Given(0, 0, 0, 0)
SILENT = "no news of it: it may be dead"


class RosterObserver(views.SwarmObserver):
    """Makes a view of each roster, and remembers what changed between them."""

    def __init__(self, run: RunConfig, run_id: str, own: PeerHistory | None = None) -> None:
        """`own`: the history of the peer that observes, if it trains, with the name that its owner gave."""
        super().__init__()
        self._own = own
        self._run, self._run_id, self._tokens = run, run_id, run.tokens
        self._seen: deque[tuple[float, int]] = deque(maxlen=1000)
        self._before: dict[str, PeerRecord] | None = None
        self._came: dict[str, int] = {}
        """The inner steps that each peer had taken when it came to train; 0 of peers that trained at our first look."""
        self._held_out: float | None = None  # of the newest evaluation that a record tells
        self._evaluated: dict[str, Evaluation] = {}
        """The last evaluation of each peer: a record may be missing for a while, and its evaluation is no news then."""
        self._routes, self._lines = RecordedRoutes(), LineRates()

    def view(self, roster: Roster, at: float, late: Mapping[str, float] = MappingProxyType({})) -> views.SwarmView:
        """Return the view of a roster that was read just now. `late`: by peer, for how long it has been silent."""
        run = self._run
        records = {record.peer: record for stage in roster.stages for record in stage}
        if self._own is not None and self._own.peer in records:  # its name and gifts are added where it is published
            records[self._own.peer] = msgspec.structs.replace(
                records[self._own.peer], name=self._own.name, given=self._own.ledger.given(self._run_id)
            )
        if roster.old_since_s is None:
            self._note_changes(records, at, is_sample=roster.is_sample)
        samples = believed_samples(run, roster)
        totals = views.RunTotals(
            name=run.name,
            run_id=self._run_id,
            progress=min(1.0, samples / run.budget_samples),
            tokens=self._tokens(samples),
            budget_tokens=self._tokens(run.budget_samples),
            tokens_per_s=self._tokens_per_s(roster, samples, at),
            held_out=self._held_out,
            trouble=None
            if roster.old_since_s is None
            else f"no news of anybody for {roster.read_at - roster.old_since_s:.0f} s: what is shown is old",
        )
        self._lines.take(records)
        other_sources = {source.peer: source for source in roster.other_sources}
        peers = [
            self._peer_view(record, at, late.get(record.peer), other_sources.get(record.peer))
            for record in records.values()
        ]
        routes = self._all_routes(roster, at)
        sizes = [roster.size(number) for number in range(len(roster.stages))] if roster.is_sample else ()
        return self.put_together(totals, len(roster.stages), peers, at, routes, sizes=sizes)

    def _all_routes(self, roster: Roster, at: float) -> tuple[views.Route, ...]:
        """Return the routes in records, and ours from our own history."""
        told, own = self._routes.take(roster.stages, at), self._own
        if own is None or own.peer is None:
            return told
        return (*(route for route in told if route.origin != own.peer), *routes(own))

    def _tokens_per_s(self, roster: Roster, samples: int, at: float) -> float:
        seen = self._seen
        if roster.old_since_s is None:
            seen.append((at, samples))
        while len(seen) > 2 and at - seen[1][0] >= SPAN_S:
            seen.popleft()
        # The progress in a sample comes in steps of minutes.
        if seen and seen[-1][0] - seen[0][0] >= LEAST_SPAN_S and not roster.is_sample:
            (then, before), (now, last) = seen[0], seen[-1]
            return max(0.0, self._tokens(last - before) / (now - then))
        sources = [record for record in roster.stages[0] if record.state is PeerState.TRAINING]
        # A source whose disk refuses its checkpoints, for one, says so where others say what they wait for: it trains.
        return roster.scale(0) * sum(
            record.tokens_per_s for record in sources if not CAUSES.keys() & {each.cause for each in record.waiting}
        )

    def _peer_view(
        self, record: PeerRecord, at: float, silent_s: float | None, source: SourceProgress | None
    ) -> views.PeerView:
        wait = record.waiting[0] if record.waiting and silent_s is None else None
        waits, since_s, cause = SILENT if silent_s is not None else None, silent_s, None
        if wait is not None:
            waits, since_s, cause = wait_words(wait, record.stage), wait.seconds, wait.cause
        elif silent_s is None and record.moves_to is not None:
            waits = f"moves to stage {record.moves_to}"
        # What a record says of its peer's speed falls late while it stands still.
        idle = wait is not None and CAUSES.get(wait.cause) in (Cause.MICROBATCHES, Cause.ROUTE)
        speed = record.tokens_per_s if record.state is PeerState.TRAINING and not idle else 0.0
        busy = speed / self._run.pipeline.microbatch_tokens * record.device_s
        given = record.given or NOTHING
        claimed = None if source is None else self._tokens(source.claimed)
        own_stage = 0 if self._own is None else self._own.stage
        view = views.PeerView(
            peer=record.peer,
            name=called(record),
            stage=record.stage,
            state=str(record.state),
            inner_steps=record.inner_steps,
            round=record.round,
            partner=None if record.partner is None else views.short(record.partner),
            tokens_per_s=speed,
            busy=min(1.0, busy) if busy > 0.0 or idle else None,
            loss=record.loss,
            held_out=None if record.evaluation is None else record.evaluation.loss,
            gap=record.gap,
            waits=waits,
            cause=cause,
            since=None if since_s is None else at - since_s,
            tokens_claimed=claimed,
            # A node of a later stage reads no receipts.
            tokens_signed=None if source is None or own_stage else self._tokens(source.signed),
            met=record.partner,
            settled=record.inner_steps >= self._came.get(record.peer, 0) + views.SETTLED_STEPS,
            tokens=max(given.tokens, claimed or 0),
            there_s=float(given.seconds),
            line_bytes=given.sent_bytes + given.received_bytes,
            joules=float(given.joules) or None,
            budget=record.budget,
        )
        own = self._own
        if own is None or own.peer != record.peer:
            return msgspec.structs.replace(view, **self._lines.rates(record.peer))
        return msgspec.structs.replace(
            view,
            # A roster has the claims of other sources alone: what this peer drew stands in its own record.
            tokens_claimed=claimed
            if own.signed_tokens is None
            else max(self._tokens(record.samples), own.signed_tokens),
            tokens_signed=own.signed_tokens,
            sent_per_s=own.sent_per_s,
            received_per_s=own.received_per_s,
        )

    def _note_changes(self, records: dict[str, PeerRecord], at: float, *, is_sample: bool) -> None:
        """Note what is new. A sample does not tell which peers came or are gone."""
        before, self._before = self._before, records
        training = {peer: record for peer, record in records.items() if record.state is PeerState.TRAINING}
        self._came = {
            peer: self._came.get(peer, 0 if before is None else record.inner_steps) for peer, record in training.items()
        }
        self._note_evaluations(records, at, are_news=before is not None)
        if before is None:
            return
        for peer, record in records.items():
            if is_sample and peer not in before:
                continue
            text = _change(before.get(peer), record)
            if text is not None:
                self.tell(called(record), text, at)
        for peer in () if is_sample else before.keys() - records.keys():
            last = before[peer]
            how = "left after the run" if last.state is PeerState.FINISHED else f"is gone from stage {last.stage}"
            self.tell(called(last), how, at)

    def _note_evaluations(self, records: Mapping[str, PeerRecord], at: float, *, are_news: bool) -> None:
        """Note the evaluations that are new; our own peer's are told from its journal (`ServedViews`)."""
        told = [
            (each.evaluation.number, peer, each.evaluation)
            for peer, each in records.items()
            if each.evaluation is not None and each.evaluation != self._evaluated.get(peer)
        ]
        for _, peer, evaluation in sorted(told, key=itemgetter(0, 1)):
            self._held_out = evaluation.loss
            self._evaluated.pop(peer, None)
            self._evaluated[peer] = evaluation
            if are_news and (self._own is None or self._own.peer != peer):
                self.tell(called(records[peer]), str(evaluation), at)
        while len(self._evaluated) > MOST_EVALUATED:
            del self._evaluated[next(iter(self._evaluated))]


class LineRates:
    """Rates of peers' lines, from the bytes and seconds that their records say they have given."""

    def __init__(self) -> None:
        self._told: dict[str, deque[Given]] = {}

    def take(self, records: Mapping[str, PeerRecord]) -> None:
        told = {peer: self._told.get(peer, deque(maxlen=MOST_TOLD)) for peer in records}
        for peer, gifts in told.items():
            now = records[peer].given
            if now is None or (gifts and now.seconds < gifts[-1].seconds):  # it has lost count
                gifts.clear()
            if now is not None and (not gifts or now.seconds > gifts[-1].seconds):
                gifts.append(now)
            while len(gifts) > 2 and gifts[-1].seconds - gifts[1].seconds >= LEAST_SPAN_S:
                gifts.popleft()
        self._told = told

    def rates(self, peer: str) -> dict[str, float]:
        """Return what a peer sends and receives, in bytes a second; nothing if too little is known."""
        first, last = (self._told[peer][0], self._told[peer][-1]) if self._told[peer] else (NOTHING, NOTHING)
        span_s = last.seconds - first.seconds
        if span_s < LEAST_SPAN_S:
            return {}
        return {
            "sent_per_s": max(0, last.sent_bytes - first.sent_bytes) / span_s,
            "received_per_s": max(0, last.received_bytes - first.received_bytes) / span_s,
        }


class RecordedRoutes:
    """Routes from records. A record names a few of its peer's next hops, by turns, so several readings have them all.

    Nobody checks them. A hop that fits no peer of the next stage, or two, is passed over.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[views.Route, float]] = {}

    def take(self, stages: Sequence[Iterable[PeerRecord]], at: float) -> tuple[views.Route, ...]:
        """Note the records of all stages as of `at` (unix seconds); return the routes of the last minute."""
        there = [{record.peer: record for record in stage} for stage in stages]
        for here, below in pairwise(there):
            ends = Counter(peer[-HOP_LETTERS:] for peer in below)
            called = {peer[-HOP_LETTERS:]: peer for peer in below if ends[peer[-HOP_LETTERS:]] == 1}
            for record in here.values():
                for letters, per_minute in record.hops[:MOST_HOPS]:
                    target = called.get(letters)
                    if target is not None and 0 < per_minute <= MOST_PER_MINUTE:
                        route = views.Route(origin=record.peer, target=target, per_s=per_minute / 60)
                        self._told[record.peer, target] = (route, at)
        present = set().union(*there)
        self._told = {
            pair: (route, told_at)
            for pair, (route, told_at) in self._told.items()
            if at - told_at <= ROUTE_S and present.issuperset(pair)
        }
        return tuple(route for route, _ in self._told.values())


def called(record: PeerRecord) -> str:
    """Return a peer's short id and the name that it gives itself."""
    return f"{views.short(record.peer)} {shown_name(record.name)}".rstrip()


def _change(before: PeerRecord | None, now: PeerRecord) -> str | None:
    if before is None:
        return f"came to stage {now.stage}, {now.state}"
    if before.stage != now.stage:
        return f"moved from stage {before.stage} to stage {now.stage}, {now.state}"
    if before.state is not now.state:
        return f"is {now.state} at stage {now.stage} now"
    return None
