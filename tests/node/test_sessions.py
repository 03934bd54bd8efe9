"""A node that keeps hours outlives an outage at the start of a later session, and leaves when it is asked to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from handlers import now
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, parse_peer_address
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.limits.budget import OwnerLimits, read_hours
from noloco_node.machine.signals import Departure
from noloco_node.network.interface import PeerNetwork
from noloco_node.node import sessions
from noloco_node.node.sessions import FIRST_PAUSE_S, LONGEST_PAUSE_S, Sessions, cause, heals, live_in_sessions, pause_s
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import access

HOUR_S = 3600.0
PASSING = (Exit.UNREACHABLE, Exit.DAEMON, Exit.PORT_TAKEN, Exit.CONFIG)
PEERS = (
    "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu",
    "12D3KooWDew3PbJwkmKi9CybWvVzPR45JWKmhBr4v7wX92tMdw52",
    "12D3KooWFudLtKfvASkYC4Br5VfYwnHPm9bTwdeDuMcZAvZTfdkH",
)


def trouble(code: Exit, why: str = "somewhere: connection refused") -> UserError:
    return UserError(f"It is {code.name}.", why=why, hint="wait", code=code)


# What is tried again, and after how long.


@given(failures=st.integers(1, 10**6))
def test_pauses_grow_from_some_seconds_to_some_minutes(failures: int) -> None:
    assert pause_s(1) == FIRST_PAUSE_S <= 10.0
    assert FIRST_PAUSE_S <= pause_s(failures) <= LONGEST_PAUSE_S <= 600.0
    assert pause_s(failures) < pause_s(failures + 1) or pause_s(failures) == LONGEST_PAUSE_S


def nested(codes: Any, depth: int) -> Exception:
    """The `UserError` of a code, or a group as task groups make them."""
    if isinstance(codes, Exit):
        return trouble(codes)
    return ExceptionGroup(f"depth {depth}", [nested(each, depth + 1) for each in codes])


def flat(codes: Any) -> list[Exit]:
    return [codes] if isinstance(codes, Exit) else [code for each in codes for code in flat(each)]


@given(st.recursive(st.sampled_from(Exit), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=6))
def test_only_what_time_may_heal_is_tried_again(codes: Any) -> None:
    assert heals(nested(codes, 0)) is all(code in PASSING for code in flat(codes))


@pytest.mark.parametrize("error", [OSError("disk"), ConnectionRefusedError(), RuntimeError("bug"), TimeoutError()])
def test_what_is_no_message_to_a_person_does_not_heal(error: Exception) -> None:
    assert not heals(error)
    assert not heals(ExceptionGroup("together", [trouble(Exit.PORT_TAKEN), error]))


@pytest.mark.parametrize("nest", [lambda error: error, lambda error: ExceptionGroup("within", [error])])
def test_what_is_lost_with_our_own_daemon_is_no_cause_of_its_own(nest: Callable[[Exception], Exception]) -> None:
    dead, loss, bug = trouble(Exit.DAEMON), ConnectionResetError("our own libp2p daemon is gone"), RuntimeError("bug")
    for both in ([nest(dead), loss], [loss, nest(dead)], [nest(loss), dead]):
        group = ExceptionGroup("together", both)
        assert heals(group)
        assert user_error_of(group) is dead
        assert user_error_of(ExceptionGroup("and more", [group, bug])) is None
    assert user_error_of(ExceptionGroup("lost", [loss])) is None
    assert user_error_of(ExceptionGroup("elsewhere", [trouble(Exit.CONFIG), loss])) is None


def test_what_happened_is_one_sentence() -> None:
    one = trouble(Exit.UNREACHABLE, "/ip4/192.0.2.1/tcp/4001: connection refused")
    assert cause(one) == "It is UNREACHABLE (/ip4/192.0.2.1/tcp/4001: connection refused)"
    assert (
        cause(trouble(Exit.UNREACHABLE, "a: no\n       b: no\n       c: no")) == "It is UNREACHABLE (a: no; and 2 more)"
    )
    assert "\n" not in cause(trouble(Exit.DAEMON, ""))


# One session after another, in virtual time.


class Outside:
    """A world whose network opens, fails to open, or takes its time, as `outcomes` say; afterwards it opens.

    An outcome is an error to fail with, or the seconds that opening takes. The first session begins at 22:00, time 0.
    """

    def __init__(self, directory: Path, *outcomes: Exception | float, hours: str | None = "22-08") -> None:
        self.outcomes = list(outcomes)
        self.attempts: list[float] = []
        self.joined: list[float] = []
        self.left: list[float] = []
        self.open = 0
        self.closing_s = 0.0
        self.said: list[str] = []
        self.said_at: dict[str, float] = {}
        self.leaving = Departure(asyncio.Event())
        self.breaks: dict[int, tuple[float, Exception]] = {}
        """By the number of the session joined: after how many seconds it breaks, and by what."""
        self.wall: Callable[[], datetime] = lambda: datetime(2026, 3, 2, 22, tzinfo=UTC) + timedelta(seconds=now())
        allowance = OwnerLimits() if hours is None else OwnerLimits(hours=read_hours(hours))
        self.sessions = Sessions(allowance, directory / "traffic.json", self.wall, self.say)
        self._network = SimNetwork().network("us")

    def say(self, text: str) -> None:
        self.said.append(text)
        self.said_at.setdefault(text, now())

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[PeerNetwork]:
        self.attempts.append(now())
        self.open += 1
        try:
            outcome = self.outcomes.pop(0) if self.outcomes else 0.0
            if isinstance(outcome, Exception):
                raise outcome
            await asyncio.sleep(outcome)
            yield self._network
        finally:
            self.open -= 1
            await asyncio.sleep(self.closing_s)

    async def take_part(self, network: PeerNetwork, leave: asyncio.Event) -> None:
        assert network is self._network
        self.joined.append(now())
        self.leaving.polite = True
        if len(self.joined) in self.breaks:
            after_s, error = self.breaks[len(self.joined)]
            await asyncio.sleep(after_s)
            raise error
        await leave.wait()
        self.left.append(now())

    async def live(self, asked_s: float | None = None) -> float:
        """Live until the node ends by itself, or is asked to leave; return when."""
        if asked_s is not None:
            asyncio.get_running_loop().call_later(asked_s, self.leaving.asked.set)
        try:
            async with asyncio.timeout(96 * HOUR_S):
                await live_in_sessions(self.sessions, self.leaving, self.opened, self.take_part)
        finally:
            await asyncio.sleep(0)  # for what was cancelled to end
            assert not self.open
            assert len(asyncio.all_tasks()) == 1
        return now()


def within(tmp_path_factory: pytest.TempPathFactory, main: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    """Run one example, in which the clock on the wall is looked at seldom: most of the hours are waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "LOOK_EVERY_S", 2 * HOUR_S)
        run(main(tmp_path_factory.mktemp("home")))


