"""A subspace between stages: k numbers a token, exactly the model that an ordinary checkpoint is."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_stages import LLAMA, VOCABULARY, cuts, drawn_ids, make_stage, prepared, run_microbatch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline.decoder_slice import Subspace, TokenFeatures
from pipeline.messages import Gradient
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.partition import cut, folded, forward_flops, slice_size, verify_subspace
from pipeline.stage import Stage

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 4}
FAMILIES = ("llama", "qwen3", "gpt_neox", "olmo2")
"""The second normalises queries, the third has biases and other names, the fourth normalises what its layers write."""


def recipe(family: str = "llama") -> Prepared:
    sizes = LLAMA | SIZES
    if family == "gpt_neox":
        del sizes["num_key_value_heads"]
    return prepare(family_config(family, sizes))


def pipeline_of(
    recipe: Prepared, number: int, sent: int, codec: str = "float32", graphs: int | None = None
) -> list[Stage]:
    return [make_stage(recipe, piece, codec=codec, graphs=graphs) for piece in cuts(recipe, number, Subspace(sent, 3))]


def whole_of(prepared: Prepared, stages: list[Stage]) -> Any:
    """Return an ordinary model of the library with the stages' weights."""
    whole = AutoModelForCausalLM.from_config(prepared.config)
    for stage in stages:
        weights = dict(zip(stage.names, stage.weights(), strict=True))
        whole.load_state_dict(folded(prepared.config, stage._module.cut, weights), strict=False)
    return whole


def train(stages: list[Stage], tokens: Tensor) -> Gradient:
    return run_microbatch(stages, tokens[:, :-1], tokens)


def batch(seed: int) -> Tensor:
    return drawn_ids(seed, 3, 13)


def disturb(stages: list[Stage], seed: int) -> None:
    """Move all weights, as rounds with lossy codes may: wherever they go, nothing leaves the subspace."""
    generator = torch.Generator().manual_seed(seed)
    for stage in stages:
        stage.correct([0.1 * torch.randn(shape, generator=generator) for shape in stage.shapes])


