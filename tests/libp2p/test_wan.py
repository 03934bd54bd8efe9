"""Networks as they are: two sites on a long, thin line, and a peer behind a router that lets nobody in.

Each test makes network namespaces for itself: a core that forwards, sites beside it with public addresses, and a home
whose router masquerades (nftables) and drops what nobody inside asked for. Between sites lie 20 Mbit/s (`tc tbf`) and
50 ms for each round trip (`wan_line`). The addresses begin with 11, which libp2p takes for public ones. Peers are
processes of their own in these namespaces; everything goes away with the test, also when it fails.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from limits import LAST_RESORT_S
from process_swarm import TINY_MODEL
from repository import ROOT

T = TypeVar("T")

SUPPORT = ROOT / "tests" / "support"
ONE_WAY_S = 0.025
LOSS = 0.002
GREETINGS = 200
"""By which a hole is punched, or nobody tries any more: some twenty seconds."""
NEVER = threading.Event()


def why_not() -> str:
    """Return what is missing to make networks here; empty if nothing is."""
    if os.geteuid() != 0:
        return "namespaces take root"
    missing = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    trial = f"nlw{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return made.stderr.strip()


pytestmark = [pytest.mark.wan, pytest.mark.network]


RUN = f"""
name = "tiny"
{TINY_MODEL}
[pipeline]
stages = 2
replicas = 1
sequence_length = 32
microbatch_size = 4
microbatches_per_step = 4
[inner]
steps = 100000
warmup_steps = 5
[outer]
inner_steps_per_round = 6
overlap_steps = 2
"""
STEPS = 5


class Peer:
    """A `wan_peer` process; `begin` before anything else."""

    def __init__(self, process: subprocess.Popen[str], identity: Path) -> None:
        self.process, self._identity = process, identity
        self.id = ""
        self.addresses: list[str] = []
        self.said: list[str] = []
        self.ways: list[str] = []

    def begin(self, **wanted: Any) -> None:
        """Join; what it is told of is noted."""
        start = self.ask({"identity": str(self._identity)} | wanted)
        assert "error" not in start, start["error"]
        self.id, self.addresses, self.said = start["peer"], start["addresses"], start["said"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return the answer to it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], LAST_RESORT_S)
        assert ready, f"no answer within {LAST_RESORT_S:g} s to {request}"
        line = self.process.stdout.readline()
        assert line, f"it ended: {request}"
        return dict(json.loads(line))

    def end(self) -> None:
        """Let it leave."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(LAST_RESORT_S) == 0

    def greet(self, other: Peer) -> float:
        """Send a number to another peer and take it back; return the seconds."""
        return self._echoed("greet", other)

    def greet_again(self, other: Peer) -> float:
        """Do the same on a conversation that stays open from one to the next."""
        return self._echoed("again", other)

    def exchange(self, other: Peer) -> float:
        """Send 16 MiB to another peer and take them back; return the seconds."""
        return self._echoed("call", other)

    def _echoed(self, topic: str, other: Peer) -> float:
        answer = self.ask({topic: other.id})
        assert "took_s" in answer, answer
        self.ways = answer["ways"]
        return float(answer["took_s"])

    @property
    def is_direct(self) -> bool:
        """Whether the last exchange had a way that is no relay's."""
        return any("p2p-circuit" not in way for way in self.ways)


class Node:
    """A command of noloco-node."""

    def __init__(self, home: Path, process: subprocess.Popen[str]) -> None:
        self.home, self.process = home, process

    def output(self) -> str:
        """What it wrote to the standard output so far."""
        return (self.home / "out").read_text()

    def said(self, words: str) -> bool:
        """Whether it has told the person in front of it so."""
        return words in (self.home / "err").read_text()

    def journalled(self, words: str) -> int:
        """Return how often its journal says so."""
        journal = self.home / "journal.jsonl"
        return journal.read_text().count(words) if journal.exists() else 0

    def peer(self) -> str:
        """Return its id."""
        (found,) = re.findall(r"we are (\w+)", (self.home / "err").read_text())
        return str(found)


