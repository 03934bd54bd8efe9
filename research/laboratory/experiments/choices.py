"""Which choices a method was given, so that no two are held against each other of which one had fewer.

The number format of what travels, dynamic steps, weighed means and rounds that grow apart help any method that averages
weights. Where one method has them and another has not, their difference says what the choices give, not the methods.
"""

from __future__ import annotations

from collections.abc import Iterable

from research.laboratory.experiments.cell import Cell
from research.laboratory.running.results import Measured

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}


def lacks(cell: Cell, own: Cell) -> tuple[str, ...]:
    """Return which of another cell's choices a cell was not given, in words."""
    lacking = {
        own.codec: BITS[cell.codec] > BITS[own.codec],
        "dynamic steps": own.dynamic and not cell.dynamic,
        "weighed means": own.weighed and not cell.weighed,
        "growing rounds": own.late_inner_steps is not None and cell.late_inner_steps is None,
    }
    return tuple(words for words, is_so in lacking.items() if is_so)


def lacking(data: Measured, name: str) -> tuple[str, ...]:
    """Return which choices of asynchronous gossip a recipe was not given; none where it averages no weights."""
    cell, own = data.cell(name), data.cell("ours")
    if cell is None or own is None or cell.method in ("parallel", "independent"):
        return ()
    return lacks(cell, own)


def is_other_method(data: Measured, name: str) -> bool:
    """Return whether a recipe is of another method than asynchronous gossip."""
    cell, own = data.cell(name), data.cell("ours")
    return cell is not None and own is not None and cell.method != own.method


def said_of_unequal(data: Measured, names: Iterable[str]) -> str:
    """Return which of these other methods had fewer choices than asynchronous gossip, and that no order follows."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        if is_other_method(data, name) and (less := lacking(data, name)):
            found.setdefault(less, []).append(name)
    if not found:
        return ""
    words = "; ".join(f"{', '.join(those)} without {', '.join(less)}" for less, those in found.items())
    return f"Run with fewer choices than asynchronous gossip, so that no order against it follows: {words}."
