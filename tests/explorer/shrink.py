"""A shorter schedule that breaks the same invariant: what is left in it is what matters.

Greedy, and as long as something still goes: leave out faults (halves first, then one by one), then what the network
adds, then let what lasts last for a shorter time. Every attempt is a whole run, so that their number is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from noloco_node.sim.network.link_model import Latency
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import DevicesConfig, NetworkConfig, Scenario

MOST_RUNS = 80


def shrink(scenario: Scenario, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Return the shortest schedule found for which `breaks` is still true."""
    left, changed = MOST_RUNS, True
    while changed:
        changed = False
        for steps in (_fewer_faults, _better_network, _shorter_faults):
            found, left = _follow(scenario, steps, breaks, left)
            changed = changed or found != scenario
            scenario = found
    return scenario


def _follow(
    scenario: Scenario, steps: Callable[[Scenario], Iterator[Scenario]], breaks: Callable[[Scenario], bool], left: int
) -> tuple[Scenario, int]:
    """Take each step that keeps the violation, beginning anew after one, while runs are left."""
    begun = True
    while begun:
        begun = False
        for shorter in steps(scenario):
            if left == 0:
                return scenario, 0
            left -= 1
            if breaks(shorter):
                scenario, begun = shorter, True
                break
    return scenario, left


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    count = len(scenario.fault)
    size = (count + 1) // 2
    while size:
        for begin in range(0, count, size):
            rest = scenario.fault[:begin] + scenario.fault[begin + size :]
            yield structs.replace(scenario, fault=rest)
        size //= 2


def _better_network(scenario: Scenario) -> Iterator[Scenario]:
    network, devices = scenario.network, scenario.devices
    calm = Latency(mean_s=network.latency.mean_s)
    plainer: dict[str, Any] = dict.fromkeys(("loss", "late", "duplicate", "roster_lag_s", "dials_only"), 0.0)
    for name, value in (plainer | {"latency": calm}).items():
        if getattr(network, name) != value:
            yield structs.replace(scenario, network=_with(network, name, value))
    usual = DevicesConfig()
    for name in ("slowness", "stutter_share", "step_s"):
        if getattr(devices, name) != getattr(usual, name):
            yield structs.replace(scenario, devices=structs.replace(devices, **{name: getattr(usual, name)}))


def _with(network: NetworkConfig, name: str, value: Any) -> NetworkConfig:
    return structs.replace(network, **{name: value})


def _shorter_faults(scenario: Scenario) -> Iterator[Scenario]:
    for number, fault in enumerate(scenario.fault):
        for field, least in (("for_s", 1.0), ("count", 1)):
            value = getattr(fault, field, None)
            if value is not None and value > least:
                half: Any = round(max(least, value / 2), 2) if field == "for_s" else 1
                shorter: Fault = structs.replace(fault, **{field: half})
                yield structs.replace(
                    scenario, fault=(*scenario.fault[:number], shorter, *scenario.fault[number + 1 :])
                )
