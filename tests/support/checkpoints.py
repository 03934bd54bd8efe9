"""Small checkpoints as transformers writes them, and runs that go on from them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from noloco_node.storage.weight_store import described
from pipeline.model_config import family_config

LLAMA: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def write_model(
    directory: Path, family: str = "llama", sizes: dict[str, Any] = LLAMA, *, shard_size: str = "100KB"
) -> Any:
    """Write a checkpoint with random weights and a small tokenizer, and return the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(family_config(family, sizes))
    model.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory, ["words of a tokenizer"])
    return model


def write_tokenizer(directory: Path, texts: Sequence[str]) -> None:
    """Write a byte-pair tokenizer of 300 tokens, learnt from these texts, instead of the one that is there."""
    for path in directory.glob("*token*"):
        path.unlink()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)


def weights_section(directory: Path) -> str:
    return listed("model.weights", sorted(directory.glob("*.safetensors")))


def listed(section: str, paths: Iterable[Path]) -> str:
    return "".join(
        f'[[{section}]]\nfile = "{each.file}"\nsize_bytes = {each.size_bytes}\ndigest = "{each.digest}"\n'
        for each in map(described, paths)
    )
