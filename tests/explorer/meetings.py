"""The two sides of every meeting: found, compared, and missed where one of them is not there.

Each side applies its step when its own next pause comes, so the two are heard of at different times. They are of one
meeting if both saw the same gap: the numbers of their rounds may differ, since healing is bounded by each side's own
roster. Where there is no gap to tell meetings apart, those are that applied the same mean. Both must have applied the
same mean, and it must be that of the two snapshots.

Of all messages the loss of the last receipt alone leaves one side stepped and the other not. So a side that finds no
other is looked into when the run is over. The other must have said that it lost this very exchange, each such loss
explaining one side, or its session must have ended before it could apply the step.

Where a message was tampered with in the meantime, it was believed as far as it was plausible: such means may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gossip.interface import OuterStepTaken
from gossip.settings import Format
from tests.explorer.observation import CheckerContext
from tests.explorer.session_records import SessionRecord

TOLERANCE = 1e-3
"""As in `round_invariants`."""
NO_GAP = 1e-6
"""A gap that tells no meeting from another: of two replicas alone, by arithmetic."""
LATE_S = 30.0
"""After one side has stepped, until the other has, or has given up: a receipt is held back for less."""
LOST_S = 90.0
"""After one side has stepped, until the other has given the exchange up, whatever its patience."""
ROUNDING = {Format.FLOAT32: TOLERANCE, Format.BFLOAT16: 2.0**-7, Format.INT8: 2.0 / 127, Format.INT4: 0.1}
"""Of the mean that both decode, from that of the snapshots, relative to the largest number: two roundings, since what
the last exchange left out is sent with this one; slow weights that travel are rounded likewise. Of int4 it is a share
of how far apart the two are, so this is loose."""
KEPT = 0.1
"""What int4 leaves in the fast weights, of how far apart the two are: half a step."""
FEW_STEPS = 3
"""Inner steps within which a step that is agreed has been applied."""


class MeetingSide:
    """One side of a meeting: who with whom, in which round, the gap that it saw, the mean that it applied.

    `slow` and `snapshot`: weights before the step. `kept`: what it has left of the snapshot in the fast weights, and of
    slow weights that travel, at most. `scale`: its largest number. `begun_s`: no later than the exchange
    began. `stepped_s`: when the step was applied.
    """

    def __init__(
        self,
        record: SessionRecord,
        event: OuterStepTaken,
        mean: Tensor,
        *,
        slow: Tensor,
        snapshot: Tensor,
        kept: float,
        scale: float,
        at_s: float,
    ) -> None:
        assert event.partner is not None
        self.name, self.partner, self.round, self.gap = record.name, event.partner, event.round, event.gap or 0.0
        self.mean, self.slow, self.snapshot, self.scale, self.stepped_s = mean, slow, snapshot, scale, at_s
        self.kept = kept
        # It was agreed after the last pause but one.
        agreed_s = record.stepped_s[-2] if len(record.stepped_s) > 1 else record.began_s
        self.begun_s = agreed_s - event.seconds
        self.clipped = False
        """Whether the partner's weights counted in part only, so that this side's mean is its own."""


@dataclass(slots=True, repr=False)
class MeetingChecker:
    """Finds the other side of each, and checks both."""

    context: CheckerContext
    compared: int = 0
    unmatched: int = 0
    _open: dict[tuple[str, str], list[MeetingSide]] = field(default_factory=dict)
    """Sides that have no other side yet, by the two peers."""

    def statistics(self) -> dict[str, int | float]:
        """Return meetings whose two sides were compared, and sides that had no other in the end."""
        return {"compared": self.compared, "unmatched": self.unmatched}

    def hear(self, side: MeetingSide) -> None:
        """Compare a side that has just been applied with its other side, if that is there already."""
        first, second = sorted((side.name, side.partner))
        waiting = self._open.setdefault((first, second), [])
        found = [other for other in waiting if _of_one_meeting(other, side) and self._tells(side, other)]
        if not found:
            waiting.append(side)
            return
        other = min(found, key=lambda each: abs(each.round - side.round))
        waiting.remove(other)
        if self._is_spoilt(side) or self._is_spoilt(other) or side.clipped or other.clipped:
            return
        self.compared += 1
        self.context.checked["pair"] += 1
        scale, pull = max(side.scale, other.scale), self._pull(side, other)
        away, bound = self._apart(side, other)
        if not away <= bound:
            sentence = f"{side.name} and {other.name} met in round {side.round} and applied means that differ"
            self.context.complain("pair", f"{sentence} by {away:.3g}")
        away = float((side.mean - pull - (side.snapshot + other.snapshot) / 2).abs().max())
        codec = Format(self.context.outer.codec)
        if codec.is_modular:
            apart = [float((a - b).abs().max()) for a, b in ((side.snapshot, other.snapshot), (side.slow, other.slow))]
            kept = max(side.kept, other.kept)
            if not kept <= KEPT * sum(apart):
                sentence = f"{side.name} and {other.name} met in round {side.round} and one has kept {kept:.3g}"
                self.context.complain("rule", f"{sentence} of its snapshot, of {sum(apart):.3g} that they were apart")
            scale = max(scale, 2 * apart[0])
        # What the slow weights were rounded by is in the pull.
        if not away <= (1.0 + abs(self._pulled)) * ROUNDING[codec] * scale:
            sentence = f"{side.name} and {other.name} met in round {side.round} and applied a mean of other weights"
            self.context.complain("pair", f"{sentence} than their snapshots: {away:.3g} off")

    @property
    def _pulled(self) -> float:
        """How much of the distance from the mean of the slow weights is in what each has applied."""
        return 1.0 - self.context.outer.gamma / self.context.outer.beta

    def _pull(self, side: MeetingSide, other: MeetingSide) -> Tensor:
        # Where gamma differs from beta, what each applied is the mean of the fast weights and a pull of its own.
        return self._pulled / 2 * (side.slow - other.slow)

    def _apart(self, side: MeetingSide, other: MeetingSide) -> tuple[float, float]:
        """Return by how much two sides' means differ, and by how much they may."""
        outer = self.context.outer
        exact = TOLERANCE if outer.gamma == outer.beta else ROUNDING[Format(outer.codec)]
        away = float((side.mean - other.mean - 2 * self._pull(side, other)).abs().max())
        return away, exact * max(side.scale, other.scale)

    def _tells(self, side: MeetingSide, other: MeetingSide) -> bool:
        """Say whether the gap tells this meeting from others; where there is none, the other may be the half of an
        earlier one, whose last receipt was lost, if its mean is another.

        A mean that counts in part tells nothing, but an exchange that began after one side's step is not that side's.
        """
        away, bound = self._apart(side, other)
        in_part = side.clipped or other.clipped
        at_once = max(side.begun_s, other.begun_s) <= min(side.stepped_s, other.stepped_s)
        return max(side.gap, other.gap) > NO_GAP or away <= bound or (in_part and at_once)

    def _is_spoilt(self, side: MeetingSide) -> bool:
        return any(self.context.is_spoilt(peer, side.begun_s) for peer in (side.name, side.partner))

    def end(self) -> None:
        """Look into the sides that have found no other, once the run is over."""
        used: set[int] = set()
        for sides in self._open.values():
            for side in sides:
                if self._is_spoilt(side):
                    continue
                self.unmatched += 1
                self.context.checked["unmatched"] += 1
                if not self._gave_up(side, used) and not self._ended(side):
                    sentence = f"{side.name} met {side.partner} in round {side.round} at {side.stepped_s:.2f} s"
                    self.context.complain(
                        "pair", f"{sentence}, and the other neither stepped nor lost the exchange nor ended"
                    )

    def _gave_up(self, side: MeetingSide, used: set[int]) -> bool:
        """Say whether the partner gave up an exchange with us then; each that it gave up explains one side."""
        for record in self._sessions_of(side.partner):
            for given_up in record.breaks:
                then = side.begun_s <= given_up.at_s <= side.stepped_s + LOST_S
                if then and given_up.partner == side.name and id(given_up) not in used:
                    used.add(id(given_up))
                    return True
        return False

    def _ended(self, side: MeetingSide) -> bool:
        """Say whether a session of the partner ended before it can have applied the step."""
        for record in self._sessions_of(side.partner):
            if record.ended_s is not None and record.ended_s >= side.begun_s:
                soon = record.ended_s <= side.stepped_s + LATE_S
                if soon or record.steps_since(side.stepped_s) < FEW_STEPS:
                    return True
        return False

    def _sessions_of(self, peer: str) -> Iterator[SessionRecord]:
        return (record for (name, _), record in self.context.sessions.items() if name == peer)


def _of_one_meeting(one: MeetingSide, other: MeetingSide) -> bool:
    """Say whether two sides are of one meeting: the same gap, and about one time. Their numbers may be far apart: one
    that was cut off moves up by one an opening."""
    if one.name == other.name or not math.isclose(one.gap, other.gap, rel_tol=1e-4, abs_tol=NO_GAP):
        return False
    return max(one.begun_s, other.begun_s) <= min(one.stepped_s, other.stepped_s) + LATE_S
