"""Counts the modules that a reader opens to follow one thing through the running product.

    python -m benchmarks.structure.ways [--way microbatch|round|join|field|ban]... [--json]

The first line of every way says how it is followed. A module counts if one of its functions or methods ran that has
more than a trivial body (`call_trace.does_something`), and did not run in an idle stretch before. Modules of the
simulator never count. A leaf imports no module of the product; leaves are counted, and named apart. `join` differs: of
the many modules that run, those count that are on the stack whenever the journal gets an event or a socket some bytes.
One minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median_low
from types import SimpleNamespace
from typing import Any

from benchmarks.structure.call_trace import CallTrace, modules
from benchmarks.structure.source import read_tree

GOALS = {"microbatch": 15, "round": 12, "join": 20, "field": 4, "ban": 8}
LAYERS_GOAL = 6
IDLE_S = 3.0
BAN_S = 200.0
LOCAL = "/ip4/127.0.0.1/tcp/0"
RUN = """
name = "ways"
seed = 7
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = {width}
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 32
[pipeline]
stages = {stages}
replicas = {replicas}
sequence_length = 32
microbatch_size = 4
microbatches_per_step = {window}
check_share = {check_share}
[inner]
steps = 1000
warmup_steps = 2
[outer]
inner_steps_per_round = 8
overlap_steps = 4
"""


@dataclass
class Way:
    """The modules that one way opens. `followed`: how the program followed it. `more`: further figures, by name."""

    followed: str
    modules: list[str]
    more: dict[str, Any] = field(default_factory=dict)
    count: int = -1

    def __post_init__(self) -> None:
        """Count the modules, unless a figure was given."""
        self.count = len(self.modules) if self.count < 0 else self.count


def run_text(*, stages: int = 1, replicas: int = 1, window: int = 1, width: int = 32, check_share: float = 0.0) -> str:
    """Return a run file of a model that costs next to nothing."""
    return RUN.format(stages=stages, replicas=replicas, window=window, width=width, check_share=check_share)


def _ignore(peer: str, for_s: float) -> None:
    pass


class Swarm:
    """Replicas of production in one process, on the networks that they are given, and a roster that stays as it is."""

    def __init__(self, text: str) -> None:
        from noloco_node.planning.model_layout import model_layout
        from noloco_node.swarm.run_distribution import RunFileText

        self.run_file = RunFileText(text, "the run file of the ways")
        self.run = self.run_file.run
        self.layout = model_layout(self.run)
        self.places: list[tuple[str, int]] = []
        self.events: list[Any] = []

    @property
    def roster(self) -> Any:
        """Return a roster in which all replicas train."""
        from noloco_node.run.peer_state import PeerState
        from noloco_node.swarm.roster import PeerRecord, Roster

        stages: list[list[Any]] = [[] for _ in range(self.run.pipeline.stages)]
        for peer, stage in self.places:
            record = PeerRecord(peer=peer, stage=stage, state=PeerState.TRAINING, round=0, inner_steps=0, progress=0.0)
            stages[stage].append(record)
        return Roster(stages=tuple(map(tuple, stages)))

    async def replica(
        self, network: Any, stage: int, device: Any, shut_out: Callable[[str, float], None] = _ignore
    ) -> Any:
        """Return a replica at a stage that serves what a node serves of it."""
        import torch

        from noloco_node.machine.interface import Reporter
        from noloco_node.node.node_context import NodeContext
        from noloco_node.node.replica import Replica
        from noloco_node.planning.model_layout import make_stage
        from noloco_node.run.protocols import GOSSIP, MICROBATCH, gossip_schema, microbatch_schema, topic
        from noloco_node.state_sync.starting_state import from_seed

        part = make_stage(self.run, self.layout, stage, torch.device("cpu"))
        members: Any = self
        host: Any = SimpleNamespace(device=device, unix_time=time.time, line_s=lambda stage: 0.0)
        context = NodeContext(
            run_file=self.run_file,
            dimensions=self.layout,
            network=network,
            membership=members,
            host=host,
            reporter=Reporter(record=self.events.append, say=print),
        )
        replica = Replica(context, stage, part, from_seed(part), shut_out)
        self.places.append((network.peer_id, stage))
        await network.serve(topic(GOSSIP, stage), gossip_schema(self.run, part.shapes), replica.rounds.serve)
        schema = microbatch_schema(self.run, self.layout.width)
        await network.serve(topic(MICROBATCH, stage), schema, replica.microbatches.serve)
        return replica

    async def tokens(self) -> Any:
        """Return the tokens of one microbatch."""
        import torch

        pipeline = self.run.pipeline
        return torch.randint(256, (pipeline.microbatch_size, pipeline.sequence_length + 1))

    async def send(self, replica: Any, count: int) -> None:
        """Have a source send so many microbatches through a replica of stage 0, one after another."""
        from noloco_node.node.microbatches import MicrobatchSource

        batch = self.run.pipeline.microbatch_size
        source = MicrobatchSource(
            self.tokens,
            replica.worker.process,
            lambda samples, _: samples / (count * batch),
            prove=lambda signer, samples: None,
            me=replica.peer,
            budget_s=self.run.pipeline.budget_s,
            rng=Random(0),
        )
        await source.run(1)


class Peers:
    """Peers with real libp2p daemons and devices of their own, in this process."""

    def __init__(self) -> None:
        self._open = AsyncExitStack()
        self._bootstrap: tuple[str, ...] = ()
        self.bans: list[Any] = []

    async def __aenter__(self) -> Peers:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.aclose()

    async def network(self) -> Any:
        """Return the network of another peer, as a node has it."""
        from noloco_node.libp2p.network import Libp2pNetwork
        from noloco_node.libp2p.settings import NetworkSettings
        from noloco_node.network.bans import BanHook
        from noloco_node.network.calls import HookedNetwork
        from noloco_node.network.timeouts import DialTimeouts

        settings = NetworkSettings(run="ways", listen=(LOCAL,), bootstrap=self._bootstrap)
        network = await self._open.enter_async_context(Libp2pNetwork.open(settings, lambda _: None))
        self._bootstrap = self._bootstrap or await network.addresses()
        self.bans.append(BanHook())
        return HookedNetwork(network, DialTimeouts(), self.bans[-1])

    def device(self) -> Any:
        """Return another device."""
        import torch

        from noloco_node.machine.device import Device

        return self._open.enter_context(closing(Device(torch.device("cpu"))))


def follow_microbatch() -> Way:
    """Follow a source's microbatch over two libp2p daemons to the next stage and back, until its window is full."""
    trace = CallTrace("pipeline.worker")

    async def main() -> tuple[Any, Any]:
        swarm = Swarm(run_text(stages=2, window=8))
        async with Peers() as peers:
            last = await swarm.replica(await peers.network(), 1, peers.device())
            first = await swarm.replica(await peers.network(), 0, peers.device())
            await swarm.send(first, 2)
            trace.begin()
            await asyncio.sleep(IDLE_S)
            idle = trace.end()
            trace.begin()
            await swarm.send(first, 1)
            ran = trace.end()
            await first.aclose()
            await last.aclose()
        return idle, ran

    with trace.watch():
        idle, ran = trace.run(main())
    more = {"layers": len(trace.layers), "goal of layers": LAYERS_GOAL, "from worker to socket": list(trace.layers)}
    return Way("one microbatch from source to window, over two libp2p daemons", modules(ran, idle), more)


