"""Which samples of a run count, and when the run is over: for a source, for a later stage, and for a visitor.

A source counts its own samples, the claims of every other source that it has heard of
(`noloco_node.swarm.receipts`), and the unlisted samples: those of the run's progress beyond these when the source
began, from sources that the DHT had forgotten. When a source is heard of later, its earlier samples are unlisted no
more. From then on, claims count as far as receipts cover them: receipts of the last stage, or in a run of one stage
those that replicas give each other at meetings.

The run is over when the budget is reached, or when the sources that did most of the work say that they have finished. A
source judges the work of others by receipts, a later stage by the microbatches that passed through it, and a replica of
a run of one stage by its own meetings. Sources without such proof are believed only near the end of the budget, or when
no more work comes: in a run of one stage, when nobody else is at work any more.

Where a stage has so many replicas that the roster is a sample, nobody can add up all sources. Then a source estimates
the run's samples: it adds up the samples of the sources that it knows, times the number for which each stands
(`SampledWork`). Errors of chance differ from source to source, so each also follows the median of what the others have
reached. Once everybody is known again, a source counts as one that begins then with what it has estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median_low
from typing import NamedTuple

from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.receipts import MetWork, met_work
from noloco_node.swarm.roster import Derived, Roster
from noloco_node.tasks import loop_s

NEARLY_OVER, IDLE_S = 0.95, 300.0
"""From this progress, or after so long without work, sources without proof of work may end a run."""
DESERTED_OVER = 0.75
"""From this progress a replica of a run of one stage may end it alone: a stranger's word ends no run at its start."""
ALONE_S = 100.0
"""The same if no other source is at work; then an end costs nothing."""
LEAST_SERVED = 4
"""A later stage judges sources by its own samples once it has served its even part of the run's samples divided by
this; so does the replica of a run of one stage once it has brought as much to meetings."""
UNMET_ROUNDS = 2
"""In a run of one stage, the rounds of work that a replica may not have brought to a meeting yet."""
UNMET_TIMES = 2
"""Until our first meeting, names count as up to so many times the run's replicas."""


MOST_PACE = 2.0
"""A source's pace counts up to so many times the median."""
FOLLOWS_S = 2000.0
"""In which an estimate comes nearer to the median of the others' by all but 1/e of its distance."""
LONGEST_AHEAD_S = 600.0
"""For which the pace of the last reading is believed without another."""


def run_over(sources: int, finished: int) -> bool:
    """Say whether a later stage may end: most sources at work or finished say that they have finished.

    Silence never ends a run, and a dead source does not hold it up for ever.
    """
    return 2 * finished > sources > 0


class _Verified(NamedTuple):
    """Verified samples of other sources: of all, of those at work or finished, and of the finished.

    `in_all`: not only since we began.
    """

    all: int
    present: int
    finished: int
    present_in_all: int
    finished_in_all: int


class _Watched(NamedTuple):
    """A source whose work we watch: when we first saw it (loop seconds), its samples then, and what counts since."""

    since_s: float
    first: float
    counted: float

    def now(self, samples: int) -> _Watched:
        """Return the same for a source that says so many samples now; where it lost count, more come on top."""
        return self._replace(first=min(self.first, samples - self.counted))


class SampledWork:
    """The samples that all sources of a run draw, from rosters that are samples.

    Sources that two readings list stand for all. What one has drawn since we first saw it counts up to `MOST_PACE`
    times the typical pace. So a source of which news comes late counts in full when it comes.
    """

    def __init__(self, samples_per_step: int) -> None:
        self._spare = samples_per_step
        """Samples that a source may have drawn by chance beyond its pace."""
        self._watched: dict[str, _Watched] = {}

    def take(self, roster: Roster) -> tuple[float, float]:
        """Note a reading of stage 0; return the samples that all drew since the one before, and draw in a second."""
        now_s, records = roster.sources_read_at, {each.peer: each for each in roster.stage(0)}
        before = {
            peer: watched.now(records[peer].samples)
            for peer, watched in self._watched.items()
            if peer in records and watched.since_s < now_s
        }
        spans_s = {peer: now_s - watched.since_s for peer, watched in before.items()}
        taken = {peer: records[peer].samples - watched.first for peer, watched in before.items()}
        training = {peer for peer, each in records.items() if each.state is PeerState.TRAINING}
        at_work = [peer for peer in before if peer in training]
        typical = median_low([taken[peer] / spans_s[peer] for peer in at_work] or [0.0])
        counted = {
            peer: max(watched.counted, min(taken[peer], MOST_PACE * typical * spans_s[peer] + self._spare))
            for peer, watched in before.items()
        }
        self._watched = {
            peer: before[peer]._replace(counted=counted[peer]) if peer in before else _Watched(now_s, each.samples, 0.0)
            for peer, each in records.items()
        }
        grown = fmean([counted[peer] - before[peer].counted for peer in before] or [0.0])
        pace = sum(counted[peer] for peer in at_work) / (sum(spans_s[peer] for peer in at_work) or 1.0)
        return grown * roster.size(0).peers, pace * len(training) * roster.scale(0)


