"""Random schedules keep the invariants, and the invariants can fail: bugs put in on purpose are each found."""

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from msgspec import structs
from torch import Tensor

import gossip.rounds.meeting
import gossip.rounds.outer_optimiser
from benchmarks.structure.source import ROOT
from gossip.exchange.codec import Coded, OwnWeights
from gossip.exchange.messages import Acknowledge, Decline, DeclineReason, Propose
from gossip.exchange.swap import InfluenceBound
from gossip.interface import Conversation
from gossip.rounds.matching import AnswerState
from gossip.rounds.meeting import MeetingProtocol
from gossip.rounds.outer_optimiser import Step
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import OuterState
from gossip.settings import Format
from noloco_node.node.node import Node
from noloco_node.node.replica import Replica
from noloco_node.sim.hardware.priced_stage import PricedStage
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.scenario import Scenario, decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.swarm.stage_records import PeerTable
from pipeline.admission_window import Slot
from tests.explorer import distance_invariants
from tests.explorer.attack_kinds import KINDS
from tests.explorer.observation import InvariantBroken
from tests.explorer.scenario_file import scenario_text
from tests.explorer.schedule_generator import draw
from tests.explorer.search import ExploreResult, examine, replay, report, totals
from tests.explorer.shrink import shrink

pytestmark = pytest.mark.shared

SEEDS = (0, 1, 3, 4, 5, 7, 9, 10, 14, 18, 21, 25, 26, 28, 29, 31, 32, 33, 34, 38)
"""Half of the first forty, which evaluate every invariant, with every kind of fault, in two fifths of the time. More of
them run by `python -m tests.explorer`."""
MANY = 400
"""Seeds of which schedules are drawn, and do not run."""
FEW = 6
"""Seeds within which a bug must be found. A test begins with one that finds its bug soon."""


def first_broken(
    prepare: Callable[[Scenario], Scenario] = lambda scenario: scenario, first: int = 0
) -> InvariantBroken:
    for seed in range(first, first + FEW):
        result = examine(prepare(draw(seed)))
        if result.broken is not None:
            return result.broken
    raise AssertionError(f"not found within {FEW} seeds")


def blocking(scenario: Scenario) -> Scenario:
    return structs.replace(scenario, swarm=structs.replace(scenario.swarm, blocking=True))


def with_outer(scenario: Scenario, **fields: Any) -> Scenario:
    return structs.replace(scenario, swarm=structs.replace(scenario.swarm, **fields))


def patient(scenario: Scenario) -> Scenario:
    return structs.replace(scenario, swarm=structs.replace(scenario.swarm, impatient=False))


def on_a_good_network(scenario: Scenario) -> Scenario:
    """Without lost messages; where meetings break by chance, it takes more of them to complain."""
    return structs.replace(scenario, network=structs.replace(scenario.network, loss=0.0, duplicate=0.0))


# What must hold does.

LEAST = {
    "checked.adopted": 5,
    "checked.batch": 85,
    "checked.bound": 70_000,
    "checked.correction": 580,
    "checked.distance": 2100,
    "checked.evaluated": 20,
    "checked.failure": 1500,
    "checked.finite": 670,
    "checked.gone": 9,
    "checked.left": 4,
    "checked.meet": 170,
    "checked.pace": 1900,
    "checked.pair": 230,
    "checked.rest": 95,
    "checked.roster": 15_000,
    "checked.round": 100,
    "checked.rule": 580,
    "checked.slot": 11_000,
    "checked.talk": 300,
    "checked.unmatched": 6,
}
"""How often each invariant is really evaluated in all seeds, at least: one that is not looked at always holds.

About half of what there is, for what happens in a seed changes with every detail of a node.
"""


@cache
def examined(seed: int) -> ExploreResult:
    return examine(draw(seed))


@pytest.mark.parametrize("first", range(0, len(SEEDS), 5))
def test_random_schedules_keep_the_invariants(first: int) -> None:
    broken = {seed: examined(seed).broken for seed in SEEDS[first : first + 5]}
    assert {seed: str(each) for seed, each in broken.items() if each is not None} == {}


def test_random_schedules_evaluate_every_invariant() -> None:
    sums = totals(map(examined, SEEDS))
    assert {name for name in sums if name.startswith("checked.")} <= LEAST.keys()
    assert {name: sums.get(name, 0) for name, least in LEAST.items() if sums.get(name, 0) < least} == {}


