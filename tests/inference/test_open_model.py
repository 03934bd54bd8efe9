"""Adapters of other programs, as PEFT writes them, over the models that they adapt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA, write_model
from command_line import printed, refused
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from user_errors import user_error

from noloco_node.errors import Exit
from noloco_node.export.sources import model_in
from noloco_node.inference.open_model import PeftSettings, open_model

Q, UP, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "lm_head"
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}


def matrices(name: str, outputs: int, inputs: int, rank: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    drawn = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    return {f"base_model.model.{name}.lora_{letter}.weight": each for letter, each in zip("AB", drawn, strict=True)}


def write_adapter(directory: Path, settings: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"r": 9, "rank_pattern": {"self_attn.q_proj": 2}, "use_dora": False}, 3.0),
        ({"r": 9, "rank_pattern": {"q_proj": 2}, "target_modules": ".*q_proj"}, 3.0),
    ],
)
def test_an_adapter_adds_its_product(tmp_path: Path, more: dict[str, Any], scale: float) -> None:
    model, given = write_model(tmp_path / "model"), matrices(Q, 32, 32)
    adapter = write_adapter(tmp_path / "adapter", SETTINGS | more, given)
    a, b = given.values()
    expected = model.state_dict() | {f"{Q}.weight": model.state_dict()[f"{Q}.weight"] + scale * (b @ a)}
    found = open_model(model_in(adapter, tmp_path / "model")).state_dict()
    assert all(torch.allclose(found[name], each, atol=1e-6) for name, each in expected.items())


def test_a_head_tied_to_the_embedding_is_adapted_alone_and_weights_trained_whole_take_their_place(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", sizes=LLAMA | {"tie_word_embeddings": True})
    norm = {"base_model.model.model.norm.weight": torch.full((32,), 3.0)}
    settings = SETTINGS | {"target_modules": ["lm_head"], "modules_to_save": ["norm"]}
    adapter = write_adapter(tmp_path / "adapter", settings, matrices(HEAD, 384, 32) | norm)
    found = open_model(model_in(adapter, tmp_path / "model"))
    assert torch.equal(found.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert not torch.equal(found.lm_head.weight, model.lm_head.weight)
    assert torch.equal(found.model.norm.weight, norm.popitem()[1])


def test_a_weight_that_is_written_whole_beside_its_adapter_has_the_product_too(tmp_path: Path) -> None:
    """PEFT writes an adapted head so."""
    write_model(tmp_path / "model")
    given, whole = matrices(HEAD, 384, 32), torch.full((384, 32), 3.0)
    a, b = given.values()
    settings = SETTINGS | {"target_modules": ["lm_head"]}
    weights = given | {f"base_model.model.{HEAD}.base_layer.weight": whole}
    adapter = write_adapter(tmp_path / "adapter", settings, weights)
    found = open_model(model_in(adapter, tmp_path / "model")).lm_head.weight
    torch.testing.assert_close(found.detach(), whole + 3.0 * (b @ a))


@pytest.mark.parametrize(
    "wrong", [{"num_attention_heads": 0}, {"pad_token_id": 9999}, {"hidden_size": -1}, {"num_hidden_layers": "a"}]
)
def test_a_model_with_settings_that_transformers_cannot_read_is_one_clear_message(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    write_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    with user_error(Exit.CONFIG, "holds no model that transformers can load"):
        open_model(model_in(tmp_path / "model"))


@pytest.mark.parametrize(
    ("settings", "weights", "said"),
    [
        ({"r": 3}, matrices(Q, 32, 32), "say rank 3"),
        ({}, matrices(Q, 32, 32, rank=4), "say rank 2"),
        ({}, matrices(Q, 32, 48), "the adapter is for [32, 48]"),
        ({}, matrices("model.layers.7.self_attn.q_proj", 32, 32), "is no linear layer of this model"),
        ({"target_modules": ["embed_tokens"]}, matrices("model.embed_tokens", 384, 32), "is no linear layer"),
        ({"target_modules": ["q_proj", "up_proj"]}, matrices(Q, 32, 32), "name up_proj, and its weights have"),
        ({}, dict([matrices(Q, 32, 32).popitem()]), "it adapts no layer"),
        ({}, dict(list(matrices(Q, 32, 32).items())[:1]), "has a matrix A and no B"),
        ({}, matrices(Q, 32, 32) | {"base_model.model.score.weight": torch.zeros(2)}, "score is no part"),
        ({}, matrices(Q, 32, 32) | {f"base_model.model.{UP}.weight": torch.zeros(2)}, "is no weight of this model"),
        ({}, matrices(Q, 32, 32) | {"lora_A": torch.zeros(2)}, "is no name of PEFT's"),
        ({"peft_type": "IA3"}, matrices(Q, 32, 32), "of the type 'IA3'"),
        ({"use_dora": True}, matrices(Q, 32, 32), "use_dora is set"),
        ({"layer_replication": [[0, 1], [0, 1]]}, matrices(Q, 32, 32), "layer_replication is set"),
        ({"init_lora_weights": "pissa_niter_4"}, matrices(Q, 32, 32), "may have changed the model's own weights"),
        ({"alpha_pattern": {"(a+)+$": 1}}, matrices(Q, 32, 32), "an expression"),
        ({"r": "two"}, matrices(Q, 32, 32), "Expected `int`"),
        ({}, {name: each * torch.inf for name, each in matrices(Q, 32, 32).items()}, "not finite"),
        ({}, {name: each.to(torch.complex64) for name, each in matrices(Q, 32, 32).items()}, "complex64 numbers"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, settings: dict[str, Any], weights: dict[str, Tensor], said: str
) -> None:
    write_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", SETTINGS | settings, weights)
    assert said in refused("generate", adapter, "--weights", tmp_path / "model", "--prompt", "a").why


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", SETTINGS, {})
    for path, said in (
        (adapter / "adapter_model.safetensors", "has no adapter_model.safetensors"),
        (tmp_path / "model" / "config.json", "model"),
    ):
        path.unlink()
        with user_error(Exit.CONFIG, said):
            open_model(model_in(adapter, tmp_path / "model"))


@pytest.mark.parametrize("named", ["~no-such-user/model", "x" * 5000, "a\0b", ["a model"], None])
def test_a_model_that_is_not_here_is_asked_for(tmp_path: Path, named: object) -> None:
    adapter = write_adapter(tmp_path / "adapter", SETTINGS | {"base_model_name_or_path": named}, {})
    with user_error(Exit.CONFIG, "holds an adapter, and no model") as caught:
        model_in(adapter)
    assert "--weights DIR" in caught.value.hint


@pytest.mark.parametrize("content", [b'{"x": ' + 100_000 * b"[", b'{"peft_type": "\xff"}'])
def test_settings_nested_without_end_or_that_are_no_text_are_refused(tmp_path: Path, content: bytes) -> None:
    write_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", SETTINGS, {})
    (adapter / "adapter_config.json").write_bytes(content)
    for over in (None, tmp_path / "model"):
        with user_error(Exit.CONFIG, "adapter"):
            open_model(model_in(adapter, over))


def test_an_adapter_of_another_program_writes_text_and_is_evaluated(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    named = SETTINGS | {"base_model_name_or_path": str(tmp_path / "model")}
    adapter = write_adapter(tmp_path / "adapter", named, matrices(Q, 32, 32))
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    over = ("--weights", str(tmp_path / "model"))
    for command in (
        ["generate", str(adapter), "--prompt", "words"],
        ["evaluate", str(adapter), "--data", str(tmp_path)],
    ):
        assert printed(*command) == printed(*command, *over)


@given(
    rank=st.integers(1, 64),
    alpha=st.floats(-100, 100),
    other=st.integers(1, 64),
    end=st.sampled_from(["q_proj", "self_attn.q_proj", "proj", "v_proj"]),
)
def test_patterns_are_ends_of_names(rank: int, alpha: float, other: int, end: str) -> None:
    settings = PeftSettings("LORA", r=rank, lora_alpha=alpha, rank_pattern={end: other})
    expected = other if end in ("q_proj", "self_attn.q_proj") else rank
    assert settings.rank_of(Q) == expected
    assert settings.scale_of(Q) == alpha / expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_computes_the_same(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    sizes = LLAMA if family == "llama" else {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384}
    model = write_model(tmp_path / "model", family, sizes)
    one, other = ("q_proj", "up_proj") if family == "llama" else ("c_attn", "c_fc")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules="all-linear",
        init_lora_weights=False,
        rank_pattern={one: 3},
        alpha_pattern={other: 5},
        fan_in_fan_out=family == "gpt2",
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
        found = open_model(model_in(tmp_path / "adapter", tmp_path / "model"))(input_ids=ids).logits
    assert torch.dist(found, expected) <= 1e-4 * expected.norm()
