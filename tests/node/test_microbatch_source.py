"""The source: what is refused is tried again with the same tokens, and only what came back is counted."""

import asyncio
from random import Random

import torch
from handlers import now
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.node.microbatches import LONGEST_RETRY_S, MicrobatchSource
from pipeline.messages import Gradient, Microbatch, Reason, Refused, Reply


def proved(signer: str, samples: int) -> None:
    assert (signer, samples) == ("last", 2)


@given(refusals=st.lists(st.booleans(), max_size=40), in_flight=st.integers(1, 5))
async def test_every_sample_is_trained_on_in_the_end(refusals: list[bool], in_flight: int) -> None:
    drawn, trained, flying, most = [], [], 0, 0
    answers = iter(refusals)

    async def draw() -> Tensor:
        drawn.append(len(drawn))
        return torch.full((2, 5), len(drawn) - 1)

    async def process(microbatch: Microbatch, sender: str) -> Reply:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.1)
        flying -= 1
        assert (sender, microbatch.hidden.shape, microbatch.targets.shape) == ("me", (2, 4), (2, 4))
        if next(answers, False):
            return Refused(reason=Reason.FULL, retry_after_s=0.5)
        trained.append(int(microbatch.hidden[0, 0]))
        return Gradient(hidden=None, loss=1.0, tokens=8, computed_by="last")

    source = MicrobatchSource(
        draw, process, lambda samples, _: samples / 20, prove=proved, me="me", budget_s=9.0, rng=Random(1)
    )
    await source.run(in_flight)
    # Those in flight when the budget was reached still come back.
    assert 20 <= source.samples == 2 * len(trained) < 20 + 2 * in_flight
    assert sorted(trained) == sorted(set(trained))
    assert most <= in_flight
    # What was drawn and refused to the last is of the final moment: at most one each.
    assert len(set(drawn) - set(trained)) <= in_flight


@given(named_s=st.floats(allow_nan=True, allow_infinity=True))
async def test_no_refusal_puts_a_source_to_sleep_for_long(named_s: float) -> None:
    answers: list[Reply] = [Refused(reason=Reason.NO_ROUTE, retry_after_s=named_s)]

    async def draw() -> Tensor:
        return torch.zeros(2, 5, dtype=torch.int64)

    async def process(microbatch: Microbatch, sender: str) -> Reply:
        return answers.pop() if answers else Gradient(hidden=None, loss=1.0, tokens=8, computed_by="last")

    source = MicrobatchSource(
        draw, process, lambda samples, _: samples / 2, prove=proved, me="me", budget_s=9.0, rng=Random(1)
    )
    await source.run(1)
    assert source.samples == 2
    assert now() <= 1.2 * LONGEST_RETRY_S
