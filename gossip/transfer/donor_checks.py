"""What of a donor is believed: its manifest, its place among the replicas of its stage, and the values that it gives.

A donor is refused as a gross outlier where its norm, its round or its progress is far from what the others of its stage
say. What of its state cannot be right is Implausible, whatever the others say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from gossip.exchange.messages import Implausible, Manifest, Parts, ReplicaState, Section
from gossip.exchange.swap import NORM_RATIO, check_finite, norm
from gossip.rule.outer_step import Tensors
from gossip.rule.shares import ROUND_BOUND
from gossip.transfer.chunks import DIGEST_BYTES, present, sections

OUTLYING_ROUNDS = 16
OUTLYING_PROGRESS = 0.25
ROUNDED = 1.01
"""What rounding adds to a bound."""
TINY_MOMENT = 1e-18


class NormVotes(NamedTuple):
    """What others of a donor's stage say of themselves in their manifests."""

    rounds: Sequence[int] = ()
    progress: Sequence[float] = ()
    norms: Sequence[float] = ()


def objection(manifest: Manifest, others: NormVotes) -> str | None:
    """Return why a donor is a gross outlier among its stage, itself counted; None where it is not.

    A norm is measured by the median of all voices, the lower one of two: weights blow up far oftener than they vanish.
    So somebody is always left to copy from.
    """
    norm = median_low([manifest.norm, *others.norms])
    if not norm / NORM_RATIO <= manifest.norm <= norm * NORM_RATIO:
        return f"its slow weights have the norm {manifest.norm:.3g}, those of its stage {norm:.3g}"
    if others.rounds:
        behind = median_low(others.rounds) - manifest.round
        if abs(behind) > OUTLYING_ROUNDS:
            return f"it is in round {manifest.round}, its stage in round {median_low(others.rounds)}"
    if others.progress:
        progress = median_low(others.progress)
        if abs(progress - manifest.progress) > OUTLYING_PROGRESS:
            return f"its progress is {manifest.progress:.2f}, that of its stage {progress:.2f}"
    return None


def round_to_start_in(state_round: int, rounds: Sequence[int]) -> int:
    """Return the round that a newcomer is in: its stage's, or its donor's, where the two are a little apart.

    Of both only the donor has shown anything, so what the stage says lifts a newcomer by a bound.
    """
    if not rounds:
        return state_round
    middle = median_low(rounds)
    return min(max(state_round, middle), min(state_round, middle) + ROUND_BOUND)


class MomentBounds(NamedTuple):
    """What AdamW's moments can be.

    A second moment is a mean of squares: it is never negative. Where the gradients are clipped, the first moments' norm
    is at most `norm`, and the second moments' sum its square. And no first moment is more than `ratio` times the root
    of its second: both are means of the same gradients, so that Cauchy and Schwarz bound one by the other.
    """

    ratio: float = 1e3
    norm: float = math.inf

    def check(self, first: Tensors, second: Tensors) -> None:
        """Raise Implausible for moments that no gradients leave."""
        for mean, square in zip(first, second, strict=True):
            if square.numel() and float(square.min()) < 0.0:
                raise Implausible("optimiser: a second moment is negative")
            # Squares of tiny gradients are zero in float32.
            if bool((mean.abs() > ROUNDED * self.ratio * square.sqrt() + TINY_MOMENT).any()):
                raise Implausible("optimiser: a first moment is too large for its second")
        most = ROUNDED * self.norm
        if norm(first) > most or sum(float(square.sum()) for square in second) > most**2:
            raise Implausible(f"optimiser: moments of gradients longer than {self.norm:.3g}, to which they are clipped")


OF_ANY_RUN = MomentBounds()
"""For whoever does not know the run's optimiser."""


def check_manifest(manifest: Manifest, parts: Parts, pieces: int) -> None:
    """Raise Implausible unless the sections are those asked for, with a hash a piece, and the counters possible."""
    there = present(manifest)
    # A momentum that is left out is none, or zero. Donors of earlier versions give one where the rule has none.
    momentum, optimiser = Section.MOMENTUM in there, Section.FIRST in there or Section.SECOND in there
    if tuple(there) != sections(parts, momentum=momentum, meetings=manifest.meetings, optimiser=optimiser):
        raise Implausible(f"the sections {', '.join(there) or '(none)'} for {parts}")
    if any(tuple(digests.shape) != (pieces, DIGEST_BYTES) for digests in there.values()):
        raise Implausible(f"not a hash for each of {pieces} pieces")
    if manifest.last_met > manifest.round:
        raise Implausible(f"last met anybody in round {manifest.last_met}, and is in round {manifest.round}")


def check_values(state: ReplicaState, announced_norm: float, moments: MomentBounds = OF_ANY_RUN) -> None:
    """Raise Implausible unless arithmetic with the state is safe: the one port of all tensors that a donor gives.

    All values are finite, the weights of about the norm that others were compared with, and the inner optimiser's
    moments such as AdamW's gradients can have left. Shapes and counters are those of the manifest, checked before.
    """
    found = norm(state.slow)
    if not announced_norm / NORM_RATIO <= found <= announced_norm * NORM_RATIO:
        raise Implausible(f"slow weights of the norm {found:.3g} came where {announced_norm:.3g} was announced")
    check_finite(state.momentum, "outer momentum")
    check_finite(state.gathered, "gathered momentum")
    check_finite(state.optimiser, "optimiser")
    half = len(state.optimiser) // 2
    moments.check(state.optimiser[:half], state.optimiser[half:])
