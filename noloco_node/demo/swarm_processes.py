"""The commands of a swarm on this machine, and how many inner steps its cores can take.

    python -m noloco_node.demo.swarm_processes RUN_FILE

trains the run's model for a few seconds and prints `seconds_per_microbatch` and a number. Each peer computes in one
thread, so the demo starts one such process for each peer, at most one for each core, all at once: cores that share a
cache, a clock or a quota are as slow in them as in the swarm. `EFFICIENCY` stands for daemons, serialisation and waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.demo.summary import ModelScores
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import load_run
from noloco_node.swarm.invite import SCHEME

READY_S = 180.0  # longest wait for a calibration or the bootstrap peer; a cold disk may take a minute to load torch
LINGER_S = 1800.0  # peers serve their weights until they are stopped; the bound is for a parent that cannot
ANYWHERE = "/ip4/127.0.0.1/tcp/0"
EFFICIENCY = 0.7  # share of the cores' time that a swarm spends on arithmetic, as measured on two cores
MEASURE_S = 3.0
PROMPT, SAMPLE_TOKENS = "import os\n\n\ndef ", 112


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def affordable_steps(
    train_s: float, seconds_per_microbatch: Sequence[float], run: RunConfig, slowdown: float = 1.0
) -> int:
    """Return how many inner steps each source can take in `train_s` seconds; at least 20, so that there is a curve.

    `seconds_per_microbatch`: of each core that the swarm can keep busy, measured at the same time. `slowdown`: of one
    replica; all stages then run at the speed of its stage, and cannot keep more cores busy than that needs.
    """
    microbatches_per_s = sum(EFFICIENCY / seconds for seconds in seconds_per_microbatch)
    wanted = run.pipeline.stages * (run.pipeline.replicas - 1 + 1 / slowdown)
    per_step = run.pipeline.microbatches_per_step * run.pipeline.replicas
    return max(20, int(train_s * microbatches_per_s * min(1.0, wanted / len(seconds_per_microbatch)) / per_step))


async def calibrations(children: Children, run_file: Path, peers: int, logs: Path) -> list[float]:
    """Return the seconds of a microbatch on each core that so many peers keep busy, all measured at the same time."""
    command = tied_command("noloco_node.demo.swarm_processes", str(run_file))
    count = min(cores(), peers)
    started = [children.start(f"calibration {number}", command, logs / str(number)) for number in range(count)]
    return [float((await child.line("seconds_per_microbatch", READY_S)).split()[1]) for child in started]


async def bootstrap(children: Children, run_file: Path, home: Path) -> str:
    """Start a bootstrap peer; return its invite."""
    command = ("bootstrap", "--run", str(run_file), "--listen", ANYWHERE, "--home", str(home))
    peer = children.start("bootstrap peer", tied_command("noloco_node", *command), home)
    return await peer.line(SCHEME, READY_S)


def join(children: Children, invite: str, stage: int, home: Path, logs: Path, slowdown: float = 1.0) -> Child:
    """Start a peer that is named like its home."""
    options = ("--stage", str(stage), "--home", str(home), "--listen", ANYWHERE, "--slowdown", f"{slowdown:g}")
    limits = ("--device", "cpu", "--threads", "1", "--linger", f"{LINGER_S:g}", "--refresh", "2")
    return children.start(f"peer {home.name}", tied_command("noloco_node", "join", invite, *options, *limits), logs)


async def evaluation(children: Children, invite: str, homes: Sequence[Path], model: Path, logs: Path) -> ModelScores:
    """Export the model of a swarm to `model`, evaluate what its peers' homes hold, and have the model write."""

    async def output(*arguments: str) -> str:
        child = children.start(arguments[0], tied_command("noloco_node", *arguments), logs / arguments[0])
        return await child.output(LINGER_S)

    await output("export", invite, "--out", str(model))
    measured, written = await asyncio.gather(
        output("evaluate", "--json", *(word for home in homes for word in ("--from-home", str(home)))),
        output("generate", str(model), "--prompt", PROMPT, "--max-tokens", str(SAMPLE_TOKENS)),
    )
    merged, *replicas = msgspec.json.decode(measured)["models"]  # then with each replica in its stage's place
    return ModelScores(
        merged=merged["loss"],
        replicas={each["model"]: each["loss"] for each in replicas},
        unigram=merged["unigram_entropy"],
        tokens=merged["tokens"],
        prompt=PROMPT,
        sample=written.removeprefix(PROMPT).rstrip("\n"),
    )


def seconds_per_microbatch(run: RunConfig, measure_s: float) -> float:
    """Train the whole model of `run` for so long, stage by stage in one thread.

    Returns the seconds of a microbatch: through all stages, forward, backward and inner steps.
    """
    import torch

    from noloco_node.planning.model_layout import make_stage, model_layout

    torch.set_num_threads(1)
    pipeline, layout, device = run.pipeline, model_layout(run), torch.device("cpu")
    *stages, last = [make_stage(run, layout, number, device) for number in pipeline.all_stages]
    shape = (pipeline.microbatch_size, pipeline.sequence_length + 1)
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    begun, windows = time.perf_counter(), -1  # the first window is slow: memory is taken, kernels are chosen
    while (elapsed := time.perf_counter() - begun) < measure_s or windows < 1:
        for _ in range(pipeline.microbatches_per_step):
            hidden, passes = tokens[:, :-1], []
            for stage in stages:
                passes.append(stage.forward(hidden))
                hidden = passes[-1].output
            gradient = last.loss(hidden, tokens[:, 1:]).hidden
            for waiting in reversed(passes):
                assert gradient is not None
                gradient = waiting.backward(gradient)
        for stage in (*stages, last):
            stage.step(0.0, pipeline.microbatches_per_step)
        windows += 1
        if windows == 0:
            begun = time.perf_counter()
    return elapsed / (windows * pipeline.microbatches_per_step)


if __name__ == "__main__":
    print("seconds_per_microbatch", seconds_per_microbatch(load_run(sys.argv[1]), MEASURE_S))
