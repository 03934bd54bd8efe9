"""What becomes of the pieces that came from a donor that died, when another one takes its place.

Replicas of a stage differ a little, honestly, so what comes from the second donor does not continue the first one's
state. Two ways lead on. **Afresh**: every piece whose hash differs is fetched again, and the state is one donor's.
**Mixed**: units that are complete stay with all their sections (weights, momentum and moments of a parameter belong
together), and the rest is the second donor's. Parameters of two replicas that are near each other make a replica that
is near both; a parameter of which halves come from two would be neither's.

Mixed needs fewer bytes, as a rule. It is taken where it saves at least `LEAST_SAVING` of them and the two copies belong
together: the same sections, the same place in the momentum period, and rounds at most `ROUNDS_APART` apart.

And whose word is believed: a donor is refused as a gross outlier where its norm, its round or its progress is far from
what the others of its stage say.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from gossip.exchange.messages import Manifest
from gossip.exchange.swap import NORM_RATIO
from gossip.rule.staleness import ROUND_BOUND
from gossip.transfer.chunks import present

LEAST_SAVING = 0.1
ROUNDS_APART = ROUND_BOUND
"""As far as a replica may be behind and still be a straggler like any other."""
OUTLYING_ROUNDS = 16
OUTLYING_PROGRESS = 0.25


def mixes(before: Manifest, after: Manifest, *, afresh_bytes: int, mixed_bytes: int) -> bool:
    """Say whether the complete units of the copy before stay, rather than beginning afresh with the copy after.

    The bytes are those that are still to be fetched on either way.
    """
    return (
        present(before).keys() == present(after).keys()
        and before.meetings == after.meetings
        and abs(before.round - after.round) <= ROUNDS_APART
        and mixed_bytes <= (1.0 - LEAST_SAVING) * afresh_bytes
    )


class NormVotes(NamedTuple):
    """What the others of a donor's stage say: rounds and progress of the roster, norms of some replicas' manifests."""

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
    """Return the round that a newcomer is in: its stage's, or its donor's where that is a little further."""
    if not rounds:
        return state_round
    middle = median_low(rounds)
    return min(max(state_round, middle), middle + ROUND_BOUND)
