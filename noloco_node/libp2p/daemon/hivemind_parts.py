"""The parts of hivemind in use, as one value, and how a package is entered without running its `__init__`.

`noloco_node.libp2p.network` alone imports them; the modules beside it are handed this tuple.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple


class HivemindParts(NamedTuple):
    """hivemind's classes, the module of the daemon's protobuf `messages`, and the path of the daemon's program."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    messages: Any
    binary: str

    def peer_bytes(self, peer: str) -> bytes:
        """Return a peer id as the daemon takes it; ConnectionRefusedError when it is none."""
        try:
            return bytes(self.PeerID.from_base58(peer).to_bytes())
        except ValueError:
            raise ConnectionRefusedError(f"{peer!r} is no peer id") from None

    def peer_text(self, peer: bytes) -> str:
        """Return a peer id in base 58."""
        return str(self.PeerID(peer).to_base58())


def enter_shell(name: str, path: str, names: Mapping[str, str]) -> None:
    """Enter a package in `sys.modules` whose modules can be imported and whose `__init__` is not run."""
    shell = types.ModuleType(name)
    shell.__path__ = [path]
    shell.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def find(attribute: str) -> Any:
        if attribute in names:
            return getattr(importlib.import_module(names[attribute]), attribute)
        raise AttributeError(attribute)

    shell.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = shell
