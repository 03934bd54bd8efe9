"""When the outer rule draws replicas together: apart from it, so that a run file is checked without loading torch."""

from __future__ import annotations


def stability_bound(alpha: float) -> float:
    """Return the gamma below which (and above 0) the disagreement of many randomly paired replicas contracts."""
    return 2.0 * (1.0 - alpha * alpha)
