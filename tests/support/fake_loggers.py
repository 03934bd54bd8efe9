"""Stand-ins for the packages that draw curves: they keep what they are told."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self

import pytest


class FakeLoggers:
    """Takes the place of tensorboard, wandb and trackio. `has_key`: whether wandb finds an API key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.opened: list[dict[str, Any]] = []
        self.has_key = False
        for name, holds in {
            "tensorboard": {},
            "torch.utils.tensorboard": {"SummaryWriter": self._writer},
            "wandb": {"Settings": dict, "login": lambda prompt: self.has_key, "init": self._open},
            "trackio": {"init": self._open},
        }.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__dict__.update(holds)
            monkeypatch.setitem(sys.modules, name, module)

    def _open(self, **options: Any) -> Self:
        self.opened.append(options)
        return self

    def _writer(self, path: str, flush_secs: float) -> Self:
        return self._open(path=path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        self.told.append("closed")

    def add_scalar(self, name: str, value: float, step: int, at: float) -> None:
        self.told.append((name, value, step, at))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.told.append((name, step_metric))

    def log(self, figures: dict[str, float], step: int | None = None) -> None:
        self.told.append(figures if step is None else (figures, step))
