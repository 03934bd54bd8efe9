"""The figures of the product's structure, from a toy product that has one of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure.figures import measure, repeated_classes
from benchmarks.structure.source import circles, contracted, levels, package_circles, read_tree, unit
from benchmarks.structure.ways import FOLLOW

TOY = {
    "gossip/__init__.py": "",
    "gossip/rule.py": "class Step: ...\n",
    "noloco_node/__init__.py": "",
    "noloco_node/errors.py": "class Problem(Exception): ...\n",
    "noloco_node/low/__init__.py": "",
    "noloco_node/low/base.py": """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noloco_node.high.top import Top


class Step:
    first: int
    second: Top | None = None
""",
    "noloco_node/high/__init__.py": "",
    "noloco_node/high/top.py": """
import importlib

from gossip.rule import Step
from noloco_node import errors


class Top:
    def __init__(self, one: Step, *, two: int = 0, **rest: int) -> None:
        from noloco_node.low import base

        self.one, (self.two, self.base) = one, (two, base)
        self.three: int | None = None
        self.two += 1
        assert importlib.import_module("gossip.rule")

    def grow(self) -> None:
        def inner() -> None:
            self.four = [errors]

        self.three = 3
        inner()
""",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_count_wherever_they_stand(root: Path) -> None:
    source = read_tree(root)
    assert source.graph == {
        "gossip": set(),
        "gossip.rule": set(),
        "noloco_node": set(),
        "noloco_node.errors": set(),
        "noloco_node.high": set(),
        "noloco_node.high.top": {"gossip.rule", "noloco_node.errors", "noloco_node.low.base"},
        "noloco_node.low": set(),
        "noloco_node.low.base": {"noloco_node.high.top"},
    }
    assert {(i.target, i.place) for i in source.imports["noloco_node.high.top"]} == {
        ("importlib", "top"),
        ("gossip.rule", "top"),
        ("noloco_node.errors", "top"),
        ("noloco_node.low.base", "function"),
        ("gossip.rule", "function"),
    }
    assert [i.place for i in source.imports["noloco_node.low.base"]] == ["top", "type checking"]


def test_circles_and_levels() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"d"}}
    assert circles(graph) == [["b", "c"]]
    assert levels(graph) == 3
    assert levels({}) == 0


def test_a_circle_of_packages_is_found(root: Path) -> None:
    source = read_tree(root)
    assert package_circles(source) == [["noloco_node.high", "noloco_node.low"]]
    assert levels(contracted(source.graph, unit)) == 2


def test_the_figures_of_the_toy(root: Path) -> None:
    source = read_tree(root)
    assert repeated_classes(source) == {"Step": ["gossip.rule", "noloco_node.low.base"]}
    figures = measure(source)
    assert figures["packages and lone modules at the top"] == 5
    assert figures["circles between files"] == ["noloco_node.high.top noloco_node.low.base"]
    assert figures["files, lines in noloco_node.low"] == "2, 10"
    assert figures["objects with most attributes"] == ["5 noloco_node.high.top.Top"]
    assert figures["records with most fields"][0] == "2 noloco_node.low.base.Step"
    assert (figures["Optional attributes of objects"], figures["Optional fields of records"]) == (1, 1)


MOST_MODULES = {"microbatch": 14, "round": 12, "field": 4, "ban": 10}
"""A reader opens at most so many to follow each; these only get smaller (`join` takes half a minute to follow)."""


@pytest.mark.network
@pytest.mark.parametrize("name", MOST_MODULES)
def test_ways_through_the_product_do_not_get_longer(name: str) -> None:
    way = FOLLOW[name]()
    if way.count > MOST_MODULES[name]:  # on a busy machine other work of the node may fall into the trace
        way = FOLLOW[name]()
    assert way.count <= MOST_MODULES[name], way.modules
    assert len(way.more.get("from worker to socket", ())) <= 4
