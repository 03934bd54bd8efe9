"""Small mistakes that a programmer could make: each changes one operator or constant of a module's text.

Only the syntax tree decides what may change, so that a comment stays where it is and a difference is one line. What no
test can or need notice is left alone: annotations, imports for type checking, decorators, arguments of a class
statement, defaults of a record's fields, and everything that is a string.
"""

from __future__ import annotations

import ast
import hashlib
import io
import token
import tokenize
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

COMPARISONS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
}
ARITHMETIC = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "*",
    "%": "*",
    "**": "*",
    "&": "|",
    "|": "&",
    "^": "&",
    "<<": ">>",
    ">>": "<<",
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Condition = ast.If | ast.While | ast.IfExp


class Mutant(NamedTuple):
    """One changed operator or constant of one file."""

    path: str
    number: int
    """The line of the change, from 1."""
    was: str
    """The line as it is, without indentation, and as it becomes."""
    becomes: str
    statement: int
    """The first line of the statement: only a test that runs it may notice."""
    at_import: bool
    """Whether the line runs when the module is imported, so for every test."""
    occurrence: int
    """Tells apart the same change of equal lines of one file."""
    text: str
    """The whole file after the change."""

    @property
    def name(self) -> str:
        """What names it in every version of the file that has the same line, wherever the line has moved."""
        return "\n".join((self.path, self.was, self.becomes, str(self.occurrence)))


class _Change(NamedTuple):
    start: int
    end: int
    new: str
    node: ast.AST


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    found: list[Mutant] = []
    seen: dict[tuple[str, str], int] = {}
    finder = _Finder(text)
    for change in sorted(finder.changes(), key=lambda change: change[:3]):
        number = finder.line_of(change.start)
        changed = text[: change.start] + change.new + text[change.end :]
        was, becomes = text.split("\n")[number - 1].strip(), changed.split("\n")[number - 1].strip()
        occurrence = seen[was, becomes] = seen.get((was, becomes), -1) + 1
        statement, at_import = finder.place_of(change.node)
        found.append(Mutant(path, number, was, becomes, statement, at_import, occurrence, changed))
    return found


