"""Stages of small decoders, built as a node builds them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipeline.decoder_slice import Cut, Subspace
from pipeline.forward_pass import PendingForward, StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.messages import Gradient
from pipeline.model_config import Prepared, family_config, prepare
from pipeline.partition import build, cut
from pipeline.stage import Stage

CPU = torch.device("cpu")


class PlainAdamW(InnerConfig):
    """AdamW as torch has it, without Nesterov's momentum."""

    nesterov: ClassVar[bool] = False


INNER = PlainAdamW(beta2=0.99, weight_decay=0.1)
VOCABULARY = 61
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}


def prepared(family: str, dropout: float = 0.0, **sizes: Any) -> Prepared:
    """Return the recipe of a family with these `sizes` in place of the usual ones."""
    return prepare(family_config(family, (GPT2 if family == "gpt2" else LLAMA) | sizes), dropout)


def cuts(recipe: Prepared, number: int, subspace: Subspace | None = None) -> list[Cut]:
    """Return the parts of so many stages."""
    return [piece._replace(subspace=subspace) for piece in cut(recipe.config, number, None, 16)]


def make_stage(
    recipe: Prepared, piece: Cut, *, codec: str = "float32", seed: int = 3, inner: InnerConfig = INNER, **choices: Any
) -> Stage:
    """Return a stage; `choices` as in its settings."""
    settings = StageSettings(CPU, **choices)
    return Stage(build(recipe, piece, seed), inner, settings, first=piece.embeds, last=piece.head, codec=codec)


def drawn_ids(seed: int, *shape: int) -> Tensor:
    """Return ids of the vocabulary."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def run_microbatch(stages: Sequence[Stage], ids: Tensor, targets: Tensor) -> Gradient:
    """Walk one microbatch down and its gradient up; return what the last stage replied."""
    hidden, passes = ids, list[PendingForward]()
    for stage in stages[:-1]:
        passes.append(stage.forward(hidden, targets))
        hidden = passes[-1].output
    reply = stages[-1].loss(hidden, targets)
    gradient = reply.hidden
    for waiting in reversed(passes):
        assert gradient is not None
        gradient = waiting.backward(gradient)
    assert gradient is None or not passes
    return reply


def whole_optimiser(weights: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """Return torch's own optimiser of a whole model, with the constants of the stages."""
    groups = [
        {"params": [w for w in weights.values() if (w.ndim >= 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, INNER.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(INNER.beta1, INNER.beta2), eps=INNER.epsilon)


def nadam(
    weights: Iterable[Tensor] | Iterable[dict[str, Any]], inner: InnerConfig, learning_rate: float
) -> torch.optim.NAdam:
    """Return torch's own form of a run's inner optimiser."""
    return torch.optim.NAdam(
        weights,
        lr=learning_rate,
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
        weight_decay=inner.weight_decay,
        momentum_decay=1e9,  # so large a decay lets torch's beta1 be the same in each step
        decoupled_weight_decay=True,
    )
