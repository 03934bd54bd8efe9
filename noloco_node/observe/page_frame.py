"""A view as a frame for the page in a browser: whole, bounded, and in few bytes.

Each frame tells everything, so a reader that opens the page late, reconnects, or plays a recording backwards needs no
other. Words of strangers are plain text here already (`swarm_view.plain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from noloco_node.observe import swarm_view
from noloco_node.observe.playback import PlaybackState
from noloco_node.observe.screen import fitting_peers, time_left

MOST_PEERS = 400
MOST_ROUTES = 1000
MOST_MOMENTS = 256


class FramePeer(swarm_view.PeerFigures, frozen=True, kw_only=True):
    """One peer, its words plain. `met`: place of its last partner in the list. `waits_s`: how long it has waited."""

    id: str
    trains: bool
    waits_s: float | None
    met: int | None


class PageFrame(swarm_view.SwarmFigures, frozen=True, kw_only=True):
    """All that a page shows. `virtual`: times are seconds since the beginning of a simulation. `left`: time, in words.

    `course`: of the run, a list for each of its figures. `routes`: places of two peers in the list, and microbatches a
    second between them. `more_peers`: how many are left out.
    """

    virtual: bool
    left: str
    peers: list[FramePeer]
    more_peers: int
    routes: list[tuple[int, int, float]]
    changes: list[swarm_view.Change]
    course: dict[str, list[float | None]]
    playback: PlaybackState | None


def page_frame(view: swarm_view.SwarmView, playback: PlaybackState | None = None) -> PageFrame:
    shown = fitting_peers(view.peers, MOST_PEERS)
    places = {peer.peer: number for number, peer in enumerate(shown)}
    figures = {field: _plain(getattr(view, field)) for field in swarm_view.SwarmFigures.__struct_fields__}
    figures["run_id"] = view.run_id[:12]
    figures["stages"] = tuple(msgspec.structs.replace(each, waits=_plain(each.waits)) for each in view.stages)
    return PageFrame(
        **figures,
        virtual=view.at < swarm_view.LONGEST_VIRTUAL_S,
        left=time_left(view),
        peers=[_peer(each, places, view.at) for each in shown],
        more_peers=len(view.peers) - len(shown),
        routes=_routes(view.routes, places),
        changes=[
            swarm_view.Change(at=each.at, name=swarm_view.plain(each.name), text=swarm_view.plain(each.text))
            for each in view.changes
        ],
        course=_course(view.course),
        playback=playback,
    )


def _peer(peer: swarm_view.PeerView, places: dict[str, int], at: float) -> FramePeer:
    return FramePeer(
        **{field: _shown(getattr(peer, field)) for field in swarm_view.PeerFigures.__struct_fields__},
        id=swarm_view.plain(swarm_view.short(peer.peer)),
        trains=peer.trains,
        waits_s=None if peer.since is None else max(0.0, round(at - peer.since, 1)),
        met=None if peer.met is None else places.get(peer.met),
    )


def _shown(value: Any) -> Any:
    """Return a figure in few digits, and words as plain text."""
    return round(value, 4) if isinstance(value, float) else _plain(value)


def _plain(value: Any) -> Any:
    return swarm_view.plain(value) if isinstance(value, str) else value


def _routes(routes: Sequence[swarm_view.Route], places: dict[str, int]) -> list[tuple[int, int, float]]:
    found = [
        (places[each.origin], places[each.target], round(each.per_s, 3))
        for each in routes
        if each.origin in places and each.target in places
    ]
    return sorted(found, key=lambda route: -route[2])[:MOST_ROUTES]


def _course(moments: Sequence[swarm_view.Moment]) -> dict[str, list[float | None]]:
    stride = 1 + len(moments) // MOST_MOMENTS
    kept = [*moments[:-1:stride], *moments[-1:]]
    digits = {"at": 1, "progress": 5, "tokens_per_s": 4, "loss": 4, "gap": 6, "held_out": 4}
    return {
        name: [None if (value := getattr(each, name)) is None else round(value, many) for each in kept]
        for name, many in digits.items()
    }
