"""What two replicas may say to each other in a round is admitted exactly as the run's codec has it."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossip.exchange.messages import NOTHING, Probe, ProposePrefetch, Weights
from gossip.exchange.swap import PROBE, common_steps, probe_coordinates
from gossip.settings import Format, OuterConfig, absolute, wire_bytes
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.wire import FrameDecoder
from noloco_node.network.wire import encode as frame
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.protocols import gossip_schema, microbatch_schema
from pipeline.activation_codec import encode as encode_activations
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch
from research.codec.whole_sets import Encoded, decode, encode

SHAPES = ((3, 5), (7,), (), (301,))
codecs = pytest.mark.parametrize("codec", list(Format))


def schema_of(codec: Format, *, gamma: float = 0.7) -> Schema:
    outer = OuterConfig(codec=codec, beta=0.7, gamma=gamma)
    return gossip_schema(RunConfig(model=ModelConfig(architecture="llama"), outer=outer), SHAPES)


def heard(message: Any, said: Schema, by: Schema) -> Any:
    """Return what a receiver by one schema reads of what a sender by another has written."""
    intake, rest = FrameDecoder(by), memoryview(b"".join(frame(message, said)))
    while rest:
        space = intake.wants()
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        found = intake.got(count)
    return found.content


def drawn(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) + 2.0 for shape in SHAPES)


def coded(codec: Format, seed: int) -> tuple[Encoded, tuple[float, ...]]:
    steps: tuple[float, ...] = ()
    if codec is Format.INT4:
        probes = [torch.cat([tensor.flatten() for tensor in drawn(each)]) for each in (seed, seed + 1)]
        steps = common_steps(*probes, [prod(shape) for shape in SHAPES])
    return encode(codec, drawn(seed), steps), steps


@codecs
@settings(max_examples=10)
@given(st.integers(0, 10_000))
def test_what_is_encoded_passes_the_wire_and_is_decoded_as_the_sender_sees_it(codec: Format, seed: int) -> None:
    schema = schema_of(codec, gamma=0.5)
    encoded, steps = coded(codec, seed)
    for message in (Weights(fast=encoded.wire, slow=()), Weights(fast=(), slow=encoded.wire)):
        came = heard(message, schema, schema)
        decoded = decode(codec, came.fast or came.slow, drawn(seed + 1), steps)
        assert all(torch.equal(x, y) for x, y in zip(decoded, encoded.decoded, strict=True))


def others(codec: Format) -> Iterator[Format]:
    return (other for other in Format if other is not codec)


@codecs
def test_no_other_codec_is_admitted(codec: Format) -> None:
    for other in others(codec):
        if other is absolute(codec):
            continue
        with pytest.raises(Violation):
            heard(Weights(fast=coded(other, 1)[0].wire, slow=()), schema_of(other), schema_of(codec))


@codecs
def test_weights_to_adopt_are_admitted_in_the_absolute_form(codec: Format) -> None:
    wire = coded(absolute(codec), 1)[0].wire
    schema = schema_of(codec, gamma=0.5)
    for message in (Weights(fast=wire, slow=()), Weights(fast=(), slow=wire)):
        came = heard(message, schema, schema)
        assert all(torch.equal(x, y) for x, y in zip(came.fast or came.slow, wire, strict=True))


@codecs
def test_slow_weights_and_proposals_are_admitted_only_where_the_rule_needs_them(codec: Format) -> None:
    wire = coded(codec, 1)[0].wire
    both, alone = schema_of(codec, gamma=0.5), schema_of(codec)
    for message in (Weights(fast=wire, slow=wire), ProposePrefetch()):
        assert type(heard(message, both, both)) is type(message)
        with pytest.raises(Violation):
            heard(message, both, alone)


@codecs
def test_a_probe_is_of_the_common_coordinates(codec: Format) -> None:
    sizes = [prod(shape) for shape in SHAPES]
    length = sum(len(indices) for indices in probe_coordinates(0, sizes))
    assert length == min(PROBE, sum(sizes))
    probe = Probe(round=2, last_met=1, version=1, holds=NOTHING, slow=torch.ones(length), fast=None)
    schema = schema_of(codec)
    assert torch.equal(heard(probe, schema, schema).slow, probe.slow)
    of_snapshot = replace(probe, fast=torch.ones(length))
    if codec is Format.INT4:
        assert heard(of_snapshot, schema, schema).fast is not None
    else:
        with pytest.raises(Violation):
            heard(of_snapshot, schema_of(Format.INT4), schema)
    with pytest.raises(ValueError, match="schema"):
        frame(replace(probe, slow=torch.ones(length + 1)), schema)


@codecs
def test_a_round_takes_the_memory_that_its_codec_needs(codec: Format) -> None:
    weights, probe = wire_bytes(absolute(codec), SHAPES), 4 * sum(map(prod, SHAPES))
    # The largest message that may come: weights, or the probes, which are as large where there are few weights.
    assert schema_of(codec).body_bytes == max(weights, probe * (2 if codec is Format.INT4 else 1))


def of_stages(codec: str) -> Schema:
    pipeline = PipelineConfig(microbatch_size=2, sequence_length=3, codec=codec)
    return microbatch_schema(RunConfig(model=ModelConfig(architecture="llama"), pipeline=pipeline), 64)


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_activations_are_admitted_as_the_codec_has_them_and_in_no_other(codec: str) -> None:
    values, targets = torch.randn(2, 3, 64), torch.zeros(2, 3, dtype=torch.int64)
    for other in ACTIVATION_CODECS:
        down, back = ACTIVATION_CODECS[other]
        sent = (
            Microbatch(hidden=encode_activations(down, values), targets=targets, progress=0.0, budget_s=1.0),
            Gradient(hidden=encode_activations(back, values), loss=1.0, tokens=6),
        )
        for message in sent:
            if other == codec:
                assert torch.equal(heard(message, of_stages(other), of_stages(codec)).hidden, message.hidden)
            else:
                with pytest.raises(Violation):
                    heard(message, of_stages(other), of_stages(codec))


def test_the_run_file_names_every_codec_of_activations() -> None:
    assert get_args(get_type_hints(PipelineConfig)["codec"]) == tuple(ACTIVATION_CODECS)
