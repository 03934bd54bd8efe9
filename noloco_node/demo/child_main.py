"""Run a module as `python -m` would, tied to its parent: when standard input ends, so does the process.

    python -m noloco_node.demo.child_main MODULE [ARGUMENT ...]

The parent holds the other end of a pipe. However the parent dies, even by a signal that nobody can catch, the kernel
closes that end; the child reads the end of the file and interrupts itself as Ctrl-C would, then more firmly. No process
group, no supervisor and no polling can promise as much.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

FIRMER_AFTER_S = 15.0
"""Seconds between an interrupt and a termination, and again until the kill."""


def watch(descriptor: int) -> None:
    """Read `descriptor` to its end, then signal this process: SIGINT, SIGTERM, SIGKILL, with a pause between."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass  # a standard input that cannot be read is no parent either
    never = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        never.wait(FIRMER_AFTER_S)


def main() -> None:
    """Tie this process to its parent and become the module."""
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    # A shell that starts us in the background lets its children ignore the interrupt: here it is how they are stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, args=(0,), name="parent", daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