class RunSamples:
    """The samples of a run, as a source counts them that begins now with `own` samples.

    `reached`: the known samples of the whole run by now; what others do from now on comes on top.
    """

    def __init__(self, run: RunConfig, membership: Membership, reached: int, own: int) -> None:
        self._run, self._membership, self._me = run, membership, membership.me
        self._verified = Derived(lambda: membership.roster, self._progress_of)
        self._met = Derived(lambda: membership.roster, self._meet)
        self._work, self._estimate = SampledWork(run.samples_per_step), float(reached)
        """The run's samples by the last reading while the roster is a sample, and as last told before."""
        self._work.take(membership.roster)
        self._noted_s = membership.roster.sources_read_at
        """The last reading of stage 0 that the estimate takes into account (loop seconds)."""
        self._most_finished = False
        """Whether most sources of a sample have said that they have finished; they are in no later one."""
        self._rate, self._shown = 0.0, 0.0
        """The run's samples a second by that reading, and the largest estimate that we have told."""
        self._is_estimate = False
        self._estimated = Derived(lambda: membership.roster, self._estimate_now)
        self._deserted_s: float | None = None
        """Since when others have finished and none is at work, as we know (loop seconds)."""
        self._count_from(reached, own)

    def _count_from(self, reached: int, own: int) -> None:
        """Count exactly from now on: what others do comes on top of the run's known samples and of ours."""
        begun = self._begun = self._membership.roster
        self._reached, self.own_then = reached, own
        self._unlisted = max(0, reached - own - begun.others_samples)
        self._membership.begin_counting()

    def progress(self, own: int, returned_s: float) -> float:
        """Return the progress of the whole run with so many own samples.

        `returned_s`: when the last of them came back, or we began.
        """
        if self.is_over(own, returned_s):
            return 1.0
        if self._is_estimate:
            return min(1.0, max(own, self._sampled()) / self._run.budget_samples)
        roster = self._membership.roster
        unlisted = max(0, self._unlisted - (roster.first_samples - self._begun.first_samples))
        claimed = own + roster.others_samples + unlisted
        self._estimate = max(own, min(claimed, self._signed(own)))
        return min(1.0, max(self._shown, self._estimate) / self._run.budget_samples)

    def _look(self, own: int) -> None:
        """Note the last reading; once everybody is known again, count exactly from what was estimated until then."""
        self._estimated()
        if self._is_estimate and not self._membership.roster.is_sample:
            # As of their records: what they say later comes on top.
            reached = max(own, round(self._estimated()))
            self._is_estimate, self._rate = False, 0.0
            self._count_from(reached, own)

    def _estimate_now(self, roster: Roster) -> float:
        """Note a reading, and return the estimate of the run's samples that follows; it never falls."""
        self._is_estimate |= roster.is_sample
        if self._is_estimate and roster.sources_read_at == self._noted_s:
            return self._estimate
        passed_s, self._noted_s = roster.sources_read_at - self._noted_s, roster.sources_read_at
        # Work that only a sample shows counts by its estimate; what was done before is counted exactly.
        drawn, rate = self._work.take(roster)
        if self._is_estimate:
            reached, self._rate = self._estimate + drawn, rate
            self._most_finished |= run_over(roster.sources, roster.sources_finished)
            others = [each.progress for each in roster.stage(0) if each.state in AT_WORK and each.peer != self._me]
            if self._most_finished:
                others = [1.0]
            if others:
                # Their records are as old as those by which we count.
                median = median_low(others) * self._run.budget_samples
                reached += (1.0 - math.exp(-passed_s / FOLLOWS_S)) * (median - reached)
            self._estimate = max(self._estimate, reached)
        return self._estimate

    def _sampled(self) -> float:
        """Return the estimate as of now, which never falls."""
        estimate = self._estimated()
        # On the mean a record is half as old as the time between two.
        ahead_s = min(loop_s() - self._noted_s, LONGEST_AHEAD_S) + self._membership.sources_renewed_s / 2
        self._shown = max(self._shown, estimate + self._rate * ahead_s)
        return self._shown

    def is_over(self, own: int, returned_s: float) -> bool:
        """Say whether the sources that did most of the work since we began have finished."""
        self._look(own)
        roster = self._membership.roster
        reached = self._sampled() if self._is_estimate else self._signed(own)
        # Those of which most have finished know as much as we do, whose estimate has an error.
        unsure = 1.0 + 2.0 * roster.size(0).error if self._is_estimate else 1.0
        nearly = reached * unsure >= NEARLY_OVER * self._run.budget_samples
        mostly = reached >= DESERTED_OVER * self._run.budget_samples
        if self._run.pipeline.stages == 1 and self._is_deserted(roster) and mostly:
            return True
        if self._run.pipeline.stages == 1 and not self._is_estimate:
            most_say_so = run_over(roster.sources, roster.sources_finished)
            return self._met_all_finished(roster) or (nearly and most_say_so)
        verified = self._verified()  # nothing where the roster is a sample
        if run_over(own - self.own_then + verified.present, verified.finished):
            return True
        # A fast source that came late has done most since, and does not know the run's progress.
        if run_over(own + verified.present_in_all, verified.finished_in_all):
            return True
        others = roster.sources - roster.sources_finished > 1
        idle = loop_s() - returned_s > (IDLE_S if others else ALONE_S)
        # A source without returning gradients is not at work: its stages may have ended without it.
        most_say_so = self._most_finished or run_over(roster.sources - idle, roster.sources_finished)
        return (nearly or idle) and most_say_so

    def _signed(self, own: int) -> float:
        """Return the run's samples that receipts cover, `own` being ours."""
        roster = self._membership.roster
        if self._run.pipeline.stages > 1:
            return self._reached + (own - self.own_then) + self._verified().all
        since, met = own - self.own_then, self._met()
        places = UNMET_TIMES * self._run.pipeline.replicas
        samples, replicas = (0.0, float(min(roster.sources, places))) if met is None else met
        unmet = min(since, UNMET_ROUNDS * self._run.outer.inner_steps_per_round * self._run.samples_per_step)
        return self._reached + since + samples + max(0.0, replicas - 1.0) * unmet

    def _meet(self, _: Roster) -> MetWork | None:
        membership = self._membership
        return (
            None
            if membership.issued is None
            else met_work(membership.me, membership.issued, membership.receipts.signed_lately)
        )

    def _met_all_finished(self, roster: Roster) -> bool:
        """Say whether the partners of most of our meetings have finished, counting ourselves as one."""
        issued = self._membership.issued
        finished = {source.peer for source in roster.other_sources if source.finished}
        present = finished | {record.peer for record in roster.stage(0)}
        met = {} if issued is None else {peer: brought for peer, brought in issued.brought.items() if peer in present}
        total = sum(met.values())
        if not met or total < self._run.budget_samples // (LEAST_SERVED * self._run.pipeline.replicas):
            return False
        return run_over(total + total // len(met), sum(met[peer] for peer in finished & met.keys()))

    def _is_deserted(self, roster: Roster) -> bool:
        """Say whether for `ALONE_S` no other source was at work, and half of those that we know of have finished.

        A replica that came late has met too few to judge by. It would do alone what its own count lacks of the budget.
        """
        finished = {source.peer for source in roster.other_sources if source.finished}
        at_work = {record.peer for record in roster.stage(0) if record.state is PeerState.TRAINING}
        if 2 * len(finished) < max(1, len(roster.other_sources)) or at_work - finished - {self._membership.me}:
            self._deserted_s = None
            return False
        if self._deserted_s is None:
            self._deserted_s = loop_s()
        return loop_s() - self._deserted_s > ALONE_S

    def _progress_of(self, roster: Roster) -> _Verified:
        there = {record.peer for record in roster.stage(0)}
        finished = [source for source in roster.other_sources if source.finished]
        at_work = [source for source in roster.other_sources if not source.finished and source.peer in there]
        since, since_finished = (sum(source.verified for source in each) for each in (finished + at_work, finished))
        in_all = in_all_finished = 0
        if finished:  # expensive, and of no use before
            believed = self._membership.receipts.believed_in_all
            in_all_finished = sum(min(source.claimed, believed(source.peer)) for source in finished)
            in_all = in_all_finished + sum(min(source.claimed, believed(source.peer)) for source in at_work)
        total = sum(source.verified for source in roster.other_sources)
        return _Verified(total, since, since_finished, in_all, in_all_finished)


def is_over_below(run: RunConfig, roster: Roster, served: Mapping[str, int], progress: float, idle_s: float) -> bool:
    """Say whether the run is over for a later stage, which knows each source's work itself.

    `served`: samples that passed through the stage, by source; `idle_s`: seconds since the last one, or its begin.
    """
    finished = {source.peer for source in roster.other_sources if source.finished}
    present = finished | {record.peer for record in roster.stage(0)}
    done = {peer: served.get(peer, 0) for peer in present}
    most_say_so = run_over(roster.sources, roster.sources_finished)
    # One source alone may have sent most of a few microbatches.
    enough = run.budget_samples // (LEAST_SERVED * run.pipeline.replicas)
    if (most_say_so or sum(done.values()) >= enough) and run_over(
        sum(done.values()), sum(done[peer] for peer in finished)
    ):
        return True
    idle = idle_s > (IDLE_S if roster.sources > roster.sources_finished else ALONE_S)
    return (progress >= NEARLY_OVER or idle) and most_say_so


def believed_samples(run: RunConfig, roster: Roster) -> int:
    """Return the samples of the run that a visitor believes. Receipts of replicas that left are gone."""
    if not roster.other_sources and not roster.is_sample:
        return roster.run_samples
    progress = [record.progress for stage in roster.stages for record in stage if record.state in AT_WORK]
    reached = round(median_low(progress or [0.0]) * run.budget_samples)
    return reached if roster.is_sample else min(roster.run_samples, max(roster.signed_samples, reached))
