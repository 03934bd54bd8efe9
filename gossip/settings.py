"""How a run gossips: the section `outer` of its run file.

Here each setting is declared once, with its default, its bounds and what it means. `noloco_node.run.validation` has the
rules that no type states. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gossip.exchange.formats import Format

# The least and the most that a number may be; `noloco_node.run.fields` holds a run file to them.
StepCount = Annotated[int, (1, 10**6)]
DeferralCount = Annotated[int, (1, 10_000)]
StepPeriod = Annotated[int, (1, 1000)]
LineShare = Annotated[float, (0.01, 0.99)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig:
    """The gossip round. The defaults were chosen in the laboratory, mostly on one seed (research/results.md); NoLoCo as
    published (arXiv 2506.10911) is 0.5, 0.7, 0.7, a round every 50 steps, float32, blocking.
    """

    inner_steps_per_round: StepCount = 10
    late_inner_steps_per_round: StepCount | None = None
    """At the end of the run; from `inner_steps_per_round` at its beginning they follow a geometric course."""
    dynamic_steps: bool = True
    """Slower replicas take fewer inner steps a round, so that they reach their rounds together with the fastest."""
    weigh_by_steps: bool = False
    """In the mean of a meeting each replica counts by the inner steps since its last one, at most four times the other;
    otherwise both count alike."""
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    momentum_period: StepPeriod = 1
    """Outer steps after which the momentum moves once; 1 is the paper's rule (`gossip.rule.outer_step`)."""
    momentum_spread: float = 0.0
    """Share of the momentum that each outer step of a period but the last one applies."""
    codec: Format = Format.INT4
    """Number format of the weights that a round exchanges; each but float32 carries its rounding error on."""
    line_share: LineShare = 0.2
    """Of a line whose rate is known, what rounds take while microbatches wait for it."""
    staleness_at_most: StepCount = 16
    """Rounds since its weights last met anybody's (1: in the round before) beyond which a replica takes its partner's
    weights instead of a mean."""
    blocking: bool = False
    """The paper's form: admit nothing, drain, then exchange. Otherwise training goes on until the partner is there."""
    overlap_steps: int = 8
    """A snapshot older than this many inner steps is retaken while the round stays open."""
    deferrals_before_solo: DeferralCount = 4
