"""Figures of the product's structure: packages and arrows, and where functions and classes are largest."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.structure.source import (
    Source,
    circles,
    contracted,
    count_arrows,
    levels,
    package_circles,
    part_of,
    unit,
)

LONG_MODULE_LINES = 350
SHOWN = 6
"""So many of the longest functions are listed, and of the like."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, int | str | list[str]]


def measure(source: Source) -> Figures:
    """Measure one version of the product."""
    modules = source.modules
    files = Counter(module.package for module in modules.values())
    lines = Counter[str]()
    for module in modules.values():
        lines[module.package] += module.lines
    definitions = [definition for module in modules.values() for definition in module.definitions()]
    functions = {name: node for name, node in definitions if isinstance(node, Function)}
    classes = {name: _attributes(node) for name, node in definitions if isinstance(node, ast.ClassDef)}
    objects = {name: found for name, found in classes.items() if found.assigned}
    records = {name: found for name, found in classes.items() if not found.assigned}
    places = Counter(i.place for found in source.imports.values() for i in found if i.target in modules)
    units = contracted(source.graph, unit)
    return {
        "files": len(modules),
        "lines": lines.total(),
        "packages and lone modules at the top": len(units),
        "levels, arrows between these": f"{levels(units)}, {count_arrows(units)}",
        "circles between packages": _joined(package_circles(source)),
        "circles between files": _joined(circles(source.graph)),
        **{f"parts, levels, arrows in {name}": figures for name, figures in _inside(source).items()},
        **{f"files, lines in {name}": f"{files[name]}, {lines[name]}" for name in sorted(files)},
        f"modules over {LONG_MODULE_LINES} lines": _largest(
            {name: module.lines for name, module in modules.items()}, over=LONG_MODULE_LINES
        ),
        "longest functions": _largest({name: _length(node) for name, node in functions.items()}),
        "functions with most parameters": _largest({name: _parameters(node) for name, node in functions.items()}),
        "objects with most attributes": _largest({name: len(found.names) for name, found in objects.items()}),
        "records with most fields": _largest({name: len(found.names) for name, found in records.items()}),
        "Optional attributes of objects": sum(len(found.optional) for found in objects.values()),
        "Optional fields of records": sum(len(found.optional) for found in records.values()),
        "objects with most Optional attributes": _largest(
            {name: len(found.optional) for name, found in objects.items()}
        ),
        "own modules imported inside functions": places["function"],
        "own modules imported under TYPE_CHECKING": places["type checking"],
        "asserts": sum(isinstance(node, ast.Assert) for module in modules.values() for node in ast.walk(module.tree)),
        "public classes with the same name": _largest(
            {name: len(found) for name, found in repeated_classes(source).items()}, over=1
        ),
    }


def repeated_classes(source: Source) -> dict[str, list[str]]:
    """Return the names that several public classes share, each with the modules that define it."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in source.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


class Attributes(NamedTuple):
    """The attributes that instances of a class have, as far as its own body tells."""

    names: set[str]
    assigned: set[str]
    """Those that a method gives it; the others are fields of a record."""
    optional: set[str]
    """Those whose annotation admits None."""


def _attributes(node: ast.ClassDef) -> Attributes:
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    fields = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    inside = list(_inside_methods(node))
    own = [found for found in inside if isinstance(found, ast.Attribute) and ast.unparse(found.value) == "self"]
    assigned = {found.attr for found in own if isinstance(found.ctx, ast.Store)}
    annotated = fields + [found for found in inside if isinstance(found, ast.AnnAssign) and found.target in own]
    return Attributes(
        names=assigned | {ast.unparse(field.target) for field in fields},
        assigned=assigned,
        optional={ast.unparse(a.target).removeprefix("self.") for a in annotated if _admits_none(a.annotation)},
    )


def _inside_methods(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield child
            yield from _inside_methods(child)


def _admits_none(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.BinOp):
        return _admits_none(annotation.left) or _admits_none(annotation.right)
    is_none = isinstance(annotation, ast.Constant) and annotation.value is None
    return is_none or (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Optional"))


def _length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: Function) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    rest = (arguments.vararg, arguments.kwarg)
    return sum(argument.arg not in ("self", "cls") for argument in named) + sum(map(bool, rest))


def _inside(source: Source) -> dict[str, str]:
    """Return the figures of every package that has parts."""
    graphs = {name: contracted(source.graph, part_of(name)) for name in source.packages}
    return {
        name: f"{len(graph)}, {levels(graph)}, {count_arrows(graph)}"
        for name, graph in graphs.items()
        if name != "noloco_node" and len(graph) > 1
    }


def _joined(groups: list[list[str]]) -> list[str]:
    return [" ".join(group) for group in groups]


def _largest(sizes: Mapping[str, int], over: int = 0) -> list[str]:
    """Return the largest with their sizes: all above a bound, or a few."""
    ordered = sorted((-size, name) for name, size in sizes.items() if size > over)
    return [f"{-size} {name}" for size, name in (ordered if over else ordered[:SHOWN])]
