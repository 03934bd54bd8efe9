"""Networks as they are: two sites on a long, thin line, and a peer behind a router that lets nobody in.

Each test makes network namespaces for itself: a core that forwards, sites beside it with public addresses, and a home
whose router masquerades (nftables) and drops what nobody inside asked for. Between sites lie 20 Mbit/s (`tc tbf`) and
50 ms for each round trip (`wan_line`). The addresses begin with 11, which libp2p takes for public ones. Peers are
threads, and nodes are processes, in these namespaces; everything goes away with the test, also when it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from handlers import echo
from limits import LAST_RESORT_S
from node_forks import enter_network
from process_swarm import SLOW, TINY_MODEL, look, peer, steps
from processes import Command, Commands
from repository import ROOT

from gossip.interface import OuterStepTaken
from noloco_node.journal.events import CatchUp
from noloco_node.libp2p import reachability
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings, Reachability
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, TensorSpec
from noloco_node.node.microbatches import ConversationPool

T = TypeVar("T")

ONE_WAY_S = 0.025
LOSS = 0.002
GREETINGS = 200
"""By which a hole is punched, or nobody tries any more: some twenty seconds."""


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


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """As many as the topic says."""

    numbers: torch.Tensor


SIZES = {"greet": 1, "exchange": 2 * 2**18}
"""Numbers of each request, by topic: one, and 2 MiB, many times what a relay carries unless it is told to."""
SCHEMAS = {
    topic: Schema({Numbers: MessageSpec("Numbers", {"numbers": TensorSpec((size,), "float32")})})
    for topic, size in SIZES.items()
}


class Peer:
    """A peer that echoes what others send: a thread, its event loop and its daemon, in a network namespace."""

    def __init__(self, namespace: str, identity: Path) -> None:
        self._namespace, self._identity = namespace, identity
        self._thread: threading.Thread | None = None
        self.addresses: list[str] = []
        self.said: list[str] = []

    def begin(self, *, relays: int = 0, reach: str = "auto", **wanted: Any) -> None:
        """Join; what it is told of is noted."""
        settings = NetworkSettings(
            run="wan",
            identity=self._identity,
            listen=tuple(wanted.get("listen", ["/ip4/0.0.0.0/tcp/0"])),
            bootstrap=tuple(wanted.get("bootstrap", [])),
            reach=Reachability(reach),
        )
        joined = Future[None]()
        self._thread = threading.Thread(target=self._live, args=(settings, relays, joined), daemon=True)
        self._thread.start()
        joined.result(LAST_RESORT_S)

    def end(self) -> None:
        """Let it leave, if it has joined and not left yet."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leaves.set)
            self._thread.join(LAST_RESORT_S)

    def greet(self, other: Peer) -> float:
        """Send a number to another peer and take it back; return the seconds."""
        return self._do(self._echoed(self.network.talk(other.network.peer_id, "greet", SCHEMAS["greet"]), 1))

    def reaches(self, other: Peer) -> bool:
        """Say whether a greeting comes back."""
        try:
            return self.greet(other) > 0.0
        except ConnectionError:
            return False

    def greet_again(self, other: Peer) -> float:
        """Do the same on a conversation that stays open from one to the next."""
        return self._do(self._echoed(self._pool.talk(other.network.peer_id), 1))

    def exchange(self, other: Peer) -> float:
        """Send 2 MiB to another peer and take them back; return the seconds."""
        talk = self.network.talk(other.network.peer_id, "exchange", SCHEMAS["exchange"])
        return self._do(self._echoed(talk, SIZES["exchange"]))

    def is_direct(self, other: Peer) -> bool:
        """Say whether there is a way to another peer that is no relay's."""

        async def ways() -> list[str]:
            session = await self.network._now()
            neighbours = await session.neighbours()
            return [each.transport for each in neighbours if each.peer == other.network.peer_id]

        return any("p2p-circuit" not in way for way in self._do(ways()))

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(LAST_RESORT_S)

    def _live(self, settings: NetworkSettings, relays: int, joined: Future[None]) -> None:
        try:
            enter_network(self._namespace)
            asyncio.run(self._serve(settings, relays, joined))
        except BaseException as error:
            if joined.done():
                raise
            joined.set_exception(error)

    async def _serve(self, settings: NetworkSettings, relays: int, joined: Future[None]) -> None:
        self._loop, self._leaves = asyncio.get_running_loop(), asyncio.Event()
        keys = [Path(f"{self._identity}-{number}") for number in range(1, relays + 1)]
        async with AsyncExitStack() as stack:
            self.network = await stack.enter_async_context(Libp2pNetwork.open(settings, self.said.append))
            await stack.enter_async_context(self.network.relaying(keys))
            for topic, schema in SCHEMAS.items():
                await self.network.serve(topic, schema, echo)
            pool = ConversationPool(self.network, "greet", SCHEMAS["greet"])
            self._pool = await stack.enter_async_context(aclosing(pool))
            self.addresses = await self.network.addresses()
            joined.set_result(None)
            await self._leaves.wait()

    async def _echoed(self, talk: AbstractAsyncContextManager[Conversation], size: int) -> float:
        numbers = torch.randn(size)
        begun_s = time.monotonic()
        async with talk as conversation:
            await conversation.send(Numbers(numbers=numbers))
            answer = await conversation.receive()
        assert torch.equal(answer.numbers, numbers)
        return time.monotonic() - begun_s


