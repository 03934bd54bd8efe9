"""Small checkpoints as transformers writes them, and runs that go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
    """Write a checkpoint with random weights, and return the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(family_config(family, sizes))
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def weights_section(directory: Path) -> str:
    """Return what a run file says of the weights of a checkpoint."""
    return "".join(
        f'[[model.weights]]\nfile = "{each.file}"\nsize_bytes = {each.size_bytes}\ndigest = "{each.digest}"\n'
        for each in map(described, sorted(directory.glob("*.safetensors")))
    )
