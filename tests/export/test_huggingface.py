"""From the slices of a swarm to one checkpoint that plain transformers loads, and what it is worth."""

import fcntl
import json
import math
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig
from user_errors import user_error

from noloco_node.data import held_out_text
from noloco_node.data.held_out_text import HeldOutText, Loss, _margin, text_loss, validation_text
from noloco_node.data.token_text import Sampling
from noloco_node.errors import Exit
from noloco_node.export.huggingface import own_generation, write_checkpoint
from noloco_node.export.sources import Provenance, model_in, read_provenance
from noloco_node.inference.evaluation import evaluate, unigram_entropy
from noloco_node.inference.generation import generate
from noloco_node.run.config import DataConfig, ModelConfig
from noloco_node.run.presets import demo_run_text
from noloco_node.storage.weight_store import WeightFile
from pipeline.forward_pass import Slice
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.partition import build, cut

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 384,
    "max_position_embeddings": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 384, "n_positions": 128},
    "mixtral": {**LLAMA, "num_local_experts": 4},
}
NOTES = Provenance(
    run_id="ab" * 32,
    rounds=(4, 3),
    replicas=(2, 1),
    untied=True,
    run_file=demo_run_text(stages=2, replicas=2, steps=100, seed=0),
)


def slices(family: str, stages: int = 2) -> tuple[Prepared, list[Slice]]:
    recipe = prepare(family_config(family, SIZES[family]))
    return recipe, [build(recipe, piece, seed=1).eval() for piece in cut(recipe.config, stages, None, 128)]


def weights(part: Slice) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in part.named_parameters()}


def ids() -> Tensor:
    return torch.randint(3, 259, (2, 16), generator=torch.Generator().manual_seed(0))


def export(target: Path, family: str = "llama") -> list[Slice]:
    recipe, parts = slices(family)
    write_checkpoint(target, recipe.config, [weights(part) for part in parts], ByT5Tokenizer(), NOTES)
    return parts


