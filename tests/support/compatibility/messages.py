"""Every message that travels, of each form that it may have, as the production encoder writes it."""

import dataclasses
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from compatibility import product
from compatibility.recorded import RUN_FILE

SHAPES = ((3, 5), (7,), (), (33,))
"""Of a stage's parameters: of odd sizes, one a scalar, one longer than the fewest that take a step of their own."""
WIDTH = 3
GAMMAS = {"gamma is beta": 1.0, "gamma is not beta": 0.5}


class Said(NamedTuple):
    """A message and the schema of the conversation in which it travels."""

    message: Any
    schema: product.Schema


def numbers(shape: tuple[int, ...], first: int = 0) -> Tensor:
    """Return numbers that bfloat16 holds exactly, and that need no generator, which could be another one elsewhere."""
    return ((torch.arange(first, first + prod(shape)) * 37 % 101).float() / 64 - 0.75).bfloat16().float().reshape(shape)


def said() -> dict[str, Said]:
    found: dict[str, Said] = {}
    for name, each in (*_microbatches(), *_gossip(), *_states(), *_services()):
        assert name not in found, f"two messages are called {name}"
        found[name] = each
    return found


def _run(**outer: Any) -> Any:
    run = product.Recipe(RUN_FILE.read_text(), "the recorded run").run
    return structs.replace(run, outer=dataclasses.replace(run.outer, **outer))


def _microbatches() -> Iterator[tuple[str, Said]]:
    run = _run()
    for codec in ("float32", "bfloat16"):
        pipeline = structs.replace(run.pipeline, codec=codec, microbatch_size=2, sequence_length=4)
        schema = product.microbatch_schema(structs.replace(run, pipeline=pipeline), WIDTH)
        hidden, targets = numbers((2, 4, WIDTH)), torch.arange(8).reshape(2, 4)
        microbatch = product.Microbatch(hidden=hidden, targets=targets, progress=0.25, budget_s=299.5)
        yield f"microbatch, {codec}: a microbatch", Said(microbatch, schema)
        held_out = dataclasses.replace(microbatch, forward_only=True)
        yield f"microbatch, {codec}: held-out text", Said(held_out, schema)
        gradient = product.Gradient(hidden=numbers((2, 4, WIDTH), 50), loss=5.75, tokens=8)
        yield f"microbatch, {codec}: a gradient", Said(gradient, schema)
    yield "microbatch: losses", Said(product.SequenceLosses(sums=numbers((2,), 40)), schema)
    for reason in product.Reason:
        yield f"microbatch: refused, {reason}", Said(product.Refused(reason=reason, retry_after_s=1.5), schema)


def _gossip() -> Iterator[tuple[str, Said]]:
    for kind, gamma in GAMMAS.items():
        for form in product.Format:
            schema = product.gossip_schema(_run(codec=form, gamma=gamma), SHAPES)
            where = f"gossip, {form}, {kind}"
            sizes = tuple(map(prod, SHAPES))
            probe, other = numbers((sum(sizes),)), numbers((sum(sizes),), 5)
            short = form is product.Format.INT4
            yield f"{where}: a probe", Said(_probe(probe, other if short else None), schema)
            if short:
                yield f"{where}: a probe ahead of a round", Said(_probe(probe, None), schema)
            fast, slow = encoded(form, 0), encoded(form, 9)
            both = kind == "gamma is not beta"
            yield f"{where}: weights", Said(product.Weights(fast=fast, slow=slow if both else ()), schema)
            yield f"{where}: no weights", Said(product.Weights(fast=(), slow=()), schema)
            if both:
                yield f"{where}: fast weights alone", Said(product.Weights(fast=fast, slow=()), schema)
                yield f"{where}: slow weights alone", Said(product.Weights(fast=(), slow=slow), schema)
            if short:
                taken = encoded(product.Format.BFLOAT16, 0)
                adopted = product.Weights(fast=(), slow=taken) if both else product.Weights(fast=taken, slow=())
                yield f"{where}: weights to be adopted", Said(adopted, schema)
    yield "gossip: propose a prefetch", Said(product.ProposePrefetch(), schema)
    yield "gossip: propose", Said(product.Propose(round=12), schema)
    yield "gossip: accept", Said(product.Accept(round=13), schema)
    yield "gossip: acknowledge", Said(product.Acknowledge(), schema)
    for reason in product.DeclineReason:
        declined = product.Decline(reason=reason, retry_after_s=0.75, round=14)
        yield f"gossip: declined, {reason}", Said(declined, schema)


def _probe(slow: Tensor, fast: Tensor | None) -> Any:
    return product.Probe(round=7, last_met=5, version=6, holds=3, slow=slow, fast=fast)


def encoded(form: product.Format, first: int) -> tuple[Tensor, ...]:
    return product.codec.encode(
        form, product.codec.OwnWeights(weights(first)), steps() if form is product.Format.INT4 else ()
    ).coded.wire


def weights(first: int) -> tuple[Tensor, ...]:
    """Return a stage's weights. `first`: other ones for each."""
    return tuple(numbers(shape, first + number) for number, shape in enumerate(SHAPES))


