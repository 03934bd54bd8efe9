"""Adapters over a frozen slice: what they compute, what is trained, and what autograd and memory keep."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import CPU, GPT2, INNER, LLAMA, VOCABULARY, cuts, drawn_ids, make_stage, prepared
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from noloco_node.machine.memory import SavedTensors
from pipeline.adapters.frozen_weights import NF4_BLOCK, FrozenLinear, coded, load
from pipeline.adapters.lora import AdaptedLinear, drawn, ordinary
from pipeline.adapters.settings import AdapterConfig, Form
from pipeline.decoder_slice import Cut
from pipeline.forward_pass import Slice, StageSettings
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.partition import adapter_targets, build, empty_slice, slice_size, verify_adapters
from pipeline.stage import Stage

ADAPTER = AdapterConfig(rank=3, alpha=6.0, base="float32")
FALCON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCABULARY}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gemma2": LLAMA | {"head_dim": 8},
    "falcon": FALCON,
    "phi3": LLAMA | {"pad_token_id": 0},
}


coded_families = pytest.mark.parametrize(
    ("name", "base"),
    [*((name, "nf4") for name in FAMILIES), *(("gpt2", base) for base in get_args(Form) if base != "nf4")],
)
"""Each family in NF4, and one whose matrices lie turned in each form."""


def family(name: str) -> Prepared:
    return prepare(family_config(name, FAMILIES[name]))


def weights_of(recipe: Prepared) -> dict[str, Tensor]:
    """Return the weights of a whole model, far from where they begin."""
    (piece,) = cuts(recipe, 1)
    own = {name: weight.detach() for name, weight in build(recipe, piece, 3).named_parameters()}
    generator = torch.Generator().manual_seed(1)
    return {name: weight + 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in own.items()}


def adapted(recipe: Prepared, piece: Cut, weights: dict[str, Tensor], adapter: AdapterConfig = ADAPTER) -> Slice:
    part = build(recipe, piece._replace(adapter=adapter), 0)
    load(part, [(name, weights[name]) for name in slice_size(recipe.config, piece).shapes])
    return part


def moved(part: Slice, seed: int = 0) -> Slice:
    """Move the adapters of a slice; how depends on their names alone."""
    with torch.no_grad():
        for name, weight in part.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()) + seed)
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return part


@coded_families
def test_a_slice_takes_coded_weights_as_those_of_a_checkpoint(name: str, base: Any) -> None:
    recipe = family(name)
    weights, adapter = weights_of(recipe), replace(ADAPTER, base=base)
    for piece in (each._replace(adapter=adapter) for each in cuts(recipe, 2)):
        shapes = slice_size(recipe.config, piece._replace(adapter=None)).shapes
        travelling = list(coded(empty_slice(recipe.config, piece), [(each, weights[each]) for each in shapes]))
        outline = coded(empty_slice(recipe.config, piece), [(each, weights[each].to("meta")) for each in shapes])
        assert [(name, each.shape, each.dtype) for name, each in outline] == [
            (name, each.shape, each.dtype) for name, each in travelling
        ]
        part = build(recipe, piece, 0)
        load(part, travelling)
        expected = adapted(recipe, piece._replace(adapter=None), weights, adapter).state_dict()
        assert all(torch.equal(each, expected[name]) for name, each in part.state_dict().items())


@pytest.mark.parametrize(("form", "other"), [("int8", "nf4"), ("nf4", "int8"), ("int8", "bfloat16")])
def test_codes_of_another_form_are_refused(form: Any, other: Any) -> None:
    recipe = family("llama")
    (piece,) = cuts(recipe, 1)
    weights = weights_of(recipe)
    found = coded(empty_slice(recipe.config, piece._replace(adapter=replace(ADAPTER, base=form))), weights.items())
    part = build(recipe, piece._replace(adapter=replace(ADAPTER, base=other)), 0)
    with pytest.raises(ValueError, match=r"weight is u?int8 .*, not"):
        load(part, found)


@coded_families
def test_stages_compute_what_the_ordinary_model_with_merged_weights_computes(name: str, base: Any) -> None:
    recipe = family(name)
    weights, adapter = weights_of(recipe), replace(ADAPTER, base=base)
    parts = [moved(adapted(recipe, piece, weights, adapter)).eval() for piece in cuts(recipe, 3)]
    (piece,) = cuts(recipe, 1)
    whole = build(recipe, piece, 0).eval()
    merged = {key: weight for part in parts for key, weight in ordinary(part)}
    assert merged.keys() == dict(whole.named_parameters()).keys()
    assert any(not torch.equal(merged[key], weights[key]) for key in merged)
    hidden = ids = drawn_ids(0, 2, 8)
    for part in parts:
        hidden = part(hidden)
    expected = functional_call(whole, merged, (ids,))
    assert torch.dist(hidden, expected) <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_untrained_adapters_add_nothing_and_begin_alike_in_every_cut(name: str) -> None:
    recipe = family(name)
    verify_adapters(recipe.config, ADAPTER)
    whole, halves = ([build(recipe, piece._replace(adapter=ADAPTER), 0) for piece in cuts(recipe, n)] for n in (1, 2))
    (begun,), split = ([dict(part.named_parameters()) for part in parts] for parts in (whole, halves))
    joined = {key: weight for part in split for key, weight in part.items()}
    assert begun.keys() == joined.keys()
    assert all(torch.equal(begun[key], joined[key]) for key in begun)
    assert all(bool(weight.any()) == key.endswith("lora_A.weight") for key, weight in begun.items())
    (piece,) = cuts(recipe, 1)
    assert slice_size(recipe.config, piece._replace(adapter=ADAPTER)).shapes == {
        key: tuple(weight.shape) for key, weight in begun.items()
    }


def staged(
    recipe: Prepared, number: int, weights: dict[str, Tensor], adapter: AdapterConfig, **choices: Any
) -> list[Stage]:
    return [
        Stage(
            moved(adapted(recipe, piece, weights, adapter)),
            INNER,
            StageSettings(CPU, **choices),
            first=piece.embeds,
            last=piece.head,
            codec="float32",
        )
        for piece in cuts(recipe, number)
    ]


def gradients(stages: list[Stage], ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    waiting, hidden = [], ids
    for stage in stages[:-1]:
        waiting.append(stage.forward(hidden))
        hidden = waiting[-1].output
    back: Tensor | None = stages[-1].loss(hidden, targets).hidden
    for each in reversed(waiting):
        assert back is not None
        back = each.backward(back)
    return {
        name: master.grad.clone()
        for stage in stages
        for name, master in stage._masters.items()
        if master.grad is not None
    }


@pytest.mark.parametrize(
    ("name", "choices"),
    [*((name, {"graphs": 0}) for name in FAMILIES), ("llama", {}), ("gemma2", {"by_layers": True})],
    ids=str,
)
def test_gradients_go_through_frozen_stages(name: str, choices: dict[str, Any]) -> None:
    recipe = family(name)
    weights, ids, targets = weights_of(recipe), drawn_ids(0, 2, 8), drawn_ids(1, 2, 8)
    found = gradients(staged(recipe, 3, weights, ADAPTER, **choices), ids, targets)
    (piece,) = cuts(recipe, 1)
    part = moved(adapted(recipe, piece, weights))
    functional.cross_entropy(part(ids).flatten(0, 1), targets.flatten()).backward()
    expected = {key: weight.grad for key, weight in part.named_parameters()}
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert torch.dist(gradient, expected[key]) <= 1e-4 * expected[key].norm() + 1e-8, key


def test_only_adapters_move_and_travel() -> None:
    recipe = family("llama")
    weights, ids, targets = weights_of(recipe), drawn_ids(0, 2, 8), drawn_ids(1, 2, 8)
    (stage,) = staged(recipe, 1, weights, ADAPTER)
    frozen = {key: each.clone() for key, each in stage._module.state_dict().items() if key not in stage.names}
    first = stage.loss(ids, targets).loss
    before = stage.weights()
    for _ in range(20):
        stage.loss(ids, targets)
        assert stage.step(0.01, 1.0).applied
    assert stage.loss(ids, targets).loss < 0.9 * first
    assert all(not torch.equal(a, b) for a, b in zip(before, stage.weights(), strict=True))
    assert all(torch.equal(frozen[key], each) for key, each in stage._module.state_dict().items() if key in frozen)
    assert stage.shapes == tuple(
        slice_size(recipe.config, cuts(recipe, 1)[0]._replace(adapter=ADAPTER)).shapes.values()
    )
    assert len(stage.optimiser_state().moments) == 2 * len(stage.names)


def test_one_half_of_each_adapter_may_stay_as_it_was_drawn() -> None:
    recipe, adapter = family("llama"), replace(ADAPTER, freeze_a=True)
    (piece,) = cuts(recipe, 1)
    part = build(recipe, piece._replace(adapter=adapter), 0)
    both = build(recipe, piece._replace(adapter=ADAPTER), 0)
    assert all(name.endswith("lora_B.weight") for name, _ in part.named_parameters())
    assert all(torch.equal(weight, both.get_parameter(name)) for name, weight in drawn(part, 0).items())
    assert len(drawn(part, 0)) == len(list(part.named_parameters()))
    assert not drawn(both, 0)
    stage = Stage(part, INNER, StageSettings(CPU, torch.bfloat16), first=True, last=True)
    stage.loss(drawn_ids(0, 2, 8), drawn_ids(1, 2, 8))
    assert stage.step(0.01, 1.0).applied


@settings(max_examples=15)
@given(st.sets(st.sampled_from(["q_proj", "mlp.up_proj", "layers.1.self_attn.v_proj", "o_proj"]), min_size=1))
def test_targets_are_ends_of_names(targets: set[str]) -> None:
    recipe, adapter = family("llama"), replace(ADAPTER, targets=tuple(targets))
    (piece,) = cuts(recipe, 1)
    found = {name.rpartition(".lora_")[0] for name in slice_size(recipe.config, piece._replace(adapter=adapter)).shapes}
    assert found == {name for name in adapter_targets(recipe.config) if any(name.endswith(f".{t}") for t in targets)}


@pytest.mark.parametrize("base", get_args(Form))
def test_graphs_keep_no_frozen_matrix(base: Any) -> None:
    recipe, adapter = prepared("llama", hidden_size=64, intermediate_size=96), replace(ADAPTER, base=base)
    (piece,) = cuts(recipe, 1)
    part = build(recipe, piece._replace(adapter=adapter), 0)
    saved = SavedTensors()
    ids = drawn_ids(0, 1, 1)
    with saved:
        part(ids)
    assert saved.bytes < 4 * 64 * VOCABULARY


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 130)),
    st.integers(0, 2**31),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    st.sampled_from(["int8", "nf4"]),
)
def test_codes_are_as_near_as_their_scale_says(shape: tuple[int, int], seed: int, size: float, form: Any) -> None:
    """Half a step of int8; of NF4 half of its widest gap, and what bfloat16 leaves out of a scale."""
    weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0.0
    layer = FrozenLinear(torch.nn.Linear(*reversed(shape), bias=False), form)
    for name, empty in list(layer.named_buffers()):
        layer.register_buffer(name, torch.zeros_like(empty, device="cpu"))
    load(layer, [("weight", weight)])
    found = layer.dense(torch.float32)
    if form == "int8":
        largest, most = weight.abs().amax(1, keepdim=True).expand(shape), 0.501 / 127
    else:
        flat = functional.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
        largest = flat.abs().amax(1, keepdim=True).expand(flat.shape).flatten()[: weight.numel()].view(shape)
        most = 0.16
    assert bool(((found - weight).abs() <= most * largest).all())
    assert not found[0].any() or form == "nf4"


def test_a_frozen_head_of_zeros_says_nothing_of_how_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma caps its logits; a first microbatch goes through before the weights are there."""
    monkeypatch.setattr("pipeline.forward_pass.LOGITS", 8)
    recipe = family("gemma2")
    (piece,) = cuts(recipe, 1)
    stage = make_stage(recipe, piece._replace(adapter=ADAPTER))
    ids, targets = drawn_ids(0, 2, 8), drawn_ids(1, 2, 8)
    stage.loss(ids, targets)
    weights = {name: 4.0 * weight for name, weight in weights_of(recipe).items()}
    stage.load_frozen(weights.items())
    part = adapted(recipe, piece, weights)
    expected = functional.cross_entropy(part(ids).flatten(0, 1), targets.flatten())
    assert stage.loss(ids, targets).loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_of_experts_is_refused() -> None:
    recipe = prepared("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    with pytest.raises(ValueError, match="experts"):
        verify_adapters(recipe.config, ADAPTER)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which PEFT asks in an old way
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_computes_the_same_to_the_bit(name: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    recipe = family(name)
    weights = weights_of(recipe)
    (piece,) = cuts(recipe, 1)
    part = moved(adapted(recipe, piece, weights)).eval()
    whole = AutoModelForCausalLM.from_config(recipe.config).eval()
    whole.load_state_dict(weights)
    layers = {key: each for key, each in part.named_modules() if isinstance(each, AdaptedLinear)}
    settings = peft.LoraConfig(
        r=ADAPTER.rank,
        lora_alpha=ADAPTER.alpha,
        target_modules=sorted({key.rpartition(".")[2] for key in layers}),
        fan_in_fan_out=any(each.turned for each in layers.values()),
    )
    model = peft.get_peft_model(whole, settings).eval()
    own = {f"base_model.model.{key}": weight.detach() for key, weight in part.named_parameters()}
    assert not peft.set_peft_model_state_dict(model, own).unexpected_keys
    ids = drawn_ids(0, 2, 8)
    assert torch.equal(part(ids), model(input_ids=ids, use_cache=False).logits)
