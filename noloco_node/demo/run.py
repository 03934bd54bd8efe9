"""The demo from beginning to end: calibrate, bootstrap, join, watch, evaluate, sum up, and leave nothing running.

Children do all work; this process reads their journals and never loads torch, so it draws smoothly and answers Ctrl-C
at once. A peer that dies does not end the demo; the demo ends in an error only if no source is left.

The directory of a demo holds demo.json (its options), run.toml, the homes of its peers (`bootstrap`, `0a`, `0b`, ...),
`model`, loss.png, summary.txt and summary.json. A demo never writes over files: beside an earlier demo it takes the
next free number (`noloco-demo-2`).

The slow replica of a heterogeneous swarm is the last of the last stage. Routes decide what it gets, so the demo shows
that the others send it no more than it can take; a slow source would only draw less.
"""

from __future__ import annotations

import asyncio
import itertools
import string
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
from rich.console import Console

from noloco_node import __version__
from noloco_node.demo import swarm_processes
from noloco_node.demo.child_processes import Child, Children
from noloco_node.demo.summary import ModelScores, Outage, lines, summarise
from noloco_node.errors import Exit, UserError, usage_error
from noloco_node.journal.events import Event
from noloco_node.journal.reader import Tail
from noloco_node.machine.memory import machine_free_bytes
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.screen import LiveView
from noloco_node.run.config import RunConfig
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.storage.atomic_file import write_whole
from noloco_node.storage.home import Home, HomePaths, typed
from noloco_node.units import format_bytes, format_clock
from noloco_node.web.places import PagePlace
from noloco_node.web.server import Page, page_served

