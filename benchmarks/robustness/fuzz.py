"""Feed broken messages to the decoder of the wire: each becomes a message of the schema or one violation.

    python -m benchmarks.robustness.fuzz                               # 10^7 messages in two processes
    python -m benchmarks.robustness.fuzz --count 100000 --processes 1  # fewer

Each begins as a good message of one of a small run's schemas, and is cut, flipped, joined with another, or has other
lengths or another header. It comes in pieces, as from a socket. The decoder asks for no more room at once than its
schema declares, and raises nothing but a `Violation`; a message that it does let through is encoded again, which checks
all that it holds. Printed are what became of them, how many a second, and by how much the processes grew.
"""

from __future__ import annotations

import argparse
import enum
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
import torch

from noloco_node.admission import admission_hook, ticket_service
from noloco_node.libp2p import reachability
from noloco_node.network import wire
from noloco_node.network.schema import FieldLayout, Schema, Violation
from noloco_node.network.wire import FrameDecoder, FrameKind
from noloco_node.run.protocols import gossip_schema, microbatch_schema, state_schema
from noloco_node.sim.scenario.setup import base
from noloco_node.state_sync import weight_exchange
from noloco_node.swarm import run_distribution, speed_test

SHAPES = ((3, 5), (40,))
WIDTH = 8
PREFIX_BYTES = 13
FRAMES = 4
"""Of each message, which differ by their numbers."""
CHUNK = 20_000
"""Messages that a process takes at a time."""
LENGTHS = (0, 1, 255, 256, 4096, 65_536, 65_537, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**63 - 1, 2**64 - 1, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "é" * 300, b"", b"\xff\xfe", [], [[]], {}, {"": None}, [["float32", [2**31, 2**31]]]),
)
PIECES = (1, *(7, 64) * 2, *(1 << 20,) * 27)


class FuzzedSchema(NamedTuple):
    """A schema, and frames of good messages of it."""

    schema: Schema
    frames: tuple[bytes, ...]
    cap_bytes: int
    """The most that the decoder may want at once: a tensor, or a part of a header."""


@cache
def fuzzed_schemas() -> tuple[FuzzedSchema, ...]:
    """Return all schemas of a small run."""
    run = base(transformer=True)
    of_run = (microbatch_schema(run, WIDTH), gossip_schema(run, SHAPES), state_schema(SHAPES))
    of_all = (admission_hook, ticket_service, reachability, weight_exchange, run_distribution, speed_test)
    return tuple(map(_fuzzed, (*of_run, run_distribution.HISTORY_SCHEMA, *(module.SCHEMA for module in of_all))))


def _fuzzed(schema: Schema) -> FuzzedSchema:
    rng = Random(0)
    frames = [_frame(schema, rule, rng) for rule in schema.rules.values() for _ in range(FRAMES)]
    frames += [wire.beat(), wire.end(), wire.error("busy")]
    return FuzzedSchema(schema, tuple(frames), max(schema.body_bytes, schema.header_bytes))


@cache
def good_frames(schema: Schema) -> tuple[bytes, ...]:
    """Return frames of good messages of a schema."""
    return _fuzzed(schema).frames


def _frame(schema: Schema, rule: Any, rng: Random) -> bytes:
    values = {field.name: _value(field.type, rng) for field in msgspec.structs.fields(rule.scalars)}
    values |= {name: _tensors(rng.choice(layouts)) for name, layouts in rule.layouts.items()}
    return b"".join(map(bytes, wire.encode(rule.kind(**values), schema)))


def _value(kind: Any, rng: Random) -> Any:
    if get_origin(kind) is Annotated:
        return _value(get_args(kind)[0], rng)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return rng.choice(list(kind))
    simple: dict[Any, Any] = {bool: True, int: rng.randrange(1000), float: rng.random(), str: "text", bytes: b"b" * 99}
    return simple[kind] if kind in simple else msgspec.convert([], kind, strict=False)


def _tensors(layout: FieldLayout) -> Any:
    tensors = tuple(torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.specs)
    return None if layout.is_none else tensors[0] if layout.is_single else tensors


# What is done to them.


def broken(rng: Random, frames: Sequence[bytes]) -> bytes:
    """Return a message with something wrong in it, mostly."""
    raw = bytearray(rng.choice(frames))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        match rng.randrange(9):
            case 0:
                _flip(rng, raw, len(raw))
            case 1:
                _flip(rng, raw, PREFIX_BYTES)
            case 2 | 3:
                _flip(rng, raw, PREFIX_BYTES + int.from_bytes(raw[1:5]))
            case 4:
                del raw[rng.randrange(len(raw) + 1) :]
            case 5:
                place = rng.randrange(len(raw) + 1)
                raw[place : place + rng.choice((0, 1, 8))] = rng.randbytes(rng.choice((1, 4, 40)))
            case 6:
                raw += rng.choice(frames)
            case 7:
                raw = _with_lengths(rng, raw)
            case 8:
                raw = _with_header(rng, raw)
        if not raw:
            break
    return bytes(raw)


def _flip(rng: Random, raw: bytearray, reach: int) -> None:
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(min(reach, len(raw)))] ^= rng.randint(1, 255)


