"""Conversations over a link of our own making, in virtual time: slow, cut, stalled, and every way to end."""

import asyncio
import contextlib
import inspect
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch
from handlers import Work, echo, now
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from sample_messages import Ask, Bulk, schema_of

from noloco_node.libp2p.control import StreamOpening
from noloco_node.libp2p.settings import Capacity, TimeoutSettings
from noloco_node.libp2p.stream import ByteCounts, FrameProtocol, Stream
from noloco_node.libp2p.switchboard import LivenessTable, ReceiveBudget, Switchboard
from noloco_node.limits.budget import LEAST_RATE, full_bucket
from noloco_node.limits.rate_limit import FairLimiter
from noloco_node.network import wire
from noloco_node.network.interface import Conversation, Handler, Pace
from noloco_node.network.schema import Violation
from noloco_node.network.timeouts import MOST_PEERS
from noloco_node.sim.clock import run

PATIENCE = TimeoutSettings()
STEP_S = 0.1
BIG = 250_000
"""Numbers of a `Bulk`: a megabyte."""
SCHEMA = schema_of(BIG)


class Pipe(asyncio.Transport):
    """One end of a link of `rate` bytes a second that can be cut; refers to what is written, as uvloop does."""

    def __init__(self, protocol: asyncio.BufferedProtocol, rate: float, written: list[tuple[float, int]]) -> None:
        super().__init__()
        self.written = written
        self.protocol, self.rate, self.cut = protocol, rate, False
        self.reading, self.closing, self.full = True, False, False
        self.unsent: deque[memoryview] = deque()
        self.loop = asyncio.get_running_loop()
        self.pumping: asyncio.TimerHandle | None = None
        self.other: Pipe
        self.step_s = STEP_S

    def write(self, data: Any) -> None:
        if len(data) and not self.closing:
            self.written.append((self.loop.time(), len(data)))
            self.unsent.append(memoryview(data))
            self.pump_soon()
            if not self.full:
                self.full = True
                self.protocol.pause_writing()

    def pump_soon(self) -> None:
        if self.pumping is None:
            self.pumping = self.loop.call_later(self.step_s, self.pump)

    def pump(self) -> None:
        self.pumping = None
        budget = 0 if self.cut or not self.other.reading else int(self.rate * self.step_s)
        while budget and self.unsent and not self.other.closing and self.other.reading:
            room = self.other.protocol.get_buffer(-1)
            count = min(len(room), len(self.unsent[0]), budget)
            room[:count] = self.unsent[0][:count]
            budget -= count
            self.unsent[0] = self.unsent[0][count:]
            if not self.unsent[0]:
                self.unsent.popleft()
            self.other.protocol.buffer_updated(count)
        if self.unsent and not self.other.closing:
            self.pump_soon()
        elif self.closing:
            self.loop.call_soon(self.hang_up)
        if self.full and not self.unsent:
            self.full = False
            self.protocol.resume_writing()

    def hang_up(self) -> None:
        if not self.other.closing and not self.cut:
            self.other.closing = True
            self.other.protocol.eof_received()
            self.other.protocol.connection_lost(None)

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.pump_soon()
            self.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.unsent.clear()
        self.close()

    def is_closing(self) -> bool:
        return self.closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.unsent))


def answered(board: Switchboard, transport: asyncio.Transport, peer: str, origin: str = "") -> None:
    board.answer(transport, peer, "work", origin)


class Line:
    """A caller `a` and a callee `b`, each with a switchboard; `call` opens a stream between them."""

    def __init__(
        self, handler: Handler, *, rate: float = 1e6, capacity: Capacity | None = None, step_s: float = STEP_S
    ) -> None:
        self.rate, self.step_s = rate, step_s
        self.a = Switchboard(PATIENCE, Capacity())
        self.b = Switchboard(PATIENCE, capacity or Capacity())
        self.b.serve("work", SCHEMA, handler)
        self.pipes: list[Pipe] = []
        self.written: list[tuple[float, int]] = []
        """What callers wrote: when, and how many bytes."""

    def call(self, name: str = "a", origin: str = "") -> Stream:
        calls: list[Stream] = []
        calling = StreamOpening(lambda transport, _: calls.append(self.a.call(transport, "b", "work", SCHEMA)))
        called = StreamOpening(lambda transport, _: answered(self.b, transport, name, origin))
        near, far = Pipe(calling, self.rate, self.written), Pipe(called, self.rate, [])
        near.other, far.other = far, near
        near.step_s = far.step_s = self.step_s
        self.pipes += [near, far]
        for pipe in (near, far):
            pipe.protocol.connection_made(pipe)
            pipe.protocol.get_buffer(-1)[:] = b"\0"
            pipe.protocol.buffer_updated(1)
        return calls[0]

    def cut(self, *which: int) -> None:
        for number in which or range(len(self.pipes)):
            self.pipes[number].cut = True


