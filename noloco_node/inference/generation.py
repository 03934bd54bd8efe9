"""Going on from a prompt with an exported model, token by token.

The next token is drawn from the `top_k` most probable, at a temperature; temperature 0 takes the most probable. Once
the model's positions are used up, it reads the later half of the text again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch

from noloco_node.data.token_text import Prompts, Sampling, draw
from noloco_node.errors import config_error, usage_error
from noloco_node.export.sources import ModelSource
from noloco_node.inference.evaluation import reading_of
from noloco_node.inference.open_model import check_known, open_model
from pipeline.model_config import longest_sequence


def continuation(model: Any, prompt: list[int], sampling: Sampling, ends: Collection[int] = ()) -> Iterator[int]:
    """Yield the tokens that a transformers model goes on with, until one of `ends` or as many as asked for."""
    positions = longest_sequence(model.config) or len(prompt) + sampling.tokens + 1
    if not prompt:
        raise ValueError("there is no token to go on from")
    generator = torch.Generator().manual_seed(sampling.seed)
    text, unread, memory = prompt[-positions:], prompt[-positions:], None
    for _ in range(sampling.tokens):
        with torch.inference_mode():
            output = model(torch.tensor([unread]), past_key_values=memory, use_cache=True)
        logits = output.logits[0, -1]
        if not logits.max().isfinite():  # NaN is the greatest
            raise config_error(
                "The model computes what is no number.",
                why="its weights are not finite, or too large",
                hint="noloco-node evaluate says what it is worth; export again, or from other homes",
            )
        token = draw(logits, sampling, generator)
        if token in ends:
            return
        yield token
        text, unread, memory = [*text, token], [token], output.past_key_values
        if len(text) > positions:
            text = text[-max(1, positions // 2) :]
            unread, memory = text, None


def generate(model: ModelSource, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Return what a checkpoint, or an adapter over one, makes of `prompt`, in pieces of whole characters, as they come.

    The prompt comes first, unless the run learns answers in messages: then it is what a user says, and the answer comes
    alone. Raises `UserError` at once if there is no such checkpoint, or no token to go on from.
    """
    prompts = Prompts(reading_of(model), [prompt])
    if not prompts.tokens[prompt]:
        raise usage_error(
            "There is nothing to go on from.",
            why="the prompt has no token",
            hint='a prompt with a word in it, such as --prompt "import "',
        )
    opened = open_model(model)
    check_known(opened, max(prompts.tokens[prompt]))
    drawn = continuation(opened, prompts.tokens[prompt], sampling, prompts.ends)
    return chain(() if prompts.answers else (prompt,), prompts.spelled(prompt, drawn))
