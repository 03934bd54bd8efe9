"""The modules of the product and the imports between them, read from syntax trees: nothing is imported for it.

An import counts wherever it stands: at the top, in a function, or under TYPE_CHECKING. A reader of a module
has to know all of them.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

PRODUCT = ("gossip", "pipeline", "noloco_node")
ROOT = Path(__file__).resolve().parents[2]

Place = Literal["top", "function", "type checking"]
Graph = Mapping[str, set[str]]
Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Import(NamedTuple):
    """One name that a module imports: a module of the product if there is one of that name, else as it is written."""

    target: str
    place: Place


@dataclass(frozen=True)
class Module:
    """One file; a package is its `__init__.py`."""

    name: str
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.name)

    @property
    def package(self) -> str:
        """The package that the file lies in."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return self.text.count("\n")

    def definitions(self) -> Iterator[tuple[str, Statement]]:
        """Yield every class and function with its name from the module on, nested ones too."""

        def walk(body: ast.AST, path: str) -> Iterator[tuple[str, Statement]]:
            for node in ast.iter_child_nodes(body):
                if isinstance(node, Statement):
                    yield f"{path}.{node.name}", node
                    yield from walk(node, f"{path}.{node.name}")
                else:
                    yield from walk(node, path)

        return walk(self.tree, self.name)


class Source:
    """All modules of the product in one version."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Take the text of every Python file by its path."""
        modules: list[Module] = []
        for path, text in sorted(files.items()):
            parts = path.removesuffix(".py").split("/")
            is_package = parts[-1] == "__init__"
            modules.append(Module(".".join(parts[:-1] if is_package else parts), is_package, text))
        self.modules = {module.name: module for module in modules}

    @property
    def packages(self) -> list[str]:
        """The names of the modules that are packages."""
        return [name for name, module in self.modules.items() if module.is_package]

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """What every module imports, in the order of the text."""
        return {name: list(self._imports(module.tree, "top")) for name, module in self.modules.items()}

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        """Which modules of the product every module imports."""
        own = self.modules.keys()
        return {name: {i.target for i in found} & own - {name} for name, found in self.imports.items()}

    def _imports(self, body: ast.AST, place: Place) -> Iterator[Import]:
        for node in ast.iter_child_nodes(body):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, place) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if node.level or node.module is None:
                    raise ValueError(f"a relative import in line {node.lineno}: {ast.unparse(node)}")
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    is_attribute = name not in self.modules and node.module in self.modules
                    yield Import(node.module if is_attribute else name, place)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._imports(node, "function")
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from self._imports(node, "type checking")
            else:
                if isinstance(node, ast.Call) and _called(node) == "import_module":
                    yield from (Import(str(a.value), place) for a in node.args[:1] if isinstance(a, ast.Constant))
                yield from self._imports(node, place)


def read_tree(root: Path = ROOT) -> Source:
    """Read the product as it lies on the disk."""
    paths = (path for top in PRODUCT for path in (root / top).rglob("*.py"))
    return Source({path.relative_to(root).as_posix(): path.read_text() for path in paths})


def read_commit(revision: str, root: Path = ROOT) -> Source:
    """Read the product as it was at a commit; raise ValueError with git's words where there is none such."""
    command = ["git", "-C", str(root), "archive", "--format=tar", revision, "--", *PRODUCT]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{revision}: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar if member.name.endswith(".py"))
        return Source({name: file.read().decode() for name, file in files if file is not None})


def unit(name: str) -> str:
    """Return which package or lone module at the top a module belongs to: gossip, pipeline, or one of noloco_node."""
    top, *rest = name.split(".")
    return rest[0] if top == "noloco_node" and rest else top


def part_of(package: str) -> Callable[[str], str | None]:
    """Return the function that says which direct part of a package a module belongs to, if it lies in there at all."""

    def part(name: str) -> str | None:
        return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else None

    return part


def contracted(graph: Graph, name_of: Callable[[str], str | None]) -> dict[str, set[str]]:
    """Return the graph of the groups that modules fall into; modules without a group are left out."""
    result: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if (group := name_of(name)) is not None:
            others = {other for target in targets if (other := name_of(target)) is not None}
            result.setdefault(group, set()).update(others - {group})
    return result


def circles(graph: Graph) -> list[list[str]]:
    """Return the largest groups in which everyone imports everyone else, over however many arrows."""
    reached = {name: _reached(graph, name) for name in graph}
    together = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return [list(group) for group in sorted(together) if len(group) > 1]


def package_circles(source: Source) -> list[list[str]]:
    """Return the circles between the parts of one package that lead through a package, by full names."""
    graphs = {name: contracted(source.graph, part_of(name)) for name in source.packages}
    found = [[f"{name}.{part}" for part in group] for name, graph in graphs.items() for group in circles(graph)]
    return [group for group in found if any(source.modules[name].is_package for name in group)]


def levels(graph: Graph) -> int:
    """Return how many stand in the longest chain of arrows; a circle is one."""
    head = {name: group[0] for group in circles(graph) for name in group}
    chain = contracted(graph, lambda name: head.get(name, name))
    depth: dict[str, int] = {}

    def visit(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max(map(visit, chain[name]), default=0)
        return depth[name]

    return max(map(visit, chain), default=0)


def count_arrows(graph: Graph) -> int:
    """Return how many arrows a graph has."""
    return sum(map(len, graph.values()))


def _called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def _reached(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - reached
        reached |= new
        left += new
    return reached
