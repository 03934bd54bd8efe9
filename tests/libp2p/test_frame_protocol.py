"""The rules of a conversation, without any event loop: bytes and times in, events and bytes out."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_messages import Ask, Bulk, schema_of

from noloco_node.libp2p.settings import TimeoutSettings
from noloco_node.libp2p.stream import MOST_IDLE_FRAMES, MOST_WAITING, Event, FrameProtocol, SendState, StreamClosed
from noloco_node.network import wire
from noloco_node.network.schema import Violation

TIMEOUTS = TimeoutSettings()
NUMBERS = 40
SCHEMA = schema_of(NUMBERS)
MOST_BYTES = SCHEMA.header_bytes + SCHEMA.body_bytes + 13
"""Of one frame."""


def conversation(now_s: float = 0.0) -> FrameProtocol:
    return FrameProtocol("b", SCHEMA, TIMEOUTS.liveness(), TIMEOUTS, now_s)


def framed(message: Any) -> bytes:
    return b"".join(map(bytes, wire.encode(message, SCHEMA)))


def feed(protocol: FrameProtocol, content: bytes, sizes: list[int]) -> list[Event]:
    """Hand bytes in, at most so many at a time (in turn), taking every message at once; return the events."""
    events: list[Event] = []
    turn = 0
    while content and protocol.closed is None:
        buffer = protocol.next_buffer()
        count = min(len(buffer), len(content), sizes[turn % len(sizes)])
        turn += 1
        buffer[:count] = content[:count]
        content = content[count:]
        event = protocol.receive_bytes(count, 0.0)
        if event is not None:
            events.append(event)
        assert 0 <= protocol.held_bytes <= MOST_BYTES
    return events


def taken(protocol: FrameProtocol) -> list[Any]:
    messages = []
    while protocol.next_message_bytes is not None:
        messages.append(protocol.next_message(0.0))
    return messages


def shown(value: Any) -> str:
    return repr([message.numbers.tolist() if isinstance(message, Bulk) else message for message in value])


SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5)
FRAMES = st.one_of(
    st.text(max_size=30).map(lambda text: framed(Ask(text=text))),
    st.floats(-1, 1, width=32).map(lambda number: framed(Bulk(numbers=torch.full((NUMBERS,), number)))),
    st.just(wire.beat()),
)
LASTS = st.sampled_from([b"", wire.end(), wire.error("enough"), b"\xff" * 13, wire.end() + wire.beat()])


@given(st.lists(FRAMES, max_size=5), LASTS, SIZES)
def test_any_split_of_the_bytes_gives_the_same_events(frames: list[bytes], last: bytes, sizes: list[int]) -> None:
    content = b"".join(frames) + last
    whole, split = conversation(), conversation()
    outcomes = []
    for protocol, chunks in ((whole, [len(content) + 1]), (split, sizes)):
        events, messages = [], []
        for frame in (*frames, last):
            events += feed(protocol, frame, chunks)
            messages += taken(protocol)
        outcomes.append((repr(events), shown(messages), protocol.data_to_send(), protocol.held_bytes))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].count("MESSAGE_RECEIVED") == sum(frame != wire.beat() for frame in frames)
    assert outcomes[0][3] == 0


@given(st.lists(FRAMES, max_size=3), st.binary(max_size=60), st.data())
def test_whatever_comes_is_an_event_or_a_violation(frames: list[bytes], noise: bytes, data: st.DataObject) -> None:
    content = bytearray(b"".join(frames) + noise)
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    protocol = conversation()
    for start in range(0, len(content), 7):
        for event in feed(protocol, bytes(content[start : start + 7]), [7]):
            assert isinstance(event, Event | StreamClosed)
        taken(protocol)
    if protocol.closed is not None and isinstance(protocol.closed.error, Violation):
        assert protocol.data_to_send() == wire.error(str(protocol.closed.error))
        with pytest.raises(Violation):
            protocol.check_receive()


@given(st.floats(0.0, 1e4), st.booleans(), st.integers(0, 2))
def test_frames_that_say_nothing_come_no_faster_than_beats_and_a_few_besides(
    age_s: float, is_left: bool, step: int
) -> None:
    """Each takes a step of the loop: a peer could stop it with 13 bytes at a time."""
    protocol = conversation()
    if is_left:
        protocol.leave(0.0)
        protocol.data_to_send()
    idle = (wire.beat(), framed(Ask(text="still there?")), wire.beat())[step] if is_left else wire.beat()
    most = MOST_IDLE_FRAMES + int(2 * age_s / TIMEOUTS.beat_s)

    def take(count: int) -> None:
        for _ in range(count):
            content = idle
            while content and protocol.closed is None:
                buffer = protocol.next_buffer()
                size = min(len(buffer), len(content))
                buffer[:size] = content[:size]
                content = content[size:]
                protocol.receive_bytes(size, age_s)

    protocol._idle_frames = most - 3
    take(3)
    assert protocol.closed is None
    take(1)
    assert isinstance(protocol.closed.error, Violation)
    assert bool(protocol.data_to_send()) != is_left


@given(st.floats(0.0, 240.0), st.integers(1, 1000))
def test_no_peer_that_beats_as_it_should_is_refused_for_it(held_up_s: float, count: int) -> None:
    protocol = conversation(held_up_s)  # so long after the other side began
    for number in range(count):
        protocol.next_buffer()[:] = wire.beat()
        assert protocol.receive_bytes(13, max(held_up_s, number * TIMEOUTS.beat_s)) is None


def test_a_conversation_is_quiet_until_something_waits_or_either_side_ends() -> None:
    protocol, left, ended = conversation(), conversation(), conversation()
    feed(protocol, wire.beat() + framed(Ask(text="well?")), [100])
    assert not protocol.is_quiet
    taken(protocol)
    assert protocol.is_quiet
    left.leave(0.0)
    feed(ended, wire.end(), [100])
    assert not left.is_quiet
    assert not ended.is_quiet


@given(st.integers(0, MOST_WAITING), st.integers(0, 200))
def test_memory_is_counted_to_the_byte(count: int, more_bytes: int) -> None:
    protocol, message = conversation(), framed(Bulk(numbers=torch.zeros(NUMBERS)))
    kept = sum(len(message) - 12 for _ in range(count) if feed(protocol, message, [1]))
    part = message[: min(more_bytes, len(message) - 1)]
    feed(protocol, part, [1])
    kept += max(0, len(part) - 12)  # from the byte on that completes the prefix
    assert protocol.held_bytes == kept
    assert protocol.is_full == (count == MOST_WAITING)
    assert protocol.is_quiet == (kept == 0)
    protocol.break_off(ConnectionResetError("enough"))
    assert not protocol.is_quiet
    assert protocol.held_bytes == count * (len(message) - 12)
    protocol.discard()
    assert protocol.held_bytes == 0
    assert protocol.next_message_bytes is None


@given(st.lists(st.floats(0.01, 0.5), max_size=80))
def test_a_beat_is_due_when_nothing_else_was_sent(steps: list[float]) -> None:
    protocol, now_s, sent_s = conversation(), 0.0, 0.0
    for number, step_s in enumerate(steps):
        now_s += step_s
        feed(protocol, wire.beat(), [13])
        protocol.restart_timers(now_s)
        assert protocol.tick(now_s, 0) is None
        assert (protocol.data_to_send() == wire.beat()) == (now_s - sent_s >= TIMEOUTS.beat_s)
        if now_s - sent_s >= TIMEOUTS.beat_s:
            sent_s = now_s
        if number % 7 == 3:
            protocol.start_piece(now_s)
            protocol.finish_message()
            sent_s = now_s


def test_no_beat_falls_into_a_message() -> None:
    protocol = conversation()
    protocol.start_piece(0.0)
    assert protocol.tick(5.0, 1) is None
    assert protocol.data_to_send() == b""
    protocol.finish_message()
    assert protocol.tick(5.1, 1) is None
    assert protocol.data_to_send() == wire.beat()


@given(st.floats(0.0, 100.0))
def test_silence_closes_the_stream_in_its_time_and_only_while_we_listen(silent_s: float) -> None:
    listening, full = conversation(), conversation()
    for _ in range(MOST_WAITING):
        feed(full, framed(Ask(text="waits")), [100])
    closed = listening.tick(silent_s, 0)
    assert (closed is not None) == (silent_s > TIMEOUTS.silence_s)
    if closed is not None:
        assert isinstance(closed.error, ConnectionAbortedError)
    assert full.tick(silent_s, 0) is None
    full.next_message(silent_s)
    assert full.tick(silent_s + TIMEOUTS.silence_s - 0.1, 0) is None
    assert full.tick(silent_s + TIMEOUTS.silence_s + 0.1, 0) is not None


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(0, 3)), max_size=30))
def test_whoever_takes_no_byte_is_given_up(steps: list[tuple[float, int]]) -> None:
    protocol, now_s, moved_s, before = conversation(), 0.0, 0.0, 0
    most_s = TIMEOUTS.stall_s
    for step_s, unsent in steps:
        now_s += step_s
        if not protocol.peer_ended:
            feed(protocol, wire.end(), [13])
        if unsent == 0 or unsent != before:
            before, moved_s = unsent, now_s
        closed = protocol.tick(now_s, unsent)
        if closed is not None:
            assert now_s - moved_s > most_s
            return
        assert now_s - moved_s <= TIMEOUTS.most_stall_s


def test_whoever_leaves_waits_for_the_other_s_end_but_not_for_ever() -> None:
    protocol = conversation()
    assert protocol.leave(0.0) is None
    assert protocol.send_state is SendState.ENDED
    assert protocol.data_to_send() == wire.end()
    assert feed(protocol, framed(Ask(text="late")), [100]) == []
    assert protocol.held_bytes == 0
    assert feed(protocol, wire.end(), [13]) == [StreamClosed(None)]

    protocol = conversation()
    feed(protocol, wire.end(), [13])
    assert protocol.leave(0.0) == StreamClosed(None)

    protocol = conversation()
    protocol.leave(0.0)
    protocol.restart_timers(TIMEOUTS.linger_s)
    assert protocol.tick(TIMEOUTS.linger_s, 0) is None
    protocol.restart_timers(TIMEOUTS.linger_s + 0.1)
    assert protocol.tick(TIMEOUTS.linger_s + 0.1, 0) == StreamClosed(None)


def test_an_end_within_a_message_breaks_the_stream() -> None:
    for end in (lambda each: each.leave(0.0), lambda each: each.fail("no", 0.0)):
        protocol = conversation()
        protocol.start_piece(0.0)
        closed = end(protocol)
        assert isinstance(closed.error, ConnectionResetError)
        assert protocol.data_to_send() == b""


def test_a_closed_stream_says_why_and_takes_nothing_more() -> None:
    protocol = conversation()
    closed = protocol.break_off(ConnectionAbortedError("enough"))
    assert closed is not None
    for call in (protocol.finish_message, protocol.check_receive, lambda: protocol.encode(Ask(text="?"))):
        with pytest.raises(ConnectionAbortedError, match="enough"):
            call()
    assert protocol.break_off(ConnectionResetError("again")) is None
    assert (
        protocol.leave(0.0) is protocol.fail("no", 0.0) is protocol.lose_connection() is protocol.tick(1e9, 9) is None
    )
    assert feed(protocol, framed(Ask(text="late")), [100]) == []
    assert protocol.data_to_send() == b""


@pytest.mark.parametrize(("end", "is_polite"), [(b"", False), (wire.end(), True)])
def test_a_connection_that_is_lost_after_an_end_was_not_broken(end: bytes, is_polite: bool) -> None:
    protocol = conversation()
    feed(protocol, end, [13])
    closed = protocol.lose_connection()
    assert (closed.error is None) == is_polite
