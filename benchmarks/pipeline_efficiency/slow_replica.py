"""Does one slow replica cost the fast ones their work? The demo, even and uneven in turn, as real processes.

    python -m benchmarks.pipeline_efficiency.slow_replica  # 3 pairs of runs of a minute, 2 x 2 replicas
    python -m benchmarks.pipeline_efficiency.slow_replica --pairs 1 --steps 30  # a short form
    python -m benchmarks.pipeline_efficiency.slow_replica --stages 1  # two replicas: on two cores each has its own

Both cases train on the same run file, for as many inner steps, on the same cores: with every replica at its own speed,
and with the last replica of the last stage at a quarter (`join --slowdown 4`); which comes first alternates. Compared
is the share of their wall time at work for which devices worked, over the *other* replicas, the same ones in both
cases, all together and by stage: it is to fall by no more than 5 %. The first run of all measures how many inner steps
fit into the time, and the others take as many. The last line is one JSON object.

What to expect depends on the cores. A stage of R replicas, one of them at a quarter, does (R - 3/4) / R of its work at
best, and all stages run at the speed of the slowest. Where every replica has a core of its own, the fast replicas of
*that* stage stay as busy as ever and the other stages come down to this share, whatever rounds do: no microbatch can
pass them that the slow stage does not take. Where cores are what is short, as with four replicas on two of them, the
core time that the slow replica leaves is the others', and nobody's share falls.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from noloco_node.demo.run import SLOWDOWN, DemoConfig, demonstrate
from noloco_node.demo.summary import PeerSummary, Summary
from noloco_node.run.runfile import load_run

KEPT = 0.95
"""Share of its busy time that a fast replica is to keep."""


class Run(NamedTuple):
    """What one demo's summary says."""

    summary: Summary
    steps: int

    def busy(self, left_out: str, stage: int | None = None) -> float:
        """Return the mean share of device time busy over all peers but one, or over those of one stage."""
        peers = [peer for peer in self.summary.peers if peer.name != left_out and stage in (None, peer.stage)]
        shares = [peer.busy for peer in peers if peer.busy is not None]
        if len(shares) < len(peers):
            raise ValueError("a peer's journal does not say how busy its device was")
        return fmean(shares)

    def met(self) -> float:
        """Return the share of rounds that found a partner, mean of the peers."""
        return fmean([peer.met / max(1, peer.met + peer.skipped + peer.solo) for peer in self.summary.peers])

    def peer(self, name: str) -> PeerSummary:
        """Return one peer's summary."""
        return next(peer for peer in self.summary.peers if peer.name == name)


class _Document(msgspec.Struct):
    """Of a demo's summary.json, what is read here."""

    summary: Summary


def run(demo: DemoConfig) -> Run:
    """Run one demo to its end and read what it wrote."""
    asyncio.run(demonstrate(demo))
    document = msgspec.json.decode((demo.home / "summary.json").read_bytes(), type=_Document)
    return Run(document.summary, load_run(demo.home / "run.toml").inner.steps)


def report(pairs: list[tuple[Run, Run]], slow: str, stages: int, replicas: int) -> dict[str, object]:
    """Print the comparison; return it."""
    print(f"\npair   busy, even   busy, uneven   ratio   tokens/s, even   uneven   steps of {slow}")
    for number, (even, uneven) in enumerate(pairs, 1):
        before, after = even.busy(slow), uneven.busy(slow)
        print(
            f"{number:>4} {before:>12.1%} {after:>14.1%} {after / before:>7.3f} {even.summary.tokens_per_s:>16,.0f} "
            f"{uneven.summary.tokens_per_s:>8,.0f} {even.peer(slow).steps:>6} -> {uneven.peer(slow).steps}"
        )
    found: dict[str, object] = {"steps": pairs[0][0].steps, "pairs": len(pairs)}
    for name, stage in (("fast replicas", None), *((f"of stage {number}", number) for number in range(stages))):
        ratios = [uneven.busy(slow, stage) / even.busy(slow, stage) for even, uneven in pairs]
        found[name] = {"ratio": fmean(ratios), "lowest": min(ratios), "highest": max(ratios)}
        print(f"{name:<14} uneven over even: {fmean(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    capacity = (replicas - 1 + 1 / SLOWDOWN) / replicas
    met_even, met_uneven = (fmean([pair[case].met() for pair in pairs]) for case in (0, 1))
    found |= {"capacity of the slow stage": capacity, "met even": met_even, "met uneven": met_uneven}
    kept = fmean([uneven.busy(slow) / even.busy(slow) for even, uneven in pairs]) >= KEPT
    found["kept"] = kept
    print(f"the fast replicas' devices are as busy as in the even case, within 5 %: {'yes' if kept else 'no'}")
    print(f"capacity of the slow stage, uneven over even: {capacity:.3f}")
    print(f"rounds met: {met_even:.0%} even, {met_uneven:.0%} uneven")
    return found


def main() -> None:
    """Run the pairs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1.0, help="of training in the first run")
    parser.add_argument("--steps", type=int, help="inner steps of each source, instead of what fits into --minutes")
    parser.add_argument("--home", type=Path, help="keep the demos' directories below this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch)
        pairs: list[tuple[Run, Run]] = []
        demo = DemoConfig(
            stages=options.stages,
            replicas=options.replicas,
            minutes=options.minutes,
            steps=options.steps,
            evaluated=False,
        )
        for number in range(1, options.pairs + 1):
            runs: dict[float, Run] = {}
            for slowdown in (1.0, SLOWDOWN) if number % 2 else (SLOWDOWN, 1.0):
                name = f"{'uneven' if slowdown > 1.0 else 'even'}-{number}"
                runs[slowdown] = run(msgspec.structs.replace(demo, home=home / name, slowdown=slowdown))
                demo = msgspec.structs.replace(demo, steps=runs[slowdown].steps)
            pairs.append((runs[1.0], runs[SLOWDOWN]))
        slow = msgspec.structs.replace(demo, slowdown=SLOWDOWN).slow_peer
        assert slow is not None
        print(msgspec.json.encode(report(pairs, slow, options.stages, options.replicas)).decode())


if __name__ == "__main__":
    main()