def steps() -> tuple[float, ...]:
    """Return the steps of int4 that two sides agree on without a word."""
    sizes = list(map(prod, SHAPES))
    return product.common_steps(numbers((sum(sizes),)), numbers((sum(sizes),), 5), sizes)


def _states() -> Iterator[tuple[str, Said]]:
    schema = product.state_schema(SHAPES)
    spans = product.pieces.cut([4 * prod(shape) for shape in SHAPES])
    hashes = torch.arange(len(spans) * product.pieces.DIGEST_BYTES, dtype=torch.uint8).reshape(len(spans), -1)
    for parts in product.Parts:
        yield f"state: a request for {parts}", Said(product.StateRequest(parts=parts), schema)
    wanted = product.StateRequest(parts=product.Parts.ALL, snapshot="0123456789abcdef")
    yield "state: a request for a copy", Said(wanted, schema)
    yield "state: busy", Said(product.Busy(retry_after_s=5.0), schema)
    yield "state: a manifest of nothing", Said(manifest({}), schema)
    everything = {str(section): hashes + number for number, section in enumerate(product.Section)}
    yield "state: a manifest of everything", Said(manifest(everything), schema)
    for section in product.Section:
        request = product.PieceRequest(snapshot="0123456789abcdef", section=section, number=0)
        yield f"state: a request for a piece of {section}", Said(request, schema)
    data = torch.arange(spans[0].size_bytes).to(torch.uint8)
    yield "state: a piece", Said(product.Piece(data=data), schema)
    yield "state: gone", Said(product.Gone(), schema)


def manifest(hashes: dict[str, Tensor]) -> Any:
    return product.Manifest(
        snapshot="0123456789abcdef",
        round=9,
        inner_steps=36,
        progress=0.5,
        optimiser_steps=35,
        meetings=1,
        last_met=8,
        norm=2.25,
        **hashes,
    )


def _services() -> Iterator[tuple[str, Said]]:
    yield "run: a request", Said(product.RunRequest(), product.RUN_SCHEMA)
    reply = product.RunFile(text='# Grüße\nname = "x"\n', unix_time=1_800_000_000.25)
    yield "run: the run file", Said(reply, product.RUN_SCHEMA)
    yield "run: how far, a request", Said(product.ReachedRequest(), product.HISTORY_SCHEMA)
    yield "run: how far", Said(product.ReachedReply(progress=0.375), product.HISTORY_SCHEMA)
    ticket, hook = product.ticket_service, product.admission_hook
    yield "admission: a ticket, please", Said(ticket.TicketRequest(nonce=2**33, trains=True), ticket.SCHEMA)
    yield "admission: a ticket", Said(ticket.TicketReply(ticket=bytes(range(16)), refusal=""), ticket.SCHEMA)
    yield "admission: no ticket", Said(ticket.TicketReply(ticket=b"", refusal="no: ü"), ticket.SCHEMA)
    yield "admission: our ticket", Said(hook.ShowTicket(ticket=b"ticket", revocations=b"list"), hook.SCHEMA)
    yield "admission: a verdict", Said(hook.TicketVerdict(refusal="no: ü", revocations=b"list"), hook.SCHEMA)
    measuring = product.measuring
    for name, message in {
        "send me": measuring.SendMe(pieces=16),
        "take from me": measuring.TakeFromMe(pieces=2),
        "go": measuring.Go(),
        "a piece": measuring.SpeedTestPayload(content=bytes(range(16))),
        "took": measuring.Took(count=262_144, seconds=0.125),
        "not now": measuring.NotNow(retry_after_s=2.0),
    }.items():
        yield f"doctor: {name}", Said(message, measuring.SCHEMA)
    reachability = product.reachability
    yield "reach: dial me", Said(reachability.DialMe(ports=(4001, 4002)), reachability.SCHEMA)
    place, relay = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.2/tcp/4001/p2p/12D3KooW"
    dialled = reachability.DialBackReply(place=place, tried=True, relays=(relay,))
    yield "reach: dialled", Said(dialled, reachability.SCHEMA)


def frames() -> dict[str, bytes]:
    """Return what travels beside messages."""
    return {"beat": product.beat(), "end": product.end(), "error": product.error("no, for a reason: ü")}


def frame_of(each: Said) -> bytes:
    return b"".join(product.encode(each.message, each.schema))


def heard(frame: bytes, schema: product.Schema) -> Any:
    intake, rest = product.Intake(schema), memoryview(frame)
    while True:
        space = intake.wants()
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        found = intake.got(count)
        if found is not None:
            assert not rest, f"{len(rest)} bytes follow the frame"
            return found.content
        assert count, "the frame ends too early"


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # What is sent as bfloat16 is given as float32.
        return one.shape == other.shape and torch.equal(one.to(other.dtype), other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one)]
        return all(alike(getattr(one, name), getattr(other, name)) for name in names)
    return type(one) is type(other) and one == other


def recorded() -> dict[str, Any]:
    found = {name: frame_of(each).hex() for name, each in said().items()}
    return {"messages": found, "frames": {name: frame.hex() for name, frame in frames().items()}}
