"""What a codec of activations, a second window in flight, or 8-bit state costs in loss at equal tokens.

    python -m research.codec.activations [--size tiny] [--text 1] [--seeds 1 2 3] [--arms float32 int5-int3 ...]
    python -m research.codec.activations --arms float32 float32w2 --stages 2 --text 2 --seeds 1 2 3 4 5
    python -m research.codec.activations --arms float32 float32s8 --stages 1 --text 2 --seeds 1 2 3 4 5
    python -m research.codec.activations --arms float32s8 float32s8g8 --stages 1 --text 2 --seeds 1 2 3 4 5
    python -m research.codec.activations --speed     # nanoseconds a value of each codec

A Llama in four stages, so with three boundaries, learns the source text of Python's standard library, as bytes. At each
boundary activations and gradients go through the codec, both ways; runs of a seed have the same weights at the start
and the same batches. Loss is taken on all held-out text without a codec, as of a model that is taken home. The
documents are in two disjoint halves, by a hash of their path: recipes were chosen on text 0, and are reported on text
1. Text 2 is all of torch's Python sources.

An arm is a codec of the run file, or a recipe to compare with: BITS/BITS down and back, then letters: b16, b64, b128
values to a scale instead of 32; h: no rotation; s: stochastic instead of dithered rounding back, which the receiver
cannot take away again; n: to the nearest back; d: dithered down as well; k: of each row the loudest value of every 128
is kept apart. `5/3hs` for example.

`subspace-K` is a run whose stages send K numbers a token (`pipeline.subspace`), in bfloat16, or as `subspace-K/CODEC`
says. `ARMeN` begins with an embedding N times as large: the fixed features of a subspace are large from the start, and
so is this, to compare with. `ARMxN` trains N times as long: how long does it take to the same loss? `ARMrN` has N times
the learning rate. `ARMw2` has two windows in flight (`pipeline.windows_in_flight`): every stage but the last computes a
window's activations before it takes the step of the window before, so its gradients are one step stale. `ARMn0` steps
without Nesterov's momentum. `ARMmN` has N for beta1. `ARMo1` has steps of matrices orthogonal (`inner.orthogonal`).
`ARMs8` keeps AdamW's moments as 8-bit codes (`inner.state`). `ARMgN` cuts a batch into N microbatches, and adds the
gradients of matrices up in bfloat16, as a stage with split weights does.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections.abc import Callable
from hashlib import sha256
from math import exp, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from pipeline.activation_codec import decode, encode, seed_of
from pipeline.forward_pass import PendingForward
from pipeline.inner_step import InnerConfig, learning_rate
from pipeline.messages import ACTIVATION_CODECS
from pipeline.stage import Stage
from research.laboratory.experiments.task import PublishedAdamW

SCORED = 32
"""Sequences of held-out text that are computed at once."""


TORCH = 2
"""The number of that text."""


class Size(NamedTuple):
    """A model and its training."""

    width: int
    layers: int
    feed_forward: int
    steps: int
    batch: int
    sequence: int
    learning_rate: float


SIZES = {
    "tiny": Size(96, 4, 256, 150, 8, 96, 5e-3),
    "small": Size(128, 8, 256, 150, 16, 128, 4e-3),
    "medium": Size(192, 8, 512, 250, 16, 128, 3e-3),
    "large": Size(320, 8, 896, 100, 4, 128, 1.5e-3),
}


class Arm(NamedTuple):
    """What becomes of activations on the way down; and of gradients on the way back, given the activations."""

    down: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]
    bits: float
    """Of each value of the model's width, the mean of both ways."""
    subspace: int | None = None
    times: float = 1.0
    embedding: float = 1.0
    rate: float = 1.0
    windows: Literal[1, 2] = 1
    nesterov: bool = True
    beta1: float = 0.9
    coded: bool = False
    orthogonal: bool = False
    summed: int = 1
    """Microbatches of a batch, whose gradients add up in bfloat16 where there are several."""


