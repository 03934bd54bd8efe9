"""What a source of text holds and nobody reads: counted by its kind, the first of each named, and said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from noloco_node.terminal import warn

_MOST_NEWS = 64


class UnreadText:
    """Files and rows that were left out or changed. A warning comes with the first of a kind, the tenth and so on."""

    def __init__(self, tell: Callable[[str], None] | None = warn) -> None:
        """`tell`: what becomes of a warning, beside `news`."""
        self._tell = tell
        self.counts: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._news: deque[str] = deque(maxlen=_MOST_NEWS)

    def note(self, kind: str, where: str, count: int = 1) -> None:
        """Count what lies at `where`. `kind`: the rest of the sentence, the same for all that are counted together."""
        before = self.counts.get(kind, 0)
        self.counts[kind] = before + count
        self._first.setdefault(kind, where)
        if before == 0 or len(str(before)) < len(str(before + count)):
            self._say(kind)

    def end_pass(self) -> None:
        """Warn of what was counted since it was last said: all of the source has been read once."""
        for kind, count in self.counts.items():
            if self._told.get(kind) != count:
                self._say(kind)

    def _say(self, kind: str) -> None:
        sentence, self._told[kind] = self._sentence(kind), self.counts[kind]
        self._news.append(sentence)
        if self._tell is not None:
            self._tell(sentence)

    def summary(self) -> list[str]:
        """Return a sentence for each kind."""
        return [self._sentence(kind) for kind in self.counts]

    def news(self) -> list[str]:
        """Return the warnings since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _sentence(self, kind: str) -> str:
        count = self.counts[kind]
        more = "" if count == 1 else f" (the first of {count} so far)"
        return f"text: {self._first[kind]} {kind}{more}"
