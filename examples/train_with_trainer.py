"""A Trainer of transformers trains adapters of PEFT on conversations, as a member of a swarm.

    pip install accelerate peft
    python examples/train_with_trainer.py --init run.toml
    noloco-node bootstrap --run run.toml --weights . > invite         # on one machine that others can reach
    python examples/train_with_trainer.py --swarm invite              # on each machine

Only the adapters travel; each member holds the whole model. `--base`: a directory with a model and a tokenizer that has
a chat template, or a name on the hub; by default a small model with random weights. `--rows`: a file with one
conversation a line, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}; by
default questions about Python's own library. Of each conversation the last answer is learnt.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import noloco_node

BATCH, LENGTH = 8, 192
TEMPLATE = (
    "{% for each in messages %}<|{{ each['role'] }}|>{{ each['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODULES = "argparse collections csv functools itertools json math os random re shutil string textwrap threading time"


def base(place: str | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer. All members must have the same one: what is frozen is not exchanged."""
    if place is not None:
        return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.15
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, max_position_embeddings=LENGTH, **sizes))
    return model, ByT5Tokenizer(chat_template=TEMPLATE)


def questions() -> list[Any]:
    """Return conversations about what Python's own library says of itself."""
    found = []
    for module in map(importlib.import_module, MODULES.split()):
        for name, value in vars(module).items():
            says = (value.__doc__ if callable(value) and not name.startswith("_") else None) or ""
            if first := says.strip().split("\n")[0]:
                asked = {"role": "user", "content": f"What is {module.__name__}.{name}?"}
                found.append([asked, {"role": "assistant", "content": first}])
    return found


def encoded(tokenizer: Any, messages: Any) -> dict[str, list[int]]:
    """Return the tokens of a conversation; labels of -100 are not learnt."""
    given = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)[:LENGTH]
    return {"input_ids": ids, "labels": [-100] * len(given) + ids[len(given) :]}


def rows(tokenizer: Any, path: Path | None) -> list[dict[str, list[int]]]:
    """Return the rows of a file, or the questions, without those whose answer does not fit."""
    read = questions() if path is None else [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    found = [encoded(tokenizer, messages) for messages in read]
    return [row for row in found if len(row["labels"]) == len(row["input_ids"])]


def with_adapters(model: Any) -> Any:
    """Return the model with adapters, which alone are trained."""
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--base")
    options.add_argument("--rows", type=Path)
    options.add_argument("--rate", type=float, default=3e-3)
    options.add_argument("--steps", type=int, default=200, help="of each of three members, in the run file")
    options.add_argument("--init", help="write the run file of a swarm, and leave")
    options.add_argument("--swarm", help="the invite of a swarm, or a file that holds it")
    options.add_argument("--home", default="member", help="the directory of this member")
    options.add_argument("--out", help="where to write the adapters at the end, as PEFT's files")
    given = options.parse_args()
    whole, tokenizer = base(given.base)
    model = with_adapters(whole)
    if given.init:
        noloco_node.init(given.init, model, steps=given.steps, batch=BATCH, sequence_length=LENGTH, replicas=3)
        return
    inner = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), given.rate, weight_decay=0.0)
    optimizer = noloco_node.GossipOptimizer(inner, model, given.swarm, home=given.home)
    with TemporaryDirectory() as directory:
        settings = TrainingArguments(
            directory,
            max_steps=1_000_000,  # the run ends it
            lr_scheduler_type="constant",
            per_device_train_batch_size=BATCH,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=torch.seed() % 2**32,  # each member reads the rows in an order of its own
        )
        Trainer(
            model,
            settings,
            train_dataset=rows(tokenizer, given.rows),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            optimizers=(optimizer, None),
            callbacks=[noloco_node.GossipCallback(optimizer)],
        ).train()
    if given.out:
        model.save_pretrained(given.out)


if __name__ == "__main__":
    main()
