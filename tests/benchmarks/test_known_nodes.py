"""Nodes near a key that stay do not become the only ones that a peer knows."""

from statistics import mean

import pytest

from benchmarks.scale.known_nodes import known, main


@pytest.mark.parametrize("pause_s", [60.0, 77.0])
def test_liars_that_stay_hide_hardly_a_record_while_nodes_live_half_an_hour(pause_s: float) -> None:
    found = [known(seed, 1800.0, pause_s, liars=3) for seed in range(5)]
    assert mean(each.hidden for each in found) < 0.01, "0.48 where nodes that have gone are not replaced"
    assert all(each.searches <= 8 for each in found), "a search every five minutes would be 24 in two hours"


def test_the_command_prints_a_line_for_each_life_and_pause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--life-minutes", "200", "--seeds", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
