"""Energy is told where a device counts it, and nothing is said where none does."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from noloco_node.machine import device
from noloco_node.machine.device import EnergyMeter, energy_meter

CPU = torch.device("cpu")


def zone(powercap: Path, zone: str, name: str, microjoules: int) -> Path:
    path = powercap / zone
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    return path / "energy_uj"


def test_a_counter_that_begins_anew_goes_on() -> None:
    read = iter([9.0, 9.5, 1.0, 3.0]).__next__
    meter = EnergyMeter([(read, 10.0)])
    assert [meter.joules() for _ in range(3)] == [0.5, 2.0, 4.0]


def test_a_counter_that_never_begins_anew_takes_nothing_back() -> None:
    meter = EnergyMeter([(iter([9.0, 8.0, 8.5]).__next__, 0.0)])
    assert [meter.joules() for _ in range(2)] == [0.0, 0.5]


def test_packages_are_added_up_and_neither_their_parts_nor_the_platform_around_them(tmp_path: Path) -> None:
    first, second = (zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 1_000_000) for number in range(2))
    core = zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    platform = zone(tmp_path, "intel-rapl:2", "psys", 1_000_000)
    nameless = zone(tmp_path, "intel-rapl:3", "", 1_000_000)
    (nameless.parent / "name").unlink()
    meter = energy_meter(CPU, tmp_path)
    assert meter is not None
    first.write_text("3000000")
    second.write_text("500000")  # it has begun anew
    for counted_elsewhere in (core, platform, nameless):
        counted_elsewhere.write_text("9000000")
    assert meter.joules() == pytest.approx(2.0 + 9.5)
    first.unlink()
    assert meter.joules() == pytest.approx(11.5)


def test_nothing_is_said_where_nothing_counts(tmp_path: Path) -> None:
    assert energy_meter(CPU, tmp_path / "none") is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1).write_text("no number")
    assert energy_meter(CPU, tmp_path) is None


class _Nvml:
    """The library of a driver: functions that return a code, and write what was asked for to where they are told."""

    def __init__(self, wrong: str) -> None:
        self._wrong, self.uuids = wrong, list[bytes]()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.uuids.append(uuid)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:
        millijoules._obj.value += 1500
        return 3 if self._wrong == "energy" else 0


@pytest.mark.parametrize("wrong", ["", "energy", "library"])
def test_a_gpu_is_asked_through_its_driver(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml(wrong)

    def load(_: str) -> _Nvml:
        if wrong == "library":
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return nvml

    monkeypatch.setattr(ctypes, "CDLL", load)
    properties = type("Properties", (), {"uuid": "0b1c"})
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda _: properties)
    meter = energy_meter(torch.device("cuda:1"))
    if wrong:
        assert meter is None
        return
    assert meter is not None
    assert nvml.uuids == [b"GPU-0b1c"]
    assert [meter.joules() for _ in range(2)] == [1.5, 3.0]
