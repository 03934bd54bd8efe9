"""The command `noloco-node`; `python -m noloco_node` is the same.

To load what a command needs takes seconds, in which nothing is held. Some libraries swallow an interrupt while they are
imported, and fail later of its consequences: until a command says otherwise, a signal ends the process on the spot.
"""

from noloco_node.machine.signals import leave_at_once, set_answer


def main() -> None:
    """Run the command line."""
    set_answer(leave_at_once)
    from noloco_node.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