def test_in_some_swarms_replicas_move() -> None:
    moving = [seed for seed in SEEDS if draw(seed).swarm.moves]
    assert len(SEEDS) / 10 <= len(moving) <= len(SEEDS) / 2
    assert sum(examined(seed).counts.get("moved", 0) for seed in moving) >= len(moving) / 2


def test_some_swarms_have_one_stage_and_in_some_peers_evaluate() -> None:
    drawn = [draw(seed).swarm for seed in range(MANY)]
    assert {swarm.stages for swarm in drawn} == {1, 3}
    assert 0.15 <= sum(swarm.stages == 1 for swarm in drawn) / len(drawn) <= 0.25
    assert 0.2 <= sum(swarm.evaluate_every_rounds is not None for swarm in drawn) / len(drawn) <= 0.3
    assert not any(swarm.moves for swarm in drawn if swarm.stages == 1)
    both = [seed for seed in SEEDS if draw(seed).swarm.stages == 1 and draw(seed).swarm.evaluate_every_rounds]
    assert sum(examined(seed).counts["checked.evaluated"] for seed in both)


def test_in_some_swarms_a_quarter_of_a_stage_or_less_is_hostile() -> None:
    hostile = {
        seed: attackers
        for seed in range(2 * MANY)
        if (attackers := [fault for fault in draw(seed).fault if isinstance(fault, faults.Hostile)])
    }
    assert 0.2 <= len(hostile) / (2 * MANY) <= 0.3
    assert {fault.how for attackers in hostile.values() for fault in attackers} == KINDS.keys()
    for seed, attackers in hostile.items():
        stages = [fault.peer[:2] for fault in attackers]
        assert len(set(stages)) == len(stages)
        assert draw(seed).swarm.replicas == 4
        assert not draw(seed).swarm.moves
    assert sum(examined(seed).counts["struck.hostile"] for seed in SEEDS if seed in hostile) >= 5


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {type(fault) for seed in SEEDS for fault in draw(seed).fault}
    # Churn is nothing but crashes, leaves and returns, which are drawn one by one.
    assert drawn == set(faults.Fault.__args__) - {faults.Churn}


@pytest.mark.parametrize("seed", [311, 483, 3368, 59, 5104, 185, 197, 262, 294, 329, 908, 1158, 3053])
def test_schedules_that_once_broke_hold(seed: int) -> None:
    """Sides of a meeting that the watcher did not match; the last two nodes of a run, each waiting for the other.

    Of one stage: a replica that did not see the end of the run, for it had met too few (1158), had begun the run anew
    while it was cut off (59), or had only been lent weights (5104); one whose partners
    died at once, and which doubts its own connection first (185); slow weights that travelled, rounded (the next four);
    a liar that ended the run before anybody had taken a step (908); receipts that a bound had forgotten (3053).
    Replicas that had missed a round, and took a liar's first weights (311).
    """
    assert examined(seed).broken is None


