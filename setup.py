"""Compiles the arithmetic of a round where there is a C compiler; setup.cfg describes everything else.

Without a compiler the installation succeeds all the same, and rounds compute with torch.
"""

from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

SOURCE = "gossip/exchange/kernels.c"

setup(
    ext_modules=[
        Extension(
            "gossip.exchange.kernels_library",
            [SOURCE],
            # Not `-ffast-math`: it changes how the whole process rounds. Nor fused products: they change the bits.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno"],
            define_macros=[("KERNELS_SOURCE", f"{crc32(Path(SOURCE).read_bytes())}u")],
            libraries=["m"],
            optional=True,
        )
    ]
)
