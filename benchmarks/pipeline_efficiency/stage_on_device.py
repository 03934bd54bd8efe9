"""A stage on this machine's device against a bare training loop: tokens a second, memory, equality with the CPU.

    python -m benchmarks.pipeline_efficiency.stage_on_device  # on the GPU if there is one
    python -m benchmarks.pipeline_efficiency.stage_on_device --run FILE --state int8 --parts throughput
    python -m benchmarks.pipeline_efficiency.stage_on_device --device cpu --width 256 --layers 4 --tokens 256

A swarm of one: worker, window, device thread and stage as a node has them, the whole model at one stage, without a
network. The bare loop trains the same model under autocast with AdamW, fused on a GPU, and says nothing to anybody.
Both take turns, and the median ratio of neighbours counts; the goal is 0.95. On a CPU seconds are those for which the
process had a core, so that a busy machine can tell too. On a GPU the most memory that the stage takes alone is set
beside the plan's. FLOPs a token are six times the parameters. `--run` takes the sizes of a run file, as one stage.
Then the seconds for which a step, a copy of the weights for a round and a correction each stop the passes.

A middle stage follows, with every graph of its window kept and with none: seconds a microbatch, and of a GPU the most
memory that was in use, beside the plan's. A pass computed again must have the same output to the bit. Its gradients are
near those of the kept graph: on a GPU backward passes add in any order. Then a few steps on the device and on the CPU
in float32 from the same weights: relative distance of losses and weights. Last, where the device is a GPU, whether it
and the CPU compute the same bits: of split weights, of codecs of activations both ways, of a step with 8-bit moments;
shares of values that differ. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional

from noloco_node.machine.device import Device, autocast_dtype, choose_device, finish_work
from noloco_node.planning.model_layout import ModelLayout, build_stage, make_stage, model_layout
from noloco_node.planning.plan import memories
from noloco_node.run.config import DataConfig, ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.runfile import load_run
from pipeline.activation_codec import encode
from pipeline.adamw import Form, Move, compiled, encode_first, encode_second, move, step_numbers
from pipeline.admission_window import AdmissionWindow
from pipeline.forward_pass import PendingForward
from pipeline.hardware.moments_beside import Codes
from pipeline.hardware.split_weights import split
from pipeline.inner_step import BLOCK, InnerConfig
from pipeline.messages import ACTIVATION_CODECS, Gradient, Microbatch
from pipeline.stage import Stage
from pipeline.worker import Worker

RATE = 1e-4
CPU = torch.device("cpu")


def a_run(args: argparse.Namespace, stages: int) -> RunConfig:
    """Return a run of a Llama of these sizes, or of the run file, in so many stages."""
    if args.run is not None:
        run = load_run(args.run)
        pipeline = structs.replace(run.pipeline, stages=stages, boundaries=None, windows_in_flight=1)
        inner = replace(run.inner, state=args.state or run.inner.state)
        return structs.replace(run, precision=args.precision, pipeline=pipeline, inner=inner)
    sizes = {
        "hidden_size": args.width,
        "intermediate_size": args.feed_forward or 4 * args.width,
        "num_hidden_layers": args.layers * stages,
        "num_attention_heads": max(1, args.width // 64),
        "num_key_value_heads": max(1, args.width // 64),
        "vocab_size": args.vocabulary,
        "max_position_embeddings": args.tokens,
    }
    return RunConfig(
        precision=args.precision,
        data=DataConfig(),
        model=ModelConfig(architecture="llama", sizes=sizes),
        pipeline=PipelineConfig(
            stages=stages,
            boundaries=tuple(args.layers * number for number in range(1, stages)) or None,
            sequence_length=args.tokens,
            microbatch_size=args.batch,
            microbatches_per_step=args.window,
        ),
        inner=InnerConfig(state=args.state or "float32"),
    )


def batch(run: RunConfig, layout: ModelLayout, seed: int) -> Tensor:
    """Return made-up tokens."""
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length + 1)
    return torch.randint(layout.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


class SwarmOfOne:
    """A stage with everything between it and the network."""

    def __init__(self, run: RunConfig, layout: ModelLayout, device: torch.device) -> None:
        self._run, self._layout, self.device = run, layout, Device(device)
        self.stage = make_stage(run, layout, 0, device)
        self._gate = AdmissionWindow(run.pipeline.microbatches_per_step)
        self._worker = Worker(self.stage, self._gate, self.device.run, None, 1e6, self.device.clock)

    async def window(self) -> list[float]:
        """Take an inner step; return the losses."""
        tokens = [batch(self._run, self._layout, seed) for seed in range(self._gate.window)]
        microbatches = [Microbatch(hidden=t[:, :-1], targets=t[:, 1:], progress=0.0, budget_s=1e6) for t in tokens]
        replies = await asyncio.gather(*(self._worker.process(microbatch, "us") for microbatch in microbatches))
        await self._gate.full()
        await self.device.run(self.stage.step, RATE, len(replies))
        self._gate.next_window()
        return [reply.loss for reply in replies if isinstance(reply, Gradient)]


class BareLoop:
    """The same training without a stage."""

    def __init__(self, run: RunConfig, layout: ModelLayout, device: torch.device) -> None:
        self._run, self._layout, self._device = run, layout, device
        self._model, inner = build_stage(run, layout, 0, device).train(), run.inner
        self._autocast, self._clip = autocast_dtype(device, run.precision), inner.clip_norm
        matrices, vectors = ([w for w in self._model.parameters() if (w.ndim >= 2) == many] for many in (True, False))
        self._optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=RATE,
            betas=(inner.beta1, inner.beta2),
            eps=inner.epsilon,
            fused=device.type == "cuda",
        )

    def window(self) -> None:
        """Take an optimiser's step."""
        number = self._run.pipeline.microbatches_per_step
        for seed in range(number):
            tokens = batch(self._run, self._layout, seed).to(self._device)
            with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
                logits = self._model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / number
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)


