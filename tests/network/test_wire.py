"""The wire format: every message survives the journey, and nothing else becomes anything but a Violation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.exchange.messages import Accept, Decline, DeclineReason, Probe, Propose, Weights
from noloco_node.network import wire
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, OneOf, Schema, TensorSpec, Violation
from noloco_node.network.wire import Frame, FrameDecoder, FrameKind
from pipeline.messages import Gradient, Microbatch, Reason, Refused

HIDDEN = TensorSpec((2, 3, 4), "float32")
IDS = TensorSpec((2, 3), "int64")
WEIGHTS = (TensorSpec((3, 5), "float32"), TensorSpec((5,), "float32"), TensorSpec((0, 2), "float32"))
PROBE = TensorSpec((4,), "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A reply that is text."""

    text: str


SCHEMA = Schema(
    {
        Microbatch: MessageSpec(
            "Microbatch", {"hidden": OneOf((HIDDEN, IDS)), "targets": IDS}, added=("source", "forward_only")
        ),
        Gradient: MessageSpec("Gradient", {"hidden": OneOf((HIDDEN, None))}, added=("computed_by",)),
        Refused: MessageSpec("Refused"),
        Propose: MessageSpec("Propose"),
        Accept: MessageSpec("Accept"),
        Decline: MessageSpec("Decline"),
        Probe: MessageSpec("Probe", {"slow": PROBE, "fast": OneOf((PROBE, None))}),
        Weights: MessageSpec("Weights", {"fast": WEIGHTS, "slow": OneOf((WEIGHTS, ()))}),
        Text: MessageSpec("Text", header_bytes=LONG_HEADER_BYTES),
    }
)
CAP_BYTES = max(SCHEMA.body_bytes, SCHEMA.header_bytes)


