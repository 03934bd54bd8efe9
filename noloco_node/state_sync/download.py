"""Asking peers for the weights of a stage, and a newcomer's copy of a whole state, with what a person reads of it.

A manifest without pieces says round, progress and norm of a peer's weights. A peer that wants weights compares what
several peers say before `gossip.transfer.download` fetches any pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.messages import Manifest, Parts, ReplicaState, Section, StateRequest
from gossip.interface import Compute
from gossip.transfer.assembly import ChunkArrived, ChunkStore, DonorLost, DonorSelected, News, StateAssembly
from gossip.transfer.chunks import cut
from gossip.transfer.download import (
    OF_ANY_RUN,
    Converse,
    MomentBounds,
    Objection,
    StateWanted,
    download_state,
    manifest_of,
    no_objection,
    objection,
)
from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, Runner, StageModel
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.tasks import loop_s
from noloco_node.units import format_bytes, format_duration, format_rate

COPY_AGAIN_S = 10.0  # before all donors are asked again when none gave its state; half as long again each time
LONGEST_PAUSE_S = 120.0
SAY_EVERY_S = 5.0
REPLICAS_ASKED_BESIDE = 2  # other replicas that a donor is compared with
SNAPSHOT = "snapshot"  # the topic of peers that keep checkpoints of other stages
PATIENCE_S = 10.0  # for a manifest without pieces
ASKED_AT_ONCE = 8


class DownloadLink(NamedTuple):
    """How weights come to us. `deadline_s`: for all pieces of one donor."""

    network: PeerNetwork
    device: Runner
    deadline_s: float


def pause_s(attempts: int) -> float:
    """Return how long to wait before all donors are asked again, after so many attempts in vain."""
    return min(LONGEST_PAUSE_S, COPY_AGAIN_S * 1.5 ** min(attempts - 1, 20))


def own_sections(checkpoint: Checkpoint) -> dict[Section, tuple[Tensor, ...]]:
    """Return the tensors of a checkpoint by section: a copy may have equal pieces."""
    tensors, moments = checkpoint.tensors, checkpoint.tensors.get("optimiser", ())
    half = len(moments) // 2
    groups = {section: tensors.get(str(section), ()) for section in (Section.SLOW, Section.MOMENTUM, Section.GATHERED)}
    return {**groups, Section.FIRST: moments[:half], Section.SECOND: moments[half:]}


class StateDownload:
    """The copy of one stage's state, over as many attempts as it takes; pieces stay between them."""

    def __init__(
        self,
        number: int,
        stage: StageModel,
        line: DownloadLink,
        reporter: Reporter,
        keep: ChunkStore | None,
        own: Checkpoint | None = None,
        moments: MomentBounds = OF_ANY_RUN,
        moment_sizes: tuple[int, ...] | None = None,
    ) -> None:
        """`moments`, `moment_sizes`: what bounds the moments, and the bytes of one of each parameter."""
        self._line, self._own, self._keep = line, own, keep
        self._subject = WeightsOf(number, tuple(stage.shapes), STATE, moment_sizes)
        self._account = DownloadAccount(number, reporter, loop_s)
        like = self._subject.like
        self._wanted = StateWanted(parts=Parts.ALL, like=like, deadline_s=line.deadline_s, moments=moments)
        self._assembly = StateAssembly(like, keep, self._account.note, self._subject.moments)

    async def attempt(self, donors: tuple[str, ...]) -> ReplicaState | str:
        """Return the state, or why no donor gave all of it."""
        if self._own is not None:
            own, self._own = self._own, None
            await self._line.device.run(self._assembly.load)
            await self._line.device.run(self._assembly.seed, own_sections(own))

        async def refuse(donor: str, manifest: Manifest) -> str | None:
            # Anew each time: the donor before this one may have taken an hour.
            asked = [peer for peer in donors if peer != donor][:REPLICAS_ASKED_BESIDE]
            replies = await ask_manifests(self._line.network, asked, self._subject)
            return objection(manifest, list(replies.manifests.values()))

        wanted, converse = replace(self._wanted, objection=refuse), self._subject.converse(self._line.network)
        try:
            state = await download_state(donors, converse, wanted, self._line.device.run, self._assembly)
        except ConnectionError as error:
            return str(error)
        finally:
            self._account.close()
        self._account.done(self._assembly.mixed)
        return state

    def discard(self) -> None:
        """Remove the noted pieces: the state is where it belongs."""
        if self._keep is not None:
            self._keep.discard()


