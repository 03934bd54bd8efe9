"""The text of a scenario file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from noloco_node.sim.scenario.scenario import Scenario


def scenario_text(scenario: Scenario) -> str:
    """Return the text of a scenario file; decoding it gives the same scenario."""
    plain, usual = msgspec.to_builtins(scenario), msgspec.to_builtins(Scenario())
    lines = list(
        _pairs({key: value for key, value in plain.items() if not isinstance(value, dict | list | tuple)}, usual)
    )
    for section in ("swarm", "network", "devices"):
        found = list(_pairs(plain[section], usual[section]))
        lines += ["", f"[{section}]", *found] if found else []
    for fault in plain["fault"]:
        lines += ["", "[[fault]]", *_pairs(fault, {})]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any], usual: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None and (key not in usual or usual[key] != value):
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_pairs(value, {})) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    # A string, number or truth value of JSON is one of TOML.
    return json.dumps(value)
