"""Figures of a node, and of the swarm as it sees it, for Prometheus.

They count the same events as the journal. Names have base units. Labels have few values, never the id of a peer:
strangers can make any number of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from gossip.interface import OuterStepTaken, PartnerTooStale, RoundSkipped
from noloco_node import __version__
from noloco_node.journal import events
from noloco_node.observe.bottleneck import CAUSES
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.run.peer_state import Wait

MOST_VALUES = 32  # of one label: what comes beyond is `other`
SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


COUNTERS = {
    "tokens": ("Tokens of this node's windows.",),
    "inner_steps": ("Inner steps of this node.",),
    "rounds": ("Rounds: met, solo, skipped; stale: the partner's weights were.", "result"),
    "bytes": ("Bytes by direction and purpose.", "direction", "kind"),
    "device_busy_seconds": ("Seconds for which the device computed; of a CPU, for which the thread had a core.",),
    "device_energy_joules": ("Taken by the device, where it tells; others' work included.",),
    "waiting_seconds": ("Seconds of waiting, by what for.", "reason"),
    "refusals": ("Microbatches refused, by whom (here, there) and why.", "side", "reason"),
    "losses": ("Calls, exchanges and replies that broke off.", "kind"),
    "violations": ("What peers sent and no peer may send.",),
    "spot_checks": ("Findings of spot checks of the next stage.", "finding"),
    "evaluations": ("Evaluations of this node on held-out text.",),
    "moves": ("Moves of this node to another stage.",),
    "reconnects": ("Times that this peer joined its swarm anew.",),
    "daemon_restarts": ("Times that the libp2p daemon died.",),
}
"""What each counter says, and its labels; so too of the gauges below."""
GAUGES = {
    "stage": ("Stage that this node serves; -1 while it serves none.",),
    "round": ("Rounds of this node.",),
    "loss_nats": ("Loss of the last window, nats a token.",),
    "held_out_loss_nats": ("Loss of this node's last evaluation on held-out text.",),
    "gap_ratio": ("Distance to the last partner over the norm of the mean.",),
    "waiting": ("1 while this node waits for something, else 0.",),
    "checkpoint_refused": ("1 while the disk refuses this node's checkpoints, else 0.",),
    "line_budget_bytes": ("Allowed and used of the line, a second or a month.", "kind"),
    "progress_ratio": ("Share of the run's tokens that are trained.",),
    "swarm_tokens": ("Tokens that all peers have trained.",),
    "source_tokens": ("Tokens of the largest other sources, claimed, or signed by receipts.", "kind"),
    "swarm_tokens_per_second": ("Speed of the whole swarm.",),
    "swarm_held_out_loss_nats": ("Newest loss on held-out text that a peer reports.",),
    "swarm_left_seconds": ("Time left at the present speed; NaN where nothing moves.",),
    "replicas": ("Peers at a stage.", "stage"),
    "replicas_error_ratio": ("Standard error of these numbers; 0: exact.", "stage"),
    "replicas_training": ("Peers that train at a stage.", "stage"),
    "stage_busy_ratio": ("Share of time for which devices of a stage have a microbatch in hand.", "stage"),
}
HISTOGRAMS = {"round_seconds": "Exchange of a round.", "inner_step_seconds": "From one inner step to the next."}
LATER = ("loss_nats", "held_out_loss_nats", "gap_ratio")
"""Gauges that are absent until their first value: a step from 0 to the first loss would set off an alarm."""
OF_STAGES = ("replicas", "replicas_error_ratio", "replicas_training", "stage_busy_ratio")


class NodeMetrics:
    """The figures of one node; a bootstrap peer has those of the swarm alone."""

    def __init__(self, run_id: str) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("noloco_build", "Program that runs.", registry=registry).info({"version": __version__})
        Info("noloco_run", "Run that this peer takes part in.", registry=registry).info({"digest": run_id[:16]})
        self._values: dict[str, set[str]] = {}
        self._totals: dict[tuple[str, str], float] = {}
        self._waits: tuple[str, float] | None = None
        self._later = set(LATER)
        self._counters = {
            name: Counter(f"noloco_{name}", text, labels, registry=registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"noloco_{name}", text, labels, registry=None if name in LATER else registry)
            for name, (text, *labels) in GAUGES.items()
        }
        self._round_s, self._step_s = (
            Histogram(f"noloco_{name}", text, buckets=SECONDS, registry=registry) for name, text in HISTOGRAMS.items()
        )
        self._set("stage", -1)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        if name in self._later:
            self._later.remove(name)
            self.registry.register(gauge)
        (gauge.labels(*labels) if labels else gauge).set(value)

    def text(self, now: float) -> bytes:
        """Return what a scrape is answered; `now`: unix seconds."""
        self._count_wait(now)  # an alarm of long waits hears of one while it lasts
        return generate_latest(self.registry)

    def take(self, event: events.Event, now: float) -> None:
        """Count what the node journals; `now`: unix seconds."""
        match event:
            case events.InnerStep():
                self._count("inner_steps")
                self._count("tokens", by=event.tokens)
                self._count("device_busy_seconds", by=max(0.0, event.device_s))
                self._step_s.observe(event.seconds)
                if event.loss is not None:
                    self._set("loss_nats", event.loss)
            case OuterStepTaken():
                self._count("rounds", "solo" if event.partner is None else "met")
                self._round_s.observe(event.seconds)
                self._set("round", event.round)
                if event.gap is not None:
                    self._set("gap_ratio", event.gap)
            case PartnerTooStale():
                self._count("rounds", "stale")
            case RoundSkipped():
                self._count("rounds", "skipped")
            case events.StateChanged():
                self._note_wait(event.waiting, now)
            case events.Started():
                self._set("stage", event.stage)
            case events.Moved():
                self._count("moves")
            case events.Traffic():
                for direction, counts in (("sent", event.sent), ("received", event.received)):
                    for kind, count in counts.items():
                        grown = self._growth(f"bytes.{direction}", kind, count)
                        self._count("bytes", direction, self._bounded("kind", kind), by=grown)
            case events.Budget():
                for name, value in event.bytes.items():
                    self._set("line_budget_bytes", value, self._bounded("budget", name))
            case events.RefusedMicrobatch():
                side = "here" if event.here else "there"
                self._count("refusals", side, self._bounded("reason", event.reason), by=event.count)
            case events.Lost():
                self._count("losses", self._bounded("what", event.what), by=event.count)
            case events.Energy():
                self._count("device_energy_joules", by=self._growth("energy", "", event.joules))
            case events.Receipts():
                self._set("source_tokens", sum(event.claimed.values()), "claimed")
                self._set("source_tokens", sum(event.signed.values()), "signed")
            case events.PeerViolation():
                self._count("violations", by=event.count)
            case events.Noticed() if event.what == events.DISK:
                self._set("checkpoint_refused", not event.over)
            case events.Evaluated():
                self._count("evaluations")
                self._set("held_out_loss_nats", event.loss)
            case events.SpotCheck():
                self._count("spot_checks", self._bounded("finding", event.finding), by=event.count)
            case events.Finished():
                self._set("stage", -1)
                # The next session has a network of its own.
                self._totals = {each: total for each, total in self._totals.items() if not each[0].startswith("bytes")}

    def _count_wait(self, now: float) -> None:
        if self._waits is not None:
            reason, since = self._waits
            self._count("waiting_seconds", reason, by=max(0.0, now - since))
            self._waits = reason, now

    def _note_wait(self, wait: Wait | None, now: float) -> None:
        self._count_wait(now)
        self._waits = None if wait is None else (str(CAUSES.get(wait.cause, "other")), now)
        self._set("waiting", wait is not None)

    def show(self, view: SwarmView, watched: tuple[int, ...], statistics: Mapping[str, float]) -> None:
        """Set the figures of the swarm. `watched`: the stages that the view covers."""
        self._set("progress_ratio", view.progress)
        self._set("swarm_tokens", view.tokens)
        self._set("swarm_tokens_per_second", view.tokens_per_s)
        self._set("swarm_left_seconds", nan if view.left_s is None else view.left_s)
        self._set("swarm_held_out_loss_nats", nan if view.held_out is None else view.held_out)
        for name in OF_STAGES:
            self._gauges[name].clear()
        for number in watched:
            stage = view.stages[number]
            figures = zip(OF_STAGES, (stage.replicas, stage.error, stage.training, stage.busy), strict=True)
            for name, value in figures:
                if value is not None:
                    self._set(name, value, str(number))
        for name, told in (("reconnects", "rejoined"), ("daemon_restarts", "daemon.died")):
            self._count(name, by=self._growth("network", told, int(statistics.get(told, 0))))

    def _growth(self, what: str, name: str, total: float) -> float:
        """Return by how much a total has grown; one that is smaller than before has begun anew."""
        before = self._totals.get((what, name), 0)
        self._totals[what, name] = total
        return total - before if total >= before else total

    def _bounded(self, label: str, value: str) -> str:
        seen = self._values.setdefault(label, set())
        if value not in seen and len(seen) >= MOST_VALUES:
            return "other"
        seen.add(value)
        return value
