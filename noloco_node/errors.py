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


def causes(error: BaseException) -> list[BaseException]:
    """Return what a task group raised, groups within it included, or else the exception itself.

    Conversations that are lost beside the death of our own daemon follow from it, and are no causes.
    """
    leaves = _leaves(error)
    if any(isinstance(each, Trouble) and each.code is Exit.DAEMON for each in leaves):
        return [each for each in leaves if not isinstance(each, ConnectionError)]
    return leaves


def trouble_of(error: BaseException | None) -> Trouble | None:
    """Return the message to a person that an exception is, or holds where it has no other cause."""
    found = [] if error is None else causes(error)
    troubles = [each for each in found if isinstance(each, Trouble)]
    return troubles[0] if troubles and len(troubles) == len(found) else None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
