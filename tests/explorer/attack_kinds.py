"""The attacks that a scenario can name, by what it calls them; benchmarks take some of them too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from noloco_node.sim.network.medium import Corruption
from noloco_node.swarm.receipts import SourceRecord
from noloco_node.swarm.roster import PeerRecord
from pipeline.messages import Reason
from tests.explorer.attacks import Attack, TamperedStage, boast, hang, in_round, refuse

if TYPE_CHECKING:
    from torch import Tensor

    from noloco_node.machine.interface import StageModel
    from pipeline.inner_step import StepReport

HUGE = 2**40
FLOOD = 3


class ScaledSteps(TamperedStage):
    """Steps `factor` times as far as it should: 0 learns nothing itself, -1 goes up instead of down."""

    def __init__(self, stage: StageModel, factor: float) -> None:
        super().__init__(stage)
        self._factor = factor

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        return super().step(self._factor * learning_rate, microbatches)


def weights(change: Callable[[Tensor], Tensor]) -> Attack:
    return Attack(arithmetic=lambda stage: TamperedStage(stage, weights=change))


def gradients(change: Callable[[Tensor], Tensor], *, boasts: bool = False) -> Attack:
    return Attack(record=boast if boasts else None, arithmetic=lambda stage: TamperedStage(stage, gradient=change))


def like(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    scaled: Tensor = noise * (tensor.float().norm() / noise.norm())
    return scaled.to(tensor.dtype)


class FirstWeights(TamperedStage):
    """Claims for ever the weights that it had at first."""

    def __init__(self, stage: StageModel) -> None:
        super().__init__(stage)
        self._first = super().claimed()

    def claimed(self) -> tuple[Tensor, ...]:
        return tuple([tensor.clone() for tensor in self._first])


def first_weights() -> Attack:
    return Attack(arithmetic=FirstWeights)


def claims_rounds() -> Attack:
    def record(own: PeerRecord) -> PeerRecord:
        return structs.replace(own, round=HUGE if own.round else 0)

    return Attack(record=record, say=in_round(HUGE))


def claims_samples(own: SourceRecord) -> SourceRecord:
    return SourceRecord(own.samples + HUGE, own.finished)


def signs_too_much(signed: dict[bytes, int]) -> dict[bytes, int]:
    return {source: 1000 * samples for source, samples in signed.items()}


def _ends(own: SourceRecord) -> SourceRecord:
    return SourceRecord(own.samples + HUGE, True)


def _finished(own: PeerRecord) -> PeerRecord:
    return structs.replace(own, progress=1.0, samples=HUGE)


def _not_finite() -> Attack:
    nothing: Any = partial(torch.full_like, fill_value=float("nan"))
    return Attack(arithmetic=lambda stage: TamperedStage(stage, output=nothing, gradient=nothing))


def _noise() -> Attack:
    return weights(partial(like, generator=torch.Generator().manual_seed(7)))


KINDS: Mapping[str, Callable[[], Attack]] = {
    "refuses": lambda: Attack(record=boast, answer=refuse(Reason.EXPIRED, 0.0)),
    "silent": lambda: Attack(record=boast, answer=hang),
    "wrong size": lambda: Attack(corruption=Corruption.SHAPE),
    "garbled": lambda: Attack(corruption=Corruption.FLIP),
    "rounds": claims_rounds,
    "samples": lambda: Attack(source=claims_samples),
    "ends": lambda: Attack(source=_ends, record=_finished),
    "receipts": lambda: Attack(receipts=signs_too_much),
    "flipped": lambda: weights(torch.neg),
    "noise": _noise,
    "scaled": lambda: weights(partial(torch.mul, other=1.5)),
    "old": first_weights,
    "ascends": lambda: Attack(arithmetic=lambda stage: ScaledSteps(stage, -1.0)),
    "gradient flipped": lambda: gradients(torch.neg, boasts=True),
    "not finite": _not_finite,
    "flood": lambda: Attack(flood=FLOOD),
}
