"""The compiled arithmetic of a round in int4 (`kernels.c`), where this installation has it.

The callers work with torch where `COMPILED` is None: no C compiler was there when this was installed, or the library
was built from another source than the one beside it. Both forms yield the same bits, but for the last ones of sums,
which only say how far weights are apart. The compiled form goes over the memory once instead of once an operation.

Addresses (`Tensor.data_ptr`) are those of contiguous tensors on the CPU: float32 values, bfloat16 differences, uint8
codes. A call lets other threads run Python meanwhile.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Protocol, cast
from zlib import crc32


class Kernels(Protocol):
    """The functions of the library. `kernels.c` names their arguments: numbers, addresses, None for NULL."""

    def kernels_encode(self, *arguments: float | None) -> float:
        """Write the codes of a parameter; return the sum of its squares."""

    def kernels_measure(self, *arguments: float | None) -> None:
        """Add to the five sums, float64, of `swap.measure`."""

    def kernels_step(self, *arguments: float | None) -> None:
        """Take an outer step with gamma = beta and no period of the momentum."""


def load(folder: Path) -> Kernels | None:
    """Return the library in a folder, None unless it is there and was built from this package's source."""
    source = Path(__file__).with_name("kernels.c")
    for suffix in EXTENSION_SUFFIXES:
        try:
            library = ctypes.CDLL(str(folder / f"kernels_library{suffix}"))
            built_from = ctypes.c_uint32.in_dll(library, "kernels_source").value
            if built_from != crc32(source.read_bytes()):
                return None
        except (OSError, ValueError):
            continue
        real, count, address = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
        library.kernels_encode.restype = real
        library.kernels_encode.argtypes = (address, address, count, real, address)
        library.kernels_measure.restype = None
        library.kernels_measure.argtypes = (*(address,) * 3, count, real, address, address)
        library.kernels_step.restype = None
        library.kernels_step.argtypes = (*(address,) * 3, count, real, address, real, real, real, real)
        return cast(Kernels, library)
    return None


COMPILED = load(Path(__file__).parent)