def arm_of(name: str, width: int) -> Arm:
    """Return a codec of the run file, or a recipe; in a subspace, or for longer."""
    if changed := re.fullmatch(r"(.+)([xerwsgnmo])([\d.]+)", name):
        arm, factor = arm_of(changed[1], width), float(changed[3])
        match changed[2]:
            case "x":
                return arm._replace(times=factor)
            case "e":
                return arm._replace(embedding=factor)
            case "r":
                return arm._replace(rate=factor)
            case "g":
                return arm._replace(summed=int(factor))
            case "n":
                return arm._replace(nesterov=factor > 0.0)
            case "m":
                return arm._replace(beta1=factor)
            case "o":
                return arm._replace(orthogonal=factor > 0.0)
        if changed[2] == "s" and factor == 8:
            return arm._replace(coded=True)
        if changed[2] == "s" or factor not in (1, 2):
            raise SystemExit(f"{name}: one window or two are in flight, and codes of a state have 8 bits")
        return arm._replace(windows=2 if factor == 2 else 1)
    subspace = re.fullmatch(r"subspace-(\d+)(?:/(.+))?", name)
    if subspace:
        sent = int(subspace[1])
        arm = arm_of(subspace[2] or "bfloat16", sent)
        return arm._replace(bits=arm.bits * sent / width, subspace=sent)
    codec = ACTIVATION_CODECS.get(name)
    if codec is None:
        return _recipe(name, width)
    bits = 4 * sum(code.size_bytes(1, width) for code in codec) / width

    def back(gradient: Tensor, activations: Tensor) -> Tensor:
        seed = 0 if codec.back.plain else seed_of(encode(codec.down, activations))
        return decode(codec.back, encode(codec.back, gradient, seed), seed)

    return Arm(lambda values: decode(codec.down, encode(codec.down, values)), back, bits)


def _recipe(name: str, width: int) -> Arm:
    found = re.fullmatch(r"(\d)/(\d)((?:b\d+|[hsndk])*)", name)
    if found is None:
        raise SystemExit(f"no arm is called {name}: a codec, or BITS/BITS and letters")
    down_bits, back_bits, letters = int(found[1]), int(found[2]), found[3]
    blocks = re.search(r"b(\d+)", letters)
    block = int(blocks[1]) if blocks else 32
    matrix = torch.eye(block) if "h" in letters else _hadamard(block)
    noise = torch.Generator().manual_seed(0)
    apart = 24 / 128 if "k" in letters else 0.0

    def rounded(values: Tensor, bits: int, how: str) -> Tensor:
        left, kept = values, None
        if apart:
            groups = values.reshape(-1, 128) if width % 128 == 0 else values.reshape(-1, width)
            loudest = groups.abs().max(1, keepdim=True).indices
            kept = torch.zeros_like(groups).scatter_(1, loudest, groups.gather(1, loudest).bfloat16().float())
            left = values - kept.view_as(values)
        turned = left.reshape(-1, block) @ matrix
        middle = 2 ** (bits - 1) if how == "nearest" else (2**bits - 1) / 2
        # The scale is rounded up in eighths of an octave, as the production's.
        bound = torch.exp2(torch.ceil(8 * torch.log2(turned.abs().amax(1, keepdim=True).clamp_min(1e-30))) / 8)
        u = torch.zeros(()) if how == "nearest" else torch.rand(turned.shape, generator=noise)
        codes = (turned / bound * middle + middle + u).floor_().clamp_(0, 2**bits - 1)
        levels = codes - middle + {"nearest": 0.5, "stochastic": 0.0}.get(how, 0.5 - u)
        turned_back: Tensor = ((levels * bound / middle) @ matrix.T).view_as(values)
        return turned_back if kept is None else turned_back + kept.view_as(values)

    down_how = "dithered" if "d" in letters else "nearest"
    back_how = "stochastic" if "s" in letters else "nearest" if "n" in letters else "dithered"
    return Arm(
        lambda values: rounded(values, down_bits, down_how),
        lambda gradient, _: rounded(gradient, back_bits, back_how),
        (down_bits + back_bits) / 2 + 8 / block + apart,
    )


def _hadamard(size: int) -> Tensor:
    signs = torch.tensor([1.0 - 2.0 * (0x9E3779B97F4A7C15F39CC0605CEDC834 >> at & 1) for at in range(size)])
    rows = [[1.0 - 2.0 * ((row & column).bit_count() & 1) for column in range(size)] for row in range(size)]
    return signs.unsqueeze(1) * torch.tensor(rows) / sqrt(size)


