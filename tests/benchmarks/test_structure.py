"""The figures of the product's structure, from a toy product that has one of everything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.structure.__main__ import table
from benchmarks.structure.figures import measure, repeated_classes
from benchmarks.structure.source import (
    Source,
    circles,
    contracted,
    levels,
    package_circles,
    read_commit,
    read_tree,
    unit,
)
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


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError, match="relative import in line 1"):
        _ = Source({"gossip/rule.py": "from . import other\n"}).imports


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
    assert figures["longest functions"] == [
        "7 noloco_node.high.top.Top.__init__",
        "6 noloco_node.high.top.Top.grow",
        "2 noloco_node.high.top.Top.grow.inner",
    ]
    assert figures["functions with most parameters"][0] == "3 noloco_node.high.top.Top.__init__"
    assert figures["objects with most attributes"] == ["5 noloco_node.high.top.Top"]
    assert figures["records with most fields"][0] == "2 noloco_node.low.base.Step"
    assert (figures["Optional attributes of objects"], figures["Optional fields of records"]) == (1, 1)
    assert figures["own modules imported inside functions"] == 2
    assert figures["own modules imported under TYPE_CHECKING"] == 1
    assert figures["asserts"] == 1
    assert figures["public classes with the same name"] == ["2 Step"]


def test_a_commit_is_measured_beside_the_working_tree(root: Path) -> None:
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    (root / "pipeline").mkdir()
    (root / "pipeline" / "__init__.py").write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "toy"]):
        subprocess.run([*git, *command], check=True)
    (root / "gossip" / "codec.py").write_text('"""New."""\n')
    before, after = measure(read_commit("HEAD", root)), measure(read_tree(root))
    assert before == measure(Source({**TOY, "pipeline/__init__.py": ""}))
    lines = table({"before": before, "after": after}).splitlines()
    assert lines[0].split() == ["before", "after"]
    assert lines[1].split() == ["files", "9", "10"]


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-commit"):
        read_commit("no-such-commit")


MOST_MODULES = {"microbatch": 28, "round": 18, "field": 6, "ban": 19}
"""A reader opens at most so many to follow each; these only get smaller (`join` takes half a minute to follow)."""


@pytest.mark.network
@pytest.mark.parametrize("name", MOST_MODULES)
def test_ways_through_the_product_do_not_get_longer(name: str) -> None:
    way = FOLLOW[name]()
    assert way.count <= MOST_MODULES[name], way.modules
    assert len(way.more.get("from worker to socket", ())) <= 5
