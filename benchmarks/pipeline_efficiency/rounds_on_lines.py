"""What rounds take of lines that microbatches fill, and how often they come: production nodes in virtual time.

    python -m benchmarks.pipeline_efficiency.rounds_on_lines [--up 100 20] [--per-round 5 20 80] [--shares 0.2]

Two stages of four replicas that stand for 805 million parameters each: windows of 32, two in flight, 1,110 bytes a
token and hop, rounds in int4, latency 60 ± 20 ms, 100 Mbit/s down. The lines, not the devices, are what is short.
A row: the share that rounds may have; inner steps after which a round is due; tokens a second; of all bytes sent, the
part that was rounds'; inner steps to a meeting; rounds that found nobody. The last round, which everybody waits for, is
in the bytes and not in the seconds.
"""

from __future__ import annotations

import argparse

from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import World, simulate

TOKENS = 1024
"""Of a microbatch."""
SCENARIO = """
[swarm]
stages = 2
replicas = 4
rounds = {rounds}
inner_steps_per_round = {per_round}
microbatches_per_step = 32
windows_in_flight = 2
codec = "int4"
line_share = {share}
[network]
latency = {{shape = "lognormal", mean_s = 0.06, std_s = 0.02}}
up_mbit_per_s = {up}
down_mbit_per_s = 100.0
microbatch_bytes = 1136640
weights_bytes = 3220000000
[devices]
forward_s = 0.027
"""


def measure(up: float, per_round: int, share: float, steps: int) -> Report:
    """Simulate one row."""
    text = SCENARIO.format(up=up, per_round=per_round, share=share, rounds=steps // per_round)
    watchers: list[EventCollector] = []

    def watch(world: World) -> list[EventCollector]:
        watchers.append(EventCollector(world))
        return watchers

    return simulate(
        build_setup(decode_scenario(text, "this benchmark")), watch, lambda world: make_report(world, watchers[0])
    )


def row(report: Report) -> str:
    """Return one row of figures."""
    steps, met = (sum(getattr(stage, name) for stage in report.stages) for name in ("inner_steps", "met"))
    unmet = sum(stage.skipped + stage.solo for stage in report.stages)
    rounds = report.sent_bytes["gossip"] / sum(report.sent_bytes.values())
    speed = report.microbatches * TOKENS / report.training_s
    return f"{speed:>8,.0f} | {rounds:>6.1%} | {steps / met if met else float('inf'):>6.1f} | {unmet:>5}"


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=float, nargs="+", default=[100.0, 20.0], help="Mbit/s")
    parser.add_argument("--per-round", type=int, nargs="+", default=[5, 20, 80], help="inner steps")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2], help="of the line, for rounds")
    parser.add_argument("--steps", type=int, default=160, help="inner steps of a replica")
    args = parser.parse_args()
    print("share | Mbit/s up | round due after | tokens/s | rounds | steps to a meeting | unmet")
    for share in args.shares:
        for up in args.up:
            for per_round in args.per_round:
                print(f"{share} | {up} | {per_round} | {row(measure(up, per_round, share, args.steps))}", flush=True)


if __name__ == "__main__":
    main()
