"""What ends a command: one clear message (what, why, what to try) and a documented exit code."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `noloco-node`. What stands below each of them is printed in docs/reference.md."""

    OK = 0
    """Done."""
    BUG = 1
    """An error that the program does not know: please report it. Of `simulate`: somebody waits for ever, or an
    invariant broke."""
    USAGE = 2
    """The command line is wrong."""
    CONFIG = 3
    """A run file, an invite or a data source is wrong; the message names the field."""
    UNREACHABLE = 4
    """Nobody could be reached who is needed: no bootstrap peer (the message says which address failed, and why), or
    nobody with the weights of a stage."""
    OTHER_RUN = 5
    """The peers that answered belong to another run, or to another version of the protocol."""
    HOME_IN_USE = 6
    """Another node already uses this home, or its identity is in use elsewhere."""
    PORT_TAKEN = 7
    """Another program already listens on the port asked for."""
    DAEMON = 8
    """The libp2p daemon did not start, or died again and again."""
    STORAGE = 9
    """The disk is full or not writable at the start, or the last checkpoint could not be written. In between that is a
    warning."""
    DEVICE = 10
    """The device asked for is absent, or its memory is not enough."""
    UNFIT = 11
    """`doctor` found something that will prevent this machine from joining."""
    INTERRUPTED = 130
    """Interrupted before the work was done. A node between two of its shifts leaves with 0."""


COMPLAINT = "noloco-node: "
"""Begins what a command says on its way out."""


class Trouble(Exception):
    """An error that a person can act on: what happened, why, and what to try."""

    def __init__(self, what: str, *, why: str, attempt: str, code: Exit) -> None:
        super().__init__(what)
        self.what, self.why, self.attempt, self.code = what, why, attempt, code

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  try: {self.attempt}"


def refusal(error: OSError) -> str:
    """Say what the system refused, and at which file, without its number."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def trouble_of(error: BaseException | None) -> Trouble | None:
    """Return the message to a person that an exception is, or holds where a task group raised nothing else."""
    if isinstance(error, BaseExceptionGroup):
        found = [trouble_of(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return error if isinstance(error, Trouble) else None
