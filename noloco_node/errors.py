"""What ends a command: one clear message (what, why, what to try) and a documented exit code."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `noloco-node`, documented in the README."""

    OK = 0
    BUG = 1
    """An error that the program does not know: please report it."""
    USAGE = 2
    """The command line is wrong."""
    CONFIG = 3
    """A run file, an invite or a data source is wrong; the message names the field."""
    UNREACHABLE = 4
    """Nobody could be reached who is needed: no bootstrap peer, or nobody with the weights of a stage."""
    OTHER_RUN = 5
    """The peers that answered belong to another run, or to another version of the protocol."""
    HOME_IN_USE = 6
    """Another node already uses this home directory."""
    PORT_TAKEN = 7
    """Another program already listens on the port asked for."""
    DAEMON = 8
    """The libp2p daemon did not start, or died."""
    STORAGE = 9
    """The disk is full or not writable."""
    DEVICE = 10
    """The device asked for is absent, or its memory is not enough."""
    UNFIT = 11
    """`doctor` found something that will prevent this machine from joining."""
    INTERRUPTED = 130
    """Interrupted before the work was done."""


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
