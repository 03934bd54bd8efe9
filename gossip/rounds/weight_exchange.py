"""What is said in a meeting: probes, weights, and the step that follows from both.

Probes go first. They are small, and all that follows depends on them alone, alike on both sides: whose weights count,
how they are coded, and whether the slow ones need to travel. Mostly both count. A side whose weights are too stale
contributes nothing (`staleness`): it sends no weights and goes on from the partner's, which travel in a form that says
where they are rather than how far; the partner takes no step and keeps its round open.

What comes is kept as it came, until the step has been taken.
"""

from __future__ import annotations

from typing import NamedTuple

from gossip.exchange.codec import Sides
from gossip.exchange.messages import Implausible, Probe, Weights
from gossip.exchange.swap import Conversation, check_own, check_probe, gap, size_bytes, swap
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot
from gossip.rounds.piecewise_step import Step
from gossip.rounds.prefetch import SlowWeightPrefetcher
from gossip.rule.staleness import (
    DISOWNED,
    ContributionWeights,
    Met,
    clock,
    contribution_weights,
    last_met_after,
    staleness,
)

NO_WEIGHTS = Weights(fast=(), slow=())


class ExchangeResult(NamedTuple):
    """What a meeting came to. `step`: None where the partner's weights are too stale to count.

    `last_met`: of our weights after the step. `partner_steps`: inner steps that the partner says it brings. `spared`:
    whether slow weights that had travelled ahead did not have to travel again. `clipped`: whether less than all of what
    the partner sent counts.
    """

    step: Step | None
    gap: float
    staleness: int
    partner_staleness: int
    last_met: int
    bytes_sent: int
    bytes_received: int
    adopted: bool
    spared: bool
    clipped: bool
    partner_steps: int


class _Swapped(NamedTuple):
    """The step that follows from a swap of weights, what was sent and what came, and whether slow ones were spared."""

    step: Step | None
    sent: Weights
    came: Weights
    spared: bool = False


class _Meeting(NamedTuple):
    """Two sides that have shown each other their probes."""

    conversation: Conversation
    snapshot: Snapshot
    optimiser: OuterOptimiser
    mine: Probe
    theirs: Probe


async def exchange_weights(
    conversation: Conversation,
    snapshot: Snapshot,
    optimiser: OuterOptimiser,
    prefetcher: SlowWeightPrefetcher,
    met: Met,
    brings: int,
    staleness_at_most: int,
) -> ExchangeResult:
    """Exchange probes and weights, and return the step; nothing moves yet. `met`: what we say of our weights, `brings`:
    how many inner steps since they last met anybody's.

    Raises Implausible where what comes cannot be right, another `ConnectionError` where it does not come or where our
    own weights are not finite.
    """
    mine = Probe(
        round=met.round,
        last_met=met.last_met,
        version=optimiser.version,
        holds=prefetcher.version_held(conversation.peer),
        slow=optimiser.slow_probe(),
        fast=optimiser.fast_probe(snapshot),
        inner_steps=brings,
    )
    check_own(mine)
    theirs = await swap(conversation, mine)
    check_probe(theirs, mine)
    meeting = _Meeting(conversation, snapshot, optimiser, mine, theirs)
    partner = Met(theirs.round, theirs.last_met)
    own_age, their_age = (staleness(side, clock(met, partner)) for side in (met, partner))
    whose = contribution_weights(met, partner, staleness_at_most)
    if whose is ContributionWeights.BOTH:
        swapped = await _average(meeting, prefetcher)
    elif whose is ContributionWeights.MINE:
        swapped = await _lend(meeting)
    else:
        swapped = await _adopt(meeting, alike=met.last_met != DISOWNED)
    return ExchangeResult(
        step=swapped.step,
        gap=gap(mine.slow, theirs.slow),
        staleness=own_age,
        partner_staleness=their_age,
        last_met=last_met_after(met, partner, adopted=whose is ContributionWeights.THEIRS),
        bytes_sent=size_bytes(mine, swapped.sent),
        bytes_received=size_bytes(theirs, swapped.came),
        adopted=whose is ContributionWeights.THEIRS,
        spared=swapped.spared,
        clipped=swapped.step is not None and swapped.step.clipped,
        partner_steps=theirs.inner_steps,
    )


async def _average(meeting: _Meeting, prefetcher: SlowWeightPrefetcher) -> _Swapped:
    """Swap weights in the run's codec, of which both use what both decode."""
    conversation, snapshot, optimiser, mine, theirs = meeting
    fast_steps = optimiser.steps(mine.fast, theirs.fast)
    # By which steps slow weights are coded that travel now; those of ours that have travelled ahead have others.
    slow_steps = optimiser.steps(mine.slow, theirs.slow) if optimiser.needs_slow else ()
    prefetched = prefetcher.of(conversation.peer)
    given = prefetched if prefetched is not None and theirs.holds == prefetched.version == mine.version else None

    fast = await optimiser.encode_fast(snapshot, fast_steps)
    slow = await optimiser.encode_slow(slow_steps) if optimiser.needs_slow and given is None else None
    sent = Weights(fast=fast.coded.wire, slow=() if slow is None else slow.coded.wire)
    came = await swap(conversation, sent)

    heard = await optimiser.hear_fast(came.fast, snapshot, fast)
    sides = await optimiser.bound_fast(conversation.peer, heard, snapshot)
    slow_sides: Sides | None = None
    if optimiser.needs_slow:
        # Each side's slow weights have come now, or ahead of time; both decode the ones that the other holds.
        if came.slow:
            slow_sides = await optimiser.hear_slow(came.slow, slow or await optimiser.encode_slow(slow_steps))
        elif prefetched is not None and prefetched.their_version == theirs.version:
            slow_sides = prefetched.slow
        else:
            raise Implausible("no slow weights, and we hold none of this version")
        ours = slow.coded if slow is not None else slow_sides.mine if given is None else given.slow.mine
        slow_sides = await optimiser.bound_slow(conversation.peer, slow_sides._replace(mine=ours), snapshot)
    elif came.slow:
        raise Implausible("slow weights, which gamma = beta does not need")
    step = Step(snapshot.fast, sides, slow_sides, shares=optimiser.shares(mine.inner_steps, theirs.inner_steps))
    return _Swapped(step, sent, came, spared=given is not None)


async def _lend(meeting: _Meeting) -> _Swapped:
    """Send the weights that the partner is to go on from; its own do not count."""
    wire = (await meeting.optimiser.encode_absolute(meeting.snapshot)).coded.wire
    sent = Weights(fast=(), slow=wire) if meeting.optimiser.needs_slow else Weights(fast=wire, slow=())
    came = await swap(meeting.conversation, sent)
    if came.fast or came.slow:
        raise Implausible("weights that are too stale to count")
    return _Swapped(None, sent, came)


async def _adopt(meeting: _Meeting, *, alike: bool) -> _Swapped:
    """Go on from the partner's weights. `alike`: they have to be like ours."""
    came = await swap(meeting.conversation, NO_WEIGHTS)
    wire, surplus = (came.slow, came.fast) if meeting.optimiser.needs_slow else (came.fast, came.slow)
    if surplus:
        raise Implausible("two sets of weights to adopt")
    return _Swapped(await meeting.optimiser.adopting(wire, meeting.snapshot, alike=alike), NO_WEIGHTS, came)
