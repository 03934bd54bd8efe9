"""What a page is told of a swarm: bounded, plain, and complete."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_frames import BEGUN, HOSTILE, view_of, with_course

from noloco_node.journal import events
from noloco_node.observe.journal_observer import JournalObserver, routes
from noloco_node.observe.page_frame import MOST_MOMENTS, MOST_PEERS, MOST_ROUTES, page_frame
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.playback import Playback
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import time_left
from noloco_node.observe.swarm_view import Route
from noloco_node.run.peer_state import PeerState
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.swarm.roster import Given, PeerRecord, Roster, SourceProgress

RUN = decode_run(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "a test's run file")


def test_a_frame_of_a_large_swarm_is_bounded() -> None:
    view = with_course(view_of(2000, 4), 1000, lambda number: view_of(0, 1, number))
    frame = page_frame(view)
    assert len(frame.peers) == MOST_PEERS
    assert frame.more_peers == 2000 - MOST_PEERS
    assert len(frame.routes) <= MOST_ROUTES
    assert MOST_MOMENTS // 2 <= len(frame.course["at"]) <= MOST_MOMENTS + 1
    assert frame.course["at"][-1] == view.course[-1].at
    assert len(msgspec.json.encode(frame)) < 250_000


def test_a_frame_of_a_hundred_peers_is_small() -> None:
    assert len(msgspec.json.encode(page_frame(view_of(100, 5, 9)))) < 50_000


def test_routes_and_meetings_point_at_peers_of_the_list() -> None:
    frame = page_frame(view_of(10, 2, 3))
    assert frame.routes
    assert all(frame.peers[origin].stage + 1 == frame.peers[target].stage for origin, target, _ in frame.routes)
    assert all(peer.met is not None and frame.peers[peer.met].stage == peer.stage for peer in frame.peers)
    assert sum(peer.share or 0.0 for peer in frame.peers if peer.stage == 0) == pytest.approx(1.0, abs=0.01)


def test_what_strangers_say_is_plain_and_short() -> None:
    told = json.loads(msgspec.json.encode(page_frame(view_of(4, 2, 1, name=HOSTILE, words=9 * HOSTILE))))
    texts: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                collect(each)

    collect(told)
    assert any("onerror" in text for text in texts)  # the page sets text, never markup
    assert all(text.isprintable() and len(text) <= 400 for text in texts)


def test_a_frame_says_where_a_recording_is() -> None:
    playback = Playback(0.0, 100.0)
    playback.press("0.25")
    frame = page_frame(view_of(2, 2), playback.state())
    assert (frame.playback.at_s, frame.playback.whole_s, frame.virtual) == (25.0, 100.0, False)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=8))
def test_routes_and_rates_are_what_has_grown_since_the_last_totals(growth: list[int]) -> None:
    history, total = PeerHistory("a", 0), 0
    observer = JournalObserver("a test", [history], RUN)
    observer.take(history, events.Started(peer="A", stage=0, run="r", version="1", at=BEGUN))
    for number, more in enumerate(growth):
        total += more
        at = BEGUN + 10.0 * number
        observer.take(history, events.Hops(counts={"B": total}, at=at))
        observer.take(history, events.Traffic(sent={"x": total}, received={}, at=at))
    expected = [Route(origin="A", target="B", per_s=growth[-1] / 10.0)] if growth[-1] else []
    assert list(routes(history)) == expected
    [peer] = observer.view(at).peers
    assert (peer.sent_per_s, peer.received_per_s) == (growth[-1] / 10.0, 0.0)
    observer.take(history, events.Started(peer="A", stage=0, run="r", version="1", at=at))  # counts begin anew
    assert list(routes(history)) == []


def test_what_peers_give_is_told_as_they_say_it_and_added_up() -> None:
    records = [
        PeerRecord(peer="A", stage=0, state=PeerState.TRAINING, given=Given(100, 7200, 10**9, 0, 3600)),
        PeerRecord(peer="B", stage=1, state=PeerState.TRAINING, given=Given(300, 3600, 10**8, 9 * 10**8)),
    ]
    sources = (SourceProgress("A", claimed=50, signed=40, verified=0, finished=False),)
    roster = Roster(stages=tuple((record,) for record in records), run_samples=50, other_sources=sources)
    view, length = RosterObserver(RUN, "run").view(roster, BEGUN), RUN.pipeline.sequence_length
    first, second = page_frame(view).peers
    assert (first.tokens, first.tokens_signed, first.there_s, first.joules) == (50 * length, 40 * length, 7200, 3600)
    assert (second.tokens, second.tokens_signed, second.line_bytes, second.joules) == (300, None, 10**9, None)
    given = view.given
    assert (given.tokens, given.drawn, given.signed) == (50 * length + 300, 50 * length, 40 * length)
    assert (given.there_s, given.line_bytes, given.joules) == (10800.0, 2 * 10**9, 3600.0)


@given(st.integers(0, 3), st.integers(1, 200))
def test_a_node_that_reads_no_receipts_shows_none(stage: int, signed: int) -> None:
    """One of a later stage read some before it joined: it would show the claims of all as hardly signed."""
    own = PeerHistory("mine", 0)
    own.take(events.Started(peer="A", stage=stage, run="r", version="1", at=BEGUN))
    records = [PeerRecord(peer="B", stage=0, state=PeerState.TRAINING)]
    other_sources = (SourceProgress("B", claimed=200, signed=signed, verified=0, finished=False),)
    view = RosterObserver(RUN, "run", own).view(Roster(stages=(tuple(records), ()), other_sources=other_sources), BEGUN)
    given, length = view.given, RUN.pipeline.sequence_length
    assert (given.drawn, given.signed) == ((0, 0) if stage else (200 * length, signed * length))


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_receipts_never_cover_more_than_sources_claim(claimed: int, signed: int, mine: int) -> None:
    """A roster has the claims of other sources alone: those of the node that shows the page are in its own record."""
    own = PeerHistory("mine", 0)
    own.take(events.Started(peer="A", stage=0, run="r", version="1", at=BEGUN))
    own.take(events.Receipts(claimed={}, signed={}, own=mine, at=BEGUN))
    records = [PeerRecord(peer=peer, stage=0, state=PeerState.TRAINING) for peer in "AB"]
    other_sources = (SourceProgress("B", claimed=claimed, signed=signed, verified=0, finished=False),)
    view = RosterObserver(RUN, "run", own).view(Roster(stages=(tuple(records), ()), other_sources=other_sources), BEGUN)
    length = RUN.pipeline.sequence_length
    assert view.given.signed == min(claimed, signed) * length + mine
    assert view.given.signed <= view.given.drawn


@pytest.mark.parametrize(("state", "over"), [(PeerState.FINISHED, True), (PeerState.TRAINING, False)])
def test_a_run_is_over_once_all_that_are_there_have_finished(state: PeerState, over: bool) -> None:
    """The last receipts come late: the tokens that they cover fall a little short of the budget."""
    records = [PeerRecord(peer="A", stage=0, state=PeerState.FINISHED), PeerRecord(peer="B", stage=1, state=state)]
    view = RosterObserver(RUN, "run").view(Roster(stages=tuple((record,) for record in records)), BEGUN)
    assert view.progress < 1.0
    assert (time_left(view) == "over") == over
    assert ("is over" in view.bottleneck) == over


def test_what_lines_carry_follows_from_what_peers_have_given() -> None:
    def view(seconds: int, sent: int, received: int) -> tuple[float | None, float | None]:
        given = Given(0, seconds, sent, received)
        record = PeerRecord(peer="A", stage=0, state=PeerState.TRAINING, given=given)
        [peer] = observer.view(Roster(stages=((record,), ())), BEGUN).peers
        return peer.sent_per_s, peer.received_per_s

    observer = RosterObserver(RUN, "run")
    assert view(100, 5000, 50) == (None, None)
    assert view(110, 5000, 50) == (None, None)
    assert view(110, 5000, 50) == (None, None)
    assert view(120, 7000, 50) == (100.0, 0.0)
    assert view(140, 13000, 450) == (300.0, 20.0)
    assert view(5, 2**53, 450) == (None, None)  # another session
    assert view(2**53, 0, 450) == (0.0, 0.0)


def _told_by(hops: dict[str, tuple[tuple[str, int], ...]], *, below: str = "XY") -> Roster:
    """A roster of sources with next hops, and of a next stage; all that a stranger may say is in `hops`."""
    sources = [PeerRecord(peer=peer, stage=0, state=PeerState.TRAINING, hops=each) for peer, each in hops.items()]
    targets = [PeerRecord(peer=f"peer-{letter}", stage=1, state=PeerState.TRAINING) for letter in below]
    return Roster(stages=(tuple(sources), tuple(targets)))


def test_routes_are_put_together_from_several_readings_and_forgotten() -> None:
    observer = RosterObserver(RUN, "run")
    observer.view(_told_by({"A": (("peer-X", 30),)}), BEGUN)
    view = observer.view(_told_by({"A": (("peer-Y", 60),), "B": (("peer-X", 6),)}), BEGUN + 10)
    found = {(route.origin, route.target): route.per_s for route in view.routes}
    assert found == {("A", "peer-X"): 0.5, ("A", "peer-Y"): 1.0, ("B", "peer-X"): 0.1}
    view = observer.view(_told_by({"A": (), "B": ()}, below="X"), BEGUN + 65)
    assert [(route.origin, route.target) for route in view.routes] == [("B", "peer-X")]  # Y has left, A's X is old


@pytest.mark.parametrize("hop", [("peer-Q", 1), ("peer-X", 0), ("peer-X", -5), ("peer-X", 2**60), ("A", 1), ("", 1)])
def test_hops_that_cannot_be_are_passed_over(hop: tuple[str, int]) -> None:
    assert RosterObserver(RUN, "run").view(_told_by({"A": (hop,)}), BEGUN).routes == ()


def test_more_hops_than_a_record_may_have_or_an_end_that_two_share_are_no_routes() -> None:
    many = tuple(("peer-X", number + 1) for number in range(500))
    assert len(RosterObserver(RUN, "run").view(_told_by({"A": many}), BEGUN).routes) == 1
    twins = Roster(
        stages=(
            (PeerRecord(peer="A", stage=0, state=PeerState.TRAINING, hops=(("same end", 1),)),),
            tuple(PeerRecord(peer=f"{n} same end", stage=1, state=PeerState.TRAINING) for n in range(2)),
        )
    )
    assert RosterObserver(RUN, "run").view(twins, BEGUN).routes == ()


def test_a_node_adds_what_it_knows_of_itself() -> None:
    own = PeerHistory("mine", 0)
    own.take(events.Started(peer="A", stage=0, run="r", version="1", at=BEGUN))
    for number in range(2):
        own.take(events.Hops(counts={"B": 20 * number}, at=BEGUN + 10 * number))
        own.take(events.Traffic(sent={"x": 100 * number}, received={"x": 50 * number}, at=BEGUN + 10 * number))
    records = [PeerRecord(peer=peer, stage=number, state=PeerState.TRAINING) for number, peer in enumerate("AB")]
    observer = RosterObserver(RUN, "run", own)
    observer.tell("A mine", "woke up", BEGUN)
    view = observer.view(Roster(stages=tuple((record,) for record in records)), BEGUN + 20)
    assert view.routes == (Route(origin="A", target="B", per_s=2.0),)
    assert [peer.sent_per_s for peer in view.peers] == [10.0, None]
    assert [peer.name for peer in view.peers] == ["A mine", "B"]
    assert [change.text for change in view.changes] == ["woke up"]
