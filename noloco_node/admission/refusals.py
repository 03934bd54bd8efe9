"""How a peer that has no right to something is told so, and how that is said to a person."""

from __future__ import annotations

import re
from collections.abc import Iterable

from noloco_node.errors import Exit, UserError

_TO_US = (("it has", "you have"), ("its", "your"), ("it", "you"))


def not_for(peer: str) -> str:
    """Return how an answer begins to a peer that has no right to it."""
    return f"not for {peer}: "


def not_admitted(why: str) -> UserError:
    """Return the error of a peer that the run does not let in, or no longer."""
    return UserError(
        "This run does not let us in.",
        why=why,
        hint="ask the owner of the run for an invite of your own; each is for one identity (--home), and expires",
        code=Exit.NOT_ADMITTED,
    )


def no_ticket(why: str) -> UserError:
    """Return the error of a peer that no signing peer answers."""
    return UserError(
        "Nobody gives us a ticket for this run.",
        why=why,
        hint="ask whether a bootstrap peer runs that signs tickets, or ask the owner of the run for an invite",
        code=Exit.UNREACHABLE,
    )


def addressed(refusal: str) -> str:
    """Return what a peer says about us, such as `it has shown no ticket`, as it is said to us: in printable letters."""
    text = "".join(letter for letter in refusal[:200] if letter.isprintable())
    for third, second in _TO_US:
        text = re.sub(rf"\b{third}\b", second, text)
    return text


def told(refusals: Iterable[str]) -> str:
    """Return in one line what bootstrap peers say about us, each sentence once."""
    return "; ".join(f"the bootstrap peer says: {each}" for each in dict.fromkeys(map(addressed, refusals)))
