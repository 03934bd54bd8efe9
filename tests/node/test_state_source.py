"""Where a newcomer's first state comes from: every case of the decision, and what holds whatever it knows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.node.state_source import (
    Attempts,
    DownloadFailed,
    Failure,
    FromCheckpoint,
    FromPeerSnapshot,
    FromReplicas,
    FromSeed,
    LookAgain,
    NobodyBack,
    NobodyFound,
    Seeker,
    SnapshotNotFound,
    StateSource,
    choose_source,
    living_replicas,
)
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync.download import COPY_AGAIN_S
from noloco_node.state_sync.starting_state import AGAIN_S, ATTEMPTS, ATTEMPTS_IN_VAIN
from noloco_node.swarm.roster import PeerRecord, Roster

STALENESS = 4


def record(stage: int, round: int, state: PeerState = PeerState.TRAINING, peer: str = "other") -> PeerRecord:
    return PeerRecord(peer=peer, stage=stage, state=state, round=round)


def roster(*records: PeerRecord) -> Roster:
    return Roster(stages=tuple(tuple(each for each in records if each.stage == stage) for stage in (0, 1)))


def seeker(saved_round: int | None = None, *, begun: bool = False, revives: bool = False) -> Seeker:
    return Seeker(me="me", stage=1, saved_round=saved_round, staleness_at_most=STALENESS, begun=begun, revives=revives)


HERE, THERE = record(1, 20), record(0, 20)
LAST_SEARCH = Attempts(searches=ATTEMPTS_IN_VAIN, failure=SnapshotNotFound(promised=False))


@pytest.mark.parametrize(
    ("found", "saved_round", "attempts", "expected"),
    [
        pytest.param((), None, Attempts(), FromSeed(), id="nobody has begun"),
        pytest.param((record(1, 0),), None, Attempts(), FromSeed(), id="replicas that have not begun either"),
        pytest.param((), 7, Attempts(), FromCheckpoint(), id="all left, and we are the first to come back"),
        pytest.param((HERE,), None, Attempts(), FromReplicas((HERE,)), id="the stage lives"),
        pytest.param((HERE,), 19, Attempts(), FromCheckpoint((HERE,)), id="our checkpoint is recent enough"),
        pytest.param((HERE,), 20 - STALENESS, Attempts(), FromCheckpoint((HERE,)), id="just recent enough"),
        pytest.param((HERE,), 19 - STALENESS, Attempts(), FromReplicas((HERE,)), id="just too old"),
        pytest.param(
            (record(1, 20, PeerState.FINISHED),),
            None,
            Attempts(),
            FromReplicas((record(1, 20, PeerState.FINISHED),)),
            id="who has finished gives its state",
        ),
        pytest.param((THERE,), None, Attempts(), FromPeerSnapshot(0), id="only other stages live"),
        pytest.param((THERE,), 19, Attempts(), FromPeerSnapshot(0), id="a snapshot may be newer than our checkpoint"),
        pytest.param((THERE, record(1, 20, peer="me")), None, Attempts(), FromPeerSnapshot(0), id="we are no replica"),
        pytest.param(
            (THERE, record(1, 0, PeerState.CATCHING_UP)), None, Attempts(), FromPeerSnapshot(0), id="nor is a newcomer"
        ),
        pytest.param((THERE,), None, Attempts(searches=3), FromPeerSnapshot(3), id="after a wait the search goes on"),
        pytest.param((HERE,), None, Attempts(searches=3), FromReplicas((HERE,)), id="somebody came meanwhile"),
        pytest.param(
            (HERE,), None, Attempts(downloads=1, failure=DownloadFailed()), LookAgain(COPY_AGAIN_S, True), id="no donor"
        ),
        pytest.param(
            (THERE,),
            None,
            Attempts(searches=1, failure=SnapshotNotFound(promised=False)),
            LookAgain(AGAIN_S, False),
            id="an answer may have been lost",
        ),
        pytest.param((THERE,), None, LAST_SEARCH, FromSeed(lost=True), id="nobody has it any more"),
        pytest.param(
            (THERE,),
            7,
            Attempts(searches=1, failure=SnapshotNotFound(promised=False)),
            FromCheckpoint(searched=True),
            id="no snapshot is newer than our checkpoint",
        ),
        pytest.param(
            (THERE,),
            7,
            Attempts(searches=1, failure=SnapshotNotFound(promised=True)),
            LookAgain(AGAIN_S, False),
            id="a newer snapshot is promised",
        ),
        pytest.param(
            (THERE,),
            7,
            Attempts(searches=ATTEMPTS, failure=SnapshotNotFound(promised=True)),
            FromCheckpoint(searched=True),
            id="promises are believed for some minutes",
        ),
    ],
)
def test_the_source(
    found: tuple[PeerRecord, ...], saved_round: int | None, attempts: Attempts, expected: StateSource
) -> None:
    assert choose_source(roster(*found), seeker(saved_round), attempts) == expected


@pytest.mark.parametrize(
    ("found", "saved_round", "expected"),
    [
        pytest.param((), None, NobodyBack(3), id="nobody is here"),
        pytest.param((record(0, 0, PeerState.JOINING),), None, NobodyBack(3), id="another newcomer is nobody"),
        pytest.param((record(1, 0, peer="me"),), None, NobodyBack(3), id="nor are we"),
        pytest.param((record(0, 0),), None, FromSeed(), id="somebody has begun anew"),
        pytest.param((), 7, FromCheckpoint(), id="we have a checkpoint"),
        pytest.param((HERE,), None, FromReplicas((HERE,)), id="the stage lives"),
    ],
)
def test_a_run_that_was_begun_is_not_begun_anew_alone(
    found: tuple[PeerRecord, ...], saved_round: int | None, expected: StateSource
) -> None:
    """Only readings at which nobody was here count, whatever has failed before."""
    attempts = Attempts()
    for failure in (DownloadFailed(), None, NobodyFound(), SnapshotNotFound(promised=True), None, *2 * [NobodyFound()]):
        attempts = attempts.after(failure)
    assert choose_source(roster(*found), seeker(saved_round, begun=True), attempts) == expected


RECORDS = st.lists(
    st.builds(
        record,
        st.integers(0, 1),
        st.integers(0, 40),
        st.sampled_from(PeerState),
        st.sampled_from(["me", "a", "b", "c"]),
    ),
    max_size=6,
).map(lambda records: roster(*records))
SAVED = st.none() | st.integers(0, 40)
FAILURES = st.none() | st.just(NobodyFound()) | st.just(DownloadFailed()) | st.booleans().map(SnapshotNotFound)


@given(RECORDS, SAVED, st.lists(FAILURES, max_size=5))
def test_what_we_have_is_not_thrown_away_and_what_lives_is_not_overwritten(
    found: Roster, saved_round: int | None, failures: list[Failure | None]
) -> None:
    attempts = Attempts()
    for failure in failures:
        attempts = attempts.after(failure)
    source = choose_source(found, seeker(saved_round), attempts)
    begun = any(each.round > 0 for records in found.stages for each in records)
    match source:
        case FromSeed(lost):
            assert saved_round is None
            assert lost or not begun
        case FromCheckpoint():
            assert saved_round is not None
        case FromReplicas(living):
            assert living
            assert all(each.peer != "me" and each in found.stage(1) for each in living)
        case FromPeerSnapshot(attempt):
            assert begun
            assert attempt == attempts.searches
        case LookAgain():
            assert attempts.failure is not None


def test_whose_snapshot_was_worth_nothing_asks_for_another_before_it_copies_who_may_have_the_same() -> None:
    again, found = seeker(revives=True), roster(HERE, THERE)
    assert choose_source(found, again, Attempts()) == FromPeerSnapshot(0)
    assert choose_source(found, again, LAST_SEARCH) == FromReplicas((HERE,))
    assert choose_source(found, again, Attempts(downloads=1)) == FromReplicas((HERE,))


@given(RECORDS, SAVED, st.lists(st.booleans(), min_size=ATTEMPTS, max_size=ATTEMPTS), st.booleans())
def test_the_search_for_a_snapshot_comes_to_an_end(
    found: Roster, saved_round: int | None, promises: list[bool], revives: bool
) -> None:
    attempts = Attempts()
    for promised in promises:
        attempts = attempts.after(SnapshotNotFound(promised))
        source = choose_source(found, seeker(saved_round, revives=revives), attempts)
        if living_replicas(found, 1, "me"):
            assert isinstance(source, LookAgain | FromReplicas | FromCheckpoint | FromSeed)
        elif not isinstance(source, LookAgain):
            assert source == (FromSeed(lost=True) if saved_round is None else FromCheckpoint(searched=True))
        if not isinstance(source, LookAgain):
            return
        attempts = attempts.after(None)
    pytest.fail("still waiting")