class Country:
    """Namespaces, lines and processes of one test."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="wan-", dir="/tmp"))
        self._mark = f"nlw{os.getpid()}"
        self._spaces: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._space("core")
        self("core", "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0")

    def __call__(self, space: str, *commands: str) -> None:
        """Run commands in a namespace."""
        for command in commands:
            inside = ["ip", "netns", "exec", self._name(space), *command.split()]
            done = subprocess.run(inside, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{space}: {command}: {done.stderr}"

    def site(self, name: str, number: int) -> str:
        """Make a site with one public address on a line of 20 Mbit/s to the core; return that address."""
        self._space(name)
        self._connect("core", f"to-{name}", f"11.77.{number}.1/24", name, "wan", f"11.77.{number}.2/24")
        self(name, f"ip route add default via 11.77.{number}.1")
        for space, device in (("core", f"to-{name}"), (name, "wan")):
            self(space, f"tc qdisc add dev {device} root tbf rate 20mbit burst 32kb latency 400ms")
        self("core", f"ip rule add iif to-{name} lookup 100")
        return f"11.77.{number}.2"

    def home(self, name: str, router: str) -> None:
        """Make a private network behind a site that becomes its masquerading router."""
        self._space(name)
        self._connect(router, "lan", "192.168.77.1/24", name, "wan", "192.168.77.2/24")
        self(name, "ip route add default via 192.168.77.1")
        self(
            router,
            "sysctl -qw net.ipv4.ip_forward=1",
            "nft add table ip home",
            "nft add chain ip home out { type nat hook postrouting priority 100 ; }",
            "nft add rule ip home out oifname wan masquerade",
            "nft add chain ip home in { type filter hook forward priority 0 ; policy drop ; }",
            "nft add rule ip home in iifname lan accept",
            "nft add rule ip home in ct state established,related accept",
            "nft add chain ip home door { type filter hook input priority 0 ; policy accept ; }",
            "nft add rule ip home door iifname wan ct state new counter drop",
        )

    def lay_line(self, loss: float = 0.0) -> None:
        """Delay what the core forwards from now on, and lose a share of it."""
        line = self.start("core", [str(SUPPORT / "wan_line.py"), str(ONE_WAY_S), str(loss)])
        assert line.stdout is not None
        assert line.stdout.readline() == "ready\n"
        self(
            "core",
            "ip link set late up",
            "ip link set early up",
            "sysctl -qw net.ipv4.conf.early.rp_filter=0",
            "ip route add default dev late table 100",
        )

    def round_trip_s(self, space: str, address: str) -> float:
        """Return how long the opening of a connection to a closed port takes to be refused."""
        program = (
            "import socket,time,sys\nbegun=time.monotonic()\ntry: socket.create_connection((sys.argv[1],9))\n"
            "except ConnectionRefusedError: print(time.monotonic()-begun)"
        )
        inside = ["ip", "netns", "exec", self._name(space), sys.executable, "-c", program, address]
        return float(subprocess.run(inside, capture_output=True, text=True, check=True, timeout=LAST_RESORT_S).stdout)

    def dropped(self, router: str) -> int:
        """Return how many packets a router has turned away at its door."""
        inside = ["ip", "netns", "exec", self._name(router), "nft", "list", "table", "ip", "home"]
        text = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
        return int(re.findall(r"counter packets (\d+)", text)[0])

    def peer(self, space: str) -> Peer:
        """Start a peer."""
        return Peer(self.start(space, [str(SUPPORT / "wan_peer.py")]), self.directory / f"{space}.key")

    def node(self, space: str, *arguments: str) -> Node:
        """Start a command of noloco-node, with a home of its own."""
        home = self.directory / space
        home.mkdir()
        with (home / "out").open("wb") as out, (home / "err").open("wb") as err:
            command = ["-m", "noloco_node", *arguments, "--home", str(home)]
            return Node(home, self.start(space, command, stdout=out, stderr=err))

    def doctor(self, space: str, invite: str) -> Callable[[], dict[str, Any]]:
        """Call the doctor in a namespace; return what waits for the findings, by what they are about."""
        told = self._asks(space, "doctor", invite, "--home", str(self.directory / "doctor"))
        return lambda: {finding["about"]: finding for finding in told()["findings"]}

    def has_begun(self, space: str, invite: str) -> bool:
        """Say whether whoever comes now reads of somebody who has finished a round."""
        told = self._asks(space, "status", invite)()
        return any(record["round"] for stage in told["stages"] for record in stage)

    def _asks(self, space: str, *words: str) -> Callable[[], Any]:
        """Start a command of noloco-node that answers in JSON; return what waits for it."""
        process = self.start(space, ["-m", "noloco_node", *words, "--json"])
        return lambda: json.loads(process.communicate(timeout=LAST_RESORT_S)[0])

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Return what `condition` returns once that is true; fail when a process ends or it takes too long."""
        deadline = time.monotonic() + LAST_RESORT_S
        while not (found := condition()):
            ended = [process.args for process in self._processes if process.poll()]
            words = "\n".join(path.read_text()[-1500:] for path in self.directory.glob("*/err"))
            assert not ended, f"{what}: {ended} ended\n{words}"
            assert time.monotonic() < deadline, f"{what}: waited {LAST_RESORT_S:g} s\n{words}"
            NEVER.wait(0.1)
        return found

    def start(self, space: str, arguments: list[str], **files: Any) -> subprocess.Popen[str]:
        """Start a Python program in a namespace."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._name(space), sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=files.get("stdout", subprocess.PIPE),
            stderr=files.get("stderr"),
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": str(self.directory),
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(SUPPORT))),
            },
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all processes, then the namespaces; a daemon whose client is gone ends by itself."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        for space in self._spaces:
            for pid in subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            ).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _name(self, space: str) -> str:
        return f"{self._mark}-{space}"

    def _space(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(name)], check=True)
        self._spaces.append(self._name(name))
        self(name, "ip link set lo up")

    def _connect(self, near: str, near_device: str, near_address: str, far: str, *end: str) -> None:
        far_device, far_address = end
        peer = f"peer name {far_device} netns {self._name(far)}"
        self(near, f"ip link add {near_device} type veth {peer}")
        for space, device, address in ((near, near_device, near_address), (far, far_device, far_address)):
            self(space, f"ip addr add {address} dev {device}", f"ip link set {device} up")


@pytest.fixture
def country() -> Iterator[Country]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Country()
    try:
        yield made
    finally:
        made.close()


def test_peers_behind_a_router_converse_through_a_single_relay(country: Country) -> None:
    host = country.site("boot", 1)
    country.site("open", 2)
    country.site("router", 3)
    country.home("inside", "router")
    country.lay_line()
    assert country.round_trip_s("open", host) > 2 * ONE_WAY_S
    boot, inside, outside = (country.peer(space) for space in ("boot", "inside", "open"))
    boot.begin(listen=[f"/ip4/{host}/tcp/4001"], reach="open", relays=1)
    inside.begin(bootstrap=boot.addresses)
    assert any("1 relay: nobody can dial us" in text for text in inside.said), inside.said
    assert not any("no relay has given us a place" in text for text in inside.said), inside.said
    assert "/p2p-circuit/" in inside.addresses[0]
    assert country.dropped("router") > 0

    # Who knows but its address at the relay joins by it. Nobody else has opened a door in the router.
    outside.begin(bootstrap=inside.addresses[:1])
    assert outside.said == []
    took_s = outside.exchange(inside)
    # By the relay: libp2p punches no hole as long as fewer than four others have seen our address.
    assert not outside.is_direct
    assert took_s > 2 * 16 * 2**20 * 8 / 20e6, "faster than the line: it took another way"
    kept_s = [inside.greet_again(boot) for _ in range(8)]
    assert min(kept_s) < 4 * ONE_WAY_S, "a call took more than one latency each way"


def test_two_peers_behind_routers_meet_directly_once_others_know_where_they_come_from(country: Country) -> None:
    host = country.site("boot", 1)
    for number, name in enumerate(("one", "other"), 2):
        country.site(f"{name}-r", number)
        country.home(name, f"{name}-r")
    watch = {name: country.site(name, number) for number, name in enumerate(("w1", "w2", "w3", "w4"), 4)}
    country.lay_line()
    boot, one, other = (country.peer(space) for space in ("boot", "one", "other"))
    watchers = {country.peer(name): place for name, place in watch.items()}
    boot.begin(listen=[f"/ip4/{host}/tcp/4001"], reach="open", relays=1)
    with ThreadPoolExecutor() as pool:
        for watcher, place in watchers.items():
            pool.submit(watcher.begin, listen=[f"/ip4/{place}/tcp/4001"], bootstrap=boot.addresses)
    # libp2p believes in a public address of its own once four others have seen it.
    doors = [*boot.addresses, *(watcher.addresses[0] for watcher in watchers)]
    with ThreadPoolExecutor() as pool:
        for peer in (one, other):
            pool.submit(peer.begin, bootstrap=doors)
    for peer in (one, other):
        assert any("nobody can dial us" in text for text in peer.said), peer.said

    def met_directly() -> bool:
        # libp2p tries when a connection through a relay has begun, and then no more. Where that was too early, because
        # one of the two did not yet know where it comes from, it takes a new connection.
        caller = country.peer("one")
        caller.begin(bootstrap=doors)
        met = any(caller.greet(other) > 0.0 and caller.is_direct for _ in range(GREETINGS))
        caller.end()
        return met

    one.end()
    country.until(met_directly, "a hole is punched")
    for router in ("one-r", "other-r"):
        assert country.dropped(router) > 0


def test_nodes_train_from_site_to_site_one_of_them_behind_a_router_and_one_that_comes_late(country: Country) -> None:
    host = country.site("boot", 1)
    country.site("open", 2)
    country.site("router", 3)
    country.home("inside", "router")
    country.site("late", 4)
    country.lay_line(LOSS)
    run = country.directory / "run.toml"
    run.write_text(RUN)
    listen = ("--listen", f"/ip4/{host}/tcp/4001", "--relays", "4")
    boot = country.node("boot", "bootstrap", "--run", str(run), *listen)
    invite = country.until(boot.output, "the bootstrap peer prints its invite").strip()
    # The first stage calls the second one, behind the router, which nobody has told that there is one.
    inside = country.node("inside", "join", invite, "--stage", "1", "--threads", "1")
    outside = country.node("open", "join", invite, "--stage", "0", "--threads", "1")
    country.until(lambda: boot.said("relays for peers behind routers"), "the bootstrap peer tells of its relays")
    country.until(lambda: inside.said("through 4 relays: nobody can dial us"), "it is reached through relays")
    for node in (inside, outside):
        country.until(lambda node=node: node.journalled("inner_step") >= STEPS, f"{STEPS} inner steps")
    assert not outside.said("relays")

    findings = country.doctor("inside", invite)
    # A second replica of that stage copies its weights from behind the router, and meets it. Before the first round,
    # and until everybody has read of it, there would be nothing to copy.
    country.until(lambda: country.has_begun("late", invite), "a newcomer reads that the training has begun")
    late = country.node("late", "join", invite, "--stage", "1", "--threads", "1")
    country.until(lambda: late.journalled("catch_up"), "a newcomer copies the weights")
    country.until(lambda: late.journalled("inner_step"), "a newcomer gets work")
    country.until(lambda: late.journalled(f'"partner":"{inside.peer()}"'), "two replicas meet")

    found = findings()
    assert found["dialled back"]["grade"] == "doubtful"
    assert found["relay"]["grade"] == "good"
