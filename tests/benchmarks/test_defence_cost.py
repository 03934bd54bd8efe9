"""The benchmark of what defences cost replaces production functions: its replacements take the same arguments."""

from inspect import signature

from benchmarks.robustness.defence_cost import without_influence
from gossip.rounds.outer_optimiser import OuterOptimiser


def _parameters() -> list[list[str]]:
    return [list(signature(each).parameters)[1:] for each in (OuterOptimiser.bound_fast, OuterOptimiser.bound_slow)]


def test_functions_without_influence_take_the_arguments_of_those_that_they_replace() -> None:
    parameters = _parameters()
    with without_influence():
        assert _parameters() == parameters
