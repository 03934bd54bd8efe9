"""Retries at the next stage: each kind of answer, what it costs, and who is accused."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
import torch

from pipeline.messages import Gradient, Microbatch, Reason, Refused, Reply
from pipeline.next_stage import ATTEMPTS, PATIENCE_S, Expired, NextStage, NextStageClient, Wanted, within
from pipeline.routing import MOST_KNOWN, TIMES_COST, Hop, HopTotals

HIDDEN = torch.zeros(1, 2, 3)
MICROBATCH = Microbatch(hidden=HIDDEN, targets=torch.zeros(1, 2, dtype=torch.int64), progress=0.1, budget_s=100.0)
GRADIENT = Gradient(hidden=HIDDEN, loss=1.0, tokens=2)
UNREACHABLE, GIVEN_UP, BROKEN = ConnectionRefusedError(), ConnectionAbortedError(), ConnectionResetError()

Answer = Reply | ConnectionError
Script = Callable[[str, int], Answer]
"""What a peer answers to the n-th call that it gets, from 0."""


class Peers:
    """The next stage: scripted peers that take a second each to answer, and a note of who was called when."""

    def __init__(self, names: str, script: Script) -> None:
        self.hops = [Hop(name) for name in names]
        self.calls: list[tuple[str, float]] = []
        self.budgets: list[float] = []
        self._script, self._answered = script, Counter[str]()
        self.downstream = NextStage(NextStageClient(hops=lambda: self.hops, call=self.call), Random("downstream"))

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        self.calls.append((peer, asyncio.get_running_loop().time()))
        self.budgets.append(microbatch.budget_s)
        count, self._answered[peer] = self._answered[peer], self._answered[peer] + 1
        await asyncio.sleep(1.0)
        answer = self._script(peer, count)
        if isinstance(answer, ConnectionError):
            raise answer
        return answer

    async def ask(self, budget_s: float = 100.0) -> Reply:
        deadline_s = asyncio.get_running_loop().time() + budget_s
        try:
            return await within(deadline_s, self.downstream.ask(MICROBATCH, deadline_s))
        except Expired:
            return Refused(reason=Reason.EXPIRED)

    async def ask_together(self) -> list[str]:
        """Ask twelve times at once; return the peers that this called."""
        begun = len(self.calls)
        await asyncio.gather(*(self.ask() for _ in range(12)))
        return self.called[begun:]

    @property
    def called(self) -> list[str]:
        return [peer for peer, _ in self.calls]


@pytest.mark.parametrize(
    ("answer", "kind", "accused"),
    [
        (UNREACHABLE, "lost_unreachable", True),
        (GIVEN_UP, "lost_given_up", True),
        (BROKEN, "lost_broken", False),
        (BrokenPipeError(), "lost_broken", False),
        (Refused(reason=Reason.FULL, retry_after_s=5.0), "refused_full", False),
        (Refused(reason=Reason.GOSSIPING, retry_after_s=5.0), "refused_gossiping", False),
        (Refused(reason=Reason.LEAVING), "refused_leaving", False),
        (Refused(reason=Reason.NO_ROUTE, retry_after_s=5.0), "refused_no_route", False),
        (Gradient(hidden=None, loss=1.0, tokens=2), "lost_given_up", True),
        (Gradient(hidden=torch.zeros(2, 2, 3), loss=1.0, tokens=2), "lost_given_up", True),
        (Gradient(hidden=HIDDEN, loss=math.nan, tokens=2), "lost_given_up", True),
        (Gradient(hidden=HIDDEN, loss=1.7e308, tokens=2), "lost_given_up", True),
        (Gradient(hidden=HIDDEN, loss=1.0, tokens=0), "lost_given_up", True),
        (Gradient(hidden=HIDDEN, loss=1.0, tokens=3), "lost_given_up", True),
    ],
)
async def test_another_replica_takes_what_one_did_not(answer: Answer, kind: str, accused: bool) -> None:
    first: list[str] = []

    def script(peer: str, _: int) -> Answer:
        first.append(peer)
        return answer if peer == first[0] else GRADIENT

    peers = Peers("ab", script)
    assert await peers.ask() is GRADIENT
    assert asyncio.get_running_loop().time() == 2.0, "at once: the output is still here"
    assert peers.called in (["a", "b"], ["b", "a"])
    assert peers.downstream.suspects == (frozenset(first[:1]) if accused else frozenset())
    statistics = peers.downstream.statistics()
    assert (statistics[kind], statistics["gradients"]) == (1, 1)
    assert peers.downstream.hop_totals == {first[0]: HopTotals(1, 0), first[1]: HopTotals(1, 1)}


async def test_expired_goes_straight_up() -> None:
    peers = Peers("ab", lambda *_: Refused(reason=Reason.EXPIRED))
    assert await peers.ask(budget_s=1.05) == Refused(reason=Reason.EXPIRED)
    assert len(peers.calls) == 1
    assert not peers.downstream.suspects


async def test_who_says_expired_early_is_given_up_and_another_is_asked() -> None:
    first = list[str]()

    def answer(peer: str, _: int) -> Reply:
        first.append(peer)
        return Refused(reason=Reason.EXPIRED, retry_after_s=1e9) if peer == first[0] else GRADIENT

    peers = Peers("ab", answer)
    assert await peers.ask() is GRADIENT
    assert len(peers.calls) == 2
    assert peers.downstream.suspects == frozenset(first[:1])
    assert peers.downstream.statistics()["lost_given_up"] == 1


async def test_our_own_budget_ends_a_call_and_accuses_nobody() -> None:
    peers = Peers("a", lambda *_: GRADIENT)
    assert await peers.ask(budget_s=0.5) == Refused(reason=Reason.EXPIRED)
    assert asyncio.get_running_loop().time() == 0.5
    assert not peers.downstream.suspects
    assert peers.downstream.statistics()["waiting"] == 0


async def test_what_is_left_of_the_budget_travels_on() -> None:
    peers = Peers("ab", lambda peer, count: BROKEN if len(peers.calls) == 1 else GRADIENT)
    await asyncio.sleep(7.0)
    assert await peers.ask(budget_s=20.0) is GRADIENT
    assert peers.budgets == [20.0, 19.0]


async def test_when_all_refuse_we_sleep_until_the_earliest_may_be_asked_again() -> None:
    estimates = {"a": 8.0, "b": 5.0, "c": 20.0}

    def script(peer: str, count: int) -> Answer:
        return Refused(reason=Reason.FULL, retry_after_s=estimates[peer]) if count == 0 else GRADIENT

    peers = Peers("abc", script)
    assert await peers.ask() is GRADIENT
    again, at_s = peers.calls[-1]
    # a and b were refused at 1, 2 or 3 seconds: the earlier of their times is when the fourth call goes out.
    earliest = min(dict(peers.calls[:3])[peer] + 1.0 + estimates[peer] for peer in "abc")
    assert earliest <= at_s <= earliest + 0.25 * 6.0
    assert again in "ab"
    assert len(peers.calls) == 4


async def test_refusals_use_up_no_attempt_but_the_budget_bounds_them() -> None:
    peers = Peers("a", lambda *_: Refused(reason=Reason.FULL, retry_after_s=math.nan))
    assert await peers.ask() == Refused(reason=Reason.EXPIRED)
    assert len(peers.calls) > 80, "not a number is the least pause"
    assert asyncio.get_running_loop().time() == 100.0


@pytest.mark.parametrize("claim_s", [1e9, math.inf])
async def test_nobody_can_send_us_to_sleep_for_long(claim_s: float) -> None:
    peers = Peers("a", lambda _, n: GRADIENT if n else Refused(reason=Reason.FULL, retry_after_s=claim_s))
    assert await peers.ask() is GRADIENT
    assert asyncio.get_running_loop().time() < 45.0


async def test_all_microbatches_leave_one_that_refused_in_peace() -> None:
    peers = Peers("ab", lambda p, _: Refused(reason=Reason.GOSSIPING, retry_after_s=20.0) if p == "a" else GRADIENT)
    while "a" not in peers.called:
        await peers.ask()
    for _ in range(8):
        assert await peers.ask() is GRADIENT
    assert peers.called.count("a") == 1


@pytest.mark.parametrize(
    ("answer", "stranded"),
    [
        (Refused(reason=Reason.FULL, retry_after_s=20.0), 0),
        (Refused(reason=Reason.GOSSIPING, retry_after_s=20.0), 0),
        (Refused(reason=Reason.LEAVING), 1),
        (UNREACHABLE, 1),
    ],
)
async def test_who_waits_for_room_at_a_healthy_replica_is_not_stranded(answer: Answer, stranded: int) -> None:
    peers = Peers("a", lambda *_: answer)
    asking = asyncio.create_task(peers.ask())
    await asyncio.sleep(1.1)
    assert peers.downstream.waiting is not None
    assert peers.downstream.stranded == stranded
    asking.cancel()
    await asyncio.wait([asking])
    assert peers.downstream.stranded == 0


async def test_after_the_last_attempt_there_is_no_route() -> None:
    peers = Peers("abcdef", lambda *_: BROKEN)
    reply = await peers.ask()
    assert isinstance(reply, Refused)
    assert reply.reason is Reason.NO_ROUTE
    assert reply.retry_after_s > 0.0
    assert len(set(peers.called)) == len(peers.called) == ATTEMPTS, "each time another one"


async def test_one_that_was_lost_is_not_asked_again_while_there_are_others() -> None:
    peers = Peers("", lambda peer, _: BROKEN if peer == "fast" else GRADIENT)
    peers.hops = [Hop("fast", 0.1), Hop("slow", 10.0)]
    for _ in range(20):
        assert await peers.ask() is GRADIENT
    assert ("fast", "fast") not in pairwise(peers.called)


async def test_no_route_below_uses_attempts_and_accuses_nobody() -> None:
    peers = Peers("ab", lambda *_: Refused(reason=Reason.NO_ROUTE, retry_after_s=3.0))
    reply = await peers.ask()
    assert isinstance(reply, Refused)
    assert reply.reason is Reason.NO_ROUTE
    assert Counter(peers.called) == {"a": 2, "b": 2}
    assert not peers.downstream.suspects


async def test_a_silent_peer_is_suspected_alone_and_left_alone() -> None:
    peers = Peers("abcd", lambda peer, _: GIVEN_UP if peer == "b" else GRADIENT)
    for _ in range(125):
        assert await peers.ask() is GRADIENT
    first_s = TIMES_COST  # a call takes a second
    calls = [at_s for peer, at_s in peers.calls if peer == "b"]
    terms = [later - earlier for earlier, later in pairwise(calls)]
    assert 2 <= len(terms) <= 4, "after each term it is tried again"
    # A call takes a second, a term begins after it, and a bag of four is empty four seconds later at most.
    for number, term_s in enumerate(terms):
        assert first_s * 2**number + 1.0 <= term_s <= first_s * 2**number + 7.0
    assert not any(peer == "b" for peer, _ in peers.calls[-5:])


async def test_who_is_on_trial_gets_one_call_at_a_time() -> None:
    peers = Peers("ab", lambda peer, count: GIVEN_UP if (peer, count < 2) == ("b", True) else GRADIENT)
    for _ in range(4):
        await peers.ask()
    assert peers.called.count("b") == 1
    # A call takes a second.
    await asyncio.sleep(TIMES_COST)
    assert not peers.downstream.suspects
    assert (await peers.ask_together()).count("b") == 1
    await asyncio.sleep(2 * TIMES_COST)
    assert (await peers.ask_together()).count("b") == 1, "this call succeeds, and ends the trial"
    assert (await peers.ask_together()).count("b") >= 5


async def test_after_our_own_absence_nobody_is_suspected_for_what_broke() -> None:
    answers: list[Answer] = [GIVEN_UP] * 2
    peers = Peers("abc", lambda *_: answers.pop() if answers else GRADIENT)
    assert await peers.ask() is GRADIENT
    assert len(peers.downstream.suspects) == 2
    peers.downstream.forgive(5.0)
    assert not peers.downstream.suspects
    answers.extend([GIVEN_UP] * 2)
    assert await peers.ask() is GRADIENT
    assert not peers.downstream.suspects
    await asyncio.sleep(5.0)
    answers.append(GIVEN_UP)
    assert await peers.ask() is GRADIENT
    assert len(peers.downstream.suspects) == 1


async def test_the_only_replica_is_asked_again_though_it_is_under_suspicion() -> None:
    peers = Peers("a", lambda _, count: UNREACHABLE if count < 2 else GRADIENT)
    assert await peers.ask() is GRADIENT
    assert asyncio.get_running_loop().time() < 10.0, "well before its term is over"
    assert not peers.downstream.suspects, "a success clears it"
    times = [at_s for _, at_s in peers.calls]
    assert times[1] - times[0] >= 2.0
    assert times[2] - times[1] >= 3.0, "pauses grow"


async def test_suspects_are_left_alone_while_others_are_only_busy() -> None:
    def script(peer: str, count: int) -> Answer:
        if peer == "a":
            return UNREACHABLE
        return GRADIENT if count > 2 else Refused(reason=Reason.FULL, retry_after_s=4.0)

    peers = Peers("ab", script)
    assert await peers.ask() is GRADIENT
    assert peers.called.count("a") <= 1


async def test_an_empty_roster_is_waited_for_and_the_wait_is_told() -> None:
    peers = Peers("", lambda *_: GRADIENT)
    asking = asyncio.get_running_loop().create_task(peers.ask())
    await asyncio.sleep(20.0)
    waiting = peers.downstream.waiting
    assert (waiting.wanted, waiting.detail) == (Wanted.REPLICA, "")
    assert waiting.since_s == 0.0
    peers.hops = [Hop("a")]
    assert await asking is GRADIENT
    assert asyncio.get_running_loop().time() < 22.0
    assert peers.downstream.waiting is None


async def test_an_empty_roster_is_not_waited_for_for_ever() -> None:
    peers = Peers("", lambda *_: GRADIENT)
    reply = await peers.ask()
    assert isinstance(reply, Refused)
    assert reply.reason is Reason.NO_ROUTE
    assert PATIENCE_S <= asyncio.get_running_loop().time() < PATIENCE_S + 1.0


async def test_the_wait_for_somebody_in_the_roster_is_longer_than_one_microbatch_looks() -> None:
    peers = Peers("", lambda *_: GRADIENT)
    await peers.ask()
    asking = asyncio.get_running_loop().create_task(peers.ask())
    await asyncio.sleep(10.0)
    assert peers.downstream.waiting.since_s == 0.0
    peers.hops = [Hop("a")]
    await asking
    peers.hops, came_s = [], asyncio.get_running_loop().time()
    asking = asyncio.get_running_loop().create_task(peers.ask())
    await asyncio.sleep(10.0)
    assert peers.downstream.waiting.since_s == came_s


@pytest.mark.parametrize("cut_at_s", [0.5, 1.5, 4.0])
async def test_a_cancelled_search_leaves_no_wait_behind(cut_at_s: float) -> None:
    peers = Peers("a", lambda *_: Refused(reason=Reason.FULL, retry_after_s=2.0))
    asking = asyncio.get_running_loop().create_task(peers.ask())
    await asyncio.sleep(cut_at_s)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert peers.downstream.waiting is None
    assert asking.cancelled()


async def test_a_fault_of_our_own_is_not_swallowed() -> None:
    async def call(peer: str, microbatch: Microbatch) -> Reply:
        raise TimeoutError("ours")

    downstream = NextStage(NextStageClient(hops=lambda: [Hop("a")], call=call), Random(0))
    with pytest.raises(TimeoutError, match="ours"):
        await downstream.ask(MICROBATCH, 10.0)


async def test_totals_are_bounded() -> None:
    peers = Peers("", lambda *_: GRADIENT)
    for number in range(MOST_KNOWN + 10):
        peers.hops = [Hop(f"p{number}")]
        await peers.ask()
    assert len(peers.downstream.hop_totals) == MOST_KNOWN
    assert "p9" not in peers.downstream.hop_totals


async def test_the_time_of_a_check_is_not_the_replicas() -> None:
    """A replica on trial whose gradient is checked for long is not late, and what the check returns is used."""
    better, checked = Gradient(hidden=HIDDEN + 1.0, loss=1.0, tokens=2), list[tuple[str, float, float]]()
    unfit = Gradient(hidden=None, loss=1.0, tokens=2)
    answers: list[Answer] = [GIVEN_UP, Refused(reason=Reason.FULL, retry_after_s=0.1), unfit]
    peers = Peers("abcd", lambda *_: answers.pop(0) if answers else GRADIENT)

    async def check(peer: str, sent: Microbatch, reply: Gradient, deadline_s: float) -> Gradient:
        assert reply is GRADIENT
        checked.append((peer, sent.budget_s, deadline_s))
        await asyncio.sleep(50.0)
        return better

    ways = NextStageClient(hops=lambda: peers.hops, call=peers.call, check=check)
    peers.downstream = NextStage(ways, Random(0))
    assert await peers.ask() is better
    assert checked == [(peers.called[-1], 97.0, 100.0)], "only what fits is checked"
    peers.hops = [Hop(peer) for peer in "xy"]
    for _ in range(2):
        assert await peers.ask() is better
    assert len(peers.calls) == 6, "the second of them is on trial, and no other is asked beside it"
    assert list(peers.downstream._standing.reply_s.values()) == [1.0] * 3
