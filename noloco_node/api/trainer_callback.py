"""`GossipCallback`: what a Trainer of transformers, or of TRL, has to know of the run that its optimiser is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from noloco_node.api.gossip_optimizer import GossipOptimizer
from noloco_node.errors import usage_error


class GossipCallback(TrainerCallback):  # type: ignore[misc] # mypy does not read transformers
    """Ends the training when the run is over, shows its losses to the swarm, and leaves at its end.

    The optimiser goes to the Trainer as well: `Trainer(..., optimizers=(optimizer, None), callbacks=[callback])`.
    """

    def __init__(self, optimizer: GossipOptimizer) -> None:
        if not isinstance(optimizer, GossipOptimizer):
            raise usage_error(
                "GossipCallback takes a GossipOptimizer.",
                f"it was given an object of the type {type(optimizer).__name__}",
                "GossipCallback(optimizer) with the optimiser that the Trainer is given as well",
            )
        self._optimizer = optimizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: object = None, **_: Any
    ) -> None:
        while optimizer is not self._optimizer and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate wraps it
        if optimizer is not self._optimizer:
            raise usage_error(
                "The Trainer steps with another optimiser than the run's.",
                "it would train alone, and the run would never end",
                "Trainer(..., optimizers=(optimizer, None), callbacks=[GossipCallback(optimizer)])",
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        control.should_training_stop = control.should_training_stop or self._optimizer.finished
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self._optimizer.note_loss(float(logs["loss"]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._optimizer.leave()
