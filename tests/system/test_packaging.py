"""What an installation consists of: the built file list, the metadata, and the systemd units."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from setuptools import Distribution

from noloco_node.admission.owner_files import key_file, members_file
from noloco_node.errors import Exit

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gossip", "noloco_node", "pipeline")
UNITS = sorted((ROOT / "docs" / "systemd").glob("*.service"))
NEEDS_A_PERSON = {Exit.USAGE, Exit.CONFIG, Exit.OTHER_RUN, Exit.HOME_IN_USE, Exit.DEVICE, Exit.NOT_ADMITTED}
"""Exit codes of a service after which another start would end alike."""


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
        if path.is_file() and "__pycache__" not in path.parts
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
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in required}  # type: ignore[index]
    assert names - {"-".join(name.split("_")) for name in pinned} - set(pinned) == set()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_again_only_what_time_may_heal(path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert set(map(int, service["RestartPreventExitStatus"].split())) == NEEDS_A_PERSON
    assert int(service["SuccessExitStatus"]) == Exit.INTERRUPTED
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_a_unit(path: Path, tmp_path: Path) -> None:
    systemd_analyze = shutil.which("systemd-analyze")
    if systemd_analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / path.name
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE))
    answer = subprocess.run([systemd_analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


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
