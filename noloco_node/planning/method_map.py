"""Gossip or a mean over all replicas: what the laboratory's map (research/map.md) found on lines like those of a run.

The lines of the map and of a run are compared by one number: how often a replica could send its weights, in the code of
a round, while the run lasts. `MAP` holds what a planner needs of the map; a test compares it with the map's record.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

FAR = 4.0
"""Times as many or as few of these sends as on any line of the map, and a run's lines are unlike all of them."""


class Versus(NamedTuple):
    """A mean over all replicas beside gossip, at the map's places of one kind of line.

    `least` and `most`: its time to the same loss, over gossip's. `better` and `worse`: the places at which gossip has
    the lower or the higher loss by more than two standard errors.
    """

    least: float
    most: float
    better: int
    worse: int


class MapLine(NamedTuple):
    """One kind of line on the map. `sends`: of a replica's weights that fit into a run. `places`: compared there."""

    sends: int
    places: int
    barrier: Versus
    nobody_waits: Versus


MAP = (
    MapLine(2700, 12, Versus(0.87, 1.04, 0, 1), Versus(0.85, 1.17, 2, 0)),
    MapLine(270, 12, Versus(0.97, 1.20, 3, 0), Versus(0.87, 1.13, 2, 0)),
    MapLine(54, 12, Versus(1.26, 1.55, 12, 0), Versus(0.97, 1.14, 1, 0)),
    MapLine(13, 12, Versus(1.91, 2.70, 12, 0), Versus(0.94, 1.21, 1, 0)),
)


def on_such_lines(sends: float) -> str:
    """Say how a mean over all replicas compares with gossip where a replica could send its weights so many times."""
    near = min(MAP, key=lambda line: abs(log(sends / line.sends)))
    barrier, late = near.barrier, near.nobody_waits
    unlike = ", and these lines are unlike all of the map's" if abs(log(sends / near.sends)) > log(FAR) else ""
    return (
        f"Gossip or a mean over all replicas: a line could carry a replica's weights {sends:,.0f} times "
        f"in this run. Where it could {near.sends:,} times, a mean with a barrier needed {barrier.least:.2f} to "
        f"{barrier.most:.2f} times as long as gossip for the same loss, a mean for which no machine waits "
        f"{late.least:.2f} to {late.most:.2f} times. Of {near.places} conditions gossip was clearly better in "
        f"{barrier.better} and {late.better}, clearly worse in {barrier.worse} and {late.worse} (research/map.md: tiny "
        f"models, four whole replicas{unlike})."
    )
