"""The time by which records expire: ours while half of the others agree, else theirs, whatever sets our clock."""

import math
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.network.swarm_clock import CLOCK_DOUBT_S, LEAST_TOLD, MOST_TOLD, TOLD_S, SwarmClock

TODAY_S = 1.8e9
ERRORS_S = st.floats(-1e9, 1e9)
SMALL_S = st.floats(-20.0, 20.0)


class Machine:
    """A machine that has run for an hour, and whose time of day is wrong by `error_s`."""

    def __init__(self, error_s: float = 0.0) -> None:
        self.error_s, self.now_s = error_s, 3600.0
        self.clock = SwarmClock(lambda: TODAY_S + self.now_s + self.error_s, lambda: self.now_s)

    def hear(self, peer: str, error_s: float = 0.0, *, is_door: bool = False) -> None:
        """Hear a peer whose time of day is wrong by so much."""
        self.clock.note(peer, TODAY_S + self.now_s + error_s, is_door=is_door)

    @property
    def wrong_s(self) -> float:
        return self.clock.unix_s() - TODAY_S - self.now_s


@given(ERRORS_S, st.lists(SMALL_S, min_size=1, max_size=9), st.lists(ERRORS_S, max_size=8), st.randoms())
def test_no_clock_matters_but_those_of_most_peers(
    own_s: float, honest_s: list[float], liars_s: list[float], order: object
) -> None:
    machine = Machine(own_s)
    told = [*honest_s, *liars_s[: len(honest_s) - 1]]
    order.shuffle(told)
    for number, error_s in enumerate(told):
        machine.hear(f"peer {number}", error_s, is_door=True)
    # A clock that is nearly right may count itself.
    assert abs(machine.wrong_s) <= 20.0 + CLOCK_DOUBT_S
    assert machine.clock.ahead_s() == pytest.approx(own_s - machine.wrong_s, abs=1e-3)


@given(st.lists(ERRORS_S, min_size=1, max_size=5))
def test_liars_move_nobody_for_whom_half_agree(liars_s: list[float]) -> None:
    machine = Machine()
    for number, error_s in enumerate(liars_s):
        machine.hear(f"honest {number}")
        machine.hear(f"liar {number}", error_s)
    assert machine.wrong_s == pytest.approx(0.0, abs=1e-3)


@given(st.lists(ERRORS_S, max_size=5), SMALL_S)
def test_a_clock_that_is_set_while_others_answer_changes_nothing(sets_s: list[float], other_s: float) -> None:
    machine = Machine()
    machine.hear("other", other_s)
    for machine.error_s in sets_s:
        assert machine.wrong_s == pytest.approx(0.0, abs=1e-3)  # at once, too
        machine.clock.settle()
        assert abs(machine.wrong_s) <= CLOCK_DOUBT_S
        machine.hear("other", other_s)
        assert abs(machine.wrong_s) <= CLOCK_DOUBT_S
        machine.clock.settle()
        machine.error_s = 0.0
        machine.clock.settle()


@given(ERRORS_S, st.lists(ERRORS_S, max_size=LEAST_TOLD - 1))
def test_few_strangers_move_nobody(own_s: float, others_s: list[float]) -> None:
    machine = Machine(own_s)
    for number, error_s in enumerate(others_s):
        machine.hear(f"stranger {number}", error_s)
    assert machine.clock.ahead_s() == pytest.approx(0.0, abs=1e-3)
    machine.error_s += 3600.0
    if not others_s:
        assert machine.clock.ahead_s() == pytest.approx(0.0, abs=1e-3), "it was set right, as far as we know"


@given(ERRORS_S, st.lists(ERRORS_S, max_size=5), st.booleans())
def test_too_few_to_decide_dispute_a_clock_with_which_none_of_them_agrees(
    own_s: float, others_s: list[float], is_door: bool
) -> None:
    machine = Machine(own_s)
    for number, error_s in enumerate(others_s):
        machine.hear(f"stranger {number}", error_s, is_door=is_door)
    ahead_s, decide = [own_s - each for each in others_s], is_door or len(others_s) >= LEAST_TOLD
    if not others_s or decide or min(map(abs, ahead_s)) < CLOCK_DOUBT_S - 1e-3:
        assert machine.clock.disputed_s() == 0.0
    elif min(map(abs, ahead_s)) > CLOCK_DOUBT_S + 1e-3:
        assert machine.clock.disputed_s() == pytest.approx(min(ahead_s), abs=1e-3)


@given(ERRORS_S, ERRORS_S)
def test_what_was_decided_stays_while_nobody_answers(own_s: float, other_s: float) -> None:
    machine = Machine(own_s)
    machine.hear("gone", other_s, is_door=True)
    before_s = machine.wrong_s
    machine.now_s += TOLD_S
    machine.clock.settle()
    assert machine.wrong_s == pytest.approx(before_s, abs=1e-3)


@given(ERRORS_S)
def test_one_wrong_clock_does_not_spread(error_s: float) -> None:
    """Each peer joins by the first, whose first neighbour is wrong. Each tells its own time, not what it adopted."""
    machines = [Machine(), Machine(error_s)]
    for _ in range(6):
        machines.append(machine := Machine())
        machine.hear("0", machines[0].clock.own_s() - TODAY_S - machine.now_s, is_door=True)
        for each in machines:
            for number, other in enumerate(machines):
                if other is not each:
                    each.hear(str(number), other.clock.own_s() - TODAY_S - each.now_s)
    for machine in machines:
        assert abs(machine.wrong_s) <= CLOCK_DOUBT_S
        assert machine.clock.earliest_s() - TODAY_S - machine.now_s <= CLOCK_DOUBT_S


def test_answers_are_few_and_those_that_are_no_time_do_not_count() -> None:
    machine = Machine()
    for nonsense in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300):
        machine.clock.note("liar", nonsense)
    assert machine.wrong_s == 0.0
    for number in range(10 * MOST_TOLD):
        machine.hear(f"early {number}", 1e6)
    for number in range(MOST_TOLD):
        machine.hear(f"late {number}")
    assert len(machine.clock._told) == MOST_TOLD
    assert machine.wrong_s == pytest.approx(0.0, abs=1e-3)


def test_peers_in_threads_of_one_program_hear_at_the_same_time() -> None:
    clock, troubles = Machine().clock, list[Exception]()

    def hear(name: str) -> None:
        try:
            for number in range(2000):
                clock.note(f"{name} {number}", TODAY_S)
        except Exception as error:
            troubles.append(error)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=hear, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_s)
    assert not troubles
