"""A small GPT and its training loop, in the manner of nanoGPT; lines marked "swarm" make it a member of a swarm.

    python examples/train_gpt.py                                  # alone, as any script
    python examples/train_gpt.py --init run.toml                  # the run that others will join
    noloco-node bootstrap --run run.toml --weights . > invite     # on one machine that others can reach
    python examples/train_gpt.py --swarm invite                   # on each machine

It learns bytes of a text, by default of the source of Python's own argparse.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import noloco_node  # swarm

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 8, 64, 64, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.attention(self.norm1(hidden)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.projection(seen.transpose(1, 2).reshape(batch, length, -1))
        after: Tensor = hidden + self.feed(self.norm2(hidden))
        return after


class GPT(nn.Module):
    """A decoder over bytes; the vocabulary head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.blocks(self.tokens(ids) + self.places(places))
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def draw(text: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Return a random batch of the text, and what follows each of its bytes."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def rate(step: int, steps: int, peak: float = 3e-3, warmup: int = 20) -> float:
    """Return the learning rate: a warm-up, then a cosine to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--text", type=Path, default=Path(argparse.__file__))
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--init", help="write the run file of a swarm, and leave")  # run file
    options.add_argument("--swarm", help="the invite of a swarm, or a file that holds it")  # swarm
    options.add_argument("--home", default="member", help="the directory of this member")  # swarm
    given = options.parse_args()

    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8)
    model = GPT().to(given.device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if given.init:  # run file
        noloco_node.init(given.init, model, steps=given.steps, batch=BATCH, sequence_length=LENGTH)  # run file
        return  # run file
    if given.swarm:  # swarm
        torch.seed()  # swarm: each member reads the text in an order of its own
        optimizer = noloco_node.GossipOptimizer(optimizer, model, given.swarm, home=given.home)  # swarm

    begun = time.perf_counter()
    for step in range(given.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, given.steps)
        loss = model(*draw(text, given.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if getattr(optimizer, "finished", False):  # swarm
            break  # swarm
        if step % 50 == 0:
            speed = (step + 1) * BATCH * LENGTH / (time.perf_counter() - begun)
            print(f"step {step}: loss {loss.item():.3f}, {speed:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
