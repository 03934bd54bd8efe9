"""The rules of both papers and this project's own, and cells of a size by which recipes are made."""

from __future__ import annotations

from typing import NamedTuple, get_args

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell, Rule, Speeds

NOLOCO = Rule(alpha=0.5, beta=0.7, gamma=0.7)
DILOCO = Rule(alpha=0.9, beta=0.7, lookahead=True)
DILOCO_HB = Rule(alpha=0.3, beta=0.7)
"""The heavy ball that the NoLoCo paper compares with."""
NAIVE = Rule(alpha=0.9, beta=0.07, lookahead=True)
"""Every arrival a step, at a tenth of the outer rate; the asynchronous paper's notebook also scales by sqrt(K) / K."""
OURS = Cell(
    method="gossip",
    replicas=8,
    steps=400,
    learning_rate=0.0,
    speeds="very",
    rule=Rule(alpha=0.0, beta=1.0, gamma=1.0),
    inner_steps=4,
    late_inner_steps=16,
    dynamic=True,
    codec="int4",
)
"""Asynchronous gossip as this project recommends it."""
EARLY, LATE = 7, 24
"""Inner steps of the fastest replica between two means over all that are to send as many bytes as gossip."""
SPEEDS: tuple[Speeds, ...] = get_args(Speeds)[:4]
"""Those of the papers."""
CROWDS = (4, 8, 16)


class Size(NamedTuple):
    """How large the runs are. `few`: replicas of the asynchronous paper. `every`: inner steps between two rounds."""

    replicas: int = 8
    few: int = 4
    steps: int = 400
    every: int = 50

    def cell(self, replicas: int, rule: Rule | None = None) -> Cell:
        """Return a cell of this size, with rounds where a rule is given; the method is still to be set."""
        blank = Cell(method="independent", replicas=replicas, steps=self.steps, learning_rate=0.0, speeds="very")
        return blank if rule is None else replace(blank, rule=rule, inner_steps=self.every)

    def parallel(self, replicas: int) -> Cell:
        """Return data parallel training."""
        return replace(self.cell(replicas), method="parallel")

    def central(self, replicas: int, rule: Rule) -> Cell:
        """Return rounds of all with all."""
        return replace(self.cell(replicas, rule), method="central")

    def equal(self, replicas: int, rule: Rule) -> Cell:
        """Return rounds of all with all that have every choice of gossip, and as many bytes."""
        choices = {"codec": OURS.codec, "dynamic": True, "weighed": True}
        return replace(self.central(replicas, rule), inner_steps=EARLY, late_inner_steps=LATE, **choices)

    def pairs(self, replicas: int, rule: Rule = NOLOCO) -> Cell:
        """Return rounds in pairs, in step."""
        return replace(self.cell(replicas, rule), method="pairs")

    def exact(self, replicas: int, group: int, early: int, late: int | None) -> Cell:
        """Return plain means of groups in step, in float32, with the dynamic steps and the weights of gossip."""
        cell = replace(self.pairs(replicas, Rule()), group=group, dynamic=True, weighed=True)
        return replace(cell, inner_steps=early, late_inner_steps=late)

    def server(self, replicas: int, rule: Rule, speeds: Speeds = "very") -> Cell:
        """Return workers that report to a server, each when it is done."""
        return replace(self.cell(replicas, rule), method="server", speeds=speeds)

    def delayed(self, replicas: int, speeds: Speeds = "very") -> Cell:
        """Return the asynchronous paper's method: delayed Nesterov and dynamic local updates."""
        return replace(self.server(replicas, delay(replicas), speeds), dynamic=True)

    def ours(self, replicas: int) -> Cell:
        """Return asynchronous gossip."""
        return replace(OURS, replicas=replicas, steps=self.steps)


def delay(replicas: int) -> Rule:
    """Return DiLoCo's rule with its momentum delayed over one contribution of each replica."""
    return replace(DILOCO, period=replicas)