def follow_round() -> Way:
    """Follow a round of two replicas, from its opening to both outer steps."""
    from gossip.interface import OuterStepTaken
    from noloco_node.sim import clock
    from noloco_node.sim.hardware.priced_stage import VirtualDevice
    from noloco_node.sim.network.sim_network import SimNetwork

    trace = CallTrace()

    async def main() -> tuple[Any, Any]:
        hub, swarm = SimNetwork(), Swarm(run_text(replicas=2))
        pair = [await swarm.replica(hub.network(name), 0, VirtualDevice(0.5)) for name in ("peer-a", "peer-b")]
        tasks = [asyncio.create_task(work) for each in pair for work in _training(swarm, each)]

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():  # noqa: ASYNC110 - the time is virtual
                await asyncio.sleep(0.1)

        await until(lambda: all(each.inner_steps >= 2 for each in pair))
        trace.begin()
        await until(lambda: all(each.inner_steps >= 4 for each in pair))
        idle = trace.end()
        trace.begin()
        await until(lambda: sum(isinstance(event, OuterStepTaken) for event in swarm.events) >= 2)
        ran = trace.end()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return idle, ran

    with trace.watch():
        idle, ran = clock.run(main())
    found = [name for name in modules(ran, idle) if not name.startswith(("noloco_node.sim", "noloco_node.network"))]
    return Way("one round of two replicas over the simulated network, which does not count", found)


