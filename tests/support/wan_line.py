"""A long line between two sites, in user space: every packet that is forwarded comes out again `DELAY_S` later, but for
the share `LOSS`, which never does.

    python wan_line.py DELAY_S LOSS

Run in the namespace of a router: packets that the kernel routes to the device `late` are read there, kept, and given
back to the kernel by the device `early`, from where they go their way. Not every kernel has netem; all have TUN.
"""

import asyncio
import fcntl
import os
import struct
import sys
from random import Random

_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 65536


def device(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _TUN | _NO_HEADER))
    return file


async def carry(delay_s: float, loss: float) -> None:
    loop, rng = asyncio.get_running_loop(), Random(0)
    late, early = device("late"), device("early")

    def give(packet: bytes) -> None:
        try:
            os.write(early, packet)
        except OSError:  # a full queue drops packets, as lines do
            return

    def take() -> None:
        try:
            while True:
                packet = os.read(late, _PACKET_BYTES)
                if rng.random() >= loss:
                    loop.call_later(delay_s, give, packet)
        except BlockingIOError:
            return

    loop.add_reader(late, take)
    print("ready", flush=True)
    await loop.create_future()


if __name__ == "__main__":
    asyncio.run(carry(float(sys.argv[1]), float(sys.argv[2])))
