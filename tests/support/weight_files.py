"""Files as weights lie in them, of no meaning."""

import json
import random
from pathlib import Path

from noloco_node.storage.weight_store import PIECE_BYTES, WeightFile, described


def write_file(path: Path, *, size: int = 3 * PIECE_BYTES + 7, seed: int = 0) -> WeightFile:
    """Write a safetensors file of two tensors, the second of them in the last piece."""
    middle = size - 100
    head = {"early": (0, middle), "late": (middle, size)}
    table = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in head.items()}
    encoded = json.dumps(table).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + random.Random(seed).randbytes(size))
    return described(path)
