"""`Swarm` and `export`: look at a run, and take its model home, without joining it."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from msgspec.structs import replace

from noloco_node.api.loop_thread import LoopThread, finished
from noloco_node.cli.options import default_home, invite_text
from noloco_node.export.sources import check_export
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.swarm_view import SwarmView, plain
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import Visitor, visited
from noloco_node.tasks import background

LOOK_EVERY_S = 1.0


class Swarm:
    """The swarm of a run, seen from outside. `invite`: its text, a file that holds it, or a home that keeps one."""

    def __init__(self, invite: str | PathLike[str], *, home: str | PathLike[str] | None = None) -> None:
        """Raise `noloco_node.errors.UserError` for what is no invite. `home`: has our ticket in a run with an owner."""
        self._home = default_home("node") if home is None else Path(home).expanduser()
        self._invite = invites.found(invite_text(str(invite)), self._home)
        invites.parse(self._invite)

    def status(self) -> SwarmView:
        """Return the swarm as it is now; raise `noloco_node.errors.UserError` if no peer of it answers."""

        async def look() -> SwarmView:
            async with visited(self._invite, self._visitor) as (_, recipe, membership):
                return _with_plain_words(RosterObserver(recipe.run, recipe.digest).view(membership.roster, time.time()))

        return finished(look, "noloco-status")

    def watch(self) -> Iterator[SwarmView]:
        """Yield the swarm as it is now, and again with each news of it, without end; to close it ends the visit."""
        seen: queue.SimpleQueue[SwarmView | None] = queue.SimpleQueue()

        async def follow() -> None:
            async with visited(self._invite, self._visitor) as (_, recipe, membership):
                observer, roster = RosterObserver(recipe.run, recipe.digest), None
                async with background(membership.run()):
                    while True:
                        if roster is not membership.roster:
                            roster = membership.roster
                            seen.put(_with_plain_words(observer.view(roster, time.time(), membership.news_age_s)))
                        await asyncio.sleep(LOOK_EVERY_S)

        thread = LoopThread(follow, "noloco-watch", lambda: seen.put(None))
        try:
            while (status := seen.get()) is not None:
                yield status
            thread.result()
        finally:
            thread.cancel()
            thread.wait()

    @property
    def _visitor(self) -> Visitor:
        return Visitor(home=self._home)


def export(
    invite: str | PathLike[str] | None,
    out: str | PathLike[str],
    *,
    homes: Sequence[str | PathLike[str]] = (),
    home: str | PathLike[str] | None = None,
) -> str:
    """Gather every stage of a run, average its replicas, and write the model; return what was done, in words.

    `invite`: of a living swarm, None for what `homes` of nodes hold. `out`: a new directory: a Hugging Face checkpoint,
    or, of a foreign module, `model.safetensors` with its trained parameters by name. Raises
    `noloco_node.errors.UserError`.
    """
    place = default_home("node") if home is None else Path(home).expanduser()
    given = None if invite is None else invites.found(invite_text(str(invite)), place)
    directories = [Path(each).expanduser() for each in homes]
    check_export(Path(out), given, directories)
    from noloco_node.export.exporter import export as export_model

    return finished(lambda: export_model(Path(out), given, directories, Visitor(home=place)), "noloco-export")


def _with_plain_words(view: SwarmView) -> SwarmView:
    """Return a view in which the words of strangers are plain text."""
    peers = (replace(each, name=plain(each.name), waits=each.waits and plain(each.waits)) for each in view.peers)
    changes = (replace(each, name=plain(each.name), text=plain(each.text)) for each in view.changes)
    return replace(view, peers=tuple(peers), changes=tuple(changes))
