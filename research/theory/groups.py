"""How far apart replicas stay that average in groups, at the same bytes: in pairs, in fours, all together.

    python -m research.theory.groups

n replicas drift, each by itself, by a variance d a step. Every h steps they average in groups of g, drawn at random.
Averaging within groups leaves of the variance v among replicas that of the groups' means:

    kappa = (n - g) / (g (n - 1))

With the drift between two rounds it settles, after a round, at v = h d (1 - 1/n) kappa / (1 - kappa),
and in the mean over time

    v = h d (1 - 1/n) (kappa / (1 - kappa) + 1/2)

A group that adds up parts and hands them round sends 2 (g - 1) / g sets of weights a replica and round: one in a pair,
1.5 in fours, 2 (n - 1) / n in all. At the same bytes h grows so. Then pairs are 1.43 times as far apart as all together
of 8, and 1.5 times of many; fours 1.14 and 1.25 times. Who keeps pairs as near has to send as much fewer bits a value.
"""

from __future__ import annotations

import argparse

CROWDS, GROUPS = (8, 16, 64), (2, 4, 8)


def left(replicas: int, group: int) -> float:
    """Return which share of the variance among replicas a mean within random groups leaves."""
    return (replicas - group) / (group * (replicas - 1))


def apart(replicas: int, group: int, every: float) -> float:
    """Return the variance among replicas, mean over time, over a step's drift; `every`: steps between rounds."""
    share = left(replicas, group)
    return every * (1 - 1 / replicas) * (share / (1 - share) + 0.5)


def over_all(replicas: int, group: int) -> float:
    """Return the variance with groups over that with means of all, both for the same bytes."""
    sent = {size: 2 * (size - 1) / size for size in (group, replicas)}
    return apart(replicas, group, sent[group]) / apart(replicas, replicas, sent[replicas])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("variance among replicas over that with means of all, for the same bytes")
    print("replicas" + "".join(f"{f'groups of {group}':>14}" for group in GROUPS))
    for crowd in CROWDS:
        print(f"{crowd:>8}" + "".join(f"{over_all(crowd, group):>14.2f}" for group in GROUPS))


if __name__ == "__main__":
    main()