def seconds_of(device: torch.device) -> Callable[[], float]:
    """Return the clock that measures work on a device."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def throughput(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return tokens a second of both, and on a GPU the memory that the stage takes."""
    run, clock = a_run(args, 1), seconds_of(device)
    layout = model_layout(run)
    parameters = sum(prod(shape) for shape in layout.shapes[0].values())
    ours = SwarmOfOne(run, layout, device)
    found: dict[str, Any] = {"parameters": parameters}
    if device.type == "cuda":
        for _ in range(2):  # the first window takes the gradients' memory
            torch.cuda.reset_peak_memory_stats(device)
            asyncio.run(ours.window())
        half = autocast_dtype(device, run.precision)
        (planned,) = memories(run, layout, half=half is not None, splits=half is not torch.float16)
        whole = planned.computing + planned.whole_graph - planned.graph
        measured, lasting = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        found |= {"bytes": measured, "planned_bytes": whole, "bytes_over_planned": round(measured / whole, 3)}
        found["planned_a_parameter"] = round((planned.computing - planned.graph) / parameters, 2)
        # Between two windows there are no gradients.
        found["held_a_parameter"] = round((lasting + planned.gradients) / parameters, 2)
    bare = BareLoop(run, layout, device)
    seconds: dict[str, list[float]] = {"stage": [], "bare": []}
    for repeat in range(args.repeats + 1):
        for name in seconds:
            finish_work(device)
            begun_s = clock()
            if name == "stage":
                asyncio.run(ours.window())
            else:
                bare.window()
            finish_work(device)
            if repeat:  # the first pays for what is done once
                seconds[name].append(clock() - begun_s)
    ours.device.close()
    tokens = run.pipeline.microbatches_per_step * run.pipeline.microbatch_tokens
    for name, each in seconds.items():
        found[f"{name}_tokens_per_s"] = round(tokens / median(each), 1)
        found[f"{name}_tflops"] = round(6e-12 * parameters * tokens / median(each), 3)
    ratios = sorted(bare_s / stage_s for bare_s, stage_s in zip(seconds["bare"], seconds["stage"], strict=True))
    return found | {"ratio": round(median(ratios), 3), "least": round(ratios[0], 3), "most": round(ratios[-1], 3)}


def changes(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the seconds of all that stops the passes of a whole model: a step, a copy of the weights, a correction."""
    run = a_run(args, 1)
    one = SwarmOfOne(run, model_layout(run), device)
    stage, seconds = one.stage, dict[str, list[float]]()

    def timed(name: str, change: Callable[[], Any]) -> Any:
        finish_work(device)
        begun_s = time.perf_counter()
        result = change()
        finish_work(device)
        seconds.setdefault(name, []).append(time.perf_counter() - begun_s)
        return result

    tokens = batch(run, model_layout(run), 0)
    for _ in range(args.repeats + 1):
        stage.loss(tokens[:, :-1], tokens[:, 1:])
        timed("step_s", lambda: stage.step(RATE, 1))
        weights = timed("copy_s", stage.weights)
        timed("correction_s", partial(stage.correct, weights))
    one.device.close()
    return {name: round(median(each[1:]), 4) for name, each in seconds.items()}


def middle_stage(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what a window takes with every graph kept and with none."""
    run, clock = a_run(args, 3), seconds_of(device)
    layout = model_layout(run)
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length, layout.width)
    hidden, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found: dict[str, Any] = {}
    gradients: list[Tensor] = []
    for name, graphs in (("kept", None), ("recomputed", 0)):
        stage, seconds = make_stage(run, layout, 1, device, graphs), []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for repeat in range(args.repeats + 1):
            begun_s = clock()
            passes = [stage.forward(hidden) for _ in range(run.pipeline.microbatches_per_step)]
            for waiting in passes:
                waiting.backward(gradient)
            finish_work(device)
            if repeat:
                seconds.append((clock() - begun_s) / len(passes))
            else:
                grown = [weight.grad.flatten() for weight in stage._weights if weight.grad is not None]
                gradients.append(torch.cat(grown))
            stage.step(RATE, len(passes))
        found[f"{name}_s"] = round(median(seconds), 4)
        waiting = stage.forward(hidden)
        found["same_output"] = found.get("same_output", True) and _same_output(stage, waiting)
        if device.type == "cuda":
            found[f"{name}_bytes"] = torch.cuda.max_memory_allocated(device)
        del stage, passes, waiting
    half = autocast_dtype(device, run.precision)
    planned = memories(run, layout, half=half is not None, splits=half is not torch.float16)[1]
    whole = planned.computing + planned.whole_graph - planned.graph
    found |= {"planned_bytes_recomputed": whole, "planned_bytes_kept": whole + planned.other_graphs}
    kept, again = gradients
    return found | {"gradients_differ": float(torch.dist(kept, again) / kept.norm())}


