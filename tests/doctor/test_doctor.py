"""The doctor says what is in the way and what to do; the desk that peers keep for it cannot be abused."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from admission_keys import NOW_S, OWNER, RUN, key, public
from handlers import now
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from msgspec import structs
from processes import Commands
from torch import nn
from typer.testing import CliRunner
from user_errors import user_error

import noloco_node
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import KEY_HEADER, encode_list, peer_of_file, signed_list
from noloco_node.cli.main import app
from noloco_node.doctor import command, machine_checks
from noloco_node.doctor.machine_checks import Finding, Grade, Needs, exit_code, line, verdict
from noloco_node.errors import Exit
from noloco_node.libp2p import reachability
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.limits.budget import OwnerLimits
from noloco_node.limits.rate_limit import LimitHook
from noloco_node.machine import device
from noloco_node.machine.memory import wanted_bytes
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation
from noloco_node.network.wire import message_bytes
from noloco_node.planning.bandwidth import MicrobatchBytes
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.plan import memories_on
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run, load_run
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork, SimPeerNetwork
from noloco_node.storage.atomic_file import SPARE_BYTES
from noloco_node.storage.home import RunPaths
from noloco_node.swarm import speed_test
from noloco_node.swarm.invite import SCHEME, Invite
from noloco_node.swarm.run_distribution import SCHEMA as RUN_SCHEMA
from noloco_node.swarm.run_distribution import TOPIC as RUN_TOPIC
from noloco_node.swarm.run_distribution import RunFileReply

WORSE = [Grade.GOOD, Grade.DOUBTFUL, Grade.BAD]
BYTES = st.integers(0, 10**13)
NEEDS = st.lists(st.integers(1, 10**13), max_size=4)


# Judgements.


@given(NEEDS, BYTES, BYTES)
def test_more_of_anything_is_never_worse(needs: list[int], one: int, other: int) -> None:
    less, more = sorted((one, other))
    home = Path("home")
    for judge in (
        lambda free: machine_checks.judge_memory(free, needs),
        lambda free: machine_checks.judge_gpu(free, needs),
        lambda free: machine_checks.judge_disk(free, dict(enumerate(needs)), home),
        lambda free: machine_checks.judge_files(free),
    ):
        assert WORSE.index(judge(more).grade) <= WORSE.index(judge(less).grade)


@pytest.mark.parametrize(
    ("place", "half"),
    [("cpu", None), ("mps", torch.bfloat16), ("mps", None), ("cuda", torch.bfloat16), ("cuda", torch.float16)],
)
def test_what_is_judged_is_what_a_node_on_that_device_takes(
    place: str, half: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without bfloat16 holds float32 beside its copies in float16; one of Apple computes in main memory."""
    run = decode_run(run_text("tiny"), "the preset")
    run = structs.replace(run, inner=replace(run.inner, state="int8"))
    layout = model_layout(run)
    monkeypatch.setattr(device, "choose_device", lambda _: torch.device(place))
    monkeypatch.setattr(device, "autocast_dtype", lambda *_: half)
    needs, _ = command._needs(SimpleNamespace(run=run), "auto")
    assert needs.memory == memories_on(run, layout, torch.device(place))


@given(NEEDS, BYTES)
def test_memory_prevents_joining_exactly_if_no_stage_fits(needs: list[int], free: int) -> None:
    found = machine_checks.judge_memory(free, needs)
    fits = [stage for stage, size in enumerate(needs) if wanted_bytes(size) <= free]
    assert (found.grade is Grade.BAD) == bool(needs and not fits)
    assert (found.grade is Grade.DOUBTFUL) == (0 < len(fits) < len(needs))
    if found.grade is Grade.DOUBTFUL:
        assert f"--stage {fits[0]}" in (found.hint or "")


def test_a_machine_without_a_compiler_is_told_and_fit() -> None:
    compiled, other = machine_checks.judge_rounds(object()), machine_checks.judge_rounds(None)
    assert compiled.grade is other.grade is Grade.GOOD
    assert "no C compiler" in other.says