@given(seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_a_drawn_schedule_is_a_scenario_that_a_file_can_hold(seed: int) -> None:
    scenario = draw(seed)
    text = scenario_text(scenario)
    assert decode_scenario(text, "drawn") == scenario
    assert build_setup(scenario).peers


def test_a_replay_says_what_happened_and_the_same_in_every_process() -> None:
    other = subprocess.run(
        [sys.executable, "-m", "tests.explorer", "--replay", "28"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_S,
        check=True,
    ).stdout
    said: list[str] = []
    assert replay(draw(28), said.append) == 0
    assert "".join(f"{line}\n" for line in said) == other
    assert decode_scenario(said[0], "replayed") == draw(28)
    assert said[-1] == "all invariants held"
    assert any("outer_step" in line for line in said)


# What exploring found, and production does on purpose.

UNREACHABLE_DONOR = """
[swarm]
stages = 2
replicas = 2
rounds = 8
refresh_s = 2.0
duration_s = 400.0
[devices]
forward_s = 0.3
[[fault]]
kind = "line"
peer = "s1r1"
dials_only = true
at_s = 20.0
[[fault]]
kind = "silence"
peer = "s1r1"
at_s = 20.0
for_s = 15.0
[[fault]]
kind = "crash"
peer = "s1r0"
at_s = 40.0
[[fault]]
kind = "join"
peer = "late"
stage = 1
at_s = 41.0
"""


def test_a_newcomer_that_waits_for_a_donor_that_nobody_can_dial_is_excused_and_counted() -> None:
    """s1r1 goes on saying that it lives, and a newcomer rather waits for its weights than bring the first ones.

    Its silence breaks the streams that are open, by which it would be reached without a dial.
    """
    result = examine(decode_scenario(UNREACHABLE_DONOR, "here"))
    assert result.broken is None
    assert result.counts["excused"] == 1


# What must not hold is found.


def test_a_slot_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "give_back", lambda slot: None)
    assert first_broken(first=2).kind == "slot"


def test_an_answer_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody asked while its round is closed answers when it opens the next one."""
    answered = Rounds.serve

    async def serve(self: Rounds, conversation: Conversation) -> None:
        while not self.statistics()["open"]:
            await self._round_state.nap(None)
        await answered(self, conversation)

    monkeypatch.setattr(Rounds, "serve", serve)
    broken = first_broken(patient)
    assert broken.kind == "wait"
    assert "waited for an answer" in broken.sentence


def test_a_gate_shut_while_waiting_for_a_partner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocking form, but shut from the opening of the round: the partner's window needs what stands before it."""
    ran = Rounds.run

    def waits(rounds: Rounds) -> bool:
        statistics = rounds.statistics()
        return bool(statistics["open"] and not statistics["engaged"])

    async def run(self: Rounds) -> None:
        async def hold_shut() -> None:
            replica = self._optimiser._replica
            assert isinstance(replica, Replica)
            while True:
                await self._round_state.nap(None)
                if waits(self):
                    async with replica.admission.alone(1.0, math.inf):
                        await self._round_state.wait_while(lambda: waits(self), math.inf)

        async with asyncio.TaskGroup() as group:
            group.create_task(hold_shut())
            await ran(self)

    monkeypatch.setattr(Rounds, "run", run)
    broken = first_broken(blocking, first=9)
    assert broken.kind == "wait"
    assert "has begun a window and not ended it" in broken.sentence or "inner step" in broken.sentence


def test_a_momentum_that_is_not_carried_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = gossip.rounds.outer_optimiser.move

    def forgetful(state: OuterState, *rest: Any) -> OuterState:
        for momentum in state.momentum:
            momentum.zero_()
        return move(state, *rest)

    monkeypatch.setattr(gossip.rounds.outer_optimiser, "move", forgetful)
    broken = first_broken(lambda scenario: with_outer(scenario, alpha=0.5, momentum_period=1))
    assert broken.kind in {"pair", "rule"}


@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("codec", [Format.BFLOAT16, Format.INT8])
def test_a_correction_that_forgets_what_rounding_has_left_out_is_found(
    monkeypatch: pytest.MonkeyPatch, codec: Format, gamma: float | None
) -> None:
    """It starts from the exact snapshot, and what was not sent is lost."""
    mean = gossip.rounds.outer_optimiser._Work._mean

    def forgetful(self: Any, seen: Any, weights: OwnWeights, number: int, at: slice, *memory: Tensor) -> Any:
        found, sent = mean(self, seen, weights, number, at, *memory)
        return found, weights.read(number, at, torch.empty_like(self._near)) if seen is self._fast else sent

    monkeypatch.setattr(gossip.rounds.outer_optimiser._Work, "_mean", forgetful)
    broken = first_broken(lambda scenario: with_outer(scenario, codec=codec, gamma=gamma))
    assert broken.kind == "rule"
    assert "fast weights" in broken.sentence


def test_a_momentum_that_survives_adoption_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = gossip.rounds.outer_optimiser._adopt

    def clinging(theirs: Coded, state: OuterState, *rest: Any) -> OuterState:
        momentum = tuple(m.clone() for m in state.momentum)
        return adopt(theirs, state, *rest)._replace(momentum=momentum)

    monkeypatch.setattr(gossip.rounds.outer_optimiser, "_adopt", clinging)
    broken = first_broken(lambda scenario: with_outer(scenario, staleness_at_most=1), first=9)
    assert broken.kind == "rule"
    assert "kept its momentum" in broken.sentence


def test_a_roster_that_never_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = PeerTable.take

    def never_forget(self: PeerTable, *news: Any) -> None:
        before = dict(self._entries)
        taken(self, *news)
        self._entries = {
            peer: msgspec.structs.replace(entry, believed=True) for peer, entry in (before | self._entries).items()
        }
        self._believed = None

    monkeypatch.setattr(PeerTable, "take", never_forget)
    assert first_broken(first=2).kind == "roster"


def test_a_peer_that_is_deaf_to_leave_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Node.live
    monkeypatch.setattr(Node, "live", lambda node, leave: live(node, asyncio.Event()))
    assert "was asked to leave" in first_broken(first=3).sentence


def test_a_correction_that_is_not_applied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PricedStage, "correct", lambda stage, delta: None)
    broken = first_broken()
    assert broken.kind == "rule"
    assert "fast weights" in broken.sentence


