"""What membership takes of a training loop of one's own: of its thread, of its cores, of its tokens a second.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_efficiency.foreign_loop
    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_efficiency.foreign_loop --every 1000000    # without meetings

A GPT of ten million parameters trains in this process, other members in processes of their own, over real daemons on
this machine. Turns alternate: in *bare* ones the loop steps with the wrapped optimiser, in *member* ones with
`GossipOptimizer`. Shown are medians over the turns, with the least and the most.

Of a member's turns alone, which other work on the machine disturbs little: what `GossipOptimizer.step` takes beyond the
wrapped optimiser's step, in core seconds of the thread that trains and by the clock (with what it waits there), each of
the iteration without it. From the latter follow the tokens a second that the wrapper leaves.

Of neighbouring turns, member to bare: core seconds of the thread that trains, those of this whole process, and tokens a
second. What a round still sends when a member turn ends falls into the bare turn after it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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


class TimedAdamW(torch.optim.AdamW):
    """Counts the seconds of its steps: by the clock, and of a core."""

    wall_s = thread_s = 0.0

    def step(self, closure: Any = None) -> Any:
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        returned = super().step(closure)
        self.wall_s += time.perf_counter() - wall_s
        self.thread_s += time.thread_time() - thread_s
        return returned


class Turn(NamedTuple):
    """Seconds of one turn, by the clock and of a core: for the thread that trains, and for the process.

    `wrapper`: of them, those in `step` beyond the steps of the wrapped optimiser.
    """

    wall_s: float
    wrapper_s: float
    thread_s: float
    wrapper_thread_s: float
    process_s: float

    @property
    def share(self) -> float:
        """By the clock, of the turn without the wrapper."""
        return self.wrapper_s / (self.wall_s - self.wrapper_s)

    @property
    def thread_share(self) -> float:
        """Of a core, of the turn without the wrapper."""
        return self.wrapper_thread_s / (self.thread_s - self.wrapper_thread_s)


def turn(model: GPT, inner: TimedAdamW, optimizer: torch.optim.Optimizer, sizes: Sizes, steps: int) -> Turn:
    begun_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    inner.wall_s = inner.thread_s = step_s = step_thread_s = 0.0
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (sizes.batch, sizes.length + 1))
        model(ids).backward()
        wall_s, core_s = time.perf_counter(), time.thread_time()
        optimizer.step()
        step_s += time.perf_counter() - wall_s
        step_thread_s += time.thread_time() - core_s
        optimizer.zero_grad()
    return Turn(
        time.perf_counter() - begun_s,
        step_s - inner.wall_s,
        time.thread_time() - thread_s,
        step_thread_s - inner.thread_s,
        time.process_time() - process_s,
    )


def joined(model: GPT, invite: str, home: Path) -> tuple[TimedAdamW, noloco_node.GossipOptimizer]:
    inner = TimedAdamW(model.parameters(), lr=1e-4)
    return inner, noloco_node.GossipOptimizer(inner, model, invite, home=home, listen=[LOCAL], refresh=2.0)


def train_beside(sizes: Sizes, invite: str, home: Path) -> None:
    """Train as another member until terminated."""
    model = GPT(sizes)
    inner, optimizer = joined(model, invite, home)
    while True:
        turn(model, inner, optimizer, sizes, 10)


def measure(sizes: Sizes, args: argparse.Namespace, directory: Path) -> tuple[list[Turn], list[Turn], int]:
    """Return the bare turns and those as a member, and the rounds that were met."""
    model = GPT(sizes)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    run = noloco_node.init(
        directory / "run.toml", model, steps=10**6, batch=sizes.batch, sequence_length=sizes.length, every=args.every
    )
    host = ["bootstrap", "--run", str(run), "--weights", str(directory), "--listen", LOCAL]
    command = [sys.executable, "-m", "noloco_node", *host, "--home", str(directory / "host")]
    beside: list[subprocess.Popen[Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as bootstrap:
        try:
            assert bootstrap.stdout is not None
            invite = bootstrap.stdout.readline().strip()
            inner, optimizer = joined(model, invite, directory / "first")
            options = [f"--{name}={value}" for name, value in sizes._asdict().items()]
            for number in range(1, args.members):
                others = ["--beside", invite, str(directory / f"member{number}")]
                program = [sys.executable, "-m", __spec__.name, *options, *others]
                beside.append(subprocess.Popen(program, stderr=subprocess.DEVNULL))
            with optimizer:
                swarm = noloco_node.Swarm(invite)
                while sum(each.state == "training" for each in swarm.status().peers) < args.members:
                    turn(model, inner, optimizer, sizes, 2)
                turn(model, inner, optimizer, sizes, args.steps)
                bare, member = list[Turn](), list[Turn]()
                before = _round(swarm)
                for number in range(args.turns):
                    for found, form in [(bare, inner), (member, optimizer)][:: 1 if number % 2 else -1]:
                        found.append(turn(model, inner, form, sizes, args.steps))
                rounds = _round(swarm) - before
            return bare, member, rounds
        finally:
            for process in (*beside, bootstrap):
                process.terminate()
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
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--beside", nargs=2, metavar=("INVITE", "HOME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = Sizes(args.width, args.layers, args.batch, args.length)
    if args.beside:
        train_beside(sizes, args.beside[0], Path(args.beside[1]))
    with TemporaryDirectory(dir="/tmp") as directory:
        bare, member, rounds = measure(sizes, args, Path(directory))
    pairs = list(zip(bare, member, strict=True))
    found = {
        "wrapper, core seconds": [m.thread_share for m in member],
        "wrapper, by the clock": [m.share for m in member],
        "tokens a second left": [1.0 / (1.0 + m.share) for m in member],
        "core seconds of the thread": [m.thread_s / b.thread_s for b, m in pairs],
        "core seconds in all": [m.process_s / b.process_s for b, m in pairs],
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
