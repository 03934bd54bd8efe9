"""Trials: what a sender risks with those who have shown nothing, and how an honest newcomer comes to its share."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch

from pipeline.messages import Gradient, Microbatch, Reply
from pipeline.next_stage import LATE, NextStage, NextStageClient
from pipeline.routing import LONGEST_SUSPICION_S, Hop

HIDDEN = torch.zeros(1, 2, 3)
MICROBATCH = Microbatch(hidden=HIDDEN, targets=torch.zeros(1, 2, dtype=torch.int64), progress=0.1, budget_s=600.0)
GRADIENT = Gradient(hidden=HIDDEN, loss=1.0, tokens=2)
DEADLINE_S, REPLY_S = 100.0, 1.0
HONEST = ["a", "b", "c"]
NAMES = [f"name{number}" for number in range(200)]

Act = Callable[[str], str]


class Stage:
    """Replicas of the next stage: some answer in a second, some hang, some break, some are names alone."""

    def __init__(self, peers: list[str], act: Act) -> None:
        self.hops = tuple([Hop(peer) for peer in peers])
        self.act = act
        self.calls: list[str] = []
        self.hanging: Counter[str] = Counter()
        self.most_hanging = 0
        self.next_stage = NextStage(NextStageClient(hops=lambda: self.hops, call=self.call), Random("trials"))

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        self.calls.append(peer)
        match self.act(peer):
            case "unreachable":
                await asyncio.sleep(0.1)
                raise ConnectionRefusedError
            case "breaks":
                await asyncio.sleep(0.1)
                raise ConnectionResetError
            case "hangs":
                self.hanging[peer] += 1
                self.most_hanging = max(self.most_hanging, self.hanging.total())
                try:
                    await asyncio.sleep(DEADLINE_S)
                finally:
                    self.hanging[peer] -= 1
                raise ConnectionAbortedError
        await asyncio.sleep(REPLY_S)
        return GRADIENT

    async def ask(self) -> float:
        """Return what a microbatch took."""
        begun_s = asyncio.get_running_loop().time()
        assert await self.next_stage.ask(MICROBATCH, begun_s + 600.0) is GRADIENT
        return asyncio.get_running_loop().time() - begun_s

    async def ask_together(self, count: int) -> list[float]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self.ask()) for _ in range(count)]
        return [task.result() for task in asked]


async def test_one_that_hangs_from_the_beginning_holds_nobody_up() -> None:
    stage = Stage([*HONEST, "d"], lambda peer: "hangs" if peer == "d" else "answers")
    assert max(await stage.ask_together(8)) < (LATE + 1.01) * REPLY_S
    before = stage.calls.count("d")
    for _ in range(5):
        assert max(await stage.ask_together(8)) < REPLY_S + 0.01
    assert stage.calls.count("d") == before, "while it has a call it gets no other"
    assert not stage.next_stage.suspects, "and is not accused before its time is over"
    await asyncio.sleep(DEADLINE_S)
    assert stage.next_stage.suspects == {"d"}


@pytest.mark.parametrize("act", ["unreachable", "breaks", "hangs"])
async def test_names_that_do_no_work_delay_nothing_and_a_newcomer_is_asked_at_once(act: str) -> None:
    stage = Stage(HONEST, lambda peer: act if peer in NAMES else "answers")
    await stage.ask_together(8)
    stage.hops = tuple([Hop(peer) for peer in [*HONEST, *NAMES]])
    await stage.ask_together(8)  # those that go astray before the first is lost
    await asyncio.sleep(DEADLINE_S)
    stage.most_hanging = 0
    for _ in range(120):
        assert max(await stage.ask_together(8)) < REPLY_S + 0.01
    assert stage.most_hanging <= 1
    tried = [peer for peer in stage.calls if peer in NAMES]
    assert max(Counter(tried[: len(NAMES)]).values()) == 1 or act == "hangs", "first those that never were"
    stage.hops = tuple([Hop(peer) for peer in [*HONEST, *NAMES, "late"]])
    before = len(stage.calls)
    for _ in range(6 * round(DEADLINE_S) if act == "hangs" else 16):
        await stage.ask_together(8)
    assert Counter(stage.calls[before:])["late"] >= 8, "it has its share"
    await stage.next_stage.aclose()


async def test_without_anybody_proved_all_are_asked_as_ever() -> None:
    stage = Stage(HONEST, lambda peer: "unreachable" if peer == "a" else "answers")
    assert max(await stage.ask_together(9)) < REPLY_S + 0.11
    assert {"b", "c"} <= set(stage.calls)


async def test_a_newcomer_is_asked_though_all_who_were_proved_are_gone() -> None:
    gone = set[str]()
    stage = Stage(HONEST, lambda peer: "unreachable" if peer in gone else "answers")
    await stage.ask_together(9)
    gone |= set(HONEST)
    stage.hops = tuple([Hop(peer) for peer in [*HONEST, "dead", "late"]])
    gone.add("dead")
    for _ in range(4):
        await stage.ask()
    assert "late" in stage.calls


async def test_who_works_in_between_only_to_hang_anew_is_left_alone_for_longer_each_time() -> None:
    honest = True
    stage = Stage(["a", "d"], lambda peer: "answers" if peer == "a" or honest else "hangs")
    await stage.ask_together(4)
    lengths = []
    for _ in range(3):
        honest = False
        while not stage.next_stage.suspects:
            await stage.ask()
        until_s, length_s, *_ = stage.next_stage._standing.suspicions["d"]
        lengths.append(length_s)
        await asyncio.sleep(until_s - asyncio.get_running_loop().time())
        honest = True
        await stage.ask_together(4)
    assert lengths == sorted(lengths)
    assert lengths[-1] == LONGEST_SUSPICION_S or lengths[0] < lengths[1] < lengths[2]


async def test_calls_that_nobody_waits_for_end_with_the_sender_and_with_their_time() -> None:
    stage = Stage([*HONEST, "d"], lambda peer: "hangs" if peer == "d" else "answers")
    await stage.ask_together(8)
    assert stage.hanging.total() > 0
    await stage.next_stage.aclose()
    assert stage.hanging.total() == 0


async def test_one_who_is_late_when_the_first_reply_comes_is_let_go_at_once() -> None:
    stage = Stage(["d"], lambda peer: "hangs" if peer == "d" else "answers")
    first = asyncio.create_task(stage.ask())
    await asyncio.sleep(10.0)
    stage.hops = (Hop("d"), Hop("a"))
    assert await stage.ask() == pytest.approx(REPLY_S)
    assert await first == pytest.approx(10.0 + 2 * REPLY_S)
    await stage.next_stage.aclose()
