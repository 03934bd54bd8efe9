"""Figures for Prometheus: what a scrape finds, who may ask, and that no stranger makes series."""

import json
import re
import shutil
import subprocess
from itertools import accumulate

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from repository import ROOT

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.journal import events
from noloco_node.observe.metrics import COUNTERS, GAUGES, MOST_VALUES, NodeMetrics
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.swarm.roster import PeerRecord, Roster

MONITORING = ROOT / "docker" / "monitoring"
NOW = 1000.0


def value(metrics: NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"noloco_{name}", labels)


def told() -> NodeMetrics:
    metrics = NodeMetrics("0123456789abcdef0123")
    seen: list[events.Event] = [
        events.Started(peer="12D3KooWpeer", stage=1, run="r", version="0"),
        events.StateChanged(state=PeerState.TRAINING, waiting=Wait(WaitCause.ROOM, 6.0, "all its 2 replicas")),
        events.StateChanged(state=PeerState.TRAINING),
        events.InnerStep(step=1, progress=0.1, loss=2.5, tokens=64, seconds=2.0, learning_rate=0.1, device_s=0.5),
        OuterStepTaken(round=1, partner="12D3KooWother", gap=0.25, seconds=0.5),
        OuterStepTaken(round=2, seconds=0.5),
        RoundSkipped(round=3, in_a_row=1),
        events.Traffic(sent={"microbatch": 100}, received={"gossip": 7}),
        events.Traffic(sent={"microbatch": 150}, received={"gossip": 7}),
        events.Traffic(sent={"microbatch": 20}, received={}),
        events.Energy(joules=30.0),
        events.Energy(joules=40.0),
        events.Energy(joules=5.0),
        events.RefusedMicrobatch(peer="12D3KooWother", reason="full", count=3),
        events.Lost(peer="12D3KooWother", what="exchange", why="silent"),
    ]
    for number, event in enumerate(seen):
        metrics.take(event, 100.0 + 5.0 * number)
    return metrics


def test_a_scrape_tells_what_the_journal_does() -> None:
    metrics = told()
    assert value(metrics, "tokens_total") == 64
    assert value(metrics, "device_busy_seconds_total") == 0.5
    assert value(metrics, "waiting_seconds_total", reason="room at the next stage") == 5.0
    assert [value(metrics, "rounds_total", result=result) for result in ("met", "solo", "skipped")] == [1, 1, 1]
    # A total that is smaller than before is that of a new network, in a later session.
    assert value(metrics, "bytes_total", direction="sent", kind="microbatch") == 170
    assert value(metrics, "device_energy_joules_total") == 45.0
    assert value(metrics, "refusals_total", side="there", reason="full") == 3
    assert value(metrics, "stage") == 1
    assert value(metrics, "build_info", version=__import__("noloco_node").__version__) == 1
    assert b"12D3KooW" not in metrics.text(NOW)


@given(scrapes=st.lists(st.floats(0.0, 100.0), max_size=6).map(sorted))
def test_a_wait_is_counted_while_it_lasts_and_once(scrapes: list[float]) -> None:
    """A wait that were counted at its end alone would set off the alarm of long waits when it is over."""
    metrics = NodeMetrics("r")
    wait = Wait(WaitCause.ROOM, 0.0, "all its 2 replicas")
    metrics.take(events.StateChanged(state=PeerState.TRAINING, waiting=wait), 0.0)
    for now in scrapes:
        metrics.text(now)
        counted = value(metrics, "waiting_seconds_total", reason="room at the next stage")
        assert counted == pytest.approx(now)
    metrics.take(events.StateChanged(state=PeerState.TRAINING), 100.0)
    metrics.text(NOW)
    assert value(metrics, "waiting_seconds_total", reason="room at the next stage") == pytest.approx(100.0)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=4), max_size=4))
def test_the_bytes_of_all_sessions_add_up(sessions: list[list[int]]) -> None:
    """Each session has a network of its own, whose totals may be larger than those of the session before."""
    metrics = NodeMetrics("r")
    for grown in sessions:
        metrics.take(events.Started(peer="p", stage=0, run="r", version="0"), 1.0)
        for total in accumulate(grown):
            metrics.take(events.Traffic(sent={"microbatch": total}, received={}), 2.0)
        metrics.take(events.Moved(origin=0, target=1, why="asked"), 3.0)  # which begins no session
        metrics.take(events.Traffic(sent={"microbatch": sum(grown)}, received={}), 4.0)
        metrics.take(events.Finished(why="over", step=1, round=0, progress=1.0), 5.0)
    told = value(metrics, "bytes_total", direction="sent", kind="microbatch")
    assert (told or 0) == sum(map(sum, sessions))


