"""A small file that is whole, as it was before or as it is after, whenever the power fails or its process is killed."""

from __future__ import annotations

import os
from pathlib import Path

from noloco_node.storage.tensor_file import flush


def write(path: Path, content: bytes) -> None:
    """Write a file aside, flush it to the disk and rename it; raise `OSError` where the disk refuses."""
    aside = path.with_name(f".{path.name}.aside")
    try:
        aside.write_bytes(content)
        flush(aside)
        os.replace(aside, path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)
