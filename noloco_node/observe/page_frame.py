"""A view as a page in a browser takes it: whole, bounded, and in few bytes.

Every frame tells everything, so that one who opens the page late, or comes back after the connection broke, or plays a
recording backwards, needs no other. What strangers say is plain text here already (`swarm_view.plain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from noloco_node.observe.bottleneck import StageView
from noloco_node.observe.recording import PlaybackState
from noloco_node.observe.screen import fitting_peers, time_left
from noloco_node.observe.swarm_view import (
    LONGEST_VIRTUAL_S,
    Change,
    GivenInAll,
    Moment,
    PeerFigures,
    PeerView,
    Route,
    SwarmView,
    plain,
    short,
)

MOST_PEERS = 400
MOST_ROUTES = 1000
MOST_MOMENTS = 256


class FramePeer(PeerFigures, frozen=True, kw_only=True):
    """One peer, its words plain. `met`: its place in the list of peers. `waits_s`: for how long it waits."""

    id: str
    trains: bool
    waits_s: float | None
    met: int | None


class FrameCourse(msgspec.Struct, frozen=True, kw_only=True):
    """The course of the run, a list for each figure."""

    at: list[float]
    progress: list[float]
    tokens_per_s: list[float]
    loss: list[float | None]
    gap: list[float | None]


class PageFrame(msgspec.Struct, frozen=True, kw_only=True):
    """All that a page shows. `virtual`: times are seconds since the beginning of a simulation.

    `routes`: places of two peers in the list, and microbatches a second between them. `more_peers`: how many are left
    out.
    """

    name: str
    run_id: str
    at: float
    virtual: bool
    progress: float
    tokens: int
    budget_tokens: int | None
    tokens_per_s: float
    left: str
    loss: float | None
    gap: float | None
    bottleneck: str
    limit: int | None
    trouble: str | None
    given: GivenInAll
    stages: tuple[StageView, ...]
    peers: list[FramePeer]
    more_peers: int
    routes: list[tuple[int, int, float]]
    routes_told: str
    changes: list[Change]
    course: FrameCourse
    playback: PlaybackState | None


def page_frame(view: SwarmView, playback: PlaybackState | None = None) -> PageFrame:
    """Return what a page shows of a view."""
    shown = fitting_peers(view.peers, MOST_PEERS)
    places = {peer.peer: number for number, peer in enumerate(shown)}
    return PageFrame(
        name=plain(view.name),
        run_id=view.run_id[:12],
        at=view.at,
        virtual=view.at < LONGEST_VIRTUAL_S,
        progress=view.progress,
        tokens=view.tokens,
        budget_tokens=view.budget_tokens,
        tokens_per_s=view.tokens_per_s,
        left=time_left(view),
        loss=view.loss,
        gap=view.gap,
        bottleneck=plain(view.bottleneck),
        limit=view.limit,
        trouble=view.trouble and plain(view.trouble),
        given=view.given,
        stages=tuple(msgspec.structs.replace(each, waits=each.waits and plain(each.waits)) for each in view.stages),
        peers=[_peer(each, places, view.at) for each in shown],
        more_peers=len(view.peers) - len(shown),
        routes=_routes(view.routes, places),
        routes_told=view.routes_told,
        changes=[Change(at=each.at, name=plain(each.name), text=plain(each.text)) for each in view.changes],
        course=_course(view.course),
        playback=playback,
    )


def _peer(peer: PeerView, places: dict[str, int], at: float) -> FramePeer:
    return FramePeer(
        **{field: _shown(getattr(peer, field)) for field in PeerFigures.__struct_fields__},
        id=plain(short(peer.peer)),
        trains=peer.trains,
        waits_s=None if peer.since is None else max(0.0, round(at - peer.since, 1)),
        met=None if peer.met is None else places.get(peer.met),
    )


def _shown(value: Any) -> Any:
    """Return a figure in few digits, and words as plain text."""
    if isinstance(value, str):
        return plain(value)
    return round(value, 4) if isinstance(value, float) else value


def _routes(routes: Sequence[Route], places: dict[str, int]) -> list[tuple[int, int, float]]:
    found = [
        (places[each.origin], places[each.target], round(each.per_s, 3))
        for each in routes
        if each.origin in places and each.target in places
    ]
    return sorted(found, key=lambda route: -route[2])[:MOST_ROUTES]


def _course(moments: Sequence[Moment]) -> FrameCourse:
    stride = 1 + len(moments) // MOST_MOMENTS
    kept = [*moments[:-1:stride], *moments[-1:]]
    return FrameCourse(
        at=[round(each.at, 1) for each in kept],
        progress=[round(each.progress, 5) for each in kept],
        tokens_per_s=[round(each.tokens_per_s, 4) for each in kept],
        loss=[_rounded(each.loss) for each in kept],
        gap=[_rounded(each.gap, 6) for each in kept],
    )


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
