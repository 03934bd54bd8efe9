"""The rules of a run's outer steps: bounds, and the range in which they are stable.

NoLoCo's gossip contracts the disagreement of many replicas that meet in random disjoint pairs if and only if
0 < gamma < 2 (1 - alpha^2) (from the exact recursion of the second moments, confirmed by simulation). The range printed
in the paper (arXiv 2506.10911, equation 74: alpha < gamma < sqrt(2 + alpha^2) for pairs) is another one: it admits
choices that diverge, such as alpha 0.9 with gamma 1.0, and forbids good ones, such as small gammas. With a momentum
period above 1 the same recursion over a period gives the range (`gossip.rule.stability`); and what the replicas have in
common needs beta < 2, for then the gradient acts without the momentum that would damp it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gossip.rule.meeting_shares import MOST
from gossip.rule.stability import stability_bound, weighed_stability_bound
from gossip.settings import OuterConfig
from noloco_node.run.fields import Problem

_LONGEST_PERIOD = 1000
_LEAST_SHARE = 0.01


def outer_problems(outer: OuterConfig) -> Iterator[Problem]:
    """Yield every broken rule of the section."""
    early, late = outer.inner_steps_per_round, outer.late_inner_steps_per_round
    if not 0 <= outer.alpha < 1:
        yield Problem(
            "outer.alpha",
            repr(outer.alpha),
            "the outer momentum of alpha 1 and more never decays",
            "at least 0 and below 1; the paper takes 0.5",
        )
    else:
        yield from _stable(outer)
    shortest = early if late is None else min(early, late)
    often = f"every {early} inner steps" if late is None else f"every {early} to {late} inner steps"
    name = "inner_steps_per_round" if shortest == early else "late_inner_steps_per_round"
    if not outer.blocking and not 1 <= outer.overlap_steps < shortest:
        yield Problem(
            "outer.overlap_steps",
            str(outer.overlap_steps),
            f"a round comes {often}, and a snapshot has to be used or retaken before the next; below 1 no exchange "
            "could ever overlap with training",
            f"at least 1 and below outer.{name}; for a round after every step set outer.blocking",
        )
    if not _LEAST_SHARE <= outer.line_share <= 1 - _LEAST_SHARE:
        yield Problem(
            "outer.line_share",
            repr(outer.line_share),
            "rounds and microbatches both need a part of the line",
            f"a share from {_LEAST_SHARE} to {1 - _LEAST_SHARE}, for example 0.2",
        )
    yield from _delay(outer.momentum_period, outer.momentum_spread)


def _delay(period: int, spread: float) -> Iterator[Problem]:
    if not 1 <= period <= _LONGEST_PERIOD:
        yield Problem(
            "outer.momentum_period",
            str(period),
            "the momentum moves once in so many outer steps: below 1 it has no meaning, and far above the rounds of a "
            "run it never moves",
            f"1 for a momentum that moves in every step, as in the paper; at most {_LONGEST_PERIOD}",
        )
    elif not 0 <= spread <= 1 / period:
        yield Problem(
            "outer.momentum_spread",
            repr(spread),
            f"each outer step of a period of {period} but the last applies this share of the momentum, and the last "
            "what is left of the whole: that would be less than the others apply, or more than there is",
            f"from 0 to 1 / momentum_period = {1 / period:.4g}; 0 if in doubt",
        )


def _stable(outer: OuterConfig) -> Iterator[Problem]:
    """The pull must contract the disagreement, and the outer steps what the replicas have in common.

    A period or a spread out of range has a rule of its own, and is not judged here.
    """
    period, spread = outer.momentum_period, outer.momentum_spread
    if any(_delay(period, spread)):
        return
    alpha, beta, gamma = outer.alpha, outer.beta, outer.gamma
    if outer.weigh_by_steps and period > 1:
        yield Problem(
            "outer.weigh_by_steps",
            "true",
            "means weighed by inner steps are known to draw replicas together with a momentum that moves in every "
            f"outer step, not with one that moves once in {period}",
            "false, or outer.momentum_period 1",
        )
        return
    bound = weighed_stability_bound(alpha, MOST) if outer.weigh_by_steps else stability_bound(alpha, period, spread)
    delayed = f" and a momentum that moves once in {period} outer steps" if period > 1 else ""
    if not 0 < gamma < bound:
        is_plain = period == 1 and not outer.weigh_by_steps
        limit = "0 < gamma < 2 (1 - alpha^2), which is" if is_plain else "gamma above 0 and below"
        yield Problem(
            "outer.gamma",
            repr(gamma),
            f"with random pairs{delayed} the disagreement of many replicas shrinks only for {limit} {bound:.4g} for "
            f"alpha {alpha:g}; outside, the replicas drift apart without end. (The range printed in the paper, arXiv "
            "2506.10911, equation 74, admits choices that diverge.)",
            f"above 0 and below {bound:.4g} at alpha {alpha:g}, such as {min(0.7, bound / 2):.2g}; the paper takes 0.7 "
            "at alpha 0.5",
        )
    longest = 2 * (1 + alpha) if period == 1 else 2.0
    if not 0 < beta < longest:
        limit = f"0 < beta < 2 (1 + alpha) = {longest:g}" if period == 1 else f"0 < beta < {longest:g}"
        yield Problem(
            "outer.beta",
            repr(beta),
            f"heavy-ball steps{delayed} on a pseudo-gradient that reaches the optimum are stable for {limit} only",
            f"above 0 and below {longest:g} at alpha {alpha:g}; the paper takes 0.7",
        )
