"""A foreign module: its sizes as a node asks for them, and the weights that its run starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noloco_node.errors import UserError, config_error, one_line
from noloco_node.machine.interface import StageModel
from noloco_node.run.config import RunConfig
from noloco_node.storage.weight_store import FilePieceKey, WeightStore


class ForeignLayout(NamedTuple):
    """The stages of a run of a foreign module; implements `noloco_node.machine.interface.Dimensions`.

    Where each peer holds the whole module, there is one, and width and vocabulary have the least size that is one. What
    a stage costs only its program could say: they count as alike.
    """

    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    width: int = 1
    vocabulary: int = 1

    @property
    def work(self) -> tuple[float, ...]:
        return (1.0,) * len(self.shapes)


def foreign_layout(run: RunConfig) -> ForeignLayout:
    """Return the layout of a run; raise `UserError` (CONFIG) if its model is no foreign module."""
    if not run.model.is_foreign:
        raise config_error(
            "The run trains a model of its own, and no module of a program.",
            "its run file names an architecture, or a model of the hub",
            "noloco_node.join without stages, or `noloco-node join`, trains it; GossipOptimizer and stages are for runs"
            " that noloco_node.init wrote of modules",
        )
    model = run.model
    if not model.is_in_stages:
        return ForeignLayout((model.foreign_parameters,))
    stages: tuple[dict[str, tuple[int, ...]], ...] = tuple({} for _ in run.pipeline.all_stages)
    for name, shape in model.foreign_parameters.items():
        stages[int(name.partition(".")[0])][name] = shape
    return ForeignLayout(stages, max(1, model.foreign_width), model.foreign_vocabulary)


class ForeignWeights:
    """The weights that a run of a foreign module starts from; implements `FirstWeights`.

    `shapes`: of the parameters of each stage. `store`: the files as this machine has them.
    """

    frozen = False

    def __init__(self, shapes: Sequence[Mapping[str, tuple[int, ...]]], store: WeightStore) -> None:
        self._shapes, self.store = shapes, store

    def pieces(self, stage: int) -> list[FilePieceKey]:
        """Return the pieces of a stage; the headers of all files are here. Raises `UserError` where these are none."""
        try:
            return self.store.pieces_of(self._shapes[stage])
        except ValueError as error:
            raise self._unfit(error) from error

    def put(self, stage: int, part: StageModel) -> None:
        """Put the parameters, whose pieces are here, into the module; raise `UserError` if they are another's."""
        found: dict[str, Tensor] = {}
        shapes = self._shapes[stage]
        try:
            for each in self.store.files:
                with safe_open(self.store.directory / each.file, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in file.keys() if name in shapes}  # noqa: SIM118
            for name, shape in shapes.items():
                if name not in found or tuple(found[name].shape) != shape:
                    raise ValueError(f"{name} is missing, or of another shape than the run file says")
        except (ValueError, OSError, SafetensorError) as error:
            raise self._unfit(error) from error
        part.set_weights([found[name].to(torch.float32) for name in shapes])

    def _unfit(self, error: Exception) -> UserError:
        return config_error(
            f"The weights in {self.store.directory} cannot be loaded.",
            one_line(error),
            "the file that noloco_node.init wrote beside the run file",
        )
