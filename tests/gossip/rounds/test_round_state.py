"""The state of a round: which transitions there are, and whom they wake."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_gossip import ToySettings, at_once

from gossip.interface import Candidate, Origin, OuterStepTaken, RoundContext
from gossip.rounds.outer_optimiser import Snapshot, Step
from gossip.rounds.round_state import (
    Closed,
    Correcting,
    InMeeting,
    Open,
    PendingCorrection,
    PendingStep,
    Phase,
    RoundState,
    Stepping,
)
from gossip.rule.outer_step import DISOWNED, OuterState

WEIGHTS = (torch.zeros(2),)
STATE = OuterState(WEIGHTS, WEIGHTS)
PENDING = PendingStep(Step(WEIGHTS), 0, OuterStepTaken(round=1, seconds=0.0), last_met=1)
SNAPSHOT = Snapshot(WEIGHTS, 0)


def closed(
    partners: Callable[[], tuple[Candidate, ...]] = lambda: (Candidate("b", 0), Candidate("c", 0)),
) -> RoundState:
    def nobody(peer: str) -> None:
        raise AssertionError(f"{peer} was dialled")

    context = RoundContext(seed=1, compute=at_once, partners=partners, converse=nobody, record=nobody)
    return RoundState("a", ToySettings(seed=1, alpha=0.5, beta=0.7, gamma=0.7), Origin(STATE), context)


def opened() -> RoundState:
    state = closed()
    state.begin_round(last=False)
    state.open(SNAPSHOT)
    return state


def in_meeting() -> RoundState:
    state = opened()
    state.engage("b", 1)
    return state


async def take(pending: PendingStep) -> None:
    """Take no time; the test says itself that the step is computed."""


def stepping() -> RoundState:
    state = in_meeting()
    state.step(PENDING, take)
    return state


def stepped() -> RoundState:
    state = stepping()
    state.correct_later(WEIGHTS)
    return state


def correcting() -> RoundState:
    state = stepped()
    state.take_correction()
    return state


PHASES: dict[type[Phase], Callable[[], RoundState]] = {
    Closed: closed,
    Open: opened,
    InMeeting: in_meeting,
    Stepping: stepping,
    PendingCorrection: stepped,
    Correcting: correcting,
}
TRANSITIONS: dict[str, Callable[[RoundState], object]] = {
    "open": lambda state: state.open(SNAPSHOT),
    "engage": lambda state: state.engage("b", 1),
    "end_meeting": RoundState.end_meeting,
    "step": lambda state: state.step(PENDING, take),
    "correct_later": lambda state: state.correct_later(WEIGHTS),
    "take_correction": RoundState.take_correction,
    "finish": lambda state: state.finish(1, last_met=1),
    "close": RoundState.close,
    "leave": RoundState.leave,
}
LEADS: dict[str, dict[type[Phase], type[Phase]]] = {
    "open": {Closed: Open, Open: Open, InMeeting: InMeeting},
    "engage": {Open: InMeeting},
    "end_meeting": {InMeeting: Open},
    "step": {Closed: Stepping, InMeeting: Stepping},
    "correct_later": {Stepping: PendingCorrection},
    "take_correction": {PendingCorrection: Correcting},
    "finish": {Correcting: Closed},
    "close": {Closed: Closed, Open: Closed, InMeeting: Closed},
    "leave": {
        Closed: Closed,
        Open: Closed,
        InMeeting: Closed,
        Stepping: Stepping,
        PendingCorrection: PendingCorrection,
        Correcting: Correcting,
    },
}
_LEADS_TO: dict[type[Phase], tuple[type[Phase], ...]] = {
    Stepping: (Closed, InMeeting),
    PendingCorrection: (Stepping,),
    Correcting: (PendingCorrection,),
}
WAKES = ("open", "end_meeting", "step", "finish", "leave")


async def woken(state: RoundState, change: Callable[[RoundState], object]) -> bool:
    """Change the state beside somebody who waits, and say whether that wakes."""
    waiter = asyncio.create_task(state.nap(None))
    await asyncio.sleep(0)
    change(state)
    for _ in range(3):
        await asyncio.sleep(0)
    done = waiter.done()
    waiter.cancel()
    return done


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_each_transition_leads_where_it_should_or_raises(phase: type[Phase], name: str) -> None:
    state = PHASES[phase]()
    before = state.phase
    target = LEADS[name].get(phase)
    if target is None:
        with pytest.raises(RuntimeError, match=f"{name} of a round that is {phase.__name__}"):
            TRANSITIONS[name](state)
        assert state.phase is before
        return
    assert await woken(state, TRANSITIONS[name]) == (name in WAKES)
    assert type(state.phase) is target


async def test_an_outer_step_wakes_and_counts() -> None:
    state = stepping()
    assert (state.schedule.finished, state.slow_age) == (0, (0, 0))
    state.correct_later(WEIGHTS)
    assert (state.schedule.finished, state.slow_age) == (0, (1, 1)), "others learn of it with the correction"
    pending = state.take_correction()
    assert (pending.correction, pending.snapshot_step, pending.event) == (WEIGHTS, 0, PENDING.event)
    assert (state.schedule.finished, state.slow_age, state.settled) == (0, (1, 1), False)
    assert await woken(state, lambda state: state.finish(1, last_met=1))
    assert state.schedule.finished == state.last_met == 1
    assert state.slow_age == (1, 1)
    assert list(state.met_partners) == ["b"]


@pytest.mark.parametrize("adopted", [True, False])
async def test_disowned_weights_are_worth_nothing_until_others_replace_them(adopted: bool) -> None:
    state = in_meeting()
    state.disown()
    state.step(PENDING._replace(event=replace(PENDING.event, adopted=adopted)), take)
    state.correct_later(WEIGHTS)
    assert not state.owns, "the fast weights are still the old ones"
    assert state.slow_age == (1, 1 if adopted else DISOWNED)
    pending = state.take_correction()
    state.finish(1, pending.last_met, adopted=adopted)
    assert state.owns == adopted


@given(st.lists(st.sampled_from((*TRANSITIONS, "refuse_proposals", "ask")), max_size=40))
async def test_no_sequence_of_events_breaks_the_invariants(events: list[str]) -> None:
    others: dict[str, Callable[[RoundState], object]] = {
        "refuse_proposals": RoundState.refuse_proposals,
        "ask": lambda state: state.ask("c"),
    }

    state = closed()
    for event in events:
        before, left = state.phase, state.leaving
        try:
            (TRANSITIONS | others)[event](state)
        except RuntimeError:
            assert state.phase is before, "what is refused changes nothing"
        phase = state.phase
        assert state.is_open == isinstance(phase, Open | InMeeting)
        assert state.is_free == (state.is_open and state.meeting is None)
        assert state.is_open or (state.snapshot is None and state.meeting is None)
        assert state.leaving or not left, "nobody comes back"
        if left:
            assert state.is_open <= isinstance(before, Open | InMeeting), "who leaves opens nothing"
        assert state.settled != isinstance(phase, Stepping | PendingCorrection | Correcting)
        assert not (state.between_rounds and (state.is_open or not state.settled))
        assert (state.step_task is not None) == isinstance(phase, Stepping)
        if not state.settled:
            assert type(before) in (type(phase), *_LEADS_TO[type(phase)]), "no step is lost, or taken twice"
        answer_state = state.answer_state("b")
        assert (answer_state.open, answer_state.engaged) == (state.is_open, state.meeting is not None)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 64))
async def test_a_round_fraction_is_that_of_the_steps_since_the_last_outer_step(
    held: int, more: int, of_fastest: int
) -> None:
    """Met or alone: both begin the pseudo-gradient anew."""
    state = closed()
    state.schedule.tick(held + more, 1.0, of_fastest=of_fastest)
    state.slow_steps = held
    assert state.round_fraction == min(1.0, max(1, more) / of_fastest)
    state.slow_steps = None
    assert state.round_fraction == 1.0, "not known: the bound is as tight as for a whole round"


async def test_proposals_are_remembered_until_our_step() -> None:
    state = closed()
    for peer in ("c", "a stranger"):
        state.note_proposal(peer)
    for skipped in (False, True):
        if skipped:
            state.close()
        state.begin_round(last=False)
        state.open(SNAPSHOT)
        assert state.queue.next(["b", "a stranger", "c"], 0.0) == ("c", 0.0)
    state.engage("b", 1)
    state.step(PENDING, take)
    assert state.queue.next(["b", "a stranger", "c"], 0.0) == ("b", 0.0)


class Held(NamedTuple):
    """A round state that "b" holds up, in a meeting or with an answer, the time, and who else is there."""

    state: RoundState
    clock: list[float]
    others: list[str]

    def lose(self, how: str, lost_s: float, *, forgive: str = "") -> None:
        """Lose so much time; we learn `before` or `after` the loss is noted that we were away ourselves."""
        since_s = self.clock[0]
        meeting = self.state.engage("b", 1) if how == "meeting" else None
        self.clock[0] += lost_s
        if forgive == "before":
            self.state.queue.forgive(self.clock[0])
        if meeting is None:
            self.state.note_silence("b", since_s, math.inf, "silent")
        else:
            self.state.end_meeting()
            self.state.note_vain_meeting(meeting)
        if forgive == "after":
            self.state.queue.forgive(self.clock[0])

    def reopen(self) -> None:
        self.state.close()
        self.state.begin_round(last=False)
        self.state.open(SNAPSHOT)

    @property
    def left_alone(self) -> bool:
        """Whether "b" is not asked now."""
        return self.state.queue.next(["b"], self.clock[0])[0] is None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    clock, others = [1000.0], ["b", "c"]
    monkeypatch.setattr("gossip.rounds.round_state.now", lambda: clock[0])
    state = closed(lambda: tuple(Candidate(each, 0) for each in others))
    state.begin_round(last=False)
    state.open(SNAPSHOT)
    return Held(state, clock, others)


ways = pytest.mark.parametrize("how", ["meeting", "answer"])


@ways
@pytest.mark.parametrize("forgive", ["", "before", "after"])
async def test_our_own_standstill_accuses_no_partner(held: Held, how: str, forgive: str) -> None:
    held.lose(how, 300.0, forgive=forgive)
    held.reopen()
    assert held.left_alone == (not forgive)
    assert held.state.answer_state("b").had == (not forgive and how == "meeting")


@ways
async def test_a_partner_that_has_become_the_only_one_is_met(held: Held, how: str) -> None:
    held.lose(how, 300.0)
    held.others.remove("c")
    assert not held.state.answer_state("b").had
    held.reopen()
    assert not held.left_alone


@ways
async def test_a_meeting_with_a_step_ends_the_time_for_which_a_partner_is_left_alone(held: Held, how: str) -> None:
    held.lose(how, 300.0)
    held.state.engage("b", 1)
    held.state.step(PENDING, take)
    held.state.correct_later(WEIGHTS)
    held.state.take_correction()
    held.state.finish(1, last_met=1)
    held.reopen()
    assert not held.left_alone
    assert not held.state.answer_state("b").had


async def test_a_shorter_loss_does_not_shorten_the_time_for_which_a_peer_is_left_alone(held: Held) -> None:
    held.lose("answer", 300.0)
    held.lose("answer", 0.1)
    held.clock[0] += 2900.0
    assert held.left_alone
