"""What membership takes of a training loop of one's own: of its thread, of its cores, of its tokens a second.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_efficiency.foreign_loop
    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_efficiency.foreign_loop --every 1000000    # without meetings

A GPT of ten million parameters trains in this process, a second member in another one, over real daemons on this
machine. Turns alternate: in *bare* ones the loop steps with the wrapped optimiser, in *member* ones with
`GossipOptimizer`. Shown are the medians over neighbouring turns, with the least and the most: the time in `step` beyond
the bare one as a share of the bare iteration, the core seconds of the whole process as a ratio (the other member's are
not in it), and the tokens a second as a ratio. The last line is one JSON object. What a round still sends when a member
turn ends falls into the bare turn after it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import noloco_node

LOCAL = "/ip4/127.0.0.1/tcp/0"
VOCABULARY = 512


class Sizes(NamedTuple):
    """Of the model and of a batch."""

    width: int
    layers: int
    batch: int
    length: int


class GPT(nn.Module):
    """A decoder of torch's own layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.width // 32, 4 * sizes.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1, ids.device)
        hidden = self.blocks(self.tokens(ids[:, :-1]), mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


class Turn(NamedTuple):
    """Seconds of one turn: in all, in `step`, and of the process's cores."""

    wall_s: float
    step_s: float
    cores_s: float


def turn(model: GPT, optimizer: torch.optim.Optimizer, sizes: Sizes, steps: int) -> Turn:
    begun_s, cores_s, step_s = time.perf_counter(), time.process_time(), 0.0
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (sizes.batch, sizes.length + 1))
        model(ids).backward()
        stepped_s = time.perf_counter()
        optimizer.step()
        step_s += time.perf_counter() - stepped_s
        optimizer.zero_grad()
    return Turn(time.perf_counter() - begun_s, step_s, time.process_time() - cores_s)


def joined(model: GPT, invite: str, home: Path) -> tuple[torch.optim.Optimizer, noloco_node.GossipOptimizer]:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return inner, noloco_node.GossipOptimizer(inner, model, invite, home=home, listen=[LOCAL], refresh=2.0)


def train_beside(sizes: Sizes, invite: str, home: Path) -> None:
    """Train as the second member until interrupted."""
    model = GPT(sizes)
    _, optimizer = joined(model, invite, home)
    while True:
        turn(model, optimizer, sizes, 10)


def measure(sizes: Sizes, args: argparse.Namespace, directory: Path) -> tuple[list[Turn], list[Turn], int]:
    """Return the bare turns and those as a member, and the rounds that were met."""
    model = GPT(sizes)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    run = noloco_node.init(
        directory / "run.toml", model, steps=10**6, batch=sizes.batch, sequence_length=sizes.length, every=args.every
    )
    host = ["bootstrap", "--run", str(run), "--weights", str(directory), "--listen", LOCAL]
    command = [sys.executable, "-m", "noloco_node", *host, "--home", str(directory / "host")]
    beside: subprocess.Popen[bytes] | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as bootstrap:
        try:
            assert bootstrap.stdout is not None
            invite = bootstrap.stdout.readline().strip()
            inner, optimizer = joined(model, invite, directory / "first")
            options = [f"--{name}={value}" for name, value in sizes._asdict().items()]
            beside = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *options, "--beside", invite, str(directory / "second")],
                stderr=subprocess.DEVNULL,
            )
            with optimizer:
                swarm = noloco_node.Swarm(invite)
                while sum(each.state == "training" for each in swarm.status().peers) < 2:
                    turn(model, optimizer, sizes, 2)
                turn(model, optimizer, sizes, args.steps)
                bare, member = list[Turn](), list[Turn]()
                before = _round(swarm)
                for number in range(args.turns):
                    for found, form in [(bare, inner), (member, optimizer)][:: 1 if number % 2 else -1]:
                        found.append(turn(model, form, sizes, args.steps))
                rounds = _round(swarm) - before
            return bare, member, rounds
        finally:
            for process in (beside, bootstrap):
                if process is not None:
                    process.send_signal(signal.SIGINT)
                    process.wait()


def _round(swarm: noloco_node.Swarm) -> int:
    return min(each.round for each in swarm.status().peers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 320), ("layers", 8), ("batch", 8), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=int, default=10, help="inner steps between two rounds")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--beside", nargs=2, metavar=("INVITE", "HOME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = Sizes(args.width, args.layers, args.batch, args.length)
    if args.beside:
        train_beside(sizes, args.beside[0], Path(args.beside[1]))
    with TemporaryDirectory(dir="/tmp") as directory:
        bare, member, rounds = measure(sizes, args, Path(directory))
    pairs = list(zip(bare, member, strict=True))
    found = {
        "share of the thread in step": [(m.step_s - b.step_s) / b.wall_s for b, m in pairs],
        "core seconds": [m.cores_s / b.cores_s for b, m in pairs],
        "tokens a second": [b.wall_s / m.wall_s for b, m in pairs],
    }
    print(f"a round every {args.every} steps, {rounds} rounds; {args.turns} turns of {args.steps} steps each")
    print(f"a bare step takes {1e3 * median(each.wall_s for each in bare) / args.steps:.0f} ms")
    for name, values in found.items():
        print(f"{name:<28} {median(values):7.4f} ({min(values):.4f} to {max(values):.4f})")
    figures = {name: [median(values), min(values), max(values)] for name, values in found.items()}
    print(json.dumps({"every": args.every, "rounds": rounds, **figures}))


if __name__ == "__main__":
    main()
