"""What a stage needs of memory, by the plan."""

from __future__ import annotations

import torch

from noloco_node.planning.model_layout import ModelLayout
from noloco_node.run.config import RunConfig


def needs_bytes(run: RunConfig, drawn: ModelLayout, device: torch.device) -> tuple[int, ...]:
    """Return what each stage needs on a device, about."""
    from noloco_node.planning.plan import memories

    gpu = device.type == "cuda"
    return tuple(memory.computing if gpu else memory.total for memory in memories(run, drawn))


def in_flight_bytes(run: RunConfig, drawn: ModelLayout) -> tuple[int, ...]:
    """Return what of it the microbatches in flight keep at each stage, about: a newcomer measures it at its own."""
    from noloco_node.planning.plan import memories

    return tuple(memory.activations for memory in memories(run, drawn))
