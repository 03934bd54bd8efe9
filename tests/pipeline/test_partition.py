"""Where a model is cut, and that the slices of any cut are the same model."""

import copy
import math
import resource
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.decoder_slice import Cut, NotSliceableError, find_decoder_parts
from pipeline.forward_pass import Slice
from pipeline.model_config import Config, Prepared, family_config, prepare, tiny_config
from pipeline.partition import _most_even, _Work, build, cut, forward_flops, skeleton, slice_size, verify_family

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
OPT: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "qwen2": LLAMA,
    "mistral": {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5},
    "gpt_neox": {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"},
    "mixtral": {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4},
    "gemma3_text": {**LLAMA, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5},
    # Layers that return tuples.
    "falcon": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96},
    # A final norm that is registered before the layers, and one without weights.
    "opt": {**OPT, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96},
    "olmo": LLAMA,
}


def prepared(family: str, dropout: float = 0.0) -> Prepared:
    return prepare(family_config(family, FAMILIES[family]), dropout)


def slices(recipe: Prepared, stages: int, seed: int = 7) -> list[Slice]:
    return [build(recipe, piece, seed) for piece in cut(recipe.config, stages, None, 32)]


def union(parts: list[Slice]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for part in parts:
        own = {name: weight.detach() for name, weight in part.named_parameters()}
        assert not merged.keys() & own.keys()
        merged |= own
    return merged


def ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_is_the_whole_model_with_the_same_initial_weights(family: str) -> None:
    recipe = prepared(family)
    one, whole = union(slices(recipe, 1)), AutoModelForCausalLM.from_config(copy.deepcopy(recipe.config)).eval()
    assert not whole.load_state_dict(one, strict=False).unexpected_keys
    assert one.keys() == dict(whole.named_parameters()).keys()
    expected = whole(ids()).logits
    for stages in (1, 2, 3, 4):
        parts, hidden = slices(recipe, stages), ids()
        other = union(parts)
        assert other.keys() == one.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        for part in parts:
            shapes = [(name, tuple(weight.shape)) for name, weight in part.named_parameters()]
            assert list(slice_size(recipe.config, part.cut).shapes.items()) == shapes, "the same order"
            hidden = part.eval()(hidden)
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_initial_weights_follow_the_seed_and_leave_the_generator_alone() -> None:
    recipe = prepared("llama")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = union(slices(recipe, 1))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    again, other = union(slices(recipe, 2)), union(slices(recipe, 1, seed=8))
    matrices = [name for name, weight in first.items() if weight.ndim == 2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({round(first[name].double().sum().item(), 9) for name in matrices}) == len(matrices), "no two alike"


def test_threads_that_build_at_the_same_time_draw_the_weights_that_one_alone_draws() -> None:
    recipe = prepared("gpt2")
    piece = cut(recipe.config, 2, None, 8)[1]
    alone = build(recipe, piece, seed=3).state_dict()
    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(lambda _: build(recipe, piece, seed=3).state_dict(), range(24)))
    assert all(torch.equal(part[name], weight) for part in built for name, weight in alone.items())


def test_initial_weights_have_the_scales_of_the_family() -> None:
    recipe = prepare(family_config("gpt2", {**FAMILIES["gpt2"], "n_embd": 128, "n_layer": 8}))
    ours = union(slices(recipe, 2))
    torch.manual_seed(5)
    theirs = dict(AutoModelForCausalLM.from_config(copy.deepcopy(recipe.config)).named_parameters())
    for name, weight in ours.items():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05), name
        else:
            assert torch.equal(weight, theirs[name]), name
    assert ours["transformer.h.5.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_a_tied_head_starts_as_a_copy_of_the_embedding() -> None:
    recipe = prepared("gpt2")
    assert recipe.tied
    for stages in (1, 2):
        weights = union(slices(recipe, stages))
        embedding, head = weights["transformer.wte.weight"], weights["lm_head.weight"]
        assert torch.equal(embedding, head)
        assert embedding.data_ptr() != head.data_ptr()
    untied = prepared("llama")
    assert not untied.tied
    weights = union(slices(untied, 2))
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def test_a_slice_holds_its_own_weights_and_no_others() -> None:
    sizes = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 48, "vocab_size": 32_000}
    recipe = prepare(family_config("llama", sizes))
    piece = Cut(20, 21, embeds=False, head=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part = build(recipe, piece, seed=0)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    own_bytes = sum(weight.numel() * 4 for weight in part.parameters())
    whole_bytes = sum(weight.numel() * 4 for weight in skeleton(recipe.config).parameters())
    assert whole_bytes > 40 * own_bytes
    assert grown_bytes < 2 * own_bytes
    assert {name.split(".")[2] for name, _ in part.named_parameters()} == {"20"}


def test_cost_of_a_layer_by_hand() -> None:
    config = prepared("qwen2").config
    layer = 4 * 32 * 32 + 3 * 32 * 48
    attention = 2 * 32 * (64 + 1)
    pieces = [
        Cut(0, 1, embeds=True, head=False),
        Cut(1, 2, embeds=False, head=False),
        Cut(1, 2, embeds=False, head=True),
    ]
    inner = 2 * layer + attention
    assert forward_flops(config, pieces, 64) == (inner, inner, inner + 2 * 32 * 96)


def test_a_size_of_the_wrong_type_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"refuses these sizes of llama: .*num_attention_heads") as refusal:
        family_config("llama", {**LLAMA, "num_attention_heads": "many"})
    assert "\n" not in str(refusal.value)


