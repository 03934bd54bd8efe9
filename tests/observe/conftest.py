import pytest

from tests.support.fake_loggers import FakeLoggers


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> FakeLoggers:
    return FakeLoggers(monkeypatch)
