"""How much is kept for others in hivemind's storage: bounds that no stranger can use against others.

hivemind's own bound drops what expires first when there is too much, and a stranger's records expire when it likes. So
newcomers are refused instead. Three more traits of its storage are mended here: what is stored once more with an
earlier expiry ends the life of what is there; each such attempt leaves an entry in a heap until it expires; and a
reading adds what others answer to what we keep ourselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Any

_MOST_KEYS = 4096
MOST_SUBKEYS = 2048
_KEY_BYTES = 2 * 1024 * 1024
"""Of all records under one key: an answer that is twice as large cannot be sent."""
_ALL_BYTES = 128 * 1024 * 1024
"""Of all records kept for others, with what Python adds to each."""
_ENTRY_BYTES = 512
_MOST_GHOSTS = 64
_SLACK = 1.5
"""Beyond the bounds, for what is kept already and grows."""


def bounded_store(storage: Any) -> Callable[..., bool]:
    """Return `store_subkey` of hivemind's storage with bounds on what is kept: under one key, in keys, and in all.

    Newcomers beyond them are refused: hivemind would rather drop what expires first, which is whom we need. So is what
    expires no later than what is there: by a fault of hivemind's that would end the later one's life as well.
    """
    store, sizes = storage.store_subkey, dict[Any, int]()

    def has_room(key: Any, size: int, count: int, slack: float) -> bool:
        others = sum(sizes.values()) - sizes.get(key, 0)
        if others + size > slack * _ALL_BYTES or (key not in sizes and len(sizes) >= _MOST_KEYS):
            for other in [other for other in sizes if other not in storage]:
                del sizes[other]
            others = sum(sizes.values()) - sizes.get(key, 0)
        room = others + size + count * _ENTRY_BYTES <= slack * _ALL_BYTES and size <= slack * _KEY_BYTES
        return room and count <= MOST_SUBKEYS and (key in sizes or len(sizes) < _MOST_KEYS)

    def bounded(key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        kept: Any = getattr(storage.get(key), "value", {})
        before = kept.get(subkey)
        if before is not None and not expiration_time > before.expiration_time:
            return False
        if before is None or len(value) > len(before.value):
            size = sum(len(entry.value) for other, entry in kept.items() if other != subkey) + len(value)
            count = len(kept) + (before is None)
            if not has_room(key, size, count, 1.0 if before is None else _SLACK):
                return False
            sizes[key] = size + count * _ENTRY_BYTES
        stored = bool(store(key, subkey, value, expiration_time))
        forget_ghosts(storage)
        forget_ghosts(kept)
        return stored

    return bounded


def shorten(kept: Any, before: Collection[str]) -> None:
    """Drop from what we keep under a key what a reading added, if that is too much: hivemind adds others' answers."""
    entries = dict(kept.items())
    if len(entries) > MOST_SUBKEYS or sum(len(entry.value) for entry in entries.values()) > _KEY_BYTES:
        for subkey in entries.keys() - before:
            del kept[subkey]
    forget_ghosts(kept)


def forget_ghosts(timed: Any) -> None:
    """Shorten the heap of a timed storage of hivemind's, which grows with everything that is stored once more."""
    heap = getattr(timed, "expiration_heap", None)
    if heap is not None and len(heap) > 2 * len(timed.key_to_heap) + _MOST_GHOSTS:
        heap[:] = timed.key_to_heap.values()
        heapq.heapify(heap)