def test_a_projection_of_the_embedding_is_work_of_the_first_stage() -> None:
    config = prepare(family_config("opt", {**FAMILIES["opt"], "word_embed_proj_dim": 16})).config
    whole = forward_flops(config, [Cut(0, 4, embeds=True, head=True)], 64)
    first, inner, last = forward_flops(config, cut(config, 3, (1, 3), 64), 64)
    assert first >= inner / 2 + 2 * 16 * 32, "of two layers inner has no projection"
    assert (first + inner + last,) == whole


def test_a_token_pays_for_the_experts_that_it_meets() -> None:
    few, many = (
        prepare(family_config("mixtral", {**FAMILIES["mixtral"], "num_local_experts": number})).config
        for number in (4, 8)
    )
    piece = Cut(1, 2, embeds=False, head=False)
    router = 2 * 32 * 4
    (few_flops,), (many_flops,) = (forward_flops(config, [piece], 32) for config in (few, many))
    assert many_flops == few_flops + router
    few_weights, many_weights = (
        sum(map(math.prod, slice_size(config, piece).shapes.values())) for config in (few, many)
    )
    assert many_weights > few_weights + 10_000


@given(
    layers=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    before=st.integers(0, 60),
    after=st.integers(0, 200),
    data=st.data(),
)
def test_the_slowest_stage_is_as_fast_as_any_cut_can_make_it(
    layers: list[int], before: int, after: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(layers)))

    def slowest(ends: list[int]) -> int:
        loads = [sum(layers[start:end]) for start, end in pairwise([0, *ends])]
        loads[0] += before
        loads[-1] += after
        return max(loads)

    chosen = _most_even(_Work(before, tuple(layers), after), stages)
    assert len(chosen) == stages
    assert chosen[-1] == len(layers)
    assert all(start < end for start, end in pairwise([0, *chosen]))
    every = ([*ends, len(layers)] for ends in combinations(range(1, len(layers)), stages - 1))
    assert slowest(chosen) == min(map(slowest, every))


def test_equal_maxima_are_cut_evenly_all_the_same() -> None:
    assert _most_even(_Work(0, (4, 1, 1, 1, 1), 0), 3) == [1, 3, 5]


def test_a_large_head_takes_layers_from_its_stage() -> None:
    even = cut(prepared("llama").config, 2, None, 32)
    assert [(piece.first_layer, piece.end_layer) for piece in even] == [(0, 2), (2, 4)]
    heavy = prepare(family_config("llama", {**LLAMA, "vocab_size": 1000})).config
    assert cut(heavy, 2, None, 32) == (Cut(0, 3, embeds=True, head=False), Cut(3, 4, embeds=False, head=True))


