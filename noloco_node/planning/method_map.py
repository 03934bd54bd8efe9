"""Gossip or a mean over all replicas: what the laboratory's map (research/map.md) found on lines like those of a run.

The lines of the map and of a run are compared by one number: how often a replica could send its weights, in the code of
a round, while the run lasts. The map's number of replicas that is nearest to the run's decides where to look. `MAP`
holds what a planner needs of the map; a test compares it with the map's record.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

FAR = 4.0
"""Times as many or as few of these sends as on any line of the map, and a run's lines are unlike all of them. Beyond so
many times the map's replicas, a run is unlike them too."""


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
    """One kind of line on the map, with so many replicas.

    `sends`: of a replica's weights that fit into a run. `places`: compared there.
    """

    replicas: int
    sends: int
    places: int
    barrier: Versus
    nobody_waits: Versus


MAP = (
    MapLine(4, 2700, 12, Versus(0.87, 1.04, 0, 1), Versus(0.85, 1.17, 2, 0)),
    MapLine(4, 270, 12, Versus(0.97, 1.20, 3, 0), Versus(0.87, 1.13, 2, 0)),
    MapLine(4, 54, 12, Versus(1.26, 1.55, 12, 0), Versus(0.97, 1.14, 1, 0)),
    MapLine(4, 13, 12, Versus(1.91, 2.70, 12, 0), Versus(0.94, 1.21, 1, 0)),
    MapLine(16, 2700, 6, Versus(0.69, 1.26, 0, 5), Versus(0.90, 1.03, 0, 2)),
    MapLine(16, 54, 6, Versus(1.31, 2.20, 6, 0), Versus(1.10, 1.48, 5, 0)),
    MapLine(16, 13, 6, Versus(1.61, 6.52, 6, 0), Versus(1.03, 1.56, 5, 0)),
)


def on_such_lines(sends: float, replicas: int) -> str:
    """Say how a mean over so many replicas compares with gossip where each could send its weights so many times."""
    near = min(MAP, key=lambda line: (_distance(replicas, line.replicas), _distance(sends, line.sends)))
    barrier, late = near.barrier, near.nobody_waits
    unlike = [
        f", and {what} unlike all of the map's"
        for what, distance in (
            ("these lines are", _distance(sends, near.sends)),
            (f"{replicas:,} replicas are", _distance(replicas, near.replicas)),
        )
        if distance > log(FAR)
    ]
    return (
        f"Gossip or a mean over all replicas: a line could carry a replica's weights {sends:,.0f} times "
        f"in this run. Where it could {near.sends:,} times, a mean with a barrier needed {barrier.least:.2f} to "
        f"{barrier.most:.2f} times as long as gossip for the same loss, a mean for which no machine waits "
        f"{late.least:.2f} to {late.most:.2f} times. Of {near.places} conditions gossip was clearly better in "
        f"{barrier.better} and {late.better}, clearly worse in {barrier.worse} and {late.worse} (research/map.md: tiny "
        f"models, {near.replicas} whole replicas{''.join(unlike)})."
    )


def _distance(one: float, other: float) -> float:
    return abs(log(one / other))