@pytest.mark.parametrize("family", SIZES)
def test_plain_transformers_loads_the_same_model(family: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    parts = export(target, family)
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    with torch.no_grad():
        hidden = ids()
        for part in parts:
            hidden = part(hidden)
        torch.testing.assert_close(model.eval()(ids()).logits, hidden, rtol=1e-5, atol=1e-5)
    assert model.config.use_cache
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.pad_token_id == 0
    assert os.listdir(target.parent) == ["model"], "nothing left beside it"
    assert read_provenance(target) == NOTES
    if family == "llama":
        assert AutoTokenizer.from_pretrained(target)("Grüße").input_ids == ByT5Tokenizer()("Grüße").input_ids
    assert json.loads((target / "noloco.json").read_text())["replicas"] == [2, 1]


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_who_may_read_the_directory_may_read_the_model(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        export(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_a_model_that_was_continued_writes_text_as_it_did(tmp_path: Path) -> None:
    recipe, parts = slices("llama")
    own = GenerationConfig(do_sample=True, temperature=0.25, eos_token_id=[1, 7], pad_token_id=0)
    own.save_pretrained(tmp_path / "tokenizer")
    listed = (WeightFile(file="generation_config.json", size_bytes=1, digest="ab" * 32),)
    data = DataConfig(tokenizer=str(tmp_path / "tokenizer"), tokenizer_files=listed)
    continued = ModelConfig(architecture="llama", weights=(WeightFile(file="a", size_bytes=1, digest="ab" * 32),))
    found = own_generation(continued, data)
    target = tmp_path / "model"
    write_checkpoint(target, recipe.config, [weights(part) for part in parts], ByT5Tokenizer(), NOTES, found)
    loaded = AutoModelForCausalLM.from_pretrained(target).generation_config
    assert (loaded.temperature, loaded.eos_token_id, loaded.do_sample) == (0.25, [1, 7], True)
    # A tokenizer of another model says nothing about this one, and what cannot be read is nobody's.
    assert own_generation(ModelConfig(architecture="llama"), data) is None
    for content in ("{", '{"temperature": 0.5, "do_sample": false}', "[]"):
        (tmp_path / "tokenizer" / "generation_config.json").write_text(content)
        assert own_generation(continued, data) is None


def test_stages_that_are_not_the_whole_model_are_refused(tmp_path: Path) -> None:
    recipe, parts = slices("gpt2")
    first, last = (weights(part) for part in parts)
    target = tmp_path / "model"
    bent = {**last, "transformer.ln_f.weight": torch.zeros(31)}
    extra = {**last, "transformer.h.9.ln_1.bias": torch.zeros(32)}
    for stages, named in (
        ([first], "lm_head.weight"),
        ([first, last, first], "wte.weight"),
        ([first, bent], "transformer.ln_f.weight$"),
        ([first, extra], r"transformer.h.9.ln_1.bias$"),
    ):
        with pytest.raises(ValueError, match=named):
            write_checkpoint(target, recipe.config, stages, ByT5Tokenizer(), NOTES)
    assert not target.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("full", "file"):
        with user_error(Exit.USAGE, "not empty"):
            export(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize(
    "refusal",
    [OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")],  # as tokenizers says
)
def test_a_failure_leaves_nothing_behind(tmp_path: Path, refusal: Exception) -> None:
    class FullDisk(ByT5Tokenizer):
        def save_pretrained(self, *_: Any, **__: Any) -> Any:
            raise refusal

    recipe, parts = slices("llama")
    with user_error(Exit.STORAGE, "No space left"):
        write_checkpoint(tmp_path / "model", recipe.config, [weights(part) for part in parts], FullDisk(), NOTES)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_export_left_goes_and_one_at_work_is_left_alone(tmp_path: Path) -> None:
    left = tmp_path / ".model.aside"
    (left / "deeper").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    lock = os.open(left, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with user_error(Exit.USAGE, "Another process"):
        export(tmp_path / "model")
    assert os.listdir(tmp_path) == [left.name]
    assert sorted(os.listdir(left)) == ["deeper", "model.safetensors"]
    os.close(lock)  # as the system does for whoever is killed
    export(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    assert "deeper" not in os.listdir(tmp_path / "model")


def loss_on(model: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Loss:
    rows = sum(map(len, batches))
    return text_loss(model, HeldOutText(batches, [""] * rows, rows, True))


def test_loss_by_hand() -> None:
    """Three tokens, probabilities a half, a quarter and an eighth: two bits a token on the mean."""
    table = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()

    def model(batch: Tensor) -> Tensor:
        return table.expand(*batch.shape, 4) + 3.0

    loss = loss_on(model, [torch.tensor([[3, 0, 1]]), torch.tensor([[0, 2]])])
    assert loss.tokens == 3
    assert loss.mean == pytest.approx(2 * math.log(2))
    assert loss.perplexity == pytest.approx(4.0)
    with pytest.raises(ValueError, match="no token"):
        loss_on(model, [])
    assert Loss(1e6, 1).perplexity == math.inf


def test_unigram_entropy_by_hand() -> None:
    batches = [torch.tensor([[9, 0, 0, 1]]), torch.tensor([[0, 0, 7, 0]])]
    shares = [4 / 6, 1 / 6, 1 / 6]
    assert unigram_entropy(batches) == pytest.approx(-sum(share * math.log(share) for share in shares))
    assert unigram_entropy([torch.zeros(2, 5, dtype=torch.int64)]) == 0.0
    with pytest.raises(ValueError, match="no token"):
        unigram_entropy([])


@given(seed=st.integers(0, 1000), values=st.integers(1, 9))
def test_no_model_without_context_beats_the_unigram_entropy(seed: int, values: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, values, (2, 7), generator=generator) for _ in range(2)]
    table = torch.randn(9, generator=generator)
    assert loss_on(lambda ids: table.expand(*ids.shape, 9), batches).mean >= unigram_entropy(batches) - 1e-6
    counts = torch.bincount(torch.cat([batch[:, 1:].flatten() for batch in batches]), minlength=9)
    fitted = (counts / counts.sum()).log().clamp(min=-1e4)
    best = loss_on(lambda ids: fitted.expand(*ids.shape, 9), batches).mean
    assert best == pytest.approx(unigram_entropy(batches), abs=1e-5)


def test_evaluating_a_directory(tmp_path: Path) -> None:
    export(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    said = evaluate((tmp_path / "model",), data=str(text), batches=2)
    numbers = json.loads(evaluate((tmp_path / "model",), data=str(text), batches=2, as_json=True))
    wanted = {"loss", "margin", "perplexity", "tokens", "documents", "share", "complete", "unigram_entropy"}
    assert numbers.keys() == wanted
    assert (numbers["documents"], numbers["complete"], numbers["margin"]) == (1, True, None)
    assert numbers["share"] == pytest.approx(16 / 64, abs=0.01)
    assert "of 1 document, 25% of the text" in said
    whole = evaluate((tmp_path / "model",), data=str(text), batches=None)
    assert "of 1 document, all of the text" in whole
    assert numbers["tokens"] == 2 * 8 * 128
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    assert f"loss {numbers['loss']:.4f} nats a token" in said
    assert 2.0 < numbers["unigram_entropy"] < 2.6 < numbers["loss"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda at: os.truncate(at / "model.safetensors", 5000), ""),
        (
            lambda at: save_file({"model.norm.weight": torch.ones(32)}, at / "model.safetensors", {"format": "pt"}),
            "lack",
        ),
        (lambda at: (at / "model.safetensors").write_bytes(b"no header"), ""),
        (lambda at: (at / "config.json").write_text("{"), ""),
    ],
)
def test_a_checkpoint_that_was_cut_short_is_one_clear_message(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    export(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    spoil(tmp_path / "model")
    for command in (
        lambda: evaluate((tmp_path / "model",), data=str(tmp_path / "text.txt"), batches=1),
        lambda: list(generate(model_in(tmp_path / "model"), "import ", Sampling(2))),
    ):
        with user_error(Exit.CONFIG, "holds no model that transformers can load") as caught:
            command()
        assert why in caught.value.why
        assert "cut short" in caught.value.hint


def test_a_sample_lies_evenly_over_all_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_text, "READ_TOKENS", 1)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} says so\n" * 30)
    data = DataConfig(source="text", path=str(tmp_path), validation_percent=100.0)
    everything = validation_text(data, 32, 0, None)
    assert everything.complete
    assert everything.share == 1.0
    few = validation_text(data, 32, 0, 10)
    assert len(few.documents) == sum(map(len, few.batches)) == 80
    assert len(set(few.documents)) >= 34, "two of each, and not eighty of the first"
    assert few.read == 8 * 80
    assert not few.complete


def test_the_margin_is_over_documents_and_not_over_tokens() -> None:
    """Twenty documents of one hundred tokens each: the mean over other twenty lies within it 19 times of 20."""
    rng = random.Random(3)
    covered = 0
    for _ in range(300):
        means = [rng.gauss(2.0, 0.5) for _ in range(20)]
        sums = [(100 * mean, 100) for mean in means]
        mean = sum(means) / 20
        margin = _margin(sums, mean, 2000)
        assert margin is not None
        covered += abs(mean - 2.0) <= margin
    assert 0.91 <= covered / 300 <= 0.98
    assert _margin([(1.0, 1)] * 4, 1.0, 4) is None
    assert _margin([(2.0, 1), *[(1.0, 1)] * 9], math.inf, 10) is None