def test_join_refuses_the_disk_that_the_doctor_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, sets = {0: 1000, 1: 3000}, machine_checks.CHECKPOINT_SETS
    free = 0

    def usage(place: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for kept, keeps_best in ((1, False), (3, False), (3, True)):
        require = partial(machine_checks.require_disk, RunPaths(tmp_path), weights, kept, keeps_best=keeps_best)
        files = machine_checks.DISK_ROOM * 1000 * (sets * (kept + 1) + 2 * keeps_best)
        least = round(files) + SPARE_BYTES  # which each save leaves free
        free = least
        assert require() is None
        free = least - 1
        with user_error(Exit.STORAGE, "no room for checkpoints"):
            require()
    # Its own checkpoints make way for those that follow.
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "00000001-0000000001.safetensors").write_bytes(bytes(1))
    assert machine_checks.require_disk(RunPaths(tmp_path), weights, 3) is None
    # A node that has saved itself starts where there is no room for another checkpoint: it would have gone on too.
    free = 0
    told = machine_checks.require_disk(RunPaths(tmp_path), weights, 3)
    assert told is not None
    assert "the last checkpoint stays" in told
    assert "free some space" in told


def test_the_module_of_a_program_is_no_obstacle(tmp_path: Path) -> None:
    run = load_run(noloco_node.init(tmp_path / "run.toml", nn.Linear(2, 2), steps=9))
    assert command._needs(SimpleNamespace(run=run), "cpu") == (Needs(), [])
    (finding,) = command._module(run)
    assert finding.grade is Grade.DOUBTFUL
    assert "that program joins" in finding.says


@pytest.mark.parametrize(
    ("free", "grade"), [(None, Grade.BAD), (0, Grade.BAD), (10**8, Grade.DOUBTFUL), (10**11, Grade.GOOD)]
)
def test_a_full_disk_prevents_joining_whatever_the_run_needs(free: int | None, grade: Grade) -> None:
    assert machine_checks.judge_disk(free, {}, Path("x")).grade is grade


@pytest.mark.parametrize(
    ("ahead_s", "grade"),
    [
        ((), Grade.DOUBTFUL),
        ((0.1, -0.2, 0.0), Grade.GOOD),
        ((3.0, 3.1), Grade.DOUBTFUL),
        ((-7000.0, -7100.0, 0.0), Grade.DOUBTFUL),
        ((0.0, 0.1, 5000.0), Grade.GOOD),  # one peer with a bad clock is not ours
    ],
)
def test_a_clock_is_judged_by_the_median(ahead_s: tuple[float, ...], grade: Grade) -> None:
    found = command.judge_clock(ahead_s)
    assert found.grade is grade
    assert (found.hint is None) == (grade is Grade.GOOD)


CIRCUIT = "/ip4/192.0.2.1/tcp/4001/p2p/A/p2p-circuit/p2p/B"


@pytest.mark.parametrize(
    ("said", "addresses", "grades"),
    [
        (reachability.ReachVerdict(True, ("/ip4/192.0.2.9/tcp/1",), ()), (), [Grade.GOOD, Grade.GOOD]),
        (reachability.ReachVerdict(None, (), ()), (), [Grade.DOUBTFUL]),
        (reachability.ReachVerdict(False, (), ()), (CIRCUIT,), [Grade.DOUBTFUL, Grade.GOOD]),
        (reachability.ReachVerdict(False, (), ("relay",)), (), [Grade.DOUBTFUL, Grade.DOUBTFUL]),
        (reachability.ReachVerdict(False, (), ()), (), [Grade.BAD, Grade.BAD]),
    ],
)
def test_who_cannot_be_dialled_needs_a_relay(
    said: reachability.ReachVerdict, addresses: tuple[str, ...], grades: list[Grade]
) -> None:
    assert [found.grade for found in command.judge_reach(said, (4001,), addresses)] == grades


def test_whoever_listens_over_quic_alone_is_told_that_nobody_tries_that() -> None:
    nobody = reachability.ReachVerdict(None, (), ())
    (over_quic,), (over_tcp,) = (command.judge_reach(nobody, ports, ()) for ports in ((), (4001,)))
    assert "over TCP alone" in over_quic.says
    assert "over TCP alone" not in over_tcp.says


