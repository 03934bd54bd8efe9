"""The demo from beginning to end: calibrate, bootstrap, join, watch, evaluate, sum up, and leave nothing running.

All work is done by children, and this process only reads their journals: so it never loads torch, draws smoothly, and
answers Ctrl-C at once, whenever it comes. A peer that dies does not end the demo, just as it does not end a swarm; the
demo ends in an error only where no source is left.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import psutil
from rich.console import Console

from noloco_node.demo import swarm_processes
from noloco_node.demo.child_processes import Child, Children
from noloco_node.demo.options import DemoConfig, check, letters, mark
from noloco_node.demo.outage import Outage
from noloco_node.demo.output_dir import claim_output_dir
from noloco_node.demo.summary import ModelScores, Summary, lines, summarise
from noloco_node.errors import UserError
from noloco_node.journal.events import Event
from noloco_node.journal.reader import Tail
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.live_view import LiveView
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.run.config import RunConfig
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.storage.atomic_file import write_whole
from noloco_node.storage.home import Home, HomePaths
from noloco_node.units import format_bytes, format_clock
from noloco_node.web.places import PagePlace
from noloco_node.web.server import Page, page_served

SHOW_EVERY_S = 0.25
LATE_S = 60.0
"""How long the other stages may still finish after the last source has."""
NEXT = (
    "The same on two machines, with your own text (docs/tutorial.md tells each step):",
    "  first    noloco-node init --preset tiny",
    "           noloco-node bootstrap --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/ITS-ADDRESS/tcp/4001",
    "  both     noloco-node join INVITE      # the line that the bootstrap peer printed",
    "  any      noloco-node watch INVITE",
)


@dataclass(slots=True)
class Peer:
    """One peer of the demo: its process, its journal, and what came of it so far."""

    child: Child
    tail: Tail
    history: PeerHistory

    @property
    def done(self) -> bool:
        """It finished its training, or its process ended."""
        return self.history.finished is not None or self.child.exit_code is not None

    def news(self) -> Iterator[Event]:
        """Yield what its journal has to say by now, and was not read yet."""
        while news := self.tail.poll():
            yield from news


async def demonstrate(demo: DemoConfig, page_at: PagePlace | None = None) -> None:
    """Run a whole swarm on this machine, and show it at `page_at` too; raise `UserError` where it cannot be done."""
    check(demo)
    started_at = time.time()
    with claim_output_dir(demo.home, mark(demo, started_at)) as home:
        async with page_served(page_at) as page:
            await _Demo(demo, home, Console(), started_at, page).run()


class _Demo:
    """One demo under way."""

    def __init__(self, demo: DemoConfig, home: Home, console: Console, started_at: float, page: Page | None) -> None:
        self._demo, self._home, self._console, self._started_at, self._page = demo, home, console, started_at, page
        self._children = Children()
        self._outage = None if demo.killed_peer is None else Outage(demo.killed_peer)

    async def run(self) -> None:
        scores: ModelScores | None = None
        trouble: UserError | None = None
        try:
            run = await self._freeze_run()
            invite, peers = await self._start_swarm()
            await self._watch(run, invite, peers)
            try:
                scores = await self._evaluate(invite, peers) if self._demo.evaluated else None
            except UserError as error:  # the journals still have something to say
                trouble = error
        finally:
            if self._children.running():
                self._say(f"stopping {len(self._children.running())} processes (Ctrl-C: at once)")
            await self._children.stop()
        self._report(peers, scores)
        if trouble is not None:
            raise trouble

    def _say(self, text: str) -> None:
        elapsed = format_clock(time.time() - self._started_at)
        self._print(f"[{elapsed}] {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

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
        self._warn_of_memory()
        steps = demo.steps or await self._affordable_steps()
        run = self._write_run(steps)
        self._say(
            f"{steps} inner steps for each peer of the first stage, {_tokens(run):,} tokens in all, a round every "
            f"{run.outer.inner_steps_per_round} to {run.outer.late_inner_steps_per_round} steps of the fastest"
        )
        return run

    async def _affordable_steps(self) -> int:
        """Measure what this machine can do; return how many inner steps of each source fit into the time asked for."""
        demo = self._demo
        cores = swarm_processes.cores()
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

    def _warn_of_memory(self) -> None:
        needed, there = self._demo.bytes, psutil.virtual_memory().available
        if needed > there:
            self._say(
                f"this needs about {format_bytes(needed)} of memory, and {format_bytes(there)} are free here: "
                "it may well fail"
            )

    async def _start_swarm(self) -> tuple[str, list[Peer]]:
        """Start the bootstrap peer, read its invite, and start everybody else with it."""
        demo = self._demo
        invite = await swarm_processes.bootstrap(self._children, self._home.run_file, self._home.path / "bootstrap")
        self._say(f"the bootstrap peer is up; on this machine others join with:  noloco-node join {invite}")
        peers = []
        for stage, replica in itertools.product(range(demo.stages), range(demo.replicas)):
            name = f"{stage}{letters(replica)}"
            history = PeerHistory(name, stage, demo.slowdown if name == demo.slow_peer else 1.0)
            home = self._home.path / name
            peers.append(Peer(self._join(invite, history, home), Tail(HomePaths(home).journal), history))
        return invite, peers

    def _join(self, invite: str, history: PeerHistory, logs: Path) -> Child:
        home = self._home.path / history.name
        return swarm_processes.join(self._children, invite, history.stage, home, logs, history.slowdown)

    async def _watch(self, run: RunConfig, invite: str, peers: Sequence[Peer]) -> None:
        """Show the swarm until every peer is done, or only stragglers of later stages are not."""
        heading = f"{self._demo.stages} stages x {self._demo.replicas} replicas, {_tokens(run):,} tokens"
        sources_done_at: float | None = None
        sources = [peer for peer in peers if peer.history.stage == 0]
        observer = JournalObserver(heading, [peer.history for peer in peers], run)
        address = None if self._page is None else self._page.address
        with LiveView(self._console, whole_screen=False, address=address) as view:
            while not all(peer.done for peer in peers):
                now = time.time()
                for peer in peers:
                    for event in peer.news():
                        observer.take(peer.history, event)
                    self._notice_end(peer, observer)
                seen = observer.view(now)
                view.show(seen)
                if self._page is not None:
                    self._page.show(seen)
                self._play_outage(seen.progress, invite, peers, observer)
                if all(peer.done for peer in sources):
                    sources_done_at = sources_done_at or now
                    if now - sources_done_at > LATE_S:
                        break
                await asyncio.sleep(SHOW_EVERY_S)
            for peer in peers:
                for event in peer.news():
                    observer.take(peer.history, event)
            seen = observer.view(time.time())
            view.show(seen)
            if self._page is not None:
                self._page.show(seen)
        if all(peer.history.finished is None for peer in sources):
            raise sources[0].child.trouble("no source finished its training")

    def _play_outage(self, progress: float, invite: str, peers: Sequence[Peer], observer: JournalObserver) -> None:
        """Kill the peer whose outage is shown, or start it again, where that is due."""
        if self._outage is None:
            return
        now = time.time()
        due = self._outage.due(progress, [peer.history for peer in peers], now)
        if due is None:
            return
        peer = next(peer for peer in peers if peer.history.name == self._outage.peer)
        if due == "kill":
            peer.child.kill()
            observer.note(peer.history, "was killed by this demo, without warning; the others go on", now)
        else:
            peer.child = self._join(invite, peer.history, peer.child.logs / "second-life")
            observer.note(peer.history, "is started again: it copies the weights of another replica", now)
            peer.history.start_life()

    def _notice_end(self, peer: Peer, observer: JournalObserver) -> None:
        if peer.history.gone is None and peer.child.end is not None:
            observer.note(peer.history, peer.child.end, time.time())
            self._say(f"{peer.child.name}: {peer.child.end}; its last words: {peer.child.last_word()}")

    async def _evaluate(self, invite: str, peers: Sequence[Peer]) -> ModelScores:
        self._say("the training is over: gathering the weights, merging the replicas, evaluating")
        model, logs = self._home.path / "model", self._home.path / "evaluation"
        scores = await swarm_processes.evaluation(self._children, invite, model, logs)
        return scores.named({peer.history.peer: peer.history.name for peer in peers if peer.history.peer})

    def _report(self, peers: Sequence[Peer], scores: ModelScores | None) -> None:
        """Write and print what came of it, from the journals as the peers left them."""
        from noloco_node.demo.loss_plot import picture

        for peer in peers:
            for event in peer.news():
                peer.history.take(event)
            peer.tail.close()
        histories = [peer.history for peer in peers]
        outage = None if self._outage is None else self._outage.summary(histories)
        summary = summarise(histories, outage)
        text = lines(summary, scores)
        write_whole(self._home.path / "summary.txt", ("\n".join(text) + "\n").encode(), public=True)
        write_whole(self._home.path / "summary.json", _as_json(summary, scores), public=True)
        heading = f"A swarm of {self._demo.stages} stages x {self._demo.replicas} replicas"
        write_whole(self._home.path / "loss.png", picture(heading, histories, scores, outage), public=True)
        for line in ["", *text, ""]:
            self._print(line)
        if scores is not None:
            self._print(f"What the model makes of {scores.prompt!r}:")
            for line in (scores.prompt + scores.sample).splitlines():
                self._print(f"    {line}")
            self._print("")
        kept = (("loss.png", "the picture"), ("model", "the merged model"), ("summary.json", "the numbers"))
        for name, what in kept:
            if name != "model" or scores is not None:
                self._print(f"{what + ':':<18} {self._home.path / name}")
        self._print("")
        for line in NEXT:
            self._print(line)


def _as_json(summary: Summary, scores: ModelScores | None) -> bytes:
    document = {"summary": summary, "verdict": scores, "single": scores.single if scores else None}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _tokens(run: RunConfig) -> int:
    return run.budget_samples * run.pipeline.sequence_length
