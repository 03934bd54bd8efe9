"""What energy this node's device takes, where the device tells.

A GPU of NVIDIA counts it (NVML, a library of its driver), a processor of Intel or AMD for whoever may read the kernel's
`powercap`, which is root unless the owner of the machine has changed that. Either counts all that the device does, for
others too: a node says what its device took while it was there, and no share of it. Where nothing counts, nothing is
said; nothing is guessed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

NVML = "libnvidia-ml.so.1"
POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Energy since this was made, of one or several counters that begin anew at their end.

    `counters`: each reads joules, and has so many when it begins anew (0: never).
    """

    def __init__(self, counters: list[tuple[Callable[[], float], float]]) -> None:
        self._counters = [(read, most, [read()]) for read, most in counters]
        self._joules = 0.0

    def joules(self) -> float:
        """Return what was taken so far; what cannot be read now comes later."""
        for read, most, last in self._counters:
            with suppress(OSError, ValueError):
                now = read()
                grown = now - last[0] if now >= last[0] else now - last[0] + most
                self._joules += max(0.0, grown)
                last[0] = now
        return self._joules


def energy_meter(device: torch.device, powercap: Path = POWERCAP) -> EnergyMeter | None:
    """Return the meter of a device; None where it does not tell."""
    with suppress(OSError, ValueError, AttributeError):
        if device.type == "cuda":
            return EnergyMeter([(_nvidia(str(torch.cuda.get_device_properties(device).uuid)), 0.0)])
        packages = [path for path in sorted(powercap.glob("intel-rapl:*")) if _is_package(path)]
        if packages:
            return EnergyMeter([_package(path) for path in packages])
    return None


def _is_package(zone: Path) -> bool:
    """Say whether a zone is a whole processor: its cores are zones too, and so is a laptop's platform (`psys`)."""
    try:
        return (zone / "name").read_text().startswith("package")
    except (OSError, ValueError):
        return False


def _package(path: Path) -> tuple[Callable[[], float], float]:
    return (lambda: _microjoules(path / "energy_uj"), _microjoules(path / "max_energy_range_uj"))


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _nvidia(uuid: str) -> Callable[[], float]:
    """Return what reads a GPU's counter; raises `OSError` where there is no driver that tells."""
    nvml = ctypes.CDLL(NVML)

    def ask(function: str, *arguments: object) -> None:
        code = getattr(nvml, function)(*arguments)
        if code != 0:
            raise OSError(code, f"{function} has failed")

    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    ask("nvmlInit_v2")
    ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(handle))

    def read() -> float:
        ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    return read
