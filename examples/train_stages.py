"""A list of modules as a pipeline of nodes: a small decoder of bytes in two stages, each on machines of its own.

    python examples/train_stages.py --init run.toml
    noloco-node bootstrap --run run.toml --weights . > invite                  # on one machine that others can reach
    python examples/train_stages.py --swarm invite --stage 0 --home first      # one machine or more for each stage
    python examples/train_stages.py --swarm invite --stage 1 --home second

Text, optimiser and loss are the node's, from the run file: by default the source of Python's own library, AdamW and
cross-entropy.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import noloco_node

VOCABULARY, LENGTH, WIDTH = 384, 64, 64


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return found


class Layer(nn.TransformerEncoderLayer):
    """A layer in which a token sees none after it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], hidden.device)
        return super().forward(hidden, mask, is_causal=True)


def stage(number: int) -> nn.Module:
    """Return a stage: token ids to activations, activations to logits."""
    if number == 0:
        return nn.Sequential(Embedding(), Layer())
    return nn.Sequential(Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--init", help="write the run file of a swarm, and leave")
    options.add_argument("--swarm", help="the invite of a swarm, or a file that holds it")
    options.add_argument("--stage", type=int, choices=(0, 1), help="by default the one that needs a peer most")
    options.add_argument("--home", default="member", help="the directory of this member")
    options.add_argument("--refresh", type=float, default=10.0, help="seconds between two records of this member")
    given = options.parse_args()
    if given.init:
        torch.manual_seed(0)
        sections = {"inner": {"learning_rate": 5e-3}, "pipeline": {"microbatches_per_step": 4}}
        sizes = {"steps": given.steps, "batch": 4, "sequence_length": LENGTH}
        noloco_node.init(given.init, [stage(0), stage(1)], **sizes, sections=sections)
        return
    chosen = {"refresh": given.refresh} | ({} if given.stage is None else {"stage": given.stage})
    with noloco_node.join(given.swarm, stages=stage, home=given.home, threads=1, **chosen) as peer:
        peer.wait()


if __name__ == "__main__":
    main()
