"""The arrows of docs/design.md, read from the syntax tree of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LAST_RESORT_S

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gossip", "pipeline", "noloco_node")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
STANDARD_LIBRARY = sys.stdlib_module_names


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, in dotted form (relative imports are not used here)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("package", ["gossip", "pipeline"])
def test_siblings_know_neither_each_other_nor_the_shell(package: str) -> None:
    allowed = {"torch", package} | set(STANDARD_LIBRARY)
    for name, path in MODULES.items():
        if name.split(".")[0] == package:
            extra = {"transformers", "huggingface_hub"} if name == "pipeline.partition" else set()
            foreign = roots(path) - allowed - extra
            assert not foreign, f"{name} imports {foreign}"


def test_one_module_imports_hivemind() -> None:
    assert [name for name, path in MODULES.items() if "hivemind" in roots(path)] == ["noloco_node.libp2p.network"]


def test_no_collective_anywhere() -> None:
    for name, path in MODULES.items():
        assert not any(i.startswith("torch.distributed") for i in imports(path)), name
        assert "torch.distributed" not in path.read_text(), name


def test_only_the_command_line_knows_uvloop() -> None:
    assert [name for name, path in MODULES.items() if "uvloop" in roots(path)] == ["noloco_node.cli"]


def test_production_does_not_know_the_simulator() -> None:
    for name, path in MODULES.items():
        if not name.startswith("noloco_node.sim") and name != "noloco_node.cli":
            assert not any(i.startswith("noloco_node.sim") for i in imports(path)), name


def at_import(path: Path) -> set[str]:
    """Our own modules that are loaded together with this one (not those under TYPE_CHECKING or in functions)."""
    found: set[str] = set()

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
                found.update(names & MODULES.keys())
            elif isinstance(node, ast.Import):
                found.update({alias.name for alias in node.names} & MODULES.keys())
            elif isinstance(node, ast.Try):
                walk(node.body)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                walk(node.body + node.orelse)

    walk(ast.parse(path.read_text()).body)
    return found


def test_no_cycle() -> None:
    graph = {name: at_import(path) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_drawer_for_everything() -> None:
    banned = {"utils", "helper", "helpers", "manager", "handler", "common", "info", "master", "rank"}
    assert not {part for name in MODULES for part in name.split(".")} & banned


def test_a_bootstrap_peer_and_the_command_line_do_not_load_torch() -> None:
    """In a process of its own: this one has loaded torch long ago."""
    program = (
        "import sys, noloco_node.cli, noloco_node.bootstrap, noloco_node.libp2p.network as network\n"
        "network._load_hivemind()\n"
        "heavy = {'torch', 'transformers', 'scipy', 'pandas', 'matplotlib', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT_S, check=False
    )
    assert done.returncode == 0, done.stderr
