"""A node on each of several devices: shares of the owner's limits, and processes that end together."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from process_swarm import LOCAL, host, run_file
from processes import Commands
from typer.testing import CliRunner

from noloco_node.cli import join_devices
from noloco_node.cli.join_devices import divided, join_each, named_devices, words, worst
from noloco_node.cli.main import app
from noloco_node.cli.options import INVITE_VARIABLE, JoinOptions
from noloco_node.demo.swarm_processes import cores
from noloco_node.errors import NEEDS_A_PERSON, Exit, UserError
from noloco_node.journal.events import InnerStep, Started
from noloco_node.journal.reader import read
from noloco_node.machine import device
from noloco_node.machine.signals import STOPS, run
from noloco_node.swarm.invite import SCHEME
from noloco_node.terminal import DEVICE_VARIABLE
from noloco_node.units import parse_bytes

INVITE = SCHEME + "ab" * 32 + "@/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
NAMES = ["cuda:0", "cuda:1", "cuda:2"]
RAM = 64 * 10**9


def typed(arguments: list[str]) -> JoinOptions:
    """Return what the command line makes of these words."""
    command = typer.main.get_command(app)
    given = command.commands["join"].make_context("join", [*arguments]).params
    del given["invite"]
    return JoinOptions(
        **{key: ([*value] or None) if isinstance(value, tuple) else value for key, value in given.items()}
    )


@pytest.mark.parametrize(
    "options",
    [
        JoinOptions(),
        JoinOptions(stage=0, stay=True, listen=["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"], hours="22-08", linger=0.0),
        JoinOptions(begin_anew=True, relayed=True, metrics="9464", metrics_open=True, web="0", web_open=True),
        JoinOptions(max_memory="8GB", name="-x", home=Path("/tmp/home"), slowdown=2.5, keep_snapshots=3, keep=1),
        *divided(JoinOptions(max_upload="20mbit", monthly_cap="300GB", max_disk="1TiB", home=Path("/h")), NAMES, RAM),
    ],
)
def test_a_node_is_told_by_words_what_a_person_typed(options: JoinOptions) -> None:
    assert typed(words(options)) == options


@given(st.integers(2, 16), st.integers(2_048_000, 10**11), st.integers(16, 10**15))
def test_the_shares_of_all_nodes_are_what_the_owner_allows(number: int, bits: int, size: int) -> None:
    given = JoinOptions(
        max_upload=f"{bits}bit", max_download=f"{2 * bits}bit", monthly_cap=f"{size}B", max_disk=f"{size}B"
    )
    shares = divided(given, [f"cuda:{place}" for place in range(number)], size)
    allowed = [share.allowance for share in shares]
    assert sum(each.upload_bytes_per_s or 0.0 for each in allowed) == pytest.approx(bits / 8, abs=number)
    assert sum(each.download_bytes_per_s or 0.0 for each in allowed) == pytest.approx(bits / 4, abs=number)
    again = divided(replace(given, max_ram=f"{size}B"), ["cuda:0", "cuda:1"], 2 * size)
    for total in (
        sum(each.monthly_cap_bytes or 0 for each in allowed),
        sum(each.most_disk_bytes or 0 for each in shares),
        sum(each.most_ram_bytes or 0 for each in shares),
        sum(each.most_ram_bytes or 0 for each in again),
    ):
        assert size - number < total <= size
    assert parse_bytes(f"{size}B") == size
    assert sum(each.threads or 0 for each in shares) <= max(number, cores())


def test_each_node_has_a_home_and_ports_of_its_own() -> None:
    given = JoinOptions(
        home=Path("/h"),
        threads=3,
        listen=["/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1", "/ip6/::/tcp/0"],
        announce=["/dns4/host-4001.example/tcp/80"],
        metrics="0.0.0.0:9464",
        web="0",
    )
    first, _, third = divided(given, NAMES, RAM)
    share = f"{RAM // 3}B"
    assert first == replace(given, device="cuda:0", home=Path("/h/cuda-0"), max_ram=share)
    assert third == replace(
        given,
        device="cuda:2",
        home=Path("/h/cuda-2"),
        max_ram=share,
        listen=["/ip4/0.0.0.0/tcp/4003", "/ip4/0.0.0.0/udp/4003/quic-v1", "/ip6/::/tcp/0"],
        announce=["/dns4/host-4001.example/tcp/82"],
        metrics="0.0.0.0:9466",
    )


def test_a_share_of_the_line_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="--max-upload"):
        divided(JoinOptions(max_upload="256kbit"), NAMES, RAM)


@pytest.mark.parametrize(
    ("device", "devices"),
    [("cuda", "all"), ("auto", "cuda:0,cuda:0"), ("auto", "auto,cpu"), ("auto", "gpu"), ("auto", "")],
)
def test_devices_that_cannot_be_meant_are_refused(device: str, devices: str) -> None:
    with pytest.raises(UserError):
        named_devices(JoinOptions(device=device, devices=devices))


def test_all_devices_are_the_gpus_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_devices(JoinOptions()) == []
    assert named_devices(JoinOptions(devices="cuda:1, cpu")) == ["cuda:1", "cpu"]
    monkeypatch.setattr(device, "all_gpus", lambda: ["cuda:0", "cuda:1"])
    assert named_devices(JoinOptions(devices="all")) == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(device, "all_gpus", lambda: [])
    assert named_devices(JoinOptions(devices="all")) == ["cpu"]


def test_a_machine_with_one_device_runs_a_plain_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[JoinOptions] = []
    monkeypatch.setattr("noloco_node.cli.join.take_part", lambda _, options: taken.append(options))
    monkeypatch.setattr("noloco_node.cli.join.run", lambda _: None)
    home = tmp_path / "home"
    CliRunner().invoke(app, ["join", INVITE, "--devices", "cpu", "--home", str(home)], catch_exceptions=False)
    assert taken == [JoinOptions(device="cpu", home=home)]


CODES = st.lists(st.sampled_from([*Exit, -signal.SIGKILL]), min_size=1)


@given(CODES)
def test_the_worst_code_stands_for_all(codes: list[int]) -> None:
    found = worst(codes)
    failures = {Exit.BUG if code < 0 else code for code in codes} - {Exit.OK, Exit.INTERRUPTED}
    if failures:
        assert found in failures
        assert (found in NEEDS_A_PERSON) == (failures <= NEEDS_A_PERSON)
    else:
        assert found == max(codes)


NODE = f"""
import os, signal, sys, time
from pathlib import Path
directory, place, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # one that comes before the wait is not lost
(directory / f"{{place}}.aside").write_text(f"{{os.environ[{DEVICE_VARIABLE!r}]}} {{os.environ[{INVITE_VARIABLE!r}]}}")
os.rename(directory / f"{{place}}.aside", directory / f"{{place}}.ready")
if place == 0:
    os._exit(code)
