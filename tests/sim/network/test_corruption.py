"""Messages that arrive wrong: whatever is done to one, a receiver gets a message of its schema or one Violation."""

import asyncio
import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, TensorSpec, Violation
from noloco_node.sim.network.medium import GARBLING, Corruption, spoil, tensors_of
from noloco_node.sim.network.sim_network import SimNetwork


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Something with tensors."""

    number: int
    one: Tensor
    several: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Something with a tensor that has no floats."""

    tokens: Tensor


SCHEMA = Schema(
    {
        Load: MessageSpec(
            "Load",
            {
                "one": TensorSpec((2, 3), "bfloat16"),
                "several": (TensorSpec((5,), "float32"), TensorSpec((), "float32")),
            },
        ),
        Tokens: MessageSpec("Tokens", {"tokens": TensorSpec((4,), "int64")}),
    }
)


def load() -> Load:
    several = (torch.arange(5, dtype=torch.float32), torch.tensor(1.0))
    return Load(number=3, one=torch.ones(2, 3, dtype=torch.bfloat16), several=several)


def tampered(how: Corruption, seed: int = 0) -> Load:
    message = spoil(load(), how, SCHEMA, SCHEMA, Random(seed))
    assert isinstance(message, Load)
    return message


@pytest.mark.parametrize(("how", "words"), [(Corruption.SHAPE, "expected"), (Corruption.NOT_FINITE, "not finite")])
def test_a_wrong_shape_and_a_nan_are_violations(how: Corruption, words: str) -> None:
    with pytest.raises(Violation, match=words):
        tampered(how)


def test_absurd_values_pass_the_wire() -> None:
    found, sent = tampered(Corruption.GARBLED_VALUES), load()
    for one, other in zip(tensors_of(found), tensors_of(sent), strict=True):
        torch.testing.assert_close(one.float(), GARBLING * other.float(), rtol=1e-2, atol=0.0)
    for tensor, original in zip(tensors_of(sent), tensors_of(load()), strict=True):
        assert torch.equal(tensor, original)


@given(st.integers(0, 2**32))
def test_flipped_bytes_are_a_finite_message_or_a_violation(seed: int) -> None:
    for message in (load(), Tokens(tokens=torch.arange(4))):
        try:
            found = spoil(message, Corruption.FLIP, SCHEMA, SCHEMA, Random(seed))
        except Violation:
            continue
        assert type(found) is type(message)
        for one, other in zip(tensors_of(found), tensors_of(message), strict=True):
            assert one.shape == other.shape
            assert bool(torch.isfinite(one).all())


def test_both_outcomes_of_a_flip_happen_and_its_seed_decides() -> None:
    def outcome(seed: int) -> str:
        try:
            return str(tampered(Corruption.FLIP, seed))
        except Violation as violation:
            return f"violation: {violation}"

    outcomes = [outcome(seed) for seed in range(60)]
    assert outcomes == [outcome(seed) for seed in range(60)]
    violations = sum(text.startswith("violation") for text in outcomes)
    assert 0 < violations < len(outcomes)


async def test_a_violation_breaks_the_conversation_at_both_ends_and_is_counted() -> None:
    heard: list[Load] = []

    async def listen(conversation: Conversation) -> None:
        heard.append(await conversation.receive())
        await conversation.send(heard[-1])

    hub = SimNetwork()
    a, b = hub.network("a"), hub.network("b")
    await b.serve("load", SCHEMA, listen)

    async def exchange() -> Load:
        async with a.talk("b", "load", SCHEMA) as conversation:
            await conversation.send(load())
            answer: Load = await conversation.receive()
            return answer

    hub.corrupt("a", Corruption.NOT_FINITE)
    with pytest.raises(ConnectionResetError, match=r"b ended with an error: .*not finite"):
        await exchange()
    assert heard == []
    assert b.statistics()["violations.a"] == 1
    hub.corrupt("b", Corruption.SHAPE)
    with pytest.raises(Violation, match="expected"):
        await exchange()
    assert a.statistics()["violations.b"] == 1
    assert torch.equal((await exchange()).one, load().one)
    await asyncio.sleep(1)
    assert hub.statistics()["messages.tampered"] == 2
    assert hub.open_calls("a") == hub.open_calls("b") == 0
    assert hub.failures == []