def _with_lengths(rng: Random, raw: bytearray) -> bytearray:
    header, body = rng.choice(LENGTHS), rng.choice((*LENGTHS, 2**63, 2**64 - 1))
    return raw[:1] + (header if rng.random() < 0.5 else len(raw)).to_bytes(4) + body.to_bytes(8) + raw[PREFIX_BYTES:]


def _with_header(rng: Random, raw: bytearray) -> bytearray:
    """Replace a value somewhere in the header, whose length is right then."""
    end = PREFIX_BYTES + int.from_bytes(raw[1:5])
    changed = _with_value(rng, raw[PREFIX_BYTES:end])
    return raw[:1] + len(changed).to_bytes(4) + raw[5:PREFIX_BYTES] + changed + raw[end:]


def _with_value(rng: Random, raw: bytearray) -> bytearray:
    """Replace a value somewhere in MessagePack; return anything else as it is."""
    try:
        whole = msgspec.msgpack.decode(raw)
        place = whole
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            value = place[key]
            if not isinstance(value, dict | list) or not value or rng.random() < 0.3:
                place[key] = _near(rng, value) if isinstance(value, int | float) else rng.choice(VALUES)
                break
            place = place[key]
        return bytearray(msgspec.msgpack.encode(whole))
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, OverflowError):
        return raw


def _near(rng: Random, number: float) -> Any:
    """Return another number, which a message may hold more often than one of `VALUES`."""
    return rng.choice((*VALUES, *4 * (0, 1, number - 1, number + 1, 2 * number, -number, rng.randrange(2**16))))


def broken_header(rng: Random, frames: Sequence[bytes]) -> bytes:
    """Return a frame with another value in its header, which more often reaches who answers it."""
    return bytes(_with_header(rng, bytearray(rng.choice(frames))))


def broken_value(rng: Random, values: Sequence[bytes]) -> bytes:
    """Return a record's value, or a text, with something wrong in it, mostly."""
    raw = bytearray(rng.choice(values))
    for _ in range(rng.choice((1, 1, 2, 3))):
        match rng.randrange(8):
            case 0 if raw:
                _flip(rng, raw, len(raw))
            case 1:
                del raw[rng.randrange(len(raw) + 1) :]
            case 2:
                place = rng.randrange(len(raw) + 1)
                raw[place : place + rng.choice((0, 1, 8))] = rng.randbytes(rng.choice((1, 4, 40)))
            case 3:
                raw += rng.choice(values)
            case _:
                raw = _with_value(rng, raw)
    return bytes(raw)


# What becomes of them.


def outcomes(seed: int, count: int) -> Counter[str]:
    """Decode `count` broken messages; return what became of them. Raises what the decoder should not."""
    rng, schemas, seen = Random(f"{seed}|fuzz"), fuzzed_schemas(), Counter[str]()
    for _ in range(count):
        chosen = rng.choice(schemas)
        data, piece = broken(rng, chosen.frames), rng.choice(PIECES)
        try:
            seen[_decoded(chosen, data, piece)] += 1
        except Violation:
            seen["violation"] += 1
        except BaseException as error:
            error.add_note(f"schema {chosen.schema!r}, bytes {data.hex()}")
            raise
    return seen


def _decoded(chosen: FuzzedSchema, data: bytes, piece: int) -> str:
    decoder, place, what = FrameDecoder(chosen.schema), 0, "waits for more"
    while place < len(data):
        space = decoder.wants()
        assert 0 < len(space) <= chosen.cap_bytes, f"{len(space)} bytes wanted, {chosen.cap_bytes} declared"
        count = min(len(space), len(data) - place, piece)
        space[:count] = data[place : place + count]
        place += count
        frame = decoder.got(count)
        if frame is not None and frame.kind is FrameKind.MESSAGE:
            wire.encode(frame.content, chosen.schema)
            what = "message"
    return what


def _job(seed: int) -> tuple[Counter[str], float]:
    """Decode one chunk; return its outcomes, and the most memory that this process has held, in MiB."""
    seen = outcomes(seed, CHUNK)
    return seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Decode all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10**7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed; each is a chunk of messages")
    wanted = parser.parse_args()
    chunks = -(-wanted.count // CHUNK)
    begun_s, seen, peaks = time.monotonic(), Counter[str](), list[float]()
    with multiprocessing.get_context("spawn").Pool(wanted.processes, torch.set_num_threads, (1,)) as pool:
        for counts, peak in pool.imap(_job, range(wanted.first, wanted.first + chunks)):
            seen += counts
            peaks.append(peak)
    took_s = time.monotonic() - begun_s
    declared = max(chosen.cap_bytes for chosen in fuzzed_schemas()) / 2**20
    print(f"messages    {seen.total():,} of {len(fuzzed_schemas())} schemas")
    print(f"seconds     {took_s:.0f} in {wanted.processes} processes")
    print(f"rate        {seen.total() / took_s:,.0f} a second")
    print(f"became      {', '.join(f'{count:,} {what}' for what, count in seen.most_common())}")
    print(f"memory      at most {declared:.2f} MiB declared for one message; largest process {peaks[0]:.1f} MiB after")
    print(f"            {CHUNK:,} messages, {max(peaks):.1f} MiB at its peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
