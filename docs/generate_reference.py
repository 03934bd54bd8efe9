"""Writes the generated parts of docs/reference.md from the code.

    python docs/generate_reference.py            # rewrite the page
    python docs/generate_reference.py --check    # leave with 1 if the page is not what the code says

The page is Markdown written by hand, except for what stands between `<!-- generated: NAME -->` and `<!-- end -->`. Each
NAME is a function below. Commands come from the command line itself; exit codes, journal and run file from their types
and docstrings; what a field of the run file means from the comments in the run file that `init` writes, and its bounds
from what the validation says of a value far out of range.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from typer.models import ArgumentInfo, OptionInfo

import noloco_node
from noloco_node import GossipCallback, GossipOptimizer, Swarm, export, init, join
from noloco_node.api.peer import JoinedPeer
from noloco_node.api.swarm import PeerStatus, SwarmStatus
from noloco_node.cli.main import app
from noloco_node.errors import Exit
from noloco_node.journal.events import ROUND_EVENTS, NodeEvent
from noloco_node.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS
from noloco_node.run.config import RunConfig
from noloco_node.run.fields import REQUIRED, Field, fields_of, is_section
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run
from noloco_node.run.validation import problems

PAGE = Path(__file__).with_name("reference.md")
FAR_OUT = 10**30
"""A number that no bound admits; its opposite neither."""
SHARED = {
    "peer": "Id of the other peer; in `started` our own.",
    "partner": "Id of the replica met.",
    "stage": "Number of the stage, from 0.",
    "round": "Rounds of this replica, as its stage counts them.",
    "step": "Inner steps of this replica.",
    "progress": "Share of the run's tokens that are trained, 0 to 1.",
    "why": "The reason, in words.",
    "count": "How often since the event before.",
    "bytes_sent": "Bytes of this meeting.",
    "bytes_received": "Bytes of this meeting.",
}
"""What fields mean whose name says the same in every event that has them."""


def commands() -> str:
    """Every command with its arguments and options."""
    parts = []
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, command in [(prefix, each) for prefix, group in groups if group for each in group.registered_commands]:
        assert command.callback is not None
        name = prefix + (command.name or command.callback.__name__)
        parameters = list(_parameters(command.callback))
        arguments = [each for each in parameters if each.is_argument]
        options = [each for each in parameters if not each.is_argument]
        usage = " ".join(
            ["noloco-node", name, *(each.usage for each in arguments), *(["[OPTIONS]"] if options else [])]
        )
        parts.append(f"### {name}\n\n    {usage}\n\n{_paragraphs(command.callback.__doc__ or '')}")
        for word, listed in (("argument", arguments), ("option", options)):
            if listed:
                parts.append(_table((word, "meaning"), ((f"`{each.label}`", each.meaning) for each in listed)))
    return "\n\n".join(parts)


def exit_codes() -> str:
    """Every exit code."""
    return _table(("code", "meaning"), ((str(code.value), _docstrings(Exit)[code.name]) for code in Exit))


def run_file() -> str:
    """Every field of the run file, section by section."""
    text = run_text("tiny")
    run = decode_run(text, "the preset")
    explained = _comments(text)
    parts = []
    for section, kind in (("", RunConfig), *_sections(RunConfig)):
        rows = []
        for field in fields_of(kind):
            if is_section(field.type):
                continue
            path = f"{section}.{field.name}" if section else field.name
            rows.append(_row(path, field, kind, run, explained))
            if path == "model.sizes":
                rows += [_size_row(path, name, run, explained) for name in run.model.sizes]
        heading = f"### [{section}]" if section else "### At the top"
        parts.append(f"{heading}\n\n{_table(('field', 'type', 'default', 'what is accepted', 'meaning'), rows)}")
    return "\n\n".join(parts)


def journal() -> str:
    """Every event of the journal and its fields."""
    parts = []
    kinds = {**{kind.__struct_config__.tag: kind for kind in get_args(NodeEvent)}, **ROUND_EVENTS}
    for name, kind in kinds.items():
        about, meanings = _described(kind)
        parts.append(f"### {name}\n\n{about}")
        fields = {field: hint for field, hint in get_type_hints(kind).items() if field != "at"}
        for field in fields:
            if field not in meanings and field not in SHARED:
                raise ValueError(f"{kind.__name__}.{field} is not described")
        rows = ((f"`{field}`", _type(hint), meanings.get(field) or SHARED[field]) for field, hint in fields.items())
        parts.append(_table(("field", "type", "meaning"), rows))
    return "\n\n".join(parts)


def metrics() -> str:
    """Every figure for Prometheus with its type and its labels."""
    figures = [*((name, "counter", told) for name, told in COUNTERS.items())]
    figures += [(name, "gauge", told) for name, told in GAUGES.items()]
    figures += [(name, "histogram", (text,)) for name, text in HISTOGRAMS.items()]
    rows = (
        (f"`noloco_{name}{'_total' * (kind == 'counter')}`", kind, ", ".join(f"`{each}`" for each in labels), text)
        for name, kind, (text, *labels) in figures
    )
    return _table(("figure", "type", "labels", "meaning"), rows)


def python() -> str:
    """The names of the Python interface, and the types of what they return."""
    kinds = (init, GossipOptimizer, GossipCallback, join, JoinedPeer, Swarm, SwarmStatus, PeerStatus, export)
    return "\n\n".join(map(_python, kinds))


def _python(kind: Any) -> str:
    """Return signature and docstring of a function or class, and a table of what a class of ours has."""
    where = "noloco_node." if kind.__name__ in dir(noloco_node) else ""  # its commands have headings of these names too
    parts = [f"### {where}{kind.__name__}", _paragraphs(kind.__doc__ or "")]
    if kind is not JoinedPeer:  # which `join` alone makes
        parts.insert(1, _indented(f"{kind.__name__}{_signature(kind)}"))
    if inspect.isclass(kind):
        if inspect.isfunction(kind.__init__):
            parts.append(_paragraphs(kind.__init__.__doc__ or ""))
        own = (
            each for base in kind.__mro__ if base.__module__.startswith("noloco_node") for each in vars(base).items()
        )
        rows = []
        for name, member in own:
            is_property = isinstance(member, property)
            if not name.startswith("_") and (is_property or inspect.isfunction(member)) and member.__doc__:
                given = "" if is_property else _signature(member)
                rows.append((f"`{name}{given}`", " ".join(member.__doc__.split())))
        if rows:
            parts.append(_table(("member", "meaning"), rows))
    return "\n\n".join(each for each in parts if each)


def _signature(kind: Any) -> str:
    """Return the signature without `self`, and of a class without what it returns; types stand without quotes."""
    signature = inspect.signature(kind)
    given = [each for name, each in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=given)).replace("mappingproxy({})", "{}")
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return text.removesuffix(" -> None") if inspect.isclass(kind) else text


def _indented(text: str) -> str:
    return textwrap.indent("\n".join(textwrap.wrap(text, 112, subsequent_indent=8 * " ")), 4 * " ")


GENERATORS: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "run file": run_file,
    "journal": journal,
    "metrics": metrics,
    "python": python,
}


def generated(page: str) -> str:
    """Return the page with every generated part as the code has it now."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{GENERATORS[found[2]]()}\n\n{found[3]}"

    return re.sub(r"(<!-- generated: ([\w ]+) -->).*?(<!-- end -->)", part, page, flags=re.DOTALL)


