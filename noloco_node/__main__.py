"""The command `noloco-node`; `python -m noloco_node` is the same.

To load what a command needs takes seconds, in which nothing is held. Some libraries swallow an interrupt while they are
imported, and fail later of its consequences: until a command says otherwise, a signal ends the process on the spot.
"""

import atexit
import os
import sys

from noloco_node.machine.signals import ignore_from_now_on, leave_at_once, set_answer


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    set_answer(leave_at_once)
    atexit.register(ignore_from_now_on)  # called last, since it is registered first
    from noloco_node.cli.main import main as run_command

    run_command()


def _open_standard_streams() -> None:
    """Open what a shell has closed (`>&-`): a socket would take the number of the stream, and uvloop would abort."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # of the lowest number that is free


if __name__ == "__main__":
    main()
