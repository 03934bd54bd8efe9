"""Figures of a node, and of the swarm as it sees it, for Prometheus.

They count the same events as the journal. Names have base units. Labels have few values, never the id of a peer:
strangers can make any number of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from gossip.interface import OuterStepTaken, PartnerTooStale, RoundSkipped
from noloco_node import __version__
from noloco_node.journal import events
from noloco_node.observe.bottleneck import CAUSES
from noloco_node.observe.swarm_view import SwarmView
from noloco_node.run.peer_state import Wait

MOST_VALUES = 32  # of one label: what comes beyond is `other`
SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class LaterGauge:
    """A gauge that is absent until its first value: a step from 0 to the first loss would set off an alarm."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._gauge, self._registry = Gauge(name, text, registry=None), registry
        self._is_known = False

    def set(self, value: float) -> None:
        self._gauge.set(value)
        if not self._is_known:
            self._registry.register(self._gauge)
            self._is_known = True


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
        self._make_counters(registry)
        self._make_gauges(registry)

    def _make_counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"noloco_{name}", text, labels, registry=registry)

        self._tokens = counter("tokens", "Tokens of this node's windows.")
        self._steps = counter("inner_steps", "Inner steps of this node.")
        self._rounds = counter("rounds", "Rounds: met, solo, skipped; stale: the partner's weights were.", "result")
        self._bytes = counter("bytes", "Bytes by direction and purpose.", "direction", "kind")
        self._busy_s = counter("device_busy_seconds", "Seconds for which the device worked.")
        self._energy = counter("device_energy_joules", "Taken by the device, where it tells; others' work included.")
        self._waiting_s = counter("waiting_seconds", "Seconds of waiting that are over, by what for.", "reason")
        self._refusals = counter("refusals", "Microbatches refused, by whom (here, there) and why.", "side", "reason")
        self._losses = counter("losses", "Calls, exchanges and replies that broke off.", "kind")
        self._violations = counter("violations", "What peers sent and no peer may send.")
        self._findings = counter("spot_checks", "Findings of spot checks of the next stage.", "finding")
        self._evaluations = counter("evaluations", "Evaluations of this node on held-out text.")
        self._moves = counter("moves", "Moves of this node to another stage.")
        self._reconnects = counter("reconnects", "Times that this peer joined its swarm anew.")
        self._restarts = counter("daemon_restarts", "Times that the libp2p daemon died.")
        self._round_s = Histogram("noloco_round_seconds", "Exchange of a round.", buckets=SECONDS, registry=registry)
        self._step_s = Histogram(
            "noloco_inner_step_seconds", "From one inner step to the next.", buckets=SECONDS, registry=registry
        )

    def _make_gauges(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"noloco_{name}", text, labels, registry=registry)

        self._stage = gauge("stage", "Stage that this node serves; -1 while it serves none.")
        self._stage.set(-1)
        self._round = gauge("round", "Rounds of this node.")
        self._loss = LaterGauge("noloco_loss_nats", "Loss of the last window, nats a token.", registry)
        self._held_out = LaterGauge(
            "noloco_held_out_loss_nats", "Loss of this node's last evaluation on held-out text.", registry
        )
        self._gap = LaterGauge("noloco_gap_ratio", "Distance to the last partner over the norm of the mean.", registry)
        self._waiting = gauge("waiting", "1 while this node waits for something, else 0.")
        self._unsaved = gauge("checkpoint_refused", "1 while the disk refuses this node's checkpoints, else 0.")
        self._budget = gauge("line_budget_bytes", "Allowed and used of the line, a second or a month.", "kind")
        self._progress = gauge("progress_ratio", "Share of the run's tokens that are trained.")
        self._swarm_tokens = gauge("swarm_tokens", "Tokens that all peers have trained.")
        self._source_tokens = gauge("source_tokens", "Tokens of other sources, claimed, or signed by receipts.", "kind")
        self._speed = gauge("swarm_tokens_per_second", "Speed of the whole swarm.")
        self._swarm_held_out = gauge("swarm_held_out_loss_nats", "Newest loss on held-out text that a peer reports.")
        self._left_s = gauge("swarm_left_seconds", "Time left at the present speed; NaN where nothing moves.")
        self._replicas = gauge("replicas", "Peers at a stage.", "stage")
        self._replicas_error = gauge("replicas_error_ratio", "Standard error of these numbers; 0: exact.", "stage")
        self._training = gauge("replicas_training", "Peers that train at a stage.", "stage")
        self._stage_busy = gauge("stage_busy_ratio", "Share of time for which devices of a stage work.", "stage")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def take(self, event: events.Event, now: float) -> None:
        """Count what the node journals; `now`: unix seconds."""
        match event:
            case events.InnerStep():
                self._steps.inc()
                self._tokens.inc(event.tokens)
                self._busy_s.inc(max(0.0, event.device_s))
                self._step_s.observe(event.seconds)
                if event.loss is not None:
                    self._loss.set(event.loss)
            case OuterStepTaken():
                self._rounds.labels("solo" if event.partner is None else "met").inc()
                self._round_s.observe(event.seconds)
                self._round.set(event.round)
                if event.gap is not None:
                    self._gap.set(event.gap)
            case PartnerTooStale():
                self._rounds.labels("stale").inc()
            case RoundSkipped():
                self._rounds.labels("skipped").inc()
            case events.StateChanged():
                self._note_wait(event.waiting, now)
            case events.Started():
                self._stage.set(event.stage)
            case events.Moved():
                self._moves.inc()
            case events.Traffic():
                for direction, counts in (("sent", event.sent), ("received", event.received)):
                    for kind, count in counts.items():
                        self._bytes.labels(direction, self._bounded("kind", kind)).inc(
                            self._growth(f"bytes.{direction}", kind, count)
                        )
            case events.Budget():
                for name, value in event.bytes.items():
                    self._budget.labels(self._bounded("budget", name)).set(value)
            case events.RefusedMicrobatch():
                side = "here" if event.here else "there"
                self._refusals.labels(side, self._bounded("reason", event.reason)).inc(event.count)
            case events.Lost():
                self._losses.labels(self._bounded("what", event.what)).inc(event.count)
            case events.Energy():
                self._energy.inc(self._growth("energy", "", event.joules))
            case events.Receipts():
                self._source_tokens.labels("claimed").set(sum(event.claimed.values()))
                self._source_tokens.labels("signed").set(sum(event.signed.values()))
            case events.PeerViolation():
                self._violations.inc(event.count)
            case events.Noticed() if event.what == events.DISK:
                self._unsaved.set(not event.over)
            case events.Evaluated():
                self._evaluations.inc()
                self._held_out.set(event.loss)
            case events.SpotCheck():
                self._findings.labels(self._bounded("finding", event.finding)).inc(event.count)
            case events.Finished():
                self._stage.set(-1)

    def _note_wait(self, wait: Wait | None, now: float) -> None:
        if self._waits is not None:
            reason, since = self._waits
            self._waiting_s.labels(reason).inc(max(0.0, now - since))
        self._waits = None if wait is None else (str(CAUSES.get(wait.cause, "other")), now)
        self._waiting.set(wait is not None)

    def show(self, view: SwarmView, watched: tuple[int, ...], statistics: Mapping[str, float]) -> None:
        """Set the figures of the swarm. `watched`: the stages that the view covers."""
        self._progress.set(view.progress)
        self._swarm_tokens.set(view.tokens)
        self._speed.set(view.tokens_per_s)
        self._left_s.set(float("nan") if view.left_s is None else view.left_s)
        self._swarm_held_out.set(float("nan") if view.held_out is None else view.held_out)
        for gauge in (self._replicas, self._replicas_error, self._training, self._stage_busy):
            gauge.clear()
        for number in watched:
            stage = view.stages[number]
            self._replicas.labels(str(number)).set(stage.replicas)
            self._replicas_error.labels(str(number)).set(stage.error)
            self._training.labels(str(number)).set(stage.training)
            if stage.busy is not None:
                self._stage_busy.labels(str(number)).set(stage.busy)
        for counter, name in ((self._reconnects, "rejoined"), (self._restarts, "daemon.died")):
            counter.inc(self._growth("network", name, int(statistics.get(name, 0))))

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
