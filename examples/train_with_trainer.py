"""A Trainer of transformers as a member of a swarm; TRL's trainers take the optimiser and the callback alike.

pip install accelerate                                            # which every Trainer asks for
python examples/train_with_trainer.py --init run.toml
noloco-node bootstrap --run run.toml --weights . > invite         # on one machine that others can reach
python examples/train_with_trainer.py --swarm invite              # on each machine
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import noloco_node

BATCH, LENGTH = 8, 32


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a text as bytes: here of the source of Python's own argparse."""

    def __init__(self) -> None:
        self._text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._text) // LENGTH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self._text[LENGTH * number : LENGTH * (number + 1)]
        return {"input_ids": ids, "labels": ids}


def model() -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--init", help="write the run file of a swarm, and leave")
    options.add_argument("--swarm", help="the invite of a swarm, or a file that holds it")
    options.add_argument("--home", default="member")
    given, llama = options.parse_args(), model()
    if given.init:
        noloco_node.init(given.init, llama, steps=given.steps, batch=BATCH, sequence_length=LENGTH, replicas=1)
        return
    inner = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    optimizer = noloco_node.GossipOptimizer(inner, llama, given.swarm, home=given.home)
    with TemporaryDirectory() as directory:
        settings = TrainingArguments(
            directory,
            max_steps=1_000_000,  # the run ends it
            per_device_train_batch_size=BATCH,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=torch.seed() % 2**32,  # each member reads the text in an order of its own
        )
        callback = noloco_node.GossipCallback(optimizer)
        Trainer(llama, settings, train_dataset=Bytes(), optimizers=(optimizer, None), callbacks=[callback]).train()


if __name__ == "__main__":
    main()
