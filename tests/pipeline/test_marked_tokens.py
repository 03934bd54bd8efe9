"""Tokens that are only given: no loss on them, and a microbatch counts by the tokens that are learnt."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from small_stages import INNER, VOCABULARY, cuts, drawn_ids, make_stage, prepared, run_microbatch, whole_optimiser
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline.activation_codec import (
    SCALE,
    SizeBound,
    UnusualSizeError,
    as_targets,
    check_marked,
    encode,
    first,
    given,
    ids_of,
    learnt,
    positions_in_rows,
)
from pipeline.decoder_slice import Subspace
from pipeline.messages import ACTIVATION_CODECS, FIRST, UNLEARNT, Gradient, Microbatch
from pipeline.model_config import family_config, prepare
from pipeline.next_stage import check_gradient
from pipeline.partition import verify_rows
from pipeline.stage import Stage

SEQUENCES, LENGTH = 3, 13
quick = settings(max_examples=50)


def marked(seed: int, share: float) -> Tensor:
    """Return tokens [batch, sequence + 1] of which about such a share is learnt."""
    ids = drawn_ids(seed, SEQUENCES, LENGTH + 1)
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share
    return ids.where(chosen, given(ids))


def train(stages: list[Stage], tokens: Tensor, *, told: bool = False) -> Gradient:
    return run_microbatch(stages, ids_of(tokens[:, :-1]), tokens if told else tokens[:, 1:])


def stages_of(number: int, subspace: Subspace | None = None) -> list[Stage]:
    recipe = prepared("llama")
    return [make_stage(recipe, piece) for piece in cuts(recipe, number, subspace)]


@drawn(st.lists(st.tuples(st.integers(0, FIRST - 1), st.booleans()), min_size=1, max_size=30))
@quick
def test_a_token_keeps_its_id_and_its_mark(tokens: list[tuple[int, bool]]) -> None:
    ids, is_given = (torch.tensor(column) for column in zip(*tokens, strict=True))
    travelling = ids.where(~is_given, given(ids))
    assert torch.equal(ids_of(travelling), ids)
    assert torch.equal(as_targets(travelling), ids.where(~is_given, torch.tensor(UNLEARNT)))
    assert learnt(travelling) == int((~is_given).sum())
    assert torch.equal(ids_of(first(ids)), ids)
    assert torch.equal(as_targets(first(ids)), torch.full_like(ids, UNLEARNT))
    assert torch.equal(first(ids.int()).long(), first(ids)), "32 bits hold it"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_window_is_one_mean_over_all_tokens_that_are_learnt(
    number: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microbatches of which few tokens are learnt count by these tokens alone."""
    if chunked:
        monkeypatch.setattr("pipeline.forward_pass.LOGITS", VOCABULARY)
    stages = stages_of(number)
    whole = AutoModelForCausalLM.from_config(prepared("llama").config)
    whole.load_state_dict(
        {name: weight for stage in stages for name, weight in zip(stage.names, stage.weights(), strict=True)}
    )
    weights = dict(whole.named_parameters())
    optimiser = whole_optimiser(weights)
    for step in range(5):
        window = [marked(10 * step + place, share) for place, share in enumerate((0.05, 0.4, 1.0))]
        replies = [train(stages, tokens) for tokens in window]
        total = torch.zeros(())
        for tokens, reply in zip(window, replies, strict=True):
            logits, targets = whole(ids_of(tokens[:, :-1])).logits.flatten(0, 1), as_targets(tokens[:, 1:]).flatten()
            losses = functional.cross_entropy(logits, targets, ignore_index=UNLEARNT, reduction="sum")
            assert reply.tokens == learnt(tokens[:, 1:])
            assert reply.loss == pytest.approx(losses.item() / reply.tokens, rel=1e-5)
            total = total + losses
        counted = sum(reply.tokens for reply in replies)
        (total / counted).backward()
        for stage in stages:
            norm = torch.nn.utils.clip_grad_norm_([weights[name] for name in stage.names], INNER.clip_norm).item()
            report = stage.step(1e-3, counted / (SEQUENCES * LENGTH))
            assert report.gradient_norm == pytest.approx(norm, rel=1e-4)
        optimiser.step()
        optimiser.zero_grad()
    for stage in stages:
        for name, weight in zip(stage.names, stage.weights(), strict=True):
            assert torch.dist(weight, weights[name]) <= 1e-4 * weights[name].norm(), name