def test_explicit_boundaries() -> None:
    config = prepared("llama").config
    assert cut(config, 3, (1, 3), 32) == (
        Cut(0, 1, embeds=True, head=False),
        Cut(1, 3, embeds=False, head=False),
        Cut(3, 4, embeds=False, head=True),
    )
    for boundaries in ((1,), (1, 1), (0, 2), (2, 4), (3, 1), (1, 2, 3)):
        with pytest.raises(ValueError, match="rising numbers from 1 to 3"):
            cut(config, 3, boundaries, 32)


def test_cuts_that_cannot_be() -> None:
    config = prepared("llama").config
    for stages in (0, 5):
        with pytest.raises(ValueError, match="every stage has a layer"):
            cut(config, stages, None, 32)
    with pytest.raises(ValueError, match="65 tokens do not fit the model's longest, 64"):
        cut(config, 2, None, 65)
    sizes = {"d_model": 32, "n_layers": 4, "n_heads": 4, "vocab_size": 96, "max_seq_len": 16}
    with pytest.raises(ValueError, match="17 tokens do not fit the model's longest, 16"):
        cut(prepare(family_config("mpt", sizes)).config, 2, None, 17)
    with pytest.raises(ValueError, match="prepare it first"):
        slice_size(family_config("gpt2", FAMILIES["gpt2"]), Cut(0, 1, embeds=True, head=False))