def test_what_is_not_known_yet_is_no_figure() -> None:
    """A loss of 0 was that of every bootstrap peer, and the first loss of a node that had waited was a jump."""
    metrics = NodeMetrics("r")
    names = ("loss_nats", "held_out_loss_nats", "gap_ratio")
    assert [value(metrics, name) for name in names] == [None] * 3
    for loss in (2.0, 1.0):
        metrics.take(events.InnerStep(step=1, progress=0.1, loss=loss, tokens=64, seconds=2.0, learning_rate=0.1), 1.0)
        assert [value(metrics, name) for name in names] == [loss, None, None]


def test_a_disk_that_refuses_checkpoints_is_a_figure_until_it_takes_one() -> None:
    metrics = told()
    assert value(metrics, "checkpoint_refused") == 0
    metrics.take(events.Noticed(what=events.DISK, text="could not save: No space left on device"), 200.0)
    assert value(metrics, "checkpoint_refused") == 1
    metrics.take(events.Noticed(what="slept", text="the machine slept", over=True), 201.0)
    assert value(metrics, "checkpoint_refused") == 1
    metrics.take(events.Noticed(what=events.DISK, text="saved", over=True), 202.0)
    assert value(metrics, "checkpoint_refused") == 0


def test_the_swarm_is_told_as_far_as_it_is_watched() -> None:
    metrics, run = NodeMetrics("r"), decode_run(demo_run_text(stages=2, replicas=1, steps=100, seed=0), "a test")
    record = PeerRecord(peer="p", stage=1, state=PeerState.TRAINING, device_s=0.1, tokens_per_s=100.0)
    view = RosterObserver(run, "r").view(Roster(stages=((), (record,)), run_samples=10), 1e9)
    metrics.show(view, (1,), {"rejoined": 2, "daemon.died": 1})
    metrics.show(view, (1,), {"rejoined": 2, "daemon.died": 1})
    assert value(metrics, "replicas_training", stage="1") == 1
    assert value(metrics, "replicas", stage="0") is None
    assert value(metrics, "reconnects_total") == 2
    assert value(metrics, "daemon_restarts_total") == 1


@settings(max_examples=20)
@given(st.lists(st.text(max_size=20), min_size=MOST_VALUES, max_size=4 * MOST_VALUES, unique=True))
def test_labels_are_bounded_whatever_is_said(reasons: list[str]) -> None:
    metrics = NodeMetrics("r")
    for reason in reasons:
        metrics.take(events.RefusedMicrobatch(peer="p", reason=reason), 0.0)
    series = [line for line in metrics.text(NOW).decode().splitlines() if line.startswith("noloco_refusals_total{")]
    assert len(series) <= MOST_VALUES + 1


def test_dashboard_and_alerts_ask_for_nothing_that_is_not_there() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    asked = [(rule["expr"], " ".join(rule["annotations"].values())) for rule in rules]
    asked += [(t["expr"], t["legendFormat"]) for panel in panels for t in panel["targets"]]
    there = {f"noloco_{name}_total": labels for name, (_, *labels) in COUNTERS.items()}
    there |= {f"noloco_{name}": labels for name, (_, *labels) in GAUGES.items()}
    for expression, words in asked:
        labels = {"instance", *(label for name in re.findall(r"noloco_\w+", expression) for label in there[name])}
        kept = [set(re.findall(r"\w+", listed)) for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)]
        told = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", words))
        assert set().union(told, *kept) <= labels
        if " by (" in f" {expression}":
            assert told <= kept[0]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {*job["static_configs"][0]["targets"], *(f"{each}:9464" for each in job["dns_sd_configs"][0]["names"])}
    telling = {name for name, each in services.items() if "0.0.0.0:9464" in each.get("command", ())}
    assert scraped == {f"{name}:9464" for name in telling}
    plain = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in telling:  # an override replaces all words
        command = plain[name]["command"]
        assert services[name]["command"][: len(command)] == command


def test_each_alarm_is_tried() -> None:
    """By promtool, where it is installed."""
    (rules,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    tried = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    going_off = {each["alertname"] for test in tried for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert going_off == {rule["alert"] for rule in rules["rules"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_in_rules_and_figures_and_alarms_go_off() -> None:
    rules = ["promtool", "check", "rules", str(MONITORING / "alerts.yml")]
    figures = ["promtool", "check", "metrics"]
    config = ["promtool", "check", "config", str(MONITORING / "prometheus.yml")]
    alarms = ["promtool", "test", "rules", str(MONITORING / "alerts_test.yml")]
    for command, text in ((rules, b""), (config, b""), (alarms, b""), (figures, told().text())):
        done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=LAST_RESORT_S)
        assert done.returncode == 0, done.stdout + done.stderr