SECOND_S = 24 * HOUR_S
"""When the second session begins."""


@pytest.mark.parametrize("code", Exit)
async def test_the_first_session_fails_at_once(code: Exit, tmp_path: Path) -> None:
    outside = Outside(tmp_path, trouble(code))
    with user_error(code):
        await outside.live()
    assert (now(), outside.attempts, outside.said) == (0.0, [0.0], [])
    assert not outside.leaving.polite


@settings(max_examples=30)
@given(codes=st.lists(st.sampled_from(PASSING), max_size=9), grouped=st.booleans())
def test_a_later_session_joins_at_last(
    codes: list[Exit], grouped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def main(directory: Path) -> None:
        errors = [ExceptionGroup("tasks", [trouble(code)]) if grouped else trouble(code) for code in codes]
        outside = Outside(directory, 0.0, *errors)
        assert await outside.live(asked_s=48 * HOUR_S + 60.0) == 48 * HOUR_S + 60.0
        waits = [pause_s(number) for number in range(1, len(codes) + 1)]
        begun = [SECOND_S + waited for waited in accumulate(waits, initial=0.0)]
        assert outside.attempts == pytest.approx([0.0, *begun, 48 * HOUR_S])
        assert outside.joined == pytest.approx([0.0, begun[-1], 48 * HOUR_S])
        assert outside.left == pytest.approx([10 * HOUR_S, 34 * HOUR_S, 48 * HOUR_S + 60.0])
        assert sum("trying again in" in line for line in outside.said) == len(codes)

    within(tmp_path_factory, main)


@settings(max_examples=30)
@given(asked_s=st.floats(0.1, 4 * HOUR_S))
def test_whoever_asks_it_to_leave_need_not_wait(asked_s: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a pause, or while a network is opening; both are cut short."""

    async def main(directory: Path) -> None:
        outside = Outside(directory, 0.0, *([trouble(Exit.UNREACHABLE)] * 20), *([20 * HOUR_S] * 2))
        assert await outside.live(SECOND_S + asked_s) == pytest.approx(SECOND_S + asked_s)
        assert len(outside.joined) == 1

    within(tmp_path_factory, main)


async def test_it_need_not_wait_for_the_hours_either(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    assert await outside.live(12 * HOUR_S) == 12 * HOUR_S
    assert outside.attempts == [0.0]
    assert outside.leaving.polite


async def test_a_second_signal_ends_even_the_closing_of_a_network(tmp_path: Path) -> None:
    outside = Outside(tmp_path, 0.0, 600.0)
    outside.closing_s = 30.0
    session = asyncio.current_task()
    asyncio.get_running_loop().call_later(SECOND_S + 101.0, session.cancel)
    with pytest.raises(asyncio.CancelledError):
        await outside.live(SECOND_S + 100.0)
    assert now() == SECOND_S + 101.0


@pytest.mark.parametrize("code", PASSING)
async def test_it_gives_way_when_the_hours_end_and_the_next_session_begins_as_usual(code: Exit, tmp_path: Path) -> None:
    nightly = 130
    outside = Outside(tmp_path, 0.0, *([trouble(code)] * nightly))
    await outside.live(49 * HOUR_S)
    second = [at for at in outside.attempts if SECOND_S <= at < SECOND_S + 10 * HOUR_S]
    third = [at - 48 * HOUR_S for at in outside.attempts if at >= 48 * HOUR_S]
    assert 1 + len(second) + len(third) == len(outside.attempts)
    gaps = [after - before for before, after in pairwise(second)]
    assert max(gaps) == pytest.approx(LONGEST_PAUSE_S)
    assert second[-1] > SECOND_S + 10 * HOUR_S - 2 * LONGEST_PAUSE_S
    # In the next evening it begins punctually, with short pauses.
    assert third[:3] == pytest.approx([0.0, pause_s(1), pause_s(1) + pause_s(2)], abs=0.1)
    assert any("no time is left" in line for line in outside.said)
    (waits,) = (line for line in outside.said if "waiting until 2026-03-04 22:00" in line)
    assert outside.said_at[waits] == pytest.approx(SECOND_S + 10 * HOUR_S)
    assert len(outside.joined) == 2


@pytest.mark.parametrize(
    "error", [*(trouble(code) for code in Exit if code not in PASSING), TimeoutError("of its own")]
)
async def test_other_trouble_and_an_error_that_we_do_not_know_end_it(error: Exception, tmp_path: Path) -> None:
    outside = Outside(tmp_path, 0.0, trouble(Exit.UNREACHABLE), error)
    with pytest.raises(type(error)) as caught:
        await outside.live()
    assert caught.value is error
    assert outside.attempts == pytest.approx([0.0, SECOND_S, SECOND_S + pause_s(1)])


async def test_a_later_session_that_breaks_in_the_middle_is_taken_up_again(tmp_path: Path) -> None:
    outside = Outside(tmp_path, 0.0, trouble(Exit.UNREACHABLE), trouble(Exit.UNREACHABLE))
    outside.breaks = {2: (2 * HOUR_S, ExceptionGroup("tasks", [trouble(Exit.DAEMON)]))}
    await outside.live(33 * HOUR_S)
    joined = SECOND_S + pause_s(1) + pause_s(2)
    assert outside.joined == pytest.approx([0.0, joined, joined + 2 * HOUR_S + pause_s(1)])


async def test_the_first_session_ends_the_node_when_it_breaks(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    outside.breaks = {1: (HOUR_S, trouble(Exit.DAEMON))}
    with pytest.raises(ExceptionGroup):
        await outside.live()
    assert now() == HOUR_S


async def test_a_pause_ends_with_the_hours_also_where_the_clock_was_set(tmp_path: Path) -> None:
    outside, begun = Outside(tmp_path), datetime(2026, 3, 3, 7, 30, tzinfo=UTC)

    def wall() -> datetime:
        return begun + timedelta(seconds=now() + (1800.0 if now() > 100.0 else 0.0))

    allowance = OwnerLimits(hours=read_hours("22-08"))
    kept = Sessions(allowance, tmp_path / "traffic.json", wall, outside.said.append)
    assert kept.lasts_s() == 1800.0
    await kept.pause(40.0)
    assert now() == pytest.approx(40.0)
    await kept.pause(300.0)
    assert now() == pytest.approx(100.0, abs=sessions.LOOK_EVERY_S)
    assert kept.lasts_s() == 0.0


async def test_without_hours_there_is_one_session(tmp_path: Path) -> None:
    outside = Outside(tmp_path, hours=None)
    assert await outside.live(70 * HOUR_S) == 70 * HOUR_S
    assert outside.left == [70 * HOUR_S]


# By whom a later session comes in.


class Opens:
    """Networks that open where one of their bootstrap peers is among `alive`."""

    def __init__(self, alive: set[str], code: Exit = Exit.UNREACHABLE) -> None:
        self.alive, self.code = alive, code
        self.tried: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def open(self, chosen: NetworkSettings, _say: object, met: KnownPeers | None) -> AsyncIterator[Any]:
        self.tried.append(chosen.bootstrap)
        if not self.alive & set(chosen.bootstrap):
            raise trouble(self.code)
        if met is not None:
            met.note([parse_peer_address(place(2))])
        yield self

    async def wait_daemon(self) -> None:
        await asyncio.Event().wait()


def place(number: int) -> str:
    return f"/ip4/192.0.2.{number + 1}/tcp/4001/p2p/{PEERS[number]}"


INVITED = NetworkSettings(run="run", bootstrap=(place(0),))


def entered(monkeypatch: pytest.MonkeyPatch, opens: Opens, met: KnownPeers | None) -> list[tuple[str, ...]]:
    async def main() -> None:
        async with access.connected(INVITED, met):
            pass

    monkeypatch.setattr(access, "Libp2pNetwork", opens)
    run(main())
    return opens.tried


def met_before() -> KnownPeers:
    return KnownPeers(map(parse_peer_address, (place(0), place(1))))


def test_as_long_as_somebody_of_the_invite_opens_nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    met = met_before()
    assert entered(monkeypatch, Opens({place(0), place(1)}), met) == [INVITED.bootstrap]
    assert met.doors() == (place(2), place(1), place(0))


def test_where_nobody_of_the_invite_opens_those_who_were_met_before_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entered(monkeypatch, Opens({place(1)}), met_before()) == [INVITED.bootstrap, (place(0), place(1))]
    assert "we met before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("opens", "met", "tries"),
    [
        (Opens(set()), met_before(), 2),
        (Opens(set()), KnownPeers(), 1),
        (Opens(set()), None, 1),
        (Opens(set(), Exit.DAEMON), met_before(), 1),
    ],
)
def test_in_vain(monkeypatch: pytest.MonkeyPatch, opens: Opens, met: KnownPeers | None, tries: int) -> None:
    with user_error(opens.code):
        entered(monkeypatch, opens, met)
    assert len(opens.tried) == tries


@given(st.lists(st.sampled_from(["/ip4/192.0.2.7/tcp/4001", "", "/nothing/known", "/ip4/192.0.2.8/udp/1/quic-v1"])))
def test_doors_of_acquaintances_can_be_read_again(transports: list[str]) -> None:
    doors = KnownPeers(PeerAddress(each, PEERS[number % 3]) for number, each in enumerate(transports)).doors()
    assert len({parse_peer_address(door).peer for door in doors}) == len(doors)
    readable = {PEERS[number % 3]: transport for number, transport in enumerate(transports)}
    assert len(doors) == sum("192.0.2" in transport for transport in readable.values())