class Text:
    """Source text as bytes, in training and held-out documents: half of the standard library, or all of torch (2)."""

    def __init__(self, number: int) -> None:
        root = Path(torch.__file__).parent if number == TORCH else Path(sysconfig.get_path("stdlib"))
        parts: list[list[bytes]] = [[], []]
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            digest = sha256(name.encode()).digest()
            if number == TORCH or ("site-packages" not in name and digest[0] % 2 == number):
                parts[digest[1] < 8].append(path.read_bytes())
        self.training, self.held_out = (
            torch.frombuffer(bytearray(b"\0".join(documents)), dtype=torch.uint8) for documents in parts
        )


def windows(text: Tensor, count: int, length: int, source: torch.Generator) -> Tensor:
    """Return tokens from random places, int64 [count, length + 1]."""
    starts = torch.randint(len(text) - length, (count,), generator=source)
    return text[starts.unsqueeze(1) + torch.arange(length + 1)].long()


def train(size: Size, text: Text, seed: int, arm: Arm, count: int) -> tuple[float, int]:
    """Train a model in so many stages; return its loss on held-out text, nats a byte, and its parameters."""
    steps = round(size.steps * arm.times)
    run = RunConfig(
        seed=seed,
        model=ModelConfig(
            architecture="llama",
            sizes={
                "hidden_size": size.width,
                "num_hidden_layers": size.layers,
                "intermediate_size": size.feed_forward,
                "num_attention_heads": size.width // 32,
                "num_key_value_heads": size.width // 32,
                "initializer_range": 1.0 / sqrt(size.width),
                "vocab_size": 384,
                "max_position_embeddings": size.sequence,
                "tie_word_embeddings": False,
            },
        ),
        pipeline=PipelineConfig(
            stages=count,
            sequence_length=size.sequence,
            windows_in_flight=arm.windows,
            codec="float32",
            subspace=arm.subspace,
        ),
        inner=(InnerConfig if arm.nesterov else PublishedAdamW)(
            steps=steps,
            learning_rate=arm.rate * size.learning_rate,
            warmup_steps=steps // 10,
            beta1=arm.beta1,
            beta2=0.99,
            state="int8" if arm.coded else "float32",
            orthogonal=arm.orthogonal,
        ),
    )
    layout = model_layout(run)
    stages = [make_stage(run, layout, number, torch.device("cpu")) for number in range(count)]
    embedding, *others = stages[0].weights()
    stages[0].set_weights([arm.embedding * embedding, *others])
    source = torch.Generator().manual_seed(seed)
    ways: list[_Way] = []
    for step in range(steps):
        while len(ways) < arm.windows:
            tokens = windows(text.training, size.batch, size.sequence, source)
            ways += [_down(stages, part, arm) for part in tokens.chunk(arm.summed)]
        sums = [_HalfSums(stage) for stage in stages]
        for _ in range(arm.summed):
            _back(stages, ways.pop(0), arm)
            for each in sums if arm.summed > 1 else ():
                each.take()
        for stage in stages:
            stage.step(learning_rate(step / steps, run.inner), arm.summed)
    return _held_out_loss(stages, text.held_out, size.sequence), sum(
        tensor.numel() for stage in stages for tensor in stage.weights()
    )


class _HalfSums:
    """Keeps the gradients of a stage's matrices, which add up in float32, as sums in bfloat16 would be."""

    def __init__(self, stage: Stage) -> None:
        self._matrices = [weight for weight in stage._masters.values() if weight.ndim >= 2]
        self._sums = [torch.zeros_like(weight, dtype=torch.bfloat16) for weight in self._matrices]

    def take(self) -> None:
        """Round after one more microbatch."""
        for weight, held in zip(self._matrices, self._sums, strict=True):
            assert weight.grad is not None
            held.add_((weight.grad - held.float()).bfloat16())
            weight.grad.copy_(held)


class _Way(NamedTuple):
    """A microbatch that has reached the last stage: its passes before that, and what the last stage is given."""

    waiting: list[PendingForward]
    hidden: Tensor
    targets: Tensor


