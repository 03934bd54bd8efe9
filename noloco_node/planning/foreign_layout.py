"""A foreign module: its sizes as a node asks for them, and the weights that its run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noloco_node.errors import UserError, config_error
from noloco_node.machine.interface import StageModel
from noloco_node.run.config import RunConfig
from noloco_node.storage.weight_store import FilePieceKey, WeightStore


class ForeignLayout(NamedTuple):
    """The one stage of a run of a foreign module; implements `noloco_node.machine.interface.Dimensions`.

    Between stages nothing travels, so its activations and its vocabulary have the least size that is one.
    """

    shapes: tuple[Mapping[str, tuple[int, ...]]]
    width: int = 1
    vocabulary: int = 1
    work: tuple[float, ...] = (1.0,)


def foreign_layout(run: RunConfig) -> ForeignLayout:
    """Return the layout of a run; raise `UserError` (CONFIG) if its model is no foreign module."""
    if not run.model.is_foreign:
        raise config_error(
            "The run trains a model of its own, and no module of a program.",
            "its run file names an architecture, or a model of the hub",
            "noloco_node.join, or `noloco-node join`, trains it; GossipOptimizer is for runs that noloco_node.init"
            " wrote of a module",
        )
    return ForeignLayout((run.model.foreign_parameters,))


class ForeignWeights:
    """The weights that a run of a foreign module starts from; implements `FirstWeights`.

    `shapes`: of its parameters. `store`: the files as this machine has them.
    """

    frozen = False

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], store: WeightStore) -> None:
        self._shapes, self.store = shapes, store

    def pieces(self, stage: int) -> list[FilePieceKey]:
        """Return all pieces; the headers of all files are here. Raises `UserError` where these are none."""
        try:
            return self.store.pieces_of(self._shapes)
        except ValueError as error:
            raise self._unfit(error) from error

    def put(self, stage: int, part: StageModel) -> None:
        """Put the parameters, whose pieces are here, into the module; raise `UserError` if they are another's."""
        found: dict[str, Tensor] = {}
        try:
            for each in self.store.files:
                with safe_open(self.store.directory / each.file, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in file.keys() if name in self._shapes}  # noqa: SIM118
            for name, shape in self._shapes.items():
                if name not in found or tuple(found[name].shape) != shape:
                    raise ValueError(f"{name} is missing, or of another shape than the run file says")
        except (ValueError, OSError, SafetensorError) as error:
            raise self._unfit(error) from error
        part.set_weights([found[name].to(torch.float32) for name in self._shapes])

    def _unfit(self, error: Exception) -> UserError:
        return config_error(
            f"The weights in {self.store.directory} cannot be loaded.",
            " ".join(str(error).split())[:500],
            "the file that noloco_node.init wrote beside the run file",
        )
