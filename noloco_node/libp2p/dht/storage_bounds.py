"""How much is kept for others in hivemind's storage: bounds that no stranger can use against others.

hivemind's own bound drops what expires first when there is too much, and a stranger's records expire when it likes. So
newcomers are refused instead. Three more traits of its storage are mended here: what is stored once more with an
earlier expiry ends the life of what is there; each such attempt leaves an entry in a heap until it expires; and a
reading adds what others answer to what we keep ourselves.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from noloco_node.libp2p.hivemind_compat import LocalStorage, forget_ghosts

_MOST_KEYS = 4096
MOST_SUBKEYS = 2048
MOST_KEYS_OF_ONE = 128
"""A peer has one record for each stage that it lately served, and a few besides."""
_KEY_BYTES = 2 * 1024 * 1024
"""Of all records under one key: an answer that is twice as large cannot be sent."""
_ALL_BYTES = 128 * 1024 * 1024
"""Of all records kept for others, with what Python adds to each."""
_ENTRY_BYTES = 512
_SLACK = 1.5
"""Beyond the bounds, for what is kept already and grows."""


class BoundedStorage:
    """hivemind's storage with bounds on what is kept: under one key, in keys, and in all.

    Newcomers beyond them are refused: hivemind would rather drop what expires first, which is whom we need. So is what
    expires no later than what is there: by a fault of hivemind's that would end the later one's life as well.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage, self._store = storage, storage.store_subkey
        self._sizes: dict[Any, int] = {}
        """By key, in bytes."""

    def store(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record if there is room for it; says whether it was stored, as hivemind's `store_subkey` does."""
        kept: Any = getattr(self._storage.get(key), "value", {})
        before = kept.get(subkey)
        if before is not None and not expiration_time > before.expiration_time:
            return False
        if before is None or len(value) > len(before.value):
            size = sum(len(entry.value) for other, entry in kept.items() if other != subkey) + len(value)
            count = len(kept) + (before is None)
            if not self._has_room(key, size, count, 1.0 if before is None else _SLACK):
                return False
            if before is None and self._keys_of(subkey) >= MOST_KEYS_OF_ONE:
                return False
            self._sizes[key] = size + count * _ENTRY_BYTES
        stored = bool(self._store(key, subkey, value, expiration_time))
        forget_ghosts(self._storage)
        forget_ghosts(kept)
        return stored

    def _keys_of(self, subkey: Any) -> int:
        """Return under how many keys one peer has records here; asked once for each new record."""
        return sum(subkey in getattr(self._storage.get(key), "value", ()) for key in self._sizes)

    def _has_room(self, key: Any, size: int, count: int, slack: float) -> bool:
        sizes = self._sizes
        others = sum(sizes.values()) - sizes.get(key, 0)
        if others + size > slack * _ALL_BYTES or (key not in sizes and len(sizes) >= _MOST_KEYS):
            for other in [other for other in sizes if other not in self._storage]:
                del sizes[other]
            others = sum(sizes.values()) - sizes.get(key, 0)
        room = others + size + count * _ENTRY_BYTES <= slack * _ALL_BYTES and size <= slack * _KEY_BYTES
        return room and count <= MOST_SUBKEYS and (key in sizes or len(sizes) < _MOST_KEYS)


def shorten(kept: Any, before: Collection[str]) -> None:
    """Drop from what we keep under a key what a reading added, if that is too much: hivemind adds others' answers."""
    entries = dict(kept.items())
    if len(entries) > MOST_SUBKEYS or sum(len(entry.value) for entry in entries.values()) > _KEY_BYTES:
        for subkey in entries.keys() - before:
            del kept[subkey]
    forget_ghosts(kept)
