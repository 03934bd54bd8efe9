"""The machines and lines of the laboratory: how long things take, in virtual seconds.

One inner step of the fastest machine is a second. A full set of float32 weights takes four seconds on anybody's line,
and the latency is 100 ms: the ratio of arithmetic to traffic of a model of a billion parameters on good home lines.

The unequal speeds are four machines repeated. "very" has the ratios of the paper's own toy (Asynchronous Local-SGD,
arXiv 2401.09135: 0.58, 0.75, 1.51 and 3.33 seconds a step); the two between are its geometric thirds. Nearly equal
machines are 2 % apart: equal ones reach a server in one virtual instant, where asynchronous is the same as synchronous.

What rounds compute (coding, decoding, the outer step) takes no time unless a cell asks for it. Then it takes as much of
an inner step as it does for the laboratory's own model on one core of a CPU: `research/codec/coding_seconds.py`
measures both. An inner step here is of 768 tokens; with more of them it takes longer and a round does not, so for most
runs this is an upper bound.
"""

from __future__ import annotations

import math

from gossip.settings import Format, absolute, wire_bytes
from research.laboratory.experiments.cell import Cell, Speeds

LATENCY_S = 0.1
WEIGHTS_S = 4.0
"""Time to send all weights once as float32."""
PARAMETERS = {"full": 406_176, "small": 92_400, "tiny": 34_912, "adapted": 143_680}
"""Weights of the model that cells of a scale train."""
INNER_STEP_S = 0.064
"""Real seconds of an inner step of that model."""
COMPUTE_S_PER_BYTE = {"float32": 0.8e-9, "bfloat16": 0.7e-9, "int8": 0.7e-9, "int4": 1.6e-9}
"""Real seconds that a thing which rounds compute takes for each byte of the weights as float32, mean over a meeting."""
NEARLY = 1.02
"""How much slower each of nearly equal machines is than the one before it."""
_VERY = tuple(seconds / 0.58 for seconds in (0.58, 0.75, 1.51, 3.33))
_POWER: dict[Speeds, float] = {"none": 0.0, "slight": 1 / 3, "moderate": 2 / 3, "very": 1.0}


def step_seconds(speeds: Speeds, replicas: int) -> tuple[float, ...]:
    """Return what an inner step takes on each machine."""
    if speeds == "nearly":
        return tuple(NEARLY**number for number in range(replicas))
    return tuple(_VERY[number % len(_VERY)] ** _POWER[speeds] for number in range(replicas))


def bytes_per_s(weight_bytes: int) -> float:
    """Return the rate of a line, each way, for a model of so many float32 bytes."""
    return weight_bytes / WEIGHTS_S


def exchange_s(sent_bytes: float, weight_bytes: int) -> float:
    """Return how long a message of so many bytes takes."""
    return LATENCY_S + sent_bytes / bytes_per_s(weight_bytes)


def all_reduce(replicas: int, weight_bytes: int, coded_bytes: int | None = None) -> tuple[float, float]:
    """Return the seconds and the bytes sent by each replica of a mean over all of them, as a ring.

    `coded_bytes`: of a full set as it travels, both to the mean and back; as float32 where it is not given.
    """
    if replicas == 1:
        return 0.0, 0.0
    sent = 2 * (replicas - 1) / replicas * (weight_bytes if coded_bytes is None else coded_bytes)
    return ring_messages(replicas) * LATENCY_S + sent / bytes_per_s(weight_bytes), sent


def ring_messages(replicas: int) -> int:
    """Return how many messages of a mean over so many replicas follow on each other: of a tree where that is fewer."""
    return 2 * (replicas - 1) if replicas <= 4 else 2 * math.ceil(math.log2(replicas))


def all_gather(replicas: int, weight_bytes: int, said_bytes: float) -> tuple[float, float]:
    """Return the seconds and the bytes sent by each replica until everybody has heard everybody, as a ring.

    `said_bytes`: what each has to say.
    """
    sent = (replicas - 1) * said_bytes
    return (replicas - 1) * LATENCY_S + sent / bytes_per_s(weight_bytes), sent


def merge_bytes(cell: Cell) -> int:
    """Return what each replica sends once at the end, so that somebody can take the mean of all.

    Weights for somebody who may be anywhere travel in the codec's absolute form. Nothing, where all hold the same.
    """
    if cell.method in ("parallel", "central", "server"):
        return 0
    return wire_bytes(absolute(Format(cell.codec)), [(PARAMETERS[cell.scale],)])


def compute_s(codec: str, weight_bytes: int, step_s: float) -> float:
    """Return how long a machine whose inner step takes `step_s` is at one of the things that a round computes."""
    return COMPUTE_S_PER_BYTE[codec] * weight_bytes / INNER_STEP_S * step_s
