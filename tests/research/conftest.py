"""What keeps runs of the laboratory short enough for a test."""

from collections.abc import Iterator

import pytest

from research.laboratory.experiments import task


@pytest.fixture(scope="module")
def one_held_out_batch() -> Iterator[None]:
    """Judge runs by one batch of held-out text, which a module reads once for all its tests."""
    task.validation_text.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "VALIDATION_BATCHES", 1)
        yield
    task.validation_text.cache_clear()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, one_held_out_batch: None) -> None:
    """Make the model of the full scale small."""
    for name, size in (("WIDTH", 32), ("LAYERS", 2), ("SEQUENCE_LENGTH", 32)):
        monkeypatch.setattr(task, name, size)
