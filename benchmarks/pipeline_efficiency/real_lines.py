"""Tokens a second of real nodes on real lines, against lines without a limit: bfloat16 and the codec of few bits.

    python -m benchmarks.pipeline_efficiency.real_lines      # as root; five minutes; Ctrl-C leaves nothing behind

Two stages of two replicas, each node with its libp2p daemon in a network namespace of its own; between them a core that
forwards. Each node's line has a rate (`tc tbf`, both ways), and every packet takes 50 ms more (a TUN device in user
space: not every kernel has netem). Nodes are production's but for the matrices: in place of a GPU a pause takes a
microbatch's time (`paced_node`), so that two cores can feed four lines. That time is chosen for each line: a microbatch
in bfloat16 takes a sender's line `--ratio` times as long as its device. Microbatches have 1,024 tokens of width 512;
windows of 8, two in flight; a round of 1.3 million parameters in int4 is due every 10 steps.

For each codec a swarm is started once, and its lines and pauses change under way, in turns. A row: the line, the
device's milliseconds a microbatch, tokens a second by the journals of both sources in each turn, how busy this
machine's cores were, and the ratio to the same codec with lines without a limit (at the same pause) in the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from benchmarks.pipeline_efficiency import paced_node
from benchmarks.robustness.process_swarm import run, say
from noloco_node.demo.child_processes import Child, Children, KillPolicy, tied_command
from noloco_node.demo.swarm_processes import READY_S
from noloco_node.errors import Exit, UserError
from noloco_node.journal.events import InnerStep
from noloco_node.journal.reader import Tail
from noloco_node.swarm.invite import SCHEME
from pipeline.messages import ACTIVATION_CODECS

CODECS = ("bfloat16", "int5-int3")
STAGES, REPLICAS = 2, 2
NODES = [f"{stage}{letter}" for stage in range(STAGES) for letter in "abcdefgh"[:REPLICAS]]
TOKENS, WIDTH, WINDOW = 1024, 512, 8
UNLIMITED = 10_000.0
"""Mbit/s of a line without a limit."""
MTU = 9000
"""Every packet passes a process in Python; of the usual size there would be six times as many."""
POLICY = KillPolicy(interrupt_s=0.5, terminate_s=0.5)
ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
RUN = f"""
name = "lines"
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = {WIDTH}
intermediate_size = 32
num_hidden_layers = {STAGES}
num_attention_heads = 8
max_position_embeddings = {TOKENS}
[pipeline]
stages = {STAGES}
replicas = {REPLICAS}
sequence_length = {TOKENS}
microbatch_size = 1
microbatches_per_step = {WINDOW}
windows_in_flight = 2
codec = "{{codec}}"
[inner]
steps = 1000000
warmup_steps = 10
[outer]
inner_steps_per_round = 10
overlap_steps = 4
"""


class Setting(NamedTuple):
    """A line of so many Mbit/s, infinite without a limit, and what a microbatch takes a device."""

    mbit: float
    device_s: float


class Outcome(NamedTuple):
    """One measurement. `cores`: share of this machine's cores that were busy."""

    tokens_per_s: float
    cores: float


def line_s(codec: str, mbit: float) -> float:
    """Return what a microbatch takes the line of a node of the first stage, which sends the most."""
    return (ACTIVATION_CODECS[codec].down.size_bytes(TOKENS, WIDTH) + 8 * TOKENS) * 8 / (1e6 * mbit)


