"""What an installation consists of: the built file list, the metadata, and the systemd units."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest
from setuptools import Distribution

from noloco_node.admission.owner_files import key_file, members_file
from noloco_node.errors import NEEDS_A_PERSON, Exit

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gossip", "noloco_node", "pipeline")
UNITS = sorted((ROOT / "docs" / "systemd").glob("*.service"))
NO_SERVICE = {Exit.UNFIT}
"""Exit codes of commands that no unit starts."""


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch) -> Distribution:
    monkeypatch.chdir(ROOT)
    found = Distribution({"script_name": "setup.py"})
    found.parse_config_files(["setup.cfg"])
    return found


def test_a_wheel_holds_every_file_of_the_packages(distribution: Distribution) -> None:
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    built = {str(Path(path).relative_to(command.build_lib)) for path in command.get_outputs(include_bytecode=False)}
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"  # which is built on the machine
    }
    assert built == there
    assert {f"{package}/py.typed" for package in PACKAGES} <= built


def test_the_licence_is_apache_2_in_full(distribution: Distribution) -> None:
    text = (ROOT / "LICENSE").read_text()
    assert distribution.metadata.license_expression == "Apache-2.0"
    assert distribution.metadata.license_files == ["LICENSE"]
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert all(f"\n   {number}. " in text for number in range(1, 10))
    assert "APPENDIX: How to apply the Apache License to your work." in text
    assert text.endswith("limitations under the License.\n")


def test_the_command_exists(distribution: Distribution) -> None:
    [script] = distribution.entry_points["console_scripts"]
    name, module, function = re.split(r" = |:", script)
    assert name == "noloco-node"
    assert callable(getattr(importlib.import_module(module), function))


def test_every_requirement_has_a_pinned_version(distribution: Distribution) -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    required = [*distribution.install_requires, *distribution.extras_require["test"]]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in required}
    assert names - {"-".join(name.split("_")) for name in pinned} - set(pinned) == set()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_again_only_what_time_may_heal(path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(path.read_text())
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert set(map(int, service["RestartPreventExitStatus"].split())) == NEEDS_A_PERSON - NO_SERVICE
    assert int(service["SuccessExitStatus"]) == Exit.INTERRUPTED
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_node_sees_the_devices_of_its_machine_and_a_bootstrap_peer_none(path: Path) -> None:
    """A list of allowed devices shuts out all others, and before systemd 253 `ProtectClock` made such a list."""
    closing = re.findall(r"^(PrivateDevices|DevicePolicy|DeviceAllow|ProtectClock)=", path.read_text(), re.MULTILINE)
    assert closing == ([] if path.stem == "noloco-node" else ["PrivateDevices", "ProtectClock"])


def test_docker_restarts_by_the_same_exit_codes_as_systemd() -> None:
    rule = re.search(r"Exit codes ([\d, ]+) and (\d+) need a person", (ROOT / "docker" / "README.md").read_text())
    assert {*map(int, rule[1].split(",")), int(rule[2])} == NEEDS_A_PERSON - NO_SERVICE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_a_unit(path: Path, tmp_path: Path) -> None:
    systemd_analyze = shutil.which("systemd-analyze")
    if systemd_analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / path.name
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE))
    answer = subprocess.run([systemd_analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_the_extras_are_named_in_one_table(distribution: Distribution) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(distribution.extras_require)


def test_make_says_so_for_a_python_that_the_metadata_does_not_name(distribution: Distribution, tmp_path: Path) -> None:
    found = (
        re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line) for line in distribution.metadata.classifiers
    )
    tried = [int(match[1]) for match in found if match]
    least = min(tried)
    assert distribution.python_requires == f">=3.{least}"
    for minor, status, says in ((least - 1, 2, True), *((each, 0, False) for each in tried), (max(tried) + 1, 0, True)):
        python = _python_that_only_says_its_version(tmp_path / f"python3.{minor}", minor)
        options = (f"PYTHON={python}", "BIN=true #", f"INSTALLED={tmp_path}/installed-{minor}")
        made = subprocess.run(["make", "-C", ROOT, "install", *options], capture_output=True, text=True, check=False)
        assert made.returncode == status, made.stderr
        assert (f"{python} is" in made.stdout) is says


def _python_that_only_says_its_version(path: Path, minor: int) -> Path:
    """Write a program that answers `-c` as that Python would, and makes no environment."""
    answer = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    path.write_text(f"""#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} -c '{answer}' "$2"\n""")
    path.chmod(0o755)
    return path


class Foreign(NamedTuple):
    """A package of others that a file imports. `late`: inside a function, or for the check of types alone."""

    path: Path
    name: str
    late: bool


def test_what_mypy_and_the_tests_import_is_installed_with_the_extra_test(distribution: Distribution) -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    untyped = [name for override in mypy["overrides"] for name in override["module"]]
    required = {
        re.split(r"[^\w-]", line.lower().replace("_", "-"))[0]
        for line in (*distribution.install_requires, *distribution.extras_require["test"])
    }
    owners = packages_distributions()
    wrong = []
    for found in _foreign_imports((*mypy["packages"], "tests")):
        optional = found.late and f"{found.name}.*" in untyped
        names = {name.lower().replace("_", "-") for name in owners.get(found.name, ())}
        if not optional and not names & required:
            wrong.append(f"{found.path.relative_to(ROOT)}: {found.name} of {sorted(names)}")
    assert wrong == []


def _foreign_imports(packages: Iterable[str]) -> Iterator[Foreign]:
    support = {path.stem for path in (ROOT / "tests" / "support").iterdir()}
    own = {*packages, *PACKAGES, *support, *sys.stdlib_module_names}
    for path in sorted(path for name in packages for path in (ROOT / name).rglob("*.py")):
        for name, late in _imports(ast.parse(path.read_text())):
            if name not in own:
                yield Foreign(path, name, late)


def _imports(node: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.split(".")[0], late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").split(".")[0], late
        elif isinstance(child, ast.Call) and getattr(child.func, "attr", "") == "importorskip":
            yield str(ast.literal_eval(child.args[0])).split(".")[0], True
        typing = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        yield from _imports(child, late or typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_in_docker_the_owner_s_list_is_seen_whenever_it_changes() -> None:
    """A directory is mounted: a single file that is mounted stays the one that was there when the container began."""
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    assert '{type: bind, source: "${RUN_DIR:-/dev/null}", target: /run-dir, read_only: true}' in compose
    assert not re.search(r"target: \S*run\.(owner|members)", compose)
    entry = (ROOT / "docker" / "entrypoint.sh").read_text()
    assert "if [ -d /run-dir ]; then\n    run=/run-dir/run.toml" in entry
    assert {members_file(Path("/run-dir/run.toml")), key_file(Path("/run-dir/run.toml"))} == {
        Path("/run-dir/run.members"),
        Path("/run-dir/run.owner"),
    }


def test_no_unit_puts_an_invite_on_the_command_line() -> None:
    for unit in UNITS:
        text = unit.read_text()
        assert "${INVITE}" not in text
    node = (ROOT / "docs" / "systemd" / "noloco-node.service").read_text()
    assert "LoadCredential=invite:" in node
    assert "${CREDENTIALS_DIRECTORY}/invite" in node
