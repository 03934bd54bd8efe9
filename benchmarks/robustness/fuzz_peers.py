"""Feed broken messages, records and texts to peers that live: a node, a bootstrap peer, a looker, members of an owner.

    python -m benchmarks.robustness.fuzz_peers                        # 10^6 in one process
    python -m benchmarks.robustness.fuzz_peers --count 20000 --first 7  # one chunk

Production peers live in memory and virtual time: two nodes of each of two stages, without any ban. The benchmark breaks
messages and records that these peers really sent and published, as `benchmarks.robustness.fuzz` does:

    messages    to every topic that a node, a bootstrap peer or a member serves: they decode what comes, and answer
    traffic     what one node of each stage says to others, as partner, next stage, source, donor, and in its answers
    records     under all keys of the run: nodes, the bootstrap peer, a looker and a member read them, and hivemind's
                checks of what is stored for others look at them
    texts       the invite and the run file that a stranger gives

In each chunk none of these peers may end, and no handler may raise anything but a `ConnectionError`. The honest nodes
train on. When the strangers have gone, no task, no conversation and no new peer of theirs may be left. Printed are what
became of all, the seconds of CPU, and by how much the process grew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.robustness.fuzz import broken, broken_header, broken_value, good_frames
from noloco_node.admission import ticket_service
from noloco_node.admission.admission_hook import AdmissionHook
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER, peer_of
from noloco_node.admission.ticket_service import TicketService, TicketSigner
from noloco_node.errors import UserError
from noloco_node.libp2p.record_checks import Signatures, Signer, place_of
from noloco_node.network import wire
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.schema import Schema, Violation
from noloco_node.observe.page_frame import page_frame
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.sim.network.conversation import EndOfStream, StreamEnd
from noloco_node.sim.network.sim_network import SimPeerNetwork
from noloco_node.sim.scenario.scenario import DevicesConfig, Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import SimSetup, build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import WeightServer
from noloco_node.storage.weight_store import WeightStore, described
from noloco_node.swarm import invite, run_distribution, speed_test
from noloco_node.swarm.run_distribution import RunFileText, RunHistory

RUN = """
name = "fuzzed"
precision = "float32"
inner = { steps = 100000, learning_rate = 1e-3, warmup_steps = 6 }
outer = { inner_steps_per_round = 4, overlap_steps = 2 }
pipeline = { stages = 2, replicas = 2, sequence_length = 8, microbatch_size = 1, microbatches_per_step = 2 }

[model]
architecture = "llama"

[model.sizes]
vocab_size = 384
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 16
"""
HOSTILE = ("s0r1", "s1r1")
"""Nodes whose traffic is broken on its way."""
BROKEN_TRAFFIC = 0.5
CHUNK = 100_000
CALLS, RECORDS, TEXTS = 240, 240, 8
"""Messages, records and texts a look, of which there is one about every second."""
NAMES = 400
KEPT = 24
"""Of real messages of a topic, and of real records of a key, that are broken again and again."""
PATIENCE_S = 30.0
FORWARD_S = 0.5
"""Of a microbatch in a stage: what nodes say to each other comes oftener where it is short."""
WARM_S = 100.0
"""Times `forward_s`: for so long the swarm trains alone, so that there are messages and records of all kinds."""
QUIET_S = 900.0
"""After the last stranger: longer than any handler waits for anybody."""
MOST_MORE_TASKS = 8
"""Of honest peers, whose number changes by one or two with the microbatches under way."""


class _Delivery(NamedTuple):
    """What a receiver decodes from bytes: messages, and how the stream ends; None where it stays open."""

    messages: list[Any]
    ending: EndOfStream | None
    outcome: str


def delivered(data: bytes, schema: Schema) -> _Delivery:
    """Decode bytes as a stream does."""
    decoder, place, messages = wire.FrameDecoder(schema), 0, list[Any]()
    ending, outcome = EndOfStream(ConnectionResetError, "the stream broke in a frame"), "waits for more"
    try:
        while place < len(data):
            space = decoder.wants()
            count = min(len(space), len(data) - place)
            space[:count] = data[place : place + count]
            place += count
            frame = decoder.got(count)
            match frame.kind if frame is not None else None:
                case wire.FrameKind.MESSAGE:
                    messages.append(frame.content)  # type: ignore[union-attr]
                case wire.FrameKind.END:
                    return _Delivery(messages, EndOfStream(None, ""), "end")
                case wire.FrameKind.ERROR:
                    return _Delivery(messages, EndOfStream(ConnectionResetError, "an error"), "error")
            if frame is not None and place == len(data):
                return _Delivery(messages, None, "message" if messages else "beat")
    except Violation as violation:
        return _Delivery(messages, EndOfStream(Violation, str(violation)), "violation")
    return _Delivery(messages, ending, outcome)


class Samples:
    """Real messages by topic and real records by key, some of each; the newest replace others by chance."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.frames: dict[str, list[bytes]] = {}
        self.records: dict[str, list[bytes]] = {}

    def keep(self, table: dict[str, list[bytes]], name: str, make: Callable[[], bytes]) -> None:
        kept = table.setdefault(name, [])
        if len(kept) < KEPT:
            kept.append(make())
        elif self._rng.random() < 0.02:
            kept[self._rng.randrange(KEPT)] = make()