def tensor(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype.startswith("int"):
        return torch.randint(-100, 100, spec.shape, dtype=getattr(torch, spec.dtype), generator=generator)
    return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def tensors(specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor(spec, seed) for seed, spec in enumerate(specs))


MESSAGES: list[Any] = [
    Microbatch(hidden=tensor(HIDDEN), targets=tensor(IDS), progress=0.25, budget_s=12.5),
    Microbatch(hidden=tensor(IDS), targets=tensor(IDS), progress=0.0, budget_s=300.0),
    Gradient(hidden=tensor(HIDDEN), loss=5.5, tokens=768),
    Gradient(hidden=None, loss=5.5, tokens=768),
    *[Refused(reason=reason, retry_after_s=0.5) for reason in Reason],
    Propose(round=7),
    Accept(round=7),
    *[Decline(reason=reason, retry_after_s=2.0, round=8) for reason in DeclineReason],
    Probe(round=5, last_met=2, version=9, holds=-1, slow=tensor(PROBE), fast=None),
    Probe(round=1, last_met=0, version=0, holds=4, slow=tensor(PROBE), fast=tensor(PROBE)),
    Weights(fast=tensors(WEIGHTS), slow=()),
    Weights(fast=tensors(WEIGHTS), slow=tensors(WEIGHTS)),
    Text(text="# the run file\n" * 1000),
]


def to_bytes(message: Any, schema: Schema = SCHEMA) -> bytes:
    return b"".join(bytes(buffer) for buffer in wire.encode(message, schema))


def feed(data: bytes, schema: Schema = SCHEMA, piece: int = 1 << 20) -> list[Frame]:
    """Feed bytes in pieces as a socket would; the frames that they complete."""
    intake, frames, place = FrameDecoder(schema), [], 0
    while place < len(data):
        wanted = intake.wants()
        assert 0 < len(wanted) <= CAP_BYTES
        count = min(len(wanted), len(data) - place, piece)
        wanted[:count] = data[place : place + count]
        place += count
        frame = intake.got(count)
        if frame is not None:
            assert not intake.in_message
            frames.append(frame)
    return frames


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def frame_of(header: Any, body: bytes = b"", *, kind: int = FrameKind.MESSAGE, body_bytes: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    length = len(body) if body_bytes is None else body_bytes
    return kind.to_bytes(1, "big") + len(raw).to_bytes(4, "big") + length.to_bytes(8, "big") + raw + body


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_every_message_survives_the_journey(message: Any, piece: int) -> None:
    (frame,) = feed(to_bytes(message), piece=piece)
    assert frame.kind is FrameKind.MESSAGE
    assert type(frame.content) is type(message)
    for field in fields(message):
        assert same(getattr(frame.content, field.name), getattr(message, field.name)), field.name


def test_frames_follow_each_other() -> None:
    data = to_bytes(MESSAGES[0]) + wire.beat() + to_bytes(MESSAGES[4]) + wire.end()
    assert [frame.kind for frame in feed(data, piece=5)] == [
        FrameKind.MESSAGE,
        FrameKind.BEAT,
        FrameKind.MESSAGE,
        FrameKind.END,
    ]


def test_an_error_carries_a_sentence_and_is_cut() -> None:
    assert feed(wire.error("busy: come back later")) == [Frame(FrameKind.ERROR, "busy: come back later")]
    assert feed(wire.error("")) == [Frame(FrameKind.ERROR, "")]
    (frame,) = feed(wire.error("x" * 5000))
    assert frame.content == "x" * wire.ERROR_BYTES


@pytest.mark.parametrize("last", [wire.end(), wire.error("no")])
def test_nothing_may_follow_the_end(last: bytes) -> None:
    with pytest.raises(Violation, match="after the end"):
        feed(last + wire.beat())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_are_cast_to_what_the_schema_says(dtype: str) -> None:
    schema = Schema({Gradient: MessageSpec("Gradient", {"hidden": TensorSpec((2, 3, 4), dtype)})})
    sent = tensor(HIDDEN)
    (frame,) = feed(to_bytes(Gradient(hidden=sent, loss=1.0, tokens=1), schema), schema)
    assert frame.content.hidden.dtype == getattr(torch, dtype)
    assert torch.equal(frame.content.hidden, sent.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers_travel_as_they_are_and_are_never_cast(dtype: str) -> None:
    schema = Schema({Gradient: MessageSpec("Gradient", {"hidden": TensorSpec((3,), dtype)})})
    sent = torch.tensor([1, 0, 7], dtype=getattr(torch, dtype))
    (frame,) = feed(to_bytes(Gradient(hidden=sent, loss=1.0, tokens=1), schema), schema)
    assert same(frame.content.hidden, sent)
    with pytest.raises(ValueError, match="the schema says"):
        wire.encode(Gradient(hidden=torch.zeros(3), loss=1.0, tokens=1), schema)


def test_a_tensor_is_sent_without_a_copy_and_a_strided_one_correctly() -> None:
    schema = Schema({Gradient: MessageSpec("Gradient", {"hidden": TensorSpec((4, 3), "float32")})})
    straight = torch.arange(12.0).reshape(4, 3)
    view = wire.encode(Gradient(hidden=straight, loss=1.0, tokens=1), schema)[1]
    straight[0, 0] = 42.0
    assert bytes(view[:4]) == bytes(memoryview(torch.tensor([42.0]).numpy()))
    strided = torch.arange(12.0).reshape(3, 4).t()
    (frame,) = feed(to_bytes(Gradient(hidden=strided, loss=1.0, tokens=1), schema), schema)
    assert torch.equal(frame.content.hidden, strided)


# Our own mistakes are no violations.


def test_our_own_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="has no Frame"):
        wire.encode(Frame(FrameKind.BEAT), SCHEMA)
    with pytest.raises(ValueError, match=r"Gradient.hidden .* float32\[2, 3, 4\] or none"):
        wire.encode(Gradient(hidden=torch.zeros(2, 3), loss=0.0, tokens=1), SCHEMA)
    nothing: Any = None
    with pytest.raises(ValueError, match=r"Microbatch.targets holds none"):
        wire.encode(Microbatch(hidden=tensor(HIDDEN), targets=nothing, progress=0.0, budget_s=1.0), SCHEMA)
    with pytest.raises(ValueError, match="header of Propose"):
        wire.encode(Propose(round=1), Schema({Propose: MessageSpec("Propose", header_bytes=4)}))


def test_a_schema_must_describe_just_the_tensors_of_its_messages() -> None:
    with pytest.raises(ValueError, match="has the tensors hidden, the schema says"):
        Schema({Gradient: MessageSpec("Gradient")})
    with pytest.raises(ValueError, match=r"has the tensors \(none\)"):
        Schema({Propose: MessageSpec("Propose", {"round": PROBE})})
    with pytest.raises(ValueError, match="header_bytes"):
        Schema({Propose: MessageSpec("Propose", header_bytes=LONG_HEADER_BYTES + 1)})
    with pytest.raises(TypeError, match="not a dataclass"):
        Schema({int: MessageSpec("int")})


# What strangers send.

MICROBATCH = {
    "message": "Microbatch",
    "fields": {"progress": 0.5, "budget_s": 1.0},
    "tensors": {"hidden": [("float32", (2, 3, 4))], "targets": [("int64", (2, 3))]},
}


def changed(**changes: Any) -> dict[str, Any]:
    return MICROBATCH | changes


TRAILING = {"fields": {"progress": 0.5, "budget_s": 1.0, "extra": 1}}
VIOLATIONS: list[tuple[str, bytes]] = [
    ("no frame is of kind 0", frame_of(b"", kind=0)),
    ("no frame is of kind 255", frame_of(b"", kind=255)),
    ("header of a BEAT frame: 1 bytes, 0 allowed", frame_of(b"x", kind=FrameKind.BEAT)),
    ("body of a END frame: 9 bytes, none allowed", frame_of(b"", kind=FrameKind.END, body_bytes=9)),
    ("header of a ERROR frame: 2000 bytes, 1024 allowed", frame_of(b"x" * 2000, kind=FrameKind.ERROR)),
    ("body of a ERROR frame", frame_of(b"x", kind=FrameKind.ERROR, body_bytes=1)),
    ("header of a MESSAGE frame: 1048577 bytes, 1048576 allowed", frame_of(b"x" * 1048577)),
    ("MESSAGE frame without a header", frame_of(b"")),
    ("does not decode", frame_of(b"\xc1")),
    ("does not decode", frame_of(b"\x91" * 60_000)),
    ("does not decode", frame_of(b"\x81\xa7message\xa1\xff")),
    ("does not decode.*Invalid value 'Nonsense'", frame_of(changed(message="Nonsense"))),
    ("does not decode.*missing required field `tensors`", frame_of({"message": "Propose", "fields": {"round": 1}})),
    ("does not decode.*unknown field `extra`", frame_of(changed(extra=1))),
    ("does not decode.*unknown field `extra`", frame_of(changed(**TRAILING))),
    ("does not decode.*Expected `float`", frame_of(changed(fields={"progress": "1", "budget_s": 1.0}))),
    ("does not decode.*Invalid enum value", frame_of({**MICROBATCH, "message": "Refused", "fields": {"reason": "no"}})),
    ("Microbatch.progress is nan", frame_of(changed(fields={"progress": float("nan"), "budget_s": 1.0}))),
    ("Microbatch.budget_s is inf", frame_of(changed(fields={"progress": 0.0, "budget_s": float("inf")}))),
    (
        "has the tensors hidden, hidden, targets expected",
        frame_of(changed(tensors={"hidden": [("float32", (2, 3, 4))]})),
    ),
    (
        r"tensor 0 of Microbatch.targets is int64\[2, 4\], int64\[2, 3\] expected",
        frame_of(changed(tensors=MICROBATCH["tensors"] | {"targets": [("int64", (2, 4))]})),
    ),
    (
        r"Microbatch.targets is int32\[2, 3\], int64\[2, 3\] expected",
        frame_of(changed(tensors=MICROBATCH["tensors"] | {"targets": [("int32", (2, 3))]})),
    ),
    (
        r"Microbatch.targets is none, int64\[2, 3\] expected",
        frame_of(changed(tensors=MICROBATCH["tensors"] | {"targets": None})),
    ),
    (
        "Microbatch.targets has 2 tensors",
        frame_of(changed(tensors=MICROBATCH["tensors"] | {"targets": [("int64", (2, 3))] * 2})),
    ),
    ("body of Microbatch: 143 bytes, 144 expected", frame_of(MICROBATCH, body_bytes=143)),
    ("body of Microbatch: 1152921504606846976 bytes, 144 expected", frame_of(MICROBATCH, body_bytes=1 << 60)),
]


@pytest.mark.parametrize(("words", "data"), VIOLATIONS, ids=[words[:40] for words, _ in VIOLATIONS])
def test_each_violation_is_named(words: str, data: bytes) -> None:
    with pytest.raises(Violation, match=words):
        feed(data)


def test_a_long_header_takes_its_memory_as_it_comes() -> None:
    text = "".join(f"{number} " for number in range(20_000))
    intake, data = wire.FrameDecoder(SCHEMA), memoryview(b"".join(map(bytes, wire.encode(Text(text=text), SCHEMA))))
    frame = None
    while len(data):
        wanted = intake.wants()
        assert len(wanted) <= 2**14
        part, data = data[: len(wanted)], data[len(wanted) :]
        wanted[: len(part)] = part
        frame = intake.got(len(part))
    assert frame.content.text == text


def test_a_long_header_is_for_the_messages_that_may_have_one() -> None:
    schema = Schema({Text: MessageSpec("Text", header_bytes=100), Propose: MessageSpec("Propose", header_bytes=10_000)})
    header = {"message": "Text", "fields": {"text": "x" * 200}, "tensors": {}}
    with pytest.raises(Violation, match=r"header of Text: 2\d\d bytes, 100 allowed"):
        feed(frame_of(header), schema)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    schema = Schema({Gradient: MessageSpec("Gradient", {"hidden": TensorSpec((5, 7), dtype)})})
    poisoned = torch.zeros(5, 7)
    poisoned[4, 6] = value
    with pytest.raises(Violation, match=r"Gradient\.hidden is not finite"):
        feed(to_bytes(Gradient(hidden=poisoned, loss=1.0, tokens=1), schema), schema)


def test_one_bad_tensor_of_many_is_named() -> None:
    weights = tensors(WEIGHTS)
    weights[1][3] = torch.nan
    with pytest.raises(Violation, match=r"Weights.fast\[1\] is not finite"):
        feed(to_bytes(Weights(fast=weights, slow=())))


@given(st.sampled_from(MESSAGES), st.data())
def test_a_truncated_message_is_no_message(message: Any, data: st.DataObject) -> None:
    raw = to_bytes(message)
    assert feed(raw[: data.draw(st.integers(0, len(raw) - 1))]) == []


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    ),
    st.integers(0, 200),
)
def test_any_header_is_refused_or_exactly_right(header: Any, body_bytes: int) -> None:
    with pytest.raises(Violation):
        feed(frame_of(header, body_bytes=body_bytes))