def test_a_last_receipt_that_is_never_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asked steps and says nothing; the asker gives up and says nothing either."""
    monkeypatch.setattr(gossip.rounds.meeting, "conclude", _conclude_without_last_word)
    monkeypatch.setattr(MeetingProtocol, "_lose", lambda meetings, *_: meetings._round_state.end_meeting())
    broken = first_broken(first=2)
    assert broken.kind == "pair"
    assert "neither stepped nor lost the exchange" in broken.sentence


async def _conclude_without_last_word(
    conversation: Conversation, commit: Callable[[], Awaitable[None]], *, asked: bool
) -> None:
    if not asked:
        await conversation.send(Acknowledge())
    await conversation.receive()
    await commit()


def hopes(standing: AnswerState, sender: str, offer: Propose) -> Decline:
    return Decline(reason=DeclineReason.HOPING, retry_after_s=1.0, round=standing.round)


async def asks_nobody(self: Rounds) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [(gossip.rounds.meeting, "answer", hopes), (Rounds, "run", asks_nobody)],
    ids=["hopes", "silent"],
)
def test_a_swarm_in_which_nobody_meets_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: object
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert first_broken(on_a_good_network).kind == "meet"


# What hostile peers could do is found.

ONE_ATTACK = (ROOT / "tests/explorer/one_attack.toml").read_text()


def attacked(how: str) -> ExploreResult:
    return examine(decode_scenario(ONE_ATTACK.replace('how = "old"', f'how = "{how}"'), "here"))


def test_weights_that_are_believed_whatever_they_are_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InfluenceBound, "share", lambda *_, **__: 1.0)
    broken = attacked("flipped").broken
    assert broken.kind == "distance"


compared_with = cache(distance_invariants.clean_distances)
"""The run without an attack is the same beside each of them."""


@pytest.mark.parametrize("how", ["ends", "flood", "noise", "not finite", "rounds", "wrong size"])
def test_a_hostile_replica_of_four_does_bounded_harm(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance_invariants, "clean_distances", compared_with)
    result = attacked(how)
    assert result.broken is None
    assert result.counts["struck.hostile"] == 1
    assert result.counts["deceived"] == 0


NEWCOMER = """
[[fault]]
kind = "join"
peer = "late1"
stage = 1
at_s = 12.0
"""


def test_a_newcomer_replaces_what_a_liar_gave_it_once_for_each_lie() -> None:
    """The loss of its first microbatches tells it: of those that began with these weights, none that came after."""
    told: list[str] = []
    text = ONE_ATTACK.replace("rounds = 6", "rounds = 8\nblocking = true\ninner_steps_per_round = 3\noverlap_steps = 1")
    text = text.replace("microbatches_per_step = 2", "microbatches_per_step = 4\nstaleness_at_most = 2") + NEWCOMER
    result = examine(decode_scenario(text.replace('"old"', '"flipped"'), "here"), told.append)
    assert result.broken is None
    assert any("late1 catch_up: what done" in line and "donor s1r3" in line for line in told)
    taken = sum("late1 outer_step" in line and "partner s1r3" in line and "adopted True" in line for line in told)
    assert sum("late1 disowned" in line for line in told) == 1 + taken


# What is found is said.


def test_a_violation_is_reported_with_a_shorter_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = gossip.rounds.outer_optimiser.take_step
    monkeypatch.setattr(
        gossip.rounds.outer_optimiser, "take_step", lambda step, *rest: take_step(Step(step.snapshot), *rest)
    )
    said: list[str] = []
    report(examine(draw(1)), said.append)
    assert "breaks an invariant" in said[0]
    assert "pair, at" in said[0] or "rule, at" in said[0]
    shorter = decode_scenario(next(text for text in said if "[swarm]" in text), "reported")
    assert len(shorter.fault) == 0, "it takes no fault at all to see this one"
    assert said[-1] == "Replay: python -m tests.explorer --replay 1"


def test_shrinking_keeps_what_matters() -> None:
    drawn = (draw(seed) for seed in range(100))
    scenario, crash = next(
        (scenario, fault)
        for scenario in drawn
        for fault in scenario.fault
        if len(scenario.fault) > 8 and isinstance(fault, faults.Crash) and scenario.network.loss
    )
    shorter = shrink(scenario, lambda candidate: crash in candidate.fault)
    assert shorter.fault == (crash,)
    assert shorter.network.loss == 0.0
