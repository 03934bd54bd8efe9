"""Gossip by appointment: the moment that both sides agree on, what it does to lateness, and the page about it."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laboratory_results import result_of
from msgspec.structs import replace

from research.laboratory import appointments
from research.laboratory.experiments.appointment_grid import PLACES, appointment_grid, methods
from research.laboratory.experiments.cell import Cell, Conditions
from research.laboratory.experiments.rivals import heads
from research.laboratory.experiments.volunteer_grid import map_cell
from research.laboratory.methods.appointments import AppointedMeetings, Offer, agreed_s
from research.laboratory.running import trial
from research.laboratory.running.store import Store

offers = st.builds(Offer, round=st.integers(1, 99), due_s=st.floats(0.0, 1e4), step_s=st.floats(0.1, 1e3))


@given(offers, offers)
def test_both_sides_agree_on_a_pause_of_the_slower_machine(one: Offer, other: Offer) -> None:
    at_s = agreed_s(one, other)
    assert at_s == agreed_s(other, one)
    slow, fast = (one, other) if one.step_s > other.step_s else (other, one)
    if one.step_s != other.step_s:
        steps = (at_s - slow.due_s) / slow.step_s
        assert steps == pytest.approx(round(steps), abs=1e-6)
        assert slow.due_s <= at_s <= max(slow.due_s, fast.due_s + slow.step_s / 2) + 1e-6


def test_appointments_are_kept_and_corrections_come_sooner(one_held_out_batch: None) -> None:
    usual = replace(heads()["gossip_weighed"][0], learning_rate=1e-2, seed=1, scale="tiny", steps=20)
    alone, agreed = (trial.run(replace(usual, appointments=wider)) for wider in (None, 1.0))
    assert "appointed" not in alone.notes
    assert agreed.notes["appointed"] > agreed.notes["met"] / 2
    assert agreed.notes["steps_late"] < alone.notes["steps_late"]
    assert agreed.merged < agreed.curve[0].merged


def test_a_round_whose_partner_has_vanished_goes_on_without_the_appointment(monkeypatch: pytest.MonkeyPatch) -> None:
    held, hold = Counter[str](), AppointedMeetings._hold

    async def counted(self: AppointedMeetings, *args: Any, **options: Any) -> None:
        kept = self.kept
        try:
            await hold(self, *args, **options)
        finally:
            held["kept" if self.kept > kept else "broken"] += 1

    monkeypatch.setattr(AppointedMeetings, "_hold", counted)
    conditions = Conditions(churn=6.0, line="100/20", hours=1.5)
    cell = replace(map_cell("gossip", conditions, 4), learning_rate=1e-2, seed=1, appointments=1.0)
    notes = trial.run(cell).notes
    assert held["broken"] > 0
    assert 0 < notes["appointed"] < notes["met"]


def outcome(cell: Cell) -> float:
    """A loss by formula: appointments bring 0.1 of the 0.3 by which gossip is behind."""
    level = 2.0 + 0.3 * (cell.method == "gossip") - 0.1 * (cell.appointments is not None)
    return level + Random(cell.seed).gauss(0.0, 0.01)


def test_the_page_compares_with_gossip_and_with_the_mean(tmp_path: Path) -> None:
    store, grid = Store(tmp_path / "appointments.jsonl"), appointment_grid(5)
    for run in grid.due(store):
        notes = {"met": 100.0, "steps_late": 2.0, "appointed": 40.0} if run.cell.method == "gossip" else {}
        store.add(result_of(run.cell, outcome(run.cell), notes=notes))
    assert appointments.main(["--tables", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "appointments.md").read_text()
    rows = [" ".join(line.split()) for line in page.splitlines() if line.startswith("| gossip by appointment ")]
    assert len(rows) == len(PLACES)
    assert all("| -0.1000 ± 0.0000 | +0.2000 ± 0.0000 | 2.00 | 40% |" in row for row in rows)
    assert all(cell.optimiser == "adamw_nesterov" for place, _ in PLACES for cell in methods(place).values())