@pytest.mark.parametrize("chunked", [False, True])
def test_a_microbatch_without_a_token_to_learn_changes_nothing(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr("pipeline.forward_pass.LOGITS", VOCABULARY)
    stages, tokens = stages_of(2), marked(1, 0.5)
    none = train(stages, given(ids_of(tokens)))
    assert (none.loss, none.tokens) == (0.0, 0)
    assert not none.hidden.any()
    some = train(stages, tokens)
    alone = stages_of(2)
    assert train(alone, tokens).loss == some.loss
    for stage, other in zip(stages, alone, strict=True):
        share = some.tokens / (SEQUENCES * LENGTH)
        assert stage.step(1e-3, share) == other.step(1e-3, share)


def test_later_stages_know_given_tokens_in_a_subspace() -> None:
    """Marks do not reach the features of a token, only its loss."""
    stages, plain = (stages_of(2, Subspace(16, 3)) for _ in range(2))
    tokens = marked(4, 0.5)
    hidden = ids_of(tokens[:, :-1])
    assert torch.equal(stages[0].forward(hidden, tokens).output, plain[0].forward(hidden, ids_of(tokens)).output)
    reply = train(stages, tokens, told=True)
    assert reply.tokens == learnt(tokens[:, 1:])
    everything = train(plain, ids_of(tokens), told=True)
    rest = train(stages_of(2, Subspace(16, 3)), (~tokens).contiguous(), told=True)
    assert everything.loss * everything.tokens == pytest.approx(
        reply.loss * reply.tokens + rest.loss * rest.tokens, rel=1e-5
    )


# Rows that share a sequence.


def packed(seed: int, *lengths: int) -> Tensor:
    """Return a sequence of rows of these lengths, with the first token of another row behind them."""
    rows = [marked(seed + number, 0.6)[0, :length] for number, length in enumerate((*lengths, 1))]
    return torch.cat([torch.cat([first(ids_of(row[:1])), row[1:]]) for row in rows])[None]


@drawn(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=3))
@quick
def test_positions_begin_anew_with_each_row(sequences: list[list[bool]]) -> None:
    width = min(map(len, sequences))
    begins = torch.tensor([[*each[:width], True] for each in sequences])
    ids = torch.ones_like(begins, dtype=torch.int64)
    positions = positions_in_rows(first(ids).where(begins, ids))
    expected = []
    for each in sequences:
        places = [0]
        for begun in each[:width]:
            places.append(0 if begun else places[-1] + 1)
        expected.append(places)
    if any(any(each[:width]) for each in sequences):
        assert positions.tolist() == expected
    else:
        assert positions is None


