"""Errors that end a command: one clear message (what, why, what to try) and a documented exit code."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """A run file, an invite, an identity or a data source is wrong; the message names the field or the file."""
    UNREACHABLE = 4
    """Nobody could be reached who is needed: no bootstrap peer (the message says which address failed, and why),
    nobody with the weights of a stage, or no hub with the model or the data."""
    OTHER_RUN = 5
    """The peers that answered, or those of the invite, belong to another run or use another version of the protocol."""
    HOME_IN_USE = 6
    """Another node already uses this home, or its identity is in use elsewhere; or the home was moved or removed while
    its node ran."""
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
    NOT_ADMITTED = 12
    """The run does not let this peer in: no ticket, or one that has expired or was revoked; the message says which."""
    DEVICE_LOST = 13
    """The device failed while it computed, and computes nothing any more for this process. The slow weights are saved;
    another start may find it well."""
    DATA = 14
    """Rows of the data do not fit `data.form`, or the tokenizer has no chat template; the message says which."""
    INTERRUPTED = 130
    """Interrupted before the work was done. A node between two of its sessions leaves with 0."""


NEEDS_A_PERSON = frozenset(
    (Exit.USAGE, Exit.CONFIG, Exit.OTHER_RUN, Exit.HOME_IN_USE, Exit.DEVICE, Exit.UNFIT, Exit.NOT_ADMITTED, Exit.DATA)
)
"""After these another start would end alike: what supervises a node starts it again after every other failure.

The units in docs/systemd and docker/README.md repeat this list, and a test compares them."""

COMPLAINT = "noloco-node: "  # begins what a command says on its way out


class UserError(Exception):
    """An error that a person can act on: what happened, why, and what to try."""

    def __init__(self, what: str, *, why: str, hint: str, code: Exit) -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.code = what, why, hint, code

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  try: {self.hint}"


def usage_error(what: str, why: str, hint: str) -> UserError:
    """Return the error of a wrong command line, or of a wrong call from a program."""
    return UserError(what, why=why, hint=hint, code=Exit.USAGE)


def config_error(what: str, why: str, hint: str) -> UserError:
    """Return the error of a run file, a data source or a scenario."""
    return UserError(what, why=why, hint=hint, code=Exit.CONFIG)


def storage_error(what: str, why: str, hint: str) -> UserError:
    """Return the error of a disk that refuses."""
    return UserError(what, why=why, hint=hint, code=Exit.STORAGE)


def is_full_disk(error: BaseException) -> bool:
    """Whether the system wrote nothing because the disk, or what may be used of it, is full or read-only."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def reason_of(error: Exception) -> str:
    """Say what the system refused, and at which file, without its number; what another error says."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def one_line(error: object, most: int = 500) -> str:
    """Return what an error says in one line of at most so many letters; of one that says nothing, its kind.

    The letters are printable, for an error may quote a stranger.
    """
    text = "".join(letter if letter.isprintable() else " " for letter in str(error)[: 4 * most])
    return " ".join(text.split())[:most] or type(error).__name__


@contextmanager
def os_errors_as(kind: Callable[[str, str, str], UserError], what: str, hint: str) -> Iterator[None]:
    """Raise an `OSError` of the body as a `UserError` whose reason is what the system refused."""
    try:
        yield
    except OSError as error:
        raise kind(what, reason_of(error), hint) from error


def causes(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group, or else the exception itself.

    Conversations lost beside the death of our own daemon follow from it, and are left out.
    """
    found = leaves(error)
    if any(isinstance(each, UserError) and each.code is Exit.DAEMON for each in found):
        return [each for each in found if not isinstance(each, ConnectionError)]
    return found


def user_error_of(error: BaseException | None) -> UserError | None:
    """Return the `UserError` that an exception is, or that is its only kind of cause."""
    found = [] if error is None else causes(error)
    troubles = [each for each in found if isinstance(each, UserError)]
    return troubles[0] if troubles and len(troubles) == len(found) else None


def leaves(error: BaseException) -> list[BaseException]:
    """Return all exceptions in a group and its groups, or else the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]