class ProgressLine:
    """Tells the owner how far a download is: by a bar, or by a line now and then. It tells nothing before `begin`."""

    def __init__(self, reporter: Reporter, now: Callable[[], float] = loop_s) -> None:
        self._reporter, self._now = reporter, now
        self._said_s: float | None = None

    def begin(self) -> None:
        self._said_s = self._now()

    def tell(self, share: float, line: str) -> None:
        if self._said_s is None:
            return
        drawn = self._reporter.draw is not None and self._reporter.draw(share, line)
        if not drawn and self._now() - self._said_s >= SAY_EVERY_S:
            self._said_s = self._now()
            self._reporter.say(line)

    def close(self) -> None:
        """Remove the bar."""
        if self._reporter.draw is not None:
            self._reporter.draw(1.0, "")


class DownloadAccount:
    """The lines that a person reads of a copy, and its events in the journal."""

    def __init__(self, stage: int, reporter: Reporter, now: Callable[[], float]) -> None:
        self._stage, self._reporter, self._now = stage, reporter, now
        self._progress = ProgressLine(reporter, now)
        self._begun_s: float | None = None
        self._donor: str | None = None
        self._round = self._total_bytes = self._held_bytes = self._fetched_bytes = 0
        self._since_s = 0.0
        self._since_bytes = 0

    def note(self, news: News) -> None:
        if self._begun_s is None:
            self._begun_s = self._now()
        match news:
            case DonorSelected():
                self._follow(news)
            case ChunkArrived():
                self._fetched_bytes += news.size_bytes
                self._held_bytes += news.size_bytes
                self._tell()
            case DonorLost():
                self._record("refused" if news.refused else "lost", news.donor, news.why)
                if news.refused:
                    self._reporter.say(f"refused the copy of {news.donor}: {news.why}")
                else:
                    self._reporter.say(f"lost {news.donor} while copying from it ({news.why}); what came is kept")

    def close(self) -> None:
        self._progress.close()

    def done(self, mixed: bool) -> None:
        seconds = self._seconds()
        rate = f" at {format_rate(self._fetched_bytes / seconds)}" if seconds > 0 else ""
        of_two = "; its parameters are those of more than one replica" if mixed else ""
        self._reporter.say(
            f"copied stage {self._stage}: {format_bytes(self._fetched_bytes)} in {format_duration(seconds)}"
            f"{rate}{of_two}"
        )
        self._record("done", self._donor)

    def _follow(self, news: DonorSelected) -> None:
        self._donor, self._round = news.donor, news.round
        self._total_bytes, self._held_bytes = news.total_bytes, news.held_bytes
        self._since_s = self._now()
        self._progress.begin()
        self._since_bytes = self._fetched_bytes
        what = "mixed" if news.settled_bytes else "resumed" if news.held_bytes else "began"
        words = {
            "began": format_bytes(news.total_bytes),
            "resumed": f"{format_bytes(news.held_bytes)} of {format_bytes(news.total_bytes)} are here already",
            "mixed": f"{format_bytes(news.held_bytes)} of {format_bytes(news.total_bytes)} are here already,"
            f" {format_bytes(news.settled_bytes)} of them whole parameters of another replica, which stay",
        }
        self._reporter.say(f"copying stage {self._stage} from {news.donor} (round {news.round}): {words[what]}")
        self._record(what, news.donor)

    def _tell(self) -> None:
        seconds = self._now() - self._since_s
        rate = (self._fetched_bytes - self._since_bytes) / seconds if seconds > 0 else 0.0
        share = self._held_bytes / self._total_bytes if self._total_bytes else 1.0
        self._progress.tell(share, progress_line(self._stage, self._held_bytes, self._total_bytes, rate))

    def _seconds(self) -> float:
        return 0.0 if self._begun_s is None else self._now() - self._begun_s

    def _record(self, what: str, donor: str | None, why: str | None = None) -> None:
        self._reporter.record(
            events.CatchUp(
                what=what,
                stage=self._stage,
                donor=donor,
                round=self._round,
                total_bytes=self._total_bytes,
                held_bytes=self._held_bytes,
                fetched_bytes=self._fetched_bytes,
                seconds=self._seconds(),
                why=why,
            )
        )


