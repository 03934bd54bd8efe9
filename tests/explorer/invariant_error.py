"""An invariant that does not hold, and an error in one line."""

from __future__ import annotations

import traceback

from noloco_node.errors import leaves


class InvariantBroken(AssertionError):
    """An invariant does not hold. `kind`: which; `at_s`: virtual seconds."""

    def __init__(self, kind: str, at_s: float, sentence: str) -> None:
        super().__init__(f"{kind}, at {at_s:.2f} s: {sentence}")
        self.kind, self.at_s, self.sentence = kind, at_s, sentence

    def __reduce__(self) -> tuple[type[InvariantBroken], tuple[str, float, str]]:
        """Let a process tell another; an exception would be made anew from its text alone."""
        return type(self), (self.kind, self.at_s, self.sentence)


def told(error: BaseException) -> str:
    """Return what failed and where, in one line; of a group, the first of it."""
    inner = leaves(error)[0]
    frames = traceback.extract_tb(inner.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(inner).__name__}: {inner}{where}"
