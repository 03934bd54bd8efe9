"""Views of a swarm from the journals of its peers, while they are written or long after (`playback`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from noloco_node.journal import events
from noloco_node.observe import swarm_view as views
from noloco_node.observe.bottleneck import wait_words
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState


class JournalObserver(views.SwarmObserver):
    """Makes views of peers' histories, and feeds them events.

    `run`: the run file, where there is one; `run_id`: its digest, where that is known.
    """

    def __init__(self, name: str, histories: Sequence[PeerHistory], run: RunConfig | None, run_id: str = "") -> None:
        super().__init__()
        self._name, self.histories, self._run, self._run_id = name, list(histories), run, run_id

    def take(self, history: PeerHistory, event: events.Event) -> None:
        text = change_text(event)
        if text is not None:
            self.tell(history.name, text, event.at)
        history.take(event)

    def note(self, history: PeerHistory, text: str, at: float) -> None:
        """Say how a peer has ended: its journal cannot."""
        history.gone = text
        self.tell(history.name, text, at)

    def note_restart(self, history: PeerHistory, text: str, at: float) -> None:
        """Say that a peer has a new process: its journal does not before it has joined."""
        history.start_life()
        history.state, history.waiting = PeerState.JOINING, None
        self.tell(history.name, text, at)

    def view(self, now: float) -> views.SwarmView:
        """Return the swarm as of `now` (unix seconds)."""
        sources = [history for history in self.histories if history.stage == 0]
        tokens, budget = sum(history.drawn_tokens for history in self.histories), None
        progress = max((history.progress for history in self.histories), default=0.0)
        if self._run is not None:
            budget = self._run.tokens(self._run.budget_samples)
            progress = max(progress, min(1.0, tokens / budget))
        elif progress > 0.0:
            budget = round(tokens / progress)
        if sources and all(history.finished == events.RUN_OVER for history in sources):
            progress = 1.0  # what was in a partial window is in no inner step
        evaluated = [history.evaluated for history in self.histories if history.evaluated is not None]
        newest = max(evaluated, key=lambda each: each.at, default=None)
        totals = views.RunTotals(
            name=self._name,
            run_id=self._run_id,
            progress=progress,
            tokens=tokens,
            budget_tokens=budget,
            tokens_per_s=sum(history.tokens_per_s(now) for history in sources),
            held_out=None if newest is None else newest.loss,
            routes_told=views.ALL_ROUTES,
            busy_name=views.COMPUTING,
        )
        names = {history.peer: history.name for history in self.histories if history.peer}
        signed = self._signed()
        peers = [
            _with_receipts(peer_view(history, names, now), history.drawn_tokens, signed) for history in self.histories
        ]
        stages = self._run.pipeline.stages if self._run else 1 + max((each.stage for each in self.histories), default=0)
        return self.put_together(
            totals,
            stages,
            peers,
            now,
            list(chain.from_iterable(map(routes, self.histories))),
            is_speed_known=all(history.recent for history in sources if history.underway),
        )

    def _signed(self) -> dict[str, int]:
        """Return by source the most tokens that any journal has receipts for."""
        signed: dict[str, int] = {}
        for history in self.histories:
            own = {} if history.peer is None or not history.signed_tokens else {history.peer: history.signed_tokens}
            for peer, tokens in (*history.others_signed.items(), *own.items()):
                signed[peer] = max(signed.get(peer, 0), tokens)
        return signed


def routes(history: PeerHistory) -> Iterator[views.Route]:
    if history.is_there:
        origin = history.peer or history.name
        yield from (views.Route(origin=origin, target=target, per_s=per_s) for target, per_s in history.routes.items())


def peer_view(history: PeerHistory, names: Mapping[str, str], now: float) -> views.PeerView:
    """Return the view of a peer. `names`: of other peers, by id."""
    state = str(history.state or (PeerState.TRAINING if history.steps else "starting"))
    left = history.gone if history.finished in (None, events.RUN_OVER) else history.finished
    if history.finished == events.RUN_OVER:
        state = str(PeerState.FINISHED)
    elif left is not None:
        state = "gone"
    given = history.ledger.now
    wait = history.waiting if history.gone is None else None
    partner = history.partner and names.get(history.partner, history.partner[-8:])
    return views.PeerView(
        peer=history.peer or history.name,
        name=history.name,
        stage=history.stage,
        state=state,
        inner_steps=history.steps,
        round=history.round,
        partner=("alone" if history.round and partner is None else partner),
        tokens_per_s=history.tokens_per_s(now),
        busy=history.busy_share(now),
        loss=history.loss,
        held_out=None if history.evaluated is None else history.evaluated.loss,
        gap=history.gap_last,
        waits=left if wait is None else wait_words(wait, history.stage),
        cause=None if wait is None else wait.cause,
        since=None if wait is None else history.since - (wait.seconds or 0.0),
        met=history.partner,
        settled=history.session_steps >= views.SETTLED_STEPS,
        tokens=history.tokens,
        there_s=None if given is None else given.there_s,
        line_bytes=None if given is None else given.sent_bytes + given.received_bytes,
        joules=None if given is None or not given.joules else given.joules,
        sent_per_s=history.sent_per_s if history.is_there else None,
        received_per_s=history.received_per_s if history.is_there else None,
    )


def _with_receipts(peer: views.PeerView, drawn: int, signed: Mapping[str, int]) -> views.PeerView:
    if peer.peer not in signed:
        return peer
    # What was signed for may have been lost on its way back, and is drawn again.
    return msgspec.structs.replace(peer, tokens_claimed=drawn, tokens_signed=min(drawn, signed[peer.peer]))


def change_text(event: events.Event) -> str | None:
    """Return what an event means to a person; None for an ordinary one."""
    match event:
        case events.Continued():
            return None
        case events.Started():
            return f"began at stage {event.stage}"
        case events.Moved():
            return f"moved from stage {event.origin} to stage {event.target}: {event.why}"
        case events.CatchUp(what="began" | "done"):
            return f"{'copies' if event.what == 'began' else 'has copied'} the weights of stage {event.stage}"
        case events.Noticed():
            return event.text + (" (over)" if event.over else "")
        case events.PeerViolation():
            return f"was sent what no peer may send by {event.peer[-8:]}: {event.why}"
        case events.Evaluated():
            return str(event.evaluation)
        case events.SpotCheck(finding="quarantined"):
            return f"leaves {event.peer[-8:]} alone for {event.for_s:.0f} s: its gradients are not those of others"
        case events.SpotCheck(finding="doubted"):
            return "finds half of the next stage at fault, and so does not believe its own checks for a while"
        case events.Finished():
            return f"ended: {event.why}"
        case _:
            return None