class Country:
    """Namespaces, lines, peers and commands of one test."""

    def __init__(self) -> None:
        self.commands = Commands()
        self._peers: list[Peer] = []
        self._line: subprocess.Popen[str] | None = None
        self._mark = f"nlw{os.getpid()}"
        self._spaces: list[str] = []
        self._space("core")
        self("core", "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0")

    def __call__(self, space: str, *commands: str) -> None:
        """Run commands in a namespace."""
        for command in commands:
            self.output(space, *command.split())

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

    def forward(self, router: str, port: int) -> None:
        """Let what comes to a port of a router through to the home behind it."""
        self(
            router,
            "nft add chain ip home enter { type nat hook prerouting priority -100 ; }",
            f"nft add rule ip home enter iifname wan tcp dport {port} dnat to 192.168.77.2:{port}",
            "nft add rule ip home in ct status dnat accept",
        )

    def move(self, site: str, number: int) -> str:
        """Give a router another address in place of its first, and end what went by that; return the new one."""
        address = f"11.77.{number}.9"
        self("core", f"ip route add blackhole 11.77.{number}.2/32")
        self(
            site,
            f"ip addr del 11.77.{number}.2/24 dev wan",
            f"ip addr add {address}/24 dev wan",
            f"ip route replace default via 11.77.{number}.1",
            f"nft insert rule ip home in ct reply ip daddr 11.77.{number}.2 meta l4proto tcp reject with tcp reset",
        )
        return address

    def lay_line(self, loss: float = 0.0) -> None:
        """Delay what the core forwards from now on, and lose a share of it."""
        program = [sys.executable, str(ROOT / "tests" / "support" / "wan_line.py"), str(ONE_WAY_S), str(loss)]
        inside = ["ip", "netns", "exec", self.network("core")]
        self._line = subprocess.Popen([*inside, *program], stdout=subprocess.PIPE, text=True)
        assert self._line.stdout.readline() == "ready\n"
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
        return float(self.output(space, sys.executable, "-c", program, address))

    def dropped(self, router: str) -> int:
        """Return how many packets a router has turned away at its door."""
        found = re.search(r"counter packets (\d+)", self.output(router, "nft", "list", "table", "ip", "home"))
        return int(found[1])

    def output(self, space: str, *command: str) -> str:
        """Run a command in a namespace; return what it says."""
        inside = ["ip", "netns", "exec", self.network(space), *command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=LAST_RESORT_S)
        assert done.returncode == 0, f"{space}: {command}: {done.stderr}"
        return done.stdout

    def join(self, space: str, invite: str, stage: int) -> Command:
        """Start a node in a namespace."""
        options = ("--stage", str(stage), "--threads", "1", *SLOW)
        return self.commands.start("join", invite, *options, home=True, network=self.network(space))

    def peer(self, space: str) -> Peer:
        """Start a peer."""
        self._peers.append(Peer(self.network(space), self.commands.directory / f"{space}.key"))
        return self._peers[-1]

    def close(self) -> None:
        """End all peers and processes, then the namespaces."""
        for each in self._peers:
            each.end()
        if self._line is not None:
            self._line.terminate()
            self._line.communicate()
        self.commands.end()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def network(self, space: str) -> str:
        """Return the name of a namespace."""
        return f"{self._mark}-{space}"

    def _space(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self.network(name)], check=True)
        self._spaces.append(self.network(name))
        self(name, "ip link set lo up")

    def _connect(self, near: str, near_device: str, near_address: str, far: str, *end: str) -> None:
        far_device, far_address = end
        peer = f"peer name {far_device} netns {self.network(far)}"
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
    assert not outside.is_direct(inside)
    assert took_s > 2 * 2 * 2**20 * 8 / 20e6, "faster than the line: it took another way"
    kept_s = [inside.greet_again(boot) for _ in range(8)]
    assert min(kept_s) < 4 * ONE_WAY_S, "a call took more than one latency each way"