def test_the_best_line_counts_and_a_microbatch_that_takes_long_is_said() -> None:
    measured = [command.Rates(1e5, 1e7), command.Rates(2e5, None)]
    up, down = command.judge_rates(measured, (), [MicrobatchBytes(up=1e6, down=1e6), MicrobatchBytes(up=1e7, down=1e6)])
    assert up.grade is Grade.DOUBTFUL
    assert "5.0 s" in up.says
    assert "the best of 2" in up.says
    assert down.grade is Grade.GOOD
    (nothing,) = command.judge_rates([], ["peer: busy"], [])
    assert nothing.grade is Grade.DOUBTFUL
    assert "peer: busy" in nothing.says


@given(st.lists(st.sampled_from(WORSE), max_size=8))
def test_one_bad_finding_is_enough(grades: list[Grade]) -> None:
    findings = [Finding(about="x", grade=grade, says="y", hint=None) for grade in grades]
    assert exit_code(findings) is (Exit.UNFIT if Grade.BAD in grades else Exit.OK)
    assert ("prevent" in verdict(findings)) == (Grade.BAD in grades)
    assert all(len(line(finding).splitlines()) == 1 for finding in findings)


def test_our_tcp_ports_are_found_in_our_addresses() -> None:
    addresses = (
        CIRCUIT,
        "/ip4/10.0.0.1/udp/4002/quic/p2p/B",
        "/ip4/10.0.0.1/tcp/4003/p2p/B",
        "/ip6/::1/tcp/4004/p2p/B",
        "/ip4/10.0.0.2/tcp/4003/p2p/B",
    )
    assert command._ports(addresses) == (4003, 4004)


# What peers are asked.


def weighed(message: Any, topic: str) -> int:
    return message_bytes(message, speed_test.SCHEMA if topic == speed_test.TOPIC else reachability.SCHEMA)


async def at_the_desk(hub: SimNetwork, name: str = "peer") -> speed_test.SpeedTestService:
    served = speed_test.SpeedTestService()
    await hub.network(name).serve(speed_test.TOPIC, speed_test.SCHEMA, served.answer)
    return served


@settings(max_examples=20)
@given(st.floats(5e4, 1e8), st.floats(5e4, 1e8))
async def test_the_line_is_measured_both_ways(up: float, down: float) -> None:
    hub = SimNetwork(size_bytes=weighed)
    await at_the_desk(hub)
    found = await command.rates_with(hub.network("us", Access(up_bytes_per_s=up, down_bytes_per_s=down)), "peer")
    # A line that is too slow for the whole measurement is given up, and that is said.
    if isinstance(found, str):
        assert min(up, down) < 2 * command.PIECES * speed_test.PIECE_BYTES / speed_test.PATIENCE_S
    else:
        assert found.up == pytest.approx(up, rel=0.15)
        assert found.down == pytest.approx(down, rel=0.15)


async def test_a_peer_with_a_budget_is_measured_within_it() -> None:
    hub = SimNetwork(size_bytes=weighed)
    metered = HookedNetwork(hub.network("peer"), LimitHook(OwnerLimits(upload_bytes_per_s=5e5)))
    await metered.serve(speed_test.TOPIC, speed_test.SCHEMA, speed_test.SpeedTestService().answer)
    found = await command.rates_with(hub.network("us"), "peer")
    assert isinstance(found, command.Rates)
    assert found.down is not None
    # Half a megabyte was saved up.
    assert 5e5 <= found.down <= 6e5


async def test_all_who_ask_together_get_no_more_than_the_desk_gives() -> None:
    hub = SimNetwork(size_bytes=weighed)
    served, given = await at_the_desk(hub), 0.0

    async def greedy(network: SimPeerNetwork) -> None:
        nonlocal given
        while now() < 600:
            found = await command.rates_with(network, "peer")
            if isinstance(found, command.Rates):
                given += (1 + (found.up is not None)) * command.PIECES * speed_test.PIECE_BYTES
            await asyncio.sleep(1)

    await asyncio.gather(*[greedy(hub.network(f"us-{number}")) for number in range(10)])
    assert not hub.failures
    burst = 2 * speed_test.MOST_PIECES * speed_test.PIECE_BYTES
    assert 0.5 * 600 * speed_test.LOAD_BYTES_PER_S < given <= 630 * speed_test.LOAD_BYTES_PER_S + burst
    assert served.refused > 0