def draw(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return so many of them at random.

    A hash of seed and mutant decides, so that a change of one file leaves what is drawn of the others as it was.
    """

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed}\n{mutant.name}".encode()).digest()

    return sorted(mutants, key=lot)[:count]


def noting(text: str, note: Callable[[int], str]) -> str:
    """Return a module that does the same, and before each statement of a function what `note` says of its line."""
    tree = ast.parse(text)
    for function in [node for node in ast.walk(tree) if isinstance(node, Function)]:
        _note(function, note)
    return ast.unparse(tree)


def _note(node: ast.AST, note: Callable[[int], str]) -> None:
    for _, value in ast.iter_fields(node):
        if not isinstance(value, list) or not value:
            continue
        if isinstance(value[0], ast.ExceptHandler | ast.match_case):
            for part in value:
                _note(part, note)
        elif isinstance(value[0], ast.stmt):
            inside = list(value)
            docstring = isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None
            value[:] = inside[:docstring]
            for statement in inside[docstring:]:
                value += [*ast.parse(note(statement.lineno)).body, statement]
                if not isinstance(statement, Function):
                    _note(statement, note)


class _Finder:
    """Finds the changes of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._operators = [
            (self._starts[item.start[0] - 1] + item.start[1], item.string)
            for item in tokenize.generate_tokens(io.StringIO(text).readline)
            if item.type == token.OP or item.string in ("is", "in", "not", "and", "or")
        ]

    def changes(self) -> Iterator[_Change]:
        """Yield all of them."""
        yield from self._of(self._tree)

    def line_of(self, offset: int) -> int:
        """Return the number of the line that holds a character."""
        return bisect_left(self._starts, offset + 1)

    def place_of(self, node: ast.AST) -> tuple[int, bool]:
        """Return the line where the statement begins, and whether it runs at import."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        place: ast.AST | None = self._parents.get(node)
        while place is not None and not isinstance(place, Function):
            place = self._parents.get(place)
        return node.lineno, place is None

    def _of(self, node: ast.AST) -> Iterator[_Change]:
        match node:
            case ast.JoinedStr():
                return
            case ast.Compare():
                yield from self._comparison(node)
            case ast.BoolOp():
                for one, other in zip(node.values, node.values[1:], strict=False):
                    yield self._swap(node, one, other, "or" if isinstance(node.op, ast.And) else "and")
            case ast.BinOp() | ast.AugAssign():
                yield from self._arithmetic(node)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start = self._start(node)
                end = start + len("not " if isinstance(node.op, ast.Not) else "-")
                yield _Change(start, end, "", node)
            case ast.Constant():
                yield from self._constant(node)
            case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_NAMES:
                yield _Change(self._start(node.func), self._end(node.func), SWAPPED_NAMES[name], node)
        if isinstance(node, Condition):
            yield from self._condition(node.test)
        for child in self._kept(node):
            yield from self._of(child)

    def _kept(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parts of a node that may change."""
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.ClassDef) and name != "body":
                continue
            if isinstance(node, ast.AnnAssign) and isinstance(self._parents[node], ast.ClassDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and name != "orelse":
                continue
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST))

    def _comparison(self, node: ast.Compare) -> Iterator[_Change]:
        for one, other in zip([node.left, *node.comparators], node.comparators, strict=False):
            start, end = self._operator(one, other)
            for new in COMPARISONS[" ".join(self._text[start:end].split())]:
                yield _Change(start, end, new, node)

    def _arithmetic(self, node: ast.BinOp | ast.AugAssign) -> Iterator[_Change]:
        if isinstance(node, ast.BinOp):
            one, other = node.left, node.right
            texts = any(isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (one, other))
            if texts or (isinstance(node.op, ast.BitOr) and _is_type(one) and _is_type(other)):
                return
        else:
            one, other = node.target, node.value
        start, end = self._operator(one, other)
        old = self._text[start:end]
        if new := ARITHMETIC.get(old.removesuffix("=")):
            yield _Change(start, end, new + "=" * old.endswith("="), node)

    def _constant(self, node: ast.Constant) -> Iterator[_Change]:
        value = node.value
        if isinstance(value, bool):
            news = [str(not value)]
        elif isinstance(value, int):
            news = [str(value + 1), str(value - 1) if value else "(-1)"]
        elif isinstance(value, float):
            news = [repr(value * 2), repr(value / 2)] if value else ["1.0"]
        else:
            return
        for new in news:
            yield _Change(self._start(node), self._end(node), new, node)

    def _condition(self, test: ast.expr) -> Iterator[_Change]:
        simple = not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant | ast.NamedExpr)
        if simple and "TYPE_CHECKING" not in ast.unparse(test):
            start = self._start(test)
            yield _Change(start, start, "not ", test)

    def _swap(self, node: ast.AST, one: ast.expr, other: ast.expr, new: str) -> _Change:
        start, end = self._operator(one, other)
        return _Change(start, end, new, node)

    def _operator(self, one: ast.expr, other: ast.expr) -> tuple[int, int]:
        """Return where the operator between two operands stands; it may be two words."""
        low, high = self._end(one), self._start(other)
        between = [(start, word) for start, word in self._operators if low <= start < high and word not in "()"]
        return between[0][0], between[-1][0] + len(between[-1][1])

    def _start(self, node: ast.expr) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr) -> int:
        return self._offset(node.end_lineno or 0, node.end_col_offset or 0)

    def _offset(self, number: int, column: int) -> int:
        """Return the place of a character in the text; the tree counts bytes."""
        line = self._lines[number - 1]
        return self._starts[number - 1] + len(line.encode()[:column].decode())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_type(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) and _is_type(node.right)
    if isinstance(node, ast.Subscript):
        return _is_type(node.value)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    builtin = name in ("int", "float", "str", "bytes", "bool", "tuple", "list", "dict", "set", "frozenset")
    return builtin or name[:1].isupper() or (isinstance(node, ast.Constant) and node.value is None)