def test_newcomers_reach_a_peer_with_a_forwarded_port_after_its_line_has_got_another_address(
    country: Country, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "LOOK_S", 1.0)
    host = country.site("boot", 1)
    country.site("open", 2)
    before = country.site("router", 3)
    country.home("inside", "router")
    country.forward("router", 4001)
    boot, inside, outside = (country.peer(space) for space in ("boot", "inside", "open"))
    boot.begin(listen=[f"/ip4/{host}/tcp/4001"], reach="open")
    inside.begin(listen=["/ip4/0.0.0.0/tcp/4001"], bootstrap=boot.addresses)
    assert inside.said == [f"others reach us at /ip4/{before}/tcp/4001: announcing that"]
    after = country.move("router", 3)
    said = f"others reach us at /ip4/{after}/tcp/4001: announcing that"
    country.commands.until(lambda: said in inside.said, said)
    outside.begin(bootstrap=boot.addresses)
    country.commands.until(lambda: outside.reaches(inside), "a newcomer reaches it")


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
        try:
            return any(caller.greet(other) > 0.0 and caller.is_direct(other) for _ in range(GREETINGS))
        except ConnectionError:  # the relay may not yet have seen the end of the caller before, who has the same name
            return False
        finally:
            caller.end()

    one.end()
    country.commands.until(met_directly, "a hole is punched")
    for router in ("one-r", "other-r"):
        assert country.dropped(router) > 0


def test_nodes_train_from_site_to_site_one_of_them_behind_a_router_and_one_that_comes_late(country: Country) -> None:
    host = country.site("boot", 1)
    country.site("open", 2)
    country.site("router", 3)
    country.home("inside", "router")
    country.site("late", 4)
    country.lay_line(LOSS)
    commands = country.commands
    run = commands.directory / "run.toml"
    run.write_text(RUN)
    listen = ("--listen", f"/ip4/{host}/tcp/4001", "--relays", "4")
    boot = commands.start("bootstrap", "--run", str(run), *listen, home=True, network=country.network("boot"))
    invite = commands.until(lambda: boot.output.strip(), "the bootstrap peer prints its invite", alive=[boot])
    # The first stage calls the second one, behind the router, which nobody has told that there is one.
    inside, outside = country.join("inside", invite, 1), country.join("open", invite, 0)
    alive = [boot, inside, outside]

    def until_said(command: Command, words: str) -> None:
        commands.until(lambda: words in command.complaint, words, alive=alive)

    until_said(boot, "relays for peers behind routers")
    until_said(inside, "through 4 relays: nobody can dial us")
    commands.until(lambda: min(steps(inside), steps(outside)) >= STEPS, f"{STEPS} inner steps", alive=alive)
    assert "relays" not in outside.complaint

    doctor = commands.start("doctor", invite, "--json", home=True, network=country.network("inside"))
    # A second replica of that stage copies its weights from behind the router, and meets it. Before the first round,
    # and until everybody has read of it, there would be nothing to copy.

    def has_begun() -> bool:
        stages = look(commands, invite, country.network("late"))["stages"]
        return any(record["round"] for stage in stages for record in stage)

    commands.until(has_begun, "a newcomer reads that the training has begun", alive=alive)
    late = country.join("late", invite, 1)
    alive.append(late)
    commands.until(lambda: late.events(CatchUp), "a newcomer copies the weights", alive=alive)
    commands.until(lambda: steps(late), "a newcomer gets work", alive=alive)
    partner = peer(inside)
    commands.until(
        lambda: any(step.partner == partner for step in late.events(OuterStepTaken)), "two replicas meet", alive=alive
    )

    doctor.wait()
    found = {finding["about"]: finding for finding in json.loads(doctor.output)["findings"]}
    assert found["dialled back"]["grade"] == "doubtful"
    assert found["relay"]["grade"] == "good"