class _Comment(NamedTuple):
    """What the run file of `init` says above a field. `of`: the field that it stands above, perhaps an earlier one."""

    text: str
    of: str


def _comments(text: str) -> dict[str, _Comment]:
    """Return by path what the comments of a run file say; a field without one shares that of the field before."""
    found: dict[str, _Comment] = {}
    section, last = "", None
    lines: list[str] = []
    for line in text.splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            section, lines, last = header[1], [], None
        elif field := re.match(r"(?:# )?(\w+) = ", line):
            path = f"{section}.{field[1]}" if section else field[1]
            if lines:
                last = _Comment(" ".join(lines), path)
            if last is not None:
                found.setdefault(path, last)
            lines = []
        elif line.startswith("# "):
            lines.append(line[2:])
        else:
            lines, last = [], None
    return found


def _row(path: str, field: Field, kind: type, run: RunConfig, explained: Mapping[str, _Comment]) -> tuple[str, ...]:
    written = _docstrings(kind).get(field.name)
    if path in explained:
        comment = explained[path]
        meaning = comment.text if comment.of == path else f"See `{comment.of.rpartition('.')[2]}`."
        if comment.of != path and written:
            meaning = written
    elif written:
        meaning = written
    else:
        raise ValueError(f"{path} is described nowhere")
    default = "required" if field.default is REQUIRED else _value(field.default)
    kinds = _type(field.type).removesuffix(" or null")  # which TOML has no word for: the field is left out
    return f"`{field.name}`", kinds, default, _accepted(path, field.type, run), meaning


def _size_row(path: str, name: str, run: RunConfig, explained: Mapping[str, _Comment]) -> tuple[str, ...]:
    comment = explained[f"{path}.{name}"]
    meaning = comment.text if comment.of == f"{path}.{name}" else "As the architecture's config has it."
    value = run.model.sizes[name]
    return f"`sizes.{name}`", _type(type(value)), "", _accepted(f"{path}.{name}", type(value), run), meaning


def _accepted(path: str, annotation: Any, run: RunConfig) -> str:
    """Return what the validation advises where the field is far out of range; nothing where it admits everything."""
    kinds = {*get_args(annotation)} if get_origin(annotation) in (Union, UnionType) else {annotation}
    kinds = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}
    values = (-FAR_OUT, FAR_OUT) if kinds & {int, float} else ("\0",) if kinds == {str} else ()
    for value in values:
        for problem in problems(_with(run, path.split("."), value)):
            if problem.field == path and problem.hint != "leave it out":
                return _bounds(problem.hint)
    return ""


