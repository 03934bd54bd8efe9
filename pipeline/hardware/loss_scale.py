"""The factor by which a backward pass in float16 is multiplied, so that small gradients do not become zero.

Micikevicius et al., Mixed Precision Training (arXiv 1710.03740). It is a power of two, so dividing by it is exact. Only
its own stage knows it: gradients travel without it. It halves where a gradient overflows and doubles after many windows
without an overflow. In formats with the range of float32 it is 1 and stays.
"""

from __future__ import annotations

import torch

FIRST, LARGEST = 2.0**16, 2.0**24
CALM_WINDOWS = 500  # after so many windows the factor doubles: at most one window of them is lost by it


class LossScale:
    """The factor of one stage. `adapts`: whether passes are in float16."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.adapts = dtype is torch.float16
        self.value = FIRST if self.adapts else 1.0
        self._calm = 0

    def halve(self) -> bool:
        """Halve it after an overflow; return False if it is 1 already."""
        self._calm = 0
        if self.value == 1.0:
            return False
        self.value /= 2.0
        return True

    def note_window(self, *, finite: bool) -> bool:
        """Adapt after a window, whose mean gradient is `finite` or not; return False as `halve` does."""
        if not finite:
            return self.halve()
        self._calm += 1
        if self._calm >= CALM_WINDOWS and self.value < LARGEST:
            self.value, self._calm = 2.0 * self.value, 0
        return True
