"""Reads and writes recorded tables, and compares the product of today with them."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
RECORDED = DATA / "recorded"
RUN_FILE = DATA / "run.toml"
TOLERANCE = 1e-4


def written(table: Any) -> bytes:
    """Return a table as it is recorded: JSON that a diff shows line by line."""
    return json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read(name: str) -> Any:
    return json.loads((RECORDED / name).read_bytes())


def sha256(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def unlike(now: Any, then: Any, tolerance: float = TOLERANCE, where: str = "") -> Iterator[str]:
    """Yield where two tables differ. Numbers with a fraction are equal within a tolerance, all else exactly."""
    if isinstance(now, dict) and isinstance(then, dict):
        for key in sorted(now.keys() | then.keys()):
            if key not in now or key not in then:
                yield f"{where}/{key} is {'new' if key in now else 'gone'}"
            else:
                yield from unlike(now[key], then[key], tolerance, f"{where}/{key}")
    elif isinstance(now, list | tuple) and isinstance(then, list | tuple) and len(now) == len(then):
        for number, (one, other) in enumerate(zip(now, then, strict=True)):
            yield from unlike(one, other, tolerance, f"{where}/{number}")
    elif isinstance(now, float) and isinstance(then, float | int):
        if not math.isclose(now, then, rel_tol=tolerance, abs_tol=tolerance / 100):
            yield f"{where} is {now}, was {then}"
    elif now != then:
        yield f"{where} is {now!r}, was {then!r}"


def mapped(value: Any, change: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(each, change) for each in value]
    return change(value) if isinstance(value, float) else value