@given(st.text(min_size=1, max_size=30), st.sampled_from([1, 100, 2000]), st.sampled_from(["field", "kind", "tensor"]))
def test_no_words_of_a_stranger_reach_the_log_but_a_short_line(words: str, times: int, where: str) -> None:
    """A violation quotes what came: a line of its own, or colours, would pass for the words of this program."""
    fields = {"text": ""} | ({"z" + words * times: 0} if where == "field" else {})
    tensors = {words * times: None} if where == "tensor" else {}
    header = {"message": words * times if where == "kind" else "Text", "fields": fields, "tensors": tensors}
    with pytest.raises(Violation) as caught:
        feed(frame_of(header))
    assert str(caught.value).isprintable()
    assert 0 < len(str(caught.value)) <= 500


class Nested(msgspec.Struct, array_like=True):
    number: float = 0.0
    numbers: tuple[float, ...] = ()
    more: tuple[Nested, ...] = ()


NUMBERS = st.sampled_from([0.0, 1.0, -3.5, 1e-320, float("inf"), float("nan")])


@given(
    st.recursive(
        st.builds(Nested, NUMBERS, st.lists(NUMBERS, max_size=2).map(tuple)),
        lambda inner: st.builds(Nested, NUMBERS, more=st.lists(inner, max_size=2).map(tuple)),
        max_leaves=5,
    )
)
def test_a_number_that_is_of_no_use_is_found_at_any_depth(value: Nested) -> None:
    def numbers(each: Nested) -> list[float]:
        return [each.number, *each.numbers, *(number for inner in each.more for number in numbers(inner))]

    found = wire.decoded(msgspec.msgpack.encode(value), Nested, 10_000)
    assert (found is None) == (not all(map(wire.is_usable, numbers(value))))


def test_the_format_needs_no_torch_until_a_tensor_comes() -> None:
    program = (
        "import sys; from noloco_node.network.schema import *; from noloco_node.network.wire import *\n"
        "from pipeline.messages import *; from gossip.exchange.messages import *\n"
        "s = Schema({Refused: MessageSpec('Refused'), Propose: MessageSpec('Propose')})\n"
        "i = FrameDecoder(s)\n"
        "b = b''.join(encode(Propose(round=3), s))\n"
        "f = None\n"
        "while f is None:\n"
        "    w = i.wants(); n = len(w); w[:] = b[:n]; b = b[n:]; f = i.got(n)\n"
        "assert f.content == Propose(round=3) and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
