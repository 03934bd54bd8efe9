"""Mutants: what may change and how, which tests try them, and the list of those that nobody could notice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.structure.mutant_tests import Outcome, Timed, concerned, in_two
from benchmarks.structure.mutants import Results, all_mutants, read_equivalents
from benchmarks.structure.mutations import mutants_of, noting
from benchmarks.structure.source import ROOT

TOY = '''"""Adds 1 and 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING or 1 < 2:
    LEVEL = 3


@record(frozen=True)
class Pair(Base, kind=4):
    first: int = 5

    def larger(self, other: Literal[6] = 7) -> int | None:
        """Return 8."""
        print(f"{other:.9f}", "é" + name)
        if not (self.first <
                other) and self.first is not None:
            return -min(other, 10)
        return self.first if other else 0.5 // 2
'''


def changes(text: str) -> list[tuple[int, str, str]]:
    return [(mutant.number, mutant.was, mutant.becomes) for mutant in mutants_of("toy.py", text)]


def changed_to(text: str) -> list[str]:
    return [mutant.becomes for mutant in mutants_of("toy.py", text)]


def test_only_operators_and_constants_of_the_logic_change() -> None:
    text = "def larger(self, other: Literal[6] = {}) -> int | None:"
    found = [(number, becomes) for number, _, becomes in changes(TOY)]
    assert found[:2] == [(15, text.format(6)), (15, text.format(8))]
    assert {number for number, _ in found} == {15, 18, 19, 20, 21}
    assert [becomes for number, becomes in found if number == 18] == [
        "if (self.first <",
        "if not (self.first <=",
        "if not (self.first >=",
    ]
    assert [becomes for number, becomes in found if number == 20] == [
        "return min(other, 10)",
        "return -max(other, 10)",
        "return -min(other, 11)",
        "return -min(other, 9)",
    ]


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("a == b", ["a != b"]),
        ("a not  in b", ["a in b"]),
        ("a is b", ["a is not b"]),
        ("(a) and (b) and c", ["(a) or (b) and c", "(a) and (b) or c"]),
        ("a += b", ["a -= b"]),
        ("(a) << (b)", ["(a) >> (b)"]),
        ("'x' % y", []),
        ("Number = int | None", []),
        ("a | b", ["a & b"]),
        ("a = True", ["a = False"]),
        ("a = 0.0", ["a = 1.0"]),
        ("a = 'é' , 0.25", ["a = 'é' , 0.125", "a = 'é' , 0.5"]),
        ("while a: pass", ["while not a: pass"]),
        ("__all__ = ['a']", []),
    ],
)
def test_each_kind_of_change(line: str, becomes: list[str]) -> None:
    assert changed_to(line) == becomes


def test_a_function_notes_its_statements_and_does_what_it_did() -> None:
    text = (
        "def f(n):\n    'doc'\n    try:\n        if n:\n            return g(n)\n        elif n == 0:\n"
        "            raise ValueError\n    except ValueError:\n        return -1\n\ndef g(n):\n    return n\n"
    )
    seen: list[int] = []
    names: dict[str, Callable[[int], int]] = {"note": seen.append}
    exec(noting(text, lambda number: f"note({number})"), names)
    assert (names["f"](2), seen, names["f"].__doc__) == (2, [3, 4, 5, 12], "doc")
    seen.clear()
    assert (names["f"](0), seen) == (-1, [3, 4, 6, 7, 9])


def test_the_tests_that_run_a_line_try_it_the_mirrored_and_the_quick_first() -> None:
    mutant = next(
        mutant for mutant in mutants_of("gossip/a.py", "def f(x):\n    return x + 1\n") if mutant.statement == 2
    )
    baseline = {
        "tests/gossip/test_b.py::test_slow": Timed(5.0, {"gossip/a.py": {2}}),
        "tests/gossip/test_b.py::test_quick": Timed(0.1, {"gossip/a.py": {2, 3}}),
        "tests/gossip/test_a.py::test_own": Timed(1.0, {"gossip/a.py": {2}}),
        "tests/gossip/test_a.py::test_another_line": Timed(0.1, {"gossip/a.py": {3}}),
        "tests/gossip/test_a.py::test_another_file": Timed(0.1, {"gossip/c.py": {2}}),
    }
    tests = concerned(mutant, baseline)
    assert [test.split("_")[-1] for test in tests] == ["own", "quick", "slow"]
    assert [len(part) for part in in_two(tests, baseline)] == [2, 1]


def test_a_line_that_runs_at_import_is_tried_by_its_module_s_own_tests_even_where_they_run_no_function() -> None:
    baseline = {
        "tests/gossip/test_a.py::test_own": Timed(1.0, {}),
        "tests/gossip/test_b.py::test_another": Timed(1.0, {}),
        "tests/gossip/test_b.py::test_user": Timed(0.1, {"gossip/a.py": {3}}),
    }
    mutant = next(iter(mutants_of("gossip/a.py", "LEAST = 1\n")))
    assert mutant.at_import
    assert [test.split("_")[-1] for test in concerned(mutant, baseline)] == ["own", "user"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "gossip/__init__.py": "",
        "gossip/a.py": (
            "def larger(x, y):\n    while y > x:\n        x = x + 1\n    return x\n\ndef unused():\n    return 1\n"
        ),
        "tests/gossip/test_a.py": (
            "from gossip.a import larger, unused\n\ndef test_larger():\n    assert larger(1, 3) == 3\n\n"
            "def test_unused():\n    unused()\n"
        ),
        "tests/pipeline/test_none.py": "def test_none():\n    pass\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n" + "addopts = '--import-mode=importlib'\npythonpath = ['.']\n",
        "setup.cfg": "",
        "setup.py": "",
        "README.md": "",
    }
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    for name in ("pipeline", "noloco_node", "benchmarks", "research", "docs"):
        (tmp_path / "project" / name).mkdir()
    return tmp_path / "project"


TRY = """
import json, sys
from pathlib import Path
from benchmarks.structure import mutant_tests, mutants
mutant_tests.LEAST_S = 1.0
project, kept, *becomes = map(str, sys.argv[1:])
results = mutants.Results(Path(kept), Path(project))
mutants.try_all([m for m in mutants.all_mutants(Path(project)) if m.becomes in becomes], results, Path(project))
"""


@pytest.mark.processes
def test_mutants_are_killed_time_out_or_survive_and_what_is_known_is_not_tried_again(
    project: Path, tmp_path: Path
) -> None:
    kinds = {"while y <= x:": "killed", "x = x - 1": "timed out", "return 0": "survived"}
    kept = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", TRY, project, kept, *kinds], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    by_line = {mutant.becomes: mutant for mutant in all_mutants(project)}
    again = Results(kept, project)
    assert {becomes: found.kind for becomes, m in by_line.items() if (found := again.get(m)) is not None} == kinds
    (project / "tests" / "gossip" / "test_more.py").write_text("def test_more():\n    pass\n")
    later = Results(kept, project)
    assert later.get(by_line["return 0"]) is None
    assert later.get(by_line["while y <= x:"]) == Outcome("killed", "tests/gossip/test_a.py::test_larger")


def test_every_equivalent_mutant_is_one_of_the_source_with_a_reason() -> None:
    listed = read_equivalents()
    texts = {each.path: (ROOT / each.path).read_text() for each in listed}
    there = {(m.path, m.was, m.becomes) for path, text in texts.items() for m in mutants_of(path, text)}
    assert [each for each in listed if (each.path, each.was, each.becomes) not in there] == []
    assert all(len(each.why.split()) > 3 for each in listed)
    assert len({(each.path, each.was, each.becomes) for each in listed}) == len(listed)