@settings(max_examples=8)
@given(
    family=st.sampled_from(FAMILIES),
    number=st.integers(2, 4),
    sent=st.sampled_from([1, 16, 63]),
    seed=st.integers(0, 99),
)
def test_a_pipeline_with_a_subspace_is_the_whole_model_in_loss_and_gradients(
    family: str, number: int, sent: int, seed: int
) -> None:
    # OLMo 2 normalises what each layer adds: of one number that is its sign, whose gradient is rounding alone.
    assume(family != "olmo2" or sent > 1)
    prepared, tokens = recipe(family), batch(seed)
    stages = pipeline_of(prepared, number, sent)
    disturb(stages, seed)
    whole = whole_of(prepared, stages)
    logits = whole(input_ids=tokens[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(expected)
    reply = train(stages, tokens)
    assert (reply.loss, reply.tokens) == (pytest.approx(expected.item(), rel=1e-5), tokens[:, 1:].numel())
    assert reply.hidden.shape == (3, 12, sent)
    for stage in stages:
        for name, weight in zip(stage.names, stage._weights, strict=True):
            full = whole.get_parameter(name).grad
            assert weight.grad is not None
            # What is narrow is a part of what an ordinary checkpoint holds, and so is its gradient.
            part = full[tuple(slice(size) for size in weight.shape)]
            assert torch.dist(weight.grad, part) <= 1e-4 * full.norm() + 1e-7, name


def test_an_ordinary_checkpoint_of_a_trained_run_gives_the_same_logits_without_our_code(tmp_path: Path) -> None:
    prepared = recipe()
    stages = pipeline_of(prepared, 3, 16, codec="bfloat16")
    for step in range(4):
        train(stages, batch(step))
        for stage in stages:
            stage.step(1e-2, 1)
        disturb(stages, step)
    whole_of(prepared, stages).save_pretrained(tmp_path)
    ids = batch(9)
    hidden = ids
    for stage in stages:
        hidden = stage.infer(hidden, ids)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits
    assert torch.dist(hidden, expected) <= 1e-5 * expected.norm()


@pytest.mark.parametrize("codec", ["bfloat16", "int5-int3"])
def test_what_travels_is_coded_like_any_activations_and_computed_again_to_the_bit(codec: str) -> None:
    gradients = []
    for graphs in (None, 0):
        stages = pipeline_of(recipe(), 3, 32, codec, graphs)
        train(stages, batch(0))
        gradients.append([weight.grad for stage in stages for weight in stage._weights])
    assert all(map(torch.equal, *gradients))


def test_a_long_loss_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, whole = train(pipeline_of(recipe(), 2, 16), batch(0)).loss, pipeline_of(recipe(), 2, 16)
    monkeypatch.setattr("pipeline.forward_pass.LOGITS", VOCABULARY)
    assert train(whole, batch(0)).loss == pytest.approx(loss, rel=1e-6)


def test_a_pipeline_with_a_subspace_has_the_losses_of_its_training_without_a_backward_pass() -> None:
    stages, tokens = pipeline_of(recipe(), 3, 16), batch(0)
    hidden = tokens[:, :-1]
    for stage in stages[:-1]:
        hidden = stage.activations(hidden, tokens)
    losses = stages[-1].token_losses(hidden, tokens)
    assert losses.mean().item() == pytest.approx(train(pipeline_of(recipe(), 3, 16), tokens).loss, rel=1e-5)


def test_all_tokens_have_different_features_that_are_the_same_everywhere() -> None:
    config = recipe().config
    features = TokenFeatures(config, Subspace(16, 3))(torch.arange(VOCABULARY))
    assert features.shape == (VOCABULARY, 48)
    assert len({tuple(row.tolist()) for row in features}) == VOCABULARY
    assert features.abs().unique().tolist() == [1.0]
    # Peers derive them: other ones would be another run.
    signs = features.sign().to(torch.int8).numpy().tobytes()
    assert hashlib.sha256(signs).hexdigest() == "f2a450d7b23d5b8f1a6c914382bf02fa96a07342328ce3ec823737ef0f0d764d"
    other = TokenFeatures(config, Subspace(16, 4))(torch.arange(VOCABULARY))
    assert not torch.equal(features, other)


@pytest.mark.parametrize("vocabulary", [16, 17, 25, 26])
def test_every_token_of_a_vocabulary_has_features(vocabulary: int) -> None:
    config = SimpleNamespace(vocab_size=vocabulary, hidden_size=40)
    features = TokenFeatures(config, Subspace(8, 3))(torch.arange(vocabulary))
    assert features.shape == (vocabulary, 32)


def test_a_subspace_takes_less_memory_and_less_work_but_in_the_last_stage() -> None:
    config, plain = recipe().config, cut(recipe().config, 2, None, 16)
    narrow = [piece._replace(subspace=Subspace(16, 3)) for piece in plain]
    sizes = [[slice_size(config, piece).shapes for piece in pieces] for pieces in (plain, narrow)]
    assert sizes[0][1] == sizes[1][1]
    assert sizes[1][0]["model.embed_tokens.weight"] == (VOCABULARY, 16)
    assert sizes[1][0]["model.layers.0.self_attn.o_proj.weight"] == (16, 64)
    assert sizes[1][0]["model.layers.0.mlp.down_proj.weight"] == (16, 48)
    assert sizes[0][0].keys() == sizes[1][0].keys()
    work, less = (forward_flops(config, pieces, 16) for pieces in (plain, narrow))
    layers = plain[0].end_layer
    assert (work[0] - less[0], work[1] - less[1]) == (layers * 2 * 48 * (64 + 48), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_keep_to_a_subspace_pass(family: str) -> None:
    verify_subspace(recipe(family).config)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_families_that_write_elsewhere_or_rescale_are_refused(family: str) -> None:
    config = prepared(family, **({"n_embd": 64, "n_layer": 4} if family == "gpt2" else SIZES)).config
    with pytest.raises(ValueError, match=f"a {family} model cannot be trained with a subspace"):
        verify_subspace(config)
