"""What a newcomer or a restarted replica carries on, and first losses."""

import math
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import Toy, ToySettings, World

from gossip.exchange.messages import Manifest, Piece, ReplicaState
from gossip.interface import Origin
from gossip.rule.outer_step import ROUND_BOUND, OuterState, WeightAge
from gossip.transfer.chunks import cut, listed
from noloco_node.journal import events as journal_events
from noloco_node.network import wire
from noloco_node.run.protocols import state_schema
from noloco_node.sim.clock import run as simulated
from noloco_node.sim.hardware.quadratic_model import SIZE, QuadraticModel
from noloco_node.state_sync.starting_state import (
    FAR,
    JUDGED,
    JUDGEMENTS,
    LEAST_OTHERS,
    StartingLoss,
    StartingState,
    StartingWeights,
    from_checkpoint,
    from_donor,
    is_recent_enough,
    started,
)
from noloco_node.storage.checkpoint import Checkpoint, Counters, load_latest, save

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
    model, donor = QuadraticModel(0), state_of_donor()
    origin = from_donor(model, donor).origin
    assert same(origin.state, OuterState(donor.slow, donor.momentum, donor.gathered, 2))
    assert (origin.rounds, origin.inner_steps, origin.last_met) == (4, 80, 3)


def checkpoint(fast: tuple[Tensor, ...], gathered: tuple[Tensor, ...] = (), **told: Any) -> Checkpoint:
    usual = {"run_id": "run", "stage": 0, "round": 4, "inner_steps": 80, "progress": 0.5, "samples": 1}
    moments = (torch.zeros(SIZE), torch.zeros(SIZE))
    tensors = {"slow": drawn(1), "momentum": drawn(2), "gathered": gathered, "fast": fast, "optimiser": moments}
    return Checkpoint(Counters(**usual, optimiser_steps=80, **told), tensors)


@pytest.mark.parametrize("meetings", [0, 2])
def test_a_checkpoint_keeps_the_momentum_period_and_the_last_meeting(tmp_path: Path, meetings: int) -> None:
    gathered = drawn(3) if meetings else ()
    save(tmp_path, checkpoint(drawn(4), gathered, meetings=meetings, last_met=3))
    loaded = load_latest(tmp_path, "run")
    assert loaded is not None
    origin = from_checkpoint(QuadraticModel(0), loaded).origin
    assert same(origin.state, OuterState(drawn(1), drawn(2), gathered, meetings))
    assert origin.last_met == 3


def test_a_checkpoint_from_before_starts_a_period_and_is_not_stale() -> None:
    origin = from_checkpoint(QuadraticModel(0), checkpoint(drawn(4))).origin
    assert (origin.state.gathered, origin.state.meetings, origin.last_met) == ((), 0, 4)


def test_a_checkpoint_from_between_two_rounds_says_that_its_slow_weights_lack_steps() -> None:
    def gathered(**told: int) -> bool:
        return from_checkpoint(QuadraticModel(0), checkpoint(drawn(4), **told)).origin.gathered

    assert gathered(slow_steps=80), "a lossy codec leaves its rounding errors in the fast weights"
    assert not gathered(slow_steps=79)
    assert not gathered(), "an earlier version did not note it"
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


