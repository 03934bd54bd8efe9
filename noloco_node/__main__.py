"""The command `noloco-node`; `python -m noloco_node` is the same.

To load what a command needs takes seconds, in which nothing is held. Some libraries swallow an interrupt while they are
imported, and fail later of its consequences: until a command says otherwise, Ctrl-C ends the process on the spot.
"""

import os
import signal

from noloco_node.errors import COMPLAINT, Exit


def leave_at_once(*_: object) -> None:
    """Say so, and end the process."""
    os.write(2, f"{COMPLAINT}interrupted\n".encode())
    os._exit(Exit.INTERRUPTED)


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller has it ignored
        signal.signal(signal.SIGINT, leave_at_once)
    from noloco_node.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