@pytest.mark.parametrize(
    "question",
    [speed_test.SendMe(pieces=10**9), speed_test.SendMe(pieces=-1), speed_test.TakeFromMe(pieces=1), speed_test.Go()],
)
async def test_who_asks_for_more_than_there_is_gets_nothing(question: Any) -> None:
    hub = SimNetwork(size_bytes=weighed)
    served = await at_the_desk(hub)
    async with hub.network("us").talk("peer", speed_test.TOPIC, speed_test.SCHEMA) as conversation:
        await conversation.send(question)
        with pytest.raises(ConnectionError):
            await conversation.receive()
    assert served.refused == 0
    assert not hub.failures


async def test_who_says_nothing_or_nonsense_does_not_keep_the_desk() -> None:
    async def offend(network: SimPeerNetwork, load: object) -> None:
        async with network.talk("peer", speed_test.TOPIC, speed_test.SCHEMA) as conversation:
            await conversation.send(speed_test.TakeFromMe(pieces=4))
            assert isinstance(await conversation.receive(), speed_test.Go)
            if load is not None:
                await conversation.send(load)
            await conversation.receive()

    hub = SimNetwork(size_bytes=weighed)
    await at_the_desk(hub)
    network = hub.network("us")
    for load in (None, speed_test.SpeedTestPayload(content=b"short"), speed_test.Go()):
        begun = now()
        with pytest.raises(ConnectionError):
            await offend(network, load)
        assert now() - begun <= speed_test.PATIENCE_S + 1
    assert isinstance(await command.rates_with(network, "peer"), command.Rates)


async def test_a_peer_without_a_desk_and_one_that_is_gone_are_said() -> None:
    hub = SimNetwork()
    hub.network("plain")
    for peer, why in (("plain", "does not serve"), ("gone", "cannot be reached")):
        assert why in str(await command.rates_with(hub.network(f"us-{peer}"), peer))


@pytest.mark.parametrize("off_s", [0.0, 120.0, -7.0])
async def test_a_clock_is_compared_with_a_peers(off_s: float) -> None:
    hub = SimNetwork()

    async def serve(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(RunFileReply(text="", unix_time=1e9 + now() - off_s))

    await hub.network("peer").serve(RUN_TOPIC, RUN_SCHEMA, serve)
    ahead_s = await command.clock_of(hub.network("us"), "peer", lambda: 1e9 + now())
    assert ahead_s == pytest.approx(off_s, abs=0.001)


async def test_a_swarm_that_cannot_be_visited_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(_: NetworkSettings) -> AsyncIterator[SimPeerNetwork]:
        async with asyncio.TaskGroup():
            yield SimNetwork().network("doctor")

    monkeypatch.setattr(command, "connected", connected)
    found, _ = await command._visit(Invite(digest="0" * 64, addresses=()), command.DoctorRequest(home=Path("home")))
    assert [finding.grade for finding in found] == [Grade.DOUBTFUL, Grade.BAD]
    assert "serves the run" in found[1].says


@given(st.booleans(), st.booleans(), st.booleans())
def test_an_identity_that_the_owner_has_shut_out_prevents_joining(
    has_owner: bool, has_home: bool, is_out: bool
) -> None:
    """The doctor itself is let in: it visits with a passing identity."""
    state = AdmissionState(RUN, lambda: float(NOW_S))
    state.pin(OWNER, "open")
    state.take_revocations(encode_list(signed_list(key(0), RUN, 1, {public(7 if is_out else 8): NOW_S + 9})))
    with TemporaryDirectory() as directory:
        if has_home:
            (Path(directory) / "identity.key").write_bytes(KEY_HEADER + (7).to_bytes(32) + public(7))
        found = command.shut_out(state if has_owner else None, Path(directory))
    assert [each.grade for each in found] == [Grade.BAD] * (has_owner and has_home and is_out)


async def test_peers_that_do_not_answer_say_nothing_about_our_reach() -> None:
    hub = SimNetwork()

    async def answer(conversation: Conversation) -> None:
        asked = await conversation.receive()
        place = f"/ip4/192.0.2.1/tcp/{asked.ports[0]}"
        await conversation.send(reachability.DialBackReply(place=place, tried=True, relays=("r",)))

    async def silent(conversation: Conversation) -> None:
        await asyncio.sleep(1e6)

    await hub.network("good").serve(reachability.TOPIC, reachability.SCHEMA, answer)
    await hub.network("silent").serve(reachability.TOPIC, reachability.SCHEMA, silent)
    found = await command.dialled_back(hub.network("us"), ["silent", "gone", "good"], (4001,))
    assert found == reachability.ReachVerdict(True, ("/ip4/192.0.2.1/tcp/4001",), ("r",))


# The command.


def test_without_an_invite_the_machine_alone_is_looked_at(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path / "home"), "--device", "cpu", "--json"])
    found = json.loads(result.stdout)
    about = {each["about"]: each for each in found["findings"]}
    assert {"system", "device", "memory", "disk", "open files", "arithmetic of rounds"} <= about.keys()
    assert about["device"]["grade"] == "good"
    assert result.exit_code == (0 if found["fit"] else 11)
    # The owner of a listed run asks for the peer id before the node can join: it is the one that the node will have.
    assert [each.name for each in (tmp_path / "home").iterdir()] == ["identity.key"]
    assert about["identity"]["says"] == f"you are {peer_of_file(tmp_path / 'home' / 'identity.key')}"