def _training(swarm: Swarm, replica: Any) -> list[Any]:
    async def no_pause() -> None:
        await asyncio.sleep(0)

    return [swarm.send(replica, 1000), replica.train(no_pause), replica.rounds.run()]


def follow_ban() -> Way:
    """Follow a gradient that contradicts those of two other replicas, until spot checks ban its sender."""
    trace = CallTrace()

    async def main() -> Any:
        import torch

        from noloco_node.run.protocols import MICROBATCH, microbatch_schema, topic
        from pipeline.messages import Gradient

        swarm, banned = Swarm(run_text(stages=2, replicas=3, window=64, width=128, check_share=0.5)), asyncio.Event()

        def answer(factor: float) -> Callable[[Any], Awaitable[None]]:
            async def serve(conversation: Any) -> None:
                while True:
                    microbatch = await conversation.receive()
                    noise = 1.0 + 0.01 * torch.rand(microbatch.hidden.shape)
                    hidden = (factor * 0.01 * microbatch.hidden.float() * noise).to(microbatch.hidden.dtype)
                    trace.begin()
                    await conversation.send(Gradient(hidden=hidden, loss=1.0, tokens=128))

            return serve

        def shut_out(peer: str, for_s: float) -> None:
            peers.bans[-1].shut_out(peer, for_s)
            ran.extend(trace.end())
            banned.set()

        async def send_for_ever(first: Any) -> None:
            # Checks end after the microbatches that they repeat, on a busy machine long after: the source goes on.
            while True:
                await swarm.send(first, 60)

        ran: list[Any] = []
        async with Peers() as peers:
            for factor in (1.0, 1.0, -1.0):
                network = await peers.network()
                swarm.places.append((network.peer_id, 1))
                schema = microbatch_schema(swarm.run, swarm.layout.width)
                await network.serve(topic(MICROBATCH, 1), schema, answer(factor))
            first = await swarm.replica(await peers.network(), 0, peers.device(), shut_out)
            await swarm.send(first, 1)
            trace.begin()
            await asyncio.sleep(IDLE_S)
            idle = trace.end()
            sending = asyncio.create_task(send_for_ever(first))
            ending = asyncio.create_task(banned.wait())
            await asyncio.wait({sending, ending}, return_when=asyncio.FIRST_COMPLETED, timeout=BAN_S)
            for task in (sending, ending):
                task.cancel()
            await asyncio.wait({sending, ending})
            await first.aclose()
        if not ran:
            raise RuntimeError(f"the liar was not banned within {BAN_S:g} s")
        return idle, ran

    with trace.watch():
        idle, ran = trace.run(main())
    followed = "the last gradient that spot checks need to ban a liar, from its arrival to the ban"
    return Way(followed, modules(ran, idle))


def follow_join() -> Way:
    """Follow the command `join` in a process of its own, beside a bootstrap peer, until the first inner step."""
    from noloco_node.demo.child_processes import Children
    from noloco_node.demo.swarm_processes import bootstrap

    async def main() -> Any:
        with tempfile.TemporaryDirectory(prefix="ways-", dir="/tmp") as folder:
            children, home = Children(), Path(folder)
            try:
                (home / "run.toml").write_text(run_text())
                invite = await bootstrap(children, home / "run.toml", home / "bootstrap")
                options = (invite, "--home", str(home / "node"), "--listen", LOCAL, "--device", "cpu", "--threads", "1")
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", __spec__.name, "--inside", str(home / "found.json"), *options),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
                async with asyncio.timeout(120.0):
                    _, said = await child.communicate()
                if not (home / "found.json").exists():
                    raise RuntimeError(f"the node took no step:\n{said.decode()}")
                return json.loads((home / "found.json").read_text())
            finally:
                await children.stop()

    found = asyncio.run(main())
    followed = "`join` to the first inner step: modules on the stack at an event of the journal or a write to a socket"
    return Way(followed, found["stack"], {"modules that run at all": len(found["ran"])})


