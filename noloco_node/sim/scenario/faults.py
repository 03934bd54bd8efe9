"""What may happen to a simulated swarm, and when: one struct a kind, all times in virtual seconds from the start.

Churn is a rule rather than an event: `unfold` draws from a seed who goes when, and what is left are departures and
returns of single peers, which the world and its watchers know already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from noloco_node.sim.network.link_model import MOST, NotNegative, Positive, Share
from noloco_node.units import Fraction

HOUR_S = 3600.0
MOST_DEPARTURES = 1000
"""Of one peer, that a churn may make expect."""


class _At(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: NotNegative


class Join(_At, frozen=True, tag="join"):
    """A new peer comes. `stage`: the one that it asks for; None lets it choose."""

    peer: str
    stage: Annotated[int, Meta(ge=0, le=int(MOST))] | None = None


class Crash(_At, frozen=True, tag="crash"):
    """A peer's process dies; its disk stays."""

    peer: str


class Restart(_At, frozen=True, tag="restart"):
    """A peer that crashed or left comes back, with what is on its disk."""

    peer: str


class Leave(_At, frozen=True, tag="leave"):
    """A peer is asked to leave, politely."""

    peer: str


class Slow(_At, frozen=True, tag="slow"):
    """From now on a peer's device takes `factor` times as long as at first, whatever its first slowness is."""

    peer: str
    factor: Positive


class StutterFault(_At, frozen=True, tag="stutter"):
    """From now on the share `share` of a device's jobs takes `pause_s` longer."""

    peer: str
    share: Share
    pause_s: NotNegative


class Silence(_At, frozen=True, tag="silence"):
    """Nothing leaves or reaches a peer, as if its host had lost its line; it comes back by itself."""

    peer: str
    for_s: NotNegative


class Partition(_At, frozen=True, tag="partition"):
    """Nothing passes between the groups; peers that are in none form one more. It heals by itself.

    One that begins while another lasts takes its place.
    """

    groups: tuple[tuple[str, ...], ...]
    for_s: NotNegative


class Storm(_At, frozen=True, tag="storm"):
    """The network is bad for a while: shares of messages that are lost, late and doubled."""

    for_s: NotNegative
    loss: Share = 0.0
    late: Share = 0.0
    duplicate: Share = 0.0


class LinkFault(_At, frozen=True, tag="line"):
    """From now on a peer has another line; None is without limit."""

    peer: str
    up_bytes_per_s: Positive | None = None
    down_bytes_per_s: Positive | None = None
    dials_only: bool = False


class Tamper(_At, frozen=True, tag="tamper"):
    """The next `count` messages with tensors that a peer sends arrive wrong."""

    peer: str
    how: Literal["flip", "shape", "not finite", "garbled values"] = "flip"
    count: Annotated[int, Meta(ge=1, le=10**6)] = 1


# fmt: off
Attacks = Literal[
    "refuses", "silent", "wrong size", "garbled", "rounds", "samples", "ends", "receipts",
    "flipped", "noise", "scaled", "old", "ascends", "gradient flipped", "not finite", "flood",
]
# fmt: on


class Hostile(_At, frozen=True, tag="hostile"):
    """A peer's program is ended, and a hostile one begins in its place, with the same name, disk and line.

    `how`: what it does, see `tests.explorer.attack_kinds`.
    """

    peer: str
    how: Attacks


class Disk(_At, frozen=True, tag="disk"):
    """A peer's disk refuses to be written for a while."""

    peer: str
    for_s: NotNegative


class Churn(_At, frozen=True, tag="churn"):
    """For a while peers go and come back: `per_hour` of them in an hour, each at a moment of its own.

    Every one of them is away for `away_s`, then has its disk. `polite`: share of the departures that are asked for;
    the rest are crashes.
    """

    for_s: NotNegative
    per_hour: Positive
    away_s: NotNegative
    polite: Fraction = 0.0


Fault = (
    Join
    | Crash
    | Restart
    | Leave
    | Slow
    | StutterFault
    | Silence
    | Partition
    | Storm
    | LinkFault
    | Tamper
    | Hostile
    | Disk
    | Churn
)


KINDS: dict[str, type[Fault]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Fault)}

LASTING = Silence | Partition | Storm | Disk
"""They end by themselves."""


def kind_of(fault: Fault) -> str:
    return str(fault.__struct_config__.tag)


def ends_s(fault: Fault) -> float:
    """Return when the world is as it should be again, as far as the fault itself goes."""
    if isinstance(fault, Churn):
        return fault.at_s + fault.for_s + fault.away_s
    return fault.at_s + (fault.for_s if isinstance(fault, LASTING) else 0.0)


def peers_of(fault: Fault) -> tuple[str, ...]:
    if isinstance(fault, Partition):
        return tuple(peer for group in fault.groups for peer in group)
    return () if isinstance(fault, Storm | Churn) else (fault.peer,)


def unfold(faults: Sequence[Fault], peers: Sequence[str], seed: int) -> tuple[Fault, ...]:
    """Return the faults with every churn replaced by the departures and returns of `peers` that it stands for."""
    found: list[Fault] = []
    for number, fault in enumerate(faults):
        if isinstance(fault, Churn):
            for peer in peers:
                found += _comings_and_goings(fault, peer, Random(f"{seed}|churn|{number}|{peer}"))
        else:
            found.append(fault)
    return tuple(found)


def _comings_and_goings(churn: Churn, peer: str, rng: Random) -> Iterator[Fault]:
    at_s = churn.at_s + rng.expovariate(churn.per_hour) * HOUR_S
    while at_s < churn.at_s + churn.for_s:
        polite = rng.random() < churn.polite
        yield Leave(at_s=at_s, peer=peer) if polite else Crash(at_s=at_s, peer=peer)
        at_s += churn.away_s
        yield Restart(at_s=at_s, peer=peer)
        at_s += rng.expovariate(churn.per_hour) * HOUR_S


def problems(fault: Fault) -> Iterator[tuple[str, str]]:
    """Yield the fields of a fault whose values contradict each other, each with the reason."""
    if isinstance(fault, Churn) and fault.per_hour * fault.for_s / HOUR_S > MOST_DEPARTURES:
        yield "per_hour", f"each peer would go more than {MOST_DEPARTURES} times"
    if isinstance(fault, Partition):
        groups = [dict.fromkeys(group) for group in fault.groups]
        for peer, times in Counter(peer for group in groups for peer in group).items():
            if times > 1:
                yield "groups", f"{peer} is in two groups"
