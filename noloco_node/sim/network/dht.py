"""The DHT of the simulation: records that expire, readings that lag, and two truths while the network is divided.

A record keeps a short history: a reading may show the world of some seconds ago, a reader in a partition finds what its
own side published and what was known before, and afterwards both sides find what lives longest. Records are not signed
here: one that a peer files under another's name is counted and refused. Without lag and partition all readers of a key
share one immutable mapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class _Version(NamedTuple):
    """One publication; `side` is None when both sides of a partition may know it."""

    value: bytes
    published_s: float
    expires_s: float
    side: int | None


class _View:
    """The records that readers on one side find under a key until `until_s`."""

    __slots__ = ("shown", "until_s", "values")

    def __init__(self, values: dict[str, bytes], until_s: float) -> None:
        self.values, self.until_s = values, until_s
        self.shown: Mapping[str, bytes] | None = None


class SimDht:
    """All records of one simulation, by key and subkey. Times are virtual seconds."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, list[_Version]]] = {}
        self._views: dict[tuple[str, int | None], _View] = {}
        self._published = self._declined = self._rebuilt = self._forged = 0

    def statistics(self) -> dict[str, int | float]:
        """Return how many records were published, declined and forged, how many are kept, and views rebuilt."""
        kept = sum(len(history) for records in self._versions.values() for history in records.values())
        return {
            "records.published": self._published,
            "records.declined": self._declined,
            "records.forged": self._forged,
            "records.kept": kept,
            "records.rebuilt": self._rebuilt,
        }

    def publish(
        self,
        place: tuple[str, str],
        record: tuple[bytes, float],
        now_s: float,
        *,
        side: int | None,
        author: str | None = None,
    ) -> bool:
        """Store `record` = (value, lifetime in seconds) at `place` = (key, subkey); False when the one that this side
        knows lives longer, or the subkey is another's than its author's. None is the author that it should have.
        """
        (key, subkey), (value, lifetime_s) = place, record
        if author not in (None, subkey):
            self._forged += 1
            return False
        expires_s = now_s + lifetime_s
        history = self._versions.setdefault(key, {}).setdefault(subkey, [])
        known = _newest(history, now_s, side)
        if known is not None and known.expires_s > expires_s:
            self._declined += 1
            return False
        history.append(_Version(value, now_s, expires_s, side))
        self._published += 1
        view = self._views.get((key, side))
        if view is not None:
            if view.shown is not None:
                view.values, view.shown = view.values.copy(), None
            view.values[subkey] = value
            view.until_s = min(view.until_s, expires_s)
        return True

    def forget(self, place: tuple[str, str], before_s: float, now_s: float) -> None:
        """Drop the history at `place` = (key, subkey) that no reading asks for which looks back to `before_s`.

        The last version from before then is kept, and so is the last but one when the last is of just now: should the
        lag grow, a record is then old rather than absent. Of several from the same moment only the last can be read.
        """
        records = self._versions[place[0]]
        kept: list[_Version] = []
        covered: dict[int | None, None] = {}
        replaced_s: dict[int | None, float] = {}
        for version in reversed(records[place[1]]):
            if version.expires_s <= now_s or version.side in covered:
                continue
            if replaced_s.get(version.side) == version.published_s:
                continue
            replaced_s[version.side] = version.published_s
            kept.append(version)
            if version.published_s < before_s:
                covered[version.side] = None
        kept.reverse()
        records[place[1]] = kept

    def read(self, key: str, now_s: float, *, lag_s: float, side: int | None) -> Mapping[str, bytes]:
        """Return the live records under `key` by subkey, as a reader on `side` found them `lag_s` ago."""
        if lag_s > 0.0:
            return self._look_back(key, now_s, now_s - lag_s, side)
        view = self._views.get((key, side))
        if view is None or now_s >= view.until_s:
            view = self._views[key, side] = self._rebuild(key, now_s, side)
        if view.shown is None:
            view.shown = MappingProxyType(view.values)
        return view.shown

    def unite(self) -> None:
        """Let everybody know of everything: at the beginning and at the end of a partition."""
        self._views.clear()
        for records in self._versions.values():
            for subkey, history in records.items():
                shared = [version._replace(side=None) for version in history]
                records[subkey] = sorted(shared, key=lambda version: version.expires_s)

    def _look_back(self, key: str, now_s: float, then_s: float, side: int | None) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for subkey, history in self._versions.get(key, {}).items():
            version = _newest(history, then_s, side)
            if version is not None and version.expires_s > now_s:
                found[subkey] = version.value
        return found

    def _rebuild(self, key: str, now_s: float, side: int | None) -> _View:
        self._rebuilt += 1
        view = _View({}, math.inf)
        records = self._versions.get(key, {})
        for subkey in [name for name, history in records.items() if all(old.expires_s <= now_s for old in history)]:
            del records[subkey]
        for subkey, history in records.items():
            version = _newest(history, now_s, side)
            if version is not None and version.expires_s > now_s:
                view.values[subkey] = version.value
                view.until_s = min(view.until_s, version.expires_s)
        return view


def _newest(history: list[_Version], then_s: float, side: int | None) -> _Version | None:
    for version in reversed(history):
        if version.published_s <= then_s and (version.side is None or version.side == side):
            return version
    return None
