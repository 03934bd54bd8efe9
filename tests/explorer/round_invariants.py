"""What must hold of the rounds, as far as journals and the state of both sides show it.

With gamma = beta a step adds u = beta (phi - mean theta) to the momentum, at once or at the end of its period
(`gossip.rule.outer_step`). So u, and with it the mean that a side applied, mean theta = phi - u / beta, follows
from its own state before and after the step, and needs no look at the exchange. With another gamma there is a pull in
it besides, (1 - gamma / beta) / 2 times the distance to the partner's slow weights, with opposite signs on the two
sides. The snapshot is known too: an outer step says how many inner steps ago it was taken, and the fast weights at the
end of each pause are remembered. So:

- the two sides of a meeting must have applied the same mean, and it is that of their two snapshots (`meetings`), as
  far as the run's codec can tell: both decode alike, to less than the weights themselves;
- the mean of a solo round is one's own fast weights;
- phi' = phi - u - the momentum's share, always;
- who was too stale and took its partner's weights has no momentum left;
- the fast weights have moved by phi' - snapshot, neither more nor less: gossip has its effect, and once; who took its
  partner's weights has them in both places. What a codec has left out of what travelled comes on top, to the bit as the
  codec rounds; of a partner's that counted in part no more than that;

A step that forgets its momentum shows in both means: the sides of a pair have different momenta as soon as they have
met different partners.

**Numbers.** Within a session each step's round is above the last one. Who is behind heals: a round is opened at

    1 + min(highest finished, own finished + LIFT_BOUND)

of the roster or above (`matching.heal`), where the roster's numbers are at most `Delays.news_s` old. The step that ends
a round comes at most H + overlap inner steps after its opening; so the numbers of that moment, less the delay, bound
the round of every step from below. A replica that fell behind by k rounds is there again within k / (LIFT_BOUND + 1)
steps, and with the next one where those that it has met are ahead as far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossip.interface import OuterStepTaken
from gossip.rule.outer_step import LIFT_BOUND, OuterState
from gossip.settings import Format
from research.codec.whole_sets import encode
from tests.explorer.meetings import MeetingChecker, MeetingSide
from tests.explorer.observation import CheckerContext, clipped
from tests.explorer.session_records import SessionRecord, fast_of, state_of

TOLERANCE = 1e-3
"""Of a recovered mean, relative to the largest number that it was recovered from: float32, divided by beta."""
ROUNDING = 1e-5
"""Of a difference of weights, relative to the largest of them: a few sums in float32."""
DIFFERENCE = 2.0**-8
"""What bfloat16 rounds off a correction at most, relative to its largest value."""


@dataclass(slots=True, repr=False)
class RoundInvariants:
    """Checks every outer step."""

    context: CheckerContext
    meetings: MeetingChecker
    met: int = 0
    solo: int = 0
    adopted: int = 0

    def statistics(self) -> dict[str, int | float]:
        """Return outer steps seen with, without and to the weights of a partner, and what the meetings count."""
        return {"met": self.met, "solo": self.solo, "adopted": self.adopted, **self.meetings.statistics()}

    def hear(self, record: SessionRecord, event: OuterStepTaken) -> None:
        context, now_s = self.context, self.context.world.now_s
        after, fast = state_of(record.peer), fast_of(record.peer)
        before, before_fast = record.state, record.fast
        snapshot = before_fast if event.staleness == 0 else record.pauses.get(record.steps - event.staleness)
        record.state = after
        record.note_fast(fast)
        self._check_number(record, event)
        record.finished.append((now_s, event.round))
        (phi,), (phi_next,) = before.slow, after.slow
        m, m_next = (state.momentum[0] if state.momentum else torch.zeros_like(phi) for state in (before, after))
        scale = max(1.0, *(float(part.abs().max()) for part in (phi, m, m_next, fast)))
        added = self._added(before, after)
        if snapshot is None:
            sentence = f"{record.name} stepped on a snapshot {event.staleness} inner steps old"
            context.complain("rule", f"{sentence}, of which nothing is known")
            return
        mean = phi - added / context.outer.beta
        if event.adopted:
            self._check_correction(record, fast, phi_next, ROUNDING * scale)
            self.adopted += 1
            record.met_s = now_s
            context.checked["adopted"] += 1
            if bool(m_next.any()) or after.meetings:
                context.complain("rule", f"{record.name} took its partner's weights, and kept its momentum")
            return
        if not torch.allclose(phi_next, phi - added - self._share(before) * m, atol=TOLERANCE * scale):
            context.complain("rule", f"{record.name} moved its slow weights by other than its momentum")
        assert record.peer.replica is not None
        before_clipped, record.clipped = record.clipped, clipped(record.peer.replica)
        in_part, codec = record.clipped > before_clipped, Format(context.outer.codec)
        due, rounding = phi_next - snapshot, ROUNDING * scale
        left_out = list(self._left_out(phi, snapshot, met=event.partner is not None))
        for part in left_out:
            if in_part:
                rounding += float(part.abs().max())
            else:
                due += part
        if codec is not Format.FLOAT32:
            rounding += DIFFERENCE * float(due.abs().max())
        unknown = codec.is_modular and event.partner is not None
        off = self._check_correction(record, fast - before_fast, due, math.inf if unknown else rounding)
        if event.partner is not None:
            self.met += 1
            record.met_s = now_s
            kept = max(0.0, off - rounding)
            side = MeetingSide(record, event, mean, slow=phi, snapshot=snapshot, kept=kept, scale=scale, at_s=now_s)
            side.clipped = in_part
            self.meetings.hear(side)
            return
        self.solo += 1
        away = float((mean - snapshot + sum(left_out)).abs().max())
        if away > TOLERANCE * scale:
            sentence = f"{record.name} took a solo step for round {event.round} that its own weights do not explain"
            context.complain("rule", f"{sentence}: the mean that it applied is {away:.3g} off")

    def _left_out(self, slow: Tensor, snapshot: Tensor, *, met: bool) -> Iterator[Tensor]:
        """Yield what rounding has left out of a snapshot, and of slow weights that travelled, as the correction has it.

        Of int4 only what the snapshot lacks where nobody was met: how it rounds follows from both sides' probes.
        """
        outer, codec = self.context.outer, Format(self.context.outer.codec)
        if codec is Format.FLOAT32:
            return
        taken = slow + (snapshot - slow).bfloat16()
        travels = met and not codec.is_modular
        yield snapshot - (_decoded(codec, taken) if travels else taken)
        if travels and outer.gamma != outer.beta:
            yield _decoded(codec, slow) - slow

    def _share(self, before: OuterState) -> float:
        """Return how much of the momentum a step from this state moves the slow weights by, alpha included."""
        period, spread = self.context.outer.momentum_period, self.context.outer.momentum_spread
        last = before.meetings + 1 >= period
        return self.context.outer.alpha * (1.0 - (period - 1) * spread if last else spread)

    def _added(self, before: OuterState, after: OuterState) -> Tensor:
        self.context.checked["rule"] += 1
        if not after.momentum:
            return before.slow[0] - after.slow[0]
        earlier = before.gathered[0] if before.gathered else torch.zeros_like(before.slow[0])
        if after.gathered:
            return after.gathered[0] - earlier
        return after.momentum[0] - self.context.outer.alpha * before.momentum[0] - earlier

    def _check_correction(self, record: SessionRecord, moved: Tensor, due: Tensor, rounding: float) -> float:
        self.context.checked["correction"] += 1
        away = float((moved - due).abs().max())
        if not away <= rounding:
            sentence = f"{record.name} moved its fast weights by other than new slow weights less snapshot"
            self.context.complain("rule", f"{sentence}: {away:.3g} off, of {float(due.abs().max()):.3g}")
        return away

    def _check_number(self, record: SessionRecord, event: OuterStepTaken) -> None:
        context, last = self.context, record.finished[-1][1]
        if event.round <= last:
            context.complain("round", f"{record.name} finished round {event.round} after round {last}")
        opened_s = record.stepped_s[0] if len(record.stepped_s) == record.stepped_s.maxlen else record.began_s
        then_s = opened_s - context.delays.news_s
        if then_s < context.quiet_s + context.delays.roster_s:
            return
        others = [o.finished_at(then_s) for o in context.present.values() if o.training and o.stage == record.stage]
        least = 1 + min(max(others), last + LIFT_BOUND)
        context.checked["round"] += 1
        if event.round < least:
            sentence = f"{record.name} finished round {event.round}, which was behind already when it opened"
            context.complain("round", f"{sentence}: its stage was at {sorted(others)} at {then_s:.1f} s")


def _decoded(codec: Format, weights: Tensor) -> Tensor:
    """Return what both sides of a meeting read of weights that travel."""
    (decoded,) = encode(codec, (weights,)).decoded
    return decoded
