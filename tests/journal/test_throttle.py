"""A flood is some lines of the journal, nothing of it is left out of the counts for long, and all else is told."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from noloco_node.journal import events
from noloco_node.journal.writer import MOST_HOPS, MOST_KINDS, ONE_BY_ONE, PERIOD_S, JournalThrottle
from noloco_node.sim.clock import run

VIOLATION = events.PeerViolation(peer="x", topic="microbatch", why="a tensor is not finite")
REFUSED = events.RefusedMicrobatch(peer="x", reason="full", here=True)


def told(flood: list[events.Event], pause_s: float = 0.0) -> list[events.Event]:
    found: list[events.Event] = []

    async def main() -> None:
        throttle = JournalThrottle(found.append)
        for event in flood:
            throttle(event)
            if pause_s:
                await asyncio.sleep(pause_s)

    run(main())
    return found


def test_four_thousand_violations_are_a_dozen_lines() -> None:
    lines = told([VIOLATION] * 4000)
    assert len(lines) <= 13
    assert 2000 <= sum(line.count for line in lines if isinstance(line, events.PeerViolation)) <= 4000


def test_what_else_happens_is_told_beside_a_flood() -> None:
    said = events.Noticed(what="clock", text="wrong")
    assert told([VIOLATION, said] * 1000).count(said) == 1000


def test_the_usual_refusals_are_told_one_by_one() -> None:
    assert told([REFUSED] * ONE_BY_ONE) == [REFUSED] * ONE_BY_ONE
    assert told([REFUSED] * 5, PERIOD_S) == [REFUSED] * 5


@given(st.lists(st.sampled_from("abc"), max_size=300))
def test_each_peer_is_counted_to_at_least_a_half(peers: list[str]) -> None:
    lines = told([events.Lost(peer=peer, what="reply", why="gone") for peer in peers])
    for peer in "abc":
        count = sum(line.count for line in lines if isinstance(line, events.Lost) and line.peer == peer)
        assert peers.count(peer) / 2 <= count <= peers.count(peer)


def test_hops_name_those_that_return_most_and_sum_up_the_others() -> None:
    names = {f"x{number}": number for number in range(1024)}
    (line,) = told([events.Hops(counts=names)])
    assert isinstance(line, events.Hops)
    assert sorted(line.counts.values()) == list(range(1024 - MOST_HOPS, 1024))
    assert sum(line.counts.values()) + line.others == sum(names.values())
    assert told([events.Hops(counts={"a": 0, "b": 2})]) == [events.Hops(counts={"b": 2})]


def test_a_flood_of_identities_is_counted_together() -> None:
    lines = told([events.PeerViolation(peer=f"x{number}", topic="t", why="w") for number in range(10_000)])
    assert len(lines) <= MOST_KINDS + 15


def test_findings_of_spot_checks_are_told_as_well() -> None:
    struck = events.SpotCheck(peer="x", finding="struck")
    assert len(told([struck] * 4000)) <= ONE_BY_ONE + 13
    assert told([events.SpotCheck(peer="x", finding="quarantined"), struck]).count(struck) == 1