class Lines:
    """Namespaces: a core that forwards and is slow to do so, and a site for each name; gone with the context."""

    def __init__(self, names: Sequence[str], latency_s: float) -> None:
        self.addresses = {name: f"11.78.{number}.2" for number, name in enumerate(names, 1)}
        self._latency_s = latency_s
        self._mark, self._made = f"nll{os.getpid()}", list[str]()
        self._late: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise _unable("network namespaces take root", "run it as root")
        for needed in ("ip", "tc", "/dev/net/tun"):
            if not (Path(needed).exists() or shutil.which(needed)):
                raise _unable(f"there is no {needed}", "install iproute2, load the kernel's module tun")
        try:
            self._lay()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._late is not None:
            self._late.kill()
            self._late.communicate()
        for name in self._made:
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False)

    def _lay(self) -> None:
        self._add("core", "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0")
        self._run("core", "sysctl -qw net.ipv4.conf.default.rp_filter=0")
        late = (
            "env",
            f"PYTHONPATH={SUPPORT}:{ROOT}",
            *tied_command("wan_line", f"{self._latency_s}", "0"),
        )
        command = self.within("core", *late)
        pipe = subprocess.PIPE
        self._late = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._late.stdout is not None
        if self._late.stdout.readline() != "ready\n":
            raise _unable("packets cannot be delayed", "read what stands above")
        for device in ("late", "early"):
            self._run("core", f"ip link set {device} mtu {MTU} txqueuelen 10000 up")
        self._run("core", "sysctl -qw net.ipv4.conf.early.rp_filter=0", "ip route add default dev late table 100")
        for name, address in self.addresses.items():
            self._add(name)
            router, peer = f"{address[:-1]}1", f"peer name wan mtu {MTU} netns {self._space(name)}"
            self._run("core", f"ip link add to-{name} mtu {MTU} type veth {peer}", f"ip link set to-{name} up")
            self._run("core", f"ip addr add {router}/24 dev to-{name}", f"ip rule add iif to-{name} lookup 100")
            self._run(name, f"ip addr add {address}/24 dev wan", "ip link set wan up")
            self._run(name, f"ip route add default via {router}")

    def limit(self, name: str, mbit: float) -> None:
        """Give a site a line of another rate, both ways."""
        for space, device in (("core", f"to-{name}"), (name, "wan")):
            self._run(space, f"tc qdisc replace dev {device} root tbf rate {mbit:g}mbit burst 128kb latency 400ms")

    def within(self, name: str, *command: str) -> list[str]:
        """Return the command that runs another one in a namespace."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _add(self, name: str, *commands: str) -> None:
        subprocess.run(["ip", "netns", "add", self._space(name)], check=True)
        self._made.append(name)
        self._run(name, "ip link set lo up", *commands)

    def _run(self, name: str, *commands: str) -> None:
        for command in commands:
            done = subprocess.run(self.within(name, *command.split()), capture_output=True, text=True, check=False)
            if done.returncode:
                raise _unable(f"{command}: {done.stderr.strip()}", "a kernel with veth, tun and tbf")


class LineSwarm:
    """A swarm of one codec on lines that change; gone with the context."""

    def __init__(self, codec: str, home: Path, lines: Lines, port: int) -> None:
        self._codec, self._home, self._lines, self._port = codec, home, lines, port
        self._children, self._started = Children(POLICY), list[Child]()
        self._pause, self._tails = home / "seconds", list[Tail]()

    async def __aenter__(self) -> Self:
        self._home.mkdir()
        (self._home / "run.toml").write_text(RUN.format(codec=self._codec))
        self._set(Setting(math.inf, 0.05))
        try:
            await self._begin()
        except BaseException:
            await self._children.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._children.stop()

    async def _begin(self) -> None:
        boot = self._start("boot", "noloco_node", "bootstrap", "--run", str(self._home / "run.toml"))
        invite = await boot.line(SCHEME, READY_S)
        limits = ("--device", "cpu", "--threads", "1", "--refresh", "2")
        for name in NODES:
            self._start(name, paced_node.__name__, str(self._pause), "join", invite, "--stage", name[0], *limits)
        self._tails = [Tail(self._home / name / "journal.jsonl") for name in NODES if name[0] == "0"]
        counts = [0] * len(self._tails)
        async with asyncio.timeout(READY_S):
            while min(counts) < 2:
                await asyncio.sleep(0.2)
                counts = [count + len(steps) for count, steps in zip(counts, self._steps(), strict=True)]

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        address = ("--listen", f"/ip4/{self._lines.addresses[name]}/tcp/{self._port}", "--home", str(self._home / name))
        command = self._lines.within(name, *tied_command(module, *arguments, *address))
        self._started.append(self._children.start(name, command, self._home / f"{name}-output"))
        return self._started[-1]

    def _set(self, setting: Setting) -> None:
        # Whole at any moment: nodes read it before every pass.
        (self._home / "next").write_text(f"{setting.device_s}")
        (self._home / "next").replace(self._pause)
        for name in NODES:
            self._lines.limit(name, min(setting.mbit, UNLIMITED))

    def _steps(self) -> list[list[InnerStep]]:
        """Return the sources' steps since the last call; raise `UserError` where a process has ended."""
        for child in self._started:
            if child.exit_code is not None:
                raise child.trouble("it ended")
        return [[event for event in tail.poll() if isinstance(event, InnerStep)] for tail in self._tails]

    async def measure(self, setting: Setting) -> Outcome:
        """Set lines and pauses, let what is under way come home, and take steps for some seconds."""
        # In bfloat16 a window takes so long, where the line has a limit; two are under way.
        window_s = WINDOW * max(setting.device_s, line_s("bfloat16", setting.mbit))
        self._set(setting)
        await asyncio.sleep(2 + 2.5 * window_s)
        self._steps()
        psutil.cpu_percent()
        await asyncio.sleep(max(8.0, 5 * window_s))
        # From step to step: an interval seldom ends with one.
        found = [(sum(step.tokens for step in steps[1:]), steps[-1].at - steps[0].at) for steps in self._steps()]
        return Outcome(sum(tokens / seconds for tokens, seconds in found), psutil.cpu_percent() / 100)


