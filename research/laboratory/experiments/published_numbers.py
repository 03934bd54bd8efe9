"""The papers' own numbers, beside which the laboratory's are put.

NoLoCo (arXiv 2506.10911, table 2 and figure 3) and Asynchronous Local-SGD (arXiv 2401.09135, tables 1 to 3). All are
validation perplexities; models, texts and batches differ from the laboratory's, so only ratios can be compared.
"""

from __future__ import annotations

from typing import NamedTuple


class Printed(NamedTuple):
    """A row of NoLoCo's table 2. `replicas`: data parallel; `stages`: pipeline parallel."""

    text: str
    model: str
    replicas: int
    stages: int
    parallel: float
    diloco: float
    noloco: float


TABLE_2 = (
    Printed("Reddit", "125M", 8, 1, 25.5, 27.6, 27.3),
    Printed("Reddit", "125M", 4, 2, 25.7, 26.8, 26.4),
    Printed("Reddit", "125M", 8, 2, 25.5, 27.6, 27.2),
    Printed("Reddit", "125M", 16, 2, 25.5, 29.7, 29.1),
    Printed("Reddit", "1.3B", 8, 2, 19.6, 21.0, 20.5),
    Printed("Reddit", "1.3B", 16, 2, 19.6, 21.2, 20.7),
    Printed("Reddit", "1.3B", 16, 4, 19.6, 21.0, 20.9),
    Printed("Reddit", "6.8B", 16, 4, 16.1, 18.0, 17.5),
    Printed("C4", "125M", 8, 1, 29.1, 35.4, 34.5),
    Printed("C4", "125M", 4, 2, 29.1, 32.1, 31.3),
    Printed("C4", "125M", 8, 2, 29.1, 34.0, 33.1),
    Printed("C4", "125M", 16, 2, 29.1, 39.1, 37.7),
    Printed("C4", "1.3B", 8, 2, 18.8, 21.8, 21.1),
    Printed("C4", "1.3B", 16, 2, 18.8, 23.2, 23.4),
    Printed("C4", "1.3B", 16, 4, 18.8, 22.6, 22.9),
    Printed("C4", "6.8B", 16, 4, 15.7, 17.3, 16.6),
)
PEARSON = (0.91, 0.97)
"""Correlation of the replicas' standard deviation with the inner learning rate, from and to."""

BY_SPEEDS = {
    "parallel": (42.47, 42.47, 42.47, 42.47),
    "diloco": (41.35, 41.35, 41.35, 41.35),
    "async_naive": (44.27, 44.38, 44.29, 44.27),
    "async_delayed": (41.27, 41.27, 41.09, 41.13),
}
"""20 million parameters, 4 workers: no, slight, moderate and very unequal speeds. `parallel`: four times the batch."""
BY_CROWD = {
    "parallel": (42.47, 41.28, 40.60),
    "diloco": (41.35, 41.23, 41.25),
    "async_naive": (44.27, 44.23, 44.23),
    "async_delayed": (41.13, 41.02, 40.98),
}
"""4, 8 and 16 workers."""
