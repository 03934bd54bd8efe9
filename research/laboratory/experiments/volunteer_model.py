"""Machines and lines of volunteers: when each peer is away, when each line stalls, and how long a step takes.

A cell under `Conditions` stands for whole replicas of a model of `PARAMETERS_MEANT`. An inner step of the fastest
machine takes 90 seconds: 0.9 million tokens at 60 * 10**12 operations a second, the machine of
docs/scenarios/volunteers.toml. Lines have their real rates. The model that is trained is far smaller, so what travels
of its weights counts `magnified` on a line, and probes, whose size does not follow the model's, as they are.

Absences and stalls are drawn from the seed, for each peer alone: they are alike for every method. A peer is there for a
time, is away for a time, and so on. Half of the absences are crashes, which lose the optimiser's memory and are short,
half are sleeps, which keep it and are longer.
"""

from __future__ import annotations

import math
from random import Random
from typing import Literal, NamedTuple

from research.laboratory.experiments.cell import Conditions, Line

PARAMETERS_MEANT = 10**9
FLOAT32_BYTES = 4 * PARAMETERS_MEANT
COPY_BYTES = 2 * PARAMETERS_MEANT
"""Of a copy for a peer that comes back: weights as bfloat16, as in the absolute form of int4. No optimiser's memory."""
STEP_S = 90.0
MACHINES = 4
"""Kinds of machines, whose steps take times in geometric progression."""
ROSTER_LAG_S = 60.0
"""After which all know that a peer has gone."""
SETTLED_S = 24 * STEP_S
"""After which a peer that came back counts in the model that is scored: the longest round of a mean."""
AWAY_S: dict[Kind, float] = {"crash": 600.0, "sleep": 1800.0}
"""Mean absences."""
RATES: dict[Line, tuple[float, float]] = {
    "1000/1000": (1000.0, 1000.0),
    "100/100": (100.0, 100.0),
    "100/20": (100.0, 20.0),
    "20/5": (20.0, 5.0),
}
"""Mbit/s down and up."""
STALLING: Line = "20/5"
STALL_EVERY_S, STALL_S = 600.0, 30.0
"""Mean time between two stalls of a line, and mean length of one."""
STALLED_SHARE = 0.01
"""Of a line's rate, what passes in a stall."""

Kind = Literal["crash", "sleep"]


class Absence(NamedTuple):
    """A peer is away; `kind` says what it has lost."""

    begin_s: float
    end_s: float
    kind: Kind


class Stall(NamedTuple):
    """Next to nothing passes a line."""

    begin_s: float
    end_s: float


def steps_meant(hours: float) -> int:
    """Return how many inner steps the fastest machine takes."""
    return round(hours * 3600.0 / STEP_S)


def volunteer_step_s(conditions: Conditions, number: int) -> float:
    """Return what an inner step takes on the machine of this number."""
    return STEP_S * math.pow(conditions.inequality, number % MACHINES / (MACHINES - 1))


def line_bytes_per_s(line: Line) -> tuple[float, float]:
    """Return the rates of a line, down and up."""
    down, up = RATES[line]
    return down * 125_000.0, up * 125_000.0


def absences(conditions: Conditions, seed: int, number: int) -> tuple[Absence, ...]:
    """Return when a peer is away, in order; the last absence may outlast the run."""
    if not conditions.churn:
        return ()
    drawing, now_s = Random(f"{seed}|absences|{number}"), 0.0
    found: list[Absence] = []
    while True:
        now_s += drawing.expovariate(1.0) * 3600.0 / conditions.churn
        kind: Kind = drawing.choice(("crash", "sleep"))
        away_s = drawing.expovariate(1.0) * AWAY_S[kind]
        if now_s >= conditions.hours * 3600.0:
            return tuple(found)
        found.append(Absence(now_s, now_s + away_s, kind))
        now_s += away_s


def stalls(conditions: Conditions, seed: int, number: int) -> tuple[Stall, ...]:
    """Return when the line of a peer stalls, in order."""
    if conditions.line != STALLING:
        return ()
    drawing, now_s = Random(f"{seed}|stalls|{number}"), 0.0
    found: list[Stall] = []
    while True:
        now_s += drawing.expovariate(1.0 / STALL_EVERY_S)
        if now_s >= conditions.hours * 3600.0:
            return tuple(found)
        found.append(Stall(now_s, now_s + drawing.expovariate(1.0 / STALL_S)))
        now_s = found[-1].end_s