def _down(stages: list[Stage], tokens: Tensor, arm: Arm) -> _Way:
    way = _Way([], tokens[:, :-1], tokens if arm.subspace else tokens[:, 1:])
    for stage in stages[:-1]:
        way.waiting.append(stage.forward(way.hidden, way.targets))
        way = way._replace(hidden=arm.down(way.waiting[-1].output))
    return way


def _back(stages: list[Stage], way: _Way, arm: Arm) -> None:
    gradient = stages[-1].loss(way.hidden, way.targets).hidden
    for forward in reversed(way.waiting):
        assert gradient is not None
        gradient = forward.backward(arm.back(gradient, forward.output))


def _held_out_loss(stages: list[Stage], text: Tensor, length: int) -> float:
    """Return the mean loss over all of a text, cut into sequences; what is left at its end is not counted."""
    cells, total = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1).long(), 0.0
    for batch in torch.split(cells, SCORED):
        hidden = ids = batch[:, :-1]
        for stage in stages:
            hidden = stage.infer(hidden, ids)
        total += float(torch.nn.functional.cross_entropy(hidden.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    return total / (len(cells) * length)


def compare(size: Size, number: int, seeds: list[int], arms: list[str], stages: int) -> None:
    """Train every arm with every seed, and print losses and their differences to the first arm."""
    text = Text(number)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for seed in seeds:
        for name in arms:
            started_s = time.perf_counter()
            loss, parameters = train(size, text, seed, arm_of(name, size.width), stages)
            found[name].append(loss)
            taken_s = time.perf_counter() - started_s
            print(f"  seed {seed} {name:<12} {loss:.4f} ({parameters:,} parameters, {taken_s:.0f} s)", flush=True)
    print(
        f"text {number}, {len(text.held_out):,} bytes held out, {stages} stages, {size}; "
        f"differences to {arms[0]} in nats a byte, mean and standard deviation over seeds"
    )
    for name, losses in found.items():
        bits = arm_of(name, size.width).bits
        away = [loss - base for loss, base in zip(losses, found[arms[0]], strict=True)]
        spread = f" +- {stdev(away):.4f}" if len(away) > 1 else ""
        print(
            f"{name:<12} {bits:6.2f} bits, 1/{32 / bits:4.1f}  {mean(losses):.4f}  {mean(away):+.4f}{spread}"
            f"  perplexity {exp(mean(away)) - 1:+.2%}"
        )


def speed(width: int = 2048, tokens: int = 1024) -> None:
    """Print nanoseconds a value on one core, the least of several passes."""
    values = torch.randn(1, tokens, width)
    print(
        f"torch {torch.__version__}, one thread, {tokens} tokens of {width} values; ns a value, the least of 9 passes"
    )
    for name, codec in ACTIVATION_CODECS.items():
        for way, code in zip(("down", "back"), codec, strict=True):
            wire = encode(code, values, 1)
            coding = _least_s(lambda code=code: encode(code, values, 1))  # type: ignore[misc]
            decoding = _least_s(lambda code=code, wire=wire: decode(code, wire, 1))  # type: ignore[misc]
            each = 1e9 / values.numel()
            bits = 8 * wire.nbytes / values.numel()
            print(f"{name:<10} {way}: {bits:5.2f} bits, encode {each * coding:5.1f}, decode {each * decoding:5.1f}")


def _least_s(work: Callable[[], Tensor]) -> float:
    found = []
    for _ in range(9):
        # The processor's own time: whoever else is at work does not count.
        started_s = time.process_time()
        work()
        found.append(time.process_time() - started_s)
    return min(found)


def main() -> None:
    """Do what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="Only time the codecs.")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="Train a model of this size.")
    parser.add_argument("--text", type=int, choices=(0, 1, TORCH), default=1, help="Use this text.")
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="Cut the model into so many stages.")
    parser.add_argument("--steps", type=int, metavar="N", help="Take so many steps instead of the size's own.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="Start from these seeds.")
    parser.add_argument(
        "--arms", nargs="+", default=list(ACTIVATION_CODECS), metavar="ARM", help="Compare these with the first."
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.speed:
        speed()
    else:
        size = SIZES[asked.size]
        compare(size._replace(steps=asked.steps or size.steps), asked.text, asked.seeds, asked.arms, asked.stages)


if __name__ == "__main__":
    main()
