"""What a run says of its adapters; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

Form = Literal["bfloat16", "float32", "int8", "nf4"]  # of frozen weights
ALL_LINEAR = "all-linear"  # the target that is every linear layer of the decoder's layers


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Low-rank adapters (LoRA), which are trained over a finished model whose own weights stay as they are."""

    rank: Annotated[int, (0, 4096)] = 0
    """Of each adapter; 0: there are none, and all weights are trained."""
    alpha: Annotated[float, (1e-3, 1e6)] = 32.0
    """What an adapter adds counts alpha / rank times."""
    dropout: Annotated[float, (0.0, 0.95)] = 0.0
    """Share of an adapter's input zeroed in training."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """The linear layers that have an adapter, by the ends of their names, such as q_proj; "all-linear" is each."""
    freeze_a: bool = False
    """Whether the first matrix of each adapter stays as it was drawn (FFA-LoRA): half of the bytes, and a mean of two
    replicas' adapters is then that of their products."""
    base: Form = "bfloat16"
    """The form of the model's own matrices, on each machine; as codes ("int8", "nf4") those of the linear layers in the
    decoder's layers, and the others bfloat16."""

    @property
    def is_trained(self) -> bool:
        """Whether a run trains adapters, and not all weights."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """How many times the product of an adapter's matrices counts."""
        return self.alpha / self.rank

    def is_for(self, name: str) -> bool:
        """Say whether the linear layer of this name has an adapter."""
        return any(target == ALL_LINEAR or f".{name}".endswith(f".{target}") for target in self.targets)


NO_ADAPTER = AdapterConfig()