def join_inside(found: Path, arguments: Sequence[str]) -> None:
    """Be the process of `follow_join`: write the modules when the first inner step is in the journal, and leave."""
    import os
    import signal

    import uvloop

    from noloco_node.cli.main import app
    from noloco_node.journal.events import InnerStep
    from noloco_node.journal.writer import Journal

    trace, write = CallTrace(), Journal.write

    def write_and_look(journal: Journal, event: Any) -> None:
        write(journal, event)
        trace.on_stacks |= dict.fromkeys(trace.stack(sys._getframe()))
        if isinstance(event, InnerStep) and not found.exists():
            found.write_text(json.dumps({"ran": modules(trace.end()), "stack": list(trace.on_stacks)}))
            os.kill(os.getpid(), signal.SIGINT)

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()
        loop.set_task_factory(trace.begin_task)
        return loop

    uvloop.new_event_loop = new_event_loop
    Journal.write = write_and_look  # type: ignore[method-assign, assignment]
    with trace.watch():
        trace.begin()
        app(["join", *arguments])


def follow_fields() -> Way:
    """Count the modules that name each field of the run file, by attribute or keyword, and can have its section."""
    import ast

    import msgspec

    from noloco_node.run.config import RunConfig

    named: dict[str, set[str]] = {}
    source = read_tree()
    for name, module in source.modules.items():
        nodes = list(ast.walk(module.tree))
        called = {node.func for node in nodes if isinstance(node, ast.Call)}  # a method: no field is called
        named[name] = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node not in called}
        named[name] |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        named[name] |= {"class " + node.id for node in nodes if isinstance(node, ast.Name)}
    counts: dict[str, list[str]] = {}
    for section in msgspec.structs.fields(RunConfig):
        kind = section.type
        parts = msgspec.inspect.type_info(kind)
        if not isinstance(parts, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            continue
        for part in parts.fields:
            reach = {section.name, f"class {kind.__name__}", "class RunConfig"}
            users = {name for name, words in named.items() if part.name in words and words & reach}
            counts[f"{section.name}.{part.name}"] = sorted(users | {kind.__module__})
    sizes = {name: len(users) for name, users in counts.items()}
    largest = max(sizes, key=sizes.__getitem__)
    more = {
        "fields": len(sizes),
        "largest": sizes[largest],
        "the field named most": largest,
        "over the goal": sum(size > GOALS["field"] for size in sizes.values()),
    }
    return Way(
        "modules that name a field of the run file: the median field", counts[largest], more, median_low(sizes.values())
    )


FOLLOW: dict[str, Callable[[], Way]] = {
    "microbatch": follow_microbatch,
    "round": follow_round,
    "join": follow_join,
    "field": follow_fields,
    "ban": follow_ban,
}


def main() -> None:
    """Follow what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", action="append", choices=[*FOLLOW], help="follow this way alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    graph, result = read_tree().graph, dict[str, dict[str, Any]]()
    for name in options.way or FOLLOW:
        way = FOLLOW[name]()
        leaves = [each for each in way.modules if not graph.get(each)]
        result[name] = {"count": way.count, "goal": GOALS[name], "followed": way.followed, **way.more}
        result[name] |= {"of which leaves": leaves, "modules": way.modules}
    print(json.dumps(result, indent=1) if options.json else "\n\n".join(_text(*item) for item in result.items()))


def _text(name: str, found: dict[str, Any]) -> str:
    lines = [f"{name}: {found['count']} modules (goal {found['goal']}) - {found['followed']}"]
    for label, value in list(found.items())[3:]:
        shown = f" {len(value)}\n    " + "\n    ".join(value) if isinstance(value, list) else f" {value}"
        lines.append(f"  {label}:{shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        join_inside(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
