"""Moments that visit a GPU: what waits for what, on a GPU that is not torch's current one."""

from contextlib import nullcontext

import pytest
import torch

from pipeline.hardware import moments_beside
from pipeline.hardware.moments_beside import Codes, MomentsBeside

SECOND = torch.device("cuda", 1)


class Event:
    def __init__(self, seen: list[tuple[str, object]]) -> None:
        self._seen = seen

    def wait(self, stream: object = None) -> None:
        self._seen.append(("wait", stream))

    def record(self, stream: object = None) -> None:
        self._seen.append(("record", stream))


def test_the_computing_stream_is_that_of_the_stage_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, seen = MomentsBeside(torch.device("cpu"), 1, 4), list[tuple[str, object]]()
    used, come = Event(seen), Event(seen)
    beside._device = SECOND
    beside._places = [beside._places[0]._replace(come=come, used=used)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(moments_beside, "_after", lambda *_: nullcontext())
    moments = (
        Codes(torch.ones(1, 1), torch.ones(1, 4, dtype=torch.int8)),
        Codes(torch.ones(1, 1), torch.ones(1, 4, dtype=torch.uint8)),
    )
    with beside.on_device(moments):
        pass
    assert seen == [("wait", SECOND), ("record", SECOND)]