@pytest.mark.parametrize("choices", [{}, {"graphs": 0}, {"by_layers": True}], ids=["kept", "again", "layers"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_in_one_sequence_are_learnt_as_apart(family: str, choices: dict[str, Any]) -> None:
    """To rounding, through every stage, however the backward pass gets its graph."""
    recipe, lengths = prepared(family), (5, 4, 3)

    def learnt_by(tokens: Tensor) -> tuple[Gradient, Tensor]:
        """Return the reply, and the sum of the gradients of all losses."""
        stages = [make_stage(recipe, piece, **choices) for piece in cuts(recipe, 3)]
        reply = train(stages, tokens)
        gradients = [weight.grad for stage in stages for weight in stage._weights if weight.grad is not None]
        return reply, torch.cat([each.flatten() for each in gradients]) * (tokens.shape[1] - 1)

    tokens = packed(7, *lengths)
    reply, together = learnt_by(tokens)
    apart = [learnt_by(tokens[:, at : at + length + 1]) for at, length in zip((0, 5, 9), lengths, strict=True)]
    assert reply.tokens == sum(row.tokens for row, _ in apart) > 3
    assert reply.loss == pytest.approx(sum(row.loss * row.tokens for row, _ in apart) / reply.tokens, rel=1e-5)
    expected = sum(gradient for _, gradient in apart)
    assert torch.dist(together, expected) <= 1e-5 * together.norm()


def test_a_row_of_a_sequence_in_a_subspace_is_learnt_as_apart() -> None:
    tokens, subspace = packed(7, 6, 6), Subspace(16, 3)
    one, two = (train(stages_of(2, subspace), tokens[:, at : at + 7], told=True) for at in (0, 6))
    both = train(stages_of(2, subspace), tokens, told=True)
    assert both.tokens == one.tokens + two.tokens
    assert both.loss * both.tokens == pytest.approx(one.loss * one.tokens + two.loss * two.tokens, rel=1e-5)


@pytest.mark.parametrize(("family", "apart"), [("llama", True), ("gpt2", True), ("bloom", False)])
def test_a_family_whose_rows_see_each_other_is_refused(family: str, apart: bool) -> None:
    sizes = {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY}
    config = prepare(family_config("bloom", sizes)).config if family == "bloom" else prepared(family).config
    if apart:
        verify_rows(config)
    else:
        with pytest.raises(ValueError, match="a bloom model does not end attention"):
            verify_rows(config)


# What strangers may send.


def microbatch(targets: Tensor) -> Microbatch:
    return Microbatch(hidden=torch.zeros(SEQUENCES, LENGTH, 4), targets=targets, progress=0.0, budget_s=1.0)


@drawn(st.integers(-2 * VOCABULARY, 2 * VOCABULARY), st.booleans())
@quick
def test_marks_outside_the_vocabulary_are_refused(token: int, some_given: bool) -> None:
    targets = drawn_ids(1, SEQUENCES, LENGTH)
    targets[1, 2] = token
    if (-VOCABULARY if some_given else 0) <= token < VOCABULARY:
        check_marked(microbatch(targets), VOCABULARY, some_given=some_given)
    else:
        with pytest.raises(ValueError, match="outside"):
            check_marked(microbatch(targets), VOCABULARY, some_given=some_given)


def test_a_microbatch_in_which_nothing_is_learnt_is_refused() -> None:
    """Also where the first token of a sequence, which nobody predicts, is the only one that is learnt."""
    targets = given(drawn_ids(1, SEQUENCES, LENGTH + 1))
    targets[:, 0] = 5
    with pytest.raises(ValueError, match="none is learnt"):
        check_marked(microbatch(targets), VOCABULARY, some_given=True)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_gradient_over_another_number_of_tokens_is_refused(more: int) -> None:
    """The step divides by their sum: a peer that says fewer would make its gradient count more."""
    sent = microbatch(marked(1, 0.4)[:, 1:])
    check_gradient(Gradient(hidden=sent.hidden, loss=1.0, tokens=sent.learnt), sent)
    with pytest.raises(ConnectionAbortedError, match="over"):
        check_gradient(Gradient(hidden=sent.hidden, loss=1.0, tokens=sent.learnt + more), sent)


# How much of a gradient counts.

CODE = ACTIVATION_CODECS["bfloat16"].back


def gradient(share: float, size: float = 1.0) -> Tensor:
    """Return a gradient as it comes back where such a share of the targets is learnt."""
    return encode(CODE, size * share**0.5 * torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def taught() -> SizeBound:
    with mock.patch.multiple("pipeline.activation_codec", CERTAIN=0, LEAST_VALUES=256):
        bound = SizeBound(CODE)
        for number in range(9):
            bound.bounded(f"p{number % 3}", gradient(0.5), 0.5)
        yield bound


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
def test_a_gradient_of_few_or_many_tokens_counts_whole(taught: SizeBound, share: float) -> None:
    wire = gradient(share)
    assert taught.bounded("p0", wire, share) is wire


def test_the_size_is_that_of_the_tokens_that_are_learnt(taught: SizeBound) -> None:
    """A size that is usual where all tokens are learnt is too large where only a quarter of them is."""
    loud = gradient(1.0, 1.1 * SCALE * 0.5)
    assert taught.bounded("p0", loud, 1.0) is loud
    assert taught.bounded("p0", loud, 0.25) is not loud
    with pytest.raises(UnusualSizeError):
        taught.bounded("p0", gradient(1.0, 100.0), 0.5)


def test_the_tokens_that_may_be_of_any_size_are_an_eighth_of_those_that_are_learnt(taught: SizeBound) -> None:
    loud = gradient(0.5)
    loud.view(16, -1)[:2] *= 1000.0
    assert float(taught.bounded("p0", loud, 1.0).norm()) < float(loud.norm()) / 10.0
    with pytest.raises(UnusualSizeError):
        taught.bounded("p0", loud, 0.5)


def test_a_gradient_of_very_few_tokens_weighs_no_more_than_a_short_one_of_the_greatest_usual_size(
    taught: SizeBound,
) -> None:
    bounded = taught.bounded("p0", gradient(1.0, 1e6), 0.01)
    assert float(bounded.float().norm()) <= 1.05 * SCALE * 256**0.5
