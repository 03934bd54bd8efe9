"""Members that know only samples of their stage keep the invariants, and the invariants can fail."""

from collections import Counter

import pytest

from noloco_node.libp2p.record_holders import Holders
from noloco_node.swarm.stage_records import PeerTable
from tests.explorer.sample_schedules import SampleFault, SampleSchedule, draw_samples, examine_samples, main

PARTED = SampleSchedule(seed=1, members=28, others=20, faults=(SampleFault(500.0, "partition", 950.0),))
"""A partition that lasts until both sides are right, and heals."""
DIES = SampleSchedule(seed=2, members=28, others=10, faults=(SampleFault(400.0, "view dies"),))
LEAST = {"dead": 10_000, "failure": 1000, "missing": 300, "size": 25, "stray": 300, "unlisted": 26}
"""How often each invariant is evaluated in a schedule, at least."""


@pytest.mark.parametrize("seed", [0, 3])
def test_samples_keep_the_invariants_whatever_holders_and_peers_die_or_lie(seed: int) -> None:
    result = examine_samples(draw_samples(seed))
    assert result.broken is None
    checked = {name: result.counts[f"checked.{name}"] for name in LEAST}
    assert {name: count for name, count in checked.items() if count < LEAST[name]} == {}


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = Counter((fault.kind, fault.how) for seed in range(200) for fault in draw_samples(seed).faults)
    kinds = {"holders die", "holders lie", "view dies", "partition", "churn"}
    assert {kind for kind, _ in drawn} == kinds
    assert {how for kind, how in drawn if kind == "holders lie"} == {
        "keep nothing",
        "keep the old",
        "show each its own",
    }
    assert min(drawn.values()) > 10


def test_a_partition_heals() -> None:
    assert examine_samples(PARTED).broken is None


def test_sides_that_never_hear_of_each_others_holders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: Holders, teller: object, named: object, now_s: float) -> None:
        self._heard_s = now_s

    monkeypatch.setattr(Holders, "note_named", deaf)
    broken = examine_samples(PARTED).broken
    assert broken.kind == "missing"


def test_dead_peers_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerTable, "_life_s", lambda self, published: 1e9)
    broken = examine_samples(DIES).broken
    assert broken.kind in {"dead", "stray"}


def test_the_command_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "2"]) == 0
    assert "1 schedules, 0 violations" in capsys.readouterr().out
