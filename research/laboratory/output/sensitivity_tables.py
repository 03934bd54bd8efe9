"""What the two papers vary, a table a question."""

from __future__ import annotations

from research.laboratory.experiments import sensitivity
from research.laboratory.output.table import Table
from research.laboratory.output.tables import family
from research.laboratory.running.results import Measured


def sensitivity_tables(data: Measured) -> list[Table]:
    """Return the tables, each of a base and of what was changed."""
    of_noloco = [f"{name}_every_{every}" for name in ("noloco", "diloco_hb") for every in sensitivity.OTHER_ROUNDS]
    shards = sensitivity.sharded()

    questions = [
        ("the batch as it is", "parallel", ["diloco_hb", "noloco"]),
        ("twice the batch, at as many steps", "parallel_batch_2", [*sensitivity.batches()][1:]),
        ("momentum and pull of NoLoCo in training", "noloco", list(sensitivity.rules())),
        ("rounds of other lengths, each with a rate of its own", "noloco", ["diloco_hb", *of_noloco]),
        ("late pseudo-gradients at a server", "naive", ["diloco_of_4", "delayed", *sensitivity.waits()]),
        ("a start on synchronous training", "diloco_of_4_pretrained", [*sensitivity.starts()][1:]),
        (
            "unlike text, 4 workers",
            "diloco_of_4",
            [n for n in shards if n.startswith(("n", "de", "di")) and "noloco" not in n],
        ),
        ("unlike text, 8 replicas", "mean", ["mean_shards", "gossip", "gossip_shards", "noloco", "noloco_shards"]),
        ("machines of other speeds", "diloco_of_4", ["naive", "delayed", *sensitivity.other_speeds()]),
    ]
    return [family(data, f"What the papers vary: {title}", base, (base, *names)) for title, base, names in questions]
