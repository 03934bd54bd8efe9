"""Run random schedules of faults, each a whole swarm in virtual time, and check what must always hold.

    python -m tests.explorer [--count 1000] [--first 0] [--hostile] [--stages 1] [--processes 2]
    python -m tests.explorer --replay SEED            # one of these again, with every event
    python -m tests.explorer --scenario FILE          # a scenario under the same invariants; it may have hostile peers

A schedule is a swarm of one stage or three, with three replicas of each, and every kind of fault (see
`schedule_generator.py`); the invariants are in `invariants.py`. Exit code 1 if one is broken: the seed, the violation,
and a shorter schedule are printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

import torch

from noloco_node.sim.scenario.faults import Hostile
from noloco_node.sim.scenario.scenario import Scenario, load_scenario
from tests.explorer.schedule_generator import STAGES, draw
from tests.explorer.search import ExploreResult, examine_seed, replay, report, totals

LINE_EVERY_S = 10.0


def is_wanted(scenario: Scenario, hostile: bool, stages: int | None) -> bool:
    """Say whether a schedule has hostile peers, where only such are wanted, and as many stages."""
    attacked = any(isinstance(fault, Hostile) for fault in scenario.fault)
    return (attacked or not hostile) and stages in (None, scenario.swarm.stages)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="schedules to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--hostile", action="store_true", help="count and run those alone that have hostile peers")
    parser.add_argument("--stages", type=int, choices=(1, STAGES), help="count and run those alone of so many stages")
    parser.add_argument("--processes", type=int, default=2, help="processes, one core each")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this seed alone, and say every event")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="run this scenario alone, and say every event")
    arguments = parser.parse_args(words)
    if arguments.replay is not None or arguments.scenario is not None:
        torch.set_num_threads(1)
        return replay(
            draw(arguments.replay) if arguments.scenario is None else load_scenario(arguments.scenario), print
        )
    begun_s = said_s = time.monotonic()
    results: list[ExploreResult] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, torch.set_num_threads, (1,)) as pool:
        seeds = (seed for seed in count(arguments.first) if is_wanted(draw(seed), arguments.hostile, arguments.stages))
        for result in pool.imap(examine_seed, islice(seeds, arguments.count), chunksize=4):
            results.append(result)
            if result.broken is not None:
                print(f"seed {result.scenario.seed}: {result.broken}", flush=True)
            now_s = time.monotonic()
            if now_s - said_s >= LINE_EVERY_S:
                said_s = now_s
                rate = len(results) / (now_s - begun_s)
                left_s = (arguments.count - len(results)) / rate
                print(f"{len(results)} of {arguments.count}, {rate:.1f} a second, {left_s:.0f} s to go", flush=True)
    broken = [result for result in results if result.broken is not None]
    table(results, time.monotonic() - begun_s, arguments.processes)
    for result in broken[:3]:
        report(result, print)
    return 1 if broken else 0


def table(results: list[ExploreResult], real_s: float, processes: int) -> None:
    sums = totals(results)
    struck = {name.removeprefix("struck."): count for name, count in sums.items() if name.startswith("struck.")}
    kinds = ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(struck.items()))
    print(f"seeds              {len(results)}")
    print(f"violations         {sum(result.broken is not None for result in results)}")
    print(f"excused            {sums['excused']:.0f} did not end: a newcomer waits for donors nobody can dial")
    more = sorted(result.counts["more_distance"] for result in results if "more_distance" in result.counts)
    if more:
        print(f"hostile peers      in {len(more)} schedules; {sums['deceived']:.0f} honest replicas left too early")
        print(f"their harm         {more[len(more) // 2]:+.3f} of the way at the median, {more[-1]:+.3f} at most")
    print(f"virtual hours      {sums['virtual_s'] / 3600:.1f}")
    print(f"faults             {sum(struck.values()):.0f}: {kinds}")
    print(f"inner steps        {sums['inner_steps']:.0f}")
    print(
        f"outer steps        {sums['met']:.0f} met, {sums['solo']:.0f} solo; {sums['compared']:.0f} meetings compared"
    )
    checked = {name.removeprefix("checked."): count for name, count in sums.items() if name.startswith("checked.")}
    evaluated = ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(checked.items()))
    print(f"half meetings      {sums['unmatched']:.0f}, each explained by a loss or an end")
    print(f"evaluated          {evaluated}")
    print(f"real seconds       {real_s:.0f} in {processes} processes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