class BrokenTraffic:
    """Breaks what hostile nodes send, and keeps samples of what honest ones do."""

    def __init__(self, rng: Random, samples: Samples, seen: Counter[str]) -> None:
        self._rng, self._samples, self._seen = rng, samples, seen
        self.breaks = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        take = StreamEnd._take

        def taken(end: StreamEnd, message: Any) -> None:
            kind = f"{end.topic.partition('/')[0]}|{type(message).__name__}"
            frames = self._samples.frames
            if end.peer not in HOSTILE and type(message) in end.schema.rules:
                self._samples.keep(frames, kind, lambda: b"".join(map(bytes, wire.encode(message, end.schema))))
            if not self.breaks or end.peer not in HOSTILE or self._rng.random() >= BROKEN_TRAFFIC:
                take(end, message)
                return
            how = self._rng.choice((broken, broken_header))
            data = how(self._rng, [b"".join(map(bytes, wire.encode(message, end.schema)))])
            found = delivered(data, end.schema)
            self._seen[f"traffic: {found.outcome}"] += 1
            for each in found.messages:
                take(end, each)
            if found.ending is not None:
                end._take_end(found.ending)

        with mock.patch.object(StreamEnd, "_take", taken):
            yield


class Strangers(Watcher):
    """Names that call, publish, and give texts, until `count` have been tried; and the peers that are no nodes."""

    def __init__(
        self, world: World, rng: Random, samples: Samples, traffic: BrokenTraffic, count: int, folder: Path
    ) -> None:
        self._world, self._rng, self._samples, self._traffic = world, rng, samples, traffic
        self._hub, self._recipe, self._left = world.network, world.setting.recipe, count
        self.seen = traffic._seen
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begun_s, self._quiet_since_s = world.now_s, 0.0
        self._tasks_before = 0
        self._steps: dict[str, int] = {}
        self.is_over = False
        self._callers: list[SimPeerNetwork] = []
        self._owner = TicketSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
        self._keys = [Ed25519PrivateKey.from_private_bytes(number.to_bytes(32)) for number in range(1, 5)]
        self._ids = [peer_of(key.public_key().public_bytes_raw()) for key in self._keys]
        self._accepting = self._state()
        """Of the checks of what the DHT stores."""
        self._start(self._open(folder), "opening")

    def _start(self, coroutine: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hub.failures.append((task.get_name(), error))  # type: ignore[arg-type]

    # The other peers.

    async def _open(self, folder: Path) -> None:
        """Begin a bootstrap peer, a member of a run with an owner, and lookers at both."""
        (folder / "weights.safetensors").write_bytes(Random(0).randbytes(1_200_000))
        files = (described(folder / "weights.safetensors"),)
        door, now_s = self._hub.network("door"), self._unix_s
        state = self._state()
        await door.serve(run_distribution.TOPIC, run_distribution.SCHEMA, self._recipe.serve)
        await door.serve(speed_test.TOPIC, speed_test.SCHEMA, speed_test.SpeedTestService().answer)
        store = WeightServer(WeightStore.whole(folder, files), _at_once)
        await door.serve(weight_exchange.TOPIC, weight_exchange.SCHEMA, store.serve)
        history = RunHistory(folder / "history", print)
        await door.serve(run_distribution.HISTORY_TOPIC, run_distribution.HISTORY_SCHEMA, history.serve)
        service = TicketService(state, self._owner.ticket, now_s, None, lambda _: 0)
        await door.serve(ticket_service.TOPIC, ticket_service.SCHEMA, service.answer)
        member = self._member(0)
        await member.serve(run_distribution.TOPIC, run_distribution.SCHEMA, self._recipe.serve)
        self._memberships = [
            self._recipe.membership(door),
            self._recipe.membership(self._hub.network("looker")),
            self._recipe.membership(member),
        ]
        self._observers = [RosterObserver(self._recipe.run, self._recipe.digest) for _ in self._memberships]
        self._history = history
        self.victims = ["door", self._ids[0], *(name for name in self._world.peers if name not in HOSTILE)]

    def _unix_s(self) -> float:
        return 1.8e9 + self._world.now_s

    def _state(self) -> AdmissionState:
        state = AdmissionState(self._recipe.digest, self._unix_s)
        state.pin(self._owner.key.public_key().public_bytes_raw(), "open")
        return state

    def _member(self, number: int) -> HookedNetwork:
        network = self._hub.network(self._ids[number])
        return HookedNetwork(network, AdmissionHook(network, self._state(), self._ticket(number)))

    def _ticket(self, number: int) -> bytes:
        return self._owner.ticket(self._recipe.digest, self._ids[number], MEMBER, 2_000_000_000)

    # What strangers do.

    def look(self) -> None:
        """Do so much; once all is done, let it be quiet and then see that nothing is left."""
        now_s = self._world.now_s
        if self.is_over or now_s - self._begun_s < WARM_S * self._world.setting.scenario.devices.forward_s:
            return
        if self._left > 0:
            if not self._traffic.breaks:
                self._traffic.breaks, self._tasks_before = True, len(asyncio.all_tasks())
                self._callers = [self._hub.network(f"fuzz-{number}") for number in range(NAMES)]
            self._left -= CALLS + RECORDS + TEXTS
            for _ in range(CALLS // 2):
                self._start(self._call(), "fuzz calls")
            self._publish()
            for _ in range(TEXTS):
                self._read_texts()
            self._start(self._look_on(), "fuzz looks on")
        elif not self._quiet_since_s:
            self._traffic.breaks, self._quiet_since_s = False, now_s
            self._steps = self._steps_taken()
        elif now_s - self._quiet_since_s > QUIET_S and not self._tasks:
            self._check()
            self.is_over = True
        elif self._world.now_s % 10.0 < 1.0:
            self._start(self._look_on(), "fuzz looks on")

    async def _call(self) -> None:
        """Say two broken messages or more to a peer, in one conversation, and hear what it says."""
        rng, caller = self._rng, self._rng.choice(self._callers)
        served = self._hub.peer(victim := rng.choice(self.victims))
        assert served is not None, f"{victim} is gone"
        topic = rng.choice(sorted(served._served))
        schema = served._served[topic][0]
        kinds = [each for name, each in self._samples.frames.items() if name.startswith(f"{topic.partition('/')[0]}|")]
        frames = rng.choice(kinds) if kinds and rng.random() < 0.7 else good_frames(schema)
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S), caller.talk(victim, topic, schema) as conversation:
                for _ in range(2):
                    how = rng.choice((broken, broken_header, Random.choice))
                    found = delivered(how(rng, frames), schema)
                    self.seen[f"messages: {found.outcome}"] += 1
                    for message in found.messages:
                        conversation.transmit(message)
                    if found.ending is not None:
                        conversation.transmit(found.ending)
                        break
                    if rng.random() < 0.5:
                        await conversation.receive()
                if rng.random() < 0.2:
                    raise ConnectionResetError("left without a word")
                if rng.random() < 0.5:
                    await conversation.receive()

    def _publish(self) -> None:
        """Publish broken records, some under the names of strangers, some under those of members with their tickets."""
        rng, keys = self._rng, sorted(self._samples.records)
        now_s = self._world.now_s
        for _ in range(RECORDS):
            sample = rng.choice(keys)
            value, key = (
                broken_value(rng, self._samples.records[sample]),
                rng.choice((sample, sample, rng.choice(keys))),
            )
            number = rng.randrange(1, len(self._ids))
            name = rng.choice((f"fuzz-{rng.randrange(NAMES)}", self._ids[number]))
            if name == self._ids[number]:
                ticket = self._ticket(number) if rng.random() < 0.5 else broken_value(rng, [self._ticket(number)])
                value = len(ticket).to_bytes(2) + ticket + value
            self._hub.dht.publish((key, name), (value, rng.uniform(2.0, 8.0)), now_s, side=None, author=name)
            self.seen["records: published"] += 1
            if rng.random() < 0.3:
                self._validate(key, number, value)

    def _validate(self, key: str, number: int, value: bytes) -> None:
        """Let the checks of the DHT look at a signed record that is broken, or whose content is."""
        rng, place, expires_s = self._rng, place_of(key), time.time() + 60.0
        signed = Signer(self._keys[number]).signed(place, expires_s, value)
        told = rng.choice((signed, broken_value(rng, [signed])))
        subkey = msgspec.msgpack.encode(self._ids[number])
        record = _DhtRecord(
            place,
            rng.choice((subkey, broken_value(rng, [subkey]))),
            rng.choice((msgspec.msgpack.encode(told), broken_value(rng, [msgspec.msgpack.encode(told)]))),
            rng.choice((expires_s, expires_s, rng.choice((0.0, -1.0, 1e308, float("inf"), float("nan"))))),
        )
        verdict = Signatures(lambda _, peer, content: self._accepting.accepts(peer, content)).validate(record)
        self.seen[f"records: {'stored' if verdict else 'refused'} by the DHT"] += 1

    async def _look_on(self) -> None:
        """Read all records, as the bootstrap peer, a looker and a member do, and look at them."""
        for membership, observer in zip(self._memberships, self._observers, strict=True):
            roster = await membership.peek()
            msgspec.json.encode(page_frame(observer.view(roster, self._unix_s())))
            self.seen["records: read as peers"] += sum(map(len, roster.stages))
            self._history.note(roster)

    def _read_texts(self) -> None:
        """Read the run file and the invite that a stranger gives."""
        rng = self._rng
        address = f"/ip4/192.0.2.1/tcp/4001/p2p/{self._ids[1]}"
        texts = ((self._read_run, self._recipe.text), (invite.parse, invite.format(self._recipe.digest, [address])))
        for read, text in texts:
            spoilt = broken_value(rng, [text.encode()]).decode(errors=rng.choice(("replace", "ignore")))
            try:
                read(spoilt)
                self.seen["texts: read"] += 1
            except UserError:
                self.seen["texts: refused"] += 1

    def _read_run(self, text: str) -> object:
        return RunFileText(text, "a stranger's run file", ())

    # What must hold.

    def _steps_taken(self) -> dict[str, int]:
        replicas = {name: peer.replica for name, peer in self._world.peers.items() if name not in HOSTILE}
        return {name: 0 if replica is None else replica.inner_steps for name, replica in replicas.items()}

    def _check(self) -> None:
        assert not self._hub.failures, self._hub.failures[:3]
        assert not self._tasks, [task.get_name() for task in self._tasks]
        for name, peer in self._world.peers.items():
            task = peer.session.task
            assert task is not None, name
            assert not task.done(), f"{name} has ended"
        steps = self._steps_taken()
        assert all(steps[name] > before for name, before in self._steps.items()), (self._steps, steps)
        left = [name for task in asyncio.all_tasks() if re.search(r"\bfuzz\b|\bfuzz-", name := task.get_name())]
        assert not left, left[:5]
        for name in self.victims:
            network = self._hub.peer(name)
            assert network is not None
            open_ends = [end.topic for end in network.ends if end.peer.startswith("fuzz-")]
            assert not open_ends, (name, open_ends[:5])
        known = {each.peer for stage in self._memberships[1].roster.stages for each in stage}
        assert not [peer for peer in known if peer.startswith("fuzz-")], known
        tasks = len(asyncio.all_tasks())
        assert tasks <= self._tasks_before + MOST_MORE_TASKS, (self._tasks_before, tasks)
        self.seen["inner steps of honest nodes"] += sum(steps.values())


class _DhtRecord(NamedTuple):
    """A record as hivemind shows it to a validator."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


async def _at_once(function: Callable[..., Any], /, *arguments: object) -> Any:
    await asyncio.sleep(0)
    return function(*arguments)


def _setup(seed: int, count: int, forward_s: float) -> SimSetup:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(RUN)
        seconds = WARM_S * forward_s + QUIET_S + 2.0 * count / (CALLS + RECORDS + TEXTS) + 120.0
        swarm = SwarmConfig(run=str(path), model="transformer", duration_s=seconds, refresh_s=5.0)
        return build_setup(Scenario(seed=seed, swarm=swarm, devices=DevicesConfig(forward_s=forward_s)))


def outcomes(seed: int, count: int, forward_s: float = FORWARD_S) -> Counter[str]:
    """Feed `count` broken things to a swarm; return what became of them. Raises what must not happen."""
    rng, seen, strangers = Random(f"{seed}|fuzz peers"), Counter[str](), list[Strangers]()
    samples = Samples(rng)
    traffic = BrokenTraffic(rng, samples, seen)

    def watch(world: World) -> Sequence[Watcher]:
        publish = world.network.dht.publish

        def published(place: tuple[str, str], record: tuple[bytes, float], *rest: Any, **more: Any) -> bool:
            if place[1] in world.peers:
                samples.keep(samples.records, place[0], lambda: record[0])
            return publish(place, record, *rest, **more)

        world.network.dht.publish = published  # type: ignore[method-assign]
        strangers.append(Strangers(world, rng, samples, traffic, count, Path(folder)))
        return strangers

    with tempfile.TemporaryDirectory() as folder, traffic.applied():
        simulate(_setup(seed, count, forward_s), watch, lambda world: None)
    assert strangers[0].is_over, "the run ended before all was said and checked"
    return seen


def main() -> int:
    """Feed all, chunk by chunk; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--first", type=int, default=0, help="the first seed; each is a chunk and a swarm of its own")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    seen, peaks, chunks = Counter[str](), list[float](), -(-wanted.count // CHUNK)
    begun_s = time.process_time()
    for seed in range(wanted.first, wanted.first + chunks):
        seen += outcomes(seed, min(CHUNK, wanted.count))
        gc.collect()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        said = {what: count for what, count in seen.items() if what.endswith(("published", "violation", "message"))}
        used = f"{time.process_time() - begun_s:.0f} s of CPU, {peaks[-1]:.0f} MiB at most"
        print(f"seed {seed}: {used}; so far {said}", flush=True)
    for what, count in sorted(seen.items()):
        print(f"{count:12,} {what}")
    print(f"memory       {peaks[0]:.1f} MiB after the first chunk, {peaks[-1]:.1f} MiB at its peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