async def test_a_home_that_is_a_file_and_an_address_that_is_none_are_findings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wish = command.DoctorRequest(home=tmp_path / "file", device="cpu", listen=("nonsense",))
    bad = [finding.about async for finding in command.examine(None, wish) if finding.grade is Grade.BAD]
    assert bad == ["identity", "addresses", "disk"]


def test_a_device_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path), "--device", "mps"])
    assert result.exit_code == 11
    assert "BAD  device" in result.stdout
    assert "try: " in result.stdout


def test_what_takes_no_torch_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom noloco_node.cli import main\nfrom noloco_node.doctor import command\n"
        "tell = command.line\n"
        "command.line = lambda finding: f'{tell(finding)} {\"torch\" in sys.modules}'\n"
        f"sys.argv = ['noloco-node', 'doctor', '--device', 'cpu', '--home', {str(tmp_path / 'home')!r}]\nmain.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LAST_RESORT_S)
    loaded = {said.split(":")[0].split()[-1]: said.endswith("True") for said in done.stdout.splitlines()[:-1]}
    assert [about for about, late in loaded.items() if not late] == ["system", "files", "rounds", "identity", "disk"]
    assert {"device", "memory"} <= loaded.keys()
    assert "loading torch (a few seconds)" in done.stderr


@pytest.mark.network
def test_a_real_swarm_is_visited_and_a_dead_address_has_its_cause(tmp_path: Path) -> None:
    with Commands() as commands:
        run_file = tmp_path / "run.toml"
        CliRunner().invoke(app, ["init", str(run_file)])
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0")
        host = commands.start("bootstrap", "--run", str(run_file), *listen, "--relays", "0", home=True)
        commands.until(lambda: SCHEME in host.output, "the invite", alive=[host])
        invite = host.output.strip().splitlines()[-1]
        peer = invite.rpartition("/p2p/")[2]
        doctor = commands.start("doctor", f"{invite},/ip4/127.0.0.1/tcp/9/p2p/{peer}", *listen, "--json", home=True)
        code = doctor.wait()
        found = json.loads(doctor.output)
        about = {each["about"]: each for each in found["findings"]}
        assert "refused" in about["bootstrap peer /ip4/127.0.0.1/tcp/9"]["says"]
        assert sum(each["about"].startswith("bootstrap peer") and each["grade"] == "good" for each in found["findings"])
        assert about["clock"]["grade"] == "good"
        assert "replicas by stage" in about["swarm"]["says"]
        assert "the largest stage takes" in about["memory"]["says"] or about["memory"]["grade"] != "good"
        assert about["dialled back"]["grade"] == "good"
        assert code == (0 if found["fit"] else 11)