def test_unknown_fields_and_families_are_named() -> None:
    with pytest.raises(ValueError, match="hiden_size"):
        family_config("llama", {"hiden_size": 32})
    with pytest.raises(ValueError, match="'llamma'; did you mean llama"):
        family_config("llamma", {})
    with pytest.raises(ValueError, match=r"'zzzz'$"):
        family_config("zzzz", {})
    with pytest.raises(ValueError, match="num_attention_heads"):
        family_config("llama", {"num_attention_heads": "four"})
    with pytest.raises(ValueError, match="attention heads"):
        family_config("llama", {**LLAMA, "num_attention_heads": 5})
    with pytest.raises(ValueError, match="attention_dropout"):
        family_config("llama", {"attention_dropout": 0.1})
    with pytest.raises(ValueError, match="num_key_value_heads = 3"):
        prepare(family_config("llama", {**LLAMA, "num_key_value_heads": 3}))
    assert family_config("gpt2", {"hidden_size": 64}).n_embd == 64, "the field's common name"
    assert family_config("llama", {"rope_theta": 77.0}).rope_parameters["rope_theta"] == 77.0, "an old name"
    assert family_config("gpt2", {"vocab_size": 96}).eos_token_id is None, "outside the vocabulary"


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"])
def test_what_a_model_counts_is_one_at_least(name: str) -> None:
    assert getattr(family_config("llama", {**LLAMA, "num_key_value_heads": 1, name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"{name} = 0 has to be above zero"):
        family_config("llama", {**LLAMA, name: 0})


def test_a_field_that_is_null_is_unset_also_within_a_table() -> None:
    config = family_config("mistral", {**LLAMA, "sliding_window": "null"})
    assert config.sliding_window is None
    table = {"rope_type": "default", "rope_theta": 5000.0, "note": "null"}
    assert family_config("llama", {**LLAMA, "rope_parameters": table}).rope_parameters["note"] is None


def test_preparing_copies_the_config_and_sets_all_dropout() -> None:
    config = family_config("gpt2", FAMILIES["gpt2"])
    recipe = prepare(config, dropout=0.25)
    assert config.tie_word_embeddings
    assert config.resid_pdrop == 0.1
    assert not recipe.config.tie_word_embeddings
    assert not recipe.config.use_cache
    rates = {m.p for m in build(recipe, Cut(0, 4, True, True), 0).modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.25}
    later = build(recipe, Cut(1, 2, embeds=False, head=False), 0)
    assert "transformer.drop" not in {n for n, m in later.named_modules() if isinstance(m, nn.Dropout)}
    assert not any(
        isinstance(m, nn.Dropout) and m.p for m in build(prepared("gpt2"), Cut(0, 4, True, True), 0).modules()
    )


def test_heads_of_any_width_are_tried_at_small_sizes() -> None:
    wide = family_config("llama", {"hidden_size": 80_000, "num_attention_heads": 2, "num_key_value_heads": 2})
    assert max(each.numel() for each in skeleton(tiny_config(wide)).parameters()) < 2**22
    verify_family(wide)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_can_be_cut_pass(family: str) -> None:
    verify_family(prepared(family).config)
    verify_family(family_config(family, {}))


def test_families_that_cannot_be_cut_are_refused_by_name() -> None:
    rescaled: Config = family_config("granite", {"embedding_multiplier": 12.0})
    with pytest.raises(ValueError, match=r"granite.*outside its layers"):
        verify_family(rescaled)
    verify_family(family_config("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.2}))
    with pytest.raises(ValueError, match=r"gemma3_text.*tokens that it has to predict"):
        verify_family(family_config("gemma3_text", {"use_bidirectional_attention": True}))
    for family, why in (
        ("t5", "is no causal language model"),
        ("modernbert", "is no causal language model"),
        ("bert", "cannot be cut into stages: its parts do not run apart"),
        ("codegen", "cannot be cut into stages: its parts do not run apart"),
        ("llama4_text", "cannot be cut into stages: Llama4ForCausalLM has no model below its head"),
    ):
        with pytest.raises(NotSliceableError, match=f"a {family} model {why}") as caught:
            verify_family(family_config(family, {}))
        assert len(str(caught.value)) < 150
    for size, wrong in (("hidden_act", "frob"), ("rope_parameters", {"rope_type": "frob", "rope_theta": 1e4})):
        with pytest.raises(KeyError, match="frob"):
            verify_family(family_config("llama", {size: wrong}))
    with pytest.raises(NotSliceableError, match="a mamba model has no attention heads"):
        prepare(family_config("mamba", {}))
    with pytest.raises(ValueError, match="num_experts_per_tok = 8 is more than num_experts = 4"):
        prepare(family_config("qwen3_moe", {"num_experts": 4}))


def test_the_parts_of_a_decoder() -> None:
    config = prepared("gpt2").config
    anatomy = find_decoder_parts(skeleton(config), 4)
    assert anatomy.spine == ("", "transformer", "transformer.h")
    assert anatomy.before == ("transformer.wte", "transformer.wpe")
    assert anatomy.after == ("transformer.ln_f", "lm_head")
    assert anatomy.dropouts == ("transformer.drop",)
    with pytest.raises(ValueError, match="no single list of 5 layers"):
        find_decoder_parts(skeleton(config), 5)


def test_of_two_lists_of_as_many_layers_the_outer_one_is_cut_and_of_equals_none() -> None:
    config = prepared("gpt2").config
    whole = skeleton(config)
    layers: Any = whole.get_submodule("transformer.h")
    layers[0].more = nn.ModuleList(nn.Identity() for _ in range(4))
    assert find_decoder_parts(whole, 4).spine[-1] == "transformer.h"
    whole.get_submodule("transformer").more = nn.ModuleList(nn.Identity() for _ in range(4))
    with pytest.raises(NotSliceableError, match="no single list of 4 layers"):
        find_decoder_parts(whole, 4)


def test_what_the_model_itself_holds_comes_along() -> None:
    whole = nn.Module()
    whole.register_buffer("scale", torch.ones(2))
    whole.register_buffer("nothing", None)
    Slice(whole, Cut(0, 1, embeds=True, head=True), "head").to(torch.float64)
    assert whole.get_buffer("scale").dtype == torch.float64


def test_no_stage_keeps_keys_and_values() -> None:
    kept: list[bool] = []
    hidden = ids()
    for part in slices(prepared("llama"), 3):
        (whole,) = part._whole
        whole.base_model.register_forward_pre_hook(
            lambda _module, _inputs, named: kept.append(named["use_cache"]), with_kwargs=True
        )
        hidden = part(hidden)
    assert kept == [False] * 3
