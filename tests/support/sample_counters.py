"""The metadata of checkpoints for tests, whatever a test does not name being of no meaning."""

from typing import Any

from noloco_node.storage.checkpoint import Counters, EvaluatedCounters

USUAL = {
    "run_id": "run",
    "stage": 0,
    "round": 4,
    "inner_steps": 40,
    "progress": 0.5,
    "samples": 0,
    "optimiser_steps": 0,
}


def counters(**others: Any) -> Counters:
    return Counters(**USUAL | others)


def evaluated_counters(held_out_loss: float, **others: Any) -> EvaluatedCounters:
    return EvaluatedCounters(**USUAL | others, held_out_loss=held_out_loss)