def scene(handler: Handler, play: Callable[[Line], Awaitable[None]], **settings: Any) -> None:
    """Run `play` with a line to `handler`, in virtual time."""

    async def main() -> None:
        line = Line(handler, **settings)
        async with asyncio.TaskGroup() as group:
            started = asyncio.Event()
            services = [group.create_task(board.run(started)) for board in (line.a, line.b)]
            await started.wait()
            async with asyncio.timeout(3600):
                await play(line)
            line.a.close()
            line.b.close()
            for service in services:
                service.cancel()

    run(main())


def with_work(play: Callable[[Line, Work], Awaitable[None]], seconds: float = 1e6) -> None:
    """Run `play` with a line to a handler that works for so long, and with that handler."""
    work = Work(seconds)
    scene(work, lambda line: play(line, work))


def run_by(runner: Callable[..., Any], *before: Any, gives: int = 0, **options: Any) -> Callable[..., Any]:
    """Run a coroutine function as a test, by `runner(*before, function, **options)`.

    The runner gives the first `gives` arguments itself; pytest gives the others, by their names.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            runner(*before, partial(function, **arguments), **options)

        signature = inspect.signature(function)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][gives:])
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.pytestmark = getattr(function, "pytestmark", [])
        return test

    return decorate


@run_by(scene, echo, gives=1, rate=100000.0)
async def test_a_slow_link_is_not_a_silent_peer(line: Line) -> None:
    stream, numbers = line.call(), torch.randn(BIG)
    await stream.send(Bulk(numbers=numbers))
    reply = await stream.receive()
    assert torch.equal(reply.numbers, numbers)
    assert now() > 3 * PATIENCE.silence_s


@run_by(scene, echo, gives=1, rate=100000.0)
async def test_beats_behind_the_bulk_of_another_stream_accuse_nobody(line: Line) -> None:
    quiet, busy = line.call(), line.call()
    await quiet.send(Ask(text="work"))
    line.cut(0, 1)  # the link of the quiet stream carries nothing for a while, the busy one all the time
    await busy.send(Bulk(numbers=torch.zeros(BIG)))
    assert now() > 1.5 * PATIENCE.silence_s
    line.pipes[0].cut = line.pipes[1].cut = False
    await quiet.send(Ask(text="again"))
    assert (await quiet.receive()).text == "work"


@run_by(with_work, gives=2)
async def test_silence_is_noticed_in_time_by_both_and_cancels_the_work(line: Line, work: Work) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    await asyncio.sleep(60)
    assert work.outcome == ""
    line.cut()
    begun = now()
    with pytest.raises(ConnectionAbortedError, match=r"b was silent for 5\.0 s"):
        await stream.receive()
    # An even line: no more than the least silence is borne with.
    least_s = PATIENCE.least_silence_s
    assert least_s - 2 * PATIENCE.beat_s <= now() - begun <= least_s + PATIENCE.beat_s
    await asyncio.sleep(PATIENCE.beat_s)
    assert work.outcome == "cancelled"
    assert line.b.statistics()["lost.ConnectionAbortedError"] == 1


@run_by(with_work, gives=2)
async def test_a_line_that_stutters_is_borne_with_and_its_end_is_noticed_all_the_same(line: Line, work: Work) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    for gap_s in (2.0, 4.0, 5.0, 8.0, 9.0, 11.0) * 3:
        line.cut()
        await asyncio.sleep(gap_s)
        for pipe in line.pipes:
            pipe.cut = False
        await asyncio.sleep(0.3)
    assert work.outcome == ""
    line.cut()
    begun = now()
    with pytest.raises(ConnectionAbortedError, match="b was silent"):
        await stream.receive()
    assert 9.0 < now() - begun <= PATIENCE.most_silence_s + PATIENCE.beat_s
    await work.ended.wait()


@run_by(scene, echo, gives=1)
async def test_a_program_that_hangs_is_noticed_however_often_it_is_called(line: Line) -> None:
    """Its daemon goes on opening streams."""
    first = line.call()
    await first.send(Ask(text="work"))
    assert (await first.receive()).text == "work"
    await asyncio.sleep(30)
    line.cut()
    begun = now()
    receiving = asyncio.create_task(first.receive())
    while not receiving.done():
        line.call()
        line.cut()
        await asyncio.sleep(1)
    with pytest.raises(ConnectionAbortedError, match="b was silent"):
        receiving.result()
    assert now() - begun <= PATIENCE.silence_s


@run_by(with_work, gives=2, seconds=60)
async def test_whoever_has_ended_owes_no_beats_and_can_be_called_later(line: Line, work: Work) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    stream.leave()
    await asyncio.sleep(20)
    # The only stream so far says nothing any more; one that begins now has its own time.
    other = line.call()
    await other.send(Ask(text="work"))
    await asyncio.sleep(5)
    assert work.outcome == ""
    await work.ended.wait()
    assert work.outcome == "done"


@run_by(scene, echo, gives=1)
async def test_what_is_known_of_a_line_outlives_its_streams_and_a_silence_that_was_none_is_learnt_from(
    line: Line,
) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    await asyncio.sleep(30)
    stream.break_off(ConnectionResetError("enough"))
    await asyncio.sleep(100)
    # Known from the stream before: an even line, of which six seconds of silence are too much.
    stream = line.call()
    line.cut()
    with pytest.raises(ConnectionAbortedError, match=r"silent for 5\.0 s"):
        await stream.receive()
    await asyncio.sleep(2)
    # It is there again: so the silence was the line's.
    stream = line.call()
    await asyncio.sleep(2)
    line.cut(-1, -2)
    await asyncio.sleep(6)
    line.pipes[-1].cut = line.pipes[-2].cut = False
    await stream.send(Ask(text="still there?"))
    assert (await stream.receive()).text == "still there?"


MOMENTS = st.lists(st.floats(0.0, 100.0), max_size=60)


@given(MOMENTS, st.sampled_from([0.1, 1.0, 5.0]))
def test_a_peer_is_given_up_within_bounds_whatever_was_heard(gaps: list[float], beat_s: float) -> None:
    patience = TimeoutSettings(beat_s=beat_s)
    pulse, at = patience.liveness(), 1e5
    assert pulse.silence_s == max(patience.silence_s, 3 * beat_s)
    for gap_s in gaps:
        at += gap_s
        pulse.hear(at, 1e5)
        assert not pulse.is_silent(at, 1e5)
        assert max(patience.least_silence_s, 3 * beat_s) <= pulse.silence_s <= patience.most_silence_s
        assert pulse.is_silent(at + pulse.silence_s + 1e-3, 1e5)
        assert not pulse.is_silent(at + pulse.silence_s - 1e-3, 1e5)
        assert not pulse.is_silent(at + 1e3, at + 1e3 - 1.0)


@given(st.floats(0.5, 5.5), st.integers(1, 50))
def test_bursts_and_our_own_absences_say_nothing_of_a_line(gap_s: float, count: int) -> None:
    plain, busy = PATIENCE.liveness(), PATIENCE.liveness()
    at = since = 0.0
    for _ in range(count):
        at += gap_s
        for pulse in (plain, busy):
            pulse.hear(at, since)
        for _ in range(20):
            busy.hear(at := at + PATIENCE.beat_s / 3, since)
        at += 1000.0
        busy.hear(at, since)  # after we had slept
        since = at
    assert plain.silence_s == busy.silence_s


def test_the_lines_of_strangers_are_forgotten_but_never_those_in_use() -> None:
    pulses = LivenessTable(PATIENCE)
    kept = pulses.begin("kept")
    for number in range(2 * MOST_PEERS):
        pulses.begin(str(number))
        pulses.end(str(number))
    assert len(pulses._peers) <= MOST_PEERS
    assert pulses.begin("kept") is kept
    assert (pulses.streams("kept"), pulses.streams("nobody")) == (2, 0)


@run_by(scene, echo, gives=1)
async def test_who_was_busy_itself_accuses_nobody(line: Line) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    loop: Any = asyncio.get_running_loop()
    loop.call_later(10.3, loop.jump, 10 * PATIENCE.silence_s)
    await asyncio.sleep(200)
    await stream.send(Ask(text="still there?"))
    assert [(await stream.receive()).text for _ in range(2)] == ["work", "still there?"]


@run_by(with_work, gives=2)
async def test_a_peer_that_takes_no_bytes_is_given_up(line: Line, work: Work) -> None:
    stream = line.call()
    for text in ("taken", "waits", "waits"):
        await stream.send(Ask(text=text))
    begun = now()
    with pytest.raises(ConnectionAbortedError, match="took no byte for 30 s"):
        await stream.send(Bulk(numbers=torch.zeros(BIG)))
    assert now() - begun <= PATIENCE.stall_s + 2 * PATIENCE.beat_s


@run_by(scene, echo, gives=1, rate=100000.0)
async def test_a_tensor_may_change_as_soon_as_it_is_sent(line: Line) -> None:
    stream, numbers = line.call(), torch.arange(float(BIG))
    await stream.send(Bulk(numbers=numbers))
    numbers.zero_()
    assert torch.equal((await stream.receive()).numbers, torch.arange(float(BIG)))


@pytest.mark.parametrize("after_s", [0.05, 1.0, 9.0])
def test_a_message_cut_by_its_sender_is_never_half_received(after_s: float) -> None:
    heard: list[Any] = []

    async def listen(conversation: Conversation) -> None:
        heard.append(await conversation.receive())

    async def play(line: Line) -> None:
        stream = line.call()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await stream.send(Bulk(numbers=torch.zeros(BIG)))
        with pytest.raises(ConnectionResetError):
            await stream.send(Ask(text="still there?"))
        await asyncio.sleep(1)
        assert heard == []
        assert line.b.statistics()["conversations.now"] == 0

    scene(listen, play, rate=1e5)


@run_by(with_work, gives=2, seconds=10 * PATIENCE.linger_s)
async def test_leaving_politely_lets_the_handler_finish_whatever_it_takes(line: Line, work: Work) -> None:
    stream = line.call()
    await stream.send(Ask(text="work"))
    stream.leave()
    with pytest.raises(ConnectionResetError, match="over"):
        await stream.send(Ask(text="more"))
    await asyncio.sleep(PATIENCE.linger_s + 2)
    assert line.a.statistics()["conversations.now"] == 0
    await work.ended.wait()
    assert work.outcome == "done"
    assert not any(name.startswith("lost") for name in line.b.statistics())


def test_a_handler_that_fails_is_told_to_the_caller_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def fussy(conversation: Conversation) -> None:
        if (await conversation.receive()).text == "bad":
            raise ValueError("a secret")
        await echo(conversation)

    async def play(line: Line) -> None:
        good, bad = line.call(), line.call()
        await good.send(Ask(text="good"))
        await bad.send(Ask(text="bad"))
        with pytest.raises(ConnectionResetError, match=r"b ended with an error: ValueError in the handler$"):
            await bad.receive()
        await good.send(Ask(text="again"))
        assert (await good.receive()).text == "again"

    scene(fussy, play)
    assert "a secret" in caplog.text


@run_by(scene, echo, gives=1, capacity=Capacity(per_peer=2))
async def test_room_is_bounded_and_given_back(line: Line) -> None:
    streams = [line.call() for _ in range(3)]
    for stream in streams[:2]:
        await stream.send(Ask(text="hello"))
    with pytest.raises(ConnectionResetError, match="busy with 2 conversations of yours"):
        await streams[2].receive()
    assert (await streams[0].receive()).text == "hello"
    streams[0].break_off(ConnectionResetError("enough"))
    await asyncio.sleep(1)
    another = line.call()
    await another.send(Ask(text="room?"))
    assert (await another.receive()).text == "room?"
    assert line.b.statistics()["conversations.busy"] == 1


def test_a_peer_that_violates_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def play(line: Line) -> None:
        for number in range(1, 41):
            stream = line.call()
            line.pipes[-2].write(b"\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\xc1")
            with pytest.raises(ConnectionResetError, match="does not decode"):
                await stream.receive()
            assert line.b.statistics()["violations.a"] == number
            assert caplog.text.count("a violated the protocol") == number.bit_length()

    scene(echo, play)


def test_a_handler_that_waits_for_a_message_learns_that_it_was_a_violation() -> None:
    ended: list[str] = []

    async def listen(stream: Any) -> None:
        try:
            await stream.receive()
        except Violation as violation:
            ended.append(str(violation))
            await asyncio.sleep(1)
            ended.append("not cancelled")

    async def play(line: Line) -> None:
        line.call()
        line.pipes[0].write(b"\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\xc1")
        await asyncio.sleep(5)
        assert len(ended) == 1
        assert "does not decode" in ended[0]

    scene(listen, play)


@pytest.mark.real_time
@pytest.mark.parametrize("last", [b"\xff" * 13, wire.end()])
async def test_a_peer_that_takes_nothing_keeps_no_socket_of_a_stream_that_is_over(
    monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    monkeypatch.setattr("noloco_node.libp2p.stream._FLUSH_S", 0.0)
    gone, loop = asyncio.Event(), asyncio.get_running_loop()

    class Noted(Stream):
        def connection_lost(self, error: Exception | None) -> None:
            gone.set()

    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await loop.create_connection(lambda: StreamOpening(lambda *_: None), sock=ours)
        protocol = FrameProtocol("b", SCHEMA, PATIENCE.liveness(), PATIENCE, 0.0)
        over = Noted(transport, protocol, ByteCounts(), lambda *_: None)
        now_s = 0.0
        while not transport.get_write_buffer_size():
            now_s += PATIENCE.beat_s
            over.tick(now_s, we_listened=False)
        theirs.send(last)
        with pytest.raises(ConnectionError):
            await over.receive()
        over.leave()
        async with asyncio.timeout(LAST_RESORT_S):
            await gone.wait()


@run_by(scene, echo, gives=1, capacity=Capacity(per_prefix=3))
async def test_many_names_of_one_place_leave_room_to_others_whatever_the_topic(line: Line) -> None:
    """Peers of one household, or of one machine, come from an address that says nothing of them."""
    crowd = [line.call(f"name {number}", f"/ip4/8.8.8.{number}/tcp/1") for number in range(4)]
    with pytest.raises(ConnectionResetError, match=r"busy with 3 conversations from 8\.8\.8\.0/24"):
        await crowd[3].receive()
    elsewhere = (
        "/ip4/8.8.9.1/tcp/1",
        "/ip4/8.8.8.1/tcp/1/p2p/x/p2p-circuit",
        *["/ip4/192.168.1.7/tcp/1"] * 4,
        *[""] * 4,
    )
    for number, origin in enumerate(elsewhere):
        other = line.call(f"other {number}", origin)
        await other.send(Ask(text="hello"))
        assert (await other.receive()).text == "hello"
    crowd[0].break_off(ConnectionResetError("enough"))
    await asyncio.sleep(1)
    another = line.call("name 3", "/ip4/8.8.8.3/tcp/1")
    await another.send(Ask(text="room?"))
    assert (await another.receive()).text == "room?"


@run_by(scene, echo, gives=1, capacity=Capacity(conversations=4, per_peer=1))
async def test_one_peer_cannot_take_the_room_of_all_by_streams_that_only_linger(line: Line) -> None:
    greedy = [line.call() for _ in range(10)]
    assert line.b.statistics()["conversations.now"] == 4
    for stream in greedy[4:]:
        with pytest.raises(ConnectionResetError, match="broke"):
            await stream.receive()
    other = line.call("c")
    await other.send(Ask(text="hello"))
    assert (await other.receive()).text == "hello"


@run_by(scene, echo, gives=1, capacity=Capacity(conversations=4, per_peer=1, per_prefix=2))
async def test_many_names_behind_relays_leave_room_to_others(line: Line) -> None:
    crowd = [line.call(f"name {n}", f"/ip4/8.8.{n}.8/tcp/1/p2p/x/p2p-circuit") for n in range(6)]
    for stream in crowd[2:]:
        with pytest.raises(ConnectionResetError, match="busy with 2 conversations from relays"):
            await stream.receive()
    other = line.call("honest", "/ip4/8.8.9.1/tcp/1")
    await other.send(Ask(text="hello"))
    assert (await other.receive()).text == "hello"


@pytest.mark.parametrize("only_linger", [False, True])
@pytest.mark.parametrize("prefixes", [1, 2, 5])
def test_a_few_prefixes_cannot_take_the_room_of_all(prefixes: int, only_linger: bool) -> None:
    """Two of them could: each had half of it."""

    async def play(line: Line) -> None:
        for number in range(200):
            for prefix in range(prefixes):
                with contextlib.suppress(ConnectionError):
                    line.call(f"name {prefix} {number}", f"/ip4/8.8.{prefix}.8/tcp/1")
                    if only_linger:
                        line.cut(-2)
        other = line.call("honest", "/ip4/8.9.9.1/tcp/1")
        await other.send(Ask(text="hello"))
        assert (await other.receive()).text == "hello"

    scene(echo, play, capacity=Capacity(conversations=64, per_peer=1, per_prefix=32))


@run_by(scene, echo, gives=1, capacity=Capacity(conversations=8, per_peer=1, per_prefix=3))
async def test_many_names_of_one_place_cannot_take_the_room_of_all_by_streams_that_only_linger(line: Line) -> None:
    """A caller that hears nothing of a refusal, or pretends so, holds its stream for half a minute."""
    for number in range(40):
        line.call(f"name {number}", f"/ip4/8.8.8.{number}/tcp/1")
        line.cut(-2)
    assert line.b.statistics()["conversations.now"] == 4 * 3
    other = line.call("honest", "/ip4/8.8.9.1/tcp/1")
    await other.send(Ask(text="hello"))
    assert (await other.receive()).text == "hello"
    await asyncio.sleep(2 * PATIENCE.linger_s)
    again = line.call("name 1", "/ip4/8.8.8.1/tcp/1")
    await again.send(Ask(text="room?"))
    assert (await again.receive()).text == "room?"
    other.break_off(ConnectionResetError("enough"))
    again.break_off(ConnectionResetError("enough"))
    await asyncio.sleep(1)
    assert not line.b._open_by_prefix


# What waits to be received.


async def deaf(conversation: Conversation) -> None:
    await asyncio.Event().wait()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("acd"), st.integers(1, 3), st.booleans()), min_size=1, max_size=8))
def test_what_waits_to_be_received_is_bounded_whoever_sends_it(calls: list[tuple[str, int, bool]]) -> None:
    most = 4_200_000  # two peers with two messages each

    async def play(line: Line) -> None:
        async def send(stream: Stream, count: int) -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(count):
                    await stream.send(Bulk(numbers=torch.ones(BIG)))

        streams = []
        async with asyncio.TaskGroup() as group:
            for name, count, is_cut in calls:
                streams.append(line.call(name))
                sending = group.create_task(send(streams[-1], count))
                await asyncio.sleep(0.75)
                if is_cut:
                    line.pipes[-2].cut = True  # half a message is all that comes
                assert line.b.statistics()["unread.bytes"] <= most
            await asyncio.sleep(10)
            assert line.b.statistics()["unread.bytes"] <= most
            sending.cancel()
            for stream in streams[::2]:
                stream.break_off(ConnectionResetError("enough"))
            await asyncio.sleep(10)
        line.b.close()
        await asyncio.sleep(1)
        assert line.b.statistics()["unread.bytes"] == 0

    scene(deaf, play, capacity=Capacity(unread_bytes=most))


@run_by(scene, deaf, gives=1, capacity=Capacity(unread_bytes=4200000))
async def test_whoever_fills_the_room_makes_way_for_others(line: Line) -> None:
    greedy = [line.call() for _ in range(4)]
    for stream in greedy:
        await stream.send(Bulk(numbers=torch.ones(BIG)))
    # Two of them are a peer's share; the oldest two had to go.
    await asyncio.sleep(1)
    for stream in greedy[:2]:
        with pytest.raises(ConnectionResetError):
            await stream.receive()
    assert line.b.statistics()["unread.evicted"] == 2
    other = line.call("c")
    await other.send(Bulk(numbers=torch.ones(BIG)))
    await asyncio.sleep(1)
    await other.send(Ask(text="still there?"))
    assert line.b.statistics()["unread.evicted"] == 2


@run_by(scene, echo, gives=1, capacity=Capacity(unread_bytes=0), rate=100000.0)
async def test_there_is_room_for_the_messages_of_every_topic_whatever_the_bound(line: Line) -> None:
    idle = [line.call(name) for name in "aac"]
    for stream in idle:
        await stream.send(Ask(text="and then silence, but for beats"))
        await stream.receive()
    stream = line.call()
    await stream.send(Bulk(numbers=torch.ones(BIG)))
    assert len((await stream.receive()).numbers) == BIG
    assert line.b.statistics() | {"unread.bytes": 0, "unread.evicted": 0} == line.b.statistics()


@run_by(scene, echo, gives=1)
async def test_what_came_with_the_end_of_its_stream_is_forgotten_with_it(line: Line) -> None:
    for end in (wire.error("enough"), wire.end(), b"", b"\xff"):
        called = StreamOpening(lambda transport, _: answered(line.b, transport, "a"))
        pipe = Pipe(called, 1.0, [])
        called.connection_made(pipe)
        first = b"".join(map(bytes, wire.encode(Ask(text="hello"), SCHEMA)))
        for content in (b"\0", first, end):
            while content:
                room = pipe.protocol.get_buffer(-1)
                count = min(len(room), len(content))
                room[:count] = content[:count]
                content = content[count:]
                pipe.protocol.buffer_updated(count)
        pipe.protocol.connection_lost(None)
    await asyncio.sleep(1)
    assert line.b.statistics()["unread.bytes"] == 0


def test_what_a_budget_holds_back_still_counts() -> None:
    passed, allowed = 0, asyncio.Event()

    async def admit(size: int, _: int) -> None:
        nonlocal passed
        await allowed.wait()
        passed += size

    async def held(conversation: Conversation) -> None:
        assert isinstance(conversation, Stream)
        conversation.limit(None, Pace(1000, admit))
        first = asyncio.create_task(conversation.receive())
        await asyncio.sleep(5)
        first.cancel()
        await conversation.receive()
        await conversation.send(Ask(text="done"))

    async def play(line: Line) -> None:
        stream = line.call()
        await stream.send(Bulk(numbers=torch.ones(BIG)))
        await asyncio.sleep(10)
        assert line.b.statistics()["unread.bytes"] > 4 * BIG
        allowed.set()
        assert (await stream.receive()).text == "done"
        assert line.b.statistics()["unread.bytes"] == 0
        assert passed > 4 * BIG

    scene(held, play)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40), st.booleans()), max_size=60))
def test_room_is_counted_to_the_byte(acts: list[tuple[int, int, bool]]) -> None:
    class Room:
        """What stands for a stream."""

        def __init__(self, peer: str) -> None:
            self.peer, self.held = peer, 0

        def evict(self) -> None:
            self.held = 0

    unread: Any = ReceiveBudget(100)
    rooms = [Room("abc"[number % 3]) for number in range(8)]
    for number, size, takes in acts:
        room = rooms[number]
        room.held += size if takes else -min(size, room.held)
        unread.hold(room, room.held)
        for peers in ({"a"}, {"b"}, {"c"}, set("abc")):
            held = [each.held for each in rooms if each.peer in peers and each.held]
            assert sum(held) <= (50 if len(peers) == 1 else 100) or len(held) == 1
        assert unread.held_bytes == sum(each.held for each in rooms)
    for room in rooms:
        unread.hold(room, 0)
    assert unread.held_bytes == 0
    assert not unread._streams


# Paced by a budget.


@settings(max_examples=6)
@given(st.floats(5 * LEAST_RATE, 2e6), st.integers(1, 4), st.floats(0.0, 3.0))
def test_what_is_paced_never_leaves_faster_than_the_rate(rate: float, count: int, pause_s: float) -> None:
    async def play(line: Line) -> None:
        valve = FairLimiter(rate)
        streams = [line.call() for _ in range(count)]
        await asyncio.sleep(pause_s)
        begun = now()
        line.written.clear()
        for stream in streams:
            stream.limit(valve.pace(), None)
        await asyncio.gather(*[each.send(Bulk(numbers=torch.zeros(BIG))) for each in streams])
        bucket = full_bucket(rate, 0.0)
        total = sum(size for _, size in line.written)
        assert total >= count * 4 * BIG
        assert now() - begun <= 1.02 * max(0.0, total - bucket.burst_bytes) / rate + 0.1
        # Over any stretch: the rate and one burst, and the beats, which do not wait.
        beats = 13 * 2 * (now() / PATIENCE.beat_s + 1) * count
        least = 0.0
        """Of what had passed less the rate, before any write so far."""
        passed = 0
        for at, size in line.written:
            least = min(least, passed - rate * (at - begun))
            passed += size
            assert passed - rate * (at - begun) - least <= bucket.burst_bytes + beats + 1
        await asyncio.sleep(count * 4 * BIG / rate + 1)
        # To wait for a budget, in either direction, is no silence: nobody was given up.
        assert taken == [(BIG,)] * count
        for board in (line.a, line.b):
            assert not any(name.startswith("lost") for name in board.statistics())

    async def take(conversation: Conversation) -> None:
        conversation.limit(None, slow.setdefault("down", FairLimiter(rate)).pace())
        taken.append((await conversation.receive()).numbers.shape)

    taken: list[tuple[int, ...]] = []
    slow: dict[str, FairLimiter] = {}
    scene(take, play, rate=1e9, step_s=1e-4)


@run_by(scene, echo, gives=1, rate=1000000000.0)
async def test_whoever_has_no_budget_writes_as_much_at_once_as_ever(line: Line) -> None:
    stream = line.call()
    stream.limit(FairLimiter(None).pace(), None)
    await stream.send(Bulk(numbers=torch.zeros(BIG)))
    assert [size for _, size in line.written if size > 1000] == [4 * BIG]


@run_by(scene, echo, gives=1)
async def test_a_message_that_waits_for_its_turn_holds_up_no_beat_and_may_be_taken_back(line: Line) -> None:
    stream, never = line.call(), asyncio.Event()

    async def admit(size: int, message_bytes: int) -> None:
        await never.wait()

    stream.limit(Pace(1000, admit), None)
    sending = asyncio.create_task(stream.send(Bulk(numbers=torch.zeros(BIG))))
    await asyncio.sleep(30)
    assert sum(size == 13 for _, size in line.written) >= 25
    sending.cancel()
    await asyncio.wait([sending])
    stream.limit(None, None)
    await stream.send(Ask(text="still there?"))
    assert (await stream.receive()).text == "still there?"


@run_by(scene, echo, gives=1)
async def test_a_paced_message_that_is_cut_breaks_its_stream(line: Line) -> None:
    stream, passed = line.call(), asyncio.Semaphore(5)

    async def admit(size: int, message_bytes: int) -> None:
        assert size <= 1000
        assert message_bytes > 4 * BIG
        await passed.acquire()

    stream.limit(Pace(1000, admit), None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await stream.send(Bulk(numbers=torch.zeros(BIG)))
    with pytest.raises(ConnectionResetError):
        await stream.send(Ask(text="still there?"))


@run_by(scene, echo, gives=1)
async def test_a_topic_that_nobody_serves_breaks_the_stream(line: Line) -> None:
    del line.b._topics["work"]
    stream = line.call()
    with pytest.raises(ConnectionResetError, match="broke"):
        await stream.receive()


@run_by(scene, echo, gives=1, capacity=Capacity(conversations=2))
async def test_streams_that_only_linger_are_bounded_and_nobody_is_served_while_we_close(line: Line) -> None:
    streams = [line.call() for _ in range(12)]
    assert line.b.statistics()["conversations.now"] == 8
    line.b.close()
    for stream in (*streams[8:], line.call()):
        with pytest.raises(ConnectionResetError, match="broke"):
            await stream.receive()


@run_by(scene, echo, gives=1)
async def test_nothing_is_forgotten_after_many_conversations(line: Line) -> None:
    for number in range(50):
        stream = line.call()
        await stream.send(Ask(text=str(number)))
        assert (await stream.receive()).text == str(number)
        if number % 2:
            stream.leave()
        else:
            stream.break_off(ConnectionResetError("enough"))
    await asyncio.sleep(2)
    for board in (line.a, line.b):
        assert board.statistics()["conversations.now"] == 0
        assert board.statistics()["unread.bytes"] == 0
        assert not any(pulse.streams for pulse in board._liveness._peers.values())
        assert not board._answering