MOST_PEERS = 64
PEER_BYTES = 2**29  # memory of a peer and its daemon, about
MANY, FEW = 3, 2  # replicas of a stage; only of three can one see that two drift apart while they meet others
SLOWDOWN = 4.0  # of the slow replica of a heterogeneous demo
MARK = "demo.json"
NUMBERS = 1000


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a demo. `minutes`: of training, without start and evaluation. `steps`: inner steps of each source,
    instead of `minutes`.

    `slowdown`: how many times slower the last replica of the last stage acts. `evaluated`: export and evaluate the
    model at the end. `outage`: kill the first replica of the last stage on the way, and start it again.
    """

    stages: int = 2
    replicas: int
    minutes: float = 2.0
    home: Path = Path("noloco-demo")
    seed: int = 0
    slowdown: float = 1.0
    steps: int | None = None
    evaluated: bool = True
    outage: bool = False

    @property
    def peers(self) -> int:
        return self.stages * self.replicas

    @property
    def slow_peer(self) -> str | None:
        return peer_name(self.stages - 1, self.replicas - 1) if self.slowdown > 1 else None

    @property
    def bytes(self) -> int:
        """About the memory of all peers and the bootstrap peer."""
        return (self.peers + 1) * PEER_BYTES

    @property
    def killed_peer(self) -> str | None:
        """The name of the peer to kill, if any: never the only replica of a stage."""
        return peer_name(self.stages - 1, 0) if self.outage and self.replicas > 1 else None


def fitting_replicas(stages: int, memory_bytes: int) -> int:
    """Return how many replicas of each stage a machine with so much free memory shows best."""
    return MANY if DemoConfig(stages=stages, replicas=MANY).bytes <= memory_bytes else FEW


def check(demo: DemoConfig) -> None:
    """Raise `UserError` (Exit.USAGE) for a demo that no machine can run."""
    if demo.peers > MOST_PEERS:
        raise usage_error(
            f"{demo.stages} stages of {demo.replicas} replicas are too many for one machine",
            why=f"each peer is two processes and about half a gibibyte; the demo starts at most {MOST_PEERS} peers",
            hint="fewer stages or replicas",
        )
    if demo.slow_peer is not None and demo.replicas < 2:
        raise usage_error(
            "a heterogeneous demo needs two replicas in each stage",
            why="one is slowed down, and the others of its stage make up for it",
            hint="--replicas 2 or more",
        )


def mark(demo: DemoConfig, started_at: float) -> bytes:
    """Return the content of demo.json: the options, and the start in unix seconds."""
    content = {"version": __version__, "started_at": started_at, **msgspec.structs.asdict(demo)}
    return msgspec.json.encode(content, enc_hook=str) + b"\n"


def peer_name(stage: int, replica: int) -> str:
    """Return 0a, 0b, ... 0z, 0aa, 0ab, ..."""
    letters = ""
    while replica >= 0:
        replica, last = divmod(replica, 26)
        letters, replica = string.ascii_lowercase[last] + letters, replica - 1
    return f"{stage}{letters}"


def claim_output_dir(wanted: Path, mark: bytes) -> Home:
    """Lock `wanted`, or its next free number where an earlier demo lies there, and write `mark` into it.

    Raises `UserError` where it holds other files, or cannot be written.
    """
    wanted = typed(wanted).absolute()
    if (names := _names(wanted)) and MARK not in names:
        raise usage_error(
            f"{wanted} is not empty, and not a demo's",
            why=f"it holds {', '.join(sorted(names)[:5])}",
            hint="give another directory with --home",
        )
    for number in range(1, NUMBERS):
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if _names(candidate):
            continue
        try:
            home = Home.open(candidate)
        except UserError as trouble:
            if trouble.code is Exit.HOME_IN_USE:  # another demo, a moment ahead of us
                continue
            raise
        write_whole(home.path / MARK, mark)
        return home
    raise usage_error(
        f"{NUMBERS} demos lie beside {wanted}",
        why="each keeps its directory",
        hint="remove some of them, or give another directory with --home",
    )


def _names(path: Path) -> set[str]:
    """Return the files of a directory without the lock, which a demo that died at once leaves."""
    try:
        return {entry.name for entry in path.iterdir()} - {"lock"}
    except (FileNotFoundError, NotADirectoryError):
        return set()


SHOW_EVERY_S = 0.25
LATE_S = 60.0  # the other stages have so long to finish after the last source
NEXT = (
    "The same on two machines, with your own text (docs/tutorial.md tells each step):",
    "  first    noloco-node init --preset tiny",
    "           noloco-node bootstrap --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/ITS-ADDRESS/tcp/4001",
    "  both     noloco-node join INVITE      # the line that the bootstrap peer printed",
    "  any      noloco-node watch INVITE",
)


@dataclass(slots=True)
class Peer:
    """One peer of the demo: its process, its journal, and its history."""

    child: Child
    home: Path
    tail: Tail
    history: PeerHistory

    @property
    def done(self) -> bool:
        """It finished its training, or its process ended."""
        return self.history.finished is not None or self.child.exit_code is not None

    def news(self) -> Iterator[Event]:
        """Yield the events of its journal that were not read yet."""
        while news := self.tail.poll():
            yield from news


async def demonstrate(demo: DemoConfig, page_at: PagePlace | None = None) -> None:
    """Run a whole swarm on this machine, and show it at `page_at` too; raise `UserError` if it cannot."""
    check(demo)
    started_at = time.time()
    with claim_output_dir(demo.home, mark(demo, started_at)) as home:
        async with page_served(page_at) as page:
            await _Demo(demo, home, started_at, page).run()


class _Demo:
    def __init__(self, demo: DemoConfig, home: Home, started_at: float, page: Page | None) -> None:
        self._demo, self._home, self._started_at, self._page = demo, home, started_at, page
        self._console, self._children = Console(), Children()
        self._outage = None if demo.killed_peer is None else Outage(demo.killed_peer)
        self._invite = ""
        self._peers: list[Peer] = []

    async def run(self) -> None:
        scores: ModelScores | None = None
        trouble: UserError | None = None
        try:
            run = await self._freeze_run()
            await self._start_swarm()
            await self._watch(run)
            try:
                scores = await self._evaluate() if self._demo.evaluated else None
            except UserError as error:  # the journals still have something to say
                trouble = error
        finally:
            with suppress(OSError):  # nobody reads any more: the pipe or the terminal is closed
                if self._children.running():
                    self._say(f"stopping {len(self._children.running())} processes (Ctrl-C: at once)")
            await self._children.stop()
        self._report(scores)
        if trouble is not None:
            raise trouble

    def _say(self, text: str) -> None:
        self._print(f"[{format_clock(time.time() - self._started_at)}] {text}")

    def _print(self, line: str) -> None:
        if self._console.is_interactive:
            self._console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
        else:  # a console leaves with 1 where the reader has read enough
            print(line, file=self._console.file, flush=True)

    async def _freeze_run(self) -> RunConfig:
        """Write the run file, with as many inner steps as fit into the time asked for."""
        demo = self._demo
        length = f"about {demo.minutes:g} minutes" if demo.steps is None else f"{demo.steps} inner steps"
        self._say(
            f"a swarm of {demo.stages} stages x {demo.replicas} replicas on this machine, trained for {length}; "
            f"everything goes to {self._home.path}"
        )
        if demo.killed_peer is not None:
            self._say(f"peer {demo.killed_peer} will be killed on the way, and comes back")
        if demo.slow_peer is not None:
            self._say(f"replica {demo.slow_peer} acts as one {demo.slowdown:g} times slower than the others")
        needed, there = demo.bytes, machine_free_bytes()
        if needed > there:
            self._say(
                f"this needs about {format_bytes(needed)} of memory, and {format_bytes(there)} are free here: "
                "it may well fail"
            )
        steps = demo.steps or await self._affordable_steps()
        run = self._write_run(steps)
        self._say(
            f"{steps} inner steps for each peer of the first stage, {_tokens(run):,} tokens in all, a round every "
            f"{run.outer.inner_steps_per_round} to {run.outer.late_inner_steps_per_round} steps of the fastest"
        )
        return run

    async def _affordable_steps(self) -> int:
        """Measure this machine; return how many inner steps of each source fit into the time asked for."""
        demo, cores = self._demo, swarm_processes.cores()
        self._say(f"calibrating: how fast can {min(cores, demo.peers)} of {cores} cores train this model?")
        run = self._write_run(steps=100)
        logs = self._home.path / "calibration"
        found = await swarm_processes.calibrations(self._children, self._home.run_file, demo.peers, logs)
        self._say(f"a microbatch takes {1000 * mean(found):.0f} ms")
        return swarm_processes.affordable_steps(60 * demo.minutes, found, run, demo.slowdown)

    def _write_run(self, steps: int) -> RunConfig:
        demo, path = self._demo, self._home.run_file
        text = demo_run_text(stages=demo.stages, replicas=demo.replicas, steps=steps, seed=demo.seed)
        write_whole(path, text.encode(), public=True)
        return decode_run(text, str(path))

    async def _start_swarm(self) -> None:
        """Start the bootstrap peer, read its invite, and start all peers with it."""
        demo, home = self._demo, self._home
        self._invite = await swarm_processes.bootstrap(self._children, home.run_file, home.path / "bootstrap")
        self._say(f"the bootstrap peer is up; on this machine others join with:  noloco-node join {self._invite}")
        for stage, replica in itertools.product(range(demo.stages), range(demo.replicas)):
            name = peer_name(stage, replica)
            history = PeerHistory(name, stage, demo.slowdown if name == demo.slow_peer else 1.0)
            place = home.path / name
            self._peers.append(Peer(self._join(history, place), place, Tail(HomePaths(place).journal), history))

    def _join(self, history: PeerHistory, logs: Path) -> Child:
        home = self._home.path / history.name
        return swarm_processes.join(self._children, self._invite, history.stage, home, logs, history.slowdown)

    async def _watch(self, run: RunConfig) -> None:
        """Show the swarm until every peer is done, or only stragglers of later stages are not."""
        heading = f"{self._demo.stages} stages x {self._demo.replicas} replicas, {_tokens(run):,} tokens"
        observer = JournalObserver(heading, [peer.history for peer in self._peers], run)
        sources = [peer for peer in self._peers if peer.history.stage == 0]
        sources_done_at = float("inf")
        address = None if self._page is None else self._page.address
        with LiveView(self._console, whole_screen=False, address=address) as live:
            while True:
                now, done = time.time(), all(peer.done for peer in self._peers)
                for peer in self._peers:
                    for event in peer.news():
                        observer.take(peer.history, event)
                    if peer.history.gone is None and peer.child.end is not None:
                        observer.note(peer.history, peer.child.end, now)
                        self._say(f"{peer.child.name}: {peer.child.end}; its last words: {peer.child.last_word()}")
                view = observer.view(now)
                live.show(view)
                if self._page is not None:
                    self._page.show(view)
                if all(peer.done for peer in sources):
                    sources_done_at = min(sources_done_at, now)
                if done or now - sources_done_at > LATE_S:
                    break
                self._play_outage(view.progress, observer)
                await asyncio.sleep(SHOW_EVERY_S)
        if all(peer.history.finished is None for peer in sources):
            raise sources[0].child.trouble("no source finished its training")

    def _play_outage(self, progress: float, observer: JournalObserver) -> None:
        """Kill the peer of the outage, or start it again, if that is due."""
        if self._outage is None:
            return
        now = time.time()
        due = self._outage.due(progress, [peer.history for peer in self._peers], now)
        if due is None:
            return
        peer = next(peer for peer in self._peers if peer.history.name == self._outage.peer)
        if due == "kill":
            peer.child.kill()
            observer.note(peer.history, "was killed by this demo, without warning; the others go on", now)
        else:
            peer.child = self._join(peer.history, peer.home / "second-life")
            observer.note_restart(peer.history, "is started again: it copies the weights of another replica", now)

    async def _evaluate(self) -> ModelScores:
        self._say("the training is over: gathering the weights, merging the replicas, evaluating")
        done = [peer for peer in self._peers if peer.history.finished is not None]
        stages = {peer.history.stage for peer in done}
        # The checkpoint of a peer that has not finished is old: it counts only where its stage has no other.
        homes = [peer.home for peer in self._peers if peer in done or peer.history.stage not in stages]
        model, logs = self._home.path / "model", self._home.path / "evaluation"
        return await swarm_processes.evaluation(self._children, self._invite, homes, model, logs)

    def _report(self, scores: ModelScores | None) -> None:
        """Write and print the summary, from the journals as the peers left them."""
        from noloco_node.demo.loss_plot import picture

        for peer in self._peers:
            for event in peer.news():
                peer.history.take(event)
            peer.tail.close()
        histories = [peer.history for peer in self._peers]
        outage = None if self._outage is None else self._outage.summary(histories)
        summary = summarise(histories, outage)
        text = lines(summary, scores)
        heading = f"A swarm of {self._demo.stages} stages x {self._demo.replicas} replicas"
        document = {"summary": summary, "verdict": scores, "single": scores.single if scores else None}
        for name, content in (
            ("summary.txt", ("\n".join(text) + "\n").encode()),
            ("summary.json", msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"),
            ("loss.png", picture(heading, histories, summary, scores)),
        ):
            write_whole(self._home.path / name, content, public=True)
        text = ["", *text, ""]
        kept = [("the picture:", "loss.png"), ("the numbers:", "summary.json")]
        if scores is not None:
            text += [f"What the model makes of {scores.prompt!r}:"]
            text += [f"    {line}" for line in (scores.prompt + scores.sample).splitlines()] + [""]
            kept.insert(1, ("the merged model:", "model"))
        text += [f"{what:<18} {self._home.path / name}" for what, name in kept]
        for line in [*text, "", *NEXT]:
            self._print(line)


def _tokens(run: RunConfig) -> int:
    return run.tokens(run.budget_samples)
