"""Each type of device is asked in its own words; Apple's by a fake of `torch.mps`."""

from typing import Any

import pytest
import torch
from small_stages import cuts, drawn_ids, make_stage, prepared
from torch import Tensor

from pipeline.hardware.device_type import DEVICE_TYPES

MPS = torch.device("mps")


class FakeMps:
    """Answers as `torch.mps` does. Its random numbers are the CPU's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.allocated, self.held, self.most = 3, 5, 20
        patch.setattr(torch.mps, "synchronize", lambda: self.calls.append("synchronize"))
        patch.setattr(torch.mps, "empty_cache", lambda: self.calls.append("empty_cache"))
        patch.setattr(torch.mps, "get_rng_state", torch.get_rng_state)
        patch.setattr(torch.mps, "set_rng_state", torch.set_rng_state)
        patch.setattr(torch.mps, "recommended_max_memory", lambda: self.most)
        patch.setattr(torch.mps, "current_allocated_memory", lambda: self.allocated)
        patch.setattr(torch.mps, "driver_allocated_memory", lambda: self.held)


def test_an_apple_processor_is_asked_by_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, kind = FakeMps(monkeypatch), DEVICE_TYPES["mps"]
    kind.finish(MPS)
    kind.empty_cache(MPS)
    assert fake.calls == ["synchronize", "empty_cache"]
    assert (kind.free_bytes(MPS), kind.kept_bytes(MPS)) == (15, 2)
    fake.held = 25
    assert kind.free_bytes(MPS) == 0
    for newer in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_, newer=newer: newer)
        assert kind.half(MPS) == (torch.bfloat16 if newer else None)


def test_dropout_is_drawn_again_from_the_random_numbers_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is computed again has the gradients of one that kept its graph."""
    recipe = prepared("gpt2", dropout=0.3)
    first, *_ = cuts(recipe, 3)
    stages = [make_stage(recipe, first, graphs=graphs) for graphs in (None, 0)]

    def refuse(*_: Any) -> Any:
        raise AssertionError("these are not the device's random numbers")

    FakeMps(monkeypatch)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, refuse)
    found: list[list[Tensor]] = []
    for stage in stages:
        stage._type = DEVICE_TYPES["mps"]
        torch.mps.set_rng_state(torch.Generator().manual_seed(5).get_state())
        passes = [stage.forward(drawn_ids(seed, 2, 9)) for seed in range(2)]
        after = torch.mps.get_rng_state()
        for waiting in passes:
            waiting.backward(torch.ones_like(waiting.output))
        assert torch.equal(after, torch.mps.get_rng_state()), "a recomputation leaves them as they were"
        found.append([weight.grad for weight in stage._weights if weight.grad is not None])
    assert stages[1].statistics()["recomputed"] == 2
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))