@given(st.integers(0, 100), st.lists(st.integers(0, 100), min_size=1, max_size=7), st.integers(1, 20))
def test_a_checkpoint_will_do_if_it_is_a_few_rounds_behind_at_most(own: int, rounds: list[int], stale: int) -> None:
    middle = sorted(rounds)[(len(rounds) - 1) // 2]
    assert is_recent_enough(own, rounds, stale) == (middle - own <= min(4, stale))


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
        head, *body = wire.encode(manifest, schema)
        assert sum(map(len, body)) == 32 * len(spans) * sections
        wire.read_header(schema, bytes(head[13:]), sum(map(len, body)))
    for span in spans:
        head, *body = wire.encode(Piece(data=torch.zeros(span.size_bytes, dtype=torch.uint8)), schema)
        wire.read_header(schema, bytes(head[13:]), sum(map(len, body)))
    with pytest.raises(ValueError, match=r"Piece\.data"):
        wire.encode(Piece(data=torch.zeros(max(span.size_bytes for span in spans) + 4, dtype=torch.uint8)), schema)
    with pytest.raises(ValueError, match=r"Manifest\.slow"):
        wire.encode(replace(slow, slow=listed([b"0" * 32] * (len(spans) + 1))), schema)


USUAL = 3.0
honest = st.floats(USUAL / FAR**0.4, USUAL * FAR**0.4)


@given(
    st.lists(honest, min_size=JUDGED, max_size=2 * JUDGED),
    st.lists(honest, min_size=2 * LEAST_OTHERS, max_size=20),
    st.lists(st.sampled_from([0.0, -1.0, 1e9]), max_size=LEAST_OTHERS - 1),
    st.lists(st.sampled_from([20.0, math.inf, math.nan]), max_size=JUDGED // 2 - 1),
)
def test_honest_weights_are_kept_whatever_few_liars_and_few_bad_routes_say(
    losses: list[float], others: list[float], lies: list[float], bad: list[float]
) -> None:
    assert StartingLoss(judges=True).failed([*losses, *bad], [*others, *lies]) is None


@pytest.mark.parametrize("loss", [USUAL * FAR * 1.01, 200.0, math.inf, math.nan])
def test_weights_that_are_far_worse_fail_and_not_for_ever(loss: float) -> None:
    start, others = StartingLoss(judges=True), [USUAL] * LEAST_OTHERS
    for _ in range(JUDGEMENTS):
        assert start.failed([loss] * (JUDGED - 1), others) is None
        found = start.failed([loss], others)
        assert found[1] == USUAL
        told = journal_events.Disowned(stage=0, round=1, loss=found[0], usual=found[1])
        assert journal_events.decode(msgspec.json.encode(journal_events.fields_of(told))) == told
    for _ in range(3):
        assert start.failed([loss] * JUDGED, others) is None


def test_once_weights_have_passed_they_are_not_judged_again() -> None:
    start, others = StartingLoss(judges=True), [USUAL] * LEAST_OTHERS
    assert start.failed([USUAL] * JUDGED, others) is None
    assert start.failed([200.0] * JUDGED, others) is None


@given(st.lists(st.floats(2.0 * USUAL * FAR, 100.0), min_size=3 * JUDGED, max_size=10 * JUDGED), st.integers(1, 5))
def test_what_a_replica_lost_before_others_were_known_is_not_held_against_it(before: list[float], window: int) -> None:
    """A small run may go on for weeks until others come, and its loss falls meanwhile."""
    start, few = StartingLoss(judges=True), [USUAL] * (LEAST_OTHERS - 1)
    for loss in [*before, *[USUAL] * JUDGED]:
        assert start.failed([loss], few) is None
    assert start.failed([USUAL] * window, [USUAL] * LEAST_OTHERS) is None
    assert not start.judges


def test_nobody_is_judged_by_few_or_in_a_run_that_begins() -> None:
    few = StartingLoss(judges=True)
    assert few.failed([200.0] * JUDGED, [USUAL] * (LEAST_OTHERS - 1)) is None
    assert few.failed([], [USUAL] * LEAST_OTHERS) is not None
    assert StartingLoss(judges=False).failed([200.0] * JUDGED, [USUAL] * LEAST_OTHERS) is None


@pytest.mark.parametrize("ahead", [0, ROUND_BOUND, ROUND_BOUND + 1])
@pytest.mark.parametrize("last_met", [0, 1])
@pytest.mark.parametrize("loss", [USUAL, 200.0])
async def test_weights_with_which_a_replica_began_while_it_was_cut_off_are_disowned(
    ahead: int, last_met: int, loss: float
) -> None:
    """They have met nobody's, the others are rounds ahead, and lose far less. Few others, or liars, do not suffice."""
    disowned = []
    rounds = SimpleNamespace(
        finished=2, slow_age=WeightAge(2, last_met), disowned=False, disown=lambda: disowned.append(True)
    )
    began = StartingState(origin=Origin(OuterState(())))
    weights = StartingWeights(began, cast(Any, rounds), staleness_at_most=16)
    others, honest, liars = [USUAL] * LEAST_OTHERS, [2 + ahead] * 2, [2**40]
    assert weights.failed([loss] * JUDGED, others, []) is None, "nobody is known yet"
    assert weights.failed([loss] * JUDGED, others[1:], honest + liars) is None
    found = weights.failed([loss] * JUDGED, others, honest + liars)
    far = ahead > ROUND_BOUND and not last_met and loss > USUAL
    assert found == ((loss, USUAL) if far else None)
    assert bool(disowned) == far
    for _ in range(JUDGEMENTS + 1):
        weights.failed([loss] * JUDGED, others, honest + liars)
    assert len(disowned) <= JUDGEMENTS
