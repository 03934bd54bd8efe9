"""The gossip settings of a run file, and what of the outer state a newcomer and a restarted replica carry on."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import Toy, ToySettings, World

from gossip.exchange.messages import Manifest, Piece, ReplicaState
from gossip.interface import Origin, OuterStepTaken, PartnerTooStale
from gossip.rule.outer_step import OuterState
from gossip.rule.shares import ROUND_BOUND
from gossip.settings import Format, OuterConfig
from gossip.transfer.chunks import cut, listed
from noloco_node.errors import UserError
from noloco_node.journal.reader import read
from noloco_node.journal.writer import Journal
from noloco_node.run.presets import PRESETS, run_text
from noloco_node.run.protocols import state_schema
from noloco_node.run.runfile import decode_run
from noloco_node.sim.clock import run as simulated
from noloco_node.sim.hardware.quadratic_model import SIZE, QuadraticModel
from noloco_node.state_sync.starting_state import from_checkpoint, from_donor, is_recent_enough, started
from noloco_node.storage.checkpoint import Checkpoint, Counters, load_latest, save

MODEL = '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'


# Settings.


@pytest.mark.parametrize(
    ("lines", "field", "why"),
    [
        ("momentum_period = 0", "outer.momentum_period = 0", "below 1"),
        ("momentum_period = 100000", "outer.momentum_period", "never moves"),
        ("momentum_period = 2\nmomentum_spread = 0.51", "outer.momentum_spread = 0.51", "0.5"),
        ("momentum_spread = -0.1", "outer.momentum_spread", "from 0"),
        ("momentum_spread = nan", "outer.momentum_spread", "from 0"),
        ("codec = 'int3'", "outer.codec", "int4"),
        ("staleness_at_most = 0", "outer.staleness_at_most", ""),
    ],
)
def test_contradictory_settings_are_refused_with_the_reason(lines: str, field: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        decode_run(f"{MODEL}[outer]\n{lines}\n", "run.toml")
    assert field in str(caught.value)
    assert why in str(caught.value)


@settings(deadline=None)
@given(period=st.integers(1, 50), share=st.floats(0.0, 1.0), codec=st.sampled_from(list(Format)))
def test_settings_reach_the_rounds(period: int, share: float, codec: Format) -> None:
    lines = f"momentum_period = {period}\nmomentum_spread = {share / period!r}\ncodec = '{codec}'\ngamma = 0.3\n"
    run = decode_run(f"{MODEL}[outer]\nalpha = 0.3\n{lines}staleness_at_most = 7\n", "run.toml")
    assert (run.outer.momentum_period, run.outer.momentum_spread) == (period, share / period)
    assert run.outer.codec is codec
    assert run.outer.staleness_at_most == 7


def test_a_run_file_without_a_period_means_a_momentum_that_moves_in_every_round() -> None:
    run = decode_run(MODEL, "run.toml")
    assert (run.outer.momentum_period, run.outer.momentum_spread) == (1, 0.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_each_of_them_with_its_default(preset: str) -> None:
    text, usual = run_text(preset), OuterConfig()
    outer = decode_run(text, "run.toml").outer
    for name in ("momentum_period", "momentum_spread", "codec", "staleness_at_most"):
        assert getattr(outer, name) == getattr(usual, name)
        assert f"\n{name} = " in text


# What is carried.


def drawn(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)),)


def state_of_donor(**others: Any) -> ReplicaState:
    whole = ReplicaState(
        slow=drawn(1),
        momentum=drawn(2),
        optimiser=(torch.zeros(SIZE), torch.zeros(SIZE)),
        round=4,
        inner_steps=80,
        progress=0.5,
        optimiser_steps=80,
        gathered=drawn(3),
        meetings=2,
        last_met=3,
    )
    return replace(whole, **others)


def same(one: OuterState, other: OuterState) -> bool:
    tensors = zip(one[:3], other[:3], strict=True)
    return one.meetings == other.meetings and all(len(x) == len(y) and all(map(torch.equal, x, y)) for x, y in tensors)


def test_a_newcomer_is_where_its_donor_is() -> None:
    bowl, donor = QuadraticModel(0), state_of_donor()
    origin = from_donor(bowl, donor).origin
    assert same(origin.state, OuterState(donor.slow, donor.momentum, donor.gathered, 2))
    assert (origin.rounds, origin.inner_steps, origin.last_met) == (4, 80, 3)


@pytest.mark.parametrize("meetings", [0, 2])
def test_a_checkpoint_keeps_the_momentum_period_and_the_last_meeting(tmp_path: Path, meetings: int) -> None:
    counters = Counters(
        run_id="run",
        stage=0,
        round=4,
        inner_steps=80,
        progress=0.5,
        samples=1,
        optimiser_steps=80,
        meetings=meetings,
        last_met=3,
    )
    gathered = drawn(3) if meetings else ()
    moments = (torch.zeros(SIZE), torch.zeros(SIZE))
    tensors = {"slow": drawn(1), "momentum": drawn(2), "gathered": gathered, "fast": drawn(4), "optimiser": moments}
    save(tmp_path, Checkpoint(counters, tensors))
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    origin = from_checkpoint(QuadraticModel(0), loaded).origin
    assert same(origin.state, OuterState(drawn(1), drawn(2), gathered, meetings))
    assert origin.last_met == 3


def test_a_checkpoint_from_before_starts_a_period_and_is_not_stale() -> None:
    counters = Counters(run_id="run", stage=0, round=4, inner_steps=80, progress=0.5, samples=1, optimiser_steps=80)
    tensors = {"slow": drawn(1), "momentum": drawn(2), "fast": drawn(4), "optimiser": (drawn(5)[0], drawn(6)[0])}
    origin = from_checkpoint(QuadraticModel(0), Checkpoint(counters, tensors)).origin
    assert (origin.state.gathered, origin.state.meetings, origin.last_met) == ((), 0, 4)


def checkpoint(fast: tuple[Tensor, ...]) -> Checkpoint:
    counters = Counters(run_id="run", stage=0, round=4, inner_steps=80, progress=0.5, samples=1, optimiser_steps=80)
    moments = (torch.zeros(SIZE), torch.zeros(SIZE))
    return Checkpoint(counters, {"slow": drawn(1), "momentum": drawn(2), "fast": fast, "optimiser": moments})


def test_a_checkpoint_from_between_two_rounds_says_that_its_slow_weights_lack_steps() -> None:
    assert from_checkpoint(QuadraticModel(0), checkpoint(drawn(1))).origin.gathered
    assert not from_checkpoint(QuadraticModel(0), checkpoint(drawn(4))).origin.gathered
    assert from_donor(QuadraticModel(0), state_of_donor()).origin.gathered


@pytest.mark.parametrize("gathered", [True, False])
def test_work_of_an_earlier_life_is_not_lost_where_the_run_ends_before_another_step(gathered: bool) -> None:
    async def main() -> Toy:
        state = OuterState((torch.full((4,), 20.0),), (torch.zeros(4),))
        toy = Toy(
            World(), "a", ToySettings(seed=1, alpha=0.5, beta=0.7, gamma=0.7), origin=Origin(state, 3, 80, 3, gathered)
        )
        toy.fast = torch.full((4,), 20.0 if gathered else 12.0)
        await toy.rounds.between_steps(80, 1.0)
        await toy.rounds.last_round(10.0)
        return toy

    toy = simulated(main())
    assert len(toy.solo) == (0 if gathered else 1)
    assert toy.slow == pytest.approx(20.0 if gathered else 20.0 - 0.7 * 8.0)


@settings(deadline=None)
@given(st.integers(0, 100), st.lists(st.integers(0, 100), min_size=1, max_size=7), st.integers(1, 20))
def test_a_checkpoint_will_do_if_it_is_a_few_rounds_behind_at_most(own: int, rounds: list[int], stale: int) -> None:
    middle = sorted(rounds)[(len(rounds) - 1) // 2]
    assert is_recent_enough(own, rounds, stale) == (middle - own <= min(4, stale))


@settings(deadline=None)
@given(st.integers(3, 100), st.lists(st.integers(0, 100), min_size=1, max_size=7))
def test_a_newcomer_starts_where_its_stage_is_and_never_met_anybody_later(round: int, rounds: list[int]) -> None:
    beginning = started(from_donor(QuadraticModel(0), state_of_donor(round=round)), rounds, 0.7)
    assert beginning.progress == 0.7
    assert beginning.origin.last_met <= beginning.origin.rounds
    # What the stage says lifts it, as far as names alone may: only the donor has shown anything.
    middle = sorted(rounds)[(len(rounds) - 1) // 2]
    assert min(middle, round + ROUND_BOUND) <= beginning.origin.rounds <= max(round, middle)


@pytest.mark.parametrize("shapes", [((SIZE,),), ((700, 300), (3,), (), (50, 11))])
def test_manifests_and_pieces_pass_the_wire_and_others_do_not(shapes: tuple[tuple[int, ...], ...]) -> None:
    schema = state_schema(shapes)
    spans = cut([4 * prod(shape) for shape in shapes])
    hashes = listed([b"0" * 32] * len(spans))
    counters = {"round": 4, "inner_steps": 80, "progress": 0.5, "optimiser_steps": 80, "meetings": 2, "last_met": 3}
    slow = Manifest(snapshot="one", norm=1.0, slow=hashes, **counters)
    for manifest, sections in ((slow, 1), (replace(slow, momentum=hashes, gathered=hashes), 3)):
        header, body = schema.pack(manifest)
        plan = schema.plan(header, sum(map(len, body)))
        assert sum(spec.size_bytes for _, spec in plan.slots()) == 32 * len(spans) * sections
    for span in spans:
        header, body = schema.pack(Piece(data=torch.zeros(span.size_bytes, dtype=torch.uint8)))
        schema.plan(header, sum(map(len, body)))
    with pytest.raises(ValueError, match=r"Piece\.data"):
        schema.pack(Piece(data=torch.zeros(max(span.size_bytes for span in spans) + 4, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"Manifest\.slow"):
        schema.pack(replace(slow, slow=listed([b"0" * 32] * (len(spans) + 1))))


# What is journalled.


def test_staleness_is_in_the_journal(tmp_path: Path) -> None:
    step = OuterStepTaken(
        round=3,
        partner="b",
        gap=0.1,
        staleness=2,
        bytes_sent=10,
        bytes_received=20,
        seconds=1.0,
        staleness_rounds=20,
        partner_staleness=1,
        adopted=True,
    )
    stale = PartnerTooStale(round=3, partner="a", partner_staleness=20, bytes_sent=20, bytes_received=10)
    with Journal(tmp_path / "journal.jsonl", now=lambda: 1.0) as written:
        written.write(step)
        written.write(stale)
    first, second = read(tmp_path / "journal.jsonl")
    assert isinstance(first, OuterStepTaken)
    assert (first.staleness_rounds, first.partner_staleness, first.adopted) == (20, 1, True)
    assert isinstance(second, PartnerTooStale)
    assert second.partner_staleness == 20