if place == 2:
    while len(list(directory.glob("*.ready"))) < 3:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait([signal.SIGINT])
sys.exit(code)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("codes", "worst_code"), [((13, 0, 0), 13), ((13, 10, 130), 13), ((0, 130, 0), 130)])
def test_one_signal_ends_all_nodes_and_the_worst_code_is_theirs(
    codes: tuple[int, ...], worst_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node has ended by then, and takes no other along. The last one signals once all can hear it."""
    number = iter(range(3))

    def command(*_: str) -> list[str]:
        place = next(number)
        return [sys.executable, "-c", NODE, str(tmp_path), str(place), str(codes[place])]

    monkeypatch.setattr(join_devices, "tied_command", command)
    before = {each: signal.getsignal(each) for each in STOPS}
    try:
        assert run(join_each(INVITE, divided(JoinOptions(home=tmp_path), NAMES, RAM))) == worst_code
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for place, name in enumerate(NAMES):
        assert (tmp_path / f"{place}.ready").read_text() == f"{name} {INVITE}"


@pytest.mark.network
def test_two_nodes_of_one_command_train_together_and_leave_nothing_behind() -> None:
    with Commands() as commands:
        bootstrap, invite = host(commands, run_file(commands.directory))
        both = ("--devices", "cpu:0,cpu:1", "--listen", LOCAL, "--refresh", "1", "--max-upload", "800mbit")
        pair = commands.start("join", invite, *both, home=True)
        journals = [pair.home / name / "journal.jsonl" for name in ("cpu-0", "cpu-1")]

        def trained() -> bool:
            told = [list(read(each)) if each.exists() else [] for each in journals]
            return all(sum(isinstance(event, InnerStep) for event in events) >= 2 for events in told)

        commands.until(trained, "both nodes train", alive=[bootstrap, pair])
        assert {each.device for path in journals for each in read(path) if isinstance(each, Started)} == {
            "cpu:0",
            "cpu:1",
        }
        pair.interrupt()
        assert pair.wait() == Exit.OK, pair.complaint
        said = pair.complaint.splitlines()
        for name in ("cpu:0", "cpu:1"):
            assert any(f"  {name}  training stage" in line for line in said)
            assert any(f"the node on {name} ended with exit code 0" in line for line in said)
        assert pair.daemons() == []
        assert pair.left_behind() == []
