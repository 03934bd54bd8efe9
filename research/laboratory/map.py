"""Where gossip wins: a map over churn, unequal speeds, lines and replicas, with two means over all as opponents.

    python -m research.laboratory.map --seeds 1 --only "*_4"  what is due of one seed with four replicas
    python -m research.laboratory.map --tables  the page and the picture again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.volunteer_grid import map_grid
from research.laboratory.output.table import Table
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial

INTRODUCTION = """# Where gossip wins: a map

Written by `python -m research.laboratory.map` from its record, map.jsonl; figures, verdicts and counts are computed.

**Question.** Among machines that are all there all the time a synchronous mean makes the better model for the same
bytes ([the method](method.md)). Here peers come and go, machines are unequal, lines slow, and replicas few or many.

**Methods.** All three have int4 with error feedback, dynamic steps, means weighed by steps, and rounds that grow:
every 4 to 16 steps of the fastest machine for gossip, every 7 to 24 for means over all, which send up to twice the
bytes a round.

- *Gossip* is the production's: random partners, training goes on, a partner that has vanished costs a timeout and
  the round.
- *Barrier*: a mean over all that are there. The group of a round is formed when all have come that are believed to
  be there, or one step of the slowest machine after half of them have. A late replica counts in the next round. A
  ring in which a member vanishes begins again with the others. A round takes at least as long as its mean did.
- *Nobody waits*: the same, but all train on, and the mean corrects what each had come with.

**Conditions.** A cell stands for whole replicas of 10⁹ parameters: the fastest machine takes 90 s for an inner step,
three virtual hours are 120 of its steps, and everything that travels of weights counts as much as it would for 10⁹
parameters. Machines are of four kinds, in geometric progression up to the slowest. A peer leaves so many times in an
hour of presence, half of the times by a crash (10 min on average, the optimiser's memory is lost), half of the times
by a sleep (30 min on average). A peer that comes back copies weights in bfloat16 from a random peer, over both lines.
Others learn after a minute that a peer has gone. Lines of 20/5 stall for half a minute every ten minutes. Absences and
stalls follow from the seed and are alike for all methods. Where nobody is there, the last peer that was goes on from
its own weights, and the others wait for it. The score is the loss of the mean of the fast weights of all that are
there at the end and did not come back in the last 36 minutes, on all of the held-out text (46 kB of the library's, 57
kB of prose).

**Tuning.** Each method at rates of 0.005, 0.01 and 0.02, on seed 0, four replicas, 100/20, twice as slow, 20 % an
hour; that seed is not reported. 0.01 won for all three: 0.005 cost gossip 0.13 nats, the barrier 0.19 and nobody waits
0.11, 0.02 cost them 0.05, 0.00 and 0.03. Opponents were given the favourable side of what the design leaves open: half
of the believed peers are a quorum, a barrier never costs more than half of the time, and forming a group and coding
cost no time.

**Reading.** Ratios are an opponent's over gossip's: above 1 gossip is better. Perplexity ± its standard error, over
seeds and 32 parts of the held-out text together (of one seed over the parts alone). Time and bytes (of all replicas)
are those until the worse of the two has its last loss. Fewer than five seeds decide nothing."""
LIMITS = """## Limits

The trained model has 35 thousand parameters and 120 steps, so it is still in the early, steep part of training, where
more tokens count for much. Replicas hold the whole model; a pipeline is not drawn. All lines of a cell are alike.
Gossip has the production's bounds on a partner; the means have no such bounds, and trust everybody. The verdicts hold
for the means as they are built here. Places without five seeds are leads. `init` and `check` say what the map has on
lines like those of a plan (`noloco_node.planning.expectation`), and choose no method by it: the swarms that a planner
plans have far larger models than what has run. With 64 replicas only the middle churn has run.

    python -m research.laboratory.map  # goes on with what is missing: seed after seed, the most telling places first"""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page and the picture; return the exit code."""
    return run_by_seed(Survey("map", __doc__, map_grid, _page), words, work)


def _page(data: Measured, out: Path) -> list[str | Table]:
    from research.laboratory.output.map_tables import map_picture, map_tables, said  # matplotlib

    drawing = out / "pictures" / "map.png"
    drawing.parent.mkdir(parents=True, exist_ok=True)
    drawing.write_bytes(map_picture(data))
    picture = "![Where gossip is better](pictures/map.png)"
    return [INTRODUCTION, "## What came out", said(data), picture, *map_tables(data), LIMITS]


if __name__ == "__main__":
    sys.exit(main())