def progress_line(stage: int, held_bytes: int, total_bytes: int, bytes_per_s: float) -> str:
    share = held_bytes / total_bytes if total_bytes else 1.0
    text = f"copying stage {stage}: {format_bytes(held_bytes)} of {format_bytes(total_bytes)} ({share:.0%})"
    if bytes_per_s <= 0.0:
        return text
    return f"{text}, {format_rate(bytes_per_s)}, {format_duration((total_bytes - held_bytes) / bytes_per_s)} left"


def waiting_line(stage: int, now_unix_s: float, waited_s: float, again_s: float) -> str:
    """Return the line that a newcomer without a donor prints: since when it waits, and what to do."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_unix_s - waited_s))
    return (
        f"waiting for a replica of stage {stage} that gives its state, since {since}"
        f" ({format_duration(waited_s)}); asking again in {format_duration(again_s)}. If this lasts:"
        " can their addresses (noloco-node status) be reached from here? Or serve another stage with --stage, or Ctrl-C"
    )


class WeightsOf(NamedTuple):
    """A stage whose weights are asked for. `kind`: STATE of its replicas, SNAPSHOT of peers that keep a checkpoint.

    `moment_sizes`: bytes of one moment of each parameter; None for float32, or where no moments are asked for.
    """

    number: int
    shapes: tuple[tuple[int, ...], ...]
    kind: str
    moment_sizes: tuple[int, ...] | None = None

    @property
    def weight_bytes(self) -> int:
        return 4 * sum(map(prod, self.shapes))

    @property
    def pieces(self) -> int:
        return len(cut([4 * prod(shape) for shape in self.shapes]))

    @property
    def schema(self) -> Schema:
        return state_schema(self.shapes, self.moment_sizes)

    @property
    def like(self) -> tuple[Tensor, ...]:
        """Return tensors without memory of the weights' shapes."""
        return tuple(torch.empty(shape, device="meta") for shape in self.shapes)

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """Return tensors without memory like one moment of each: float32, or int8 where it takes other bytes."""
        sizes = self.moment_sizes or tuple(4 * prod(shape) for shape in self.shapes)
        return tuple(
            weight if size == weight.nbytes else torch.empty(size, dtype=torch.int8, device="meta")
            for weight, size in zip(self.like, sizes, strict=True)
        )

    def converse(self, network: PeerNetwork) -> Converse:
        return lambda peer: network.talk(peer, topic(self.kind, self.number), self.schema)

    async def fetch(
        self,
        network: PeerNetwork,
        order: Sequence[str],
        deadline_s: float,
        compute: Compute,
        objection: Objection = no_objection,
        *,
        passes: int = 1,
    ) -> ReplicaState:
        """Fetch the slow weights of the first peer that gives all of them; raises as `download_state`."""
        wanted = StateWanted(parts=Parts.SLOW, like=self.like, deadline_s=deadline_s, objection=objection)
        return await download_state(order, self.converse(network), wanted, compute, passes=passes)


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state of five sections may take over the slowest line."""
    return 60.0 + len(Section) * weight_bytes / slowest_bytes_per_s


class ManifestReplies(NamedTuple):
    """The manifests of the peers that answered, and the number of peers that are busy with others."""

    manifests: dict[str, Manifest]
    busy: int

    @property
    def offers(self) -> list[ReplicaSummary]:
        return [
            ReplicaSummary(
                peer=peer, round=each.round, inner_steps=each.inner_steps, progress=each.progress, norm=each.norm
            )
            for peer, each in self.manifests.items()
        ]


async def ask_manifests(network: PeerNetwork, peers: Iterable[str], subject: WeightsOf) -> ManifestReplies:
    """Return what each peer says of its weights, if it answers soon."""
    turns, converse = asyncio.Semaphore(ASKED_AT_ONCE), subject.converse(network)
    told, busy = dict[str, Manifest](), list[str]()

    async def ask(peer: str) -> None:
        async with turns:
            try:
                async with asyncio.timeout(PATIENCE_S), converse(peer) as conversation:
                    reply = await manifest_of(conversation, StateRequest(parts=Parts.OUTLINE), subject.pieces)
            except (ConnectionError, TimeoutError):
                return
            if isinstance(reply, Manifest):
                told[peer] = reply
            else:
                busy.append(peer)

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(ask(peer))
    return ManifestReplies({peer: told[peer] for peer in sorted(told)}, len(busy))