def _unable(why: str, hint: str) -> UserError:
    return UserError("Lines cannot be laid on this machine.", why=why, hint=hint, code=Exit.USAGE)


async def measured(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    settings = [Setting(rate, line_s("bfloat16", mbit) / args.ratio) for mbit in args.mbit for rate in (math.inf, mbit)]
    found: dict[tuple[str, Setting], list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="lines-") as directory:
        home = Path(directory)
        with Lines(("boot", *NODES), args.latency_ms / 1000) as lines:
            for port, codec in enumerate(CODECS, 4001):
                say(f"{codec}: starting {len(NODES)} nodes")
                async with LineSwarm(codec, home / codec, lines, port) as swarm:
                    for turn, setting in itertools.product(range(args.turns), settings):
                        outcome = await swarm.measure(setting)
                        found[codec, setting].append(outcome)
                        say(f"  turn {turn + 1}, {setting.mbit:g} Mbit/s: {outcome.tokens_per_s:,.0f} tokens/s")
    print("| line, Mbit/s | device, ms | line, ms | codec | tokens/s | of the device's | cores busy | of no limit |")
    print("|---|---|---|---|---|---|---|---|")
    for setting, codec in itertools.product(settings, CODECS):
        here, free = found[codec, setting], found[codec, setting._replace(mbit=math.inf)]
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(here, free, strict=True)]
        most = REPLICAS * TOKENS / setting.device_s
        print(
            f"| {'no limit' if setting.mbit == math.inf else f'{setting.mbit:g}'} | {1000 * setting.device_s:.0f} | "
            f"{1000 * line_s(codec, setting.mbit):.0f} | {codec} | "
            f"{', '.join(f'{one.tokens_per_s:,.0f}' for one in here)} | "
            f"{statistics.median(one.tokens_per_s for one in here) / most:.2f} | "
            f"{', '.join(f'{one.cores:.0%}' for one in here)} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        )
    return 0


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 20.0])
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of every packet, each way")
    parser.add_argument("--ratio", type=float, default=2.1, help="of a line's time in bfloat16 to a device's")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    return run(lambda: measured(args))


if __name__ == "__main__":
    sys.exit(main())