def _bounds(advice: str) -> str:
    """Shorten `a value from 1 to 9`, and say of bounds that are each other's opposite the upper one alone."""
    if both := re.fullmatch(r"a value from -([\d,]+) to \1", advice):
        return f"at most {both[1]}"
    return advice.removeprefix("a value from ")


def _with(struct: Any, path: list[str], value: Any) -> Any:
    """Return the struct, or table, with another value at a path."""
    name, *rest = path
    if isinstance(struct, dict):
        return {**struct, name: value}
    inner = _with(getattr(struct, name), rest, value) if rest else value
    change = replace if is_dataclass(struct) else msgspec.structs.replace
    return change(struct, **{name: inner})


def _sections(kind: type) -> Iterator[tuple[str, type]]:
    for field in fields_of(kind):
        if is_section(field.type):
            yield field.name, field.type


def _value(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _type(annotation: Any) -> str:
    """Say in the words of TOML and JSON what a value is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(map(_value, arguments))
    if origin in (Union, UnionType):
        words = [_type(each) for each in arguments if each is not NoneType]
        return " or ".join([*words, "null"] if NoneType in arguments else words)
    if origin is tuple:
        return f"list of {_type(arguments[0])}{'s' if is_section(arguments[0]) else ''}"
    if origin is dict or annotation is dict:
        return "table" if not arguments or arguments[1] is Any else f"table of {_type(arguments[1])}"
    if is_section(annotation):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(_value(each.value) for each in annotation)
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[annotation]


def _described(kind: type) -> tuple[str, dict[str, str]]:
    """Part the docstring of an event into what it says of the event and, after `name`: of its fields."""
    names = "|".join(get_type_hints(kind))
    text = " ".join((kind.__doc__ or "").split())
    about, *rest = re.split(rf"((?:`(?:{names})`(?: and )?)+): ", text)
    meanings = dict(_docstrings(kind))
    for marks, meaning in zip(rest[::2], rest[1::2], strict=True):
        for name in re.findall(r"`(\w+)`", marks):
            meanings[name] = _sentence(meaning)
    return about.strip(), meanings


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".;,").replace("None", "null")
    return text[0].upper() + text[1:] + "."


def _docstrings(kind: type) -> dict[str, str]:
    """Return the string below each field or member in the body of a class, which Python itself does not keep."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        target = before.target if isinstance(before, ast.AnnAssign) else getattr(before, "targets", [None])[0]
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.id] = " ".join(str(after.value.value).split())
    return found


class _Parameter(NamedTuple):
    """An argument or option of a command as people read of it."""

    label: str
    usage: str
    meaning: str
    is_argument: bool


def _parameters(function: Callable[..., Any]) -> Iterator[_Parameter]:
    """Yield what the signature of a command declares."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, info = get_args(hints[name])
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        notes = [*_range(info), *_shown_default(info, default, required)]
        if get_origin(annotation) in (Union, UnionType):
            annotation = next(each for each in get_args(annotation) if each is not NoneType)
        repeated = get_origin(annotation) is list
        if repeated:
            [annotation] = get_args(annotation)
            notes += [] if "more than once" in info.help else ["may be given more than once"]
        text = info.help if not notes else f"{info.help} ({'; '.join(notes)})"
        if isinstance(info, ArgumentInfo):
            label = (info.metavar or name.upper()).strip("[]")
            usage = f"{label}..." if repeated else label
            yield _Parameter(label, usage if required else f"[{usage}]", text, True)
        else:
            declared = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
            names = ", ".join(declared or [f"--{name.replace('_', '-')}"])
            word = info.metavar or {int: "N", float: "X", Path: "PATH", str: "TEXT", bool: ""}[annotation]
            yield _Parameter(f"{names} {word}".strip(), "", text, False)


def _range(info: OptionInfo | ArgumentInfo) -> list[str]:
    low = [] if info.min is None else [f"at least {info.min:,g}"]
    high = [] if info.max is None else [f"at most {info.max:,g}"]
    return [" and ".join(low + high)] if low or high else []


def _shown_default(info: OptionInfo | ArgumentInfo, default: Any, required: bool) -> list[str]:
    if isinstance(info.show_default, str):
        return [f"default: {info.show_default}"]
    if required and isinstance(info, OptionInfo):
        return ["required"]
    return [] if default is None or default is False else [f"default: `{default}`"]


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(text).split("\n\n"))


def _table(header: tuple[str, ...], rows: Any) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> int:
    """Rewrite the page, or with --check compare it."""
    page = PAGE.read_text(encoding="utf-8")
    new = generated(page)
    if sys.argv[1:] == ["--check"]:
        if new != page:
            print(f"{PAGE} is not what the code says; run: python docs/generate_reference.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
