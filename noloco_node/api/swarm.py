"""`Swarm` and `export`: look at a run, and take its model home, without joining it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import msgspec

from noloco_node.api.loop_thread import LoopThread, finished
from noloco_node.cli.options import default_home, invite_text
from noloco_node.export.sources import check_export
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.swarm_view import SwarmView, plain
from noloco_node.storage.home import typed
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import Visitor, visited
from noloco_node.tasks import background

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStatus:
    """One peer, as it says of itself. None is unknown. `gap`: between its weights and its last partner's, relative."""

    peer: str
    name: str
    stage: int
    state: str
    round: int
    inner_steps: int
    tokens_per_s: float
    loss: float | None
    gap: float | None
    waits: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmStatus:
    """A swarm at one moment. None is unknown. `at`: unix seconds. `left_s`: until the end of the run.

    `held_out`: the loss of the newest evaluation.
    """

    at: float
    name: str
    run_id: str
    progress: float
    tokens: int
    budget_tokens: int | None
    tokens_per_s: float
    left_s: float | None
    loss: float | None
    held_out: float | None
    gap: float | None
    bottleneck: str
    peers: tuple[PeerStatus, ...]


class Swarm:
    """The swarm of a run, seen from outside. `invite`: its text, a file that holds it, or a home that keeps one."""

    def __init__(self, invite: str | PathLike[str], *, home: str | PathLike[str] | None = None) -> None:
        """Raise `noloco_node.errors.UserError` for what is no invite. `home`: has our ticket in a run with an owner."""
        place = default_home("node") if home is None else typed(home).absolute()
        self._visitor = Visitor(home=place)
        self._invite = invites.found(invite_text(str(invite)), place)
        invites.parse(self._invite)

    def status(self) -> SwarmStatus:
        """Return the swarm as it is now; raise `noloco_node.errors.UserError` if no peer of it answers."""

        async def look() -> SwarmStatus:
            async with visited(self._invite, self._visitor) as (_, recipe, membership):
                return _status(RosterObserver(recipe.run, recipe.digest).view(membership.roster, CLOCK.unix_s()))

        return finished(look, "noloco-status")

    def watch(self) -> Iterator[SwarmStatus]:
        """Yield the swarm as it is now, and again with each news of it, without end; to close it ends the visit."""
        seen: queue.SimpleQueue[SwarmStatus | None] = queue.SimpleQueue()

        async def follow() -> None:
            async with visited(self._invite, self._visitor) as (_, recipe, membership):
                observer, roster = RosterObserver(recipe.run, recipe.digest), None
                async with background(membership.run()):
                    while True:
                        if roster is not membership.roster:
                            roster = membership.roster
                            seen.put(_status(observer.view(roster, CLOCK.unix_s(), membership.news_age_s)))
                        await asyncio.sleep(LOOK_EVERY_S)

        thread = LoopThread(follow, "noloco-watch", lambda: seen.put(None))
        try:
            while (status := seen.get()) is not None:
                yield status
            thread.result()
        finally:
            thread.cancel()
            thread.wait()


def export(
    invite: str | PathLike[str] | None,
    out: str | PathLike[str],
    *,
    homes: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    home: str | PathLike[str] | None = None,
) -> str:
    """Gather every stage of a run, average its replicas, and write the model; return what was done, in words.

    `invite`: of a living swarm, None for what `homes` of nodes hold. `out`: a new directory: a Hugging Face checkpoint,
    or, of a foreign module, `model.safetensors` with its trained parameters by name. Raises
    `noloco_node.errors.UserError`.
    """
    place = default_home("node") if home is None else typed(home)
    given = None if invite is None else invites.found(invite_text(str(invite)), place)
    each_home: Iterable[Any] = homes if isinstance(homes, Iterable) and not isinstance(homes, str) else [homes]
    directories = [typed(each) for each in each_home]
    target = typed(out)
    check_export(target, given, directories)
    from noloco_node.export.exporter import export as export_model

    return finished(lambda: export_model(target, given, directories, Visitor(home=place)), "noloco-export")


def _status(view: SwarmView) -> SwarmStatus:
    found = msgspec.convert(view, SwarmStatus, from_attributes=True)
    peers = (replace(each, name=plain(each.name), waits=each.waits and plain(each.waits)) for each in found.peers)
    return replace(found, peers=tuple(peers))
