"""What a node or a bootstrap peer serves over HTTP beside its work: figures for Prometheus, and a page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from noloco_node.journal import events
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.observe.journal_observer import change_text
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.swarm_view import MOST_CHANGES, short
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import supervised
from noloco_node.terminal import warn
from noloco_node.web.places import PagePlace, ServedPlace

if TYPE_CHECKING:
    from noloco_node.observe.metrics import NodeMetrics
    from noloco_node.web.server import Page

LOOK_EVERY_S = 5.0
PAGE_EVERY_S = 1.0
VIEWS = "the page or the metrics"


class ServedViews:
    """Updates the page and the metrics, and keeps our own peer's history, from which its record is filled."""

    def __init__(self, metrics: NodeMetrics | None, page: Page | None, own: PeerHistory) -> None:
        """`own`: our peer's history, with the name that its owner gave."""
        self._metrics, self._page, self.own = metrics, page, own
        self._told: deque[tuple[str, float]] = deque(maxlen=MOST_CHANGES)
        self._observer: RosterObserver | None = None
        self._failed = False

    def take(self, event: events.Event) -> None:
        """Take an event of the journal; a failure here is told once, and never ends the node."""
        try:
            self._take(event)
        except Exception as error:
            if not self._failed:
                warn(f"{VIEWS} cannot show everything ({type(error).__name__}: {error}); the work goes on")
            self._failed = True

    def _take(self, event: events.Event) -> None:
        now = CLOCK.unix_s()
        if self._metrics is not None:
            self._metrics.take(event, now)
        self.own.take(events.stamped(event, now))
        if self._page is not None:
            text = change_text(event)
            if text is not None:
                self._told.append((text, now))

    async def follow(self, membership: Membership, network: PeerNetwork, recipe: RunFileText) -> None:
        """Show the swarm until cancelled; a failure is told and tried anew, and never ends the node."""
        if self._metrics is not None or self._page is not None:
            await supervised(VIEWS, lambda: self._look(membership, network, recipe), warn)

    async def _look(self, membership: Membership, network: PeerNetwork, recipe: RunFileText) -> None:
        if self._observer is None:  # of an earlier session there is more to show
            self._observer = RosterObserver(recipe.run, recipe.digest, self.own)
        while True:
            while self._told:
                self._observer.tell(f"{short(self.own.peer or '')} {self.own.name}".strip(), *self._told.popleft())
            view = self._observer.view(membership.roster, CLOCK.unix_s(), membership.news_age_s)
            if self._metrics is not None:
                self._metrics.show(view, membership.watched, network.statistics())
            if self._page is not None:
                self._page.show(view)
            await asyncio.sleep(LOOK_EVERY_S if self._page is None else PAGE_EVERY_S)


@asynccontextmanager
async def views_served(
    metrics_at: ServedPlace | None, page_at: PagePlace | None, run_id: str, own: PeerHistory
) -> AsyncIterator[ServedViews]:
    """Serve the page and the metrics that the owner asked for while the body runs."""
    if metrics_at is None and page_at is None:
        yield ServedViews(None, None, own)
        return
    from noloco_node.web.server import metrics_served, page_served  # aiohttp takes a third of a second

    async with metrics_served(metrics_at, run_id) as metrics, page_served(page_at) as page:
        yield ServedViews(metrics, page, own)
