"""Muon for the matrices inside layers and AdamW for all else, as MuLoCo (arXiv 2505.23725) trains replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from noloco_node.planning.model_layout import ModelLayout, build_stage
from noloco_node.run.config import RunConfig
from pipeline.adamw import AdamW
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.stage import Stage
from research.laboratory.experiments.task import CPU, as_published

OUTSIDE = ("embed_tokens", "lm_head")
"""In names of matrices that AdamW steps: a row of theirs is one token's."""


class MuonStage(Stage):
    """A whole model whose matrices inside layers step by Muon. Its optimiser's memory cannot be handed to another."""

    def __init__(self, run: RunConfig, plan: ModelLayout) -> None:
        constants = as_published(run).inner
        super().__init__(build_stage(run, plan, 0, CPU), constants, StageSettings(CPU, None), first=True, last=True)
        inside = {
            name: weight
            for name, weight in self._masters.items()
            if weight.ndim == 2 and not any(part in name for part in OUTSIDE)
        }
        outside = [weight for name, weight in self._masters.items() if name not in inside]
        # Scaled to the size of AdamW's steps, so that one learning rate suits both.
        muon = torch.optim.Muon(
            inside.values(), lr=0.0, weight_decay=constants.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = _WithMuon(outside, constants, muon)


class _WithMuon(AdamW):
    def __init__(self, outside: Sequence[nn.Parameter], constants: InnerConfig, muon: torch.optim.Muon) -> None:
        super().__init__(outside, constants, CPU)
        self._muon = muon

    def step(self, learning_rate: float) -> None:
        super().step(learning_rate)
        for group in self._muon.param_groups:
            group["lr"] = learning_rate
        self._muon.step()  # type: ignore[no-untyped-call]
