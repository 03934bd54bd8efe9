"""Sixteen volunteers: what `init` plans for them and expects, and what production nodes then do in virtual time.

    python -m benchmarks.pipeline_efficiency.volunteers [--preset 1b] [--up 100 20] [--seeds 0 1 2] [--shares 0.2 0.1] \
        [--subspace 512]
    python -m benchmarks.pipeline_efficiency.volunteers --preset 7b --lora 16 --gpu-gib 12 --up 20

The machines and the network are those of `docs/scenarios/volunteers.toml`: 24 GiB on the GPU, 32 GiB beside it, 60
TFLOP/s as reached, 100 Mbit/s down, 60 ± 20 ms; computing again and coding are charged. A row: replicas of each stage,
for peers choose theirs; tokens a second from the first microbatch to the last, so that the last round does not count;
how busy the devices of the busiest stage were while they trained; the part of all bytes that was rounds'; inner steps
to a meeting. With `--lora` the model is Llama-3-8B, frozen, in the form that the plan chooses.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from noloco_node.planning.expectation import planned_values
from noloco_node.planning.search import Planned, plan_for, plan_in_any_form
from noloco_node.planning.throughput import Machines, taking_part
from noloco_node.run.config import RunConfig
from noloco_node.run.presets import run_text, with_fields, with_values
from noloco_node.run.runfile import decode_run
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.scenario.faults import Join
from noloco_node.sim.scenario.scenario import load_scenario
from noloco_node.sim.scenario.setup import MBIT_BYTES, build_setup
from noloco_node.sim.world import World, simulate

SCENARIO = Path(__file__).parents[2] / "docs" / "scenarios" / "volunteers.toml"


MEMORY_GIB = 24.0
LLAMA_8B = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
"""Sizes of Llama-3-8B, where they are other than the preset 7b's."""


def text_of(preset: str, rank: int | None = None, sizes: Mapping[str, int] = LLAMA_8B) -> str:
    """Return the run file of a preset, or one of adapters of this rank over a model with these `sizes`."""
    text = run_text(preset)
    if rank is None:
        return text
    one_stage, adapter = {"stages": 1, "windows_in_flight": 1}, {"rank": rank, "alpha": 2.0 * rank}
    text = with_fields(text, {"model.sizes": sizes, "pipeline": one_stage, "adapter": adapter})
    file = {"file": '"model.safetensors"', "size_bytes": 1, "digest": f'"{64 * "0"}"'}  # nobody reads it
    return "\n".join((text, "[[model.weights]]", *(f"{name} = {value}" for name, value in file.items()), ""))


def volunteers(up: float, memory_gib: float = MEMORY_GIB) -> Machines:
    """Return the machines of the scenario, with lines of so many Mbit/s up, and GPUs of this memory."""
    scenario = load_scenario(SCENARIO)
    down, tflops = scenario.network.down_mbit_per_s, scenario.devices.tflops
    assert down is not None
    assert tflops is not None
    return Machines(
        count=16,
        gpu_bytes=memory_gib * 2**30,
        ram_bytes=32 * 2**30,
        up_bytes_per_s=up * MBIT_BYTES,
        down_bytes_per_s=down * MBIT_BYTES,
        flops=1e12 * tflops,
        latency_s=scenario.network.latency.mean_s,
    )


def plan(text: str, machines: Machines, share: float, subspace: int | None = None) -> Planned:
    """Return what `init` plans, with this share of the line for rounds, and in a subspace where one is named."""
    run = decode_run(text, "the preset")
    run = structs.replace(
        run,
        outer=replace(run.outer, line_share=share),
        pipeline=structs.replace(run.pipeline, subspace=subspace),
    )
    return plan_in_any_form(run, machines) if run.adapter.is_trained else plan_for(run, machines)


def measure(text: str, run: RunConfig, up: float, seed: int, rounds: int, memory_gib: float = MEMORY_GIB) -> Report:
    """Simulate a run that was planned from the run file `text`."""
    values = planned_values(run)
    values["outer"]["line_share"] = run.outer.line_share
    if run.pipeline.subspace is not None:
        text = text.replace("# subspace = ", "subspace = ")
        values["pipeline"]["subspace"] = run.pipeline.subspace
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.toml"
        path.write_text(with_values(text, values, ""))
        scenario = load_scenario(SCENARIO)
        rest = taking_part(run, volunteers(up, memory_gib)) - run.pipeline.peers
        scenario = structs.replace(
            scenario,
            seed=seed,
            fault=tuple(Join(at_s=1.0, peer=f"rest{number}") for number in range(rest)),
            swarm=structs.replace(scenario.swarm, run=str(path), rounds=rounds),
            network=structs.replace(scenario.network, up_mbit_per_s=up),
            devices=structs.replace(scenario.devices, memory_gib=memory_gib),
        )
        setup = build_setup(scenario)
    watchers: list[EventCollector] = []

    def watch(world: World) -> list[EventCollector]:
        watchers.append(EventCollector(world))
        return watchers

    return simulate(setup, watch, lambda world: make_report(world, watchers[0]))


def row(report: Report) -> str:
    """Return the figures of one simulation."""
    steps, met = (sum(getattr(stage, name) for stage in report.stages) for name in ("inner_steps", "met"))
    rounds = report.sent_bytes.get("gossip", 0) / sum(report.sent_bytes.values())
    busy = max(stage.work for stage in report.stages)
    replicas = " + ".join(str(stage.peers) for stage in report.stages)
    each = steps / met if met else float("inf")
    return f"{replicas} | {report.tokens_per_s:,.0f} | {busy:.0%} | {rounds:.1%} | {each:.1f}"


def main() -> None:
    """Print a plan for each line and share, and a row for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--up", type=float, nargs="+", default=[100.0, 20.0], help="Mbit/s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2], help="of the line, for rounds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--subspace", type=int, help="numbers a token that travel; not by default")
    parser.add_argument("--lora", type=int, help="rank of adapters over Llama-3-8B; not by default")
    parser.add_argument("--gpu-gib", type=float, default=MEMORY_GIB)
    args = parser.parse_args()
    text = text_of(args.preset, args.lora)
    for share in args.shares:
        for up in args.up:
            planned = plan(text, volunteers(up, args.gpu_gib), share, args.subspace)
            pipeline, expected = planned.run.pipeline, planned.expected
            replicas = " + ".join(map(str, expected.replicas))
            form = f", frozen in {planned.run.adapter.base}" if args.lora else ""
            print(
                f"{up:g} Mbit/s up, {share:.0%} for rounds: {replicas} replicas, windows of "
                f"{pipeline.microbatches_per_step}, {pipeline.windows_in_flight} in flight, {pipeline.codec}{form}, a "
                f"round every {planned.run.outer.inner_steps_per_round}; expected {expected.tokens_per_s:,.0f} "
                f"tokens/s, {expected.busy:.0%} busy, of {expected.possible:,.0f} possible",
                flush=True,
            )
            for seed in args.seeds:
                report = measure(text, planned.run, up, seed, args.rounds, args.gpu_gib)
                print(f"  seed {seed} | {row(report)}", flush=True)


if __name__ == "__main__":
    main()
