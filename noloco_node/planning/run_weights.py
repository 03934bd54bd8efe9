"""The weights that a run starts from, as one machine has them, and a stage's part of them."""

from __future__ import annotations

from torch import Tensor

from noloco_node.planning.checkpoint_map import CheckpointMap, read_parameters, unfit
from noloco_node.planning.model_layout import ModelLayout
from noloco_node.storage.weight_store import FilePieceKey, WeightStore


class RunWeights:
    """Implements `noloco_node.machine.interface.FirstWeights`."""

    def __init__(self, layout: ModelLayout, store: WeightStore) -> None:
        self._layout, self.store = layout, store

    def pieces(self, stage: int) -> list[FilePieceKey]:
        """Return the pieces that hold a stage's parameters; the headers of all files are here.

        Raises `UserError` where these are none.
        """
        try:
            names = self.store.tensors()
            return self.store.pieces_of(CheckpointMap(self._layout.prepared, names).sources(self._layout.shapes[stage]))
        except ValueError as error:
            raise unfit(str(self.store.directory), error) from error

    def read(self, stage: int) -> list[Tensor]:
        """Return a stage's parameters; its pieces are here. Raises `UserError` where the files are of another model."""
        paths = [self.store.directory / each.file for each in self.store.files]
        return read_parameters(self._layout.prepared, self._layout.shapes[stage], paths)
