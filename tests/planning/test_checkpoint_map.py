"""The tensors of a checkpoint become the parameters of stages, as transformers itself would have it."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import msgspec
import pytest
import torch
from checkpoints import LLAMA, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.planning import checkpoint_map
from noloco_node.planning.checkpoint_map import CheckpointMap, check_files, read_parameters
from noloco_node.planning.model_layout import check_download, check_hub_weights, hub_directory, model_layout
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.partition import cut, slice_size

EXPERTS = {**LLAMA, "num_key_value_heads": 2, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    # As GPT-2's own: the head is the embedding.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64},
    # Twelve, so that ten comes after nine and not after one.
    "mixtral": {**EXPERTS, "num_local_experts": 12},
    "qwen3_moe": {**EXPERTS, "num_experts": 12, "moe_intermediate_size": 24},
    "phi3": {**LLAMA, "pad_token_id": 0},
}


def layout(family: str, stages: int = 2, **sizes: Any) -> tuple[Prepared, list[dict[str, tuple[int, ...]]]]:
    prepared = prepare(family_config(family, {**FAMILIES[family], **sizes}))
    return prepared, [slice_size(prepared.config, each).shapes for each in cut(prepared.config, stages, None, 32)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_stage_reads_its_part_of_what_transformers_wrote(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, family, FAMILIES[family])
    own = dict(model.named_parameters())
    own.setdefault("lm_head.weight", model.get_output_embeddings().weight)
    paths = sorted(tmp_path.glob("*.safetensors"))
    prepared, stages = layout(family)
    check_files(prepared, stages, paths)
    for shapes in stages:
        found = list(read_parameters(prepared, shapes, paths))
        assert [name for name, _ in found] == list(shapes)
        assert all(torch.equal(own[name], tensor) for name, tensor in found)
    names = CheckpointMap(prepared, [name for path in paths for name in load_file(path)])
    asked = [set(names.sources(shapes)) for shapes in stages]
    shared = asked[0] & asked[1]
    assert shared == ({"transformer.wte.weight"} if family == "gpt2" else set()), "only the tied head is read twice"


def test_a_checkpoint_of_the_base_model_in_half_precision(tmp_path: Path) -> None:
    model = write_model(tmp_path, "gpt2", FAMILIES["gpt2"])
    paths, bare = sorted(tmp_path.glob("*.safetensors")), dict[str, torch.Tensor]()
    for path in paths:
        own = {name.removeprefix("transformer."): tensor.bfloat16() for name, tensor in load_file(path).items()}
        save_file(own, path)
        bare |= own
    prepared, stages = layout("gpt2", 1)
    found = dict(read_parameters(prepared, stages[0], paths))
    assert torch.equal(found["lm_head.weight"], bare["wte.weight"].float())
    assert torch.equal(found["transformer.h.1.attn.c_attn.weight"], bare["h.1.attn.c_attn.weight"].float())
    assert found.keys() >= dict(model.named_parameters()).keys()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_of_another_model_are_refused_by_their_headers(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, family, {**FAMILIES[family], "intermediate_size": 40})
    prepared, stages = layout(family)
    for look in (
        lambda: check_files(prepared, stages, sorted(tmp_path.glob("*.safetensors"))),
        lambda: list(read_parameters(prepared, stages[0], sorted(tmp_path.glob("*.safetensors")))),
    ):
        with user_error(Exit.CONFIG, "cannot be loaded") as caught:
            look()
        assert "does not fit the model" in caught.value.why
        assert ", not [" in caught.value.why


def test_what_is_missing_or_no_file_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    prepared, stages = layout("llama")
    for path in tmp_path.glob("*.safetensors"):
        tensors = {name: each for name, each in load_file(path).items() if "layers.0.mlp" not in name}
        save_file(tensors, path)
    with pytest.raises(UserError) as caught:
        check_files(prepared, stages, sorted(tmp_path.glob("*.safetensors")))
    assert "model.layers.0.mlp.gate_proj.weight is missing" in caught.value.why
    (tmp_path / "torn.safetensors").write_bytes(b"no header")
    for name in ("torn.safetensors", "none.safetensors", ""):
        with pytest.raises(UserError, match="cannot be loaded") as caught:
            check_files(prepared, stages, [tmp_path / name] if name else [])
        assert name in caught.value.why


def test_tensors_that_the_model_has_no_place_for_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    prepared, stages = layout("llama")
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"layers\.61\."])
    save_file({"model.layers.7.extra": torch.ones(1), "model.layers.61.norm": torch.ones(1)}, tmp_path / "more")
    assert check_files(prepared, stages, [*tmp_path.glob("*.safetensors"), tmp_path / "more"]) == [
        "model.layers.7.extra"
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_of_its_own_in_a_model_that_ties_it_is_refused(is_tied: bool, tmp_path: Path) -> None:
    """Transformers would compute with both; the head would be lost here without a word."""
    write_model(tmp_path, sizes=FAMILIES["llama"] | {"tie_word_embeddings": is_tied})
    prepared, stages = layout("llama", tie_word_embeddings=is_tied)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors = {name: each for path in tmp_path.glob("*.safetensors") for name, each in load_file(path).items()}
    path = tmp_path / "all"
    for change in (0.0, 1.0):
        save_file(tensors | {head: tensors[embedding] + change}, path)
        if not (is_tied and change):
            check_files(prepared, stages, [path])
            continue
        with pytest.raises(UserError, match="cannot be loaded") as caught:
            check_files(prepared, stages, [path])
        assert f"{embedding} and {head} differ" in caught.value.why


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    prepared, stages = layout("llama")
    paths = sorted(tmp_path.glob("*.safetensors"))
    tensors = load_file(paths[0])
    save_file(tensors | {"of_another_program": torch.tensor([torch.inf])}, paths[0])
    check_files(prepared, stages, paths)
    name, weight = next(iter(tensors.items()))
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        save_file(tensors | {name: weight.to(dtype)}, paths[0])
        check_files(prepared, stages, paths)
    save_file(tensors | {name: weight.clone().fill_(torch.nan)}, paths[0])
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        check_files(prepared, stages, paths)
    assert caught.value.why == f"{name} holds what is no finite number"


def test_check_reads_the_header_of_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(model=ModelConfig(architecture="mixtral", sizes=FAMILIES["mixtral"]))
    run = msgspec.structs.replace(run, pipeline=PipelineConfig(sequence_length=32))
    layout = model_layout(run)
    model = AutoModelForCausalLM.from_config(family_config("mixtral", FAMILIES["mixtral"]))
    shapes = {name: list(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    asked: list[str] = []

    def metadata(repository: str, revision: str | None) -> Any:
        asked.append(repository)
        tensors = {name: SimpleNamespace(dtype="BF16", shape=shape) for name, shape in shapes.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    on_hub = ModelConfig(hub="some/model", commit="0" * 40)
    check_hub_weights(on_hub, layout)
    check_hub_weights(run.model, layout)
    assert asked == ["some/model"], "a model that is not there is not asked for"
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    for wrong, says in ((None, "experts.gate_up_proj"), ([40, 32], "some/model")):
        before = shapes.pop(name)
        if wrong is not None:
            shapes[name] = wrong
        with pytest.raises(UserError, match="The weights in some/model cannot be loaded") as caught:
            check_hub_weights(on_hub, layout)
        assert says in str(caught.value)
        shapes[name] = before
    for size in (2**70, 2**62, -1):
        monkeypatch.setitem(shapes, name, [size, 32])
        with pytest.raises(UserError, match="The weights in some/model cannot be loaded"):
            check_hub_weights(on_hub, layout)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_map, "check_tensors", Mock(side_effect=AttributeError("a bug of ours")))
        with pytest.raises(AttributeError):
            check_hub_weights(on_hub, layout)

    def fail(error: Exception) -> None:
        away = Mock(side_effect=error)
        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", away)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", away)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", away)

    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (ConnectionError("no hub"), huggingface_hub.errors.HTTPError("no hub"), full):
        fail(error)
        check_hub_weights(on_hub, layout)
        check_download(on_hub, None)
        with pytest.raises(UserError, match=r"some/model cannot be (fetched|kept)") as caught:
            hub_directory(on_hub)
        assert caught.value.code is (Exit.STORAGE if error is full else Exit.UNREACHABLE)
    fail(MemoryError())
    for ask in (
        lambda: check_hub_weights(on_hub, layout),
        lambda: check_download(on_hub, None),
        lambda: hub_directory(on_hub),
    ):
        with pytest.raises(MemoryError):
            ask()
