"""Results of the laboratory that no run has made: a test of a page says what the page compares."""

from typing import Any

from research.laboratory.experiments.cell import Cell, Result


def result_of(cell: Cell, merged: float, **fields: Any) -> Result:
    """Return the result of a cell whose merged model has this loss. `fields`: of the result, in the place of these."""
    others: dict[str, Any] = {
        "single": merged,
        "spread": 0.0,
        "virtual_s": 80.0,
        "busy": 1.0,
        "fast_busy": 1.0,
        "bytes_per_step": 6e3,
        "rounds": 12.0,
        "steps_taken": (cell.steps,) * cell.replicas,
        "curve": (),
        "wall_s": 1.0,
    }
    return Result(cell=cell, merged=merged, **others | fields)