def _same_output(stage: Stage, waiting: PendingForward) -> bool:
    """Say whether a forward pass that is computed again has the same output to the bit."""
    origin = waiting._origin
    assert origin is not None
    return torch.equal(waiting.output, encode(stage.codec.down, stage._again(origin).output.detach()).cpu())


def against_cpu(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return how far a few steps end from the CPU's."""
    run = a_run(args, 1)
    layout, losses, weights = model_layout(run), [], []
    for where in (device, CPU):
        one = SwarmOfOne(run, layout, where)
        losses.append([asyncio.run(one.window())[-1] for _ in range(3)][-1])
        weights.append(torch.cat([weight.flatten() for weight in one.stage.weights()]))
        one.device.close()
    distance = torch.dist(weights[0], weights[1]) / weights[1].norm()
    return {"loss_differs": abs(losses[0] / losses[1] - 1.0), "weights_differ": float(distance)}


def same_bits(_: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return which results of the device and of the CPU are equal to the bit, else the share of values that differ."""
    if device.type == "cpu":
        return {"nothing to compare": True}
    source = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(64, 1024, generator=source) for _ in range(2))
    here, there = split(values), split(values.to(device))
    found: dict[str, Any] = {"split": all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))}
    for name, codec in ACTIVATION_CODECS.items():
        for way, code in zip(("down", "back"), codec, strict=True):
            seed = 0 if way == "down" or code.plain else 7
            on_cpu, on_device = encode(code, values, seed), encode(code, values.to(device), seed)
            found[f"{name} {way}"] = _apart(on_cpu, on_device)
    moments = encode_first(0.01 * gradient.view(-1, BLOCK)), encode_second((0.01 * gradient.view(-1, BLOCK)).square())
    numbers = step_numbers(InnerConfig(beta2=0.99, weight_decay=0.01, state="int8"), 1e-3, 10)
    halved = Form((torch.bfloat16, torch.int8), torch.bfloat16)
    for name, dtypes in (("step", Form((torch.float32,), torch.float32)), ("split step", halved)):
        halves = dtypes is halved
        given = [*(split(values.view(-1, BLOCK)) if halves else [values.view(-1, BLOCK)]), *moments[0], *moments[1]]

        def stepped(
            compute: Move, where: torch.device, parts: int = 1 + halves, given: Sequence[Tensor] = given
        ) -> list[Tensor]:
            held = [each.to(where, copy=True) for each in given]
            codes = Codes(*held[parts : parts + 2]), Codes(*held[parts + 2 :])
            compute(held[:parts], gradient.view(-1, BLOCK).to(where), codes, numbers.to(where))
            return held

        for form, compute in ((name, move), (f"{name} compiled", compiled(device, dtypes))):
            if compute is not None:
                pairs = zip(stepped(move, CPU), stepped(compute, device), strict=True)
                found[form] = [_apart(a, b) for a, b in pairs]
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one != other.cpu()).float().mean())


PARTS = {part.__name__: part for part in (throughput, changes, middle_stage, against_cpu, same_bits)}


def main() -> None:
    """Measure, and print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32"])
    for name, value in (("width", 1024), ("layers", 8), ("tokens", 1024), ("batch", 1), ("window", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--feed-forward", type=int, default=0, help="0: four times the width")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", type=Path, metavar="FILE", help="take sizes, window and state of this run file")
    parser.add_argument("--state", choices=["float32", "int8"], help="of the optimiser (inner.state)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="measure these alone")
    args = parser.parse_args()
    device = choose_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    precision = autocast_dtype(device, args.precision) or torch.float32
    print(f"{name}, torch {torch.__version__}, {precision}")
    result: dict[str, Any] = {"device": name}
    for name in args.parts:
        found = PARTS[name](args, device)
        print(f"{name}: {found}", flush=True)
        result |= found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
